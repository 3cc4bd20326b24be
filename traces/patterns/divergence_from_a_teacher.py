# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def divergence_from_a_teacher(hidden, weight, second_weight):
#         with torch.no_grad():
#             teacher = F.linear(hidden, second_weight).softmax(-1)
#         return F.kl_div(F.linear(hidden, weight).log_softmax(-1), teacher, reduction="batchmean")
#
# not fused, because the targets are class probabilities (of kl_div; `linear_kl_divergence` takes a teacher's hidden states and head)
# Saved for backward, beside the arguments and views of them:
#     t3: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, second_weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # second_weight: "cpu f32[128256, 4096]"

  # teacher = F.linear(hidden, second_weight).softmax(-1)
  t0 = torch.nn.functional.linear(hidden, second_weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.softmax(t0, -1)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # return F.kl_div(F.linear(hidden, weight).log_softmax(-1), teacher, reduction="batchmean")
  t2 = torch.nn.functional.linear(hidden, weight, None)  # t2: "cpu f32[2, 4096, 128256]"
  t3 = torch.nn.functional.log_softmax(t2, -1)  # t3: "cpu f32[2, 4096, 128256]"
  del t2
  t4 = torch.nn.functional.kl_div(t3, t1, reduction='batchmean')  # t4: "cpu f32[]"
  return {'output': (t4,), 'flat_args': [hidden, weight, second_weight], 'flat_output': (t4,)}, ((t3, t1, weight, hidden), ())


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
  t5, = cotangents
  # t5: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t1, weight, hidden, = C0
  # t3: "cpu f32[2, 4096, 128256]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t6, t7) = kl_div_vjp(((t3, t1), {'reduction': "batchmean"}), t5)
  del t7, t1, t5
  t8 = torch.torch.ops.aten._log_softmax_backward_data(t6, t3, -1, torch.float32)  # t8: "cpu f32[2, 4096, 128256]"
  del t6, t3
  t9 = torch.reshape(t8, (-1, 128256))  # t9: "cpu f32[8192, 128256]"
  t10 = torch.matmul(t9, weight)  # t10: "cpu f32[8192, 4096]"
  del t9, weight
  t11 = torch.reshape(t10, (2, 4096, 4096))  # t11: "cpu f32[2, 4096, 4096]"
  del t10
  t12 = torch.reshape(t8, (-1, 128256))  # t12: "cpu f32[8192, 128256]"
  del t8
  t13 = torch.permute(t12, (1, 0))  # t13: "cpu f32[128256, 8192]"
  del t12
  t14 = torch.reshape(hidden, (-1, 4096))  # t14: "cpu f32[8192, 4096]"
  del hidden
  t15 = torch.matmul(t13, t14)  # t15: "cpu f32[128256, 4096]"
  del t13, t14
  return (t11, t15, None)
