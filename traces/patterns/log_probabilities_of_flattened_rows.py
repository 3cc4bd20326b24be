# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probabilities_of_flattened_rows(hidden, weight, tokens):
#         log_probs = F.linear(hidden, weight).log_softmax(-1)
#         starts = torch.arange(tokens.numel(), device=tokens.device) * weight.shape[0]
#         return -log_probs.view(-1).index_select(0, starts + tokens.view(-1)).mean()
#
# not fused, because its logits are gathered, but not into the log-probability of one label a row (picked from flattened rows)
# Saved for backward, beside the arguments and views of them:
#     t6: i64[8192], 65,536 bytes
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

  # starts = torch.arange(tokens.numel(), device=tokens.device) * weight.shape[0]
  t2 = torch.arange(start=0, step=1, end=8192, device=torch.device("cpu"), dtype=None)  # t2: "cpu i64[8192]"
  t3 = torch.mul(t2, 128256)  # t3: "cpu i64[8192]"
  del t2

  # return -log_probs.view(-1).index_select(0, starts + tokens.view(-1)).mean()
  t4 = torch_prims_reshape_impl(t1, (1050673152,))  # t4: "cpu f32[1050673152]"
  t5 = Tensor.view(tokens, -1)  # t5: "cpu i64[8192]"
  t6 = torch.add(t3, t5, alpha=1)  # t6: "cpu i64[8192]"
  del t3, t5
  t7 = torch.index_select(t4, 0, t6)  # t7: "cpu f32[8192]"
  del t4
  t8 = shallow_copy(t7)  # t8: "cpu f32[8192]"
  del t7
  t9 = torch.sum(t8, (0,))  # t9: "cpu f32[]"
  del t8
  t10 = torch_div_prim_impl(t9, 8192.0)  # t10: "cpu f32[]"
  del t9
  t11 = shallow_copy(t10)  # t11: "cpu f32[]"
  del t10
  t12 = torch.neg(t11)  # t12: "cpu f32[]"
  del t11
  return {'output': (t12,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t12,)}, ((t6, t1, weight, hidden), ())


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
  t13, = cotangents
  # t13: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t6, t1, weight, hidden, = C0
  # t6: "cpu i64[8192]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t14 = torch.neg(t13)  # t14: "cpu f32[]"
  del t13
  t15 = torch.true_divide(t14, 8192.0)  # t15: "cpu f32[]"
  del t14
  t16 = torch.unsqueeze(t15, 0)  # t16: "cpu f32[1]"
  del t15
  t17 = Tensor.expand(t16, [1])  # t17: "cpu f32[1]"
  del t16
  t18 = Tensor.expand(t17, (8192,))  # t18: "cpu f32[8192]"
  del t17
  t19 = torch.full((1050673152,), 0, device=torch.device("cpu"), dtype=torch.float32)  # t19: "cpu f32[1050673152]"
  t20 = torch.index_add(t19, 0, t6, t18)  # t20: "cpu f32[1050673152]"
  del t19, t6, t18
  t21 = torch_prims_reshape_impl(t20, (2, 4096, 128256))  # t21: "cpu f32[2, 4096, 128256]"
  del t20
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
