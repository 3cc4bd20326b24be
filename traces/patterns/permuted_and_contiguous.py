# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def permuted_and_contiguous(hidden, weight, labels):
#         return F.cross_entropy(F.linear(hidden, weight).permute(0, 2, 1).contiguous(), labels, reduction="none").mean()
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary
# Saved for backward, beside the arguments and views of them:
#     t1: f32[8192], 32,768 bytes
#     t2: f32[8192], 32,768 bytes
#     t3: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(F.linear(hidden, weight).permute(0, 2, 1).contiguous(), labels, reduction="none").mean()
  (t0, t1, t2, t3) = linear_cross_entropy_fwd(hidden, weight, labels, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-100, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[2, 4096], row_max = t1: f32[8192], row_log_sum = t2: f32[8192], valid_count = t3: i64[]
    # valid, valid_count = y != -100, sum(y != -100)                                    PyTorch
    # x, y = x[valid], y[valid]                                                         PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                        PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)            PyTorch
    # loss f32[8192] = scatter(cross_entropy)                                           PyTorch
    # row_max f32[8192] = scatter(row_max)                                              PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                      PyTorch
  t4 = shallow_copy(t0)  # t4: "cpu f32[2, 4096]"
  del t0
  t5 = torch.sum(t4, (0, 1))  # t5: "cpu f32[]"
  del t4
  t6 = torch_div_prim_impl(t5, 8192.0)  # t6: "cpu f32[]"
  del t5
  t7 = shallow_copy(t6)  # t7: "cpu f32[]"
  del t6
  return {'output': (t7,), 'flat_args': [hidden, weight, labels], 'flat_output': (t7,)}, ((hidden, weight, labels, t1, t2, t3), ())


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
  t8, = cotangents
  # t8: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, labels, t1, t2, t3, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"
  # t1: "cpu f32[8192]"
  # t2: "cpu f32[8192]"
  # t3: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t9 = torch.true_divide(t8, 8192.0)  # t9: "cpu f32[]"
  del t8
  t10 = torch.unsqueeze(t9, 0)  # t10: "cpu f32[1]"
  del t9
  t11 = torch.unsqueeze(t10, 1)  # t11: "cpu f32[1, 1]"
  del t10
  t12 = Tensor.expand(t11, [1, 1])  # t12: "cpu f32[1, 1]"
  del t11
  t13 = Tensor.expand(t12, (2, 4096))  # t13: "cpu f32[2, 4096]"
  del t12
  (t14, t15) = linear_cross_entropy_bwd(t13, hidden, weight, labels, None, t1, t2, t3, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-100, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = labels, grad = t13, row_max = t1, row_log_sum = t2
    # dX = t14: f32[2, 4096, 4096], dW = t15: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                               PyTorch
    # x, y = x[valid], y[valid]                                                                    PyTorch
    # s f32[8192] = grad[valid]                                                                    PyTorch
    # row_max f32[8192] = row_max[valid]                                                           PyTorch
    # row_log_sum f32[8192] = row_log_sum[valid]                                                   PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                     PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                   PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                   PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                             PyTorch
  del t13, hidden, weight, labels, t1, t2, t3
  return (t14, t15, None)
