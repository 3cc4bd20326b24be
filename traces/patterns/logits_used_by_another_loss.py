# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def logits_used_by_another_loss(hidden, weight, labels):
#         logits = F.linear(hidden, weight)
#         return _loss(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (logits is used by logsumexp)
# Saved for backward, beside the arguments and views of them:
#     t21: f32[2, 4096], 32,768 bytes
#     t18: f32[2, 4096], 32,768 bytes
#     t17: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t13: b8[2, 4096, 1], 8,192 bytes
#     t8: f32[2, 4096], 32,768 bytes
#     t7: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t1: f32[8192, 128256], 4,202,692,608 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: i64[], 8 bytes

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

  # return single_device_symbol(*args, **kwargs)
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
  t2 = torch.reshape(labels, (-1,))  # t2: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t3, t4, t5, t6) = cross_entropy_fwd(t1, t2, reduction='mean', ignore_index=-100)

  # return _loss(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()
  t7 = shallow_copy(t0)  # t7: "cpu f32[2, 4096, 128256]"
  t8 = torch.amax(t7, (2,))  # t8: "cpu f32[2, 4096]"
  t9 = torch.unsqueeze(t8, 2)  # t9: "cpu f32[2, 4096, 1]"
  t10 = Tensor.expand(t9, [2, 4096, 1])  # t10: "cpu f32[2, 4096, 1]"
  del t9
  t11 = shallow_copy(t10)  # t11: "cpu f32[2, 4096, 1]"
  del t10
  t12 = torch.abs(t11)  # t12: "cpu f32[2, 4096, 1]"
  t13 = torch.eq(t12, float('inf'))  # t13: "cpu b8[2, 4096, 1]"
  del t12
  t14 = torch.where(t13, 0.0, t11)  # t14: "cpu f32[2, 4096, 1]"
  del t11
  t15 = Tensor.expand(t14, (2, 4096, 128256))  # t15: "cpu f32[2, 4096, 128256]"
  t16 = torch.sub(t0, t15, alpha=1)  # t16: "cpu f32[2, 4096, 128256]"
  del t0, t15
  t17 = torch.exp(t16)  # t17: "cpu f32[2, 4096, 128256]"
  del t16
  t18 = torch.sum(t17, -1, False, dtype=None)  # t18: "cpu f32[2, 4096]"
  t19 = torch.log(t18)  # t19: "cpu f32[2, 4096]"
  t20 = torch.squeeze(t14, (2,))  # t20: "cpu f32[2, 4096]"
  del t14
  t21 = torch.add(t19, t20, alpha=1)  # t21: "cpu f32[2, 4096]"
  del t19, t20
  t22 = torch.mul(t21, t21)  # t22: "cpu f32[2, 4096]"
  t23 = shallow_copy(t22)  # t23: "cpu f32[2, 4096]"
  del t22
  t24 = torch.sum(t23, (0, 1))  # t24: "cpu f32[]"
  del t23
  t25 = torch_div_prim_impl(t24, 8192.0)  # t25: "cpu f32[]"
  del t24
  t26 = shallow_copy(t25)  # t26: "cpu f32[]"
  del t25
  t27 = torch.mul(0.001, t26)  # t27: "cpu f32[]"
  del t26
  t28 = torch.add(t3, t27, alpha=1)  # t28: "cpu f32[]"
  del t3, t27
  return {'output': (t28,), 'flat_args': [hidden, weight, labels], 'flat_output': (t28,)}, ((t21, t18, t17, t13, t8, t7, t1, t2, t4, t5, t6, weight, hidden), ())


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
  t29, = cotangents
  # t29: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t21, t18, t17, t13, t8, t7, t1, t2, t4, t5, t6, weight, hidden, \
  = C0
  # t21: "cpu f32[2, 4096]"
  # t18: "cpu f32[2, 4096]"
  # t17: "cpu f32[2, 4096, 128256]"
  # t13: "cpu b8[2, 4096, 1]"
  # t8: "cpu f32[2, 4096]"
  # t7: "cpu f32[2, 4096, 128256]"
  # t1: "cpu f32[8192, 128256]"
  # t2: "cpu i64[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t30 = torch.mul(0.001, t29)  # t30: "cpu f32[]"
  t31 = torch.true_divide(t30, 8192.0)  # t31: "cpu f32[]"
  del t30
  t32 = torch.unsqueeze(t31, 0)  # t32: "cpu f32[1]"
  del t31
  t33 = torch.unsqueeze(t32, 1)  # t33: "cpu f32[1, 1]"
  del t32
  t34 = Tensor.expand(t33, [1, 1])  # t34: "cpu f32[1, 1]"
  del t33
  t35 = Tensor.expand(t34, (2, 4096))  # t35: "cpu f32[2, 4096]"
  del t34
  t36 = torch.mul(t21, t35)  # t36: "cpu f32[2, 4096]"
  t37 = torch.mul(t21, t35)  # t37: "cpu f32[2, 4096]"
  del t21, t35
  t38 = torch.add(t36, t37, alpha=1)  # t38: "cpu f32[2, 4096]"
  del t36, t37
  t39 = torch.unsqueeze(t38, 2)  # t39: "cpu f32[2, 4096, 1]"
  t40 = Tensor.expand(t39, [2, 4096, 1])  # t40: "cpu f32[2, 4096, 1]"
  del t39
  t41 = torch.true_divide(t38, t18)  # t41: "cpu f32[2, 4096]"
  del t38, t18
  t42 = torch.unsqueeze(t41, 2)  # t42: "cpu f32[2, 4096, 1]"
  del t41
  t43 = Tensor.expand(t42, (2, 4096, 128256))  # t43: "cpu f32[2, 4096, 128256]"
  del t42
  t44 = Tensor.to(t43, copy=False, dtype=torch.float32)  # t44: "cpu f32[2, 4096, 128256]"
  del t43
  t45 = torch.mul(t44, t17)  # t45: "cpu f32[2, 4096, 128256]"
  del t44, t17
  t46 = torch.neg(t45)  # t46: "cpu f32[2, 4096, 128256]"
  t47 = torch.sum(t46, (2,), False, dtype=None)  # t47: "cpu f32[2, 4096]"
  del t46
  t48 = torch.unsqueeze(t47, 2)  # t48: "cpu f32[2, 4096, 1]"
  del t47
  t49 = Tensor.expand(t48, [2, 4096, 1])  # t49: "cpu f32[2, 4096, 1]"
  del t48
  t50 = torch.add(t40, t49, alpha=1)  # t50: "cpu f32[2, 4096, 1]"
  del t40, t49
  t51 = torch.where(t13, 0, t50)  # t51: "cpu f32[2, 4096, 1]"
  del t13, t50
  t52 = torch.sum(t51, (2,), False, dtype=None)  # t52: "cpu f32[2, 4096]"
  del t51
  t53 = torch.unsqueeze(t52, 2)  # t53: "cpu f32[2, 4096, 1]"
  del t52
  t54 = Tensor.expand(t53, [2, 4096, 1])  # t54: "cpu f32[2, 4096, 1]"
  del t53
  t55 = Tensor.expand(t54, (2, 4096, 128256))  # t55: "cpu f32[2, 4096, 128256]"
  del t54
  t56 = torch.unsqueeze(t8, 2)  # t56: "cpu f32[2, 4096, 1]"
  del t8
  t57 = Tensor.expand(t56, [2, 4096, 1])  # t57: "cpu f32[2, 4096, 1]"
  del t56
  t58 = Tensor.expand(t57, (2, 4096, 128256))  # t58: "cpu f32[2, 4096, 128256]"
  del t57
  t59 = torch.eq(t7, t58)  # t59: "cpu b8[2, 4096, 128256]"
  del t7, t58
  t60 = torch.sum(t59, (2,))  # t60: "cpu i64[2, 4096]"
  t61 = torch.unsqueeze(t60, 2)  # t61: "cpu b8[2, 4096, 1]"
  del t60
  t62 = Tensor.expand(t61, [2, 4096, 1])  # t62: "cpu b8[2, 4096, 1]"
  del t61
  t63 = torch.mul(t55, t59)  # t63: "cpu f32[2, 4096, 128256]"
  del t55, t59
  t64 = torch.true_divide(t63, t62)  # t64: "cpu f32[2, 4096, 128256]"
  del t63, t62
  t65 = Tensor.to(t64, torch.float32, copy=True)  # t65: "cpu f32[2, 4096, 128256]"
  del t64
  t66 = torch.add(t45, t65, alpha=1)  # t66: "cpu f32[2, 4096, 128256]"
  del t45, t65
  t67 = cross_entropy_bwd(t29, t1, t2, t4, t5, t6, reduction='mean', ignore_index=-100)  # t67: "cpu f32[8192, 128256]"
  del t29, t1, t2, t4, t5, t6
  t68 = torch_prims_reshape_impl(t67, (2, 4096, 128256))  # t68: "cpu f32[2, 4096, 128256]"
  del t67
  t69 = torch.add(t66, t68, alpha=1)  # t69: "cpu f32[2, 4096, 128256]"
  del t66, t68
  t70 = torch.reshape(t69, (-1, 128256))  # t70: "cpu f32[8192, 128256]"
  t71 = torch.matmul(t70, weight)  # t71: "cpu f32[8192, 4096]"
  del t70, weight
  t72 = torch.reshape(t71, (2, 4096, 4096))  # t72: "cpu f32[2, 4096, 4096]"
  del t71
  t73 = torch.reshape(t69, (-1, 128256))  # t73: "cpu f32[8192, 128256]"
  del t69
  t74 = torch.permute(t73, (1, 0))  # t74: "cpu f32[128256, 8192]"
  del t73
  t75 = torch.reshape(hidden, (-1, 4096))  # t75: "cpu f32[8192, 4096]"
  del hidden
  t76 = torch.matmul(t74, t75)  # t76: "cpu f32[128256, 4096]"
  del t74, t75
  return (t72, t76, None)
