# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def accuracy_by_max(hidden, weight, labels):
#         logits = F.linear(hidden, weight).view(-1, weight.shape[0])
#         loss = F.cross_entropy(logits, labels.view(-1))
#         _, predictions = torch.max(logits, 1)
#         return loss, (predictions == labels.view(-1)).sum()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t6: i64[], 8 bytes
#     t7: f32[2, 4096, 4096], 134,217,728 bytes
#     t8: f32[128256, 4096], 2,101,346,304 bytes

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

  # loss = F.cross_entropy(logits, labels.view(-1))
  t0 = Tensor.view(labels, -1)  # t0: "cpu i64[8192]"
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
  t9 = torch.reshape(t3, (8192,))  # t9: "cpu i64[8192]"
  del t3

  # return loss, (predictions == labels.view(-1)).sum()
  t10 = Tensor.view(labels, -1)  # t10: "cpu i64[8192]"
  t11 = torch.eq(t9, t10)  # t11: "cpu b8[8192]"
  del t9, t10
  t12 = torch.sum(t11, None, False, dtype=None)  # t12: "cpu i64[]"
  del t11
  return {'output': (t2, t12), 'flat_args': [hidden, weight, labels], 'flat_output': (t2, t12)}, ((t6, t7, t8), ())


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
  t6, t7, t8, = C0
  # t6: "cpu i64[]"
  # t7: "cpu f32[2, 4096, 4096]"
  # t8: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t14, t15) = scale_gradients(t13, t6, t7, t8)
    # t7 f32[2, 4096, 4096] = t7 * where(t6 == 0, 0, t13)  (skipped where that is 1)  PyTorch
    # t8 f32[128256, 4096] = t8 * where(t6 == 0, 0, t13)  (skipped where that is 1)   PyTorch
  del t13, t6, t7, t8
  return (t14, t15, None)
