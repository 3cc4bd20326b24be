# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_in_chunks(hidden, weight, tokens):
#         """As TRL's `entropy_from_logits`."""
#         entropies = []
#         for chunk in F.linear(hidden, weight).view(-1, weight.shape[0]).split(hidden.shape[1] - 4):
#             log_probs = F.log_softmax(chunk, dim=-1)
#             entropies.append(-(torch.exp(log_probs) * log_probs).sum(-1))
#         return torch.cat(entropies).view(tokens.shape)
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because its result, or what is made of it, is returned and not detached
# Saved for backward, beside the arguments and views of them:
#     t0: i64[2, 4096], 65,536 bytes
#     t3: f32[8192], 32,768 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: i64[], 8 bytes
#     t2: f32[2, 4096], 32,768 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"

  # return torch.cat(entropies).view(tokens.shape)
  t0 = torch.full((2, 4096), 0, device=torch.device("cpu"), dtype=torch.int64)  # t0: "cpu i64[2, 4096]"
  (t1, t2, t3, t4, t5) = linear_cross_entropy_fwd(hidden, weight, t0, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t0
    # loss = t1: f32[2, 4096], entropy = t2: f32[2, 4096], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                           PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                 PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))     PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)               PyTorch
    # loss f32[8192] = cross_entropy                                                       PyTorch
    # entropy f32[8192] = row_log_sum - expected                                           PyTorch
  del t1
  return {'output': (t2,), 'flat_args': [hidden, weight], 'flat_output': (t2,)}, ((hidden, weight, t0, t3, t4, t5, t2), ())


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
  t6, = cotangents
  # t6: "cpu f32[2, 4096]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, t0, t3, t4, t5, t2, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t0: "cpu i64[2, 4096]"
  # t3: "cpu f32[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu i64[]"
  # t2: "cpu f32[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  t7 = torch.zeros(2, 4096, device=torch.device("cpu"), dtype=torch.float32)  # t7: "cpu f32[2, 4096]"
  (t8, t9) = linear_cross_entropy_bwd(t7, hidden, weight, t0, None, t3, t4, t5, None, needs_grad=("input", "linear_weight"), entropy_grad=t6, entropy=t2, reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t0, grad = t7, entropy_grad = t6, row_max = t3, row_log_sum = t4, entropy = t2
    # dX = t8: f32[2, 4096, 4096], dW = t9: f32[128256, 4096]
    # s f32[8192] = grad                                                                                                                                        PyTorch
    # g_e f32[8192] = entropy_grad                                                                                                                              PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                                                                                  PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * (s + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                                                                                PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                                                                                PyTorch
  del t7, hidden, weight, t0, t3, t4, t5, t2, t6
  return (t8, t9)
