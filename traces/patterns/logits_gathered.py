# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def logits_gathered(hidden, weight, tokens):
#         return F.linear(hidden, weight).gather(-1, tokens.unsqueeze(-1)).mean()
#
# not fused, because its logits are gathered, but not into the log-probability of one label a row (by gather alone)
# Saved for backward, beside the arguments and views of them:
#     t1: i64[2, 4096, 1], 65,536 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # return F.linear(hidden, weight).gather(-1, tokens.unsqueeze(-1)).mean()
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.unsqueeze(tokens, -1)  # t1: "cpu i64[2, 4096, 1]"
  t2 = torch.gather(t0, 2, t1)  # t2: "cpu f32[2, 4096, 1]"
  del t0
  t3 = shallow_copy(t2)  # t3: "cpu f32[2, 4096, 1]"
  del t2
  t4 = torch.sum(t3, (0, 1, 2))  # t4: "cpu f32[]"
  del t3
  t5 = torch_div_prim_impl(t4, 8192.0)  # t5: "cpu f32[]"
  del t4
  t6 = shallow_copy(t5)  # t6: "cpu f32[]"
  del t5
  return {'output': (t6,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t6,)}, ((t1, weight, hidden), ())


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
  t7, = cotangents
  # t7: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, weight, hidden, = C0
  # t1: "cpu i64[2, 4096, 1]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t8 = torch.true_divide(t7, 8192.0)  # t8: "cpu f32[]"
  del t7
  t9 = torch.unsqueeze(t8, 0)  # t9: "cpu f32[1]"
  del t8
  t10 = torch.unsqueeze(t9, 1)  # t10: "cpu f32[1, 1]"
  del t9
  t11 = torch.unsqueeze(t10, 2)  # t11: "cpu f32[1, 1, 1]"
  del t10
  t12 = Tensor.expand(t11, [1, 1, 1])  # t12: "cpu f32[1, 1, 1]"
  del t11
  t13 = Tensor.expand(t12, (2, 4096, 1))  # t13: "cpu f32[2, 4096, 1]"
  del t12
  t14 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t14: "cpu f32[2, 4096, 128256]"
  t15 = torch.scatter_add(t14, 2, t1, t13)  # t15: "cpu f32[2, 4096, 128256]"
  del t14, t1, t13
  t16 = torch.reshape(t15, (-1, 128256))  # t16: "cpu f32[8192, 128256]"
  t17 = torch.matmul(t16, weight)  # t17: "cpu f32[8192, 4096]"
  del t16, weight
  t18 = torch.reshape(t17, (2, 4096, 4096))  # t18: "cpu f32[2, 4096, 4096]"
  del t17
  t19 = torch.reshape(t15, (-1, 128256))  # t19: "cpu f32[8192, 128256]"
  del t15
  t20 = torch.permute(t19, (1, 0))  # t20: "cpu f32[128256, 8192]"
  del t19
  t21 = torch.reshape(hidden, (-1, 4096))  # t21: "cpu f32[8192, 4096]"
  del hidden
  t22 = torch.matmul(t20, t21)  # t22: "cpu f32[128256, 4096]"
  del t20, t21
  return (t18, t22, None)
