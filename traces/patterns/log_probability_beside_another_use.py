# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_beside_another_use(hidden, weight, tokens):
#         logits = F.linear(hidden, weight)
#         of_labels = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
#         return (of_labels - logits.logsumexp(-1)).mean() + of_labels.square().mean()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (of_labels is used by square)
# Saved for backward, beside the arguments and views of them:
#     t3: f32[2, 4096], 32,768 bytes
#     t15: f32[2, 4096], 32,768 bytes
#     t14: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t10: b8[2, 4096, 1], 8,192 bytes
#     t5: f32[2, 4096], 32,768 bytes
#     t4: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t1: i64[2, 4096, 1], 65,536 bytes

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

  # of_labels = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
  t1 = torch.unsqueeze(tokens, -1)  # t1: "cpu i64[2, 4096, 1]"
  t2 = torch.gather(t0, 2, t1)  # t2: "cpu f32[2, 4096, 1]"
  t3 = torch.squeeze(t2, (2,))  # t3: "cpu f32[2, 4096]"
  del t2

  # return (of_labels - logits.logsumexp(-1)).mean() + of_labels.square().mean()
  t4 = shallow_copy(t0)  # t4: "cpu f32[2, 4096, 128256]"
  t5 = torch.amax(t4, (2,))  # t5: "cpu f32[2, 4096]"
  t6 = torch.unsqueeze(t5, 2)  # t6: "cpu f32[2, 4096, 1]"
  t7 = Tensor.expand(t6, [2, 4096, 1])  # t7: "cpu f32[2, 4096, 1]"
  del t6
  t8 = shallow_copy(t7)  # t8: "cpu f32[2, 4096, 1]"
  del t7
  t9 = torch.abs(t8)  # t9: "cpu f32[2, 4096, 1]"
  t10 = torch.eq(t9, float('inf'))  # t10: "cpu b8[2, 4096, 1]"
  del t9
  t11 = torch.where(t10, 0.0, t8)  # t11: "cpu f32[2, 4096, 1]"
  del t8
  t12 = Tensor.expand(t11, (2, 4096, 128256))  # t12: "cpu f32[2, 4096, 128256]"
  t13 = torch.sub(t0, t12, alpha=1)  # t13: "cpu f32[2, 4096, 128256]"
  del t0, t12
  t14 = torch.exp(t13)  # t14: "cpu f32[2, 4096, 128256]"
  del t13
  t15 = torch.sum(t14, -1, False, dtype=None)  # t15: "cpu f32[2, 4096]"
  t16 = torch.log(t15)  # t16: "cpu f32[2, 4096]"
  t17 = torch.squeeze(t11, (2,))  # t17: "cpu f32[2, 4096]"
  del t11
  t18 = torch.add(t16, t17, alpha=1)  # t18: "cpu f32[2, 4096]"
  del t16, t17
  t19 = torch.sub(t3, t18, alpha=1)  # t19: "cpu f32[2, 4096]"
  del t18
  t20 = shallow_copy(t19)  # t20: "cpu f32[2, 4096]"
  del t19
  t21 = torch.sum(t20, (0, 1))  # t21: "cpu f32[]"
  del t20
  t22 = torch_div_prim_impl(t21, 8192.0)  # t22: "cpu f32[]"
  del t21
  t23 = shallow_copy(t22)  # t23: "cpu f32[]"
  del t22
  t24 = torch.mul(t3, t3)  # t24: "cpu f32[2, 4096]"
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
  return {'output': (t29,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t29,)}, ((t3, t15, t14, t10, t5, t4, t1, weight, hidden), ())


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
  t3, t15, t14, t10, t5, t4, t1, weight, hidden, = C0
  # t3: "cpu f32[2, 4096]"
  # t15: "cpu f32[2, 4096]"
  # t14: "cpu f32[2, 4096, 128256]"
  # t10: "cpu b8[2, 4096, 1]"
  # t5: "cpu f32[2, 4096]"
  # t4: "cpu f32[2, 4096, 128256]"
  # t1: "cpu i64[2, 4096, 1]"
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
  t36 = torch.mul(t3, t35)  # t36: "cpu f32[2, 4096]"
  t37 = torch.mul(t3, t35)  # t37: "cpu f32[2, 4096]"
  del t3, t35
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
  t45 = torch.add(t38, t43, alpha=1)  # t45: "cpu f32[2, 4096]"
  del t38, t43
  t46 = torch.unsqueeze(t44, 2)  # t46: "cpu f32[2, 4096, 1]"
  t47 = Tensor.expand(t46, [2, 4096, 1])  # t47: "cpu f32[2, 4096, 1]"
  del t46
  t48 = torch.true_divide(t44, t15)  # t48: "cpu f32[2, 4096]"
  del t44, t15
  t49 = torch.unsqueeze(t48, 2)  # t49: "cpu f32[2, 4096, 1]"
  del t48
  t50 = Tensor.expand(t49, (2, 4096, 128256))  # t50: "cpu f32[2, 4096, 128256]"
  del t49
  t51 = Tensor.to(t50, copy=False, dtype=torch.float32)  # t51: "cpu f32[2, 4096, 128256]"
  del t50
  t52 = torch.mul(t51, t14)  # t52: "cpu f32[2, 4096, 128256]"
  del t51, t14
  t53 = torch.neg(t52)  # t53: "cpu f32[2, 4096, 128256]"
  t54 = torch.sum(t53, (2,), False, dtype=None)  # t54: "cpu f32[2, 4096]"
  del t53
  t55 = torch.unsqueeze(t54, 2)  # t55: "cpu f32[2, 4096, 1]"
  del t54
  t56 = Tensor.expand(t55, [2, 4096, 1])  # t56: "cpu f32[2, 4096, 1]"
  del t55
  t57 = torch.add(t47, t56, alpha=1)  # t57: "cpu f32[2, 4096, 1]"
  del t47, t56
  t58 = torch.where(t10, 0, t57)  # t58: "cpu f32[2, 4096, 1]"
  del t10, t57
  t59 = torch.sum(t58, (2,), False, dtype=None)  # t59: "cpu f32[2, 4096]"
  del t58
  t60 = torch.unsqueeze(t59, 2)  # t60: "cpu f32[2, 4096, 1]"
  del t59
  t61 = Tensor.expand(t60, [2, 4096, 1])  # t61: "cpu f32[2, 4096, 1]"
  del t60
  t62 = Tensor.expand(t61, (2, 4096, 128256))  # t62: "cpu f32[2, 4096, 128256]"
  del t61
  t63 = torch.unsqueeze(t5, 2)  # t63: "cpu f32[2, 4096, 1]"
  del t5
  t64 = Tensor.expand(t63, [2, 4096, 1])  # t64: "cpu f32[2, 4096, 1]"
  del t63
  t65 = Tensor.expand(t64, (2, 4096, 128256))  # t65: "cpu f32[2, 4096, 128256]"
  del t64
  t66 = torch.eq(t4, t65)  # t66: "cpu b8[2, 4096, 128256]"
  del t4, t65
  t67 = torch.sum(t66, (2,))  # t67: "cpu i64[2, 4096]"
  t68 = torch.unsqueeze(t67, 2)  # t68: "cpu b8[2, 4096, 1]"
  del t67
  t69 = Tensor.expand(t68, [2, 4096, 1])  # t69: "cpu b8[2, 4096, 1]"
  del t68
  t70 = torch.mul(t62, t66)  # t70: "cpu f32[2, 4096, 128256]"
  del t62, t66
  t71 = torch.true_divide(t70, t69)  # t71: "cpu f32[2, 4096, 128256]"
  del t70, t69
  t72 = Tensor.to(t71, torch.float32, copy=True)  # t72: "cpu f32[2, 4096, 128256]"
  del t71
  t73 = torch.add(t52, t72, alpha=1)  # t73: "cpu f32[2, 4096, 128256]"
  del t52, t72
  t74 = torch.unsqueeze(t45, 2)  # t74: "cpu f32[2, 4096, 1]"
  del t45
  t75 = Tensor.expand(t74, [2, 4096, 1])  # t75: "cpu f32[2, 4096, 1]"
  del t74
  t76 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t76: "cpu f32[2, 4096, 128256]"
  t77 = torch.scatter_add(t76, 2, t1, t75)  # t77: "cpu f32[2, 4096, 128256]"
  del t76, t1, t75
  t78 = torch.add(t73, t77, alpha=1)  # t78: "cpu f32[2, 4096, 128256]"
  del t73, t77
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
