# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def masked_means_of_three_losses(hidden, weight, tokens, token_weights):
#         """A policy's loss, a bonus of entropy and a divergence, as verl has it."""
#         log_probs = F.linear(hidden, weight).log_softmax(-1)
#         entropy = -(log_probs.exp() * log_probs).sum(-1)
#         per_token = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
#         mask = (token_weights > 0.5).float()
#         ratio, divergence = torch.exp(per_token + 4), (per_token + 5).square() * 0.5
#         policy, bonus, penalty = ((losses * mask).sum() / mask.sum() for losses in (-ratio, entropy, divergence))
#         return policy - 0.01 * bonus + 0.1 * penalty
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t48: i64[], 8 bytes
#     t49: f32[2, 4096, 4096], 134,217,728 bytes
#     t50: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens, token_weights):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"
  # token_weights: "cpu f32[2, 4096]"

  # per_token = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
  t0 = Tensor.__getitem__(tokens, (..., None))  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.gt(token_weights, 0.5)  # t1: "cpu b8[2, 4096]"

  # mask = (token_weights > 0.5).float()
  t2 = Tensor.to(t1, torch.float32, copy=True)  # t2: "cpu f32[2, 4096]"
  del t1

  # policy, bonus, penalty = ((losses * mask).sum() / mask.sum() for losses in (-ratio, entropy, divergence))
  t3 = torch.sum(t2, None, False, dtype=None)  # t3: "cpu f32[]"
  t4 = torch.sum(t2, None, False, dtype=None)  # t4: "cpu f32[]"
  t5 = torch.sum(t2, None, False, dtype=None)  # t5: "cpu f32[]"

  # return policy - 0.01 * bonus + 0.1 * penalty
  t6 = torch.detach(t5)  # t6: "cpu f32[]"
  del t5
  t7 = shallow_copy(t6)  # t7: "cpu f32[]"
  del t6
  t8 = torch_div_prim_impl(0.1, t7)  # t8: "cpu f32[]"
  del t7
  t9 = torch_prims_reshape_impl(t8, (1, 1))  # t9: "cpu f32[1, 1]"
  del t8
  t10 = Tensor.expand(t9, (2, 4096))  # t10: "cpu f32[2, 4096]"
  del t9
  t11 = torch.detach(t4)  # t11: "cpu f32[]"
  del t4
  t12 = shallow_copy(t11)  # t12: "cpu f32[]"
  del t11
  t13 = torch_div_prim_impl(-0.01, t12)  # t13: "cpu f32[]"
  del t12
  t14 = torch_prims_reshape_impl(t13, (1, 1))  # t14: "cpu f32[1, 1]"
  del t13
  t15 = Tensor.expand(t14, (2, 4096))  # t15: "cpu f32[2, 4096]"
  del t14
  t16 = torch.detach(t3)  # t16: "cpu f32[]"
  del t3
  t17 = shallow_copy(t16)  # t17: "cpu f32[]"
  del t16
  t18 = torch_div_prim_impl(1.0, t17)  # t18: "cpu f32[]"
  del t17
  t19 = torch_prims_reshape_impl(t18, (1, 1))  # t19: "cpu f32[1, 1]"
  del t18
  t20 = Tensor.expand(t19, (2, 4096))  # t20: "cpu f32[2, 4096]"
  del t19
  t21 = torch.detach(t2)  # t21: "cpu f32[2, 4096]"
  t22 = shallow_copy(t21)  # t22: "cpu f32[2, 4096]"
  del t21
  t23 = torch.mul(t20, t22)  # t23: "cpu f32[2, 4096]"
  del t20, t22
  t24 = torch.neg(t23)  # t24: "cpu f32[2, 4096]"
  del t23
  t25 = torch.detach(t2)  # t25: "cpu f32[2, 4096]"
  t26 = shallow_copy(t25)  # t26: "cpu f32[2, 4096]"
  del t25
  t27 = torch.mul(t15, t26)  # t27: "cpu f32[2, 4096]"
  del t15, t26
  t28 = torch.detach(t2)  # t28: "cpu f32[2, 4096]"
  del t2
  t29 = shallow_copy(t28)  # t29: "cpu f32[2, 4096]"
  del t28
  t30 = torch.mul(t10, t29)  # t30: "cpu f32[2, 4096]"
  del t10, t29
  t31 = torch.mul(t30, 0.5)  # t31: "cpu f32[2, 4096]"
  del t30
  t32 = shallow_copy(t31)  # t32: "cpu f32[2, 4096]"
  del t31
  t33 = shallow_copy(t32)  # t33: "cpu f32[2, 4096]"
  del t32
  t34 = shallow_copy(t27)  # t34: "cpu f32[2, 4096]"
  del t27
  t35 = shallow_copy(t34)  # t35: "cpu f32[2, 4096]"
  del t34
  t36 = shallow_copy(t24)  # t36: "cpu f32[2, 4096]"
  del t24
  t37 = shallow_copy(t36)  # t37: "cpu f32[2, 4096]"
  del t36
  t38 = torch.ne(t33, 0.0)  # t38: "cpu b8[2, 4096]"
  t39 = torch.ne(t35, 0.0)  # t39: "cpu b8[2, 4096]"
  t40 = torch.logical_or(t38, t39)  # t40: "cpu b8[2, 4096]"
  del t38, t39
  t41 = torch.ne(t37, 0.0)  # t41: "cpu b8[2, 4096]"
  t42 = torch.logical_or(t40, t41)  # t42: "cpu b8[2, 4096]"
  del t40, t41
  t43 = Tensor.to(t42, copy=False, dtype=torch.float32)  # t43: "cpu f32[2, 4096]"
  del t42
  t44 = torch.reshape(t0, (2, 4096))  # t44: "cpu i64[2, 4096]"
  del t0
  (t45, t46, t47, t48, t49, t50) = linear_cross_entropy_fwd(hidden, weight, t44, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "add", ("log_prob", 4)), ("f1", "exp", ("f0",)), ("f2", "add", ("log_prob", 5)), ("f3", "pow", ("f2", 2)), ("f9", "mul", ("f3", "i0")), ("f10", "mul", ("entropy", "i1")), ("f11", "add", ("f9", "f10")), ("f12", "mul", ("f1", "i2")), ("f13", "add", ("f11", "f12"))), strategy='gradients_in_forward', chunk_rows=65, token_inputs=(t33, t35, t37), token_weights=t43)
    # x = hidden, W = weight, y = t44, w_t = t43, i0 = t33, i1 = t35, i2 = t37
    # loss = t45: f32[], row_max = t46: f32[8192], row_log_sum = t47: f32[8192], valid_count = t48: i64[], dX = t49: f32[2, 4096, 4096], dW = t50: f32[128256, 4096]
    # valid, valid_count = w_t != 0, sum(w_t != 0)                                                                                                                             PyTorch
    # x, y = x[valid], y[valid]                                                                                                                                                PyTorch
    # w_t f32[8192] = w_t[valid]                                                                                                                                               PyTorch
    # i0 f32[8192] = i0[valid]                                                                                                                                                 PyTorch
    # i1 f32[8192] = i1[valid]                                                                                                                                                 PyTorch
    # i2 f32[8192] = i2[valid]                                                                                                                                                 PyTorch
    # s f32[8192] = 1 * w_t                                                                                                                                                    PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                                                                               PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                                                                     PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                                         PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                                                                                      PyTorch
    #   log_prob f32[C] = logits_y - row_max - row_log_sum                                                                                                                     PyTorch
    #   entropy f32[C] = row_log_sum - expected                                                                                                                                PyTorch
    #   f0 f32[C] = log_prob + 4                                                                                                                                               PyTorch
    #   f1 f32[C] = exp(f0)                                                                                                                                                    PyTorch
    #   f2 f32[C] = log_prob + 5                                                                                                                                               PyTorch
    #   f3 f32[C] = f2 ** 2                                                                                                                                                    PyTorch
    #   f3_log_prob f32[C] = f2 * 2                                                                                                                                            PyTorch
    #   f9 f32[C] = f3 * i0[chunk]                                                                                                                                             PyTorch
    #   f9_log_prob f32[C] = f3_log_prob * i0[chunk]                                                                                                                           PyTorch
    #   f10 f32[C] = entropy * i1[chunk]                                                                                                                                       PyTorch
    #   f11 f32[C] = f9 + f10                                                                                                                                                  PyTorch
    #   f12 f32[C] = f1 * i2[chunk]                                                                                                                                            PyTorch
    #   f12_log_prob f32[C] = f1 * i2[chunk]                                                                                                                                   PyTorch
    #   f13 f32[C] = f11 + f12                                                                                                                                                 PyTorch
    #   f13_log_prob f32[C] = f9_log_prob + f12_log_prob                                                                                                                       PyTorch
    #   token_loss f32[C] = f13                                                                                                                                                PyTorch
    #   g_p f32[C] = where(s[chunk] == 0, 0, s[chunk] * f13_log_prob)                                                                                                          PyTorch
    #   g_e f32[C] = where(s[chunk] == 0, 0, s[chunk] * i1[chunk])                                                                                                             PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                         PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                                                   PyTorch
    # token_losses f32[8192] = token_loss * w_t                                                                                                                                PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                           PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                                                                     PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                                                                             PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                                                                         PyTorch
  del t46, t47, t44, t33, t35, t37, t43
  return {'output': (t45,), 'flat_args': [hidden, weight, tokens, token_weights], 'flat_output': (t45,)}, ((t48, t49, t50), ())


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
  t51, = cotangents
  # t51: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t48, t49, t50, = C0
  # t48: "cpu i64[]"
  # t49: "cpu f32[2, 4096, 4096]"
  # t50: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t52, t53) = scale_gradients(t51, t48, t49, t50)
    # t49 f32[2, 4096, 4096] = t49 * where(t48 == 0, 0, t51)  (skipped where that is 1)  PyTorch
    # t50 f32[128256, 4096] = t50 * where(t48 == 0, 0, t51)  (skipped where that is 1)   PyTorch
  del t51, t48, t49, t50
  return (t52, t53, None, None)
