# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probabilities_used(hidden, weight, labels):
#         log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
#         loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
#         return loss - 0.01 * (log_probs.exp() * log_probs).sum(-1).mean()
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (log_probs is used by exp)
# Saved for backward, beside the arguments and views of them:
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t13: f32[2, 4096, 128256], 4,202,692,608 bytes
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

  # return single_device_symbol(*args, **kwargs)
  t13 = torch.exp(t1)  # t13: "cpu f32[2, 4096, 128256]"

  # return loss - 0.01 * (log_probs.exp() * log_probs).sum(-1).mean()
  t14 = torch.mul(t13, t1)  # t14: "cpu f32[2, 4096, 128256]"
  t15 = torch.sum(t14, -1, False, dtype=None)  # t15: "cpu f32[2, 4096]"
  del t14
  t16 = shallow_copy(t15)  # t16: "cpu f32[2, 4096]"
  del t15
  t17 = torch.sum(t16, (0, 1))  # t17: "cpu f32[]"
  del t16
  t18 = torch_div_prim_impl(t17, 8192.0)  # t18: "cpu f32[]"
  del t17
  t19 = shallow_copy(t18)  # t19: "cpu f32[]"
  del t18
  t20 = torch.mul(0.01, t19)  # t20: "cpu f32[]"
  del t19
  t21 = torch.sub(t12, t20, alpha=1)  # t21: "cpu f32[]"
  del t12, t20
  return {'output': (t21,), 'flat_args': [hidden, weight, labels], 'flat_output': (t21,)}, ((t1, t13, t2, t3, t11, weight, hidden), ())


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
  t22, = cotangents
  # t22: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t13, t2, t3, t11, weight, hidden, = C0
  # t1: "cpu f32[2, 4096, 128256]"
  # t13: "cpu f32[2, 4096, 128256]"
  # t2: "cpu f32[8192, 128256]"
  # t3: "cpu i64[8192]"
  # t11: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t23 = torch.neg(t22)  # t23: "cpu f32[]"
  t24 = torch.mul(0.01, t23)  # t24: "cpu f32[]"
  del t23
  t25 = torch.true_divide(t24, 8192.0)  # t25: "cpu f32[]"
  del t24
  t26 = torch.unsqueeze(t25, 0)  # t26: "cpu f32[1]"
  del t25
  t27 = torch.unsqueeze(t26, 1)  # t27: "cpu f32[1, 1]"
  del t26
  t28 = Tensor.expand(t27, [1, 1])  # t28: "cpu f32[1, 1]"
  del t27
  t29 = Tensor.expand(t28, (2, 4096))  # t29: "cpu f32[2, 4096]"
  del t28
  t30 = torch.unsqueeze(t29, 2)  # t30: "cpu f32[2, 4096, 1]"
  del t29
  t31 = Tensor.expand(t30, (2, 4096, 128256))  # t31: "cpu f32[2, 4096, 128256]"
  del t30
  t32 = Tensor.to(t31, copy=False, dtype=torch.float32)  # t32: "cpu f32[2, 4096, 128256]"
  del t31
  t33 = torch.mul(t1, t32)  # t33: "cpu f32[2, 4096, 128256]"
  t34 = torch.mul(t13, t32)  # t34: "cpu f32[2, 4096, 128256]"
  del t32
  t35 = torch.mul(t33, t13)  # t35: "cpu f32[2, 4096, 128256]"
  del t33, t13
  t36 = torch.add(t34, t35, alpha=1)  # t36: "cpu f32[2, 4096, 128256]"
  del t34, t35
  t37 = torch_nll_loss_backward_impl(t22, t2, t3, None, 'mean', -100, t11)  # t37: "cpu f32[8192, 128256]"
  del t22, t2, t3, t11
  t38 = torch_prims_reshape_impl(t37, (2, 4096, 128256))  # t38: "cpu f32[2, 4096, 128256]"
  del t37
  t39 = torch.add(t36, t38, alpha=1)  # t39: "cpu f32[2, 4096, 128256]"
  del t36, t38
  t40 = torch.torch.ops.aten._log_softmax_backward_data(t39, t1, -1, torch.float32)  # t40: "cpu f32[2, 4096, 128256]"
  del t39, t1
  t41 = torch.reshape(t40, (-1, 128256))  # t41: "cpu f32[8192, 128256]"
  t42 = torch.matmul(t41, weight)  # t42: "cpu f32[8192, 4096]"
  del t41, weight
  t43 = torch.reshape(t42, (2, 4096, 4096))  # t43: "cpu f32[2, 4096, 4096]"
  del t42
  t44 = torch.reshape(t40, (-1, 128256))  # t44: "cpu f32[8192, 128256]"
  del t40
  t45 = torch.permute(t44, (1, 0))  # t45: "cpu f32[128256, 8192]"
  del t44
  t46 = torch.reshape(hidden, (-1, 4096))  # t46: "cpu f32[8192, 4096]"
  del hidden
  t47 = torch.matmul(t45, t46)  # t47: "cpu f32[128256, 4096]"
  del t45, t46
  return (t43, t47, None)
