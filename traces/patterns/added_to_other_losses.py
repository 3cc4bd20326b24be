# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def added_to_other_losses(hidden, weight, labels):
#         return _loss(F.linear(hidden, weight), labels) / 4 + 0.01 * hidden.square().mean()
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t5: i64[], 8 bytes
#     t6: f32[2, 4096, 4096], 134,217,728 bytes
#     t7: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.reshape(labels, (-1,))  # t0: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, expected_gradient=0.25)
    # x = hidden, W = weight, y = t1, expected_gradient = 0.25
    # loss = t2: f32[], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[], dX = t6: f32[2, 4096, 4096], dW = t7: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = expected_gradient / valid_count                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t3, t4, t1

  # return _loss(F.linear(hidden, weight), labels) / 4 + 0.01 * hidden.square().mean()
  t8 = torch_div_prim_impl(t2, 4.0)  # t8: "cpu f32[]"
  del t2
  t9 = torch.mul(hidden, hidden)  # t9: "cpu f32[2, 4096, 4096]"
  t10 = shallow_copy(t9)  # t10: "cpu f32[2, 4096, 4096]"
  del t9
  t11 = torch.sum(t10, (0, 1, 2))  # t11: "cpu f32[]"
  del t10
  t12 = torch_div_prim_impl(t11, 33554432.0)  # t12: "cpu f32[]"
  del t11
  t13 = shallow_copy(t12)  # t13: "cpu f32[]"
  del t12
  t14 = torch.mul(0.01, t13)  # t14: "cpu f32[]"
  del t13
  t15 = torch.add(t8, t14, alpha=1)  # t15: "cpu f32[]"
  del t8, t14
  return {'output': (t15,), 'flat_args': [hidden, weight, labels], 'flat_output': (t15,)}, ((hidden, t5, t6, t7), ())


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
  t16, = cotangents
  # t16: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, t5, t6, t7, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # t5: "cpu i64[]"
  # t6: "cpu f32[2, 4096, 4096]"
  # t7: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t17 = torch.mul(0.01, t16)  # t17: "cpu f32[]"
  t18 = torch.true_divide(t17, 33554432.0)  # t18: "cpu f32[]"
  del t17
  t19 = torch.unsqueeze(t18, 0)  # t19: "cpu f32[1]"
  del t18
  t20 = torch.unsqueeze(t19, 1)  # t20: "cpu f32[1, 1]"
  del t19
  t21 = torch.unsqueeze(t20, 2)  # t21: "cpu f32[1, 1, 1]"
  del t20
  t22 = Tensor.expand(t21, [1, 1, 1])  # t22: "cpu f32[1, 1, 1]"
  del t21
  t23 = Tensor.expand(t22, (2, 4096, 4096))  # t23: "cpu f32[2, 4096, 4096]"
  del t22
  t24 = torch.mul(hidden, t23)  # t24: "cpu f32[2, 4096, 4096]"
  t25 = torch.mul(hidden, t23)  # t25: "cpu f32[2, 4096, 4096]"
  del hidden, t23
  t26 = torch.add(t24, t25, alpha=1)  # t26: "cpu f32[2, 4096, 4096]"
  del t24, t25
  t27 = torch.true_divide(t16, 4.0)  # t27: "cpu f32[]"
  del t16
  (t28, t29) = scale_gradients(t27, t5, t6, t7, expected_gradient=0.25)
    # t6 f32[2, 4096, 4096] = t6 * where(t5 == 0, 0, t27 / 0.25)  (skipped where that is 1)  PyTorch
    # t7 f32[128256, 4096] = t7 * where(t5 == 0, 0, t27 / 0.25)  (skipped where that is 1)   PyTorch
  del t27, t5, t6, t7
  t30 = torch.add(t26, t28, alpha=1)  # t30: "cpu f32[2, 4096, 4096]"
  del t26, t28
  return (t30, t29, None)
