# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def one_hot_targets(hidden, weight, tokens):
#         log_probs = F.linear(hidden, weight).log_softmax(-1)
#         return -(F.one_hot(tokens, weight.shape[0]) * log_probs).sum(-1).mean()
#
# not fused, because the targets are class probabilities (of sum)
# Saved for backward, beside the arguments and views of them:
#     t3: f32[2, 4096, 128256], 4,202,692,608 bytes
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

  # return -(F.one_hot(tokens, weight.shape[0]) * log_probs).sum(-1).mean()
  t2 = torch.nn.functional.one_hot(tokens, 128256)  # t2: "cpu i64[2, 4096, 128256]"
  t3 = Tensor.to(t2, torch.float32, copy=True)  # t3: "cpu f32[2, 4096, 128256]"
  del t2
  t4 = torch.mul(t3, t1)  # t4: "cpu f32[2, 4096, 128256]"
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
  return {'output': (t10,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t10,)}, ((t3, t1, weight, hidden), ())


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
  t3, t1, weight, hidden, = C0
  # t3: "cpu f32[2, 4096, 128256]"
  # t1: "cpu f32[2, 4096, 128256]"
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
  del t3, t20
  t22 = torch.torch.ops.aten._log_softmax_backward_data(t21, t1, -1, torch.float32)  # t22: "cpu f32[2, 4096, 128256]"
  del t21, t1
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
