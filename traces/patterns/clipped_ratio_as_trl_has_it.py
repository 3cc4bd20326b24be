# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def clipped_ratio_as_trl_has_it(hidden, weight, tokens, advantages, token_weights):
#         """GRPO: a mean over sequences of means over their tokens, a divergence from a reference, and what is logged."""
#         logits = F.linear(hidden, weight) / 0.9
#         log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
#         mask = (token_weights > 0.5).float()
#         old, reference = log_probs.detach() + 0.3 * token_weights, log_probs.detach() - 0.1
#         divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
#         ratio = torch.exp(log_probs - old)
#         gain = torch.min(ratio * advantages.unsqueeze(1), ratio.clamp(0.8, 1.2) * advantages.unsqueeze(1))
#         losses = 0.04 * divergence - gain
#         loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
#         return loss, ((ratio.detach() < 0.8) * mask).sum()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (the loss depends on their argmax or entropy)
# Saved for backward, beside the arguments and views of them:
#     t60: f32[2], 8 bytes
#     t22: f32[2, 4096], 32,768 bytes
#     t38: f32[2, 4096], 32,768 bytes
#     t50: f32[2, 4096], 32,768 bytes
#     t49: f32[2, 4096], 32,768 bytes
#     t43: b8[2, 4096], 8,192 bytes
#     t44: b8[2, 4096], 8,192 bytes
#     t39: b8[2, 4096], 8,192 bytes
#     t40: b8[2, 4096], 8,192 bytes
#     t37: f32[2, 4096], 32,768 bytes
#     t34: f32[2, 4096], 32,768 bytes
#     t29: f32[2, 4096], 32,768 bytes
#     t20: f32[2, 4096], 32,768 bytes
#     t16: f32[2, 4096], 32,768 bytes
#     t15: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t11: b8[2, 4096, 1], 8,192 bytes
#     t6: f32[2, 4096], 32,768 bytes
#     t5: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t2: i64[2, 4096, 1], 65,536 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens, advantages, token_weights):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"
  # advantages: "cpu f32[2]"
  # token_weights: "cpu f32[2, 4096]"

  # logits = F.linear(hidden, weight) / 0.9
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch_div_prim_impl(t0, 0.9)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
  t2 = torch.unsqueeze(tokens, -1)  # t2: "cpu i64[2, 4096, 1]"
  t3 = torch.gather(t1, 2, t2)  # t3: "cpu f32[2, 4096, 1]"
  t4 = torch.squeeze(t3, (2,))  # t4: "cpu f32[2, 4096]"
  del t3
  t5 = shallow_copy(t1)  # t5: "cpu f32[2, 4096, 128256]"
  t6 = torch.amax(t5, (2,))  # t6: "cpu f32[2, 4096]"
  t7 = torch.unsqueeze(t6, 2)  # t7: "cpu f32[2, 4096, 1]"
  t8 = Tensor.expand(t7, [2, 4096, 1])  # t8: "cpu f32[2, 4096, 1]"
  del t7
  t9 = shallow_copy(t8)  # t9: "cpu f32[2, 4096, 1]"
  del t8
  t10 = torch.abs(t9)  # t10: "cpu f32[2, 4096, 1]"
  t11 = torch.eq(t10, float('inf'))  # t11: "cpu b8[2, 4096, 1]"
  del t10
  t12 = torch.where(t11, 0.0, t9)  # t12: "cpu f32[2, 4096, 1]"
  del t9
  t13 = Tensor.expand(t12, (2, 4096, 128256))  # t13: "cpu f32[2, 4096, 128256]"
  t14 = torch.sub(t1, t13, alpha=1)  # t14: "cpu f32[2, 4096, 128256]"
  del t1, t13
  t15 = torch.exp(t14)  # t15: "cpu f32[2, 4096, 128256]"
  del t14
  t16 = torch.sum(t15, -1, False, dtype=None)  # t16: "cpu f32[2, 4096]"
  t17 = torch.log(t16)  # t17: "cpu f32[2, 4096]"
  t18 = torch.squeeze(t12, (2,))  # t18: "cpu f32[2, 4096]"
  del t12
  t19 = torch.add(t17, t18, alpha=1)  # t19: "cpu f32[2, 4096]"
  del t17, t18
  t20 = torch.sub(t4, t19, alpha=1)  # t20: "cpu f32[2, 4096]"
  del t4, t19
  t21 = torch.gt(token_weights, 0.5)  # t21: "cpu b8[2, 4096]"

  # mask = (token_weights > 0.5).float()
  t22 = Tensor.to(t21, torch.float32, copy=True)  # t22: "cpu f32[2, 4096]"
  del t21

  # old, reference = log_probs.detach() + 0.3 * token_weights, log_probs.detach() - 0.1
  t23 = torch.detach(t20)  # t23: "cpu f32[2, 4096]"
  t24 = torch.mul(0.3, token_weights)  # t24: "cpu f32[2, 4096]"
  t25 = torch.add(t23, t24, alpha=1)  # t25: "cpu f32[2, 4096]"
  del t23, t24
  t26 = torch.detach(t20)  # t26: "cpu f32[2, 4096]"
  t27 = torch.sub(t26, 0.1, alpha=1)  # t27: "cpu f32[2, 4096]"
  del t26

  # divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
  t28 = torch.sub(t27, t20, alpha=1)  # t28: "cpu f32[2, 4096]"
  t29 = torch.exp(t28)  # t29: "cpu f32[2, 4096]"
  del t28
  t30 = torch.sub(t27, t20, alpha=1)  # t30: "cpu f32[2, 4096]"
  del t27
  t31 = torch.sub(t29, t30, alpha=1)  # t31: "cpu f32[2, 4096]"
  del t30
  t32 = torch.sub(t31, 1.0, alpha=1)  # t32: "cpu f32[2, 4096]"
  del t31

  # ratio = torch.exp(log_probs - old)
  t33 = torch.sub(t20, t25, alpha=1)  # t33: "cpu f32[2, 4096]"
  del t25
  t34 = torch.exp(t33)  # t34: "cpu f32[2, 4096]"
  del t33

  # gain = torch.min(ratio * advantages.unsqueeze(1), ratio.clamp(0.8, 1.2) * advantages.unsqueeze(1))
  t35 = torch.unsqueeze(advantages, 1)  # t35: "cpu f32[2, 1]"
  t36 = Tensor.expand(t35, [2, 1])  # t36: "cpu f32[2, 1]"
  del t35
  t37 = Tensor.expand(t36, (2, 4096))  # t37: "cpu f32[2, 4096]"
  del t36
  t38 = torch.mul(t34, t37)  # t38: "cpu f32[2, 4096]"
  t39 = torch.ne(t34, t34)  # t39: "cpu b8[2, 4096]"
  t40 = torch.gt(t34, 0.8)  # t40: "cpu b8[2, 4096]"
  t41 = torch.where(t40, t34, 0.8)  # t41: "cpu f32[2, 4096]"
  t42 = torch.where(t39, t34, t41)  # t42: "cpu f32[2, 4096]"
  del t41
  t43 = torch.ne(t42, t42)  # t43: "cpu b8[2, 4096]"
  t44 = torch.lt(t42, 1.2)  # t44: "cpu b8[2, 4096]"
  t45 = torch.where(t44, t42, 1.2)  # t45: "cpu f32[2, 4096]"
  t46 = torch.where(t43, t42, t45)  # t46: "cpu f32[2, 4096]"
  del t42, t45
  t47 = torch.unsqueeze(advantages, 1)  # t47: "cpu f32[2, 1]"
  t48 = Tensor.expand(t47, [2, 1])  # t48: "cpu f32[2, 1]"
  del t47
  t49 = Tensor.expand(t48, (2, 4096))  # t49: "cpu f32[2, 4096]"
  del t48
  t50 = torch.mul(t46, t49)  # t50: "cpu f32[2, 4096]"
  del t46
  t51 = torch.min(t38, t50)  # t51: "cpu f32[2, 4096]"

  # losses = 0.04 * divergence - gain
  t52 = torch.mul(0.04, t32)  # t52: "cpu f32[2, 4096]"
  del t32
  t53 = torch.sub(t52, t51, alpha=1)  # t53: "cpu f32[2, 4096]"
  del t52, t51

  # loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
  t54 = torch.mul(t53, t22)  # t54: "cpu f32[2, 4096]"
  del t53
  t55 = torch.sum(t54, -1, False, dtype=None)  # t55: "cpu f32[2]"
  del t54
  t56 = torch.sum(t22, -1, False, dtype=None)  # t56: "cpu f32[2]"
  t57 = torch.ne(t56, t56)  # t57: "cpu b8[2]"
  t58 = torch.gt(t56, 1.0)  # t58: "cpu b8[2]"
  t59 = torch.where(t58, t56, 1.0)  # t59: "cpu f32[2]"
  del t58
  t60 = torch.where(t57, t56, t59)  # t60: "cpu f32[2]"
  del t57, t56, t59
  t61 = torch_div_prim_impl(t55, t60)  # t61: "cpu f32[2]"
  del t55
  t62 = shallow_copy(t61)  # t62: "cpu f32[2]"
  del t61
  t63 = torch.sum(t62, (0,))  # t63: "cpu f32[]"
  del t62
  t64 = torch_div_prim_impl(t63, 2.0)  # t64: "cpu f32[]"
  del t63
  t65 = shallow_copy(t64)  # t65: "cpu f32[]"
  del t64

  # return loss, ((ratio.detach() < 0.8) * mask).sum()
  t66 = torch.detach(t34)  # t66: "cpu f32[2, 4096]"
  t67 = torch.lt(t66, 0.8)  # t67: "cpu b8[2, 4096]"
  del t66
  t68 = Tensor.to(t67, torch.float32, copy=True)  # t68: "cpu f32[2, 4096]"
  del t67
  t69 = torch.mul(t68, t22)  # t69: "cpu f32[2, 4096]"
  del t68
  t70 = torch.sum(t69, None, False, dtype=None)  # t70: "cpu f32[]"
  del t69
  return {'output': (t65, t70), 'flat_args': [hidden, weight, tokens, advantages, token_weights], 'flat_output': (t65, t70)}, ((t60, t22, t38, t50, t49, t43, t44, t39, t40, t37, t34, t29, t20, t16, t15, t11, t6, t5, t2, weight, hidden), ())


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
  t71, _, = cotangents
  # t71: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t60, t22, t38, t50, t49, t43, t44, t39, t40, t37, t34, t29, t20, \
  t16, t15, t11, t6, t5, t2, weight, hidden, = C0
  # t60: "cpu f32[2]"
  # t22: "cpu f32[2, 4096]"
  # t38: "cpu f32[2, 4096]"
  # t50: "cpu f32[2, 4096]"
  # t49: "cpu f32[2, 4096]"
  # t43: "cpu b8[2, 4096]"
  # t44: "cpu b8[2, 4096]"
  # t39: "cpu b8[2, 4096]"
  # t40: "cpu b8[2, 4096]"
  # t37: "cpu f32[2, 4096]"
  # t34: "cpu f32[2, 4096]"
  # t29: "cpu f32[2, 4096]"
  # t20: "cpu f32[2, 4096]"
  # t16: "cpu f32[2, 4096]"
  # t15: "cpu f32[2, 4096, 128256]"
  # t11: "cpu b8[2, 4096, 1]"
  # t6: "cpu f32[2, 4096]"
  # t5: "cpu f32[2, 4096, 128256]"
  # t2: "cpu i64[2, 4096, 1]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t72 = torch.true_divide(t71, 2.0)  # t72: "cpu f32[]"
  del t71
  t73 = torch.unsqueeze(t72, 0)  # t73: "cpu f32[1]"
  del t72
  t74 = Tensor.expand(t73, [1])  # t74: "cpu f32[1]"
  del t73
  t75 = Tensor.expand(t74, (2,))  # t75: "cpu f32[2]"
  del t74
  t76 = torch.true_divide(t75, t60)  # t76: "cpu f32[2]"
  del t75, t60
  t77 = torch.unsqueeze(t76, 1)  # t77: "cpu f32[2, 1]"
  del t76
  t78 = Tensor.expand(t77, (2, 4096))  # t78: "cpu f32[2, 4096]"
  del t77
  t79 = Tensor.to(t78, copy=False, dtype=torch.float32)  # t79: "cpu f32[2, 4096]"
  del t78
  t80 = torch.mul(t22, t79)  # t80: "cpu f32[2, 4096]"
  del t22, t79
  t81 = torch.neg(t80)  # t81: "cpu f32[2, 4096]"
  t82 = torch.mul(0.04, t80)  # t82: "cpu f32[2, 4096]"
  del t80
  (t83, t84) = min_vjp(((t38, t50), {}), t81)
  del t38, t50, t81
  t85 = torch.mul(t49, t84)  # t85: "cpu f32[2, 4096]"
  del t49, t84
  t86 = torch.where(t43, t85, 0)  # t86: "cpu f32[2, 4096]"
  t87 = torch.where(t43, 0, t85)  # t87: "cpu f32[2, 4096]"
  del t43, t85
  t88 = torch.where(t44, t87, 0)  # t88: "cpu f32[2, 4096]"
  del t44, t87
  t89 = torch.add(t86, t88, alpha=1)  # t89: "cpu f32[2, 4096]"
  del t86, t88
  t90 = torch.where(t39, t89, 0)  # t90: "cpu f32[2, 4096]"
  t91 = torch.where(t39, 0, t89)  # t91: "cpu f32[2, 4096]"
  del t39, t89
  t92 = torch.where(t40, t91, 0)  # t92: "cpu f32[2, 4096]"
  del t40, t91
  t93 = torch.add(t90, t92, alpha=1)  # t93: "cpu f32[2, 4096]"
  del t90, t92
  t94 = torch.mul(t37, t83)  # t94: "cpu f32[2, 4096]"
  del t37, t83
  t95 = torch.add(t93, t94, alpha=1)  # t95: "cpu f32[2, 4096]"
  del t93, t94
  t96 = torch.mul(t95, t34)  # t96: "cpu f32[2, 4096]"
  del t95, t34
  t97 = torch.neg(t96)  # t97: "cpu f32[2, 4096]"
  t98 = torch.neg(t82)  # t98: "cpu f32[2, 4096]"
  t99 = torch.neg(t98)  # t99: "cpu f32[2, 4096]"
  t100 = torch.add(t96, t99, alpha=1)  # t100: "cpu f32[2, 4096]"
  del t96, t99
  t101 = torch.mul(t82, t29)  # t101: "cpu f32[2, 4096]"
  del t82, t29
  t102 = torch.neg(t101)  # t102: "cpu f32[2, 4096]"
  t103 = torch.add(t98, t101, alpha=1)  # t103: "cpu f32[2, 4096]"
  del t98, t101
  t104 = torch.add(t100, t102, alpha=1)  # t104: "cpu f32[2, 4096]"
  del t100, t102
  (t105,) = detach_vjp(((t20,), {}), t103)
  del t103
  t106 = torch.add(t104, t105, alpha=1)  # t106: "cpu f32[2, 4096]"
  del t104, t105
  (t107,) = detach_vjp(((t20,), {}), t97)
  del t20, t97
  t108 = torch.add(t106, t107, alpha=1)  # t108: "cpu f32[2, 4096]"
  del t106, t107
  t109 = torch.neg(t108)  # t109: "cpu f32[2, 4096]"
  t110 = torch.unsqueeze(t109, 2)  # t110: "cpu f32[2, 4096, 1]"
  t111 = Tensor.expand(t110, [2, 4096, 1])  # t111: "cpu f32[2, 4096, 1]"
  del t110
  t112 = torch.true_divide(t109, t16)  # t112: "cpu f32[2, 4096]"
  del t109, t16
  t113 = torch.unsqueeze(t112, 2)  # t113: "cpu f32[2, 4096, 1]"
  del t112
  t114 = Tensor.expand(t113, (2, 4096, 128256))  # t114: "cpu f32[2, 4096, 128256]"
  del t113
  t115 = Tensor.to(t114, copy=False, dtype=torch.float32)  # t115: "cpu f32[2, 4096, 128256]"
  del t114
  t116 = torch.mul(t115, t15)  # t116: "cpu f32[2, 4096, 128256]"
  del t115, t15
  t117 = torch.neg(t116)  # t117: "cpu f32[2, 4096, 128256]"
  t118 = torch.sum(t117, (2,), False, dtype=None)  # t118: "cpu f32[2, 4096]"
  del t117
  t119 = torch.unsqueeze(t118, 2)  # t119: "cpu f32[2, 4096, 1]"
  del t118
  t120 = Tensor.expand(t119, [2, 4096, 1])  # t120: "cpu f32[2, 4096, 1]"
  del t119
  t121 = torch.add(t111, t120, alpha=1)  # t121: "cpu f32[2, 4096, 1]"
  del t111, t120
  t122 = torch.where(t11, 0, t121)  # t122: "cpu f32[2, 4096, 1]"
  del t11, t121
  t123 = torch.sum(t122, (2,), False, dtype=None)  # t123: "cpu f32[2, 4096]"
  del t122
  t124 = torch.unsqueeze(t123, 2)  # t124: "cpu f32[2, 4096, 1]"
  del t123
  t125 = Tensor.expand(t124, [2, 4096, 1])  # t125: "cpu f32[2, 4096, 1]"
  del t124
  t126 = Tensor.expand(t125, (2, 4096, 128256))  # t126: "cpu f32[2, 4096, 128256]"
  del t125
  t127 = torch.unsqueeze(t6, 2)  # t127: "cpu f32[2, 4096, 1]"
  del t6
  t128 = Tensor.expand(t127, [2, 4096, 1])  # t128: "cpu f32[2, 4096, 1]"
  del t127
  t129 = Tensor.expand(t128, (2, 4096, 128256))  # t129: "cpu f32[2, 4096, 128256]"
  del t128
  t130 = torch.eq(t5, t129)  # t130: "cpu b8[2, 4096, 128256]"
  del t5, t129
  t131 = torch.sum(t130, (2,))  # t131: "cpu i64[2, 4096]"
  t132 = torch.unsqueeze(t131, 2)  # t132: "cpu b8[2, 4096, 1]"
  del t131
  t133 = Tensor.expand(t132, [2, 4096, 1])  # t133: "cpu b8[2, 4096, 1]"
  del t132
  t134 = torch.mul(t126, t130)  # t134: "cpu f32[2, 4096, 128256]"
  del t126, t130
  t135 = torch.true_divide(t134, t133)  # t135: "cpu f32[2, 4096, 128256]"
  del t134, t133
  t136 = Tensor.to(t135, torch.float32, copy=True)  # t136: "cpu f32[2, 4096, 128256]"
  del t135
  t137 = torch.add(t116, t136, alpha=1)  # t137: "cpu f32[2, 4096, 128256]"
  del t116, t136
  t138 = torch.unsqueeze(t108, 2)  # t138: "cpu f32[2, 4096, 1]"
  del t108
  t139 = Tensor.expand(t138, [2, 4096, 1])  # t139: "cpu f32[2, 4096, 1]"
  del t138
  t140 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t140: "cpu f32[2, 4096, 128256]"
  t141 = torch.scatter_add(t140, 2, t2, t139)  # t141: "cpu f32[2, 4096, 128256]"
  del t140, t2, t139
  t142 = torch.add(t137, t141, alpha=1)  # t142: "cpu f32[2, 4096, 128256]"
  del t137, t141
  t143 = torch.true_divide(t142, 0.9)  # t143: "cpu f32[2, 4096, 128256]"
  del t142
  t144 = torch.reshape(t143, (-1, 128256))  # t144: "cpu f32[8192, 128256]"
  t145 = torch.matmul(t144, weight)  # t145: "cpu f32[8192, 4096]"
  del t144, weight
  t146 = torch.reshape(t145, (2, 4096, 4096))  # t146: "cpu f32[2, 4096, 4096]"
  del t145
  t147 = torch.reshape(t143, (-1, 128256))  # t147: "cpu f32[8192, 128256]"
  del t143
  t148 = torch.permute(t147, (1, 0))  # t148: "cpu f32[128256, 8192]"
  del t147
  t149 = torch.reshape(hidden, (-1, 4096))  # t149: "cpu f32[8192, 4096]"
  del hidden
  t150 = torch.matmul(t148, t149)  # t150: "cpu f32[128256, 4096]"
  del t148, t149
  return (t146, t150, None, None, None)
