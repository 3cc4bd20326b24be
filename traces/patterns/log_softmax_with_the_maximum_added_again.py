# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_softmax_with_the_maximum_added_again(hidden, weight, tokens):
#         logits = F.linear(hidden, weight)
#         row_max = logits.amax(-1, keepdim=True)
#         log_probs = logits - ((logits - row_max).exp().sum(-1, keepdim=True).log() + row_max)
#         return log_probs.gather(-1, tokens[..., None]).mean()
#
# not fused, because the logits are changed between the linear and the loss (by sub)
# Saved for backward, beside the arguments and views of them:
#     t14: i64[2, 4096, 1], 65,536 bytes
#     t9: f32[2, 4096, 1], 32,768 bytes
#     t8: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t2: f32[2, 4096], 32,768 bytes
#     t1: f32[2, 4096, 128256], 4,202,692,608 bytes

# Constructed by Delete Last Used
import torch
from torch import Tensor
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # row_max = logits.amax(-1, keepdim=True)
  t1 = shallow_copy(t0)  # t1: "cpu f32[2, 4096, 128256]"
  t2 = torch.amax(t1, (2,))  # t2: "cpu f32[2, 4096]"
  t3 = torch.unsqueeze(t2, 2)  # t3: "cpu f32[2, 4096, 1]"
  t4 = Tensor.expand(t3, [2, 4096, 1])  # t4: "cpu f32[2, 4096, 1]"
  del t3
  t5 = shallow_copy(t4)  # t5: "cpu f32[2, 4096, 1]"
  del t4

  # log_probs = logits - ((logits - row_max).exp().sum(-1, keepdim=True).log() + row_max)
  t6 = Tensor.expand(t5, (2, 4096, 128256))  # t6: "cpu f32[2, 4096, 128256]"
  t7 = torch.sub(t0, t6, alpha=1)  # t7: "cpu f32[2, 4096, 128256]"
  del t6

  # return single_device_symbol(*args, **kwargs)
  t8 = torch.exp(t7)  # t8: "cpu f32[2, 4096, 128256]"
  del t7

  # log_probs = logits - ((logits - row_max).exp().sum(-1, keepdim=True).log() + row_max)
  t9 = torch.sum(t8, -1, True, dtype=None)  # t9: "cpu f32[2, 4096, 1]"
  t10 = torch.log(t9)  # t10: "cpu f32[2, 4096, 1]"
  t11 = torch.add(t10, t5, alpha=1)  # t11: "cpu f32[2, 4096, 1]"
  del t10, t5
  t12 = Tensor.expand(t11, (2, 4096, 128256))  # t12: "cpu f32[2, 4096, 128256]"
  del t11
  t13 = torch.sub(t0, t12, alpha=1)  # t13: "cpu f32[2, 4096, 128256]"
  del t0, t12

  # return log_probs.gather(-1, tokens[..., None]).mean()
  t14 = Tensor.__getitem__(tokens, (..., None))  # t14: "cpu i64[2, 4096, 1]"
  t15 = torch.gather(t13, 2, t14)  # t15: "cpu f32[2, 4096, 1]"
  del t13
  t16 = shallow_copy(t15)  # t16: "cpu f32[2, 4096, 1]"
  del t15
  t17 = torch.sum(t16, (0, 1, 2))  # t17: "cpu f32[]"
  del t16
  t18 = torch_div_prim_impl(t17, 8192.0)  # t18: "cpu f32[]"
  del t17
  t19 = shallow_copy(t18)  # t19: "cpu f32[]"
  del t18
  return {'output': (t19,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t19,)}, ((t14, t9, t8, t2, t1, weight, hidden), ())


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
  t20, = cotangents
  # t20: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t14, t9, t8, t2, t1, weight, hidden, = C0
  # t14: "cpu i64[2, 4096, 1]"
  # t9: "cpu f32[2, 4096, 1]"
  # t8: "cpu f32[2, 4096, 128256]"
  # t2: "cpu f32[2, 4096]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t21 = torch.true_divide(t20, 8192.0)  # t21: "cpu f32[]"
  del t20
  t22 = torch.unsqueeze(t21, 0)  # t22: "cpu f32[1]"
  del t21
  t23 = torch.unsqueeze(t22, 1)  # t23: "cpu f32[1, 1]"
  del t22
  t24 = torch.unsqueeze(t23, 2)  # t24: "cpu f32[1, 1, 1]"
  del t23
  t25 = Tensor.expand(t24, [1, 1, 1])  # t25: "cpu f32[1, 1, 1]"
  del t24
  t26 = Tensor.expand(t25, (2, 4096, 1))  # t26: "cpu f32[2, 4096, 1]"
  del t25
  t27 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t27: "cpu f32[2, 4096, 128256]"
  t28 = torch.scatter_add(t27, 2, t14, t26)  # t28: "cpu f32[2, 4096, 128256]"
  del t27, t14, t26
  t29 = torch.neg(t28)  # t29: "cpu f32[2, 4096, 128256]"
  t30 = torch.sum(t29, (2,), False, dtype=None)  # t30: "cpu f32[2, 4096]"
  del t29
  t31 = torch.unsqueeze(t30, 2)  # t31: "cpu f32[2, 4096, 1]"
  del t30
  t32 = Tensor.expand(t31, [2, 4096, 1])  # t32: "cpu f32[2, 4096, 1]"
  del t31
  t33 = torch.true_divide(t32, t9)  # t33: "cpu f32[2, 4096, 1]"
  del t9
  t34 = Tensor.expand(t33, (2, 4096, 128256))  # t34: "cpu f32[2, 4096, 128256]"
  del t33
  t35 = Tensor.to(t34, copy=False, dtype=torch.float32)  # t35: "cpu f32[2, 4096, 128256]"
  del t34
  t36 = torch.mul(t35, t8)  # t36: "cpu f32[2, 4096, 128256]"
  del t35, t8
  t37 = torch.neg(t36)  # t37: "cpu f32[2, 4096, 128256]"
  t38 = torch.add(t28, t36, alpha=1)  # t38: "cpu f32[2, 4096, 128256]"
  del t28, t36
  t39 = torch.sum(t37, (2,), False, dtype=None)  # t39: "cpu f32[2, 4096]"
  del t37
  t40 = torch.unsqueeze(t39, 2)  # t40: "cpu f32[2, 4096, 1]"
  del t39
  t41 = Tensor.expand(t40, [2, 4096, 1])  # t41: "cpu f32[2, 4096, 1]"
  del t40
  t42 = torch.add(t32, t41, alpha=1)  # t42: "cpu f32[2, 4096, 1]"
  del t32, t41
  t43 = torch.sum(t42, (2,), False, dtype=None)  # t43: "cpu f32[2, 4096]"
  del t42
  t44 = torch.unsqueeze(t43, 2)  # t44: "cpu f32[2, 4096, 1]"
  del t43
  t45 = Tensor.expand(t44, [2, 4096, 1])  # t45: "cpu f32[2, 4096, 1]"
  del t44
  t46 = Tensor.expand(t45, (2, 4096, 128256))  # t46: "cpu f32[2, 4096, 128256]"
  del t45
  t47 = torch.unsqueeze(t2, 2)  # t47: "cpu f32[2, 4096, 1]"
  del t2
  t48 = Tensor.expand(t47, [2, 4096, 1])  # t48: "cpu f32[2, 4096, 1]"
  del t47
  t49 = Tensor.expand(t48, (2, 4096, 128256))  # t49: "cpu f32[2, 4096, 128256]"
  del t48
  t50 = torch.eq(t1, t49)  # t50: "cpu b8[2, 4096, 128256]"
  del t1, t49
  t51 = torch.sum(t50, (2,))  # t51: "cpu i64[2, 4096]"
  t52 = torch.unsqueeze(t51, 2)  # t52: "cpu b8[2, 4096, 1]"
  del t51
  t53 = Tensor.expand(t52, [2, 4096, 1])  # t53: "cpu b8[2, 4096, 1]"
  del t52
  t54 = torch.mul(t46, t50)  # t54: "cpu f32[2, 4096, 128256]"
  del t46, t50
  t55 = torch.true_divide(t54, t53)  # t55: "cpu f32[2, 4096, 128256]"
  del t54, t53
  t56 = Tensor.to(t55, torch.float32, copy=True)  # t56: "cpu f32[2, 4096, 128256]"
  del t55
  t57 = torch.add(t38, t56, alpha=1)  # t57: "cpu f32[2, 4096, 128256]"
  del t38, t56
  t58 = torch.reshape(t57, (-1, 128256))  # t58: "cpu f32[8192, 128256]"
  t59 = torch.matmul(t58, weight)  # t59: "cpu f32[8192, 4096]"
  del t58, weight
  t60 = torch.reshape(t59, (2, 4096, 4096))  # t60: "cpu f32[2, 4096, 4096]"
  del t59
  t61 = torch.reshape(t57, (-1, 128256))  # t61: "cpu f32[8192, 128256]"
  del t57
  t62 = torch.permute(t61, (1, 0))  # t62: "cpu f32[128256, 8192]"
  del t61
  t63 = torch.reshape(hidden, (-1, 4096))  # t63: "cpu f32[8192, 4096]"
  del hidden
  t64 = torch.matmul(t62, t63)  # t64: "cpu f32[128256, 4096]"
  del t62, t63
  return (t60, t64, None)
