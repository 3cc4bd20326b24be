# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def several_log_probabilities_a_token(hidden, weight, tokens):
#         """Such as those of a teacher's most likely tokens."""
#         columns = torch.stack([tokens, tokens.flip(-1)], dim=-1)
#         return F.linear(hidden, weight).log_softmax(-1).gather(-1, columns).sum()
#
# not fused, because its logits are gathered, but not into the log-probability of one label a row (labels of shape (2, 4096, 2) for logits of shape (2, 4096, 128256))
# Saved for backward, beside the arguments and views of them:
#     t1: i64[2, 4096, 2], 131,072 bytes
#     t3: f32[2, 4096, 128256], 4,202,692,608 bytes

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

  # columns = torch.stack([tokens, tokens.flip(-1)], dim=-1)
  t0 = torch.flip(tokens, (-1,))  # t0: "cpu i64[2, 4096]"
  t1 = torch.stack([tokens, t0], -1)  # t1: "cpu i64[2, 4096, 2]"
  del t0

  # return F.linear(hidden, weight).log_softmax(-1).gather(-1, columns).sum()
  t2 = torch.nn.functional.linear(hidden, weight, None)  # t2: "cpu f32[2, 4096, 128256]"
  t3 = torch.nn.functional.log_softmax(t2, -1)  # t3: "cpu f32[2, 4096, 128256]"
  del t2
  t4 = torch.gather(t3, 2, t1)  # t4: "cpu f32[2, 4096, 2]"
  t5 = torch.sum(t4, None, False, dtype=None)  # t5: "cpu f32[]"
  del t4
  return {'output': (t5,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t5,)}, ((t1, t3, weight, hidden), ())


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
  t6, = cotangents
  # t6: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t3, weight, hidden, = C0
  # t1: "cpu i64[2, 4096, 2]"
  # t3: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t7 = Tensor.expand(t6, (2, 4096, 2))  # t7: "cpu f32[2, 4096, 2]"
  del t6
  t8 = Tensor.to(t7, copy=False, dtype=torch.float32)  # t8: "cpu f32[2, 4096, 2]"
  del t7
  t9 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t9: "cpu f32[2, 4096, 128256]"
  t10 = torch.scatter_add(t9, 2, t1, t8)  # t10: "cpu f32[2, 4096, 128256]"
  del t9, t1, t8
  t11 = torch.torch.ops.aten._log_softmax_backward_data(t10, t3, -1, torch.float32)  # t11: "cpu f32[2, 4096, 128256]"
  del t10, t3
  t12 = torch.reshape(t11, (-1, 128256))  # t12: "cpu f32[8192, 128256]"
  t13 = torch.matmul(t12, weight)  # t13: "cpu f32[8192, 4096]"
  del t12, weight
  t14 = torch.reshape(t13, (2, 4096, 4096))  # t14: "cpu f32[2, 4096, 4096]"
  del t13
  t15 = torch.reshape(t11, (-1, 128256))  # t15: "cpu f32[8192, 128256]"
  del t11
  t16 = torch.permute(t15, (1, 0))  # t16: "cpu f32[128256, 8192]"
  del t15
  t17 = torch.reshape(hidden, (-1, 4096))  # t17: "cpu f32[8192, 4096]"
  del hidden
  t18 = torch.matmul(t16, t17)  # t18: "cpu f32[128256, 4096]"
  del t16, t17
  return (t14, t18, None)
