# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def nll_loss_of_logits(hidden, weight, labels):
#         return F.nll_loss(F.linear(hidden, weight).view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
#
# not fused, because the input of nll_loss is not a log_softmax
# Saved for backward, beside the arguments and views of them:
#     t1: f32[8192, 128256], 4,202,692,608 bytes
#     t10: i64[], 8 bytes

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

  # return F.nll_loss(F.linear(hidden, weight).view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch_prims_reshape_impl(t0, (8192, 128256))  # t1: "cpu f32[8192, 128256]"
  del t0
  t2 = Tensor.view(labels, -1)  # t2: "cpu i64[8192]"
  t3 = torch.neg(t1)  # t3: "cpu f32[8192, 128256]"
  t4 = torch.unsqueeze(t2, 1)  # t4: "cpu i64[8192, 1]"
  t5 = torch.ne(t4, -100)  # t5: "cpu b8[8192, 1]"
  t6 = torch.where(t5, t4, 128256)  # t6: "cpu i64[8192, 1]"
  del t4
  t7 = torch_pad_prim_impl(t3, 0.0, [(0, 0, 0), (0, 1, 0)])  # t7: "cpu f32[8192, 128257]"
  del t3
  t8 = torch.take_along_dim(t7, t6, 1)  # t8: "cpu f32[8192, 1]"
  del t7, t6
  t9 = torch.sum(t8, None, False, dtype=None)  # t9: "cpu f32[]"
  del t8
  t10 = torch.sum(t5, None, False, dtype=None)  # t10: "cpu i64[]"
  del t5
  t11 = torch.true_divide(t9, t10)  # t11: "cpu f32[]"
  del t9
  return {'output': (t11,), 'flat_args': [hidden, weight, labels], 'flat_output': (t11,)}, ((t1, t2, t10, weight, hidden), ())


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
  t12, = cotangents
  # t12: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t10, weight, hidden, = C0
  # t1: "cpu f32[8192, 128256]"
  # t2: "cpu i64[8192]"
  # t10: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t13 = torch_nll_loss_backward_impl(t12, t1, t2, None, 'mean', -100, t10)  # t13: "cpu f32[8192, 128256]"
  del t12, t1, t2, t10
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
