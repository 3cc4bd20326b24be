# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def clipped_ratio_with_entropy(hidden, weight, tokens):
#         """PPO's and GRPO's objective with an entropy bonus, and what is logged beside it."""
#         logits = F.linear(hidden, weight).float() / 0.9
#         log_probs = torch.log_softmax(logits, dim=-1)
#         per_token = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
#         entropy = -(log_probs.exp() * log_probs).sum(-1)
#         ratio = (per_token - per_token.detach() + 0.1).exp()
#         advantage = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1] - 0.5
#         gain, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
#         # thunder has no gradient of torch.minimum.
#         loss = -torch.where(gain < clipped, gain, clipped).mean() - 0.01 * entropy.mean()
#         return loss, (logits.argmax(-1) == tokens).float().mean()
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary
# Saved for backward, beside the arguments and views of them:
#     t30: b8[2, 4096], 8,192 bytes
#     t28: f32[2, 4096], 32,768 bytes
#     t23: b8[2, 4096], 8,192 bytes
#     t24: b8[2, 4096], 8,192 bytes
#     t19: b8[2, 4096], 8,192 bytes
#     t20: b8[2, 4096], 8,192 bytes
#     t17: f32[2, 4096], 32,768 bytes
#     t12: f32[2, 4096], 32,768 bytes
#     t8: f32[2, 4096], 32,768 bytes
#     t1: i64[2, 4096], 65,536 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: f32[8192], 32,768 bytes
#     t7: i64[], 8 bytes
#     t3: f32[2, 4096], 32,768 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # per_token = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
  t0 = Tensor.__getitem__(tokens, (..., None))  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, logit_scale=1.1111111111111112, outputs=("entropy", "valid_argmax"), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[2, 4096], entropy = t3: f32[2, 4096], valid_argmax = t4: i64[2, 4096], row_max = t5: f32[8192], row_log_sum = t6: f32[8192], valid_count = t7: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   z f32[C, 128256] = x[chunk] @ W.t()                                                   PyTorch
    #   u f32[C, 128256] = z * 1.1111111111111112  (wherever they are read)
    #   z_y f32[C] = z[y[chunk]]                                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(u), log(sum_v(exp(u - row_max)))                  PyTorch
    #   argmax i64[C] = argmax_v(z)                                                           PyTorch
    #   expected f32[C] = sum_v(exp(u - row_max - row_log_sum) * (u - row_max))               PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(z_y * 1.1111111111111112 - row_max, 0)  PyTorch
    # loss f32[8192] = cross_entropy                                                          PyTorch
    # entropy f32[8192] = row_log_sum - expected                                              PyTorch
    # valid_argmax i64[8192] = argmax                                                         PyTorch
  t8 = torch.neg(t2)  # t8: "cpu f32[2, 4096]"
  del t2

  # ratio = (per_token - per_token.detach() + 0.1).exp()
  t9 = torch.detach(t8)  # t9: "cpu f32[2, 4096]"
  t10 = torch.sub(t8, t9, alpha=1)  # t10: "cpu f32[2, 4096]"
  del t9
  t11 = torch.add(t10, 0.1, alpha=1)  # t11: "cpu f32[2, 4096]"
  del t10

  # return single_device_symbol(*args, **kwargs)
  t12 = torch.exp(t11)  # t12: "cpu f32[2, 4096]"
  del t11

  # advantage = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1] - 0.5
  t13 = torch.arange(start=0, step=1, end=4096, device=torch.device("cpu"), dtype=None)  # t13: "cpu i64[4096]"
  t14 = torch.true_divide(t13, 4096)  # t14: "cpu f32[4096]"
  del t13
  t15 = torch.sub(t14, 0.5, alpha=1)  # t15: "cpu f32[4096]"
  del t14

  # gain, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
  t16 = torch.unsqueeze(t15, 0)  # t16: "cpu f32[1, 4096]"
  t17 = Tensor.expand(t16, (2, 4096))  # t17: "cpu f32[2, 4096]"
  del t16
  t18 = torch.mul(t12, t17)  # t18: "cpu f32[2, 4096]"
  t19 = torch.ne(t12, t12)  # t19: "cpu b8[2, 4096]"
  t20 = torch.gt(t12, 0.8)  # t20: "cpu b8[2, 4096]"
  t21 = torch.where(t20, t12, 0.8)  # t21: "cpu f32[2, 4096]"
  t22 = torch.where(t19, t12, t21)  # t22: "cpu f32[2, 4096]"
  del t21
  t23 = torch.ne(t22, t22)  # t23: "cpu b8[2, 4096]"
  t24 = torch.lt(t22, 1.2)  # t24: "cpu b8[2, 4096]"
  t25 = torch.where(t24, t22, 1.2)  # t25: "cpu f32[2, 4096]"
  t26 = torch.where(t23, t22, t25)  # t26: "cpu f32[2, 4096]"
  del t22, t25
  t27 = torch.unsqueeze(t15, 0)  # t27: "cpu f32[1, 4096]"
  del t15
  t28 = Tensor.expand(t27, (2, 4096))  # t28: "cpu f32[2, 4096]"
  del t27
  t29 = torch.mul(t26, t28)  # t29: "cpu f32[2, 4096]"
  del t26
  t30 = torch.lt(t18, t29)  # t30: "cpu b8[2, 4096]"

  # loss = -torch.where(gain < clipped, gain, clipped).mean() - 0.01 * entropy.mean()
  t31 = torch.where(t30, t18, t29)  # t31: "cpu f32[2, 4096]"
  del t18, t29
  t32 = shallow_copy(t31)  # t32: "cpu f32[2, 4096]"
  del t31
  t33 = torch.sum(t32, (0, 1))  # t33: "cpu f32[]"
  del t32
  t34 = torch_div_prim_impl(t33, 8192.0)  # t34: "cpu f32[]"
  del t33
  t35 = shallow_copy(t34)  # t35: "cpu f32[]"
  del t34
  t36 = torch.neg(t35)  # t36: "cpu f32[]"
  del t35
  t37 = shallow_copy(t3)  # t37: "cpu f32[2, 4096]"
  t38 = torch.sum(t37, (0, 1))  # t38: "cpu f32[]"
  del t37
  t39 = torch_div_prim_impl(t38, 8192.0)  # t39: "cpu f32[]"
  del t38
  t40 = shallow_copy(t39)  # t40: "cpu f32[]"
  del t39
  t41 = torch.mul(0.01, t40)  # t41: "cpu f32[]"
  del t40
  t42 = torch.sub(t36, t41, alpha=1)  # t42: "cpu f32[]"
  del t36, t41

  # return loss, (logits.argmax(-1) == tokens).float().mean()
  t43 = torch.eq(t4, tokens)  # t43: "cpu b8[2, 4096]"
  del t4
  t44 = Tensor.to(t43, torch.float32, copy=True)  # t44: "cpu f32[2, 4096]"
  del t43
  t45 = shallow_copy(t44)  # t45: "cpu f32[2, 4096]"
  del t44
  t46 = torch.sum(t45, (0, 1))  # t46: "cpu f32[]"
  del t45
  t47 = torch_div_prim_impl(t46, 8192.0)  # t47: "cpu f32[]"
  del t46
  t48 = shallow_copy(t47)  # t48: "cpu f32[]"
  del t47
  return {'output': (t42, t48), 'flat_args': [hidden, weight, tokens], 'flat_output': (t42, t48)}, ((t30, t28, t23, t24, t19, t20, t17, t12, t8, hidden, weight, t1, t5, t6, t7, t3), ())


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
  t49, _, = cotangents
  # t49: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t30, t28, t23, t24, t19, t20, t17, t12, t8, hidden, weight, t1, \
  t5, t6, t7, t3, = C0
  # t30: "cpu b8[2, 4096]"
  # t28: "cpu f32[2, 4096]"
  # t23: "cpu b8[2, 4096]"
  # t24: "cpu b8[2, 4096]"
  # t19: "cpu b8[2, 4096]"
  # t20: "cpu b8[2, 4096]"
  # t17: "cpu f32[2, 4096]"
  # t12: "cpu f32[2, 4096]"
  # t8: "cpu f32[2, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu i64[2, 4096]"
  # t5: "cpu f32[8192]"
  # t6: "cpu f32[8192]"
  # t7: "cpu i64[]"
  # t3: "cpu f32[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  t50 = torch.neg(t49)  # t50: "cpu f32[]"
  t51 = torch.mul(0.01, t50)  # t51: "cpu f32[]"
  del t50
  t52 = torch.true_divide(t51, 8192.0)  # t52: "cpu f32[]"
  del t51
  t53 = torch.unsqueeze(t52, 0)  # t53: "cpu f32[1]"
  del t52
  t54 = torch.unsqueeze(t53, 1)  # t54: "cpu f32[1, 1]"
  del t53
  t55 = Tensor.expand(t54, [1, 1])  # t55: "cpu f32[1, 1]"
  del t54
  t56 = Tensor.expand(t55, (2, 4096))  # t56: "cpu f32[2, 4096]"
  del t55
  t57 = torch.neg(t49)  # t57: "cpu f32[]"
  del t49
  t58 = torch.true_divide(t57, 8192.0)  # t58: "cpu f32[]"
  del t57
  t59 = torch.unsqueeze(t58, 0)  # t59: "cpu f32[1]"
  del t58
  t60 = torch.unsqueeze(t59, 1)  # t60: "cpu f32[1, 1]"
  del t59
  t61 = Tensor.expand(t60, [1, 1])  # t61: "cpu f32[1, 1]"
  del t60
  t62 = Tensor.expand(t61, (2, 4096))  # t62: "cpu f32[2, 4096]"
  del t61
  t63 = torch.where(t30, t62, 0)  # t63: "cpu f32[2, 4096]"
  t64 = torch.where(t30, 0, t62)  # t64: "cpu f32[2, 4096]"
  del t30, t62
  t65 = torch.mul(t28, t64)  # t65: "cpu f32[2, 4096]"
  del t28, t64
  t66 = torch.where(t23, t65, 0)  # t66: "cpu f32[2, 4096]"
  t67 = torch.where(t23, 0, t65)  # t67: "cpu f32[2, 4096]"
  del t23, t65
  t68 = torch.where(t24, t67, 0)  # t68: "cpu f32[2, 4096]"
  del t24, t67
  t69 = torch.add(t66, t68, alpha=1)  # t69: "cpu f32[2, 4096]"
  del t66, t68
  t70 = torch.where(t19, t69, 0)  # t70: "cpu f32[2, 4096]"
  t71 = torch.where(t19, 0, t69)  # t71: "cpu f32[2, 4096]"
  del t19, t69
  t72 = torch.where(t20, t71, 0)  # t72: "cpu f32[2, 4096]"
  del t20, t71
  t73 = torch.add(t70, t72, alpha=1)  # t73: "cpu f32[2, 4096]"
  del t70, t72
  t74 = torch.mul(t17, t63)  # t74: "cpu f32[2, 4096]"
  del t17, t63
  t75 = torch.add(t73, t74, alpha=1)  # t75: "cpu f32[2, 4096]"
  del t73, t74
  t76 = torch.mul(t75, t12)  # t76: "cpu f32[2, 4096]"
  del t75, t12
  t77 = torch.neg(t76)  # t77: "cpu f32[2, 4096]"
  (t78,) = detach_vjp(((t8,), {}), t77)
  del t8, t77
  t79 = torch.add(t76, t78, alpha=1)  # t79: "cpu f32[2, 4096]"
  del t76, t78
  t80 = torch.neg(t79)  # t80: "cpu f32[2, 4096]"
  del t79
  (t81, t82) = linear_cross_entropy_bwd(t80, hidden, weight, t1, None, t5, t6, t7, None, needs_grad=("input", "linear_weight"), entropy_grad=t56, entropy=t3, reduction='none', ignore_index=-4611686018427387905, logit_scale=1.1111111111111112, outputs=("entropy", "valid_argmax"), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1, grad = t80, entropy_grad = t56, row_max = t5, row_log_sum = t6, entropy = t3
    # dX = t81: f32[2, 4096, 4096], dW = t82: f32[128256, 4096]
    # s f32[8192] = grad                                                                                                                                                                                               PyTorch
    # g_e f32[8192] = entropy_grad                                                                                                                                                                                     PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   z f32[8192, K] = x @ W[block].t()                                                                                                                                                                              PyTorch
    #   u f32[8192, K] = z * 1.1111111111111112  (wherever they are read)
    #   dlogits f32[8192, K] = exp(u - row_max - row_log_sum) * ((s + g_e * (row_log_sum - entropy)) * 1.1111111111111112 - g_e * 1.1111111111111112 * (u - row_max)) - s * 1.1111111111111112 * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                                                                                                                                       PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                                                                                                                                       PyTorch
  del t80, hidden, weight, t1, t5, t6, t7, t3, t56
  return (t81, t82, None)
