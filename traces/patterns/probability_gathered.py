# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def probability_gathered(hidden, weight, bias, tokens):
#         probabilities = torch.softmax(F.linear(hidden, weight, bias).view(-1, weight.shape[0]), dim=-1)
#         return torch.take_along_dim(probabilities, tokens.view(-1, 1), dim=1).log().sum()
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary
# Saved for backward, beside the arguments and views of them:
#     t8: f32[8192, 1], 32,768 bytes
#     t3: f32[8192], 32,768 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: i64[], 8 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, bias, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # bias: "cpu f32[128256]"
  # tokens: "cpu i64[2, 4096]"

  # return torch.take_along_dim(probabilities, tokens.view(-1, 1), dim=1).log().sum()
  t0 = Tensor.view(tokens, -1, 1)  # t0: "cpu i64[8192, 1]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5) = linear_cross_entropy_fwd(hidden, weight, t1, bias, needs_grad=("input", "linear_weight", "linear_bias"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1, b = bias
    # loss = t2: f32[2, 4096], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t() + b                                    PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)            PyTorch
    # loss f32[8192] = cross_entropy                                                    PyTorch
  t6 = torch_prims_reshape_impl(t2, (8192, 1))  # t6: "cpu f32[8192, 1]"
  del t2
  t7 = torch.neg(t6)  # t7: "cpu f32[8192, 1]"
  del t6
  t8 = torch.exp(t7)  # t8: "cpu f32[8192, 1]"
  del t7
  t9 = torch.log(t8)  # t9: "cpu f32[8192, 1]"
  t10 = torch.sum(t9, None, False, dtype=None)  # t10: "cpu f32[]"
  del t9
  return {'output': (t10,), 'flat_args': [hidden, weight, bias, tokens], 'flat_output': (t10,)}, ((t8, hidden, weight, t1, bias, t3, t4, t5), ())


# Constructed by Delete Last Used
from torch import Tensor
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
  t8, hidden, weight, t1, bias, t3, t4, t5, = C0
  # t8: "cpu f32[8192, 1]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu i64[2, 4096]"
  # bias: "cpu f32[128256]"
  # t3: "cpu f32[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t12 = Tensor.expand(t11, (8192, 1))  # t12: "cpu f32[8192, 1]"
  del t11
  t13 = Tensor.to(t12, copy=False, dtype=torch.float32)  # t13: "cpu f32[8192, 1]"
  del t12
  t14 = torch.true_divide(t13, t8)  # t14: "cpu f32[8192, 1]"
  del t13
  t15 = torch.mul(t14, t8)  # t15: "cpu f32[8192, 1]"
  del t14, t8
  t16 = torch.neg(t15)  # t16: "cpu f32[8192, 1]"
  del t15
  t17 = torch_prims_reshape_impl(t16, (2, 4096))  # t17: "cpu f32[2, 4096]"
  del t16
  (t18, t19, t20) = linear_cross_entropy_bwd(t17, hidden, weight, t1, bias, t3, t4, t5, None, needs_grad=("input", "linear_weight", "linear_bias"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1, b = bias, grad = t17, row_max = t3, row_log_sum = t4
    # dX = t18: f32[2, 4096, 4096], dW = t19: f32[128256, 4096], db = t20: f32[128256]
    # s f32[8192] = grad                                                                                                        PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t() + b[block]                                                                       PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place, with its sums over the rows)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                                                PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                                                PyTorch
    #   db[block] f32[K] = sum_t(dlogits)                                                                                       PyTorch
  del t17, hidden, weight, t1, bias, t3, t4, t5
  return (t18, t19, t20, None)
