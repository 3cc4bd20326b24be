# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def labels_of_one_sequence_for_all(hidden, weight, tokens):
#         return Categorical(logits=F.linear(hidden, weight), validate_args=False).log_prob(tokens[:1]).mean()
#
# not fused, because its logits are gathered, but not into the log-probability of one label a row (labels of shape (1, 4096, 1) for logits of shape (2, 4096, 128256))
# Saved for backward, beside the arguments and views of them:
#     t22: i64[2, 4096, 1], 65,536 bytes
#     t19: i64[1, 4096, 1], 32,768 bytes
#     t16: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t12: f32[2, 4096, 1], 32,768 bytes
#     t11: f32[2, 4096, 128256], 4,202,692,608 bytes
#     t7: b8[2, 4096, 1], 8,192 bytes
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

  # return Categorical(logits=F.linear(hidden, weight), validate_args=False).log_prob(tokens[:1]).mean()
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # self.logits = logits - logits.logsumexp(dim=-1, keepdim=True)
  t1 = shallow_copy(t0)  # t1: "cpu f32[2, 4096, 128256]"
  t2 = torch.amax(t1, (2,))  # t2: "cpu f32[2, 4096]"
  t3 = torch.unsqueeze(t2, 2)  # t3: "cpu f32[2, 4096, 1]"
  t4 = Tensor.expand(t3, [2, 4096, 1])  # t4: "cpu f32[2, 4096, 1]"
  del t3
  t5 = shallow_copy(t4)  # t5: "cpu f32[2, 4096, 1]"
  del t4
  t6 = torch.abs(t5)  # t6: "cpu f32[2, 4096, 1]"
  t7 = torch.eq(t6, float('inf'))  # t7: "cpu b8[2, 4096, 1]"
  del t6
  t8 = torch.where(t7, 0.0, t5)  # t8: "cpu f32[2, 4096, 1]"
  del t5
  t9 = Tensor.expand(t8, (2, 4096, 128256))  # t9: "cpu f32[2, 4096, 128256]"
  t10 = torch.sub(t0, t9, alpha=1)  # t10: "cpu f32[2, 4096, 128256]"
  del t9
  t11 = torch.exp(t10)  # t11: "cpu f32[2, 4096, 128256]"
  del t10
  t12 = torch.sum(t11, -1, True, dtype=None)  # t12: "cpu f32[2, 4096, 1]"
  t13 = torch.log(t12)  # t13: "cpu f32[2, 4096, 1]"
  t14 = torch.add(t13, t8, alpha=1)  # t14: "cpu f32[2, 4096, 1]"
  del t13, t8
  t15 = Tensor.expand(t14, (2, 4096, 128256))  # t15: "cpu f32[2, 4096, 128256]"
  del t14
  t16 = torch.sub(t0, t15, alpha=1)  # t16: "cpu f32[2, 4096, 128256]"
  del t0, t15

  # return Categorical(logits=F.linear(hidden, weight), validate_args=False).log_prob(tokens[:1]).mean()
  t17 = Tensor.__getitem__(tokens, slice(None,1,None))  # t17: "cpu i64[1, 4096]"

  # value = value.long().unsqueeze(-1)
  t18 = Tensor.to(t17, copy=False, dtype=torch.int64, memory_format=_torch_memory_format)  # t18: "cpu i64[1, 4096]"
  del t17
  t19 = torch.unsqueeze(t18, -1)  # t19: "cpu i64[1, 4096, 1]"
  del t18

  # value, log_pmf = torch.broadcast_tensors(value, self.logits)
  (t20, t21) = torch.broadcast_tensors(t19, t16)

  # value = value[..., :1]
  t22 = Tensor.__getitem__(t20, (..., slice(None,1,None)))  # t22: "cpu i64[2, 4096, 1]"
  del t20

  # return log_pmf.gather(-1, value).squeeze(-1)
  t23 = torch.gather(t21, 2, t22)  # t23: "cpu f32[2, 4096, 1]"
  del t21
  t24 = torch.squeeze(t23, (2,))  # t24: "cpu f32[2, 4096]"
  del t23

  # return Categorical(logits=F.linear(hidden, weight), validate_args=False).log_prob(tokens[:1]).mean()
  t25 = shallow_copy(t24)  # t25: "cpu f32[2, 4096]"
  del t24
  t26 = torch.sum(t25, (0, 1))  # t26: "cpu f32[]"
  del t25
  t27 = torch_div_prim_impl(t26, 8192.0)  # t27: "cpu f32[]"
  del t26
  t28 = shallow_copy(t27)  # t28: "cpu f32[]"
  del t27
  return {'output': (t28,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t28,)}, ((t22, t19, t16, t12, t11, t7, t2, t1, weight, hidden), ())


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
  t29, = cotangents
  # t29: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t22, t19, t16, t12, t11, t7, t2, t1, weight, hidden, = C0
  # t22: "cpu i64[2, 4096, 1]"
  # t19: "cpu i64[1, 4096, 1]"
  # t16: "cpu f32[2, 4096, 128256]"
  # t12: "cpu f32[2, 4096, 1]"
  # t11: "cpu f32[2, 4096, 128256]"
  # t7: "cpu b8[2, 4096, 1]"
  # t2: "cpu f32[2, 4096]"
  # t1: "cpu f32[2, 4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t30 = torch.true_divide(t29, 8192.0)  # t30: "cpu f32[]"
  del t29
  t31 = torch.unsqueeze(t30, 0)  # t31: "cpu f32[1]"
  del t30
  t32 = torch.unsqueeze(t31, 1)  # t32: "cpu f32[1, 1]"
  del t31
  t33 = Tensor.expand(t32, [1, 1])  # t33: "cpu f32[1, 1]"
  del t32
  t34 = Tensor.expand(t33, (2, 4096))  # t34: "cpu f32[2, 4096]"
  del t33
  t35 = torch.unsqueeze(t34, 2)  # t35: "cpu f32[2, 4096, 1]"
  del t34
  t36 = Tensor.expand(t35, [2, 4096, 1])  # t36: "cpu f32[2, 4096, 1]"
  del t35
  t37 = torch.full((2, 4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t37: "cpu f32[2, 4096, 128256]"
  t38 = torch.scatter_add(t37, 2, t22, t36)  # t38: "cpu f32[2, 4096, 128256]"
  del t37, t22, t36
  t39 = torch.zeros(2, 4096, 128256, device=torch.device("cpu"), dtype=torch.int64)  # t39: "cpu i64[2, 4096, 128256]"
  (_, t40) = broadcast_tensors_vjp(((t19, t16), {}), t39, t38)
  del t19, t16, t39, t38
  t41 = torch.neg(t40)  # t41: "cpu f32[2, 4096, 128256]"
  t42 = torch.sum(t41, (2,), False, dtype=None)  # t42: "cpu f32[2, 4096]"
  del t41
  t43 = torch.unsqueeze(t42, 2)  # t43: "cpu f32[2, 4096, 1]"
  del t42
  t44 = Tensor.expand(t43, [2, 4096, 1])  # t44: "cpu f32[2, 4096, 1]"
  del t43
  t45 = torch.true_divide(t44, t12)  # t45: "cpu f32[2, 4096, 1]"
  del t12
  t46 = Tensor.expand(t45, (2, 4096, 128256))  # t46: "cpu f32[2, 4096, 128256]"
  del t45
  t47 = Tensor.to(t46, copy=False, dtype=torch.float32)  # t47: "cpu f32[2, 4096, 128256]"
  del t46
  t48 = torch.mul(t47, t11)  # t48: "cpu f32[2, 4096, 128256]"
  del t47, t11
  t49 = torch.neg(t48)  # t49: "cpu f32[2, 4096, 128256]"
  t50 = torch.add(t40, t48, alpha=1)  # t50: "cpu f32[2, 4096, 128256]"
  del t40, t48
  t51 = torch.sum(t49, (2,), False, dtype=None)  # t51: "cpu f32[2, 4096]"
  del t49
  t52 = torch.unsqueeze(t51, 2)  # t52: "cpu f32[2, 4096, 1]"
  del t51
  t53 = Tensor.expand(t52, [2, 4096, 1])  # t53: "cpu f32[2, 4096, 1]"
  del t52
  t54 = torch.add(t44, t53, alpha=1)  # t54: "cpu f32[2, 4096, 1]"
  del t44, t53
  t55 = torch.where(t7, 0, t54)  # t55: "cpu f32[2, 4096, 1]"
  del t7, t54
  t56 = torch.sum(t55, (2,), False, dtype=None)  # t56: "cpu f32[2, 4096]"
  del t55
  t57 = torch.unsqueeze(t56, 2)  # t57: "cpu f32[2, 4096, 1]"
  del t56
  t58 = Tensor.expand(t57, [2, 4096, 1])  # t58: "cpu f32[2, 4096, 1]"
  del t57
  t59 = Tensor.expand(t58, (2, 4096, 128256))  # t59: "cpu f32[2, 4096, 128256]"
  del t58
  t60 = torch.unsqueeze(t2, 2)  # t60: "cpu f32[2, 4096, 1]"
  del t2
  t61 = Tensor.expand(t60, [2, 4096, 1])  # t61: "cpu f32[2, 4096, 1]"
  del t60
  t62 = Tensor.expand(t61, (2, 4096, 128256))  # t62: "cpu f32[2, 4096, 128256]"
  del t61
  t63 = torch.eq(t1, t62)  # t63: "cpu b8[2, 4096, 128256]"
  del t1, t62
  t64 = torch.sum(t63, (2,))  # t64: "cpu i64[2, 4096]"
  t65 = torch.unsqueeze(t64, 2)  # t65: "cpu b8[2, 4096, 1]"
  del t64
  t66 = Tensor.expand(t65, [2, 4096, 1])  # t66: "cpu b8[2, 4096, 1]"
  del t65
  t67 = torch.mul(t59, t63)  # t67: "cpu f32[2, 4096, 128256]"
  del t59, t63
  t68 = torch.true_divide(t67, t66)  # t68: "cpu f32[2, 4096, 128256]"
  del t67, t66
  t69 = Tensor.to(t68, torch.float32, copy=True)  # t69: "cpu f32[2, 4096, 128256]"
  del t68
  t70 = torch.add(t50, t69, alpha=1)  # t70: "cpu f32[2, 4096, 128256]"
  del t50, t69
  t71 = torch.reshape(t70, (-1, 128256))  # t71: "cpu f32[8192, 128256]"
  t72 = torch.matmul(t71, weight)  # t72: "cpu f32[8192, 4096]"
  del t71, weight
  t73 = torch.reshape(t72, (2, 4096, 4096))  # t73: "cpu f32[2, 4096, 4096]"
  del t72
  t74 = torch.reshape(t70, (-1, 128256))  # t74: "cpu f32[8192, 128256]"
  del t70
  t75 = torch.permute(t74, (1, 0))  # t75: "cpu f32[128256, 8192]"
  del t74
  t76 = torch.reshape(hidden, (-1, 4096))  # t76: "cpu f32[8192, 4096]"
  del hidden
  t77 = torch.matmul(t75, t76)  # t77: "cpu f32[128256, 4096]"
  del t75, t76
  return (t73, t77, None)
