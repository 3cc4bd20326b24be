# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def accuracies_of_two_heads(hidden, weight, second_weight, labels):
#         """The operation that uses both argmaxes has to move after both losses."""
#         first, second = F.linear(hidden, weight), F.linear(hidden, second_weight)
#         right = (first.argmax(-1) == labels).sum() + (second.argmax(-1) == labels).sum()
#         return _loss(first, labels) + _loss(second, labels), right
#
# fused, gradients in forward, chunks of 65 tokens
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t17: i64[], 8 bytes
#     t18: f32[2, 4096, 4096], 134,217,728 bytes
#     t19: f32[128256, 4096], 2,101,346,304 bytes
#     t6: i64[], 8 bytes
#     t7: f32[2, 4096, 4096], 134,217,728 bytes
#     t8: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, second_weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # second_weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.reshape(labels, (-1,))  # t0: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, outputs=("valid_argmax",), strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[], valid_argmax = t3: i64[2, 4096], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[], dX = t7: f32[2, 4096, 4096], dW = t8: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                    PyTorch
    #   argmax i64[C] = argmax_v(logits)                                                                                  PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # valid_argmax i64[8192] = scatter(argmax, -1)                                                                        PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t4, t5, t1

  # right = (first.argmax(-1) == labels).sum() + (second.argmax(-1) == labels).sum()
  t9 = torch.eq(t3, labels)  # t9: "cpu b8[2, 4096]"
  del t3
  t10 = torch.sum(t9, None, False, dtype=None)  # t10: "cpu i64[]"
  del t9

  # return single_device_symbol(*args, **kwargs)
  t11 = torch.reshape(labels, (-1,))  # t11: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t12 = torch.reshape(t11, (2, 4096))  # t12: "cpu i64[2, 4096]"
  del t11
  (t13, t14, t15, t16, t17, t18, t19) = linear_cross_entropy_fwd(hidden, second_weight, t12, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, outputs=("valid_argmax",), strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = second_weight, y = t12
    # loss = t13: f32[], valid_argmax = t14: i64[2, 4096], row_max = t15: f32[8192], row_log_sum = t16: f32[8192], valid_count = t17: i64[], dX = t18: f32[2, 4096, 4096], dW = t19: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                    PyTorch
    #   argmax i64[C] = argmax_v(logits)                                                                                  PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # valid_argmax i64[8192] = scatter(argmax, -1)                                                                        PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t15, t16, t12

  # right = (first.argmax(-1) == labels).sum() + (second.argmax(-1) == labels).sum()
  t20 = torch.eq(t14, labels)  # t20: "cpu b8[2, 4096]"
  del t14
  t21 = torch.sum(t20, None, False, dtype=None)  # t21: "cpu i64[]"
  del t20
  t22 = torch.add(t10, t21, alpha=1)  # t22: "cpu i64[]"
  del t10, t21

  # return _loss(first, labels) + _loss(second, labels), right
  t23 = torch.add(t2, t13, alpha=1)  # t23: "cpu f32[]"
  del t2, t13
  return {'output': (t23, t22), 'flat_args': [hidden, weight, second_weight, labels], 'flat_output': (t23, t22)}, ((t17, t18, t19, t6, t7, t8), ())


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
  t24, _, = cotangents
  # t24: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t17, t18, t19, t6, t7, t8, = C0
  # t17: "cpu i64[]"
  # t18: "cpu f32[2, 4096, 4096]"
  # t19: "cpu f32[128256, 4096]"
  # t6: "cpu i64[]"
  # t7: "cpu f32[2, 4096, 4096]"
  # t8: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t25, t26) = scale_gradients(t24, t17, t18, t19)
    # t18 f32[2, 4096, 4096] = t18 * where(t17 == 0, 0, t24)  (skipped where that is 1)  PyTorch
    # t19 f32[128256, 4096] = t19 * where(t17 == 0, 0, t24)  (skipped where that is 1)   PyTorch
  del t17, t18, t19
  (t27, t28) = scale_gradients(t24, t6, t7, t8)
    # t7 f32[2, 4096, 4096] = t7 * where(t6 == 0, 0, t24)  (skipped where that is 1)  PyTorch
    # t8 f32[128256, 4096] = t8 * where(t6 == 0, 0, t24)  (skipped where that is 1)   PyTorch
  del t24, t6, t7, t8
  t29 = torch.add(t25, t27, alpha=1)  # t29: "cpu f32[2, 4096, 4096]"
  del t25, t27
  return (t29, t28, t26, None)
