# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_of_counts(hidden, weight, tokens):
#         """A softmax that is spelled out, too."""
#         logits = F.linear(hidden, weight)
#         counts = (logits - logits.max(dim=-1, keepdim=True)[0]).exp()
#         probabilities = counts / counts.sum(dim=-1, keepdim=True)
#         return -probabilities.gather(-1, tokens.unsqueeze(-1)).log().mean()
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
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # return -probabilities.gather(-1, tokens.unsqueeze(-1)).log().mean()
  t0 = torch.unsqueeze(tokens, -1)  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "exp", ("log_prob",)), ("f1", "log", ("f0",)), ("f2", "mul", ("f1", 0.0001220703125))), strategy='gradients_in_forward', chunk_rows=65, expected_gradient=-1.0)
    # x = hidden, W = weight, y = t1, expected_gradient = -1.0
    # loss = t2: f32[], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[], dX = t6: f32[2, 4096, 4096], dW = t7: f32[128256, 4096]
    # s f32[8192] = expected_gradient                                                                             PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                  PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                        PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                            PyTorch
    #   log_prob f32[C] = logits_y - row_max - row_log_sum                                                        PyTorch
    #   f0 f32[C] = exp(log_prob)                                                                                 PyTorch
    #   f1 f32[C] = log(f0)                                                                                       PyTorch
    #   f1_log_prob f32[C] = f0 * 1 / f0                                                                          PyTorch
    #   f2 f32[C] = f1 * 0.0001220703125                                                                          PyTorch
    #   f2_log_prob f32[C] = f1_log_prob * 0.0001220703125                                                        PyTorch
    #   token_loss f32[C] = f2                                                                                    PyTorch
    #   g_p f32[C] = where(s[chunk] == 0, 0, s[chunk] * f2_log_prob)                                              PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * -g_p - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                            PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                      PyTorch
    # token_losses f32[8192] = token_loss                                                                         PyTorch
    # loss f32[] = sum(token_losses)                                                                              PyTorch
  del t3, t4, t1
  t8 = torch.neg(t2)  # t8: "cpu f32[]"
  del t2
  return {'output': (t8,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t8,)}, ((t5, t6, t7), ())


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
  t9, = cotangents
  # t9: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t5, t6, t7, = C0
  # t5: "cpu i64[]"
  # t6: "cpu f32[2, 4096, 4096]"
  # t7: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t10 = torch.neg(t9)  # t10: "cpu f32[]"
  del t9
  (t11, t12) = scale_gradients(t10, t5, t6, t7, expected_gradient=-1.0)
    # t6 f32[2, 4096, 4096] = t6 * where(t5 == 0, 0, t10 / -1)  (skipped where that is 1)  PyTorch
    # t7 f32[128256, 4096] = t7 * where(t5 == 0, 0, t10 / -1)  (skipped where that is 1)   PyTorch
  del t10, t5, t6, t7
  return (t11, t12, None)
