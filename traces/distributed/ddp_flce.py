# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, for the first of two ranks, float32.
#
#         def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
#             """The loss."""
#             logits = self.lm_head(self.layer(hidden))
#             return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
#     def ddp(step: ThunderModule) -> ThunderModule:
#         """Each rank with a batch of its own: dW is averaged in its memory, while the backward of the layer runs."""
#         return thunder.distributed.ddp(step, broadcast_from=None)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: f32[2, 4096, 4096], 134,217,728 bytes
#     t10: f32[128256, 4096], 2,101,346,304 bytes

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
  # t_lm_head_weight: "cpu f32[128256, 4096]"
  t0 = shallow_copy(t_layer_weight)  # t0: "cpu f32[4096, 4096]"

  # return F.linear(input, self.weight, self.bias)
  t1 = torch.nn.functional.linear(hidden, t0, None)  # t1: "cpu f32[2, 4096, 4096]"
  del t0

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t2 = Tensor.view(labels, -1)  # t2: "cpu i64[8192]"
  t3 = torch.reshape(t2, (2, 4096))  # t3: "cpu i64[2, 4096]"
  del t2
  t4 = shallow_copy(t_lm_head_weight)  # t4: "cpu f32[128256, 4096]"
  (t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(t1, t4, t3, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t1, W = t4, y = t3
    # loss = t5: f32[], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX = t9: f32[2, 4096, 4096], dW = t10: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t6, t7, t1, t4, t3
  return {'output': (t5,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t5,)}, ((t8, t9, t10, hidden), ())


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
  t11, = cotangents
  # t11: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t10, hidden, = C0
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4096, 4096]"
  # t10: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t12, t13) = scale_gradients(t11, t8, t9, t10)
    # t9 f32[2, 4096, 4096] = t9 * where(t8 == 0, 0, t11)  (skipped where that is 1)  PyTorch
    # t10 f32[128256, 4096] = t10 * where(t8 == 0, 0, t11)  (skipped where that is 1)   PyTorch
  del t11, t8, t9, t10
  ft103 = average_gradient(t13, _torch_distributed_distributed_c10d_ProcessGroup_0, _DistParallelType_REPLICATED_1)  # ft103: "FUTURE thunder.devices.Device(type='cpu') f32[128256, 4096]"
  del t13
  t14 = torch.reshape(t12, (-1, 4096))  # t14: "cpu f32[8192, 4096]"
  del t12
  t15 = torch.permute(t14, (1, 0))  # t15: "cpu f32[4096, 8192]"
  del t14
  t16 = torch.reshape(hidden, (-1, 4096))  # t16: "cpu f32[8192, 4096]"
  del hidden
  t17 = torch.matmul(t15, t16)  # t17: "cpu f32[4096, 4096]"
  del t15, t16
  t18 = torch.true_divide(t17, 2)  # t18: "cpu f32[4096, 4096]"
  del t17
  ft125 = torch_all_reduce_prim_impl(t18, _DistributedReduceOps_SUM_2, _torch_distributed_distributed_c10d_ProcessGroup_0, True, False)  # ft125: "FUTURE thunder.devices.Device(type='cpu') f32[4096, 4096]"
  del t18
  t19 = torch_wait_prim_impl(ft103)  # t19: "cpu f32[128256, 4096]"
  del ft103
  t20 = torch_wait_prim_impl(ft125)  # t20: "cpu f32[4096, 4096]"
  del ft125
  return (None, None, t20, t19)
