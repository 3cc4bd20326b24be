# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probabilities_used(hidden, weight, labels):
#         log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
#         loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
#         return loss - 0.01 * log_probs.square().sum(-1).mean()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (log_probs is used by square)
# Saved for backward, beside the arguments and views of them:
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t2: f32[8192, 128256], 4,202,692,608 bytes
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

  # log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch.nn.functional.log_softmax(t0, -1)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
  t2 = torch_prims_reshape_impl(t1, (8192, 128256))  # t2: "cpu f32[8192, 128256]"
  t3 = Tensor.view(labels, -1)  # t3: "cpu i64[8192]"
  t4 = torch.neg(t2)  # t4: "cpu f32[8192, 128256]"
  t5 = torch.unsqueeze(t3, 1)  # t5: "cpu i64[8192, 1]"
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

  # return loss - 0.01 * log_probs.square().sum(-1).mean()
  t13 = torch.mul(t1, t1)  # t13: "cpu f32[2, 4096, 128256]"
  t14 = torch.sum(t13, -1, False, dtype=None)  # t14: "cpu f32[2, 4096]"
  del t13
  t15 = shallow_copy(t14)  # t15: "cpu f32[2, 4096]"
  del t14
  t16 = torch.sum(t15, (0, 1))  # t16: "cpu f32[]"
  del t15
  t17 = torch_div_prim_impl(t16, 8192.0)  # t17: "cpu f32[]"
  del t16
  t18 = shallow_copy(t17)  # t18: "cpu f32[]"
  del t17
  t19 = torch.mul(0.01, t18)  # t19: "cpu f32[]"
  del t18
  t20 = torch.sub(t12, t19, alpha=1)  # t20: "cpu f32[]"
  del t12, t19
  return {'output': (t20,), 'flat_args': [hidden, weight, labels], 'flat_output': (t20,)}, ((t1, t2, t3, t11, weight, hidden), ())


# Constructed by Delete Last Used
import torch
from torch import Tensor
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
  t21, = cotangents
  # t21: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t3, t11, weight, hidden, = C0
  # t1: "cpu f32[2, 4096, 128256]"
  # t2: "cpu f32[8192, 128256]"
  # t3: "cpu i64[8192]"
  # t11: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t22 = torch.neg(t21)  # t22: "cpu f32[]"
  t23 = torch.mul(0.01, t22)  # t23: "cpu f32[]"
  del t22
  t24 = torch.true_divide(t23, 8192.0)  # t24: "cpu f32[]"
  del t23
  t25 = torch.unsqueeze(t24, 0)  # t25: "cpu f32[1]"
  del t24
  t26 = torch.unsqueeze(t25, 1)  # t26: "cpu f32[1, 1]"
  del t25
  t27 = Tensor.expand(t26, [1, 1])  # t27: "cpu f32[1, 1]"
  del t26
  t28 = Tensor.expand(t27, (2, 4096))  # t28: "cpu f32[2, 4096]"
  del t27
  t29 = torch.unsqueeze(t28, 2)  # t29: "cpu f32[2, 4096, 1]"
  del t28
  t30 = Tensor.expand(t29, (2, 4096, 128256))  # t30: "cpu f32[2, 4096, 128256]"
  del t29
  t31 = Tensor.to(t30, copy=False, dtype=torch.float32)  # t31: "cpu f32[2, 4096, 128256]"
  del t30
  t32 = torch.mul(t1, t31)  # t32: "cpu f32[2, 4096, 128256]"
  t33 = torch.mul(t1, t31)  # t33: "cpu f32[2, 4096, 128256]"
  del t31
  t34 = torch.add(t32, t33, alpha=1)  # t34: "cpu f32[2, 4096, 128256]"
  del t32, t33
  t35 = torch_nll_loss_backward_impl(t21, t2, t3, None, 'mean', -100, t11)  # t35: "cpu f32[8192, 128256]"
  del t21, t2, t3, t11
  t36 = torch_prims_reshape_impl(t35, (2, 4096, 128256))  # t36: "cpu f32[2, 4096, 128256]"
  del t35
  t37 = torch.add(t34, t36, alpha=1)  # t37: "cpu f32[2, 4096, 128256]"
  del t34, t36
  t38 = torch.torch.ops.aten._log_softmax_backward_data(t37, t1, -1, torch.float32)  # t38: "cpu f32[2, 4096, 128256]"
  del t37, t1
  t39 = torch.reshape(t38, (-1, 128256))  # t39: "cpu f32[8192, 128256]"
  t40 = torch.matmul(t39, weight)  # t40: "cpu f32[8192, 4096]"
  del t39, weight
  t41 = torch.reshape(t40, (2, 4096, 4096))  # t41: "cpu f32[2, 4096, 4096]"
  del t40
  t42 = torch.reshape(t38, (-1, 128256))  # t42: "cpu f32[8192, 128256]"
  del t38
  t43 = torch.permute(t42, (1, 0))  # t43: "cpu f32[128256, 8192]"
  del t42
  t44 = torch.reshape(hidden, (-1, 4096))  # t44: "cpu f32[8192, 4096]"
  del hidden
  t45 = torch.matmul(t43, t44)  # t45: "cpu f32[128256, 4096]"
  del t43, t44
  return (t41, t45, None)
