# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def one_token(hidden, weight, labels):
#         """No dimension but the vocabulary."""
#         return F.cross_entropy(F.linear(hidden[0, 0], weight), labels[1, 1])
#
# fused, gradients in forward, chunks of 1 tokens
# Saved for backward, beside the arguments and views of them:
#     t6: i64[], 8 bytes
#     t7: f32[4096], 16,384 bytes
#     t8: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(F.linear(hidden[0, 0], weight), labels[1, 1])
  t0 = torch_slice_prim_impl(hidden, [0, 0, 0], [1, 1, 4096], [1, 1, 1])  # t0: "cpu f32[1, 1, 4096]"
  t1 = torch.squeeze(t0, (0, 1))  # t1: "cpu f32[4096]"
  del t0
  t2 = Tensor.__getitem__(labels, (1, 1))  # t2: "cpu i64[]"
  (t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(t1, weight, t2, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=1)
    # x = t1, W = weight, y = t2
    # loss = t3: f32[], row_max = t4: f32[1], row_log_sum = t5: f32[1], valid_count = t6: i64[], dX = t7: f32[4096], dW = t8: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                         PyTorch
    # x, y = x[valid], y[valid]                                                                              PyTorch
    # s f32[1] = 1 / valid_count                                                                             PyTorch
    # for the only chunk, of 1 tokens:
    #   logits f32[1, 128256] = x @ W.t()                                                                    PyTorch
    #   row_max, row_log_sum, logits_y f32[1] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y]  PyTorch
    #   dlogits f32[1, 128256] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)          PyTorch
    #   dW f32[128256, 4096] = dlogits.t() @ x                                                               PyTorch
    #   dX f32[1, 4096] = dlogits @ W                                                                        PyTorch
    # cross_entropy f32[1] = row_log_sum - minimum(logits_y - row_max, 0)                                    PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                          PyTorch
    # row_max f32[1] = scatter(row_max)                                                                      PyTorch
    # row_log_sum f32[1] = scatter(row_log_sum)                                                              PyTorch
    # dX f32[1, 4096] = scatter(dX)                                                                          PyTorch
  del t4, t5, t1, t2
  return {'output': (t3,), 'flat_args': [hidden, weight, labels], 'flat_output': (t3,)}, ((t6, t7, t8), ())


# Constructed by Delete Last Used
import torch
from torch import Tensor
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
  t6, t7, t8, = C0
  # t6: "cpu i64[]"
  # t7: "cpu f32[4096]"
  # t8: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t10, t11) = scale_gradients(t9, t6, t7, t8)
    # t7 f32[4096] = t7 * where(t6 == 0, 0, t9)  (skipped where that is 1)          PyTorch
    # t8 f32[128256, 4096] = t8 * where(t6 == 0, 0, t9)  (skipped where that is 1)  PyTorch
  del t9, t6, t7, t8
  t12 = torch.unsqueeze(t10, 0)  # t12: "cpu f32[1, 4096]"
  del t10
  t13 = torch.unsqueeze(t12, 1)  # t13: "cpu f32[1, 1, 4096]"
  del t12
  t14 = Tensor.expand(t13, [1, 1, 4096])  # t14: "cpu f32[1, 1, 4096]"
  del t13
  t15 = torch_pad_prim_impl(t14, 0.0, ((0, 1, 0), (0, 4095, 0), (0, 0, 0)))  # t15: "cpu f32[2, 4096, 4096]"
  del t14
  return (t15, t11, None)
