# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def activation(hidden, weight, labels):
#         return _loss(torch.relu(F.linear(hidden, weight)), labels)
#
# not fused, because the logits are changed between the linear and the loss (by relu)
# Saved for backward, beside the arguments and views of them:
#     t3: f32[8192, 128256], 4,202,692,608 bytes
#     t6: f32[8192], 32,768 bytes
#     t7: f32[8192], 32,768 bytes
#     t8: i64[], 8 bytes
#     t1: b8[2, 4096, 128256], 1,050,673,152 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return _loss(torch.relu(F.linear(hidden, weight)), labels)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.gt(t0, 0.0)  # t1: "cpu b8[2, 4096, 128256]"
  t2 = torch.where(t1, t0, 0.0)  # t2: "cpu f32[2, 4096, 128256]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t3 = torch_prims_reshape_impl(t2, (8192, 128256))  # t3: "cpu f32[8192, 128256]"
  del t2
  t4 = torch.reshape(labels, (-1,))  # t4: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t5, t6, t7, t8) = cross_entropy_fwd(t3, t4, reduction='mean', ignore_index=-100)
  return {'output': (t5,), 'flat_args': [hidden, weight, labels], 'flat_output': (t5,)}, ((t3, t4, t6, t7, t8, t1, weight, hidden), ())


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
  t9, = cotangents
  # t9: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t4, t6, t7, t8, t1, weight, hidden, = C0
  # t3: "cpu f32[8192, 128256]"
  # t4: "cpu i64[8192]"
  # t6: "cpu f32[8192]"
  # t7: "cpu f32[8192]"
  # t8: "cpu i64[]"
  # t1: "cpu b8[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t10 = cross_entropy_bwd(t9, t3, t4, t6, t7, t8, reduction='mean', ignore_index=-100)  # t10: "cpu f32[8192, 128256]"
  del t9, t3, t4, t6, t7, t8
  t11 = torch_prims_reshape_impl(t10, (2, 4096, 128256))  # t11: "cpu f32[2, 4096, 128256]"
  del t10
  t12 = torch.where(t1, t11, 0)  # t12: "cpu f32[2, 4096, 128256]"
  del t1, t11
  t13 = torch.reshape(t12, (-1, 128256))  # t13: "cpu f32[8192, 128256]"
  t14 = torch.matmul(t13, weight)  # t14: "cpu f32[8192, 4096]"
  del t13, weight
  t15 = torch.reshape(t14, (2, 4096, 4096))  # t15: "cpu f32[2, 4096, 4096]"
  del t14
  t16 = torch.reshape(t12, (-1, 128256))  # t16: "cpu f32[8192, 128256]"
  del t12
  t17 = torch.permute(t16, (1, 0))  # t17: "cpu f32[128256, 8192]"
  del t16
  t18 = torch.reshape(hidden, (-1, 4096))  # t18: "cpu f32[8192, 4096]"
  del hidden
  t19 = torch.matmul(t17, t18)  # t19: "cpu f32[128256, 4096]"
  del t17, t18
  return (t15, t19, None)
