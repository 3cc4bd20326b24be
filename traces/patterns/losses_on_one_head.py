# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def losses_on_one_head(hidden, weight, labels):
#         """A prediction from each of two hidden states."""
#         first = _loss(F.linear(hidden, weight), labels)
#         return first + 0.5 * _loss(F.linear(torch.tanh(hidden), weight), labels)
#
# fused, gradients in forward, chunks of 65 tokens
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t14: i64[], 8 bytes
#     t15: f32[2, 4096, 4096], 134,217,728 bytes
#     t16: f32[128256, 4096], 2,101,346,304 bytes
#     t8: f32[2, 4096, 4096], 134,217,728 bytes
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

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
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

  # return first + 0.5 * _loss(F.linear(torch.tanh(hidden), weight), labels)
  t8 = torch.tanh(hidden)  # t8: "cpu f32[2, 4096, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t9 = torch.reshape(labels, (-1,))  # t9: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t10 = torch.reshape(t9, (2, 4096))  # t10: "cpu i64[2, 4096]"
  del t9
  (t11, t12, t13, t14, t15, t16) = linear_cross_entropy_fwd(t8, weight, t10, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, expected_gradient=0.5)
    # x = t8, W = weight, y = t10, expected_gradient = 0.5
    # loss = t11: f32[], row_max = t12: f32[8192], row_log_sum = t13: f32[8192], valid_count = t14: i64[], dX = t15: f32[2, 4096, 4096], dW = t16: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = expected_gradient / valid_count                                                                       PyTorch
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
  del t12, t13, t10

  # return first + 0.5 * _loss(F.linear(torch.tanh(hidden), weight), labels)
  t17 = torch.mul(0.5, t11)  # t17: "cpu f32[]"
  del t11
  t18 = torch.add(t2, t17, alpha=1)  # t18: "cpu f32[]"
  del t2, t17
  return {'output': (t18,), 'flat_args': [hidden, weight, labels], 'flat_output': (t18,)}, ((t14, t15, t16, t8, t5, t6, t7), ())


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
  t19, = cotangents
  # t19: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t14, t15, t16, t8, t5, t6, t7, = C0
  # t14: "cpu i64[]"
  # t15: "cpu f32[2, 4096, 4096]"
  # t16: "cpu f32[128256, 4096]"
  # t8: "cpu f32[2, 4096, 4096]"
  # t5: "cpu i64[]"
  # t6: "cpu f32[2, 4096, 4096]"
  # t7: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t20 = torch.mul(0.5, t19)  # t20: "cpu f32[]"
  (t21, t22) = scale_gradients(t20, t14, t15, t16, expected_gradient=0.5)
    # t15 f32[2, 4096, 4096] = t15 * where(t14 == 0, 0, t20 / 0.5)  (skipped where that is 1)  PyTorch
    # t16 f32[128256, 4096] = t16 * where(t14 == 0, 0, t20 / 0.5)  (skipped where that is 1)   PyTorch
  del t20, t14, t15, t16
  t23 = torch.mul(t8, t8)  # t23: "cpu f32[2, 4096, 4096]"
  del t8
  t24 = torch.sub(1, t23, alpha=1)  # t24: "cpu f32[2, 4096, 4096]"
  del t23
  t25 = torch.mul(t21, t24)  # t25: "cpu f32[2, 4096, 4096]"
  del t21, t24
  (t26, t27) = scale_gradients(t19, t5, t6, t7)
    # t6 f32[2, 4096, 4096] = t6 * where(t5 == 0, 0, t19)  (skipped where that is 1)  PyTorch
    # t7 f32[128256, 4096] = t7 * where(t5 == 0, 0, t19)  (skipped where that is 1)   PyTorch
  del t19, t5, t6, t7
  t28 = torch.add(t25, t26, alpha=1)  # t28: "cpu f32[2, 4096, 4096]"
  del t25, t26
  t29 = torch.add(t22, t27, alpha=1)  # t29: "cpu f32[128256, 4096]"
  del t22, t27
  return (t28, t29, None)
