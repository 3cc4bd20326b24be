# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def labels_from_each_other(hidden, weight, second_weight):
#         first, second = F.linear(hidden, weight), F.linear(hidden, second_weight)
#         return _loss(first, second.argmax(-1)) + _loss(second, first.argmax(-1))
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (the loss depends on their argmax or entropy)
# not fused, because the logits, or something between them and the loss, are also used elsewhere (the loss depends on their argmax or entropy)
# Saved for backward, beside the arguments and views of them:
#     t10: f32[8192, 128256], 4,202,692,608 bytes
#     t11: i64[8192], 65,536 bytes
#     t13: f32[8192], 32,768 bytes
#     t14: f32[8192], 32,768 bytes
#     t15: i64[], 8 bytes
#     t3: f32[8192, 128256], 4,202,692,608 bytes
#     t4: i64[8192], 65,536 bytes
#     t6: f32[8192], 32,768 bytes
#     t7: f32[8192], 32,768 bytes
#     t8: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, second_weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # second_weight: "cpu f32[128256, 4096]"

  # first, second = F.linear(hidden, weight), F.linear(hidden, second_weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.nn.functional.linear(hidden, second_weight, None)  # t1: "cpu f32[2, 4096, 128256]"

  # return _loss(first, second.argmax(-1)) + _loss(second, first.argmax(-1))
  t2 = torch.argmax(t1, 2)  # t2: "cpu i64[2, 4096]"

  # return single_device_symbol(*args, **kwargs)
  t3 = torch_prims_reshape_impl(t0, (8192, 128256))  # t3: "cpu f32[8192, 128256]"
  t4 = torch.reshape(t2, (-1,))  # t4: "cpu i64[8192]"
  del t2

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t5, t6, t7, t8) = cross_entropy_fwd(t3, t4, reduction='mean', ignore_index=-100)

  # return _loss(first, second.argmax(-1)) + _loss(second, first.argmax(-1))
  t9 = torch.argmax(t0, 2)  # t9: "cpu i64[2, 4096]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t10 = torch_prims_reshape_impl(t1, (8192, 128256))  # t10: "cpu f32[8192, 128256]"
  del t1
  t11 = torch.reshape(t9, (-1,))  # t11: "cpu i64[8192]"
  del t9

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t12, t13, t14, t15) = cross_entropy_fwd(t10, t11, reduction='mean', ignore_index=-100)

  # return _loss(first, second.argmax(-1)) + _loss(second, first.argmax(-1))
  t16 = torch.add(t5, t12, alpha=1)  # t16: "cpu f32[]"
  del t5, t12
  return {'output': (t16,), 'flat_args': [hidden, weight, second_weight], 'flat_output': (t16,)}, ((t10, t11, t13, t14, t15, t3, t4, t6, t7, t8, second_weight, hidden, weight), ())


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
  t17, = cotangents
  # t17: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t10, t11, t13, t14, t15, t3, t4, t6, t7, t8, second_weight, \
  hidden, weight, = C0
  # t10: "cpu f32[8192, 128256]"
  # t11: "cpu i64[8192]"
  # t13: "cpu f32[8192]"
  # t14: "cpu f32[8192]"
  # t15: "cpu i64[]"
  # t3: "cpu f32[8192, 128256]"
  # t4: "cpu i64[8192]"
  # t6: "cpu f32[8192]"
  # t7: "cpu f32[8192]"
  # t8: "cpu i64[]"
  # second_weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  t18 = cross_entropy_bwd(t17, t10, t11, t13, t14, t15, reduction='mean', ignore_index=-100)  # t18: "cpu f32[8192, 128256]"
  del t10, t11, t13, t14, t15
  t19 = torch_prims_reshape_impl(t18, (2, 4096, 128256))  # t19: "cpu f32[2, 4096, 128256]"
  del t18
  t20 = cross_entropy_bwd(t17, t3, t4, t6, t7, t8, reduction='mean', ignore_index=-100)  # t20: "cpu f32[8192, 128256]"
  del t17, t3, t4, t6, t7, t8
  t21 = torch_prims_reshape_impl(t20, (2, 4096, 128256))  # t21: "cpu f32[2, 4096, 128256]"
  del t20
  t22 = torch.reshape(t19, (-1, 128256))  # t22: "cpu f32[8192, 128256]"
  t23 = torch.matmul(t22, second_weight)  # t23: "cpu f32[8192, 4096]"
  del t22, second_weight
  t24 = torch.reshape(t23, (2, 4096, 4096))  # t24: "cpu f32[2, 4096, 4096]"
  del t23
  t25 = torch.reshape(t19, (-1, 128256))  # t25: "cpu f32[8192, 128256]"
  del t19
  t26 = torch.permute(t25, (1, 0))  # t26: "cpu f32[128256, 8192]"
  del t25
  t27 = torch.reshape(hidden, (-1, 4096))  # t27: "cpu f32[8192, 4096]"
  t28 = torch.matmul(t26, t27)  # t28: "cpu f32[128256, 4096]"
  del t26, t27
  t29 = torch.reshape(t21, (-1, 128256))  # t29: "cpu f32[8192, 128256]"
  t30 = torch.matmul(t29, weight)  # t30: "cpu f32[8192, 4096]"
  del t29, weight
  t31 = torch.reshape(t30, (2, 4096, 4096))  # t31: "cpu f32[2, 4096, 4096]"
  del t30
  t32 = torch.reshape(t21, (-1, 128256))  # t32: "cpu f32[8192, 128256]"
  del t21
  t33 = torch.permute(t32, (1, 0))  # t33: "cpu f32[128256, 8192]"
  del t32
  t34 = torch.reshape(hidden, (-1, 4096))  # t34: "cpu f32[8192, 4096]"
  del hidden
  t35 = torch.matmul(t33, t34)  # t35: "cpu f32[128256, 4096]"
  del t33, t34
  t36 = torch.add(t24, t31, alpha=1)  # t36: "cpu f32[2, 4096, 4096]"
  del t24, t31
  return (t36, t35, t28)
