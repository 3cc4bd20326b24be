# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def logits_returned(hidden, weight, labels):
#         """Loss and logits: since the logits are returned, cross-entropy is not fused with the linear."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits
#
# not fused, because the program returns its logits, or uses them after a graph break; return only the loss to have it fused
# Saved for backward, beside the arguments and views of them:
#     t1: f32[8192, 128256], 4,202,692,608 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
  t2 = Tensor.view(labels, -1)  # t2: "cpu i64[8192]"
  (t3, t4, t5, t6) = flce_cross_entropy_fwd(t1, t2, reduction='mean', ignore_index=-100)
  return {'output': (t3, t0), 'flat_args': [hidden, weight, labels], 'flat_output': (t3, t0)}, ((t1, t2, t4, t5, t6, weight, hidden), ())


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
  t7, t8, = cotangents
  # t7: "cpu f32[]"
  # t8: "cpu f32[2, 4096, 128256]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t4, t5, t6, weight, hidden, = C0
  # t1: "cpu f32[8192, 128256]"
  # t2: "cpu i64[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t9 = flce_cross_entropy_bwd(t7, t1, t2, t4, t5, t6, reduction='mean', ignore_index=-100)  # t9: "cpu f32[8192, 128256]"
  del t7, t1, t2, t4, t5, t6
  t10 = torch_prims_reshape_impl(t9, (2, 4096, 128256))  # t10: "cpu f32[2, 4096, 128256]"
  del t9
  t11 = torch.add(t8, t10, alpha=1)  # t11: "cpu f32[2, 4096, 128256]"
  del t8, t10
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
