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
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t29: i64[], 8 bytes
#     t30: f32[2, 4096, 4096], 134,217,728 bytes
#     t31: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens, advantages, token_weights):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"
  # advantages: "cpu f32[2]"
  # token_weights: "cpu f32[2, 4096]"

  # log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
  t0 = torch.unsqueeze(tokens, -1)  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.gt(token_weights, 0.5)  # t1: "cpu b8[2, 4096]"

  # mask = (token_weights > 0.5).float()
  t2 = Tensor.to(t1, torch.float32, copy=True)  # t2: "cpu f32[2, 4096]"
  del t1

  # old, reference = log_probs.detach() + 0.3 * token_weights, log_probs.detach() - 0.1
  t3 = torch.mul(0.3, token_weights)  # t3: "cpu f32[2, 4096]"

  # gain = torch.min(ratio * advantages.unsqueeze(1), ratio.clamp(0.8, 1.2) * advantages.unsqueeze(1))
  t4 = torch.unsqueeze(advantages, 1)  # t4: "cpu f32[2, 1]"
  t5 = Tensor.expand(t4, [2, 1])  # t5: "cpu f32[2, 1]"
  del t4

  # loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
  t6 = torch.sum(t2, -1, False, dtype=None)  # t6: "cpu f32[2]"
  t7 = torch.ne(t6, t6)  # t7: "cpu b8[2]"
  t8 = torch.gt(t6, 1.0)  # t8: "cpu b8[2]"
  t9 = torch.where(t8, t6, 1.0)  # t9: "cpu f32[2]"
  del t8
  t10 = torch.where(t7, t6, t9)  # t10: "cpu f32[2]"
  del t7, t6, t9
  t11 = torch.detach(t10)  # t11: "cpu f32[2]"
  del t10
  t12 = shallow_copy(t11)  # t12: "cpu f32[2]"
  del t11
  t13 = torch_div_prim_impl(0.5, t12)  # t13: "cpu f32[2]"
  del t12
  t14 = torch_prims_reshape_impl(t13, (2, 1))  # t14: "cpu f32[2, 1]"
  del t13
  t15 = Tensor.expand(t14, (2, 4096))  # t15: "cpu f32[2, 4096]"
  del t14
  t16 = torch.detach(t2)  # t16: "cpu f32[2, 4096]"
  t17 = shallow_copy(t16)  # t17: "cpu f32[2, 4096]"
  del t16
  t18 = torch.mul(t15, t17)  # t18: "cpu f32[2, 4096]"
  del t15, t17
  t19 = shallow_copy(t18)  # t19: "cpu f32[2, 4096]"
  del t18
  t20 = shallow_copy(t19)  # t20: "cpu f32[2, 4096]"
  del t19
  t21 = torch.detach(t3)  # t21: "cpu f32[2, 4096]"
  t22 = torch.detach(t5)  # t22: "cpu f32[2, 1]"
  del t5
  t23 = Tensor.expand(t22, (2, 4096))  # t23: "cpu f32[2, 4096]"
  del t22
  t24 = torch.reshape(t0, (2, 4096))  # t24: "cpu i64[2, 4096]"
  del t0
  (t25, t26, t27, t28, t29, t30, t31) = linear_cross_entropy_fwd(hidden, weight, t24, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, logit_scale=1.1111111111111112, outputs=("log_prob",), detached=("log_prob",), token_loss=(("f0", "detach", ("log_prob",)), ("f1", "add", ("f0", "i0")), ("f2", "sub", ("f0", 0.1)), ("f3", "sub", ("f2", "log_prob")), ("f4", "exp", ("f3",)), ("f5", "sub", ("f4", "f3")), ("f6", "sub", ("f5", 1)), ("f7", "sub", ("log_prob", "f1")), ("f8", "exp", ("f7",)), ("f9", "mul", ("f8", "i1")), ("f10", "clamp", ("f8", 0.8, 1.2)), ("f11", "mul", ("f10", "i1")), ("f12", "minimum", ("f9", "f11")), ("f13", "mul", (0.04, "f6")), ("f14", "sub", ("f13", "f12")), ("f20", "mul", ("f14", "i2"))), strategy='gradients_in_forward', chunk_rows=65, token_inputs=(t21, t23, t20))
    # x = hidden, W = weight, y = t24, i0 = t21, i1 = t23, i2 = t20
    # loss = t25: f32[], log_prob = t26: f32[2, 4096], row_max = t27: f32[8192], row_log_sum = t28: f32[8192], valid_count = t29: i64[], dX = t30: f32[2, 4096, 4096], dW = t31: f32[128256, 4096]
    # s f32[8192] = 1                                                                                                                                  PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   z f32[C, 128256] = x[chunk] @ W.t()                                                                                                            PyTorch
    #   u f32[C, 128256] = z * 1.1111111111111112  (wherever they are read)
    #   z_y f32[C] = z[y[chunk]]                                                                                                                       PyTorch
    #   row_max, row_log_sum f32[C] = max_v(u), log(sum_v(exp(u - row_max)))                                                                           PyTorch
    #   log_prob f32[C] = z_y * 1.1111111111111112 - row_max - row_log_sum                                                                             PyTorch
    #   f1 f32[C] = log_prob + i0[chunk]                                                                                                               PyTorch
    #   f2 f32[C] = log_prob - 0.1                                                                                                                     PyTorch
    #   f3 f32[C] = f2 - log_prob                                                                                                                      PyTorch
    #   f4 f32[C] = exp(f3)                                                                                                                            PyTorch
    #   f4_log_prob f32[C] = -1 * f4                                                                                                                   PyTorch
    #   f5 f32[C] = f4 - f3                                                                                                                            PyTorch
    #   f5_log_prob f32[C] = f4_log_prob + 1                                                                                                           PyTorch
    #   f6 f32[C] = f5 - 1                                                                                                                             PyTorch
    #   f7 f32[C] = log_prob - f1                                                                                                                      PyTorch
    #   f8 f32[C] = exp(f7)                                                                                                                            PyTorch
    #   f9 f32[C] = f8 * i1[chunk]                                                                                                                     PyTorch
    #   f9_log_prob f32[C] = f8 * i1[chunk]                                                                                                            PyTorch
    #   f10 f32[C] = clamp(f8, 0.8, 1.2)                                                                                                               PyTorch
    #   f10_log_prob f32[C] = where(logical_and(f8 >= 0.8, f8 <= 1.2), f8, 0)                                                                          PyTorch
    #   f11 f32[C] = f10 * i1[chunk]                                                                                                                   PyTorch
    #   f11_log_prob f32[C] = f10_log_prob * i1[chunk]                                                                                                 PyTorch
    #   f12 f32[C] = minimum(f9, f11)                                                                                                                  PyTorch
    #   f12_log_prob f32[C] = where(f9 == f11, (f9_log_prob + f11_log_prob) * 0.5, where(f9 < f11, f9_log_prob, f11_log_prob))                         PyTorch
    #   f13 f32[C] = 0.04 * f6                                                                                                                         PyTorch
    #   f13_log_prob f32[C] = f5_log_prob * 0.04                                                                                                       PyTorch
    #   f14 f32[C] = f13 - f12                                                                                                                         PyTorch
    #   f14_log_prob f32[C] = f13_log_prob + f12_log_prob * -1                                                                                         PyTorch
    #   f20 f32[C] = f14 * i2[chunk]                                                                                                                   PyTorch
    #   f20_log_prob f32[C] = f14_log_prob * i2[chunk]                                                                                                 PyTorch
    #   token_loss f32[C] = f20                                                                                                                        PyTorch
    #   g_p f32[C] = where(s[chunk] == 0, 0, s[chunk] * f20_log_prob)                                                                                  PyTorch
    #   dlogits f32[C, 128256] = exp(u - row_max - row_log_sum) * -g_p * 1.1111111111111112 - -g_p * 1.1111111111111112 * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                 PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                           PyTorch
    # token_losses f32[8192] = token_loss                                                                                                              PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                   PyTorch
    # log_prob f32[8192] = z_y * 1.1111111111111112 - row_max - row_log_sum                                                                            PyTorch
  del t27, t28, t24, t21, t23, t20

  # old, reference = log_probs.detach() + 0.3 * token_weights, log_probs.detach() - 0.1
  t32 = torch.detach(t26)  # t32: "cpu f32[2, 4096]"
  t33 = torch.add(t32, t3, alpha=1)  # t33: "cpu f32[2, 4096]"
  del t32, t3

  # ratio = torch.exp(log_probs - old)
  t34 = torch.sub(t26, t33, alpha=1)  # t34: "cpu f32[2, 4096]"
  del t26, t33
  t35 = torch.exp(t34)  # t35: "cpu f32[2, 4096]"
  del t34

  # return loss, ((ratio.detach() < 0.8) * mask).sum()
  t36 = torch.detach(t35)  # t36: "cpu f32[2, 4096]"
  del t35
  t37 = torch.lt(t36, 0.8)  # t37: "cpu b8[2, 4096]"
  del t36
  t38 = Tensor.to(t37, torch.float32, copy=True)  # t38: "cpu f32[2, 4096]"
  del t37
  t39 = torch.mul(t38, t2)  # t39: "cpu f32[2, 4096]"
  del t38, t2
  t40 = torch.sum(t39, None, False, dtype=None)  # t40: "cpu f32[]"
  del t39
  return {'output': (t25, t40), 'flat_args': [hidden, weight, tokens, advantages, token_weights], 'flat_output': (t25, t40)}, ((t29, t30, t31), ())


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
  t41, _, = cotangents
  # t41: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t29, t30, t31, = C0
  # t29: "cpu i64[]"
  # t30: "cpu f32[2, 4096, 4096]"
  # t31: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t42, t43) = scale_gradients(t41, t29, t30, t31)
    # t30 f32[2, 4096, 4096] = t30 * where(t29 == 0, 0, t41)  (skipped where that is 1)  PyTorch
    # t31 f32[128256, 4096] = t31 * where(t29 == 0, 0, t41)  (skipped where that is 1)   PyTorch
  del t41, t29, t30, t31
  return (t42, t43, None, None, None)
