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
    # loss = t8: f32[], valid_argmax = t9: i64[2, 4095], row_max = t10: f32[8190], row_logsumexp = t11: f32[8190], valid_count = t12: i64[], dX = t13: f32[2, 4095, 4096], dW = t14: f32[128256, 4096]
    # x, y = the rows whose target is not ignore_index                                         PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   z f32[65, 128256] = x @ W.t()                                                          PyTorch
    #   row_max, row_logsumexp f32[65] = max(u), log(sum(exp(u - row_max))), u = 0.769231 * z  PyTorch
    #   argmax i64[65] = argmax(u, 1)                                                          PyTorch
    #   dlogits f32[65, 128256] = (exp(u - row_max - row_logsumexp) * A) * 0.769231, in place  PyTorch
    #   dlogits[y] f32[65] = (exp(u[y] - row_max - row_logsumexp) * A - B) * 0.769231          PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                                PyTorch
    #   dX f32[65, 4096] = dlogits @ W                                                         PyTorch
    # cross_entropy f32[8190] = row_logsumexp - (u[y] - row_max)                               PyTorch
    # loss = sum(cross_entropy) / valid_count                                                  PyTorch
    # valid_argmax = argmax of the rows, -1 where they are ignored                             PyTorch
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
    # t13, t14 of the forward *= t19, where that is not 1
  del t19, t12, t13, t14
  t22 = torch_pad_prim_impl(t20, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t22: "cpu f32[2, 4096, 4096]"
  del t20
  return (t22, t21, None)
