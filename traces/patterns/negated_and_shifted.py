# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def negated_and_shifted(hidden, weight, labels):
#         return _loss((F.linear(hidden, weight) * -0.3)[:, :-1], labels[:, 1:])
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t7: i64[], 8 bytes
#     t8: f32[2, 4095, 4096], 134,184,960 bytes
#     t9: f32[128256, 4096], 2,101,346,304 bytes

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

  # return _loss((F.linear(hidden, weight) * -0.3)[:, :-1], labels[:, 1:])
  t0 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t0: "cpu i64[2, 4095]"

  # return single_device_symbol(*args, **kwargs)
  t1 = torch.reshape(t0, (-1,))  # t1: "cpu i64[8190]"
  del t0
  t2 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 4095, 4096], [1, 1, 1])  # t2: "cpu f32[2, 4095, 4096]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t3 = torch.reshape(t1, (2, 4095))  # t3: "cpu i64[2, 4095]"
  del t1
  (t4, t5, t6, t7, t8, t9) = linear_cross_entropy_fwd(t2, weight, t3, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, logit_scale=-0.3, strategy='gradients_in_forward', chunk_rows=65)
    # x = t2, W = weight, y = t3
    # loss = t4: f32[], row_max = t5: f32[8190], row_log_sum = t6: f32[8190], valid_count = t7: i64[], dX = t8: f32[2, 4095, 4096], dW = t9: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                                PyTorch
    # x, y = x[valid], y[valid]                                                                                                     PyTorch
    # s f32[8190] = 1 / valid_count                                                                                                 PyTorch
    # for each chunk of 65 tokens, 126 in all:
    #   z f32[65, 128256] = x[chunk] @ W.t()                                                                                        PyTorch
    #   u f32[65, 128256] = z * -0.3  (wherever they are read)
    #   row_max, row_log_sum, z_y f32[65] = max_v(u), log(sum_v(exp(u - row_max))), z[y[chunk]]                                     PyTorch
    #   dlogits f32[65, 128256] = exp(u - row_max - row_log_sum) * s[chunk] * -0.3 - s[chunk] * -0.3 * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                              PyTorch
    #   dX[chunk] f32[65, 4096] = dlogits @ W                                                                                       PyTorch
    # cross_entropy f32[8190] = row_log_sum - minimum(z_y * -0.3 - row_max, 0)                                                      PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                                 PyTorch
    # row_max f32[8190] = scatter(row_max)                                                                                          PyTorch
    # row_log_sum f32[8190] = scatter(row_log_sum)                                                                                  PyTorch
    # dX f32[8190, 4096] = scatter(dX)                                                                                              PyTorch
  del t5, t6, t2, t3
  return {'output': (t4,), 'flat_args': [hidden, weight, labels], 'flat_output': (t4,)}, ((t7, t8, t9), ())


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
  t10, = cotangents
  # t10: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t7, t8, t9, = C0
  # t7: "cpu i64[]"
  # t8: "cpu f32[2, 4095, 4096]"
  # t9: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t11, t12) = scale_gradients(t10, t7, t8, t9)
    # t8 f32[2, 4095, 4096] = t8 * where(t7 == 0, 0, t10)  (skipped where that is 1)  PyTorch
    # t9 f32[128256, 4096] = t9 * where(t7 == 0, 0, t10)  (skipped where that is 1)   PyTorch
  del t10, t7, t8, t9
  t13 = torch_pad_prim_impl(t11, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t13: "cpu f32[2, 4096, 4096]"
  del t11
  return (t13, t12, None)
