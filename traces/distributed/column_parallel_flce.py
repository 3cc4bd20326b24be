# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, for the first of two ranks, float32.
#
#         def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
#             """The loss."""
#             logits = self.lm_head(self.layer(hidden))
#             return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
#     def column_parallel(step: ThunderModule) -> ThunderModule:
#         """The head's vocabulary divided among ranks."""
#         return thunder.distributed.column_parallel(step, ["lm_head"], device=torch.device("cpu", 0))
#
# fused, the vocabulary over 2 ranks, gradients in forward, chunks of 128 tokens
# Saved for backward, beside the arguments and views of them:
#     t6: i64[], 8 bytes
#     t7: f32[2, 4096, 4096], 134,217,728 bytes
#     t8: f32[64128, 4096], 1,050,673,152 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, labels, t_layer_weight, t_lm_head_weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # labels: "cpu i64[2, 4096]"
  # t_layer_weight: "cpu f32[4096, 4096]"
  # t_lm_head_weight: "cpu f32[64128, 4096]"
  t0 = torch.nn.functional.linear(hidden, t_layer_weight, None)  # t0: "cpu f32[2, 4096, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t1 = Tensor.view(labels, -1)  # t1: "cpu i64[8192]"
  t2 = torch.reshape(t1, (2, 4096))  # t2: "cpu i64[2, 4096]"
  del t1
  (t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(t0, t_lm_head_weight, t2, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=128, shard={'group': "1", 'ranks': 2, 'rank': 0, 'start': 0, 'columns': 64128, 'largest': 64128, 'vocab': 128256})
    # x = t0, W = t_lm_head_weight, y = t2
    # loss = t3: f32[], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[], dX = t7: f32[2, 4096, 4096], dW = t8: f32[64128, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                       PyTorch
    # x, y = x[valid], y[valid]                                                                                            PyTorch
    # s f32[8192] = 1 / valid_count                                                                                        PyTorch
    # for each chunk of 128 tokens, 64 in all:
    #   logits f32[128, 64128] = x[chunk] @ W.t()                                                                          PyTorch
    #   logits_y f32[128] = logits[y[chunk]]                                                                               PyTorch
    #   row_max, row_log_sum f32[128] = max_v(logits), log(sum_v(exp(logits - row_max)))                                   PyTorch
    #   row_max, row_log_sum, logits_y = combined(row_max, row_log_sum, logits_y)  (over the ranks)                        gloo
    #   dlogits f32[128, 64128] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dX_part f32[128, 4096] = dlogits @ W                                                                               PyTorch
    #   dW f32[64128, 4096] += dlogits.t() @ x[chunk]                                                                      PyTorch
    #   dX_part = summed(dX_part)  (over the ranks)                                                                        gloo
    #   dX[chunk] f32[128, 4096] = dX_part  (rounded once)                                                                 PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                               PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                        PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                 PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                         PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                     PyTorch
  del t4, t5, t0, t2
  return {'output': (t3,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t3,)}, ((t6, t7, t8, hidden), ())


# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, C1, = saved_for_backward
  # C0: "Collection"
  # C1: "Collection"
  clear_mutable_collection(saved_for_backward)
  clear_mutable_collection(C1)
  del C1, saved_for_backward
  t9, = cotangents
  # t9: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t6, t7, t8, hidden, = C0
  # t6: "cpu i64[]"
  # t7: "cpu f32[2, 4096, 4096]"
  # t8: "cpu f32[64128, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t10, t11) = scale_gradients(t9, t6, t7, t8)
    # t7 f32[2, 4096, 4096] = t7 * where(t6 == 0, 0, t9)  (skipped where that is 1)  PyTorch
    # t8 f32[64128, 4096] = t8 * where(t6 == 0, 0, t9)  (skipped where that is 1)    PyTorch
  del t9, t6, t7, t8
  t12 = torch.reshape(t10, (-1, 4096))  # t12: "cpu f32[8192, 4096]"
  del t10
  t13 = torch.permute(t12, (1, 0))  # t13: "cpu f32[4096, 8192]"
  del t12
  t14 = torch.reshape(hidden, (-1, 4096))  # t14: "cpu f32[8192, 4096]"
  del hidden
  t15 = torch.matmul(t13, t14)  # t15: "cpu f32[4096, 4096]"
  del t13, t14
  return (None, None, t15, t11)
