# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def first_columns_of_the_vocabulary(hidden, weight, labels):
#         """A vocabulary padded for speed, without its padding."""
#         return _loss(F.linear(hidden, weight)[..., :91], labels.clamp(max=90))
#
# fused, gradients in forward, chunks of 8192 tokens
# Saved for backward, beside the arguments and views of them:
#     t6: i64[], 8 bytes
#     t7: f32[2, 4096, 4096], 134,217,728 bytes
#     t8: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return _loss(F.linear(hidden, weight)[..., :91], labels.clamp(max=90))
  t0 = torch.clamp(labels, None, 90)  # t0: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t1 = torch.reshape(t0, (-1,))  # t1: "cpu i64[8192]"
  del t0

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t2 = torch.reshape(t1, (2, 4096))  # t2: "cpu i64[2, 4096]"
  del t1
  (t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(hidden, weight, t2, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, vocab_size=91, strategy='gradients_in_forward', chunk_rows=8192)
    # x = hidden, W = weight, y = t2
    # loss = t3: f32[], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[], dX = t7: f32[2, 4096, 4096], dW = t8: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                            PyTorch
    # x, y = x[valid], y[valid]                                                                                 PyTorch
    # dW[91:] f32[128165, 4096] = 0                                                                             PyTorch
    # s f32[8192] = 1 / valid_count                                                                             PyTorch
    # for the only chunk, of 8192 tokens:
    #   logits f32[8192, 91] = x @ W[:91].t()                                                                   PyTorch
    #   row_max, row_log_sum, logits_y f32[8192] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y]  PyTorch
    #   dlogits f32[8192, 91] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)              PyTorch
    #   dW[:91] f32[91, 4096] = dlogits.t() @ x                                                                 PyTorch
    #   dX f32[8192, 4096] = dlogits @ W[:91]                                                                   PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                    PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                             PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                      PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                              PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                          PyTorch
  del t4, t5, t2
  return {'output': (t3,), 'flat_args': [hidden, weight, labels], 'flat_output': (t3,)}, ((t6, t7, t8), ())


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
  t6, t7, t8, = C0
  # t6: "cpu i64[]"
  # t7: "cpu f32[2, 4096, 4096]"
  # t8: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t10, t11) = scale_gradients(t9, t6, t7, t8)
    # t7 f32[2, 4096, 4096] = t7 * where(t6 == 0, 0, t9)  (skipped where that is 1)  PyTorch
    # t8 f32[128256, 4096] = t8 * where(t6 == 0, 0, t9)  (skipped where that is 1)   PyTorch
  del t9, t6, t7, t8
  return (t10, t11, None)
