# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def num_items_in_batch(hidden, weight, labels, num_items):
#         """As transformers does it with gradient accumulation."""
#         return _loss(F.linear(hidden, weight).float(), labels, reduction="sum") / num_items
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t16: f32[], 4 bytes
#     t13: i64[], 8 bytes
#     t14: f32[2, 4096, 4096], 134,217,728 bytes
#     t15: f32[128256, 4096], 2,101,346,304 bytes
#     t9: f32[], 4 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels, num_items):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"
  # num_items: "cpu i64[]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.reshape(labels, (-1,))  # t0: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  t2 = torch.detach(num_items)  # t2: "cpu i64[]"
  t3 = Tensor.to(t2, copy=False, dtype=torch.float32)  # t3: "cpu f32[]"
  del t2
  t4 = torch_div_prim_impl(1.0, t3)  # t4: "cpu f32[]"
  del t3
  t5 = torch.abs(t4)  # t5: "cpu f32[]"
  t6 = torch.ge(t5, 8.673617379884035e-19)  # t6: "cpu b8[]"
  t7 = torch.le(t5, 1.152921504606847e+18)  # t7: "cpu b8[]"
  del t5
  t8 = torch.logical_and(t6, t7)  # t8: "cpu b8[]"
  del t6, t7
  t9 = torch.where(t8, t4, 1.0)  # t9: "cpu f32[]"
  del t8, t4
  (t10, t11, t12, t13, t14, t15) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, expected_gradient=t9)
    # x = hidden, W = weight, y = t1, expected_gradient = t9
    # loss = t10: f32[], row_max = t11: f32[8192], row_log_sum = t12: f32[8192], valid_count = t13: i64[], dX = t14: f32[2, 4096, 4096], dW = t15: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = expected_gradient                                                                                     PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy)                                                                                     PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t11, t12, t1

  # return _loss(F.linear(hidden, weight).float(), labels, reduction="sum") / num_items
  t16 = Tensor.to(num_items, torch.float32, copy=True)  # t16: "cpu f32[]"
  t17 = torch_div_prim_impl(t10, t16)  # t17: "cpu f32[]"
  del t10
  return {'output': (t17,), 'flat_args': [hidden, weight, labels, num_items], 'flat_output': (t17,)}, ((t16, t13, t14, t15, t9), ())


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
  t18, = cotangents
  # t18: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t16, t13, t14, t15, t9, = C0
  # t16: "cpu f32[]"
  # t13: "cpu i64[]"
  # t14: "cpu f32[2, 4096, 4096]"
  # t15: "cpu f32[128256, 4096]"
  # t9: "cpu f32[]"
  clear_mutable_collection(C0)
  del C0
  t19 = torch.true_divide(t18, t16)  # t19: "cpu f32[]"
  del t18, t16
  (t20, t21) = scale_gradients(t19, t13, t14, t15, expected_gradient=t9)
    # t14 f32[2, 4096, 4096] = t14 * where(t13 == 0, 0, t19 / t9)  (skipped where that is 1)  PyTorch
    # t15 f32[128256, 4096] = t15 * where(t13 == 0, 0, t19 / t9)  (skipped where that is 1)   PyTorch
  del t19, t13, t14, t15, t9
  return (t20, t21, None, None)
