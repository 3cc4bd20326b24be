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
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t12: i64[], 8 bytes
#     t13: f32[2, 4096, 4096], 134,217,728 bytes
#     t14: f32[128256, 4096], 2,101,346,304 bytes

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

  # advantage = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1] - 0.5
  t1 = torch.arange(start=0, step=1, end=4096, device=torch.device("cpu"), dtype=None)  # t1: "cpu i64[4096]"
  t2 = torch.true_divide(t1, 4096)  # t2: "cpu f32[4096]"
  del t1
  t3 = torch.sub(t2, 0.5, alpha=1)  # t3: "cpu f32[4096]"
  del t2

  # loss = -torch.where(gain < clipped, gain, clipped).mean() - 0.01 * entropy.mean()
  t4 = torch.detach(t3)  # t4: "cpu f32[4096]"
  del t3
  t5 = torch.unsqueeze(t4, 0)  # t5: "cpu f32[1, 4096]"
  del t4
  t6 = Tensor.expand(t5, (2, 4096))  # t6: "cpu f32[2, 4096]"
  del t5
  t7 = torch.reshape(t0, (2, 4096))  # t7: "cpu i64[2, 4096]"
  del t0
  (t8, t9, t10, t11, t12, t13, t14) = linear_cross_entropy_fwd(hidden, weight, t7, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, logit_scale=1.1111111111111112, outputs=("valid_argmax",), token_loss=(("f0", "detach", ("log_prob",)), ("f1", "sub", ("log_prob", "f0")), ("f2", "add", ("f1", 0.1)), ("f3", "exp", ("f2",)), ("f4", "mul", ("f3", "i0")), ("f5", "clamp", ("f3", 0.8, 1.2)), ("f6", "mul", ("f5", "i0")), ("f7", "lt", ("f4", "f6")), ("f8", "where", ("f7", "f4", "f6")), ("f9", "mul", ("f8", -0.0001220703125)), ("f10", "mul", ("entropy", -1.220703125e-06)), ("f11", "add", ("f9", "f10"))), strategy='gradients_in_forward', chunk_rows=65, token_inputs=(t6,))
    # x = hidden, W = weight, y = t7, i0 = t6
    # loss = t8: f32[], valid_argmax = t9: i64[2, 4096], row_max = t10: f32[8192], row_log_sum = t11: f32[8192], valid_count = t12: i64[], dX = t13: f32[2, 4096, 4096], dW = t14: f32[128256, 4096]
    # s f32[8192] = 1                                                                                                                                                                                                                 PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   z f32[C, 128256] = x[chunk] @ W.t()                                                                                                                                                                                           PyTorch
    #   u f32[C, 128256] = z * 1.1111111111111112  (wherever they are read)
    #   z_y f32[C] = z[y[chunk]]                                                                                                                                                                                                      PyTorch
    #   row_max, row_log_sum f32[C] = max_v(u), log(sum_v(exp(u - row_max)))                                                                                                                                                          PyTorch
    #   argmax i64[C] = argmax_v(z)                                                                                                                                                                                                   PyTorch
    #   expected f32[C] = sum_v(exp(u - row_max - row_log_sum) * (u - row_max))                                                                                                                                                       PyTorch
    #   log_prob f32[C] = z_y * 1.1111111111111112 - row_max - row_log_sum                                                                                                                                                            PyTorch
    #   entropy f32[C] = row_log_sum - expected                                                                                                                                                                                       PyTorch
    #   f1 f32[C] = log_prob - log_prob                                                                                                                                                                                               PyTorch
    #   f2 f32[C] = f1 + 0.1                                                                                                                                                                                                          PyTorch
    #   f3 f32[C] = exp(f2)                                                                                                                                                                                                           PyTorch
    #   f4 f32[C] = f3 * i0[chunk]                                                                                                                                                                                                    PyTorch
    #   f4_log_prob f32[C] = f3 * i0[chunk]                                                                                                                                                                                           PyTorch
    #   f5 f32[C] = clamp(f3, 0.8, 1.2)                                                                                                                                                                                               PyTorch
    #   f5_log_prob f32[C] = where(logical_and(f3 >= 0.8, f3 <= 1.2), f3, 0)                                                                                                                                                          PyTorch
    #   f6 f32[C] = f5 * i0[chunk]                                                                                                                                                                                                    PyTorch
    #   f6_log_prob f32[C] = f5_log_prob * i0[chunk]                                                                                                                                                                                  PyTorch
    #   f7 b8[C] = f4 < f6                                                                                                                                                                                                            PyTorch
    #   f8 f32[C] = where(f7, f4, f6)                                                                                                                                                                                                 PyTorch
    #   f8_log_prob f32[C] = where(f7, f4_log_prob, f6_log_prob)                                                                                                                                                                      PyTorch
    #   f9 f32[C] = f8 * -0.0001220703125                                                                                                                                                                                             PyTorch
    #   f9_log_prob f32[C] = f8_log_prob * -0.0001220703125                                                                                                                                                                           PyTorch
    #   f10 f32[C] = entropy * -1.220703125e-06                                                                                                                                                                                       PyTorch
    #   f11 f32[C] = f9 + f10                                                                                                                                                                                                         PyTorch
    #   token_loss f32[C] = f11                                                                                                                                                                                                       PyTorch
    #   g_p f32[C] = where(s[chunk] == 0, 0, s[chunk] * f9_log_prob)                                                                                                                                                                  PyTorch
    #   g_e f32[C] = s[chunk] * -1.220703125e-06                                                                                                                                                                                      PyTorch
    #   dlogits f32[C, 128256] = exp(u - row_max - row_log_sum) * ((-g_p + g_e * (row_log_sum - entropy)) * 1.1111111111111112 - g_e * 1.1111111111111112 * (u - row_max)) - -g_p * 1.1111111111111112 * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                                                                                PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                                                                                                          PyTorch
    # token_losses f32[8192] = token_loss                                                                                                                                                                                             PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                                                                                  PyTorch
    # valid_argmax i64[8192] = argmax                                                                                                                                                                                                 PyTorch
  del t10, t11, t7, t6

  # return loss, (logits.argmax(-1) == tokens).float().mean()
  t15 = torch.eq(t9, tokens)  # t15: "cpu b8[2, 4096]"
  del t9
  t16 = Tensor.to(t15, torch.float32, copy=True)  # t16: "cpu f32[2, 4096]"
  del t15
  t17 = shallow_copy(t16)  # t17: "cpu f32[2, 4096]"
  del t16
  t18 = torch.sum(t17, (0, 1))  # t18: "cpu f32[]"
  del t17
  t19 = torch_div_prim_impl(t18, 8192.0)  # t19: "cpu f32[]"
  del t18
  t20 = shallow_copy(t19)  # t20: "cpu f32[]"
  del t19
  return {'output': (t8, t20), 'flat_args': [hidden, weight, tokens], 'flat_output': (t8, t20)}, ((t12, t13, t14), ())


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
  t21, _, = cotangents
  # t21: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t12, t13, t14, = C0
  # t12: "cpu i64[]"
  # t13: "cpu f32[2, 4096, 4096]"
  # t14: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t22, t23) = scale_gradients(t21, t12, t13, t14)
    # t13 f32[2, 4096, 4096] = t13 * where(t12 == 0, 0, t21)  (skipped where that is 1)  PyTorch
    # t14 f32[128256, 4096] = t14 * where(t12 == 0, 0, t21)  (skipped where that is 1)   PyTorch
  del t21, t12, t13, t14
  return (t22, t23, None)
