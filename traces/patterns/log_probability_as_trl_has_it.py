# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_as_trl_has_it(hidden, weight, tokens):
#         """`selective_log_softmax`, with a temperature and the shift of causal language models."""
#         logits = F.linear(hidden, weight)[:, :-1].float() / 0.7
#         index = tokens[:, 1:]
#         selected_logits = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
#         logsumexp_values = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
#         return selected_logits - logsumexp_values
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because its result, or what is made of it, is returned and not detached
# Saved for backward, beside the arguments and views of them:
#     t2: f32[2, 4095, 4096], 134,184,960 bytes
#     t3: i64[2, 4095], 65,520 bytes
#     t5: f32[8190], 32,760 bytes
#     t6: f32[8190], 32,760 bytes
#     t7: i64[], 8 bytes

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

  # index = tokens[:, 1:]
  t0 = Tensor.__getitem__(tokens, (slice(None,None,None), slice(1,None,None)))  # t0: "cpu i64[2, 4095]"

  # selected_logits = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
  t1 = torch.unsqueeze(t0, -1)  # t1: "cpu i64[2, 4095, 1]"
  del t0
  t2 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t2: "cpu f32[2, 4095, 4096]"

  # return selected_logits - logsumexp_values
  t3 = torch.reshape(t1, (2, 4095))  # t3: "cpu i64[2, 4095]"
  del t1
  (t4, t5, t6, t7) = linear_cross_entropy_fwd(t2, weight, t3, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, logit_scale=1.4285714285714286, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = t2, W = weight, y = t3
    # loss = t4: f32[2, 4095], row_max = t5: f32[8190], row_log_sum = t6: f32[8190], valid_count = t7: i64[]
    # for each chunk of 65 tokens, 126 in all:
    #   z f32[65, 128256] = x[chunk] @ W.t()                                                  PyTorch
    #   u f32[65, 128256] = z * 1.4285714285714286  (wherever they are read)
    #   z_y f32[65] = z[y[chunk]]                                                             PyTorch
    #   row_max, row_log_sum f32[65] = max_v(u), log(sum_v(exp(u - row_max)))                 PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(z_y * 1.4285714285714286 - row_max, 0)  PyTorch
    # loss f32[8190] = cross_entropy                                                          PyTorch
  t8 = torch.neg(t4)  # t8: "cpu f32[2, 4095]"
  del t4
  return {'output': (t8,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t8,)}, ((t2, weight, t3, t5, t6, t7), ())


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
  t9, = cotangents
  # t9: "cpu f32[2, 4095]"
  clear_mutable_collection(cotangents)
  del cotangents
  t2, weight, t3, t5, t6, t7, = C0
  # t2: "cpu f32[2, 4095, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t3: "cpu i64[2, 4095]"
  # t5: "cpu f32[8190]"
  # t6: "cpu f32[8190]"
  # t7: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t10 = torch.neg(t9)  # t10: "cpu f32[2, 4095]"
  del t9
  (t11, t12) = linear_cross_entropy_bwd(t10, t2, weight, t3, None, t5, t6, t7, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, logit_scale=1.4285714285714286, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = t2, W = weight, y = t3, grad = t10, row_max = t5, row_log_sum = t6
    # dX = t11: f32[2, 4095, 4096], dW = t12: f32[128256, 4096]
    # s f32[8190] = grad                                                                                                                PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   z f32[8190, K] = x @ W[block].t()                                                                                               PyTorch
    #   u f32[8190, K] = z * 1.4285714285714286  (wherever they are read)
    #   dlogits f32[8190, K] = exp(u - row_max - row_log_sum) * s * 1.4285714285714286 - s * 1.4285714285714286 * [v == y]  (in place)  PyTorch
    #   dX f32[8190, 4096] += dlogits @ W[block]                                                                                        PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                                                        PyTorch
  del t10, t2, weight, t3, t5, t6, t7
  t13 = torch_pad_prim_impl(t11, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t13: "cpu f32[2, 4096, 4096]"
  del t11
  return (t13, t12, None)
