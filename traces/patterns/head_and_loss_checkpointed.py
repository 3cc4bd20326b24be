# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def head_and_loss_checkpointed(hidden, weight, labels):
#         return checkpoint(shift_by_slices, hidden, weight, labels, use_reentrant=False) * 2
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: f32[2, 4095, 4096], 134,184,960 bytes
#     t10: f32[128256, 4096], 2,101,346,304 bytes

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

  # labels = labels[..., 1:].contiguous()
  t0 = Tensor.__getitem__(labels, (..., slice(1,None,None)))  # t0: "cpu i64[2, 4095]"
  t1 = Tensor.contiguous(t0, memory_format=_torch_memory_format)  # t1: "cpu i64[2, 4095]"
  del t0

  # return CROSS_ENTROPY(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t2 = Tensor.view(t1, -1)  # t2: "cpu i64[8190]"
  del t1
  t3 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t3: "cpu f32[2, 4095, 4096]"

  # return F.cross_entropy(
  t4 = torch.reshape(t2, (2, 4095))  # t4: "cpu i64[2, 4095]"
  del t2
  (t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(t3, weight, t4, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, expected_gradient=2.0)
    # x = t3, W = weight, y = t4, expected_gradient = 2.0
    # loss = t5: f32[], row_max = t6: f32[8190], row_log_sum = t7: f32[8190], valid_count = t8: i64[], dX = t9: f32[2, 4095, 4096], dW = t10: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                       PyTorch
    # x, y = x[valid], y[valid]                                                                                            PyTorch
    # s f32[8190] = expected_gradient / valid_count                                                                        PyTorch
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
  del t6, t7, t3, t4

  # return checkpoint(shift_by_slices, hidden, weight, labels, use_reentrant=False) * 2
  t11 = torch.mul(t5, 2.0)  # t11: "cpu f32[]"
  del t5
  return {'output': (t11,), 'flat_args': [hidden, weight, labels], 'flat_output': (t11,)}, ((t8, t9, t10), ())


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
  t12, = cotangents
  # t12: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t10, = C0
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4095, 4096]"
  # t10: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t13 = torch.mul(2.0, t12)  # t13: "cpu f32[]"
  del t12
  (t14, t15) = scale_gradients(t13, t8, t9, t10, expected_gradient=2.0)
    # t9 f32[2, 4095, 4096] = t9 * where(t8 == 0, 0, t13 / 2)  (skipped where that is 1)  PyTorch
    # t10 f32[128256, 4096] = t10 * where(t8 == 0, 0, t13 / 2)  (skipped where that is 1)   PyTorch
  del t13, t8, t9, t10
  t16 = torch_pad_prim_impl(t14, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t16: "cpu f32[2, 4096, 4096]"
  del t14
  return (t16, t15, None)
