# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def rows_picked_by_a_tensor(hidden, weight, labels):
#         rows = torch.arange(hidden.shape[0], device=hidden.device)
#         return F.cross_entropy(F.linear(hidden, weight)[rows, rows + 1], labels[:, 3])
#
# not fused, because the logits are changed between the linear and the loss (by getitem with an index that is neither an integer nor a slice)
# Saved for backward, beside the arguments and views of them:
#     t12: f32[2, 128256], 1,026,048 bytes
#     t13: i64[2], 16 bytes
#     t15: f32[2], 8 bytes
#     t16: f32[2], 8 bytes
#     t17: i64[], 8 bytes
#     t11: i64[2], 16 bytes

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

  # rows = torch.arange(hidden.shape[0], device=hidden.device)
  t0 = torch.arange(start=0, step=1, end=2, device=torch.device("cpu"), dtype=None)  # t0: "cpu i64[2]"

  # return F.cross_entropy(F.linear(hidden, weight)[rows, rows + 1], labels[:, 3])
  t1 = torch.nn.functional.linear(hidden, weight, None)  # t1: "cpu f32[2, 4096, 128256]"
  t2 = torch.add(t0, 1, alpha=1)  # t2: "cpu i64[2]"
  t3 = torch.lt(t0, 0)  # t3: "cpu b8[2]"
  t4 = torch.where(t3, 2, 0)  # t4: "cpu i64[2]"
  del t3
  t5 = torch.add(t0, t4)  # t5: "cpu i64[2]"
  del t0, t4
  t6 = torch.lt(t2, 0)  # t6: "cpu b8[2]"
  t7 = torch.where(t6, 4096, 0)  # t7: "cpu i64[2]"
  del t6
  t8 = torch.add(t2, t7)  # t8: "cpu i64[2]"
  del t2, t7
  t9 = torch_prims_reshape_impl(t1, (8192, 128256))  # t9: "cpu f32[8192, 128256]"
  del t1
  t10 = torch.mul(t5, 4096)  # t10: "cpu i64[2]"
  del t5
  t11 = torch.add(t10, t8)  # t11: "cpu i64[2]"
  del t10, t8
  t12 = torch.index_select(t9, 0, t11)  # t12: "cpu f32[2, 128256]"
  del t9
  t13 = Tensor.__getitem__(labels, (slice(None,None,None), 3))  # t13: "cpu i64[2]"
  (t14, t15, t16, t17) = cross_entropy_fwd(t12, t13, reduction='mean', ignore_index=-100)
  return {'output': (t14,), 'flat_args': [hidden, weight, labels], 'flat_output': (t14,)}, ((t12, t13, t15, t16, t17, t11, weight, hidden), ())


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
  t12, t13, t15, t16, t17, t11, weight, hidden, = C0
  # t12: "cpu f32[2, 128256]"
  # t13: "cpu i64[2]"
  # t15: "cpu f32[2]"
  # t16: "cpu f32[2]"
  # t17: "cpu i64[]"
  # t11: "cpu i64[2]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t19 = cross_entropy_bwd(t18, t12, t13, t15, t16, t17, reduction='mean', ignore_index=-100)  # t19: "cpu f32[2, 128256]"
  del t18, t12, t13, t15, t16, t17
  t20 = torch.full((8192, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t20: "cpu f32[8192, 128256]"
  t21 = torch.index_add(t20, 0, t11, t19)  # t21: "cpu f32[8192, 128256]"
  del t20, t11, t19
  t22 = torch_prims_reshape_impl(t21, (2, 4096, 128256))  # t22: "cpu f32[2, 4096, 128256]"
  del t21
  t23 = torch.reshape(t22, (-1, 128256))  # t23: "cpu f32[8192, 128256]"
  t24 = torch.matmul(t23, weight)  # t24: "cpu f32[8192, 4096]"
  del t23, weight
  t25 = torch.reshape(t24, (2, 4096, 4096))  # t25: "cpu f32[2, 4096, 4096]"
  del t24
  t26 = torch.reshape(t22, (-1, 128256))  # t26: "cpu f32[8192, 128256]"
  del t22
  t27 = torch.permute(t26, (1, 0))  # t27: "cpu f32[128256, 8192]"
  del t26
  t28 = torch.reshape(hidden, (-1, 4096))  # t28: "cpu f32[8192, 4096]"
  del hidden
  t29 = torch.matmul(t27, t28)  # t29: "cpu f32[128256, 4096]"
  del t27, t28
  return (t25, t29, None)
