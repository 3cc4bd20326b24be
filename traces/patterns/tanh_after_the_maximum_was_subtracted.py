# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def tanh_after_the_maximum_was_subtracted(hidden, weight, labels):
#         logits = F.linear(hidden, weight)
#         return _loss(torch.tanh(logits - logits.amax(-1, keepdim=True)), labels)
#
# not fused, because the logits are changed between the linear and the loss (by tanh after their maximum was subtracted)
# Saved for backward, beside the arguments and views of them:
#     t9: f32[8192, 128256], 4,202,692,608 bytes
#     t12: f32[8192], 32,768 bytes
#     t13: f32[8192], 32,768 bytes
#     t14: i64[], 8 bytes
#     t8: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t2: f32[2, 4096], 32,768 bytes
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # return _loss(torch.tanh(logits - logits.amax(-1, keepdim=True)), labels)
  t1 = shallow_copy(t0)  # t1: "cpu f32[2, 4096, 128256]"
  t2 = torch.amax(t1, (2,))  # t2: "cpu f32[2, 4096]"
  t3 = torch.unsqueeze(t2, 2)  # t3: "cpu f32[2, 4096, 1]"
  t4 = Tensor.expand(t3, [2, 4096, 1])  # t4: "cpu f32[2, 4096, 1]"
  del t3
  t5 = shallow_copy(t4)  # t5: "cpu f32[2, 4096, 1]"
  del t4
  t6 = Tensor.expand(t5, (2, 4096, 128256))  # t6: "cpu f32[2, 4096, 128256]"
  del t5
  t7 = torch.sub(t0, t6, alpha=1)  # t7: "cpu f32[2, 4096, 128256]"
  del t0, t6
  t8 = torch.tanh(t7)  # t8: "cpu f32[2, 4096, 128256]"
  del t7

  # return single_device_symbol(*args, **kwargs)
  t9 = torch_prims_reshape_impl(t8, (8192, 128256))  # t9: "cpu f32[8192, 128256]"
  t10 = torch.reshape(labels, (-1,))  # t10: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t11, t12, t13, t14) = cross_entropy_fwd(t9, t10, reduction='mean', ignore_index=-100)
  return {'output': (t11,), 'flat_args': [hidden, weight, labels], 'flat_output': (t11,)}, ((t9, t10, t12, t13, t14, t8, t2, t1, weight, hidden), ())


# Constructed by Delete Last Used
import torch
from torch import Tensor
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
  t15, = cotangents
  # t15: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t9, t10, t12, t13, t14, t8, t2, t1, weight, hidden, = C0
  # t9: "cpu f32[8192, 128256]"
  # t10: "cpu i64[8192]"
  # t12: "cpu f32[8192]"
  # t13: "cpu f32[8192]"
  # t14: "cpu i64[]"
  # t8: "cpu f32[2, 4096, 128256]"
  # t2: "cpu f32[2, 4096]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t16 = cross_entropy_bwd(t15, t9, t10, t12, t13, t14, reduction='mean', ignore_index=-100)  # t16: "cpu f32[8192, 128256]"
  del t15, t9, t10, t12, t13, t14
  t17 = torch_prims_reshape_impl(t16, (2, 4096, 128256))  # t17: "cpu f32[2, 4096, 128256]"
  del t16
  t18 = torch.mul(t8, t8)  # t18: "cpu f32[2, 4096, 128256]"
  del t8
  t19 = torch.sub(1, t18, alpha=1)  # t19: "cpu f32[2, 4096, 128256]"
  del t18
  t20 = torch.mul(t17, t19)  # t20: "cpu f32[2, 4096, 128256]"
  del t17, t19
  t21 = torch.neg(t20)  # t21: "cpu f32[2, 4096, 128256]"
  t22 = torch.sum(t21, (2,), False, dtype=None)  # t22: "cpu f32[2, 4096]"
  del t21
  t23 = torch.unsqueeze(t22, 2)  # t23: "cpu f32[2, 4096, 1]"
  del t22
  t24 = Tensor.expand(t23, [2, 4096, 1])  # t24: "cpu f32[2, 4096, 1]"
  del t23
  t25 = torch.sum(t24, (2,), False, dtype=None)  # t25: "cpu f32[2, 4096]"
  del t24
  t26 = torch.unsqueeze(t25, 2)  # t26: "cpu f32[2, 4096, 1]"
  del t25
  t27 = Tensor.expand(t26, [2, 4096, 1])  # t27: "cpu f32[2, 4096, 1]"
  del t26
  t28 = Tensor.expand(t27, (2, 4096, 128256))  # t28: "cpu f32[2, 4096, 128256]"
  del t27
  t29 = torch.unsqueeze(t2, 2)  # t29: "cpu f32[2, 4096, 1]"
  del t2
  t30 = Tensor.expand(t29, [2, 4096, 1])  # t30: "cpu f32[2, 4096, 1]"
  del t29
  t31 = Tensor.expand(t30, (2, 4096, 128256))  # t31: "cpu f32[2, 4096, 128256]"
  del t30
  t32 = torch.eq(t1, t31)  # t32: "cpu b8[2, 4096, 128256]"
  del t1, t31
  t33 = torch.sum(t32, (2,))  # t33: "cpu i64[2, 4096]"
  t34 = torch.unsqueeze(t33, 2)  # t34: "cpu b8[2, 4096, 1]"
  del t33
  t35 = Tensor.expand(t34, [2, 4096, 1])  # t35: "cpu b8[2, 4096, 1]"
  del t34
  t36 = torch.mul(t28, t32)  # t36: "cpu f32[2, 4096, 128256]"
  del t28, t32
  t37 = torch.true_divide(t36, t35)  # t37: "cpu f32[2, 4096, 128256]"
  del t36, t35
  t38 = Tensor.to(t37, torch.float32, copy=True)  # t38: "cpu f32[2, 4096, 128256]"
  del t37
  t39 = torch.add(t20, t38, alpha=1)  # t39: "cpu f32[2, 4096, 128256]"
  del t20, t38
  t40 = torch.reshape(t39, (-1, 128256))  # t40: "cpu f32[8192, 128256]"
  t41 = torch.matmul(t40, weight)  # t41: "cpu f32[8192, 4096]"
  del t40, weight
  t42 = torch.reshape(t41, (2, 4096, 4096))  # t42: "cpu f32[2, 4096, 4096]"
  del t41
  t43 = torch.reshape(t39, (-1, 128256))  # t43: "cpu f32[8192, 128256]"
  del t39
  t44 = torch.permute(t43, (1, 0))  # t44: "cpu f32[128256, 8192]"
  del t43
  t45 = torch.reshape(hidden, (-1, 4096))  # t45: "cpu f32[8192, 4096]"
  del hidden
  t46 = torch.matmul(t44, t45)  # t46: "cpu f32[128256, 4096]"
  del t44, t45
  return (t42, t46, None)
