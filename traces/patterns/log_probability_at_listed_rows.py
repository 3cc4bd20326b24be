# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_at_listed_rows(hidden, weight, tokens):
#         log_probs = F.linear(hidden[0], weight).log_softmax(-1)
#         return -log_probs[list(range(tokens.shape[1])), tokens[0]].mean()
#
# fused, gradients in forward, chunks of 64 tokens
# Saved for backward, beside the arguments and views of them:
#     t10: i64[], 8 bytes
#     t11: f32[4096, 4096], 67,108,864 bytes
#     t12: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # log_probs = F.linear(hidden[0], weight).log_softmax(-1)
  t0 = torch_slice_prim_impl(hidden, [0, 0, 0], [1, 4096, 4096], [1, 1, 1])  # t0: "cpu f32[1, 4096, 4096]"
  t1 = torch.squeeze(t0, (0,))  # t1: "cpu f32[4096, 4096]"
  del t0

  # return -log_probs[list(range(tokens.shape[1])), tokens[0]].mean()
  t2 = Tensor.__getitem__(tokens, 0)  # t2: "cpu i64[4096]"
  t3 = torch.full((4096,), -0.000244140625, device=torch.device("cpu"), dtype=torch.float32)  # t3: "cpu f32[4096]"
  t4 = torch.lt(t2, 0)  # t4: "cpu b8[4096]"
  t5 = torch.add(t2, 128256, alpha=1)  # t5: "cpu i64[4096]"
  t6 = torch.where(t4, t5, t2)  # t6: "cpu i64[4096]"
  del t4, t5, t2
  (t7, t8, t9, t10, t11, t12) = linear_cross_entropy_fwd(t1, weight, t6, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, strategy='gradients_in_forward', chunk_rows=64, token_weights=t3, expected_gradient=-1.0)
    # x = t1, W = weight, y = t6, w_t = t3, expected_gradient = -1.0
    # loss = t7: f32[], row_max = t8: f32[4096], row_log_sum = t9: f32[4096], valid_count = t10: i64[], dX = t11: f32[4096, 4096], dW = t12: f32[128256, 4096]
    # valid, valid_count = w_t != 0, sum(w_t != 0)                                                                         PyTorch
    # x, y = x[valid], y[valid]                                                                                            PyTorch
    # w_t f32[4096] = w_t[valid]                                                                                           PyTorch
    # s f32[4096] = expected_gradient * w_t                                                                                PyTorch
    # for each chunk of 64 tokens, 64 in all:
    #   logits f32[64, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[64] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[64, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                     PyTorch
    #   dX[chunk] f32[64, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[4096] = (row_log_sum - minimum(logits_y - row_max, 0)) * w_t                                       PyTorch
    # loss f32[] = sum(cross_entropy)                                                                                      PyTorch
    # row_max f32[4096] = scatter(row_max)                                                                                 PyTorch
    # row_log_sum f32[4096] = scatter(row_log_sum)                                                                         PyTorch
    # dX f32[4096, 4096] = scatter(dX)                                                                                     PyTorch
  del t8, t9, t1, t6, t3
  t13 = torch.neg(t7)  # t13: "cpu f32[]"
  del t7
  return {'output': (t13,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t13,)}, ((t10, t11, t12), ())


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
  t14, = cotangents
  # t14: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t10, t11, t12, = C0
  # t10: "cpu i64[]"
  # t11: "cpu f32[4096, 4096]"
  # t12: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t15 = torch.neg(t14)  # t15: "cpu f32[]"
  del t14
  (t16, t17) = scale_gradients(t15, t10, t11, t12, expected_gradient=-1.0)
    # t11 f32[4096, 4096] = t11 * where(t10 == 0, 0, t15 / -1)  (skipped where that is 1)    PyTorch
    # t12 f32[128256, 4096] = t12 * where(t10 == 0, 0, t15 / -1)  (skipped where that is 1)  PyTorch
  del t15, t10, t11, t12
  t18 = torch.unsqueeze(t16, 0)  # t18: "cpu f32[1, 4096, 4096]"
  del t16
  t19 = Tensor.expand(t18, [1, 4096, 4096])  # t19: "cpu f32[1, 4096, 4096]"
  del t18
  t20 = torch_pad_prim_impl(t19, 0.0, ((0, 1, 0), (0, 0, 0), (0, 0, 0)))  # t20: "cpu f32[2, 4096, 4096]"
  del t19
  return (t20, t17, None)
