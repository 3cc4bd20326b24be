# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probabilities_of_other_rows(hidden, weight, tokens):
#         """Of the first token of the second sequence, where the labels have the second one of the first."""
#         rows = torch.arange(hidden.shape[0], device=hidden.device)
#         log_probs = F.linear(hidden[:, : len(rows)], weight).log_softmax(-1)
#         return log_probs[rows, rows[:, None], tokens[:, : len(rows)]].sum()
#
# not fused, because its logits are gathered, but not into the log-probability of one label a row (rows picked by an index)
# Saved for backward, beside the arguments and views of them:
#     t23: i64[4], 32 bytes
#     t3: f32[2, 2, 128256], 2,052,096 bytes
#     t1: f32[2, 2, 4096], 65,536 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # rows = torch.arange(hidden.shape[0], device=hidden.device)
  t0 = torch.arange(start=0, step=1, end=2, device=torch.device("cpu"), dtype=None)  # t0: "cpu i64[2]"

  # log_probs = F.linear(hidden[:, : len(rows)], weight).log_softmax(-1)
  t1 = torch_slice_prim_impl(hidden, [0, 0, 0], [2, 2, 4096], [1, 1, 1])  # t1: "cpu f32[2, 2, 4096]"
  t2 = torch.nn.functional.linear(t1, weight, None)  # t2: "cpu f32[2, 2, 128256]"
  t3 = torch.nn.functional.log_softmax(t2, -1)  # t3: "cpu f32[2, 2, 128256]"
  del t2

  # return log_probs[rows, rows[:, None], tokens[:, : len(rows)]].sum()
  t4 = Tensor.__getitem__(t0, (slice(None,None,None), None))  # t4: "cpu i64[2, 1]"
  t5 = Tensor.__getitem__(tokens, (slice(None,None,None), slice(None,2,None)))  # t5: "cpu i64[2, 2]"
  t6 = torch.lt(t0, 0)  # t6: "cpu b8[2]"
  t7 = torch.where(t6, 2, 0)  # t7: "cpu i64[2]"
  del t6
  t8 = torch.add(t0, t7)  # t8: "cpu i64[2]"
  del t0, t7
  t9 = torch.lt(t4, 0)  # t9: "cpu b8[2, 1]"
  t10 = torch.where(t9, 2, 0)  # t10: "cpu i64[2, 1]"
  del t9
  t11 = torch.add(t4, t10)  # t11: "cpu i64[2, 1]"
  del t4, t10
  t12 = torch.lt(t5, 0)  # t12: "cpu b8[2, 2]"
  t13 = torch.where(t12, 128256, 0)  # t13: "cpu i64[2, 2]"
  del t12
  t14 = torch.add(t5, t13)  # t14: "cpu i64[2, 2]"
  del t5, t13
  t15 = torch_prims_reshape_impl(t3, (513024,))  # t15: "cpu f32[513024]"
  t16 = torch.mul(t8, 2)  # t16: "cpu i64[2]"
  del t8
  t17 = torch.unsqueeze(t16, 0)  # t17: "cpu i64[1, 2]"
  del t16
  t18 = Tensor.expand(t17, (2, 2))  # t18: "cpu i64[2, 2]"
  del t17
  t19 = Tensor.expand(t11, (2, 2))  # t19: "cpu i64[2, 2]"
  del t11
  t20 = torch.add(t18, t19)  # t20: "cpu i64[2, 2]"
  del t18, t19
  t21 = torch.mul(t20, 128256)  # t21: "cpu i64[2, 2]"
  del t20
  t22 = torch.add(t21, t14)  # t22: "cpu i64[2, 2]"
  del t21, t14
  t23 = torch_prims_reshape_impl(t22, (4,))  # t23: "cpu i64[4]"
  del t22
  t24 = torch.index_select(t15, 0, t23)  # t24: "cpu f32[4]"
  del t15
  t25 = torch_prims_reshape_impl(t24, (2, 2))  # t25: "cpu f32[2, 2]"
  del t24
  t26 = torch.sum(t25, None, False, dtype=None)  # t26: "cpu f32[]"
  del t25
  return {'output': (t26,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t26,)}, ((t23, t3, weight, t1), ())


# Constructed by Delete Last Used
from torch import Tensor
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
  t27, = cotangents
  # t27: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t23, t3, weight, t1, = C0
  # t23: "cpu i64[4]"
  # t3: "cpu f32[2, 2, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu f32[2, 2, 4096]"
  clear_mutable_collection(C0)
  del C0
  t28 = Tensor.expand(t27, (2, 2))  # t28: "cpu f32[2, 2]"
  del t27
  t29 = Tensor.to(t28, copy=False, dtype=torch.float32)  # t29: "cpu f32[2, 2]"
  del t28
  t30 = torch_prims_reshape_impl(t29, (4,))  # t30: "cpu f32[4]"
  del t29
  t31 = torch.full((513024,), 0, device=torch.device("cpu"), dtype=torch.float32)  # t31: "cpu f32[513024]"
  t32 = torch.index_add(t31, 0, t23, t30)  # t32: "cpu f32[513024]"
  del t31, t23, t30
  t33 = torch_prims_reshape_impl(t32, (2, 2, 128256))  # t33: "cpu f32[2, 2, 128256]"
  del t32
  t34 = torch.torch.ops.aten._log_softmax_backward_data(t33, t3, -1, torch.float32)  # t34: "cpu f32[2, 2, 128256]"
  del t33, t3
  t35 = torch.reshape(t34, (-1, 128256))  # t35: "cpu f32[4, 128256]"
  t36 = torch.matmul(t35, weight)  # t36: "cpu f32[4, 4096]"
  del t35, weight
  t37 = torch.reshape(t36, (2, 2, 4096))  # t37: "cpu f32[2, 2, 4096]"
  del t36
  t38 = torch.reshape(t34, (-1, 128256))  # t38: "cpu f32[4, 128256]"
  del t34
  t39 = torch.permute(t38, (1, 0))  # t39: "cpu f32[128256, 4]"
  del t38
  t40 = torch.reshape(t1, (-1, 4096))  # t40: "cpu f32[4, 4096]"
  del t1
  t41 = torch.matmul(t39, t40)  # t41: "cpu f32[128256, 4096]"
  del t39, t40
  t42 = torch_pad_prim_impl(t37, 0.0, ((0, 0, 0), (0, 4094, 0), (0, 0, 0)))  # t42: "cpu f32[2, 4096, 4096]"
  del t37
  return (t42, t41, None)
