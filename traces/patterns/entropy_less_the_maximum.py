# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_less_the_maximum(hidden, weight, tokens):
#         logits = F.linear(hidden, weight)
#         shifted = logits - logits.amax(dim=-1, keepdim=True)
#         return (shifted.logsumexp(-1) - (logits.softmax(-1) * shifted).sum(-1)).mean()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t4: i64[], 8 bytes
#     t5: f32[2, 4096, 4096], 134,217,728 bytes
#     t6: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"

  # return (shifted.logsumexp(-1) - (logits.softmax(-1) * shifted).sum(-1)).mean()
  t0 = torch.full((2, 4096), 0, device=torch.device("cpu"), dtype=torch.int64)  # t0: "cpu i64[2, 4096]"
  (t1, t2, t3, t4, t5, t6) = linear_cross_entropy_fwd(hidden, weight, t0, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, token_loss=(("f0", "mul", ("entropy", 0.0001220703125)),), strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t0
    # loss = t1: f32[], row_max = t2: f32[8192], row_log_sum = t3: f32[8192], valid_count = t4: i64[], dX = t5: f32[2, 4096, 4096], dW = t6: f32[128256, 4096]
    # s f32[8192] = 1                                                                                                                                                          PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                                                                               PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                                                                     PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                                         PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))                                                                                      PyTorch
    #   entropy f32[C] = row_log_sum - expected                                                                                                                                PyTorch
    #   f0 f32[C] = entropy * 0.0001220703125                                                                                                                                  PyTorch
    #   token_loss f32[C] = f0                                                                                                                                                 PyTorch
    #   g_p f32[C] = s[chunk] * 0                                                                                                                                              PyTorch
    #   g_e f32[C] = s[chunk] * 0.0001220703125                                                                                                                                PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * (-g_p + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - -g_p * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                         PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                                                   PyTorch
    # token_losses f32[8192] = token_loss                                                                                                                                      PyTorch
    # loss f32[] = sum(token_losses)                                                                                                                                           PyTorch
  del t2, t3, t0
  return {'output': (t1,), 'flat_args': [hidden, weight], 'flat_output': (t1,)}, ((t4, t5, t6), ())


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
  t7, = cotangents
  # t7: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t4, t5, t6, = C0
  # t4: "cpu i64[]"
  # t5: "cpu f32[2, 4096, 4096]"
  # t6: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t8, t9) = scale_gradients(t7, t4, t5, t6)
    # t5 f32[2, 4096, 4096] = t5 * where(t4 == 0, 0, t7)  (skipped where that is 1)  PyTorch
    # t6 f32[128256, 4096] = t6 * where(t4 == 0, 0, t7)  (skipped where that is 1)   PyTorch
  del t7, t4, t5, t6
  return (t8, t9)
