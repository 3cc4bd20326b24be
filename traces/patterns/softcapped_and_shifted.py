# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def softcapped_and_shifted(hidden, weight, bias, labels):
#         logits = 3 * (F.linear(hidden, weight, bias).float() / 3).tanh()
#         return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t5: i64[], 8 bytes
#     t6: f32[2, 4095, 4096], 134,184,960 bytes
#     t7: f32[128256, 4096], 2,101,346,304 bytes
#     t8: f32[128256], 513,024 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, bias, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # bias: "cpu f32[128256]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")
  t0 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t0: "cpu i64[2, 4095]"
  t1 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t1: "cpu f32[2, 4095, 4096]"
  (t2, t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(t1, weight, t0, bias, needs_grad=("input", "linear_weight", "linear_bias"), reduction='sum', ignore_index=-100, softcap=3.0, strategy='gradients_in_forward', chunk_rows=65)
    # x = t1, W = weight, y = t0, b = bias
    # loss = t2: f32[], row_max = t3: f32[8190], row_log_sum = t4: f32[8190], valid_count = t5: i64[], dX = t6: f32[2, 4095, 4096], dW = t7: f32[128256, 4096], db = t8: f32[128256]
    # valid, valid_count = y != -100, sum(y != -100)                                                                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                                                                           PyTorch
    # s f32[8190] = 1                                                                                                                                                     PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   z f32[65, 128256] = x[chunk] @ W.t() + b                                                                                                                          PyTorch
    #   u f32[65, 128256] = tanh(z * 0.3333333333333333) * 3  (wherever they are read)
    #   z_y f32[65] = z[y[chunk]]                                                                                                                                         PyTorch
    #   row_max, row_log_sum f32[65] = max_v(u), log(sum_v(exp(u - row_max)))                                                                                             PyTorch
    #   dlogits f32[65, 128256] = (exp(u - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]) * (1 - (u / 3) ** 2)  (in place, with its sums over the rows)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                                    PyTorch
    #   dX[chunk] f32[65, 4096] = dlogits @ W                                                                                                                             PyTorch
    #   db f32[128256] += sum_t(dlogits)                                                                                                                                  PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(tanh(z_y * 0.3333333333333333) * 3 - row_max, 0)                                                                    PyTorch
    # loss f32[] = sum(cross_entropy)                                                                                                                                     PyTorch
    # row_max f32[8190] = scatter(row_max)                                                                                                                                PyTorch
    # row_log_sum f32[8190] = scatter(row_log_sum)                                                                                                                        PyTorch
    # dX f32[8190, 4096] = scatter(dX)                                                                                                                                    PyTorch
  del t3, t4, t1, t0
  return {'output': (t2,), 'flat_args': [hidden, weight, bias, labels], 'flat_output': (t2,)}, ((t5, t6, t7, t8), ())


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
  t5, t6, t7, t8, = C0
  # t5: "cpu i64[]"
  # t6: "cpu f32[2, 4095, 4096]"
  # t7: "cpu f32[128256, 4096]"
  # t8: "cpu f32[128256]"
  clear_mutable_collection(C0)
  del C0
  (t10, t11, t12) = scale_gradients(t9, t5, t6, t7, t8)
    # t6 f32[2, 4095, 4096] = t6 * where(t5 == 0, 0, t9)  (skipped where that is 1)  PyTorch
    # t7 f32[128256, 4096] = t7 * where(t5 == 0, 0, t9)  (skipped where that is 1)   PyTorch
    # t8 f32[128256] = t8 * where(t5 == 0, 0, t9)  (skipped where that is 1)         PyTorch
  del t9, t5, t6, t7, t8
  t13 = torch_pad_prim_impl(t10, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t13: "cpu f32[2, 4096, 4096]"
  del t10
  return (t13, t11, t12, None)
