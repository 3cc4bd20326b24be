# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_beside_an_epsilon(hidden, weight, tokens):
#         probabilities = F.softmax(F.linear(hidden, weight), dim=-1)
#         return -(probabilities * torch.log(probabilities + 1e-9)).sum(-1).mean()
#
# not fused, because the logits are changed between the linear and the loss (by add)
# Saved for backward, beside the arguments and views of them:
#     t3: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t2: f32[2, 4096, 128256], 4,202,692,608 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"

  # probabilities = F.softmax(F.linear(hidden, weight), dim=-1)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.softmax(t0, -1)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # return -(probabilities * torch.log(probabilities + 1e-9)).sum(-1).mean()
  t2 = torch.add(t1, 1e-09, alpha=1)  # t2: "cpu f32[2, 4096, 128256]"
  t3 = torch.log(t2)  # t3: "cpu f32[2, 4096, 128256]"
  t4 = torch.mul(t1, t3)  # t4: "cpu f32[2, 4096, 128256]"
  t5 = torch.sum(t4, -1, False, dtype=None)  # t5: "cpu f32[2, 4096]"
  del t4
  t6 = shallow_copy(t5)  # t6: "cpu f32[2, 4096]"
  del t5
  t7 = torch.sum(t6, (0, 1))  # t7: "cpu f32[]"
  del t6
  t8 = torch_div_prim_impl(t7, 8192.0)  # t8: "cpu f32[]"
  del t7
  t9 = shallow_copy(t8)  # t9: "cpu f32[]"
  del t8
  t10 = torch.neg(t9)  # t10: "cpu f32[]"
  del t9
  return {'output': (t10,), 'flat_args': [hidden, weight], 'flat_output': (t10,)}, ((t3, t1, t2, weight, hidden), ())


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
  t11, = cotangents
  # t11: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t1, t2, weight, hidden, = C0
  # t3: "cpu f32[2, 4096, 128256]"
  # t1: "cpu f32[2, 4096, 128256]"
  # t2: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t12 = torch.neg(t11)  # t12: "cpu f32[]"
  del t11
  t13 = torch.true_divide(t12, 8192.0)  # t13: "cpu f32[]"
  del t12
  t14 = torch.unsqueeze(t13, 0)  # t14: "cpu f32[1]"
  del t13
  t15 = torch.unsqueeze(t14, 1)  # t15: "cpu f32[1, 1]"
  del t14
  t16 = Tensor.expand(t15, [1, 1])  # t16: "cpu f32[1, 1]"
  del t15
  t17 = Tensor.expand(t16, (2, 4096))  # t17: "cpu f32[2, 4096]"
  del t16
  t18 = torch.unsqueeze(t17, 2)  # t18: "cpu f32[2, 4096, 1]"
  del t17
  t19 = Tensor.expand(t18, (2, 4096, 128256))  # t19: "cpu f32[2, 4096, 128256]"
  del t18
  t20 = Tensor.to(t19, copy=False, dtype=torch.float32)  # t20: "cpu f32[2, 4096, 128256]"
  del t19
  t21 = torch.mul(t3, t20)  # t21: "cpu f32[2, 4096, 128256]"
  del t3
  t22 = torch.mul(t1, t20)  # t22: "cpu f32[2, 4096, 128256]"
  del t20
  t23 = torch.true_divide(t22, t2)  # t23: "cpu f32[2, 4096, 128256]"
  del t22, t2
  t24 = torch.add(t21, t23, alpha=1)  # t24: "cpu f32[2, 4096, 128256]"
  del t21, t23
  t25 = torch.mul(t1, t24)  # t25: "cpu f32[2, 4096, 128256]"
  t26 = torch.sum(t25, -1, True, dtype=None)  # t26: "cpu f32[2, 4096, 1]"
  del t25
  t27 = torch.sub(t24, t26, alpha=1)  # t27: "cpu f32[2, 4096, 128256]"
  del t24, t26
  t28 = torch.mul(t1, t27)  # t28: "cpu f32[2, 4096, 128256]"
  del t1, t27
  t29 = torch.reshape(t28, (-1, 128256))  # t29: "cpu f32[8192, 128256]"
  t30 = torch.matmul(t29, weight)  # t30: "cpu f32[8192, 4096]"
  del t29, weight
  t31 = torch.reshape(t30, (2, 4096, 4096))  # t31: "cpu f32[2, 4096, 4096]"
  del t30
  t32 = torch.reshape(t28, (-1, 128256))  # t32: "cpu f32[8192, 128256]"
  del t28
  t33 = torch.permute(t32, (1, 0))  # t33: "cpu f32[128256, 8192]"
  del t32
  t34 = torch.reshape(hidden, (-1, 4096))  # t34: "cpu f32[8192, 4096]"
  del hidden
  t35 = torch.matmul(t33, t34)  # t35: "cpu f32[128256, 4096]"
  del t33, t34
  return (t31, t35)
