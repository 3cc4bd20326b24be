# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def sliced_rows_of_flat_logits(hidden, weight, labels):
#         logits = F.linear(hidden, weight).view(-1, weight.shape[0])
#         return F.cross_entropy(logits[1::2], labels.view(-1)[1::2])
#
# fused, gradients in forward, chunks of 64 tokens
# Saved for backward, beside the arguments and views of them:
#     t7: i64[], 8 bytes
#     t8: f32[4096, 4096], 67,108,864 bytes
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

  # return F.cross_entropy(logits[1::2], labels.view(-1)[1::2])
  t0 = Tensor.view(labels, -1)  # t0: "cpu i64[8192]"
  t1 = Tensor.__getitem__(t0, slice(1,None,2))  # t1: "cpu i64[4096]"
  del t0
  t2 = torch_prims_reshape_impl(hidden, (8192, 4096))  # t2: "cpu f32[8192, 4096]"
  t3 = torch_slice_prim_impl(t2, [1, 0], [8192, 4096], [2, 1])  # t3: "cpu f32[4096, 4096]"
  del t2
  (t4, t5, t6, t7, t8, t9) = linear_cross_entropy_fwd(t3, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=64)
    # x = t3, W = weight, y = t1
    # loss = t4: f32[], row_max = t5: f32[4096], row_log_sum = t6: f32[4096], valid_count = t7: i64[], dX = t8: f32[4096, 4096], dW = t9: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                       PyTorch
    # x, y = x[valid], y[valid]                                                                                            PyTorch
    # s f32[4096] = 1 / valid_count                                                                                        PyTorch
    # for each chunk of 64 tokens, 64 in all:
    #   logits f32[64, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[64] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[64, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                     PyTorch
    #   dX[chunk] f32[64, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[4096] = row_log_sum - minimum(logits_y - row_max, 0)                                               PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                        PyTorch
    # row_max f32[4096] = scatter(row_max)                                                                                 PyTorch
    # row_log_sum f32[4096] = scatter(row_log_sum)                                                                         PyTorch
    # dX f32[4096, 4096] = scatter(dX)                                                                                     PyTorch
  del t5, t6, t3, t1
  return {'output': (t4,), 'flat_args': [hidden, weight, labels], 'flat_output': (t4,)}, ((t7, t8, t9), ())


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
  t10, = cotangents
  # t10: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t7, t8, t9, = C0
  # t7: "cpu i64[]"
  # t8: "cpu f32[4096, 4096]"
  # t9: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t11, t12) = scale_gradients(t10, t7, t8, t9)
    # t8 f32[4096, 4096] = t8 * where(t7 == 0, 0, t10)  (skipped where that is 1)    PyTorch
    # t9 f32[128256, 4096] = t9 * where(t7 == 0, 0, t10)  (skipped where that is 1)  PyTorch
  del t10, t7, t8, t9
  t13 = torch_pad_prim_impl(t11, 0.0, ((1, 0, 1), (0, 0, 0)))  # t13: "cpu f32[8192, 4096]"
  del t11
  t14 = torch_prims_reshape_impl(t13, (2, 4096, 4096))  # t14: "cpu f32[2, 4096, 4096]"
  del t13
  return (t14, t12, None)
