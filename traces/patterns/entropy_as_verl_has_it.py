# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_as_verl_has_it(hidden, weight, tokens):
#         """Logged beside a log-probability."""
#         logits = F.linear(hidden, weight)
#         log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
#         with torch.no_grad():
#             probabilities = F.softmax(logits, dim=-1)
#             entropy = torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)
#         return log_probs.mean(), entropy
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t6: i64[], 8 bytes
#     t7: f32[2, 4096, 4096], 134,217,728 bytes
#     t8: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
  t0 = torch.unsqueeze(tokens, -1)  # t0: "cpu i64[2, 4096, 1]"

  # return log_probs.mean(), entropy
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, outputs=("entropy",), detached=("entropy",), token_loss=(("f1", "mul", ("log_prob", 0.0001220703125)),), strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[], entropy = t3: f32[2, 4096], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[], dX = t7: f32[2, 4096, 4096], dW = t8: f32[128256, 4096]
    # s f32[8192] = 1                                                                                             PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                  PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                        PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                            PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                         PyTorch
    #   log_prob f32[C] = logits_y - row_max - row_log_sum                                                        PyTorch
    #   f1 f32[C] = log_prob * 0.0001220703125                                                                    PyTorch
    #   token_loss f32[C] = f1                                                                                    PyTorch
    #   g_p f32[C] = s[chunk] * 0.0001220703125                                                                   PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * -g_p - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                            PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                      PyTorch
    # token_losses f32[8192] = token_loss                                                                         PyTorch
    # loss f32[] = sum(token_losses)                                                                              PyTorch
    # entropy f32[8192] = row_log_sum - expected                                                                  PyTorch
  del t4, t5, t1
  t9 = torch.detach(t3)  # t9: "cpu f32[2, 4096]"
  del t3
  return {'output': (t2, t9), 'flat_args': [hidden, weight, tokens], 'flat_output': (t2, t9)}, ((t6, t7, t8), ())


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
  t10, _, = cotangents
  # t10: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t6, t7, t8, = C0
  # t6: "cpu i64[]"
  # t7: "cpu f32[2, 4096, 4096]"
  # t8: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t11, t12) = scale_gradients(t10, t6, t7, t8)
    # t7 f32[2, 4096, 4096] = t7 * where(t6 == 0, 0, t10)  (skipped where that is 1)  PyTorch
    # t8 f32[128256, 4096] = t8 * where(t6 == 0, 0, t10)  (skipped where that is 1)   PyTorch
  del t10, t6, t7, t8
  return (t11, t12, None)
