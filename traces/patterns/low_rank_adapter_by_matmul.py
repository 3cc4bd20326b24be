# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def low_rank_adapter_by_matmul(hidden, weight, bias, adapter_down, adapter_up, labels):
#         """The same as litgpt writes it."""
#         adapter = (hidden @ adapter_down.transpose(0, 1) @ adapter_up.transpose(0, 1)) * 0.3
#         return _loss(F.linear(hidden, weight, bias) + adapter, labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t10: i64[], 8 bytes
#     t11: f32[2, 4096, 4096], 134,217,728 bytes
#     t12: f32[128256, 4096], 2,101,346,304 bytes
#     t13: f32[128256], 513,024 bytes
#     t14: f32[2, 4096, 4], 131,072 bytes
#     t15: f32[128256, 4], 2,052,096 bytes
#     t0: f32[4096, 4], 65,536 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, bias, adapter_down, adapter_up, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # bias: "cpu f32[128256]"
  # adapter_down: "cpu f32[4, 4096]"
  # adapter_up: "cpu f32[128256, 4]"
  # labels: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.permute(adapter_down, (1, 0))  # t0: "cpu f32[4096, 4]"

  # adapter = (hidden @ adapter_down.transpose(0, 1) @ adapter_up.transpose(0, 1)) * 0.3
  t1 = torch_prims_reshape_impl(hidden, (8192, 4096))  # t1: "cpu f32[8192, 4096]"
  t2 = torch.matmul(t1, t0)  # t2: "cpu f32[8192, 4]"
  t3 = torch_prims_reshape_impl(t2, (2, 4096, 4))  # t3: "cpu f32[2, 4096, 4]"
  del t2

  # return single_device_symbol(*args, **kwargs)
  t4 = torch.reshape(labels, (-1,))  # t4: "cpu i64[8192]"
  t5 = torch.mul(t3, 0.3)  # t5: "cpu f32[2, 4096, 4]"
  del t3

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t6 = torch.reshape(t4, (2, 4096))  # t6: "cpu i64[2, 4096]"
  del t4
  (t7, t8, t9, t10, t11, t12, t13, t14, t15) = linear_cross_entropy_fwd(hidden, weight, t6, bias, needs_grad=("input", "linear_weight", "linear_bias", "terms[0].input", "terms[0].weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, terms=((t5, adapter_up),))
    # x = hidden, W = weight, y = t6, b = bias, x1 = t5, W1 = adapter_up
    # loss = t7: f32[], row_max = t8: f32[8192], row_log_sum = t9: f32[8192], valid_count = t10: i64[], dX = t11: f32[2, 4096, 4096], dW = t12: f32[128256, 4096], db = t13: f32[128256], dX1 = t14: f32[2, 4096, 4], dW1 = t15: f32[128256, 4]
    # valid, valid_count = y != -100, sum(y != -100)                                                                                                   PyTorch
    # x, x1, y = x[valid], x1[valid], y[valid]                                                                                                         PyTorch
    # s f32[8192] = 1 / valid_count                                                                                                                    PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x1[chunk] @ W1.t() + b                                                                                                 PyTorch
    #   logits f32[C, 128256] += x[chunk] @ W.t()                                                                                                      PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                                                                             PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))                                                                 PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place, with its sums over the rows)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                 PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                                                           PyTorch
    #   dW1 f32[128256, 4] += dlogits.t() @ x1[chunk]                                                                                                  PyTorch
    #   dX1[chunk] f32[C, 4] = dlogits @ W1                                                                                                            PyTorch
    #   db f32[128256] += sum_t(dlogits)                                                                                                               PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                                                           PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                                                    PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                                             PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                                                     PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                                                 PyTorch
    # dX1 f32[8192, 4] = scatter(dX1)                                                                                                                  PyTorch
  del t8, t9, t6, t5
  return {'output': (t7,), 'flat_args': [hidden, weight, bias, adapter_down, adapter_up, labels], 'flat_output': (t7,)}, ((t10, t11, t12, t13, t14, t15, t0, t1), ())


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
  t16, = cotangents
  # t16: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t10, t11, t12, t13, t14, t15, t0, t1, = C0
  # t10: "cpu i64[]"
  # t11: "cpu f32[2, 4096, 4096]"
  # t12: "cpu f32[128256, 4096]"
  # t13: "cpu f32[128256]"
  # t14: "cpu f32[2, 4096, 4]"
  # t15: "cpu f32[128256, 4]"
  # t0: "cpu f32[4096, 4]"
  # t1: "cpu f32[8192, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t17, t18, t19, t20, t21) = scale_gradients(t16, t10, t11, t12, t13, t14, t15)
    # t11 f32[2, 4096, 4096] = t11 * where(t10 == 0, 0, t16)  (skipped where that is 1)  PyTorch
    # t12 f32[128256, 4096] = t12 * where(t10 == 0, 0, t16)  (skipped where that is 1)   PyTorch
    # t13 f32[128256] = t13 * where(t10 == 0, 0, t16)  (skipped where that is 1)         PyTorch
    # t14 f32[2, 4096, 4] = t14 * where(t10 == 0, 0, t16)  (skipped where that is 1)     PyTorch
    # t15 f32[128256, 4] = t15 * where(t10 == 0, 0, t16)  (skipped where that is 1)      PyTorch
  del t16, t10, t11, t12, t13, t14, t15
  t22 = torch.mul(0.3, t20)  # t22: "cpu f32[2, 4096, 4]"
  del t20
  t23 = torch_prims_reshape_impl(t22, (8192, 4))  # t23: "cpu f32[8192, 4]"
  del t22
  t24 = torch.permute(t0, (1, 0))  # t24: "cpu f32[4, 4096]"
  del t0
  t25 = torch.matmul(t23, t24)  # t25: "cpu f32[8192, 4096]"
  del t24
  t26 = torch.permute(t1, (1, 0))  # t26: "cpu f32[4096, 8192]"
  del t1
  t27 = torch.matmul(t26, t23)  # t27: "cpu f32[4096, 4]"
  del t26, t23
  t28 = torch_prims_reshape_impl(t25, (2, 4096, 4096))  # t28: "cpu f32[2, 4096, 4096]"
  del t25
  t29 = torch.add(t17, t28, alpha=1)  # t29: "cpu f32[2, 4096, 4096]"
  del t17, t28
  t30 = torch.permute(t27, (1, 0))  # t30: "cpu f32[4, 4096]"
  del t27
  return (t29, t18, t19, t30, t21, None)
