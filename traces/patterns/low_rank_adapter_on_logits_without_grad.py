# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def low_rank_adapter_on_logits_without_grad(hidden, weight, adapter_down, adapter_up, labels):
#         """Gradients flow through one of the two linears only."""
#         with torch.no_grad():
#             logits = F.linear(hidden, weight)
#         return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up), labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t10: i64[], 8 bytes
#     t11: f32[2, 4096, 4100], 134,348,800 bytes
#     t12: f32[128256, 4100], 2,103,398,400 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, adapter_down, adapter_up, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # adapter_down: "cpu f32[4, 4096]"
  # adapter_up: "cpu f32[128256, 4]"
  # labels: "cpu i64[2, 4096]"

  # return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up), labels)
  t0 = torch.nn.functional.linear(hidden, adapter_down, None)  # t0: "cpu f32[2, 4096, 4]"

  # return single_device_symbol(*args, **kwargs)
  t1 = torch.reshape(labels, (-1,))  # t1: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t2 = torch.detach(hidden)  # t2: "cpu f32[2, 4096, 4096]"
  t3 = torch.detach(weight)  # t3: "cpu f32[128256, 4096]"
  t4 = torch.cat([t2, t0], -1)  # t4: "cpu f32[2, 4096, 4100]"
  del t2, t0
  t5 = torch.cat([t3, adapter_up], 1)  # t5: "cpu f32[128256, 4100]"
  del t3
  t6 = torch.reshape(t1, (2, 4096))  # t6: "cpu i64[2, 4096]"
  del t1
  (t7, t8, t9, t10, t11, t12) = linear_cross_entropy_fwd(t4, t5, t6, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t4, W = t5, y = t6
    # loss = t7: f32[], row_max = t8: f32[8192], row_logsumexp = t9: f32[8192], valid_count = t10: i64[], dX = t11: f32[2, 4096, 4100], dW = t12: f32[128256, 4100]
    # x, y = the rows whose target is not ignore_index                                                PyTorch
    # for each chunk of 65 tokens, 127 in all:
    #   logits f32[65, 128256] = x @ W.t()                                                            PyTorch
    #   row_max, row_logsumexp f32[65] = max(logits), log(sum(exp(logits - row_max)))                 PyTorch
    #   dlogits f32[65, 128256] = exp(logits - row_max - row_logsumexp) * s - s * [v == y], in place  PyTorch
    #   dW f32[128256, 4100] += dlogits.t() @ x                                                       PyTorch
    #   dX f32[65, 4100] = dlogits @ W                                                                PyTorch
    # cross_entropy f32[8192] = row_logsumexp - (logits[y] - row_max)                                 PyTorch
    # loss = sum(cross_entropy) / valid_count                                                         PyTorch
  del t8, t9, t4, t5, t6
  return {'output': (t7,), 'flat_args': [hidden, weight, adapter_down, adapter_up, labels], 'flat_output': (t7,)}, ((t10, t11, t12, weight, hidden, adapter_down), ())


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
  t13, = cotangents
  # t13: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t10, t11, t12, weight, hidden, adapter_down, = C0
  # t10: "cpu i64[]"
  # t11: "cpu f32[2, 4096, 4100]"
  # t12: "cpu f32[128256, 4100]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # adapter_down: "cpu f32[4, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t14, t15) = scale_gradients(t13, t10, t11, t12)
    # t11, t12 of the forward *= t13, where that is not 1
  del t13, t10, t11, t12
  t16 = torch_slice_prim_impl(t15, [0, 0], [128256, 4096], [1, 1])  # t16: "cpu f32[128256, 4096]"
  t17 = torch_slice_prim_impl(t15, [0, 4096], [128256, 4100], [1, 1])  # t17: "cpu f32[128256, 4]"
  del t15
  t18 = torch_slice_prim_impl(t14, [0, 0, 0], [2, 4096, 4096], [1, 1, 1])  # t18: "cpu f32[2, 4096, 4096]"
  t19 = torch_slice_prim_impl(t14, [0, 0, 4096], [2, 4096, 4100], [1, 1, 1])  # t19: "cpu f32[2, 4096, 4]"
  del t14
  (t20,) = detach_vjp(((weight,), {}), t16)
  del weight, t16
  (t21,) = detach_vjp(((hidden,), {}), t18)
  del t18
  t22 = torch.reshape(t19, (-1, 4))  # t22: "cpu f32[8192, 4]"
  t23 = torch.matmul(t22, adapter_down)  # t23: "cpu f32[8192, 4096]"
  del t22, adapter_down
  t24 = torch.reshape(t23, (2, 4096, 4096))  # t24: "cpu f32[2, 4096, 4096]"
  del t23
  t25 = torch.reshape(t19, (-1, 4))  # t25: "cpu f32[8192, 4]"
  del t19
  t26 = torch.permute(t25, (1, 0))  # t26: "cpu f32[4, 8192]"
  del t25
  t27 = torch.reshape(hidden, (-1, 4096))  # t27: "cpu f32[8192, 4096]"
  del hidden
  t28 = torch.matmul(t26, t27)  # t28: "cpu f32[4, 4096]"
  del t26, t27
  t29 = torch.add(t21, t24, alpha=1)  # t29: "cpu f32[2, 4096, 4096]"
  del t21, t24
  return (t29, t20, t28, t17, None)
