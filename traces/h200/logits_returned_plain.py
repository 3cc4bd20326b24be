# Printed by: python traces/regenerate.py --device cuda
# thunder.jit with its default executors, thunder 0.2.6, torch 2.11. Compiled and run on NVIDIA H200, bfloat16.
#
#     def logits_returned(hidden, weight, labels):
#         """The caller wants the logits as well, so cross-entropy stands alone."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits
#
# Saved for backward, beside the arguments and views of them:
#     t1: f32[8192, 128256], 4,202,692,608 bytes
#     t2: i64[], 8 bytes

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
  [t1, t2, t3] = TorchCompile0(t0, labels)
    # t4 = prims.reshape(t0, (8192, 128256))  # t4: "cuda:0 bf16[8192, 128256]"
    # t5 = prims.convert_element_type(t4, dtypes.float32)  # t5: "cuda:0 f32[8192, 128256]"
    # t6 = ltorch.view(labels, -1)  # t6: "cuda:0 i64[8192]"
    # t1 = ltorch.log_softmax(t5, 1, dtype=None)  # t1: "cuda:0 f32[8192, 128256]"
    # t7 = ltorch.neg(t1)  # t7: "cuda:0 f32[8192, 128256]"
    # t8 = ltorch.unsqueeze(t6, 1)  # t8: "cuda:0 i64[8192, 1]"
    # t9 = ltorch.ne(t8, -100)  # t9: "cuda:0 b8[8192, 1]"
    # t10 = ltorch.where(t9, t8, 128256)  # t10: "cuda:0 i64[8192, 1]"
    # t11 = prims.pad(t7, 0.0, [(0, 0, 0), (0, 1, 0)])  # t11: "cuda:0 f32[8192, 128257]"
    # t12 = ltorch.take_along_dim(t11, t10, 1)  # t12: "cuda:0 f32[8192, 1]"
    # t13 = ltorch.sum(t12, None, False, dtype=None)  # t13: "cuda:0 f32[]"
    # t2 = ltorch.sum(t9, None, False, dtype=None)  # t2: "cuda:0 i64[]"
    # t3 = ltorch.true_divide(t13, t2)  # t3: "cuda:0 f32[]"
  return {'output': (t3, t0), 'flat_args': [hidden, weight, labels], 'flat_output': (t3, t0)}, ((labels, t1, t2, weight, hidden), ())


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
  t14, t15, = cotangents
  # t14: "cuda:0 f32[]"
  # t15: "cuda:0 bf16[2, 4096, 128256]"
  clear_mutable_collection(cotangents)
  del cotangents
  labels, t1, t2, weight, hidden, = C0
  # labels: "cuda:0 i64[2, 4096]"
  # t1: "cuda:0 f32[8192, 128256]"
  # t2: "cuda:0 i64[]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  [t16] = TorchCompile1(labels, t14, t1, t2)
    # t6 = ltorch.view(labels, -1)  # t6: "cuda:0 i64[8192]"
    # t17 = ltorch.nll_loss_backward(t14, t1, t6, None, 'mean', -100, t2)  # t17: "cuda:0 f32[8192, 128256]"
    # t18 = ltorch.log_softmax_backward(t17, t1, 1, dtypes.float32)  # t18: "cuda:0 f32[8192, 128256]"
    # t19 = prims.convert_element_type(t18, dtypes.bfloat16)  # t19: "cuda:0 bf16[8192, 128256]"
    # t16 = prims.reshape(t19, (2, 4096, 128256))  # t16: "cuda:0 bf16[2, 4096, 128256]"
  del labels, t14, t1, t2
  [t20, t21] = nvFusion0(t15, t16)
    # t22 = prims.convert_element_type(t15, dtypes.float32)  # t22: "cuda:0 f32[2, 4096, 128256]"
    # t23 = prims.convert_element_type(t16, dtypes.float32)  # t23: "cuda:0 f32[2, 4096, 128256]"
    # t24 = prims.add(t22, t23)  # t24: "cuda:0 f32[2, 4096, 128256]"
    # t20 = prims.convert_element_type(t24, dtypes.bfloat16)  # t20: "cuda:0 bf16[2, 4096, 128256]"
    # t21 = prims.reshape(t20, (8192, 128256))  # t21: "cuda:0 bf16[8192, 128256]"
  del t15, t16
  t25 = torch.matmul(t21, weight)  # t25: "cuda:0 bf16[8192, 4096]"
  del t21, weight
  t26 = torch.reshape(t25, (2, 4096, 4096))  # t26: "cuda:0 bf16[2, 4096, 4096]"
  del t25
  t27 = torch.reshape(t20, (-1, 128256))  # t27: "cuda:0 bf16[8192, 128256]"
  del t20
  t28 = torch.permute(t27, (1, 0))  # t28: "cuda:0 bf16[128256, 8192]"
  del t27
  t29 = torch.reshape(hidden, (-1, 4096))  # t29: "cuda:0 bf16[8192, 4096]"
  del hidden
  t30 = torch.matmul(t28, t29)  # t30: "cuda:0 bf16[128256, 4096]"
  del t28, t29
  return (t26, t30, None)
