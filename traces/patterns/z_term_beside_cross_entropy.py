# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def z_term_beside_cross_entropy(hidden, weight, labels):
#         """As PaLM has it: a gradient of the log-sum-exp; a mean over all tokens beside one over those with a label."""
#         logits = F.linear(hidden, weight).float()
#         loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
#         return loss + 1e-4 * torch.logsumexp(logits, dim=-1).square().mean()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t21: i64[], 8 bytes
#     t22: f32[2, 4096, 4096], 134,217,728 bytes
#     t23: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
  t0 = torch.flatten(labels, 0, -1)  # t0: "cpu i64[8192]"
  t1 = torch.ne(t0, -100)  # t1: "cpu b8[8192]"
  t2 = torch.sum(t1, None, False, dtype=None)  # t2: "cpu i64[]"

  # return loss + 1e-4 * torch.logsumexp(logits, dim=-1).square().mean()
  t3 = torch.detach(t2)  # t3: "cpu i64[]"
  del t2
  t4 = Tensor.to(t3, copy=False, dtype=torch.float32)  # t4: "cpu f32[]"
  del t3
  t5 = torch_div_prim_impl(1.0, t4)  # t5: "cpu f32[]"
  del t4
  t6 = torch_prims_reshape_impl(t5, (1,))  # t6: "cpu f32[1]"
  del t5
  t7 = Tensor.expand(t6, (8192,))  # t7: "cpu f32[8192]"
  del t6
  t8 = torch.detach(t1)  # t8: "cpu b8[8192]"
  del t1
  t9 = Tensor.to(t8, copy=False, dtype=torch.float32)  # t9: "cpu f32[8192]"
  del t8
  t10 = torch.mul(t7, t9)  # t10: "cpu f32[8192]"
  del t7, t9
  t11 = shallow_copy(t10)  # t11: "cpu f32[8192]"
  del t10
  t12 = torch_prims_reshape_impl(t11, (2, 4096))  # t12: "cpu f32[2, 4096]"
  del t11
  t13 = torch.ne(t0, -100)  # t13: "cpu b8[8192]"
  t14 = torch.reshape(t13, (2, 4096))  # t14: "cpu b8[2, 4096]"
  del t13
  t15 = torch.ne(t0, -100)  # t15: "cpu b8[8192]"
  t16 = torch.where(t15, t0, 0)  # t16: "cpu i64[8192]"
  del t15, t0
  t17 = torch.reshape(t16, (2, 4096))  # t17: "cpu i64[2, 4096]"
  del t16
  (t18, t19, t20, t21, t22, t23) = linear_cross_entropy_fwd(hidden, weight, t17, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "where", ("i0", "log_prob", 0.0)), ("f1", "neg", ("f0",)), ("f4", "pow", ("log_sum_exp", 2)), ("f5", "mul", ("f1", "i1")), ("f6", "mul", ("f4", 1.220703125e-08)), ("f7", "add", ("f5", "f6"))), strategy='gradients_in_forward', chunk_rows=65, token_inputs=(t14, t12))
    # x = hidden, W = weight, y = t17, i0 = t14, i1 = t12
    # loss = t18: f32[], row_max = t19: f32[8192], row_log_sum = t20: f32[8192], valid_count = t21: i64[], dX = t22: f32[2, 4096, 4096], dW = t23: f32[128256, 4096]
    # s f32[8192] = 1                                                                                                     PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                    PyTorch
    #   log_prob f32[C] = logits_y - row_max - row_log_sum                                                                PyTorch
    #   log_sum_exp f32[C] = row_max + row_log_sum                                                                        PyTorch
    #   f0 f32[C] = where(i0[chunk], log_prob, 0)                                                                         PyTorch
    #   f0_log_prob f32[C] = where(i0[chunk], 1, 0)                                                                       PyTorch
    #   f1 f32[C] = -f0                                                                                                   PyTorch
    #   f1_log_prob f32[C] = f0_log_prob * -1                                                                             PyTorch
    #   f4 f32[C] = log_sum_exp ** 2                                                                                      PyTorch
    #   f4_log_sum_exp f32[C] = log_sum_exp * 2                                                                           PyTorch
    #   f5 f32[C] = f1 * i1[chunk]                                                                                        PyTorch
    #   f5_log_prob f32[C] = f1_log_prob * i1[chunk]                                                                      PyTorch
    #   f6 f32[C] = f4 * 1.220703125e-08                                                                                  PyTorch
    #   f6_log_sum_exp f32[C] = f4_log_sum_exp * 1.220703125e-08                                                          PyTorch
    #   f7 f32[C] = f5 + f6                                                                                               PyTorch
    #   token_loss f32[C] = f7                                                                                            PyTorch
    #   g_p f32[C] = where(s[chunk] == 0, 0, s[chunk] * f5_log_prob)                                                      PyTorch
    #   g_l f32[C] = where(s[chunk] == 0, 0, s[chunk] * f6_log_sum_exp)                                                   PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_l) - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # token_losses f32[8192] = token_loss                                                                                 PyTorch
    # loss f32[] = sum(token_losses)                                                                                      PyTorch
  del t19, t20, t17, t14, t12
  return {'output': (t18,), 'flat_args': [hidden, weight, labels], 'flat_output': (t18,)}, ((t21, t22, t23), ())


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
  t24, = cotangents
  # t24: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t21, t22, t23, = C0
  # t21: "cpu i64[]"
  # t22: "cpu f32[2, 4096, 4096]"
  # t23: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t25, t26) = scale_gradients(t24, t21, t22, t23)
    # t22 f32[2, 4096, 4096] = t22 * where(t21 == 0, 0, t24)  (skipped where that is 1)  PyTorch
    # t23 f32[128256, 4096] = t23 * where(t21 == 0, 0, t24)  (skipped where that is 1)   PyTorch
  del t24, t21, t22, t23
  return (t25, t26, None)
