# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def accuracy_of_shifted_logits(hidden, weight, labels):
#         logits = F.linear(hidden, weight).float() / 1.3
#         with torch.no_grad():
#             predictions = logits[..., :-1, :].argmax(dim=-1)
#             valid = labels[..., 1:] != -100
#             right = ((predictions == labels[..., 1:]) & valid).sum() / valid.sum()
#         loss = _loss(logits[..., :-1, :], labels[..., 1:])
#         return loss, right
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t12: i64[], 8 bytes
#     t13: f32[2, 4095, 4096], 134,184,960 bytes
#     t14: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # valid = labels[..., 1:] != -100
  t0 = Tensor.__getitem__(labels, (..., slice(1,None,None)))  # t0: "cpu i64[2, 4095]"
  t1 = torch.ne(t0, -100)  # t1: "cpu b8[2, 4095]"
  del t0

  # right = ((predictions == labels[..., 1:]) & valid).sum() / valid.sum()
  t2 = Tensor.__getitem__(labels, (..., slice(1,None,None)))  # t2: "cpu i64[2, 4095]"
  t3 = torch.sum(t1, None, False, dtype=None)  # t3: "cpu i64[]"

  # loss = _loss(logits[..., :-1, :], labels[..., 1:])
  t4 = Tensor.__getitem__(labels, (..., slice(1,None,None)))  # t4: "cpu i64[2, 4095]"

  # return single_device_symbol(*args, **kwargs)
  t5 = torch.reshape(t4, (-1,))  # t5: "cpu i64[8190]"
  del t4
  t6 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t6: "cpu f32[2, 4095, 4096]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t7 = torch.reshape(t5, (2, 4095))  # t7: "cpu i64[2, 4095]"
  del t5
  (t8, t9, t10, t11, t12, t13, t14) = linear_cross_entropy_fwd(t6, weight, t7, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, logit_scale=0.7692307692307692, outputs=("valid_argmax",), strategy='gradients_in_forward', chunk_rows=65)
    # x = t6, W = weight, y = t7
    # loss = t8: f32[], valid_argmax = t9: i64[2, 4095], row_max = t10: f32[8190], row_log_sum = t11: f32[8190], valid_count = t12: i64[], dX = t13: f32[2, 4095, 4096], dW = t14: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                                                            PyTorch
    # x, y = x[valid], y[valid]                                                                                                                                 PyTorch
    # s f32[8190] = 1 / valid_count                                                                                                                             PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   z f32[65, 128256] = x[chunk] @ W.t()                                                                                                                    PyTorch
    #   u f32[65, 128256] = z * 0.7692307692307692  (wherever they are read)
    #   z_y f32[65] = z[y[chunk]]                                                                                                                               PyTorch
    #   row_max, row_log_sum f32[65] = max_v(u), log(sum_v(exp(u - row_max)))                                                                                   PyTorch
    #   argmax i64[65] = argmax_v(z)                                                                                                                            PyTorch
    #   dlogits f32[65, 128256] = exp(u - row_max - row_log_sum) * s[chunk] * 0.7692307692307692 - s[chunk] * 0.7692307692307692 * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                                                          PyTorch
    #   dX[chunk] f32[65, 4096] = dlogits @ W                                                                                                                   PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(z_y * 0.7692307692307692 - row_max, 0)                                                                    PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                                                             PyTorch
    # valid_argmax i64[8190] = scatter(argmax, -1)                                                                                                              PyTorch
    # row_max f32[8190] = scatter(row_max)                                                                                                                      PyTorch
    # row_log_sum f32[8190] = scatter(row_log_sum)                                                                                                              PyTorch
    # dX f32[8190, 4096] = scatter(dX)                                                                                                                          PyTorch
  del t10, t11, t6, t7

  # right = ((predictions == labels[..., 1:]) & valid).sum() / valid.sum()
  t15 = torch.eq(t9, t2)  # t15: "cpu b8[2, 4095]"
  del t9, t2
  t16 = torch.bitwise_and(t15, t1)  # t16: "cpu b8[2, 4095]"
  del t15, t1
  t17 = torch.sum(t16, None, False, dtype=None)  # t17: "cpu i64[]"
  del t16
  t18 = torch.true_divide(t17, t3)  # t18: "cpu f32[]"
  del t17, t3
  return {'output': (t8, t18), 'flat_args': [hidden, weight, labels], 'flat_output': (t8, t18)}, ((t12, t13, t14), ())


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
  t19, _, = cotangents
  # t19: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t12, t13, t14, = C0
  # t12: "cpu i64[]"
  # t13: "cpu f32[2, 4095, 4096]"
  # t14: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t20, t21) = scale_gradients(t19, t12, t13, t14)
    # t13 f32[2, 4095, 4096] = t13 * where(t12 == 0, 0, t19)  (skipped where that is 1)  PyTorch
    # t14 f32[128256, 4096] = t14 * where(t12 == 0, 0, t19)  (skipped where that is 1)   PyTorch
  del t19, t12, t13, t14
  t22 = torch_pad_prim_impl(t20, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t22: "cpu f32[2, 4096, 4096]"
  del t20
  return (t22, t21, None)
