# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_indexed_in_three_dimensions(hidden, weight, tokens):
#         log_probs = F.log_softmax(F.linear(hidden, weight), -1)
#         sequences, positions = (torch.arange(size, device=hidden.device) for size in log_probs.shape[:2])
#         return log_probs[sequences[:, None], positions, tokens]
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because its result, or what is made of it, is returned and not detached
# Saved for backward, beside the arguments and views of them:
#     t2: i64[2, 4096], 65,536 bytes
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

  # return log_probs[sequences[:, None], positions, tokens]
  t0 = torch.lt(tokens, 0)  # t0: "cpu b8[2, 4096]"
  t1 = torch.add(tokens, 128256, alpha=1)  # t1: "cpu i64[2, 4096]"
  t2 = torch.where(t0, t1, tokens)  # t2: "cpu i64[2, 4096]"
  del t0, t1
  (t3, t4, t5, t6) = linear_cross_entropy_fwd(hidden, weight, t2, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t2
    # loss = t3: f32[2, 4096], row_max = t4: f32[8192], row_log_sum = t5: f32[8192], valid_count = t6: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                        PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)            PyTorch
    # loss f32[8192] = cross_entropy                                                    PyTorch
  t7 = torch.neg(t3)  # t7: "cpu f32[2, 4096]"
  del t3
  return {'output': (t7,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t7,)}, ((hidden, weight, t2, t4, t5, t6), ())


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
  t8, = cotangents
  # t8: "cpu f32[2, 4096]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, t2, t4, t5, t6, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t2: "cpu i64[2, 4096]"
  # t4: "cpu f32[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t9 = torch.neg(t8)  # t9: "cpu f32[2, 4096]"
  del t8
  (t10, t11) = linear_cross_entropy_bwd(t9, hidden, weight, t2, None, t4, t5, t6, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t2, grad = t9, row_max = t4, row_log_sum = t5
    # dX = t10: f32[2, 4096, 4096], dW = t11: f32[128256, 4096]
    # s f32[8192] = grad                                                                           PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                     PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                   PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                   PyTorch
  del t9, hidden, weight, t2, t4, t5, t6
  return (t10, t11, None)
