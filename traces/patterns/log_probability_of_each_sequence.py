# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_of_each_sequence(hidden, weight, tokens):
#         """A loop over sequences, as TRL has it for 16 bits."""
#         per_token = []
#         for row_logits, row_labels in zip(F.linear(hidden, weight), tokens, strict=True):
#             row_log_probs = F.log_softmax(row_logits, dim=-1)
#             per_token.append(row_log_probs.gather(dim=-1, index=row_labels.unsqueeze(-1)).squeeze(-1))
#         return torch.stack(per_token)
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because its result, or what is made of it, is returned and not detached
# Saved for backward, beside the arguments and views of them:
#     t1: f32[8192], 32,768 bytes
#     t2: f32[8192], 32,768 bytes
#     t3: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # return torch.stack(per_token)
  (t0, t1, t2, t3) = linear_cross_entropy_fwd(hidden, weight, tokens, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = tokens
    # loss = t0: f32[2, 4096], row_max = t1: f32[8192], row_log_sum = t2: f32[8192], valid_count = t3: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                        PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)            PyTorch
    # loss f32[8192] = cross_entropy                                                    PyTorch
  t4 = torch.neg(t0)  # t4: "cpu f32[2, 4096]"
  del t0
  return {'output': (t4,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t4,)}, ((hidden, weight, tokens, t1, t2, t3), ())


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
  t5, = cotangents
  # t5: "cpu f32[2, 4096]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, tokens, t1, t2, t3, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"
  # t1: "cpu f32[8192]"
  # t2: "cpu f32[8192]"
  # t3: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t6 = torch.neg(t5)  # t6: "cpu f32[2, 4096]"
  del t5
  (t7, t8) = linear_cross_entropy_bwd(t6, hidden, weight, tokens, None, t1, t2, t3, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = tokens, grad = t6, row_max = t1, row_log_sum = t2
    # dX = t7: f32[2, 4096, 4096], dW = t8: f32[128256, 4096]
    # s f32[8192] = grad                                                                           PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                     PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                   PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                   PyTorch
  del t6, hidden, weight, tokens, t1, t2, t3
  return (t7, t8, None)
