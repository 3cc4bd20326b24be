# Printed by: python traces/regenerate.py --device cuda
# thunder.jit with its default executors, thunder 0.2.6, torch 2.11. Compiled and run on NVIDIA H200, bfloat16.
#
#     def transformers_llama(hidden, weight, labels):
#         """The loss of transformers' causal language models, with the labels shifted after the linear."""
#         logits = F.linear(hidden, weight).float()
#         labels = F.pad(labels, (0, 1), value=-100)
#         labels = labels[..., 1:].contiguous()
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
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

  # logits = F.linear(hidden, weight).float()
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cuda:0 bf16[2, 4096, 128256]"
  [t1, t2, t3] = TorchCompile0(t0, labels)
    # t4 = prims.convert_element_type(t0, dtypes.float32)  # t4: "cuda:0 f32[2, 4096, 128256]"
    # t5 = ltorch.pad(labels, (0, 1), 'constant', -100)  # t5: "cuda:0 i64[2, 4097]"
    # t6 = ltorch.getitem(t5, (..., slice(1,None,None)))  # t6: "cuda:0 i64[2, 4096]"
    # t7 = ltorch.contiguous(t6, memory_format=_torch_memory_format)  # t7: "cuda:0 i64[2, 4096]"
    # t8 = prims.reshape(t4, (8192, 128256))  # t8: "cuda:0 f32[8192, 128256]"
    # t9 = ltorch.view(t7, -1)  # t9: "cuda:0 i64[8192]"
    # t1 = ltorch.log_softmax(t8, 1, dtype=None)  # t1: "cuda:0 f32[8192, 128256]"
    # t10 = ltorch.neg(t1)  # t10: "cuda:0 f32[8192, 128256]"
    # t11 = ltorch.unsqueeze(t9, 1)  # t11: "cuda:0 i64[8192, 1]"
    # t12 = ltorch.ne(t11, -100)  # t12: "cuda:0 b8[8192, 1]"
    # t13 = ltorch.where(t12, t11, 128256)  # t13: "cuda:0 i64[8192, 1]"
    # t14 = prims.pad(t10, 0.0, [(0, 0, 0), (0, 1, 0)])  # t14: "cuda:0 f32[8192, 128257]"
    # t15 = ltorch.take_along_dim(t14, t13, 1)  # t15: "cuda:0 f32[8192, 1]"
    # t16 = ltorch.sum(t15, None, False, dtype=None)  # t16: "cuda:0 f32[]"
    # t2 = ltorch.sum(t12, None, False, dtype=None)  # t2: "cuda:0 i64[]"
    # t3 = ltorch.true_divide(t16, t2)  # t3: "cuda:0 f32[]"
  del t0
  return {'output': (t3,), 'flat_args': [hidden, weight, labels], 'flat_output': (t3,)}, ((labels, t1, t2, weight, hidden), ())


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
  t17, = cotangents
  # t17: "cuda:0 f32[]"
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
  [t18, t19] = TorchCompile1(labels, t17, t1, t2)
    # t5 = ltorch.pad(labels, (0, 1), 'constant', -100)  # t5: "cuda:0 i64[2, 4097]"
    # t6 = ltorch.getitem(t5, (..., slice(1,None,None)))  # t6: "cuda:0 i64[2, 4096]"
    # t7 = ltorch.contiguous(t6, memory_format=_torch_memory_format)  # t7: "cuda:0 i64[2, 4096]"
    # t9 = ltorch.view(t7, -1)  # t9: "cuda:0 i64[8192]"
    # t20 = ltorch.nll_loss_backward(t17, t1, t9, None, 'mean', -100, t2)  # t20: "cuda:0 f32[8192, 128256]"
    # t21 = ltorch.log_softmax_backward(t20, t1, 1, dtypes.float32)  # t21: "cuda:0 f32[8192, 128256]"
    # t22 = prims.reshape(t21, (2, 4096, 128256))  # t22: "cuda:0 f32[2, 4096, 128256]"
    # t18 = prims.convert_element_type(t22, dtypes.bfloat16)  # t18: "cuda:0 bf16[2, 4096, 128256]"
    # t19 = ltorch.reshape(t18, -1, 128256)  # t19: "cuda:0 bf16[8192, 128256]"
  del labels, t17, t1, t2
  t23 = torch.matmul(t19, weight)  # t23: "cuda:0 bf16[8192, 4096]"
  del t19, weight
  t24 = torch.reshape(t23, (2, 4096, 4096))  # t24: "cuda:0 bf16[2, 4096, 4096]"
  del t23
  t25 = torch.reshape(t18, (-1, 128256))  # t25: "cuda:0 bf16[8192, 128256]"
  del t18
  t26 = torch.permute(t25, (1, 0))  # t26: "cuda:0 bf16[128256, 8192]"
  del t25
  t27 = torch.reshape(hidden, (-1, 4096))  # t27: "cuda:0 bf16[8192, 4096]"
  del hidden
  t28 = torch.matmul(t26, t27)  # t28: "cuda:0 bf16[128256, 4096]"
  del t26, t27
  return (t24, t28, None)
