# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_of_all_tokens(hidden, weight, tokens):
#         """In one sum; only sums over the classes are read as entropies."""
#         log_probs = F.linear(hidden, weight).log_softmax(-1)
#         return -(log_probs.exp() * log_probs).sum()
#
# not fused, because the vocabulary is not the class dimension of the loss (a sum over other dimensions than the classes)
# Saved for backward, beside the arguments and views of them:
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

  # log_probs = F.linear(hidden, weight).log_softmax(-1)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.nn.functional.log_softmax(t0, -1)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t2 = torch.exp(t1)  # t2: "cpu f32[2, 4096, 128256]"

  # return -(log_probs.exp() * log_probs).sum()
  t3 = torch.mul(t2, t1)  # t3: "cpu f32[2, 4096, 128256]"
  t4 = torch.sum(t3, None, False, dtype=None)  # t4: "cpu f32[]"
  del t3
  t5 = torch.neg(t4)  # t5: "cpu f32[]"
  del t4
  return {'output': (t5,), 'flat_args': [hidden, weight], 'flat_output': (t5,)}, ((t1, t2, weight, hidden), ())


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
  t6, = cotangents
  # t6: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, weight, hidden, = C0
  # t1: "cpu f32[2, 4096, 128256]"
  # t2: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t7 = torch.neg(t6)  # t7: "cpu f32[]"
  del t6
  t8 = Tensor.expand(t7, (2, 4096, 128256))  # t8: "cpu f32[2, 4096, 128256]"
  del t7
  t9 = Tensor.to(t8, copy=False, dtype=torch.float32)  # t9: "cpu f32[2, 4096, 128256]"
  del t8
  t10 = torch.mul(t1, t9)  # t10: "cpu f32[2, 4096, 128256]"
  t11 = torch.mul(t2, t9)  # t11: "cpu f32[2, 4096, 128256]"
  del t9
  t12 = torch.mul(t10, t2)  # t12: "cpu f32[2, 4096, 128256]"
  del t10, t2
  t13 = torch.add(t11, t12, alpha=1)  # t13: "cpu f32[2, 4096, 128256]"
  del t11, t12
  t14 = torch.torch.ops.aten._log_softmax_backward_data(t13, t1, -1, torch.float32)  # t14: "cpu f32[2, 4096, 128256]"
  del t13, t1
  t15 = torch.reshape(t14, (-1, 128256))  # t15: "cpu f32[8192, 128256]"
  t16 = torch.matmul(t15, weight)  # t16: "cpu f32[8192, 4096]"
  del t15, weight
  t17 = torch.reshape(t16, (2, 4096, 4096))  # t17: "cpu f32[2, 4096, 4096]"
  del t16
  t18 = torch.reshape(t14, (-1, 128256))  # t18: "cpu f32[8192, 128256]"
  del t14
  t19 = torch.permute(t18, (1, 0))  # t19: "cpu f32[128256, 8192]"
  del t18
  t20 = torch.reshape(hidden, (-1, 4096))  # t20: "cpu f32[8192, 4096]"
  del hidden
  t21 = torch.matmul(t19, t20)  # t21: "cpu f32[128256, 4096]"
  del t19, t20
  return (t17, t21)
