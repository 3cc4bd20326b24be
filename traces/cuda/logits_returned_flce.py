# Printed by: python traces/regenerate.py --device cuda
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cuda, bfloat16.
#
#     def logits_returned(hidden, weight, labels):
#         """Loss and logits: since the logits are returned, cross-entropy is not fused with the linear."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits
#
# not fused, because the program returns its logits, or uses them after a graph break; return only the loss to have it fused
# Saved for backward, beside the arguments and views of them:
#     t0: bf16[2, 4096, 128256], 2,101,346,304 bytes
#     t2: f32[8192], 32,768 bytes
#     t3: f32[8192], 32,768 bytes
#     t4: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cuda:0 bf16[2, 4096, 128256]"
  [t1, t2, t3, t4] = nvFusion0(t0, labels)
    # t5 = prims.reshape(t0, (8192, 128256))  # t5: "cuda:0 bf16[8192, 128256]"
    # t6 = prims.convert_element_type(t5, dtypes.float32)  # t6: "cuda:0 f32[8192, 128256]"
    # t7 = prims.reshape(labels, (8192,))  # t7: "cuda:0 i64[8192]"
    # (t1, t2, t3, t4) = flce_cross_entropy_fwd(t6, t7, reduction='mean', ignore_index=-100)
  return {'output': (t1, t0), 'flat_args': [hidden, weight, labels], 'flat_output': (t1, t0)}, ((t0, labels, t2, t3, t4, weight, hidden), ())


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
  t8, t9, = cotangents
  # t8: "cuda:0 f32[]"
  # t9: "cuda:0 bf16[2, 4096, 128256]"
  clear_mutable_collection(cotangents)
  del cotangents
  t0, labels, t2, t3, t4, weight, hidden, = C0
  # t0: "cuda:0 bf16[2, 4096, 128256]"
  # labels: "cuda:0 i64[2, 4096]"
  # t2: "cuda:0 f32[8192]"
  # t3: "cuda:0 f32[8192]"
  # t4: "cuda:0 i64[]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  [t10, t11] = nvFusion1(t0, labels, t8, t2, t3, t4, t9)
    # t5 = prims.reshape(t0, (8192, 128256))  # t5: "cuda:0 bf16[8192, 128256]"
    # t7 = prims.reshape(labels, (8192,))  # t7: "cuda:0 i64[8192]"
    # t6 = prims.convert_element_type(t5, dtypes.float32)  # t6: "cuda:0 f32[8192, 128256]"
    # t12 = flce_cross_entropy_bwd(t8, t6, t7, t2, t3, t4, reduction='mean', ignore_index=-100)  # t12: "cuda:0 f32[8192, 128256]"
    # t13 = prims.convert_element_type(t12, dtypes.bfloat16)  # t13: "cuda:0 bf16[8192, 128256]"
    # t14 = prims.reshape(t13, (2, 4096, 128256))  # t14: "cuda:0 bf16[2, 4096, 128256]"
    # t15 = prims.convert_element_type(t14, dtypes.float32)  # t15: "cuda:0 f32[2, 4096, 128256]"
    # t16 = prims.convert_element_type(t9, dtypes.float32)  # t16: "cuda:0 f32[2, 4096, 128256]"
    # t17 = prims.add(t16, t15)  # t17: "cuda:0 f32[2, 4096, 128256]"
    # t10 = prims.convert_element_type(t17, dtypes.bfloat16)  # t10: "cuda:0 bf16[2, 4096, 128256]"
    # t11 = prims.reshape(t10, (8192, 128256))  # t11: "cuda:0 bf16[8192, 128256]"
  del t0, labels, t8, t2, t3, t4, t9
  t18 = torch.matmul(t11, weight)  # t18: "cuda:0 bf16[8192, 4096]"
  del t11, weight
  t19 = torch.reshape(t18, (2, 4096, 4096))  # t19: "cuda:0 bf16[2, 4096, 4096]"
  del t18
  t20 = torch.reshape(t10, (-1, 128256))  # t20: "cuda:0 bf16[8192, 128256]"
  del t10
  t21 = torch.permute(t20, (1, 0))  # t21: "cuda:0 bf16[128256, 8192]"
  del t20
  t22 = torch.reshape(hidden, (-1, 4096))  # t22: "cuda:0 bf16[8192, 4096]"
  del hidden
  t23 = torch.matmul(t21, t22)  # t23: "cuda:0 bf16[128256, 4096]"
  del t21, t22
  return (t19, t23, None)
