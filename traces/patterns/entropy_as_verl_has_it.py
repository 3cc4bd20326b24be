# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_as_verl_has_it(hidden, weight, tokens):
#         """Logged beside a log-probability."""
#         logits = F.linear(hidden, weight)
#         log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
#         with torch.no_grad():
#             probabilities = F.softmax(logits, dim=-1)
#             entropy = torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)
#         return log_probs.mean(), entropy
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary
# Saved for backward, beside the arguments and views of them:
#     t1: i64[2, 4096], 65,536 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # log_probs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
  t0 = torch.unsqueeze(tokens, -1)  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), detached=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[2, 4096], entropy = t3: f32[2, 4096], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                           PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                 PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))     PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)               PyTorch
    # loss f32[8192] = cross_entropy                                                       PyTorch
    # entropy f32[8192] = row_log_sum - expected                                           PyTorch
  t7 = torch.neg(t2)  # t7: "cpu f32[2, 4096]"
  del t2
  t8 = torch.detach(t3)  # t8: "cpu f32[2, 4096]"
  del t3

  # return log_probs.mean(), entropy
  t9 = shallow_copy(t7)  # t9: "cpu f32[2, 4096]"
  del t7
  t10 = torch.sum(t9, (0, 1))  # t10: "cpu f32[]"
  del t9
  t11 = torch_div_prim_impl(t10, 8192.0)  # t11: "cpu f32[]"
  del t10
  t12 = shallow_copy(t11)  # t12: "cpu f32[]"
  del t11
  return {'output': (t12, t8), 'flat_args': [hidden, weight, tokens], 'flat_output': (t12, t8)}, ((hidden, weight, t1, t4, t5, t6), ())


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
  t13, _, = cotangents
  # t13: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, t1, t4, t5, t6, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu i64[2, 4096]"
  # t4: "cpu f32[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t14 = torch.true_divide(t13, 8192.0)  # t14: "cpu f32[]"
  del t13
  t15 = torch.unsqueeze(t14, 0)  # t15: "cpu f32[1]"
  del t14
  t16 = torch.unsqueeze(t15, 1)  # t16: "cpu f32[1, 1]"
  del t15
  t17 = Tensor.expand(t16, [1, 1])  # t17: "cpu f32[1, 1]"
  del t16
  t18 = Tensor.expand(t17, (2, 4096))  # t18: "cpu f32[2, 4096]"
  del t17
  t19 = torch.neg(t18)  # t19: "cpu f32[2, 4096]"
  del t18
  (t20, t21) = linear_cross_entropy_bwd(t19, hidden, weight, t1, None, t4, t5, t6, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), detached=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1, grad = t19, row_max = t4, row_log_sum = t5
    # dX = t20: f32[2, 4096, 4096], dW = t21: f32[128256, 4096]
    # s f32[8192] = grad                                                                           PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                     PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                   PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                   PyTorch
  del t19, hidden, weight, t1, t4, t5, t6
  return (t20, t21, None)
