# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def logits_used_by_another_loss(hidden, weight, labels):
#         logits = F.linear(hidden, weight)
#         return _loss(logits, labels) + 1e-3 * logits.square().mean()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (logits is used by square)
# Saved for backward, beside the arguments and views of them:
#     t0: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t1: f32[8192, 128256], 4,202,692,608 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: i64[], 8 bytes

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

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # return single_device_symbol(*args, **kwargs)
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
  t2 = torch.reshape(labels, (-1,))  # t2: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t3, t4, t5, t6) = cross_entropy_fwd(t1, t2, reduction='mean', ignore_index=-100)

  # return _loss(logits, labels) + 1e-3 * logits.square().mean()
  t7 = torch.mul(t0, t0)  # t7: "cpu f32[2, 4096, 128256]"
  t8 = shallow_copy(t7)  # t8: "cpu f32[2, 4096, 128256]"
  del t7
  t9 = torch.sum(t8, (0, 1, 2))  # t9: "cpu f32[]"
  del t8
  t10 = torch_div_prim_impl(t9, 1050673152.0)  # t10: "cpu f32[]"
  del t9
  t11 = shallow_copy(t10)  # t11: "cpu f32[]"
  del t10
  t12 = torch.mul(0.001, t11)  # t12: "cpu f32[]"
  del t11
  t13 = torch.add(t3, t12, alpha=1)  # t13: "cpu f32[]"
  del t3, t12
  return {'output': (t13,), 'flat_args': [hidden, weight, labels], 'flat_output': (t13,)}, ((t0, t1, t2, t4, t5, t6, weight, hidden), ())


# Constructed by Delete Last Used
import torch
from torch import Tensor
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
  t14, = cotangents
  # t14: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t0, t1, t2, t4, t5, t6, weight, hidden, = C0
  # t0: "cpu f32[2, 4096, 128256]"
  # t1: "cpu f32[8192, 128256]"
  # t2: "cpu i64[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t15 = torch.mul(0.001, t14)  # t15: "cpu f32[]"
  t16 = torch.true_divide(t15, 1050673152.0)  # t16: "cpu f32[]"
  del t15
  t17 = torch.unsqueeze(t16, 0)  # t17: "cpu f32[1]"
  del t16
  t18 = torch.unsqueeze(t17, 1)  # t18: "cpu f32[1, 1]"
  del t17
  t19 = torch.unsqueeze(t18, 2)  # t19: "cpu f32[1, 1, 1]"
  del t18
  t20 = Tensor.expand(t19, [1, 1, 1])  # t20: "cpu f32[1, 1, 1]"
  del t19
  t21 = Tensor.expand(t20, (2, 4096, 128256))  # t21: "cpu f32[2, 4096, 128256]"
  del t20
  t22 = torch.mul(t0, t21)  # t22: "cpu f32[2, 4096, 128256]"
  t23 = torch.mul(t0, t21)  # t23: "cpu f32[2, 4096, 128256]"
  del t0, t21
  t24 = torch.add(t22, t23, alpha=1)  # t24: "cpu f32[2, 4096, 128256]"
  del t22, t23
  t25 = cross_entropy_bwd(t14, t1, t2, t4, t5, t6, reduction='mean', ignore_index=-100)  # t25: "cpu f32[8192, 128256]"
  del t14, t1, t2, t4, t5, t6
  t26 = torch_prims_reshape_impl(t25, (2, 4096, 128256))  # t26: "cpu f32[2, 4096, 128256]"
  del t25
  t27 = torch.add(t24, t26, alpha=1)  # t27: "cpu f32[2, 4096, 128256]"
  del t24, t26
  t28 = torch.reshape(t27, (-1, 128256))  # t28: "cpu f32[8192, 128256]"
  t29 = torch.matmul(t28, weight)  # t29: "cpu f32[8192, 4096]"
  del t28, weight
  t30 = torch.reshape(t29, (2, 4096, 4096))  # t30: "cpu f32[2, 4096, 4096]"
  del t29
  t31 = torch.reshape(t27, (-1, 128256))  # t31: "cpu f32[8192, 128256]"
  del t27
  t32 = torch.permute(t31, (1, 0))  # t32: "cpu f32[128256, 8192]"
  del t31
  t33 = torch.reshape(hidden, (-1, 4096))  # t33: "cpu f32[8192, 4096]"
  del hidden
  t34 = torch.matmul(t32, t33)  # t34: "cpu f32[128256, 4096]"
  del t32, t33
  return (t30, t34, None)
