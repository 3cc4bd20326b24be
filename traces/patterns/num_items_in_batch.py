# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def num_items_in_batch(hidden, weight, labels, num_items):
#         """As transformers does it with gradient accumulation."""
#         return _loss(F.linear(hidden, weight).float(), labels, reduction="sum") / num_items
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t11: f32[], 4 bytes
#     t8: i64[], 8 bytes
#     t9: f32[2, 4096, 4096], 134,217,728 bytes
#     t10: f32[128256, 4096], 2,101,346,304 bytes
#     t4: f32[], 4 bytes

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
  (t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, expected_gradient=t4)
    # x = hidden, W = weight, y = t1, expected_gradient = t4
    # loss = t5: f32[], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX = t9: f32[2, 4096, 4096], dW = t10: f32[128256, 4096]
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
  del t6, t7, t1

  # return _loss(F.linear(hidden, weight).float(), labels, reduction="sum") / num_items
  t11 = Tensor.to(num_items, torch.float32, copy=True)  # t11: "cpu f32[]"
  t12 = torch_div_prim_impl(t5, t11)  # t12: "cpu f32[]"
  del t5
  return {'output': (t12,), 'flat_args': [hidden, weight, labels, num_items], 'flat_output': (t12,)}, ((t11, t8, t9, t10, t4), ())


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
  t13, = cotangents
  # t13: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t11, t8, t9, t10, t4, = C0
  # t11: "cpu f32[]"
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4096, 4096]"
  # t10: "cpu f32[128256, 4096]"
  # t4: "cpu f32[]"
  clear_mutable_collection(C0)
  del C0
  t14 = torch.true_divide(t13, t11)  # t14: "cpu f32[]"
  del t13, t11
  (t15, t16) = scale_gradients(t14, t8, t9, t10, expected_gradient=t4)
    # t9 f32[2, 4096, 4096] = t9 * where(t8 == 0, 0, t14 / t4)  (skipped where that is 1)  PyTorch
    # t10 f32[128256, 4096] = t10 * where(t8 == 0, 0, t14 / t4)  (skipped where that is 1)   PyTorch
  del t14, t8, t9, t10, t4
  return (t15, t16, None, None)
