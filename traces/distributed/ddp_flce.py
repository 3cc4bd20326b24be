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
# fused, gradients in forward, chunks of 1024 tokens
# Saved for backward, beside the arguments and views of them:
#     t4: i64[], 8 bytes
#     t5: f32[2, 4096, 4096], 134,217,728 bytes
#     t6: f32[128256, 4096], 2,101,346,304 bytes

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
  # t_lm_head_weight: "cpu f32[128256, 4096]"
  t0 = shallow_copy(t_layer_weight)  # t0: "cpu f32[4096, 4096]"
  t1 = shallow_copy(t_lm_head_weight)  # t1: "cpu f32[128256, 4096]"

  # return F.linear(input, self.weight, self.bias)
  t2 = torch.nn.functional.linear(hidden, t0, None)  # t2: "cpu f32[2, 4096, 4096]"
  del t0

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  (t3, t4, t5, t6) = flce_linear_cross_entropy_fwd(
    (t2, t1, labels), names=("input", "linear_weight", "target"), loss={'reduction': "mean", 'ignore_index': -100},
    needs_grad=("input", "linear_weight"), plan={'strategy': "gradients_in_forward", 'chunk_rows': 1024})
    # x = t2, W = t1, y = labels
    # loss = t3: f32[], valid_count = t4: i64[], dX = t5: f32[2, 4096, 4096], dW = t6: f32[128256, 4096]
    # valid_count i64[] = count of valid rows    targets are checked                           PyTorch
    # x, y = valid rows of x, y
    # for each chunk of C tokens (8 × 1024):
    #   logits f32[C, 128256] = x @ W.t()                                                      PyTorch
    #   row_max, row_log_sum f32[C] = max(logits), log(sum(exp(logits - row_max))); logits[y]  PyTorch
    #   dlogits f32[C, 128256] = s (softmax(logits) - one_hot(y))    in place                  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                                PyTorch
    #   dX f32[C, 4096] = dlogits @ W                                                          PyTorch
    # loss f32[] = mean over valid rows of row_log_sum + row_max - logits[y]                   PyTorch
  del t2, t1
  return {'output': (t3,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t3,)}, ((t4, t5, t6, hidden), ())


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
  t7, = cotangents
  # t7: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t4, t5, t6, hidden, = C0
  # t4: "cpu i64[]"
  # t5: "cpu f32[2, 4096, 4096]"
  # t6: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t8, t9) = flce_scale_gradients(t7, t4, t5, t6)
    # t5 *= grad    skipped where that is 1  PyTorch
    # t6 *= grad    skipped where that is 1  PyTorch
  del t7, t4, t5, t6
  t10 = torch.reshape(t8, (-1, 4096))  # t10: "cpu f32[8192, 4096]"
  del t8
  t11 = torch.permute(t10, (1, 0))  # t11: "cpu f32[4096, 8192]"
  del t10
  t12 = torch.reshape(hidden, (-1, 4096))  # t12: "cpu f32[8192, 4096]"
  del hidden
  t13 = torch.matmul(t11, t12)  # t13: "cpu f32[4096, 4096]"
  del t11, t12
  t14 = torch.true_divide(t9, 2)  # t14: "cpu f32[128256, 4096]"
  del t9
  ft84 = torch_all_reduce_prim_impl(t14, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, False)  # ft84: "FUTURE thunder.devices.Device(type='cpu') f32[128256, 4096]"
  del t14
  t15 = torch.true_divide(t13, 2)  # t15: "cpu f32[4096, 4096]"
  del t13
  ft87 = torch_all_reduce_prim_impl(t15, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, False)  # ft87: "FUTURE thunder.devices.Device(type='cpu') f32[4096, 4096]"
  del t15
  t16 = torch_wait_prim_impl(ft84)  # t16: "cpu f32[128256, 4096]"
  del ft84
  t17 = torch_wait_prim_impl(ft87)  # t17: "cpu f32[4096, 4096]"
  del ft87
  return (None, None, t17, t16)
