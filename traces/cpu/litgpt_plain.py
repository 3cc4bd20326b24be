# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def litgpt(hidden, weight, labels):
#         """The usual training loop around litgpt's models: the logits keep the model's dtype."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
# Saved for backward, beside the arguments and views of them:
#     t3: f32[8192, 128256], 4,202,692,608 bytes
#     t11: i64[], 8 bytes

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

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
  del t0
  t2 = Tensor.view(labels, -1)  # t2: "cpu i64[8192]"
  t3 = torch.nn.functional.log_softmax(t1, 1)  # t3: "cpu f32[8192, 128256]"
  del t1
  t4 = torch.neg(t3)  # t4: "cpu f32[8192, 128256]"
  t5 = torch.unsqueeze(t2, 1)  # t5: "cpu i64[8192, 1]"
  t6 = torch.ne(t5, -100)  # t6: "cpu b8[8192, 1]"
  t7 = torch.where(t6, t5, 128256)  # t7: "cpu i64[8192, 1]"
  del t5
  t8 = torch_pad_prim_impl(t4, 0.0, [(0, 0, 0), (0, 1, 0)])  # t8: "cpu f32[8192, 128257]"
  del t4
  t9 = torch.take_along_dim(t8, t7, 1)  # t9: "cpu f32[8192, 1]"
  del t8, t7
  t10 = torch.sum(t9, None, False, dtype=None)  # t10: "cpu f32[]"
  del t9
  t11 = torch.sum(t6, None, False, dtype=None)  # t11: "cpu i64[]"
  del t6
  t12 = torch.true_divide(t10, t11)  # t12: "cpu f32[]"
  del t10
  return {'output': (t12,), 'flat_args': [hidden, weight, labels], 'flat_output': (t12,)}, ((t3, t2, t11, weight, hidden), ())


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
  t13, = cotangents
  # t13: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t2, t11, weight, hidden, = C0
  # t3: "cpu f32[8192, 128256]"
  # t2: "cpu i64[8192]"
  # t11: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t14 = torch_nll_loss_backward_impl(t13, t3, t2, None, 'mean', -100, t11)  # t14: "cpu f32[8192, 128256]"
  del t13, t2, t11
  t15 = torch.torch.ops.aten._log_softmax_backward_data(t14, t3, 1, torch.float32)  # t15: "cpu f32[8192, 128256]"
  del t14, t3
  t16 = torch_prims_reshape_impl(t15, (2, 4096, 128256))  # t16: "cpu f32[2, 4096, 128256]"
  del t15
  t17 = torch.reshape(t16, (-1, 128256))  # t17: "cpu f32[8192, 128256]"
  t18 = torch.matmul(t17, weight)  # t18: "cpu f32[8192, 4096]"
  del t17, weight
  t19 = torch.reshape(t18, (2, 4096, 4096))  # t19: "cpu f32[2, 4096, 4096]"
  del t18
  t20 = torch.reshape(t16, (-1, 128256))  # t20: "cpu f32[8192, 128256]"
  del t16
  t21 = torch.permute(t20, (1, 0))  # t21: "cpu f32[128256, 8192]"
  del t20
  t22 = torch.reshape(hidden, (-1, 4096))  # t22: "cpu f32[8192, 4096]"
  del hidden
  t23 = torch.matmul(t21, t22)  # t23: "cpu f32[128256, 4096]"
  del t21, t22
  return (t19, t23, None)
