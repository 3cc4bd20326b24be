# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, for the first of two ranks, float32.
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
# Saved for backward, beside the arguments and views of them:
#     t6: f32[2, 4096, 4096], 134,217,728 bytes
#     t10: f32[8192, 128256], 4,202,692,608 bytes
#     t4: i64[], 8 bytes
#     t7: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, labels, t_layer_weight, t_lm_head_weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # labels: "cpu i64[2, 4096]"
  # t_layer_weight: "cpu f32[2048, 4096]"
  ft127 = torch_all_gather_prim_impl(t_layer_weight, _torch_distributed_distributed_c10d_ProcessGroup_2, True, None)  # ft127: "FUTURE thunder.devices.Device(type='cpu') f32[4096, 4096]"
  # t_lm_head_weight: "cpu f32[64128, 4096]"
  ft129 = torch_all_gather_prim_impl(t_lm_head_weight, _torch_distributed_distributed_c10d_ProcessGroup_2, True, None)  # ft129: "FUTURE thunder.devices.Device(type='cpu') f32[128256, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t0 = Tensor.view(labels, -1)  # t0: "cpu i64[8192]"
  t1 = torch.unsqueeze(t0, 1)  # t1: "cpu i64[8192, 1]"
  t2 = torch.ne(t1, -100)  # t2: "cpu b8[8192, 1]"
  t3 = torch.where(t2, t1, 128256)  # t3: "cpu i64[8192, 1]"
  del t1
  t4 = torch.sum(t2, None, False, dtype=None)  # t4: "cpu i64[]"
  del t2
  t5 = torch_wait_prim_impl(ft127)  # t5: "cpu f32[4096, 4096]"
  del ft127

  # return F.linear(input, self.weight, self.bias)
  t6 = torch.nn.functional.linear(hidden, t5, None)  # t6: "cpu f32[2, 4096, 4096]"
  del t5
  t7 = torch_wait_prim_impl(ft129)  # t7: "cpu f32[128256, 4096]"
  del ft129
  t8 = torch.nn.functional.linear(t6, t7, None)  # t8: "cpu f32[2, 4096, 128256]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t9 = torch_prims_reshape_impl(t8, (8192, 128256))  # t9: "cpu f32[8192, 128256]"
  del t8
  t10 = torch.nn.functional.log_softmax(t9, 1)  # t10: "cpu f32[8192, 128256]"
  del t9
  t11 = torch.neg(t10)  # t11: "cpu f32[8192, 128256]"
  t12 = torch_pad_prim_impl(t11, 0.0, [(0, 0, 0), (0, 1, 0)])  # t12: "cpu f32[8192, 128257]"
  del t11
  t13 = torch.take_along_dim(t12, t3, 1)  # t13: "cpu f32[8192, 1]"
  del t12, t3
  t14 = torch.sum(t13, None, False, dtype=None)  # t14: "cpu f32[]"
  del t13
  t15 = torch.true_divide(t14, t4)  # t15: "cpu f32[]"
  del t14
  return {'output': (t15,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t15,)}, ((hidden, t6, t10, t0, t4, t7), ())


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
  t16, = cotangents
  # t16: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, t6, t10, t0, t4, t7, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # t6: "cpu f32[2, 4096, 4096]"
  # t10: "cpu f32[8192, 128256]"
  # t0: "cpu i64[8192]"
  # t4: "cpu i64[]"
  # t7: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t17 = torch.reshape(hidden, (-1, 4096))  # t17: "cpu f32[8192, 4096]"
  del hidden
  t18 = torch.reshape(t6, (-1, 4096))  # t18: "cpu f32[8192, 4096]"
  del t6
  t19 = torch_nll_loss_backward_impl(t16, t10, t0, None, 'mean', -100, t4)  # t19: "cpu f32[8192, 128256]"
  del t16, t0, t4
  t20 = torch.torch.ops.aten._log_softmax_backward_data(t19, t10, 1, torch.float32)  # t20: "cpu f32[8192, 128256]"
  del t19, t10
  t21 = torch_prims_reshape_impl(t20, (2, 4096, 128256))  # t21: "cpu f32[2, 4096, 128256]"
  del t20
  t22 = torch.reshape(t21, (-1, 128256))  # t22: "cpu f32[8192, 128256]"
  t23 = torch.matmul(t22, t7)  # t23: "cpu f32[8192, 4096]"
  del t22, t7
  t24 = torch.reshape(t23, (2, 4096, 4096))  # t24: "cpu f32[2, 4096, 4096]"
  del t23
  t25 = torch.reshape(t21, (-1, 128256))  # t25: "cpu f32[8192, 128256]"
  del t21
  t26 = torch.permute(t25, (1, 0))  # t26: "cpu f32[128256, 8192]"
  del t25
  t27 = torch.matmul(t26, t18)  # t27: "cpu f32[128256, 4096]"
  del t26, t18
  t28 = torch.reshape(t24, (-1, 4096))  # t28: "cpu f32[8192, 4096]"
  del t24
  t29 = torch.permute(t28, (1, 0))  # t29: "cpu f32[4096, 8192]"
  del t28
  t30 = torch.matmul(t29, t17)  # t30: "cpu f32[4096, 4096]"
  del t29, t17
  t31 = torch.true_divide(t27, 2)  # t31: "cpu f32[128256, 4096]"
  del t27
  ft192 = torch_reduce_scatter_prim_impl(t31, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, None)  # ft192: "FUTURE thunder.devices.Device(type='cpu') f32[64128, 4096]"
  del t31
  t32 = torch.true_divide(t30, 2)  # t32: "cpu f32[4096, 4096]"
  del t30
  ft195 = torch_reduce_scatter_prim_impl(t32, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, None)  # ft195: "FUTURE thunder.devices.Device(type='cpu') f32[2048, 4096]"
  del t32
  t33 = torch_wait_prim_impl(ft192)  # t33: "cpu f32[64128, 4096]"
  del ft192
  t34 = torch_wait_prim_impl(ft195)  # t34: "cpu f32[2048, 4096]"
  del ft195
  return (None, None, t34, t33)
