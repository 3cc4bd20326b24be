# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def transformers_llama(hidden, weight, labels):
#         """The loss of transformers' causal language models, with the labels shifted after the linear."""
#         logits = F.linear(hidden, weight).float()
#         labels = F.pad(labels, (0, 1), value=-100)
#         labels = labels[..., 1:].contiguous()
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
#
# Saved for backward, beside the arguments and views of them:
#     t6: f32[8192, 128256], 4,202,692,608 bytes
#     t5: i64[8192], 65,536 bytes
#     t14: i64[], 8 bytes

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

  # logits = F.linear(hidden, weight).float()
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # labels = F.pad(labels, (0, 1), value=-100)
  t1 = torch.nn.functional.pad(labels, (0, 1), 'constant', -100)  # t1: "cpu i64[2, 4097]"

  # labels = labels[..., 1:].contiguous()
  t2 = Tensor.__getitem__(t1, (..., slice(1,None,None)))  # t2: "cpu i64[2, 4096]"
  del t1
  t3 = Tensor.contiguous(t2, memory_format=_torch_memory_format)  # t3: "cpu i64[2, 4096]"
  del t2

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
  t4 = torch_prims_reshape_impl(t0, (8192, 128256))  # t4: "cpu f32[8192, 128256]"
  del t0
  t5 = Tensor.view(t3, -1)  # t5: "cpu i64[8192]"
  del t3
  t6 = torch.nn.functional.log_softmax(t4, 1)  # t6: "cpu f32[8192, 128256]"
  del t4
  t7 = torch.neg(t6)  # t7: "cpu f32[8192, 128256]"
  t8 = torch.unsqueeze(t5, 1)  # t8: "cpu i64[8192, 1]"
  t9 = torch.ne(t8, -100)  # t9: "cpu b8[8192, 1]"
  t10 = torch.where(t9, t8, 128256)  # t10: "cpu i64[8192, 1]"
  del t8
  t11 = torch_pad_prim_impl(t7, 0.0, [(0, 0, 0), (0, 1, 0)])  # t11: "cpu f32[8192, 128257]"
  del t7
  t12 = torch.take_along_dim(t11, t10, 1)  # t12: "cpu f32[8192, 1]"
  del t11, t10
  t13 = torch.sum(t12, None, False, dtype=None)  # t13: "cpu f32[]"
  del t12
  t14 = torch.sum(t9, None, False, dtype=None)  # t14: "cpu i64[]"
  del t9
  t15 = torch.true_divide(t13, t14)  # t15: "cpu f32[]"
  del t13
  return {'output': (t15,), 'flat_args': [hidden, weight, labels], 'flat_output': (t15,)}, ((t6, t5, t14, weight, hidden), ())


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
  t16, = cotangents
  # t16: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t6, t5, t14, weight, hidden, = C0
  # t6: "cpu f32[8192, 128256]"
  # t5: "cpu i64[8192]"
  # t14: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t17 = torch_nll_loss_backward_impl(t16, t6, t5, None, 'mean', -100, t14)  # t17: "cpu f32[8192, 128256]"
  del t16, t5, t14
  t18 = torch.torch.ops.aten._log_softmax_backward_data(t17, t6, 1, torch.float32)  # t18: "cpu f32[8192, 128256]"
  del t17, t6
  t19 = torch_prims_reshape_impl(t18, (2, 4096, 128256))  # t19: "cpu f32[2, 4096, 128256]"
  del t18
  t20 = torch.reshape(t19, (-1, 128256))  # t20: "cpu f32[8192, 128256]"
  t21 = torch.matmul(t20, weight)  # t21: "cpu f32[8192, 4096]"
  del t20, weight
  t22 = torch.reshape(t21, (2, 4096, 4096))  # t22: "cpu f32[2, 4096, 4096]"
  del t21
  t23 = torch.reshape(t19, (-1, 128256))  # t23: "cpu f32[8192, 128256]"
  del t19
  t24 = torch.permute(t23, (1, 0))  # t24: "cpu f32[128256, 8192]"
  del t23
  t25 = torch.reshape(hidden, (-1, 4096))  # t25: "cpu f32[8192, 4096]"
  del hidden
  t26 = torch.matmul(t24, t25)  # t26: "cpu f32[128256, 4096]"
  del t24, t25
  return (t22, t26, None)
