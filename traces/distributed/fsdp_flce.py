# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, for the first of two ranks, float32.
#
#         def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
#             """The loss."""
#             logits = self.lm_head(self.layer(hidden))
#             return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
#     def fsdp(step: ThunderModule) -> ThunderModule:
#         """The same with parameters divided among ranks."""
#         return thunder.distributed.fsdp(step, device=CPU)
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
  # t_layer_weight: "cpu f32[2048, 4096]"
  ft77 = torch_all_gather_prim_impl(t_layer_weight, _torch_distributed_distributed_c10d_ProcessGroup_2, True, None)  # ft77: "FUTURE thunder.devices.Device(type='cpu') f32[4096, 4096]"
  # t_lm_head_weight: "cpu f32[64128, 4096]"
  ft79 = torch_all_gather_prim_impl(t_lm_head_weight, _torch_distributed_distributed_c10d_ProcessGroup_2, True, None)  # ft79: "FUTURE thunder.devices.Device(type='cpu') f32[128256, 4096]"
  t0 = torch_wait_prim_impl(ft77)  # t0: "cpu f32[4096, 4096]"
  del ft77

  # return F.linear(input, self.weight, self.bias)
  t1 = torch.nn.functional.linear(hidden, t0, None)  # t1: "cpu f32[2, 4096, 4096]"
  del t0
  t2 = torch_wait_prim_impl(ft79)  # t2: "cpu f32[128256, 4096]"
  del ft79

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  (t3, t4, t5, t6) = flce_linear_cross_entropy_fwd(
    (t1, t2, labels), names=("input", "linear_weight", "target"), loss={'reduction': "mean", 'ignore_index': -100},
    needs_grad=("input", "linear_weight"), plan={'strategy': "gradients_in_forward", 'chunk_rows': 1024})
    # x = t1, W = t2, y = labels
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
  del t1, t2
  return {'output': (t3,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t3,)}, ((hidden, t4, t5, t6), ())


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
  hidden, t4, t5, t6, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # t4: "cpu i64[]"
  # t5: "cpu f32[2, 4096, 4096]"
  # t6: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t8 = torch.reshape(hidden, (-1, 4096))  # t8: "cpu f32[8192, 4096]"
  del hidden
  (t9, t10) = flce_scale_gradients(t7, t4, t5, t6)
    # t5 *= grad    skipped where that is 1  PyTorch
    # t6 *= grad    skipped where that is 1  PyTorch
  del t7, t4, t5, t6
  t11 = torch.reshape(t9, (-1, 4096))  # t11: "cpu f32[8192, 4096]"
  del t9
  t12 = torch.permute(t11, (1, 0))  # t12: "cpu f32[4096, 8192]"
  del t11
  t13 = torch.matmul(t12, t8)  # t13: "cpu f32[4096, 4096]"
  del t12, t8
  t14 = torch.true_divide(t10, 2)  # t14: "cpu f32[128256, 4096]"
  del t10
  ft87 = torch_reduce_scatter_prim_impl(t14, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, None)  # ft87: "FUTURE thunder.devices.Device(type='cpu') f32[64128, 4096]"
  del t14
  t15 = torch.true_divide(t13, 2)  # t15: "cpu f32[4096, 4096]"
  del t13
  ft90 = torch_reduce_scatter_prim_impl(t15, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, None)  # ft90: "FUTURE thunder.devices.Device(type='cpu') f32[2048, 4096]"
  del t15
  t16 = torch_wait_prim_impl(ft87)  # t16: "cpu f32[64128, 4096]"
  del ft87
  t17 = torch_wait_prim_impl(ft90)  # t17: "cpu f32[2048, 4096]"
  del ft90
  return (None, None, t17, t16)
