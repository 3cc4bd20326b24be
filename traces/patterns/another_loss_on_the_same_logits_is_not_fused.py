# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def another_loss_on_the_same_logits_is_not_fused(hidden, weight, labels):
#         logits = F.linear(hidden, weight)
#         return _loss(logits[:, :-1], labels[:, 1:]) + _loss(torch.relu(logits), labels)
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (logits is used by relu)
# not fused, because the logits are changed between the linear and the loss (by relu)
# Saved for backward, beside the arguments and views of them:
#     t11: f32[8192, 128256], 4,202,692,608 bytes
#     t14: f32[8192], 32,768 bytes
#     t15: f32[8192], 32,768 bytes
#     t16: i64[], 8 bytes
#     t9: b8[2, 4096, 128256], 1,050,673,152 bytes
#     t3: f32[8190, 128256], 4,201,666,560 bytes
#     t4: i64[8190], 65,520 bytes
#     t6: f32[8190], 32,760 bytes
#     t7: f32[8190], 32,760 bytes
#     t8: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # return _loss(logits[:, :-1], labels[:, 1:]) + _loss(torch.relu(logits), labels)
  t1 = torch_slice_prim_impl(t0, [0, 0, 0], [2, 4095, 128256], [1, 1, 1])  # t1: "cpu f32[2, 4095, 128256]"
  t2 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t2: "cpu i64[2, 4095]"

  # return single_device_symbol(*args, **kwargs)
  t3 = torch_prims_reshape_impl(t1, (8190, 128256))  # t3: "cpu f32[8190, 128256]"
  del t1
  t4 = torch.reshape(t2, (-1,))  # t4: "cpu i64[8190]"
  del t2

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t5, t6, t7, t8) = cross_entropy_fwd(t3, t4, reduction='mean', ignore_index=-100)

  # return _loss(logits[:, :-1], labels[:, 1:]) + _loss(torch.relu(logits), labels)
  t9 = torch.gt(t0, 0.0)  # t9: "cpu b8[2, 4096, 128256]"
  t10 = torch.where(t9, t0, 0.0)  # t10: "cpu f32[2, 4096, 128256]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t11 = torch_prims_reshape_impl(t10, (8192, 128256))  # t11: "cpu f32[8192, 128256]"
  del t10
  t12 = torch.reshape(labels, (-1,))  # t12: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t13, t14, t15, t16) = cross_entropy_fwd(t11, t12, reduction='mean', ignore_index=-100)

  # return _loss(logits[:, :-1], labels[:, 1:]) + _loss(torch.relu(logits), labels)
  t17 = torch.add(t5, t13, alpha=1)  # t17: "cpu f32[]"
  del t5, t13
  return {'output': (t17,), 'flat_args': [hidden, weight, labels], 'flat_output': (t17,)}, ((t11, t12, t14, t15, t16, t9, t3, t4, t6, t7, t8, weight, hidden), ())


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
  t18, = cotangents
  # t18: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t11, t12, t14, t15, t16, t9, t3, t4, t6, t7, t8, weight, hidden, \
  = C0
  # t11: "cpu f32[8192, 128256]"
  # t12: "cpu i64[8192]"
  # t14: "cpu f32[8192]"
  # t15: "cpu f32[8192]"
  # t16: "cpu i64[]"
  # t9: "cpu b8[2, 4096, 128256]"
  # t3: "cpu f32[8190, 128256]"
  # t4: "cpu i64[8190]"
  # t6: "cpu f32[8190]"
  # t7: "cpu f32[8190]"
  # t8: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t19 = cross_entropy_bwd(t18, t11, t12, t14, t15, t16, reduction='mean', ignore_index=-100)  # t19: "cpu f32[8192, 128256]"
  del t11, t12, t14, t15, t16
  t20 = torch_prims_reshape_impl(t19, (2, 4096, 128256))  # t20: "cpu f32[2, 4096, 128256]"
  del t19
  t21 = torch.where(t9, t20, 0)  # t21: "cpu f32[2, 4096, 128256]"
  del t9, t20
  t22 = cross_entropy_bwd(t18, t3, t4, t6, t7, t8, reduction='mean', ignore_index=-100)  # t22: "cpu f32[8190, 128256]"
  del t18, t3, t4, t6, t7, t8
  t23 = torch_prims_reshape_impl(t22, (2, 4095, 128256))  # t23: "cpu f32[2, 4095, 128256]"
  del t22
  t24 = torch_pad_prim_impl(t23, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t24: "cpu f32[2, 4096, 128256]"
  del t23
  t25 = torch.add(t21, t24, alpha=1)  # t25: "cpu f32[2, 4096, 128256]"
  del t21, t24
  t26 = torch.reshape(t25, (-1, 128256))  # t26: "cpu f32[8192, 128256]"
  t27 = torch.matmul(t26, weight)  # t27: "cpu f32[8192, 4096]"
  del t26, weight
  t28 = torch.reshape(t27, (2, 4096, 4096))  # t28: "cpu f32[2, 4096, 4096]"
  del t27
  t29 = torch.reshape(t25, (-1, 128256))  # t29: "cpu f32[8192, 128256]"
  del t25
  t30 = torch.permute(t29, (1, 0))  # t30: "cpu f32[128256, 8192]"
  del t29
  t31 = torch.reshape(hidden, (-1, 4096))  # t31: "cpu f32[8192, 4096]"
  del hidden
  t32 = torch.matmul(t30, t31)  # t32: "cpu f32[128256, 4096]"
  del t30, t31
  return (t28, t32, None)
