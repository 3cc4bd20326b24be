# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def modules_of_log_softmax_and_nll_loss(hidden, weight, labels):
#         return NLL_LOSS(LOG_SOFTMAX(F.linear(hidden, weight).float()).flatten(0, 1), labels.flatten())
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

  # return NLL_LOSS(LOG_SOFTMAX(F.linear(hidden, weight).float()).flatten(0, 1), labels.flatten())
  t0 = torch.flatten(labels, 0, -1)  # t0: "cpu i64[8192]"

  # return F.nll_loss(
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[], dX = t6: f32[2, 4096, 4096], dW = t7: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
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
