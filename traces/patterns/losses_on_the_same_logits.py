# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def losses_on_the_same_logits(hidden, weight, labels):
#         """Predictions of the next token and of the one after."""
#         logits = F.linear(hidden, weight)
#         return _loss(logits[:, :-1], labels[:, 1:]) + 0.3 * _loss(logits[:, :-2], labels[:, 2:])
#
# fused, gradients in forward, chunks of 65 tokens
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t17: i64[], 8 bytes
#     t18: f32[2, 4094, 4096], 134,152,192 bytes
#     t19: f32[128256, 4096], 2,101,346,304 bytes
#     t7: i64[], 8 bytes
#     t8: f32[2, 4095, 4096], 134,184,960 bytes
#     t9: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return _loss(logits[:, :-1], labels[:, 1:]) + 0.3 * _loss(logits[:, :-2], labels[:, 2:])
  t0 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t0: "cpu i64[2, 4095]"

  # return single_device_symbol(*args, **kwargs)
  t1 = torch.reshape(t0, (-1,))  # t1: "cpu i64[8190]"
  del t0
  t2 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t2: "cpu f32[2, 4095, 4096]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t3 = torch.reshape(t1, (2, 4095))  # t3: "cpu i64[2, 4095]"
  del t1
  (t4, t5, t6, t7, t8, t9) = linear_cross_entropy_fwd(t2, weight, t3, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t2, W = weight, y = t3
    # loss = t4: f32[], row_max = t5: f32[8190], row_log_sum = t6: f32[8190], valid_count = t7: i64[], dX = t8: f32[2, 4095, 4096], dW = t9: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                       PyTorch
    # x, y = x[valid], y[valid]                                                                                            PyTorch
    # s f32[8190] = 1 / valid_count                                                                                        PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   logits f32[65, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[65] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[65, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                     PyTorch
    #   dX[chunk] f32[65, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(logits_y - row_max, 0)                                               PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                        PyTorch
    # row_max f32[8190] = scatter(row_max)                                                                                 PyTorch
    # row_log_sum f32[8190] = scatter(row_log_sum)                                                                         PyTorch
    # dX f32[8190, 4096] = scatter(dX)                                                                                     PyTorch
  del t5, t6, t2, t3

  # return _loss(logits[:, :-1], labels[:, 1:]) + 0.3 * _loss(logits[:, :-2], labels[:, 2:])
  t10 = Tensor.__getitem__(labels, (slice(None,None,None), slice(2,None,None)))  # t10: "cpu i64[2, 4094]"

  # return single_device_symbol(*args, **kwargs)
  t11 = torch.reshape(t10, (-1,))  # t11: "cpu i64[8188]"
  del t10
  t12 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4094, 4096], [1, 1, 1])  # t12: "cpu f32[2, 4094, 4096]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t13 = torch.reshape(t11, (2, 4094))  # t13: "cpu i64[2, 4094]"
  del t11
  (t14, t15, t16, t17, t18, t19) = linear_cross_entropy_fwd(t12, weight, t13, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, expected_gradient=0.3)
    # x = t12, W = weight, y = t13, expected_gradient = 0.3
    # loss = t14: f32[], row_max = t15: f32[8188], row_log_sum = t16: f32[8188], valid_count = t17: i64[], dX = t18: f32[2, 4094, 4096], dW = t19: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8188] = expected_gradient / valid_count                                                                       PyTorch
    # for each chunk of 65 (125 times) and 63 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8188] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8188] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8188] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8188, 4096] = scatter(dX)                                                                                    PyTorch
  del t15, t16, t12, t13

  # return _loss(logits[:, :-1], labels[:, 1:]) + 0.3 * _loss(logits[:, :-2], labels[:, 2:])
  t20 = torch.mul(0.3, t14)  # t20: "cpu f32[]"
  del t14
  t21 = torch.add(t4, t20, alpha=1)  # t21: "cpu f32[]"
  del t4, t20
  return {'output': (t21,), 'flat_args': [hidden, weight, labels], 'flat_output': (t21,)}, ((t17, t18, t19, t7, t8, t9), ())


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
  t22, = cotangents
  # t22: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t17, t18, t19, t7, t8, t9, = C0
  # t17: "cpu i64[]"
  # t18: "cpu f32[2, 4094, 4096]"
  # t19: "cpu f32[128256, 4096]"
  # t7: "cpu i64[]"
  # t8: "cpu f32[2, 4095, 4096]"
  # t9: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t23 = torch.mul(0.3, t22)  # t23: "cpu f32[]"
  (t24, t25) = scale_gradients(t23, t17, t18, t19, expected_gradient=0.3)
    # t18 f32[2, 4094, 4096] = t18 * where(t17 == 0, 0, t23 / 0.3)  (skipped where that is 1)  PyTorch
    # t19 f32[128256, 4096] = t19 * where(t17 == 0, 0, t23 / 0.3)  (skipped where that is 1)   PyTorch
  del t23, t17, t18, t19
  t26 = torch_pad_prim_impl(t24, 0.0, ((0, 0, 0), (0, 2, 0), (0, 0, 0)))  # t26: "cpu f32[2, 4096, 4096]"
  del t24
  (t27, t28) = scale_gradients(t22, t7, t8, t9)
    # t8 f32[2, 4095, 4096] = t8 * where(t7 == 0, 0, t22)  (skipped where that is 1)  PyTorch
    # t9 f32[128256, 4096] = t9 * where(t7 == 0, 0, t22)  (skipped where that is 1)   PyTorch
  del t22, t7, t8, t9
  t29 = torch.add(t25, t28, alpha=1)  # t29: "cpu f32[128256, 4096]"
  del t25, t28
  t30 = torch_pad_prim_impl(t27, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t30: "cpu f32[2, 4096, 4096]"
  del t27
  t31 = torch.add(t26, t30, alpha=1)  # t31: "cpu f32[2, 4096, 4096]"
  del t26, t30
  return (t31, t29, None)
