# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_indexed(hidden, weight, tokens):
#         logits = F.linear(hidden, weight).view(-1, weight.shape[0])
#         rows = torch.arange(logits.shape[0], device=logits.device)
#         return -F.log_softmax(logits, -1)[rows, tokens.view(-1) - 1].mean()
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary
# Saved for backward, beside the arguments and views of them:
#     t5: i64[2, 4096], 65,536 bytes
#     t7: f32[8192], 32,768 bytes
#     t8: f32[8192], 32,768 bytes
#     t9: i64[], 8 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # return -F.log_softmax(logits, -1)[rows, tokens.view(-1) - 1].mean()
  t0 = Tensor.view(tokens, -1)  # t0: "cpu i64[8192]"
  t1 = torch.sub(t0, 1, alpha=1)  # t1: "cpu i64[8192]"
  del t0
  t2 = torch.lt(t1, 0)  # t2: "cpu b8[8192]"
  t3 = torch.add(t1, 128256, alpha=1)  # t3: "cpu i64[8192]"
  t4 = torch.where(t2, t3, t1)  # t4: "cpu i64[8192]"
  del t2, t3, t1
  t5 = torch.reshape(t4, (2, 4096))  # t5: "cpu i64[2, 4096]"
  del t4
  (t6, t7, t8, t9) = linear_cross_entropy_fwd(hidden, weight, t5, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-9223372036854775808, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t5
    # loss = t6: f32[2, 4096], row_max = t7: f32[8192], row_log_sum = t8: f32[8192], valid_count = t9: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                        PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)            PyTorch
    # loss f32[8192] = cross_entropy                                                    PyTorch
  t10 = torch_prims_reshape_impl(t6, (8192,))  # t10: "cpu f32[8192]"
  del t6
  t11 = torch.neg(t10)  # t11: "cpu f32[8192]"
  del t10
  t12 = shallow_copy(t11)  # t12: "cpu f32[8192]"
  del t11
  t13 = torch.sum(t12, (0,))  # t13: "cpu f32[]"
  del t12
  t14 = torch_div_prim_impl(t13, 8192.0)  # t14: "cpu f32[]"
  del t13
  t15 = shallow_copy(t14)  # t15: "cpu f32[]"
  del t14
  t16 = torch.neg(t15)  # t16: "cpu f32[]"
  del t15
  return {'output': (t16,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t16,)}, ((hidden, weight, t5, t7, t8, t9), ())


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
  t17, = cotangents
  # t17: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, t5, t7, t8, t9, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t5: "cpu i64[2, 4096]"
  # t7: "cpu f32[8192]"
  # t8: "cpu f32[8192]"
  # t9: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t18 = torch.neg(t17)  # t18: "cpu f32[]"
  del t17
  t19 = torch.true_divide(t18, 8192.0)  # t19: "cpu f32[]"
  del t18
  t20 = torch.unsqueeze(t19, 0)  # t20: "cpu f32[1]"
  del t19
  t21 = Tensor.expand(t20, [1])  # t21: "cpu f32[1]"
  del t20
  t22 = Tensor.expand(t21, (8192,))  # t22: "cpu f32[8192]"
  del t21
  t23 = torch.neg(t22)  # t23: "cpu f32[8192]"
  del t22
  t24 = torch_prims_reshape_impl(t23, (2, 4096))  # t24: "cpu f32[2, 4096]"
  del t23
  (t25, t26) = linear_cross_entropy_bwd(t24, hidden, weight, t5, None, t7, t8, t9, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-9223372036854775808, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t5, grad = t24, row_max = t7, row_log_sum = t8
    # dX = t25: f32[2, 4096, 4096], dW = t26: f32[128256, 4096]
    # s f32[8192] = grad                                                                           PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                     PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                   PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                   PyTorch
  del t24, hidden, weight, t5, t7, t8, t9
  return (t25, t26, None)
