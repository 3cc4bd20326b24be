# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, for the first of two ranks, float32.
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
# Saved for backward, beside the arguments and views of them:
#     t6: f32[8192, 128256], 4,202,692,608 bytes
#     t14: i64[], 8 bytes
#     t1: f32[128256, 4096], 2,101,346,304 bytes
#     t2: f32[2, 4096, 4096], 134,217,728 bytes

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
  t1 = shallow_copy(t_lm_head_weight)  # t1: "cpu f32[128256, 4096]"

  # return F.linear(input, self.weight, self.bias)
  t2 = torch.nn.functional.linear(hidden, t0, None)  # t2: "cpu f32[2, 4096, 4096]"
  del t0
  t3 = torch.nn.functional.linear(t2, t1, None)  # t3: "cpu f32[2, 4096, 128256]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t4 = torch_prims_reshape_impl(t3, (8192, 128256))  # t4: "cpu f32[8192, 128256]"
  del t3
  t5 = Tensor.view(labels, -1)  # t5: "cpu i64[8192]"
  t6 = torch.nn.functional.log_softmax(t4, 1)  # t6: "cpu f32[8192, 128256]"
  del t4
  t7 = torch.neg(t6)  # t7: "cpu f32[8192, 128256]"
  t8 = torch.unsqueeze(t5, 1)  # t8: "cpu i64[8192, 1]"
  t9 = torch.ne(t8, -100)  # t9: "cpu b8[8192, 1]"
  t10 = torch.where(t9, t8, 128256)  # t10: "cpu i64[8192, 1]"
  del t8
  t11 = torch_pad_prim_impl(t7, 0.0, [(0, 0, 0), (0, 1, 0)])  # t11: "cpu f32[8192, 128257]"
  del t7
  t12 = torch.take_along_dim(t11, t10, 1)  # t12: "cpu f32[8192, 1]"
  del t11, t10
  t13 = torch.sum(t12, None, False, dtype=None)  # t13: "cpu f32[]"
  del t12
  t14 = torch.sum(t9, None, False, dtype=None)  # t14: "cpu i64[]"
  del t9
  t15 = torch.true_divide(t13, t14)  # t15: "cpu f32[]"
  del t13
  return {'output': (t15,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t15,)}, ((t6, t5, t14, t1, t2, hidden), ())


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
  t6, t5, t14, t1, t2, hidden, = C0
  # t6: "cpu f32[8192, 128256]"
  # t5: "cpu i64[8192]"
  # t14: "cpu i64[]"
  # t1: "cpu f32[128256, 4096]"
  # t2: "cpu f32[2, 4096, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t17 = torch_nll_loss_backward_impl(t16, t6, t5, None, 'mean', -100, t14)  # t17: "cpu f32[8192, 128256]"
  del t16, t5, t14
  t18 = torch.torch.ops.aten._log_softmax_backward_data(t17, t6, 1, torch.float32)  # t18: "cpu f32[8192, 128256]"
  del t17, t6
  t19 = torch_prims_reshape_impl(t18, (2, 4096, 128256))  # t19: "cpu f32[2, 4096, 128256]"
  del t18
  t20 = torch.reshape(t19, (-1, 128256))  # t20: "cpu f32[8192, 128256]"
  t21 = torch.matmul(t20, t1)  # t21: "cpu f32[8192, 4096]"
  del t20, t1
  t22 = torch.reshape(t21, (2, 4096, 4096))  # t22: "cpu f32[2, 4096, 4096]"
  del t21
  t23 = torch.reshape(t19, (-1, 128256))  # t23: "cpu f32[8192, 128256]"
  del t19
  t24 = torch.permute(t23, (1, 0))  # t24: "cpu f32[128256, 8192]"
  del t23
  t25 = torch.reshape(t2, (-1, 4096))  # t25: "cpu f32[8192, 4096]"
  del t2
  t26 = torch.matmul(t24, t25)  # t26: "cpu f32[128256, 4096]"
  del t24, t25
  t27 = torch.reshape(t22, (-1, 4096))  # t27: "cpu f32[8192, 4096]"
  del t22
  t28 = torch.permute(t27, (1, 0))  # t28: "cpu f32[4096, 8192]"
  del t27
  t29 = torch.reshape(hidden, (-1, 4096))  # t29: "cpu f32[8192, 4096]"
  del hidden
  t30 = torch.matmul(t28, t29)  # t30: "cpu f32[4096, 4096]"
  del t28, t29
  t31 = torch.true_divide(t26, 2)  # t31: "cpu f32[128256, 4096]"
  del t26
  ft189 = torch_all_reduce_prim_impl(t31, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, False)  # ft189: "FUTURE thunder.devices.Device(type='cpu') f32[128256, 4096]"
  del t31
  t32 = torch.true_divide(t30, 2)  # t32: "cpu f32[4096, 4096]"
  del t30
  ft192 = torch_all_reduce_prim_impl(t32, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, False)  # ft192: "FUTURE thunder.devices.Device(type='cpu') f32[4096, 4096]"
  del t32
  t33 = torch_wait_prim_impl(ft189)  # t33: "cpu f32[128256, 4096]"
  del ft189
  t34 = torch_wait_prim_impl(ft192)  # t34: "cpu f32[4096, 4096]"
  del ft192
  return (None, None, t34, t33)
