# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def masked_mean_of_each_sequence(hidden, weight, tokens, token_weights):
#         """As GRPO has it, without an advantage."""
#         log_probs = F.linear(hidden, weight).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
#         mask = token_weights > 0.5
#         return -((log_probs * mask).sum(-1) / mask.sum(-1)).mean()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t16: i64[], 8 bytes
#     t17: f32[2, 4096, 4096], 134,217,728 bytes
#     t18: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens, token_weights):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"
  # token_weights: "cpu f32[2, 4096]"

  # log_probs = F.linear(hidden, weight).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
  t0 = torch.unsqueeze(tokens, -1)  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.gt(token_weights, 0.5)  # t1: "cpu b8[2, 4096]"

  # return -((log_probs * mask).sum(-1) / mask.sum(-1)).mean()
  t2 = torch.sum(t1, -1, False, dtype=None)  # t2: "cpu i64[2]"
  t3 = torch.detach(t2)  # t3: "cpu i64[2]"
  del t2
  t4 = Tensor.to(t3, copy=False, dtype=torch.float32)  # t4: "cpu f32[2]"
  del t3
  t5 = torch_div_prim_impl(0.5, t4)  # t5: "cpu f32[2]"
  del t4
  t6 = torch_prims_reshape_impl(t5, (2, 1))  # t6: "cpu f32[2, 1]"
  del t5
  t7 = Tensor.expand(t6, (2, 4096))  # t7: "cpu f32[2, 4096]"
  del t6
  t8 = torch.detach(t1)  # t8: "cpu b8[2, 4096]"
  del t1
  t9 = Tensor.to(t8, copy=False, dtype=torch.float32)  # t9: "cpu f32[2, 4096]"
  del t8
  t10 = torch.mul(t7, t9)  # t10: "cpu f32[2, 4096]"
  del t7, t9
  t11 = torch.neg(t10)  # t11: "cpu f32[2, 4096]"
  del t10
  t12 = torch.reshape(t0, (2, 4096))  # t12: "cpu i64[2, 4096]"
  del t0
  (t13, t14, t15, t16, t17, t18) = linear_cross_entropy_fwd(hidden, weight, t12, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-4611686018427387905, strategy='gradients_in_forward', chunk_rows=65, token_weights=t11, expected_gradient=-1.0)
    # x = hidden, W = weight, y = t12, w_t = t11, expected_gradient = -1.0
    # loss = t13: f32[], row_max = t14: f32[8192], row_log_sum = t15: f32[8192], valid_count = t16: i64[], dX = t17: f32[2, 4096, 4096], dW = t18: f32[128256, 4096]
    # valid, valid_count = w_t != 0, sum(w_t != 0)                                                                        PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # w_t f32[8192] = w_t[valid]                                                                                          PyTorch
    # s f32[8192] = expected_gradient * w_t                                                                               PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = (row_log_sum - minimum(logits_y - row_max, 0)) * w_t                                      PyTorch
    # loss f32[] = sum(cross_entropy)                                                                                     PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t14, t15, t12, t11
  t19 = torch.neg(t13)  # t19: "cpu f32[]"
  del t13
  return {'output': (t19,), 'flat_args': [hidden, weight, tokens, token_weights], 'flat_output': (t19,)}, ((t16, t17, t18), ())


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
  t20, = cotangents
  # t20: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t16, t17, t18, = C0
  # t16: "cpu i64[]"
  # t17: "cpu f32[2, 4096, 4096]"
  # t18: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t21 = torch.neg(t20)  # t21: "cpu f32[]"
  del t20
  (t22, t23) = scale_gradients(t21, t16, t17, t18, expected_gradient=-1.0)
    # t17 f32[2, 4096, 4096] = t17 * where(t16 == 0, 0, t21 / -1)  (skipped where that is 1)  PyTorch
    # t18 f32[128256, 4096] = t18 * where(t16 == 0, 0, t21 / -1)  (skipped where that is 1)   PyTorch
  del t21, t16, t17, t18
  return (t22, t23, None, None)
