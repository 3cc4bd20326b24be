# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, for the first of two ranks, float32.
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
# Saved for backward, beside the arguments and views of them:
#     t1: f32[2, 4096, 4096], 134,217,728 bytes
#     t13: f32[8192, 128256], 4,202,692,608 bytes
#     t7: i64[], 8 bytes

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
  t1 = shallow_copy(t0)  # t1: "cpu f32[2, 4096, 4096]"
  del t0
  t2 = torch.nn.functional.linear(t1, t_lm_head_weight, None)  # t2: "cpu f32[2, 4096, 64128]"
  ft207 = torch_all_gather_prim_impl(t2, _torch_distributed_distributed_c10d_ProcessGroup_2, True, 0)  # ft207: "FUTURE thunder.devices.Device(type='cpu') f32[4, 4096, 64128]"
  del t2
  t3 = Tensor.view(labels, -1)  # t3: "cpu i64[8192]"
  t4 = torch.unsqueeze(t3, 1)  # t4: "cpu i64[8192, 1]"
  t5 = torch.ne(t4, -100)  # t5: "cpu b8[8192, 1]"
  t6 = torch.where(t5, t4, 128256)  # t6: "cpu i64[8192, 1]"
  del t4
  t7 = torch.sum(t5, None, False, dtype=None)  # t7: "cpu i64[]"
  del t5
  t8 = torch_wait_prim_impl(ft207)  # t8: "cpu f32[4, 4096, 64128]"
  del ft207
  (t9, t10) = torch.chunk(t8, 2, 0)
  del t8
  t11 = torch.cat((t9, t10), -1)  # t11: "cpu f32[2, 4096, 128256]"
  del t9, t10
  t12 = torch_prims_reshape_impl(t11, (8192, 128256))  # t12: "cpu f32[8192, 128256]"
  del t11
  t13 = torch.nn.functional.log_softmax(t12, 1)  # t13: "cpu f32[8192, 128256]"
  del t12
  t14 = torch.neg(t13)  # t14: "cpu f32[8192, 128256]"
  t15 = torch_pad_prim_impl(t14, 0.0, [(0, 0, 0), (0, 1, 0)])  # t15: "cpu f32[8192, 128257]"
  del t14
  t16 = torch.take_along_dim(t15, t6, 1)  # t16: "cpu f32[8192, 1]"
  del t15, t6
  t17 = torch.sum(t16, None, False, dtype=None)  # t17: "cpu f32[]"
  del t16
  t18 = torch.true_divide(t17, t7)  # t18: "cpu f32[]"
  del t17
  return {'output': (t18,), 'flat_args': [hidden, labels, t_layer_weight, t_lm_head_weight], 'flat_output': (t18,)}, ((t1, hidden, t13, t3, t7, t_lm_head_weight), ())


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
  t19, = cotangents
  # t19: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, hidden, t13, t3, t7, t_lm_head_weight, = C0
  # t1: "cpu f32[2, 4096, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # t13: "cpu f32[8192, 128256]"
  # t3: "cpu i64[8192]"
  # t7: "cpu i64[]"
  # t_lm_head_weight: "cpu f32[64128, 4096]"
  clear_mutable_collection(C0)
  del C0
  t20 = torch.reshape(t1, (-1, 4096))  # t20: "cpu f32[8192, 4096]"
  del t1
  t21 = torch.reshape(hidden, (-1, 4096))  # t21: "cpu f32[8192, 4096]"
  del hidden
  t22 = torch_nll_loss_backward_impl(t19, t13, t3, None, 'mean', -100, t7)  # t22: "cpu f32[8192, 128256]"
  del t19, t3, t7
  t23 = torch.torch.ops.aten._log_softmax_backward_data(t22, t13, 1, torch.float32)  # t23: "cpu f32[8192, 128256]"
  del t22, t13
  t24 = torch_prims_reshape_impl(t23, (2, 4096, 128256))  # t24: "cpu f32[2, 4096, 128256]"
  del t23
  (t25, t26) = torch.chunk(t24, 2, 2)
  del t26, t24
  t27 = torch.reshape(t25, (-1, 64128))  # t27: "cpu f32[8192, 64128]"
  t28 = torch.matmul(t27, t_lm_head_weight)  # t28: "cpu f32[8192, 4096]"
  del t27, t_lm_head_weight
  t29 = torch.reshape(t28, (2, 4096, 4096))  # t29: "cpu f32[2, 4096, 4096]"
  del t28
  ft268 = torch_all_reduce_prim_impl(t29, _DistributedReduceOps_SUM_0, _torch_distributed_distributed_c10d_ProcessGroup_1, True, True)  # ft268: "FUTURE thunder.devices.Device(type='cpu') f32[2, 4096, 4096]"
  del t29
  t30 = torch.reshape(t25, (-1, 64128))  # t30: "cpu f32[8192, 64128]"
  del t25
  t31 = torch.permute(t30, (1, 0))  # t31: "cpu f32[64128, 8192]"
  del t30
  t32 = torch.matmul(t31, t20)  # t32: "cpu f32[64128, 4096]"
  del t31, t20
  t33 = torch_wait_prim_impl(ft268)  # t33: "cpu f32[2, 4096, 4096]"
  del ft268
  t34 = torch.reshape(t33, (-1, 4096))  # t34: "cpu f32[8192, 4096]"
  del t33
  t35 = torch.permute(t34, (1, 0))  # t35: "cpu f32[4096, 8192]"
  del t34
  t36 = torch.matmul(t35, t21)  # t36: "cpu f32[4096, 4096]"
  del t35, t21
  return (None, None, t36, t32)
