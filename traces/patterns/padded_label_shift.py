# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def padded_label_shift(hidden, weight, labels):
#         """The shift of transformers since 4.48."""
#         logits = F.linear(hidden, weight).float()
#         labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100, reduction="mean")
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: f32[2, 4096, 4096], 134,217,728 bytes
#     t10: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
  t0 = torch.nn.functional.pad(labels, (0, 1), 'constant', -100)  # t0: "cpu i64[2, 4097]"
  t1 = Tensor.__getitem__(t0, (..., slice(1,None,None)))  # t1: "cpu i64[2, 4096]"
  del t0
  t2 = Tensor.contiguous(t1, memory_format=_torch_memory_format)  # t2: "cpu i64[2, 4096]"
  del t1

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100, reduction="mean")
  t3 = Tensor.view(t2, -1)  # t3: "cpu i64[8192]"
  del t2
  t4 = torch.reshape(t3, (2, 4096))  # t4: "cpu i64[2, 4096]"
  del t3
  (t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(hidden, weight, t4, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = t4
    # loss = t5: f32[], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX = t9: f32[2, 4096, 4096], dW = t10: f32[128256, 4096]
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
  del t6, t7, t4
  return {'output': (t5,), 'flat_args': [hidden, weight, labels], 'flat_output': (t5,)}, ((t8, t9, t10), ())


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
  t11, = cotangents
  # t11: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t10, = C0
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4096, 4096]"
  # t10: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t12, t13) = scale_gradients(t11, t8, t9, t10)
    # t9 f32[2, 4096, 4096] = t9 * where(t8 == 0, 0, t11)  (skipped where that is 1)  PyTorch
    # t10 f32[128256, 4096] = t10 * where(t8 == 0, 0, t11)  (skipped where that is 1)   PyTorch
  del t11, t8, t9, t10
  return (t12, t13, None)
