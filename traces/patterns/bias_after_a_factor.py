# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def bias_after_a_factor(hidden, weight, bias, labels):
#         return _loss(F.linear(hidden, weight) * 0.5 + bias, labels)
#
# not fused, because the logits are changed between the linear and the loss (by add, a bias after another or after a factor)
# Saved for backward, beside the arguments and views of them:
#     t6: f32[8192, 128256], 4,202,692,608 bytes
#     t9: f32[8192], 32,768 bytes
#     t10: f32[8192], 32,768 bytes
#     t11: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, bias, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # bias: "cpu f32[128256]"
  # labels: "cpu i64[2, 4096]"

  # return _loss(F.linear(hidden, weight) * 0.5 + bias, labels)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.mul(t0, 0.5)  # t1: "cpu f32[2, 4096, 128256]"
  del t0
  t2 = torch.unsqueeze(bias, 0)  # t2: "cpu f32[1, 128256]"
  t3 = torch.unsqueeze(t2, 1)  # t3: "cpu f32[1, 1, 128256]"
  del t2
  t4 = Tensor.expand(t3, (2, 4096, 128256))  # t4: "cpu f32[2, 4096, 128256]"
  del t3
  t5 = torch.add(t1, t4, alpha=1)  # t5: "cpu f32[2, 4096, 128256]"
  del t1, t4

  # return single_device_symbol(*args, **kwargs)
  t6 = torch_prims_reshape_impl(t5, (8192, 128256))  # t6: "cpu f32[8192, 128256]"
  del t5
  t7 = torch.reshape(labels, (-1,))  # t7: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t8, t9, t10, t11) = cross_entropy_fwd(t6, t7, reduction='mean', ignore_index=-100)
  return {'output': (t8,), 'flat_args': [hidden, weight, bias, labels], 'flat_output': (t8,)}, ((t6, t7, t9, t10, t11, weight, hidden), ())


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
  t12, = cotangents
  # t12: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t6, t7, t9, t10, t11, weight, hidden, = C0
  # t6: "cpu f32[8192, 128256]"
  # t7: "cpu i64[8192]"
  # t9: "cpu f32[8192]"
  # t10: "cpu f32[8192]"
  # t11: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t13 = cross_entropy_bwd(t12, t6, t7, t9, t10, t11, reduction='mean', ignore_index=-100)  # t13: "cpu f32[8192, 128256]"
  del t12, t6, t7, t9, t10, t11
  t14 = torch_prims_reshape_impl(t13, (2, 4096, 128256))  # t14: "cpu f32[2, 4096, 128256]"
  del t13
  t15 = torch.sum(t14, (0, 1), False, dtype=None)  # t15: "cpu f32[128256]"
  t16 = torch.mul(0.5, t14)  # t16: "cpu f32[2, 4096, 128256]"
  del t14
  t17 = torch.reshape(t16, (-1, 128256))  # t17: "cpu f32[8192, 128256]"
  t18 = torch.matmul(t17, weight)  # t18: "cpu f32[8192, 4096]"
  del t17, weight
  t19 = torch.reshape(t18, (2, 4096, 4096))  # t19: "cpu f32[2, 4096, 4096]"
  del t18
  t20 = torch.reshape(t16, (-1, 128256))  # t20: "cpu f32[8192, 128256]"
  del t16
  t21 = torch.permute(t20, (1, 0))  # t21: "cpu f32[128256, 8192]"
  del t20
  t22 = torch.reshape(hidden, (-1, 4096))  # t22: "cpu f32[8192, 4096]"
  del hidden
  t23 = torch.matmul(t21, t22)  # t23: "cpu f32[128256, 4096]"
  del t21, t22
  return (t19, t23, t15, None)
