# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_logged_beside_cross_entropy(hidden, weight, labels):
#         logits = F.linear(hidden, weight).float()
#         with torch.no_grad():
#             log_probs = logits[:, :-1].log_softmax(-1)
#             entropy = (-log_probs.exp() * log_probs).sum(-1)
#         return _loss(logits[:, :-1], labels[:, 1:]), entropy
#
# fused, loss only, chunks of 65 tokens
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t15: i64[], 8 bytes
#     t16: f32[2, 4095, 4096], 134,184,960 bytes
#     t17: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"
  t0 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t0: "cpu f32[2, 4095, 4096]"

  # entropy = (-log_probs.exp() * log_probs).sum(-1)
  t1 = torch.full((2, 4095), 0, device=torch.device("cpu"), dtype=torch.int64)  # t1: "cpu i64[2, 4095]"
  (t2, t3, t4, t5, t6) = linear_cross_entropy_fwd(t0, weight, t1, None, needs_grad=(), reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), detached=("entropy",), strategy='loss_only', chunk_rows=65)
    # x = t0, W = weight, y = t1
    # loss = t2: f32[2, 4095], entropy = t3: f32[2, 4095], row_max = t4: f32[8190], row_log_sum = t5: f32[8190], valid_count = t6: i64[]
    # for each chunk of 65 tokens, 126 in all:
    #   logits f32[65, 128256] = x[chunk] @ W.t()                                           PyTorch
    #   logits_y f32[65] = logits[y[chunk]]                                                 PyTorch
    #   row_max, row_log_sum f32[65] = max_v(logits), log(sum_v(exp(logits - row_max)))     PyTorch
    #   expected f32[65] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))  PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(logits_y - row_max, 0)                PyTorch
    # loss f32[8190] = cross_entropy                                                        PyTorch
    # entropy f32[8190] = row_log_sum - expected                                            PyTorch
  del t2, t4, t5, t6, t0, t1
  t7 = torch.detach(t3)  # t7: "cpu f32[2, 4095]"
  del t3

  # return _loss(logits[:, :-1], labels[:, 1:]), entropy
  t8 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t8: "cpu i64[2, 4095]"

  # return single_device_symbol(*args, **kwargs)
  t9 = torch.reshape(t8, (-1,))  # t9: "cpu i64[8190]"
  del t8
  t10 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t10: "cpu f32[2, 4095, 4096]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t11 = torch.reshape(t9, (2, 4095))  # t11: "cpu i64[2, 4095]"
  del t9
  (t12, t13, t14, t15, t16, t17) = linear_cross_entropy_fwd(t10, weight, t11, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t10, W = weight, y = t11
    # loss = t12: f32[], row_max = t13: f32[8190], row_log_sum = t14: f32[8190], valid_count = t15: i64[], dX = t16: f32[2, 4095, 4096], dW = t17: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                       PyTorch
    # x, y = x[valid], y[valid]                                                                                            PyTorch
    # s f32[8190] = 1 / valid_count                                                                                        PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   logits f32[65, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[65] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[65, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                     PyTorch
    #   dX[chunk] f32[65, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(logits_y - row_max, 0)                                               PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                        PyTorch
    # row_max f32[8190] = scatter(row_max)                                                                                 PyTorch
    # row_log_sum f32[8190] = scatter(row_log_sum)                                                                         PyTorch
    # dX f32[8190, 4096] = scatter(dX)                                                                                     PyTorch
  del t13, t14, t10, t11
  return {'output': (t12, t7), 'flat_args': [hidden, weight, labels], 'flat_output': (t12, t7)}, ((t15, t16, t17), ())


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
  t18, _, = cotangents
  # t18: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t15, t16, t17, = C0
  # t15: "cpu i64[]"
  # t16: "cpu f32[2, 4095, 4096]"
  # t17: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t19, t20) = scale_gradients(t18, t15, t16, t17)
    # t16 f32[2, 4095, 4096] = t16 * where(t15 == 0, 0, t18)  (skipped where that is 1)  PyTorch
    # t17 f32[128256, 4096] = t17 * where(t15 == 0, 0, t18)  (skipped where that is 1)   PyTorch
  del t18, t15, t16, t17
  t21 = torch_pad_prim_impl(t19, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t21: "cpu f32[2, 4096, 4096]"
  del t19
  return (t21, t20, None)
