# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_and_entropy_of_categorical(hidden, weight, tokens):
#         """The labels are broadcast to the shape of the logits, and these clamped to be finite."""
#         policy = Categorical(logits=F.linear(hidden, weight), validate_args=False)
#         return -(policy.log_prob(tokens) + 0.1 * policy.entropy()).mean()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t6: i64[], 8 bytes
#     t7: f32[2, 4096, 4096], 134,217,728 bytes
#     t8: f32[128256, 4096], 2,101,346,304 bytes

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

  # value = value.long().unsqueeze(-1)
  t0 = Tensor.to(tokens, copy=False, dtype=torch.int64, memory_format=_torch_memory_format)  # t0: "cpu i64[2, 4096]"
  t1 = torch.unsqueeze(t0, -1)  # t1: "cpu i64[2, 4096, 1]"
  del t0

  # return -(policy.log_prob(tokens) + 0.1 * policy.entropy()).mean()
  t2 = torch.reshape(t1, (2, 4096))  # t2: "cpu i64[2, 4096]"
  del t1
  (t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(hidden, weight, t2, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "mul", (0.1, "entropy")), ("f1", "add", ("log_prob", "f0")), ("f2", "mul", ("f1", 0.0001220703125))), strategy='gradients_in_forward', chunk_rows=65, expected_gradient=-1.0)
    # x = hidden, W = weight, y = t2, expected_gradient = -1.0
    # loss = t3: f32[], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[], dX = t7: f32[2, 4096, 4096], dW = t8: f32[128256, 4096]
    # s f32[8192] = expected_gradient                                                                                                                                          PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                                                                               PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                                                                     PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                                         PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                                                                                      PyTorch
    #   log_prob f32[C] = logits_y - row_max - row_log_sum                                                                                                                     PyTorch
    #   entropy f32[C] = row_log_sum - expected                                                                                                                                PyTorch
    #   f0 f32[C] = 0.1 * entropy                                                                                                                                              PyTorch
    #   f1 f32[C] = log_prob + f0                                                                                                                                              PyTorch
    #   f2 f32[C] = f1 * 0.0001220703125                                                                                                                                       PyTorch
    #   token_loss f32[C] = f2                                                                                                                                                 PyTorch
    #   g_p f32[C] = s[chunk] * 0.0001220703125                                                                                                                                PyTorch
    #   g_e f32[C] = s[chunk] * 1.220703125e-05                                                                                                                                PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                         PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                                                   PyTorch
    # token_losses f32[8192] = token_loss                                                                                                                                      PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                           PyTorch
  del t4, t5, t2
  t9 = torch.neg(t3)  # t9: "cpu f32[]"
  del t3
  return {'output': (t9,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t9,)}, ((t6, t7, t8), ())


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
  t10, = cotangents
  # t10: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t6, t7, t8, = C0
  # t6: "cpu i64[]"
  # t7: "cpu f32[2, 4096, 4096]"
  # t8: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t11 = torch.neg(t10)  # t11: "cpu f32[]"
  del t10
  (t12, t13) = scale_gradients(t11, t6, t7, t8, expected_gradient=-1.0)
    # t7 f32[2, 4096, 4096] = t7 * where(t6 == 0, 0, t11 / -1)  (skipped where that is 1)  PyTorch
    # t8 f32[128256, 4096] = t8 * where(t6 == 0, 0, t11 / -1)  (skipped where that is 1)   PyTorch
  del t11, t6, t7, t8
  return (t12, t13, None)
