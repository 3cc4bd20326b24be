# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def focal_loss(hidden, weight, labels):
#         losses = _loss(F.linear(hidden, weight), labels, reduction="none")
#         return ((1 - torch.exp(-losses)) ** 2 * losses).mean()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t5: i64[], 8 bytes
#     t6: f32[2, 4096, 4096], 134,217,728 bytes
#     t7: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.reshape(labels, (-1,))  # t0: "cpu i64[8192]"

  # return ((1 - torch.exp(-losses)) ** 2 * losses).mean()
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-100, token_loss=(("f0", "neg", ("log_prob",)), ("f1", "neg", ("f0",)), ("f2", "exp", ("f1",)), ("f3", "sub", (1, "f2")), ("f4", "pow", ("f3", 2)), ("f5", "mul", ("f4", "f0")), ("f6", "mul", ("f5", 0.0001220703125))), strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[], dX = t6: f32[2, 4096, 4096], dW = t7: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                              PyTorch
    # x, y = x[valid], y[valid]                                                                                   PyTorch
    # s f32[8192] = 1                                                                                             PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                  PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                        PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                            PyTorch
    #   log_prob f32[C] = logits_y - row_max - row_log_sum                                                        PyTorch
    #   f0 f32[C] = -log_prob                                                                                     PyTorch
    #   f1 f32[C] = -f0                                                                                           PyTorch
    #   f2 f32[C] = exp(f1)                                                                                       PyTorch
    #   f3 f32[C] = 1 - f2                                                                                        PyTorch
    #   f3_log_prob f32[C] = f2 * -1                                                                              PyTorch
    #   f4 f32[C] = f3 ** 2                                                                                       PyTorch
    #   f4_log_prob f32[C] = f3_log_prob * f3 * 2                                                                 PyTorch
    #   f5 f32[C] = f4 * f0                                                                                       PyTorch
    #   f5_log_prob f32[C] = f4_log_prob * f0 + -1 * f4                                                           PyTorch
    #   f6 f32[C] = f5 * 0.0001220703125                                                                          PyTorch
    #   f6_log_prob f32[C] = f5_log_prob * 0.0001220703125                                                        PyTorch
    #   token_loss f32[C] = f6                                                                                    PyTorch
    #   g_p f32[C] = where(s[chunk] == 0, 0, s[chunk] * f6_log_prob)                                              PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * -g_p - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                            PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                      PyTorch
    # token_losses f32[8192] = token_loss                                                                         PyTorch
    # loss f32[] = sum(token_losses)                                                                              PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                        PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                            PyTorch
  del t3, t4, t1
  return {'output': (t2,), 'flat_args': [hidden, weight, labels], 'flat_output': (t2,)}, ((t5, t6, t7), ())


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
  t8, = cotangents
  # t8: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t5, t6, t7, = C0
  # t5: "cpu i64[]"
  # t6: "cpu f32[2, 4096, 4096]"
  # t7: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t9, t10) = scale_gradients(t8, t5, t6, t7)
    # t6 f32[2, 4096, 4096] = t6 * where(t5 == 0, 0, t8)  (skipped where that is 1)  PyTorch
    # t7 f32[128256, 4096] = t7 * where(t5 == 0, 0, t8)  (skipped where that is 1)   PyTorch
  del t8, t5, t6, t7
  return (t9, t10, None)
