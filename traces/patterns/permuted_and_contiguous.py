# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def permuted_and_contiguous(hidden, weight, labels):
#         return F.cross_entropy(F.linear(hidden, weight).permute(0, 2, 1).contiguous(), labels, reduction="none").mean()
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
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(F.linear(hidden, weight).permute(0, 2, 1).contiguous(), labels, reduction="none").mean()
  t0 = torch.full((2, 4096), 0.0001220703125, device=torch.device("cpu"), dtype=torch.float32)  # t0: "cpu f32[2, 4096]"
  (t1, t2, t3, t4, t5, t6) = linear_cross_entropy_fwd(hidden, weight, labels, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, token_weights=t0)
    # x = hidden, W = weight, y = labels, w_t = t0
    # loss = t1: f32[], row_max = t2: f32[8192], row_log_sum = t3: f32[8192], valid_count = t4: i64[], dX = t5: f32[2, 4096, 4096], dW = t6: f32[128256, 4096]
    # valid, valid_count = (y != -100) & (w_t != 0), sum((y != -100) & (w_t != 0))                                        PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # w_t f32[8192] = w_t[valid]                                                                                          PyTorch
    # s f32[8192] = 1 * w_t                                                                                               PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = (row_log_sum - minimum(logits_y - row_max, 0)) * w_t                                      PyTorch
    # loss f32[] = sum(cross_entropy)                                                                                     PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t2, t3, t0
  return {'output': (t1,), 'flat_args': [hidden, weight, labels], 'flat_output': (t1,)}, ((t4, t5, t6), ())


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
  return (t8, t9, None)
