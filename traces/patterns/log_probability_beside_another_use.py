# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_beside_another_use(hidden, weight, tokens):
#         logits = F.linear(hidden, weight)
#         log_sum = logits.logsumexp(-1)
#         return (logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_sum).mean() + log_sum.square().mean()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (log_sum is used by square)
# Saved for backward, beside the arguments and views of them:
#     t15: f32[2, 4096], 32,768 bytes
#     t16: i64[2, 4096, 1], 65,536 bytes
#     t12: f32[2, 4096], 32,768 bytes
#     t11: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t7: b8[2, 4096, 1], 8,192 bytes
#     t2: f32[2, 4096], 32,768 bytes
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # log_sum = logits.logsumexp(-1)
  t1 = shallow_copy(t0)  # t1: "cpu f32[2, 4096, 128256]"
  t2 = torch.amax(t1, (2,))  # t2: "cpu f32[2, 4096]"
  t3 = torch.unsqueeze(t2, 2)  # t3: "cpu f32[2, 4096, 1]"
  t4 = Tensor.expand(t3, [2, 4096, 1])  # t4: "cpu f32[2, 4096, 1]"
  del t3
  t5 = shallow_copy(t4)  # t5: "cpu f32[2, 4096, 1]"
  del t4
  t6 = torch.abs(t5)  # t6: "cpu f32[2, 4096, 1]"
  t7 = torch.eq(t6, float('inf'))  # t7: "cpu b8[2, 4096, 1]"
  del t6
  t8 = torch.where(t7, 0.0, t5)  # t8: "cpu f32[2, 4096, 1]"
  del t5
  t9 = Tensor.expand(t8, (2, 4096, 128256))  # t9: "cpu f32[2, 4096, 128256]"
  t10 = torch.sub(t0, t9, alpha=1)  # t10: "cpu f32[2, 4096, 128256]"
  del t9
  t11 = torch.exp(t10)  # t11: "cpu f32[2, 4096, 128256]"
  del t10
  t12 = torch.sum(t11, -1, False, dtype=None)  # t12: "cpu f32[2, 4096]"
  t13 = torch.log(t12)  # t13: "cpu f32[2, 4096]"
  t14 = torch.squeeze(t8, (2,))  # t14: "cpu f32[2, 4096]"
  del t8
  t15 = torch.add(t13, t14, alpha=1)  # t15: "cpu f32[2, 4096]"
  del t13, t14

  # return (logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_sum).mean() + log_sum.square().mean()
  t16 = torch.unsqueeze(tokens, -1)  # t16: "cpu i64[2, 4096, 1]"
  t17 = torch.gather(t0, 2, t16)  # t17: "cpu f32[2, 4096, 1]"
  del t0
  t18 = torch.squeeze(t17, (2,))  # t18: "cpu f32[2, 4096]"
  del t17
  t19 = torch.sub(t18, t15, alpha=1)  # t19: "cpu f32[2, 4096]"
  del t18
  t20 = shallow_copy(t19)  # t20: "cpu f32[2, 4096]"
  del t19
  t21 = torch.sum(t20, (0, 1))  # t21: "cpu f32[]"
  del t20
  t22 = torch_div_prim_impl(t21, 8192.0)  # t22: "cpu f32[]"
  del t21
  t23 = shallow_copy(t22)  # t23: "cpu f32[]"
  del t22
  t24 = torch.mul(t15, t15)  # t24: "cpu f32[2, 4096]"
  t25 = shallow_copy(t24)  # t25: "cpu f32[2, 4096]"
  del t24
  t26 = torch.sum(t25, (0, 1))  # t26: "cpu f32[]"
  del t25
  t27 = torch_div_prim_impl(t26, 8192.0)  # t27: "cpu f32[]"
  del t26
  t28 = shallow_copy(t27)  # t28: "cpu f32[]"
  del t27
  t29 = torch.add(t23, t28, alpha=1)  # t29: "cpu f32[]"
  del t23, t28
  return {'output': (t29,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t29,)}, ((t15, t16, t12, t11, t7, t2, t1, weight, hidden), ())


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
  t30, = cotangents
  # t30: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t15, t16, t12, t11, t7, t2, t1, weight, hidden, = C0
  # t15: "cpu f32[2, 4096]"
  # t16: "cpu i64[2, 4096, 1]"
  # t12: "cpu f32[2, 4096]"
  # t11: "cpu f32[2, 4096, 128256]"
  # t7: "cpu b8[2, 4096, 1]"
  # t2: "cpu f32[2, 4096]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t31 = torch.true_divide(t30, 8192.0)  # t31: "cpu f32[]"
  t32 = torch.unsqueeze(t31, 0)  # t32: "cpu f32[1]"
  del t31
  t33 = torch.unsqueeze(t32, 1)  # t33: "cpu f32[1, 1]"
  del t32
  t34 = Tensor.expand(t33, [1, 1])  # t34: "cpu f32[1, 1]"
  del t33
  t35 = Tensor.expand(t34, (2, 4096))  # t35: "cpu f32[2, 4096]"
  del t34
  t36 = torch.mul(t15, t35)  # t36: "cpu f32[2, 4096]"
  t37 = torch.mul(t15, t35)  # t37: "cpu f32[2, 4096]"
  del t15, t35
  t38 = torch.add(t36, t37, alpha=1)  # t38: "cpu f32[2, 4096]"
  del t36, t37
  t39 = torch.true_divide(t30, 8192.0)  # t39: "cpu f32[]"
  del t30
  t40 = torch.unsqueeze(t39, 0)  # t40: "cpu f32[1]"
  del t39
  t41 = torch.unsqueeze(t40, 1)  # t41: "cpu f32[1, 1]"
  del t40
  t42 = Tensor.expand(t41, [1, 1])  # t42: "cpu f32[1, 1]"
  del t41
  t43 = Tensor.expand(t42, (2, 4096))  # t43: "cpu f32[2, 4096]"
  del t42
  t44 = torch.neg(t43)  # t44: "cpu f32[2, 4096]"
  t45 = torch.add(t38, t44, alpha=1)  # t45: "cpu f32[2, 4096]"
  del t38, t44
  t46 = torch.unsqueeze(t43, 2)  # t46: "cpu f32[2, 4096, 1]"
  del t43
  t47 = Tensor.expand(t46, [2, 4096, 1])  # t47: "cpu f32[2, 4096, 1]"
  del t46
  t48 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t48: "cpu f32[2, 4096, 128256]"
  t49 = torch.scatter_add(t48, 2, t16, t47)  # t49: "cpu f32[2, 4096, 128256]"
  del t48, t16, t47
  t50 = torch.unsqueeze(t45, 2)  # t50: "cpu f32[2, 4096, 1]"
  t51 = Tensor.expand(t50, [2, 4096, 1])  # t51: "cpu f32[2, 4096, 1]"
  del t50
  t52 = torch.true_divide(t45, t12)  # t52: "cpu f32[2, 4096]"
  del t45, t12
  t53 = torch.unsqueeze(t52, 2)  # t53: "cpu f32[2, 4096, 1]"
  del t52
  t54 = Tensor.expand(t53, (2, 4096, 128256))  # t54: "cpu f32[2, 4096, 128256]"
  del t53
  t55 = Tensor.to(t54, copy=False, dtype=torch.float32)  # t55: "cpu f32[2, 4096, 128256]"
  del t54
  t56 = torch.mul(t55, t11)  # t56: "cpu f32[2, 4096, 128256]"
  del t55, t11
  t57 = torch.neg(t56)  # t57: "cpu f32[2, 4096, 128256]"
  t58 = torch.add(t49, t56, alpha=1)  # t58: "cpu f32[2, 4096, 128256]"
  del t49, t56
  t59 = torch.sum(t57, (2,), False, dtype=None)  # t59: "cpu f32[2, 4096]"
  del t57
  t60 = torch.unsqueeze(t59, 2)  # t60: "cpu f32[2, 4096, 1]"
  del t59
  t61 = Tensor.expand(t60, [2, 4096, 1])  # t61: "cpu f32[2, 4096, 1]"
  del t60
  t62 = torch.add(t51, t61, alpha=1)  # t62: "cpu f32[2, 4096, 1]"
  del t51, t61
  t63 = torch.where(t7, 0, t62)  # t63: "cpu f32[2, 4096, 1]"
  del t7, t62
  t64 = torch.sum(t63, (2,), False, dtype=None)  # t64: "cpu f32[2, 4096]"
  del t63
  t65 = torch.unsqueeze(t64, 2)  # t65: "cpu f32[2, 4096, 1]"
  del t64
  t66 = Tensor.expand(t65, [2, 4096, 1])  # t66: "cpu f32[2, 4096, 1]"
  del t65
  t67 = Tensor.expand(t66, (2, 4096, 128256))  # t67: "cpu f32[2, 4096, 128256]"
  del t66
  t68 = torch.unsqueeze(t2, 2)  # t68: "cpu f32[2, 4096, 1]"
  del t2
  t69 = Tensor.expand(t68, [2, 4096, 1])  # t69: "cpu f32[2, 4096, 1]"
  del t68
  t70 = Tensor.expand(t69, (2, 4096, 128256))  # t70: "cpu f32[2, 4096, 128256]"
  del t69
  t71 = torch.eq(t1, t70)  # t71: "cpu b8[2, 4096, 128256]"
  del t1, t70
  t72 = torch.sum(t71, (2,))  # t72: "cpu i64[2, 4096]"
  t73 = torch.unsqueeze(t72, 2)  # t73: "cpu b8[2, 4096, 1]"
  del t72
  t74 = Tensor.expand(t73, [2, 4096, 1])  # t74: "cpu b8[2, 4096, 1]"
  del t73
  t75 = torch.mul(t67, t71)  # t75: "cpu f32[2, 4096, 128256]"
  del t67, t71
  t76 = torch.true_divide(t75, t74)  # t76: "cpu f32[2, 4096, 128256]"
  del t75, t74
  t77 = Tensor.to(t76, torch.float32, copy=True)  # t77: "cpu f32[2, 4096, 128256]"
  del t76
  t78 = torch.add(t58, t77, alpha=1)  # t78: "cpu f32[2, 4096, 128256]"
  del t58, t77
  t79 = torch.reshape(t78, (-1, 128256))  # t79: "cpu f32[8192, 128256]"
  t80 = torch.matmul(t79, weight)  # t80: "cpu f32[8192, 4096]"
  del t79, weight
  t81 = torch.reshape(t80, (2, 4096, 4096))  # t81: "cpu f32[2, 4096, 4096]"
  del t80
  t82 = torch.reshape(t78, (-1, 128256))  # t82: "cpu f32[8192, 128256]"
  del t78
  t83 = torch.permute(t82, (1, 0))  # t83: "cpu f32[128256, 8192]"
  del t82
  t84 = torch.reshape(hidden, (-1, 4096))  # t84: "cpu f32[8192, 4096]"
  del hidden
  t85 = torch.matmul(t83, t84)  # t85: "cpu f32[128256, 4096]"
  del t83, t84
  return (t81, t85, None)
