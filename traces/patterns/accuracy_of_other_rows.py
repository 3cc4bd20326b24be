# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def accuracy_of_other_rows(hidden, weight, labels):
#         logits = F.linear(hidden, weight)
#         right = (logits.argmax(-1)[:, :-1] == labels[:, 1:]).sum()
#         return _loss(logits[:, :-1], labels[:, 1:]), right
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (logits is used by argmax)
# Saved for backward, beside the arguments and views of them:
#     t8: f32[8190, 128256], 4,201,666,560 bytes
#     t9: i64[8190], 65,520 bytes
#     t11: f32[8190], 32,760 bytes
#     t12: f32[8190], 32,760 bytes
#     t13: i64[], 8 bytes

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

  # right = (logits.argmax(-1)[:, :-1] == labels[:, 1:]).sum()
  t1 = torch.argmax(t0, 2)  # t1: "cpu i64[2, 4096]"
  t2 = Tensor.__getitem__(t1, (slice(None,None,None), slice(None,-1,None)))  # t2: "cpu i64[2, 4095]"
  del t1
  t3 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t3: "cpu i64[2, 4095]"
  t4 = torch.eq(t2, t3)  # t4: "cpu b8[2, 4095]"
  del t2, t3
  t5 = torch.sum(t4, None, False, dtype=None)  # t5: "cpu i64[]"
  del t4

  # return _loss(logits[:, :-1], labels[:, 1:]), right
  t6 = torch_slice_prim_impl(t0, [0, 0, 0], [2, 4095, 128256], [1, 1, 1])  # t6: "cpu f32[2, 4095, 128256]"
  del t0
  t7 = Tensor.__getitem__(labels, (slice(None,None,None), slice(1,None,None)))  # t7: "cpu i64[2, 4095]"

  # return single_device_symbol(*args, **kwargs)
  t8 = torch_prims_reshape_impl(t6, (8190, 128256))  # t8: "cpu f32[8190, 128256]"
  del t6
  t9 = torch.reshape(t7, (-1,))  # t9: "cpu i64[8190]"
  del t7

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t10, t11, t12, t13) = cross_entropy_fwd(t8, t9, reduction='mean', ignore_index=-100)
  return {'output': (t10, t5), 'flat_args': [hidden, weight, labels], 'flat_output': (t10, t5)}, ((t8, t9, t11, t12, t13, weight, hidden), ())


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
  t14, _, = cotangents
  # t14: "cpu f32[]"
  # None
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t11, t12, t13, weight, hidden, = C0
  # t8: "cpu f32[8190, 128256]"
  # t9: "cpu i64[8190]"
  # t11: "cpu f32[8190]"
  # t12: "cpu f32[8190]"
  # t13: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t15 = cross_entropy_bwd(t14, t8, t9, t11, t12, t13, reduction='mean', ignore_index=-100)  # t15: "cpu f32[8190, 128256]"
  del t14, t8, t9, t11, t12, t13
  t16 = torch_prims_reshape_impl(t15, (2, 4095, 128256))  # t16: "cpu f32[2, 4095, 128256]"
  del t15
  t17 = torch_pad_prim_impl(t16, 0.0, ((0, 0, 0), (0, 1, 0), (0, 0, 0)))  # t17: "cpu f32[2, 4096, 128256]"
  del t16
  t18 = torch.reshape(t17, (-1, 128256))  # t18: "cpu f32[8192, 128256]"
  t19 = torch.matmul(t18, weight)  # t19: "cpu f32[8192, 4096]"
  del t18, weight
  t20 = torch.reshape(t19, (2, 4096, 4096))  # t20: "cpu f32[2, 4096, 4096]"
  del t19
  t21 = torch.reshape(t17, (-1, 128256))  # t21: "cpu f32[8192, 128256]"
  del t17
  t22 = torch.permute(t21, (1, 0))  # t22: "cpu f32[128256, 8192]"
  del t21
  t23 = torch.reshape(hidden, (-1, 4096))  # t23: "cpu f32[8192, 4096]"
  del hidden
  t24 = torch.matmul(t22, t23)  # t24: "cpu f32[128256, 4096]"
  del t22, t23
  return (t20, t24, None)
