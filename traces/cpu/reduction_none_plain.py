# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def reduction_none(hidden, weight, labels):
#         """One loss a token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
#
# Saved for backward, beside the arguments and views of them:
#     t3: f32[8192, 128256], 4,202,692,608 bytes

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

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
  del t0
  t2 = Tensor.view(labels, -1)  # t2: "cpu i64[8192]"
  t3 = torch.nn.functional.log_softmax(t1, 1)  # t3: "cpu f32[8192, 128256]"
  del t1
  t4 = torch.neg(t3)  # t4: "cpu f32[8192, 128256]"
  t5 = torch.unsqueeze(t2, 1)  # t5: "cpu i64[8192, 1]"
  t6 = torch.ne(t5, -100)  # t6: "cpu b8[8192, 1]"
  t7 = torch.where(t6, t5, 128256)  # t7: "cpu i64[8192, 1]"
  del t6, t5
  t8 = torch_pad_prim_impl(t4, 0.0, [(0, 0, 0), (0, 1, 0)])  # t8: "cpu f32[8192, 128257]"
  del t4
  t9 = torch.take_along_dim(t8, t7, 1)  # t9: "cpu f32[8192, 1]"
  del t8, t7
  t10 = torch.squeeze(t9, 1)  # t10: "cpu f32[8192]"
  del t9
  return {'output': (t10,), 'flat_args': [hidden, weight, labels], 'flat_output': (t10,)}, ((t3, t2, weight, hidden), ())


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
  t11, = cotangents
  # t11: "cpu f32[8192]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t2, weight, hidden, = C0
  # t3: "cpu f32[8192, 128256]"
  # t2: "cpu i64[8192]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t12 = torch_nll_loss_backward_impl(t11, t3, t2, None, 'none', -100, None)  # t12: "cpu f32[8192, 128256]"
  del t11, t2
  t13 = torch.torch.ops.aten._log_softmax_backward_data(t12, t3, 1, torch.float32)  # t13: "cpu f32[8192, 128256]"
  del t12, t3
  t14 = torch_prims_reshape_impl(t13, (2, 4096, 128256))  # t14: "cpu f32[2, 4096, 128256]"
  del t13
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
  return (t17, t21, None)
