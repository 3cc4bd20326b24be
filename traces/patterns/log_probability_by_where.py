# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_by_where(hidden, weight, tokens):
#         log_probs = F.linear(hidden, weight).log_softmax(-1)
#         is_label = torch.arange(weight.shape[0], device=tokens.device) == tokens[..., None]
#         return -torch.where(is_label, log_probs, 0.0).sum(-1).mean()
#
# not fused, because the targets are class probabilities (chosen by where)
# Saved for backward, beside the arguments and views of them:
#     t4: b8[2, 4096, 128256], 1,050,673,152 bytes
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes

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

  # log_probs = F.linear(hidden, weight).log_softmax(-1)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.nn.functional.log_softmax(t0, -1)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # is_label = torch.arange(weight.shape[0], device=tokens.device) == tokens[..., None]
  t2 = torch.arange(start=0, step=1, end=128256, device=torch.device("cpu"), dtype=None)  # t2: "cpu i64[128256]"
  t3 = Tensor.__getitem__(tokens, (..., None))  # t3: "cpu i64[2, 4096, 1]"
  t4 = torch.eq(t2, t3)  # t4: "cpu b8[2, 4096, 128256]"
  del t2, t3

  # return -torch.where(is_label, log_probs, 0.0).sum(-1).mean()
  t5 = torch.where(t4, t1, 0.0)  # t5: "cpu f32[2, 4096, 128256]"
  t6 = torch.sum(t5, -1, False, dtype=None)  # t6: "cpu f32[2, 4096]"
  del t5
  t7 = shallow_copy(t6)  # t7: "cpu f32[2, 4096]"
  del t6
  t8 = torch.sum(t7, (0, 1))  # t8: "cpu f32[]"
  del t7
  t9 = torch_div_prim_impl(t8, 8192.0)  # t9: "cpu f32[]"
  del t8
  t10 = shallow_copy(t9)  # t10: "cpu f32[]"
  del t9
  t11 = torch.neg(t10)  # t11: "cpu f32[]"
  del t10
  return {'output': (t11,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t11,)}, ((t4, t1, weight, hidden), ())


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
  t12, = cotangents
  # t12: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t4, t1, weight, hidden, = C0
  # t4: "cpu b8[2, 4096, 128256]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t13 = torch.neg(t12)  # t13: "cpu f32[]"
  del t12
  t14 = torch.true_divide(t13, 8192.0)  # t14: "cpu f32[]"
  del t13
  t15 = torch.unsqueeze(t14, 0)  # t15: "cpu f32[1]"
  del t14
  t16 = torch.unsqueeze(t15, 1)  # t16: "cpu f32[1, 1]"
  del t15
  t17 = Tensor.expand(t16, [1, 1])  # t17: "cpu f32[1, 1]"
  del t16
  t18 = Tensor.expand(t17, (2, 4096))  # t18: "cpu f32[2, 4096]"
  del t17
  t19 = torch.unsqueeze(t18, 2)  # t19: "cpu f32[2, 4096, 1]"
  del t18
  t20 = Tensor.expand(t19, (2, 4096, 128256))  # t20: "cpu f32[2, 4096, 128256]"
  del t19
  t21 = Tensor.to(t20, copy=False, dtype=torch.float32)  # t21: "cpu f32[2, 4096, 128256]"
  del t20
  t22 = torch.where(t4, t21, 0)  # t22: "cpu f32[2, 4096, 128256]"
  del t4, t21
  t23 = torch.torch.ops.aten._log_softmax_backward_data(t22, t1, -1, torch.float32)  # t23: "cpu f32[2, 4096, 128256]"
  del t22, t1
  t24 = torch.reshape(t23, (-1, 128256))  # t24: "cpu f32[8192, 128256]"
  t25 = torch.matmul(t24, weight)  # t25: "cpu f32[8192, 4096]"
  del t24, weight
  t26 = torch.reshape(t25, (2, 4096, 4096))  # t26: "cpu f32[2, 4096, 4096]"
  del t25
  t27 = torch.reshape(t23, (-1, 128256))  # t27: "cpu f32[8192, 128256]"
  del t23
  t28 = torch.permute(t27, (1, 0))  # t28: "cpu f32[128256, 8192]"
  del t27
  t29 = torch.reshape(hidden, (-1, 4096))  # t29: "cpu f32[8192, 4096]"
  del hidden
  t30 = torch.matmul(t28, t29)  # t30: "cpu f32[128256, 4096]"
  del t28, t29
  return (t26, t30, None)
