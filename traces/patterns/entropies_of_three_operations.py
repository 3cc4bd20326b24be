# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropies_of_three_operations(hidden, weight, second_weight, tokens):
#         """p log p as one operation, which is 0 where p is, and a product and its sum as one."""
#         logits, others = F.linear(hidden, weight), F.linear(hidden, second_weight)
#         first = torch.special.entr(logits[:, 1:].softmax(-1)).sum(-1)
#         second = torch.xlogy(others.softmax(-1), others.log_softmax(-1).exp()).sum(-1)
#         third = torch.einsum("btv,btv->bt", logits[:, :1].softmax(-1), logits[:, :1].log_softmax(-1))
#         return first.mean() - second.mean() - third.mean()
#
# fused, gradients in forward, chunks of 65 tokens
# fused, gradients in forward, chunks of 65 tokens
# fused, gradients in forward, chunks of 2 tokens
# Saved for backward, beside the arguments and views of them:
#     t21: i64[], 8 bytes
#     t22: f32[2, 1, 4096], 32,768 bytes
#     t23: f32[128256, 4096], 2,101,346,304 bytes
#     t12: i64[], 8 bytes
#     t13: f32[2, 4096, 4096], 134,217,728 bytes
#     t14: f32[128256, 4096], 2,101,346,304 bytes
#     t5: i64[], 8 bytes
#     t6: f32[2, 4095, 4096], 134,184,960 bytes
#     t7: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, second_weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # second_weight: "cpu f32[128256, 4096]"
  t0 = torch_slice_prim_impl(hidden, [0, 1, 0], [2, 4096, 4096], [1, 1, 1])  # t0: "cpu f32[2, 4095, 4096]"

  # return first.mean() - second.mean() - third.mean()
  t1 = torch.full((2, 4095), 0, device=torch.device("cpu"), dtype=torch.int64)  # t1: "cpu i64[2, 4095]"
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(t0, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "mul", ("entropy", 0.0001221001221001221)),), strategy='gradients_in_forward', chunk_rows=65)
    # x = t0, W = weight, y = t1
    # loss = t2: f32[], row_max = t3: f32[8190], row_log_sum = t4: f32[8190], valid_count = t5: i64[], dX = t6: f32[2, 4095, 4096], dW = t7: f32[128256, 4096]
    # s f32[8190] = 1                                                                                                                                                           PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   logits f32[65, 128256] = x[chunk] @ W.t()                                                                                                                               PyTorch
    #   logits_y f32[65] = logits[y[chunk]]                                                                                                                                     PyTorch
    #   row_max, row_log_sum f32[65] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                                         PyTorch
    #   expected f32[65] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                                                                                      PyTorch
    #   entropy f32[65] = row_log_sum - expected                                                                                                                                PyTorch
    #   f0 f32[65] = entropy * 0.0001221001221001221                                                                                                                            PyTorch
    #   token_loss f32[65] = f0                                                                                                                                                 PyTorch
    #   g_p f32[65] = s[chunk] * 0                                                                                                                                              PyTorch
    #   g_e f32[65] = s[chunk] * 0.0001221001221001221                                                                                                                          PyTorch
    #   dlogits f32[65, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                          PyTorch
    #   dX[chunk] f32[65, 4096] = dlogits @ W                                                                                                                                   PyTorch
    # token_losses f32[8190] = token_loss                                                                                                                                       PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                            PyTorch
  del t3, t4, t0, t1
  t8 = torch.full((2, 4096), 0, device=torch.device("cpu"), dtype=torch.int64)  # t8: "cpu i64[2, 4096]"
  (t9, t10, t11, t12, t13, t14) = linear_cross_entropy_fwd(hidden, second_weight, t8, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "neg", ("entropy",)), ("f1", "mul", ("f0", 0.0001220703125))), strategy='gradients_in_forward', chunk_rows=65, expected_gradient=-1.0)
    # x = hidden, W = second_weight, y = t8, expected_gradient = -1.0
    # loss = t9: f32[], row_max = t10: f32[8192], row_log_sum = t11: f32[8192], valid_count = t12: i64[], dX = t13: f32[2, 4096, 4096], dW = t14: f32[128256, 4096]
    # s f32[8192] = expected_gradient                                                                                                                                          PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                                                                               PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                                                                     PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                                         PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                                                                                      PyTorch
    #   entropy f32[C] = row_log_sum - expected                                                                                                                                PyTorch
    #   f0 f32[C] = -entropy                                                                                                                                                   PyTorch
    #   f1 f32[C] = f0 * 0.0001220703125                                                                                                                                       PyTorch
    #   token_loss f32[C] = f1                                                                                                                                                 PyTorch
    #   g_p f32[C] = s[chunk] * 0                                                                                                                                              PyTorch
    #   g_e f32[C] = s[chunk] * -0.0001220703125                                                                                                                               PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                         PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                                                   PyTorch
    # token_losses f32[8192] = token_loss                                                                                                                                      PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                           PyTorch
  del t10, t11, t8
  t15 = torch.sub(t2, t9, alpha=1)  # t15: "cpu f32[]"
  del t2, t9
  t16 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 1, 4096], [1, 1, 1])  # t16: "cpu f32[2, 1, 4096]"
  t17 = torch.full((2, 1), 0, device=torch.device("cpu"), dtype=torch.int64)  # t17: "cpu i64[2, 1]"
  (t18, t19, t20, t21, t22, t23) = linear_cross_entropy_fwd(t16, weight, t17, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "neg", ("entropy",)), ("f1", "mul", ("f0", 0.5))), strategy='gradients_in_forward', chunk_rows=2, expected_gradient=-1.0)
    # x = t16, W = weight, y = t17, expected_gradient = -1.0
    # loss = t18: f32[], row_max = t19: f32[2], row_log_sum = t20: f32[2], valid_count = t21: i64[], dX = t22: f32[2, 1, 4096], dW = t23: f32[128256, 4096]
    # s f32[2] = expected_gradient                                                                                                                                      PyTorch
    # for the only chunk, of 2 tokens:
    #   logits f32[2, 128256] = x @ W.t()                                                                                                                               PyTorch
    #   logits_y f32[2] = logits[y]                                                                                                                                     PyTorch
    #   row_max, row_log_sum f32[2] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                                  PyTorch
    #   expected f32[2] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                                                                               PyTorch
    #   entropy f32[2] = row_log_sum - expected                                                                                                                         PyTorch
    #   f0 f32[2] = -entropy                                                                                                                                            PyTorch
    #   f1 f32[2] = f0 * 0.5                                                                                                                                            PyTorch
    #   token_loss f32[2] = f1                                                                                                                                          PyTorch
    #   g_p f32[2] = s * 0                                                                                                                                              PyTorch
    #   g_e f32[2] = s * -0.5                                                                                                                                           PyTorch
    #   dlogits f32[2, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - -g_p * [v == y]  (in place)  PyTorch
    #   dW f32[128256, 4096] = dlogits.t() @ x                                                                                                                          PyTorch
    #   dX f32[2, 4096] = dlogits @ W                                                                                                                                   PyTorch
    # token_losses f32[2] = token_loss                                                                                                                                  PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                    PyTorch
  del t19, t20, t16, t17
  t24 = torch.sub(t15, t18, alpha=1)  # t24: "cpu f32[]"
  del t15, t18
  return {'output': (t24,), 'flat_args': [hidden, weight, second_weight], 'flat_output': (t24,)}, ((t21, t22, t23, t12, t13, t14, t5, t6, t7), ())


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
  t25, = cotangents
  # t25: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t21, t22, t23, t12, t13, t14, t5, t6, t7, = C0
  # t21: "cpu i64[]"
  # t22: "cpu f32[2, 1, 4096]"
  # t23: "cpu f32[128256, 4096]"
  # t12: "cpu i64[]"
  # t13: "cpu f32[2, 4096, 4096]"
  # t14: "cpu f32[128256, 4096]"
  # t5: "cpu i64[]"
  # t6: "cpu f32[2, 4095, 4096]"
  # t7: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t26 = torch.neg(t25)  # t26: "cpu f32[]"
  (t27, t28) = scale_gradients(t26, t21, t22, t23, expected_gradient=-1.0)
    # t22 f32[2, 1, 4096] = t22 * where(t21 == 0, 0, t26 / -1)  (skipped where that is 1)    PyTorch
    # t23 f32[128256, 4096] = t23 * where(t21 == 0, 0, t26 / -1)  (skipped where that is 1)  PyTorch
  del t26, t21, t22, t23
  t29 = torch_pad_prim_impl(t27, 0.0, ((0, 0, 0), (0, 4095, 0), (0, 0, 0)))  # t29: "cpu f32[2, 4096, 4096]"
  del t27
  t30 = torch.neg(t25)  # t30: "cpu f32[]"
  (t31, t32) = scale_gradients(t30, t12, t13, t14, expected_gradient=-1.0)
    # t13 f32[2, 4096, 4096] = t13 * where(t12 == 0, 0, t30 / -1)  (skipped where that is 1)  PyTorch
    # t14 f32[128256, 4096] = t14 * where(t12 == 0, 0, t30 / -1)  (skipped where that is 1)   PyTorch
  del t30, t12, t13, t14
  t33 = torch.add(t29, t31, alpha=1)  # t33: "cpu f32[2, 4096, 4096]"
  del t29, t31
  (t34, t35) = scale_gradients(t25, t5, t6, t7)
    # t6 f32[2, 4095, 4096] = t6 * where(t5 == 0, 0, t25)  (skipped where that is 1)  PyTorch
    # t7 f32[128256, 4096] = t7 * where(t5 == 0, 0, t25)  (skipped where that is 1)   PyTorch
  del t25, t5, t6, t7
  t36 = torch.add(t28, t35, alpha=1)  # t36: "cpu f32[128256, 4096]"
  del t28, t35
  t37 = torch_pad_prim_impl(t34, 0.0, ((0, 0, 0), (1, 0, 0), (0, 0, 0)))  # t37: "cpu f32[2, 4096, 4096]"
  del t34
  t38 = torch.add(t33, t37, alpha=1)  # t38: "cpu f32[2, 4096, 4096]"
  del t33, t37
  return (t38, t36, t32)
