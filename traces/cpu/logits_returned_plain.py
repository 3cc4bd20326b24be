# Printed by: python traces/regenerate.py --device cpu
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def logits_returned(hidden, weight, labels):
#         """The caller wants the logits as well, so cross-entropy stands alone."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits
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

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
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
  return {'output': (t12, t0), 'flat_args': [hidden, weight, labels], 'flat_output': (t12, t0)}, ((t3, t2, t11, weight, hidden), ())


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
  t13, t14, = cotangents
  # t13: "cpu f32[]"
  # t14: "cpu f32[2, 4096, 128256]"
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
  t15 = torch_nll_loss_backward_impl(t13, t3, t2, None, 'mean', -100, t11)  # t15: "cpu f32[8192, 128256]"
  del t13, t2, t11
  t16 = torch.torch.ops.aten._log_softmax_backward_data(t15, t3, 1, torch.float32)  # t16: "cpu f32[8192, 128256]"
  del t15, t3
  t17 = torch_prims_reshape_impl(t16, (2, 4096, 128256))  # t17: "cpu f32[2, 4096, 128256]"
  del t16
  t18 = torch.add(t14, t17, alpha=1)  # t18: "cpu f32[2, 4096, 128256]"
  del t14, t17
  t19 = torch.reshape(t18, (-1, 128256))  # t19: "cpu f32[8192, 128256]"
  t20 = torch.matmul(t19, weight)  # t20: "cpu f32[8192, 4096]"
  del t19, weight
  t21 = torch.reshape(t20, (2, 4096, 4096))  # t21: "cpu f32[2, 4096, 4096]"
  del t20
  t22 = torch.reshape(t18, (-1, 128256))  # t22: "cpu f32[8192, 128256]"
  del t18
  t23 = torch.permute(t22, (1, 0))  # t23: "cpu f32[128256, 8192]"
  del t22
  t24 = torch.reshape(hidden, (-1, 4096))  # t24: "cpu f32[8192, 4096]"
  del hidden
  t25 = torch.matmul(t23, t24)  # t25: "cpu f32[128256, 4096]"
  del t23, t24
  return (t21, t25, None)
