# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def low_rank_adapter_by_matmul(hidden, weight, bias, adapter_down, adapter_up, labels):
#         """The same as litgpt writes it."""
#         adapter = (hidden @ adapter_down.transpose(0, 1) @ adapter_up.transpose(0, 1)) * 0.3
#         return _loss(F.linear(hidden, weight, bias) + adapter, labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t12: i64[], 8 bytes
#     t13: f32[2, 4096, 4100], 134,348,800 bytes
#     t14: f32[128256, 4100], 2,103,398,400 bytes
#     t15: f32[128256], 513,024 bytes
#     t0: f32[4096, 4], 65,536 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, bias, adapter_down, adapter_up, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # bias: "cpu f32[128256]"
  # adapter_down: "cpu f32[4, 4096]"
  # adapter_up: "cpu f32[128256, 4]"
  # labels: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t0 = torch.permute(adapter_down, (1, 0))  # t0: "cpu f32[4096, 4]"

  # adapter = (hidden @ adapter_down.transpose(0, 1) @ adapter_up.transpose(0, 1)) * 0.3
  t1 = torch_prims_reshape_impl(hidden, (8192, 4096))  # t1: "cpu f32[8192, 4096]"
  t2 = torch.matmul(t1, t0)  # t2: "cpu f32[8192, 4]"
  t3 = torch_prims_reshape_impl(t2, (2, 4096, 4))  # t3: "cpu f32[2, 4096, 4]"
  del t2

  # return single_device_symbol(*args, **kwargs)
  t4 = torch.reshape(labels, (-1,))  # t4: "cpu i64[8192]"
  t5 = torch.mul(t3, 0.3)  # t5: "cpu f32[2, 4096, 4]"
  del t3
  t6 = torch.cat([hidden, t5], -1)  # t6: "cpu f32[2, 4096, 4100]"
  del t5
  t7 = torch.cat([weight, adapter_up], 1)  # t7: "cpu f32[128256, 4100]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t8 = torch.reshape(t4, (2, 4096))  # t8: "cpu i64[2, 4096]"
  del t4
  (t9, t10, t11, t12, t13, t14, t15) = linear_cross_entropy_fwd(t6, t7, t8, bias, needs_grad=("input", "linear_weight", "linear_bias"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t6, W = t7, y = t8, b = bias
    # loss = t9: f32[], row_max = t10: f32[8192], row_logsumexp = t11: f32[8192], valid_count = t12: i64[], dX = t13: f32[2, 4096, 4100], dW = t14: f32[128256, 4100], db = t15: f32[128256]
    # x, y = the rows whose target is not ignore_index                                                         PyTorch
    # for each chunk of 65 tokens, 127 in all:
    #   logits f32[65, 128256] = x @ W.t() + b                                                                 PyTorch
    #   row_max, row_logsumexp f32[65] = max(logits), log(sum(exp(logits - row_max)))                          PyTorch
    #   dlogits f32[65, 128256], db f32[128256] = exp(logits - row_max - row_logsumexp) * s, in place; sum(0)  PyTorch
    #   dlogits[y] f32[65] = exp(logits[y] - row_max - row_logsumexp) * s - s                                  PyTorch
    #   dW f32[128256, 4100] += dlogits.t() @ x                                                                PyTorch
    #   dX f32[65, 4100] = dlogits @ W                                                                         PyTorch
    # cross_entropy f32[8192] = row_logsumexp - (logits[y] - row_max)                                          PyTorch
    # loss = sum(cross_entropy) / valid_count                                                                  PyTorch
  del t10, t11, t6, t7, t8
  return {'output': (t9,), 'flat_args': [hidden, weight, bias, adapter_down, adapter_up, labels], 'flat_output': (t9,)}, ((t12, t13, t14, t15, t0, t1), ())


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
  t16, = cotangents
  # t16: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t12, t13, t14, t15, t0, t1, = C0
  # t12: "cpu i64[]"
  # t13: "cpu f32[2, 4096, 4100]"
  # t14: "cpu f32[128256, 4100]"
  # t15: "cpu f32[128256]"
  # t0: "cpu f32[4096, 4]"
  # t1: "cpu f32[8192, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t17, t18, t19) = scale_gradients(t16, t12, t13, t14, t15)
    # t13, t14, t15 of the forward *= t16, where that is not 1
  del t16, t12, t13, t14, t15
  t20 = torch_slice_prim_impl(t18, [0, 0], [128256, 4096], [1, 1])  # t20: "cpu f32[128256, 4096]"
  t21 = torch_slice_prim_impl(t18, [0, 4096], [128256, 4100], [1, 1])  # t21: "cpu f32[128256, 4]"
  del t18
  t22 = torch_slice_prim_impl(t17, [0, 0, 0], [2, 4096, 4096], [1, 1, 1])  # t22: "cpu f32[2, 4096, 4096]"
  t23 = torch_slice_prim_impl(t17, [0, 0, 4096], [2, 4096, 4100], [1, 1, 1])  # t23: "cpu f32[2, 4096, 4]"
  del t17
  t24 = torch.mul(0.3, t23)  # t24: "cpu f32[2, 4096, 4]"
  del t23
  t25 = torch_prims_reshape_impl(t24, (8192, 4))  # t25: "cpu f32[8192, 4]"
  del t24
  t26 = torch.permute(t0, (1, 0))  # t26: "cpu f32[4, 4096]"
  del t0
  t27 = torch.matmul(t25, t26)  # t27: "cpu f32[8192, 4096]"
  del t26
  t28 = torch.permute(t1, (1, 0))  # t28: "cpu f32[4096, 8192]"
  del t1
  t29 = torch.matmul(t28, t25)  # t29: "cpu f32[4096, 4]"
  del t28, t25
  t30 = torch_prims_reshape_impl(t27, (2, 4096, 4096))  # t30: "cpu f32[2, 4096, 4096]"
  del t27
  t31 = torch.add(t22, t30, alpha=1)  # t31: "cpu f32[2, 4096, 4096]"
  del t22, t30
  t32 = torch.permute(t29, (1, 0))  # t32: "cpu f32[4, 4096]"
  del t29
  return (t31, t20, t19, t32, t21, None)
