# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def accuracy_where_minus_one_is_ignored(hidden, weight, labels):
#         logits = F.linear(hidden, weight)
#         labels = torch.where(labels == -100, -1, labels)
#         return _loss(logits, labels, ignore_index=-1), (logits.argmax(-1) == labels).sum()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: f32[2, 4096, 4096], 134,217,728 bytes
#     t10: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.eq(labels, -100)  # t0: "cpu b8[2, 4096]"

  # labels = torch.where(labels == -100, -1, labels)
  t1 = torch.where(t0, -1, labels)  # t1: "cpu i64[2, 4096]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t2 = torch.reshape(t1, (-1,))  # t2: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t3 = torch.reshape(t2, (2, 4096))  # t3: "cpu i64[2, 4096]"
  del t2
  (t4, t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(hidden, weight, t3, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-1, outputs=("argmax",), strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t3
    # loss = t4: f32[], argmax = t5: i64[2, 4096], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX = t9: f32[2, 4096, 4096], dW = t10: f32[128256, 4096]
    # valid, valid_count = y != -1, sum(y != -1)                                                                          PyTorch
    # y = where(valid, y, 0)                                                                                              PyTorch
    # s f32[8192] = where(valid, 1 / valid_count, 0)                                                                      PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                    PyTorch
    #   argmax i64[C] = argmax_v(logits)                                                                                  PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = where(valid, row_log_sum - minimum(logits_y - row_max, 0), 0)                             PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
  del t6, t7, t3

  # return _loss(logits, labels, ignore_index=-1), (logits.argmax(-1) == labels).sum()
  t11 = torch.eq(t5, t1)  # t11: "cpu b8[2, 4096]"
  del t5, t1
  t12 = torch.sum(t11, None, False, dtype=None)  # t12: "cpu i64[]"
  del t11
  return {'output': (t4, t12), 'flat_args': [hidden, weight, labels], 'flat_output': (t4, t12)}, ((t8, t9, t10), ())


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
  t13, _, = cotangents
  # t13: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t10, = C0
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4096, 4096]"
  # t10: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t14, t15) = scale_gradients(t13, t8, t9, t10)
    # t9 f32[2, 4096, 4096] = t9 * where(t8 == 0, 0, t13)  (skipped where that is 1)  PyTorch
    # t10 f32[128256, 4096] = t10 * where(t8 == 0, 0, t13)  (skipped where that is 1)   PyTorch
  del t13, t8, t9, t10
  return (t14, t15, None)
