# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probability_after_an_activation(hidden, weight, tokens):
#         logits = torch.relu(F.linear(hidden, weight))
#         return F.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).sum()
#
# not fused, because the logits are changed between the linear and the loss (by relu)
# Saved for backward, beside the arguments and views of them:
#     t4: i64[2, 4096, 1], 65,536 bytes
#     t3: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t1: b8[2, 4096, 128256], 1,050,673,152 bytes

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

  # logits = torch.relu(F.linear(hidden, weight))
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.gt(t0, 0.0)  # t1: "cpu b8[2, 4096, 128256]"
  t2 = torch.where(t1, t0, 0.0)  # t2: "cpu f32[2, 4096, 128256]"
  del t0

  # return F.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).sum()
  t3 = torch.nn.functional.log_softmax(t2, -1)  # t3: "cpu f32[2, 4096, 128256]"
  del t2
  t4 = torch.unsqueeze(tokens, -1)  # t4: "cpu i64[2, 4096, 1]"
  t5 = torch.gather(t3, 2, t4)  # t5: "cpu f32[2, 4096, 1]"
  t6 = torch.sum(t5, None, False, dtype=None)  # t6: "cpu f32[]"
  del t5
  return {'output': (t6,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t6,)}, ((t4, t3, t1, weight, hidden), ())


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
  t7, = cotangents
  # t7: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t4, t3, t1, weight, hidden, = C0
  # t4: "cpu i64[2, 4096, 1]"
  # t3: "cpu f32[2, 4096, 128256]"
  # t1: "cpu b8[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t8 = Tensor.expand(t7, (2, 4096, 1))  # t8: "cpu f32[2, 4096, 1]"
  del t7
  t9 = Tensor.to(t8, copy=False, dtype=torch.float32)  # t9: "cpu f32[2, 4096, 1]"
  del t8
  t10 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t10: "cpu f32[2, 4096, 128256]"
  t11 = torch.scatter_add(t10, 2, t4, t9)  # t11: "cpu f32[2, 4096, 128256]"
  del t10, t4, t9
  t12 = torch.torch.ops.aten._log_softmax_backward_data(t11, t3, -1, torch.float32)  # t12: "cpu f32[2, 4096, 128256]"
  del t11, t3
  t13 = torch.where(t1, t12, 0)  # t13: "cpu f32[2, 4096, 128256]"
  del t1, t12
  t14 = torch.reshape(t13, (-1, 128256))  # t14: "cpu f32[8192, 128256]"
  t15 = torch.matmul(t14, weight)  # t15: "cpu f32[8192, 4096]"
  del t14, weight
  t16 = torch.reshape(t15, (2, 4096, 4096))  # t16: "cpu f32[2, 4096, 4096]"
  del t15
  t17 = torch.reshape(t13, (-1, 128256))  # t17: "cpu f32[8192, 128256]"
  del t13
  t18 = torch.permute(t17, (1, 0))  # t18: "cpu f32[128256, 8192]"
  del t17
  t19 = torch.reshape(hidden, (-1, 4096))  # t19: "cpu f32[8192, 4096]"
  del hidden
  t20 = torch.matmul(t18, t19)  # t20: "cpu f32[128256, 4096]"
  del t18, t19
  return (t16, t20, None)
