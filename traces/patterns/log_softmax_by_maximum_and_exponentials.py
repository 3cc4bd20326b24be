# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_softmax_by_maximum_and_exponentials(hidden, weight, tokens):
#         logits = F.linear(hidden, weight).float()
#         logits = logits - logits.max(dim=-1, keepdim=True)[0]
#         log_probs = logits - torch.log(torch.exp(logits).sum(dim=-1, keepdim=True))
#         return log_probs.gather(-1, tokens[..., None]).squeeze(-1) - 0.1 * (log_probs.exp() * log_probs).sum(-1)
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because its result, or what is made of it, is returned and not detached
# Saved for backward, beside the arguments and views of them:
#     t1: i64[2, 4096], 65,536 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: i64[], 8 bytes
#     t3: f32[2, 4096], 32,768 bytes

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

  # return log_probs.gather(-1, tokens[..., None]).squeeze(-1) - 0.1 * (log_probs.exp() * log_probs).sum(-1)
  t0 = Tensor.__getitem__(tokens, (..., None))  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
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
  t8 = torch.neg(t3)  # t8: "cpu f32[2, 4096]"
  t9 = torch.mul(0.1, t8)  # t9: "cpu f32[2, 4096]"
  del t8
  t10 = torch.sub(t7, t9, alpha=1)  # t10: "cpu f32[2, 4096]"
  del t7, t9
  return {'output': (t10,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t10,)}, ((hidden, weight, t1, t4, t5, t6, t3), ())


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
  # t11: "cpu f32[2, 4096]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, t1, t4, t5, t6, t3, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu i64[2, 4096]"
  # t4: "cpu f32[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu i64[]"
  # t3: "cpu f32[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  t12 = torch.neg(t11)  # t12: "cpu f32[2, 4096]"
  t13 = torch.mul(0.1, t12)  # t13: "cpu f32[2, 4096]"
  del t12
  t14 = torch.neg(t13)  # t14: "cpu f32[2, 4096]"
  del t13
  t15 = torch.neg(t11)  # t15: "cpu f32[2, 4096]"
  del t11
  (t16, t17) = linear_cross_entropy_bwd(t15, hidden, weight, t1, None, t4, t5, t6, None, needs_grad=("input", "linear_weight"), entropy_grad=t14, entropy=t3, reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1, grad = t15, entropy_grad = t14, row_max = t4, row_log_sum = t5, entropy = t3
    # dX = t16: f32[2, 4096, 4096], dW = t17: f32[128256, 4096]
    # s f32[8192] = grad                                                                                                                                        PyTorch
    # g_e f32[8192] = entropy_grad                                                                                                                              PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                                                                                  PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * (s + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                                                                                PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                                                                                PyTorch
  del t15, hidden, weight, t1, t4, t5, t6, t3, t14
  return (t16, t17, None)
