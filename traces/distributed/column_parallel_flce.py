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
# fused, the vocabulary over 2 ranks, gradients in forward, chunks of 1024 tokens
# Saved for backward, beside the arguments and views of them:
#     t2: i64[], 8 bytes
#     t3: f32[2, 4096, 4096], 134,217,728 bytes
#     t4: f32[64128, 4096], 1,050,673,152 bytes

# Constructed by Delete Last Used
import torch
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
  (t1, t2, t3, t4) = flce_linear_cross_entropy_fwd(
    (t0, t_lm_head_weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "mean", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "gradients_in_forward", 'chunk_rows': 1024},
    shard={'group': "1", 'ranks': 2, 'rank': 0, 'start': 0, 'columns': 64128, 'largest': 64128, 'vocab': 128256})
    # x = t0, W = t_lm_head_weight, y = labels
    # loss = t1: f32[], valid_count = t2: i64[], dX = t3: f32[2, 4096, 4096], dW = t4: f32[64128, 4096]
    # valid_count i64[] = count of valid rows    targets are checked                           PyTorch
    # x, y = valid rows of x, y
    # for each chunk of C tokens (8 × 1024):
    #   logits f32[C, 64128] = x @ W.t()                                                       PyTorch
    #   row_max, row_log_sum f32[C] = max(logits), log(sum(exp(logits - row_max))); logits[y]  PyTorch
    #   row_max, row_log_sum = combined over the ranks                                         gloo
    #   dlogits f32[C, 64128] = A softmax(logits) - B one_hot(y)    in place                   PyTorch
    #   dW f32[64128, 4096] += dlogits.t() @ x                                                 PyTorch
    #   dX f32[C, 4096] = dlogits @ W                                                          PyTorch
    #   dX f32[C, 4096] = summed over the ranks                                                gloo
    # loss f32[] = mean over valid rows of row_log_sum + row_max - logits[y]                   PyTorch
  del t0
  return {'output': (t1,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t1,)}, ((t2, t3, t4, hidden), ())


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
  t5, = cotangents
  # t5: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t2, t3, t4, hidden, = C0
  # t2: "cpu i64[]"
  # t3: "cpu f32[2, 4096, 4096]"
  # t4: "cpu f32[64128, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t6, t7) = flce_scale_gradients(t5, t2, t3, t4)
    # t3 *= grad    skipped where that is 1  PyTorch
    # t4 *= grad    skipped where that is 1  PyTorch
  del t5, t2, t3, t4
  t8 = torch.reshape(t6, (-1, 4096))  # t8: "cpu f32[8192, 4096]"
  del t6
  t9 = torch.permute(t8, (1, 0))  # t9: "cpu f32[4096, 8192]"
  del t8
  t10 = torch.reshape(hidden, (-1, 4096))  # t10: "cpu f32[8192, 4096]"
  del hidden
  t11 = torch.matmul(t9, t10)  # t11: "cpu f32[4096, 4096]"
  del t9, t10
  return (None, None, t11, t7)
