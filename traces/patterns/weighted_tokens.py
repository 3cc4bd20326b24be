# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def weighted_tokens(hidden, weight, labels, token_weights):
#         losses = _loss(F.linear(hidden, weight), labels, reduction="none")
#         return (losses * token_weights.view(-1)).sum() / token_weights.sum()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t2: f32[], 4 bytes
#     t17: i64[], 8 bytes
#     t18: f32[2, 4096, 4096], 134,217,728 bytes
#     t19: f32[128256, 4096], 2,101,346,304 bytes
#     t13: f32[], 4 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels, token_weights):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"
  # token_weights: "cpu f32[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.reshape(labels, (-1,))  # t0: "cpu i64[8192]"

  # return (losses * token_weights.view(-1)).sum() / token_weights.sum()
  t1 = torch_prims_reshape_impl(token_weights, (8192,))  # t1: "cpu f32[8192]"
  t2 = torch.sum(token_weights, None, False, dtype=None)  # t2: "cpu f32[]"
  t3 = torch.detach(t1)  # t3: "cpu f32[8192]"
  del t1
  t4 = shallow_copy(t3)  # t4: "cpu f32[8192]"
  del t3
  t5 = torch_prims_reshape_impl(t4, (2, 4096))  # t5: "cpu f32[2, 4096]"
  del t4
  t6 = torch.reshape(t0, (2, 4096))  # t6: "cpu i64[2, 4096]"
  del t0
  t7 = torch.detach(t2)  # t7: "cpu f32[]"
  t8 = torch_div_prim_impl(1.0, t7)  # t8: "cpu f32[]"
  del t7
  t9 = torch.abs(t8)  # t9: "cpu f32[]"
  t10 = torch.ge(t9, 8.673617379884035e-19)  # t10: "cpu b8[]"
  t11 = torch.le(t9, 1.152921504606847e+18)  # t11: "cpu b8[]"
  del t9
  t12 = torch.logical_and(t10, t11)  # t12: "cpu b8[]"
  del t10, t11
  t13 = torch.where(t12, t8, 1.0)  # t13: "cpu f32[]"
  del t12, t8
  (t14, t15, t16, t17, t18, t19) = linear_cross_entropy_fwd(hidden, weight, t6, None, needs_grad=("input", "linear_weight"), reduction='sum', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, token_weights=t5, expected_gradient=t13)
    # x = hidden, W = weight, y = t6, w_t = t5, expected_gradient = t13
    # loss = t14: f32[], row_max = t15: f32[8192], row_log_sum = t16: f32[8192], valid_count = t17: i64[], dX = t18: f32[2, 4096, 4096], dW = t19: f32[128256, 4096]
    # valid, valid_count = (y != -100) & (w_t != 0), sum((y != -100) & (w_t != 0))                                        PyTorch
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
  del t15, t16, t6, t5
  t20 = torch_div_prim_impl(t14, t2)  # t20: "cpu f32[]"
  del t14
  return {'output': (t20,), 'flat_args': [hidden, weight, labels, token_weights], 'flat_output': (t20,)}, ((t2, t17, t18, t19, t13), ())


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
  t21, = cotangents
  # t21: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t2, t17, t18, t19, t13, = C0
  # t2: "cpu f32[]"
  # t17: "cpu i64[]"
  # t18: "cpu f32[2, 4096, 4096]"
  # t19: "cpu f32[128256, 4096]"
  # t13: "cpu f32[]"
  clear_mutable_collection(C0)
  del C0
  t22 = torch.true_divide(t21, t2)  # t22: "cpu f32[]"
  del t21, t2
  (t23, t24) = scale_gradients(t22, t17, t18, t19, expected_gradient=t13)
    # t18 f32[2, 4096, 4096] = t18 * where(t17 == 0, 0, t22 / t13)  (skipped where that is 1)  PyTorch
    # t19 f32[128256, 4096] = t19 * where(t17 == 0, 0, t22 / t13)  (skipped where that is 1)   PyTorch
  del t22, t17, t18, t19, t13
  return (t23, t24, None, None)
