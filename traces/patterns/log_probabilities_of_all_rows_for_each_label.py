# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def log_probabilities_of_all_rows_for_each_label(hidden, weight, tokens):
#         return -F.linear(hidden[0], weight).log_softmax(-1).index_select(-1, tokens[0]).diagonal().mean()
#
# not fused, because its logits are gathered, but not into the log-probability of one label a row (labels of shape (4096,) for logits of shape (4096, 128256))
# Saved for backward, beside the arguments and views of them:
#     t16: i64[4096], 32,768 bytes
#     t4: i64[4096], 32,768 bytes
#     t3: f32[4096, 128256], 2,101,346,304 bytes
#     t1: f32[4096, 4096], 67,108,864 bytes

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

  # return -F.linear(hidden[0], weight).log_softmax(-1).index_select(-1, tokens[0]).diagonal().mean()
  t0 = torch_slice_prim_impl(hidden, [0, 0, 0], [1, 4096, 4096], [1, 1, 1])  # t0: "cpu f32[1, 4096, 4096]"
  t1 = torch.squeeze(t0, (0,))  # t1: "cpu f32[4096, 4096]"
  del t0
  t2 = torch.nn.functional.linear(t1, weight, None)  # t2: "cpu f32[4096, 128256]"
  t3 = torch.nn.functional.log_softmax(t2, -1)  # t3: "cpu f32[4096, 128256]"
  del t2
  t4 = Tensor.__getitem__(tokens, 0)  # t4: "cpu i64[4096]"
  t5 = torch.index_select(t3, 1, t4)  # t5: "cpu f32[4096, 4096]"
  t6 = torch.arange(start=0, step=1, end=4096, device=torch.device("cpu"), dtype=torch.int64)  # t6: "cpu i64[4096]"
  t7 = torch.arange(start=0, step=1, end=4096, device=torch.device("cpu"), dtype=torch.int64)  # t7: "cpu i64[4096]"
  t8 = torch.lt(t6, 0)  # t8: "cpu b8[4096]"
  t9 = torch.where(t8, 4096, 0)  # t9: "cpu i64[4096]"
  del t8
  t10 = torch.add(t6, t9)  # t10: "cpu i64[4096]"
  del t6, t9
  t11 = torch.lt(t7, 0)  # t11: "cpu b8[4096]"
  t12 = torch.where(t11, 4096, 0)  # t12: "cpu i64[4096]"
  del t11
  t13 = torch.add(t7, t12)  # t13: "cpu i64[4096]"
  del t7, t12
  t14 = torch_prims_reshape_impl(t5, (16777216,))  # t14: "cpu f32[16777216]"
  del t5
  t15 = torch.mul(t10, 4096)  # t15: "cpu i64[4096]"
  del t10
  t16 = torch.add(t15, t13)  # t16: "cpu i64[4096]"
  del t15, t13
  t17 = torch.index_select(t14, 0, t16)  # t17: "cpu f32[4096]"
  del t14
  t18 = shallow_copy(t17)  # t18: "cpu f32[4096]"
  del t17
  t19 = torch.sum(t18, (0,))  # t19: "cpu f32[]"
  del t18
  t20 = torch_div_prim_impl(t19, 4096.0)  # t20: "cpu f32[]"
  del t19
  t21 = shallow_copy(t20)  # t21: "cpu f32[]"
  del t20
  t22 = torch.neg(t21)  # t22: "cpu f32[]"
  del t21
  return {'output': (t22,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t22,)}, ((t16, t4, t3, weight, t1), ())


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
  t23, = cotangents
  # t23: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t16, t4, t3, weight, t1, = C0
  # t16: "cpu i64[4096]"
  # t4: "cpu i64[4096]"
  # t3: "cpu f32[4096, 128256]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu f32[4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t24 = torch.neg(t23)  # t24: "cpu f32[]"
  del t23
  t25 = torch.true_divide(t24, 4096.0)  # t25: "cpu f32[]"
  del t24
  t26 = torch.unsqueeze(t25, 0)  # t26: "cpu f32[1]"
  del t25
  t27 = Tensor.expand(t26, [1])  # t27: "cpu f32[1]"
  del t26
  t28 = Tensor.expand(t27, (4096,))  # t28: "cpu f32[4096]"
  del t27
  t29 = torch.full((16777216,), 0, device=torch.device("cpu"), dtype=torch.float32)  # t29: "cpu f32[16777216]"
  t30 = torch.index_add(t29, 0, t16, t28)  # t30: "cpu f32[16777216]"
  del t29, t16, t28
  t31 = torch_prims_reshape_impl(t30, (4096, 4096))  # t31: "cpu f32[4096, 4096]"
  del t30
  t32 = torch.full((4096, 128256), 0, device=torch.device("cpu"), dtype=torch.float32)  # t32: "cpu f32[4096, 128256]"
  t33 = torch.index_add(t32, 1, t4, t31)  # t33: "cpu f32[4096, 128256]"
  del t32, t4, t31
  t34 = torch.torch.ops.aten._log_softmax_backward_data(t33, t3, -1, torch.float32)  # t34: "cpu f32[4096, 128256]"
  del t33, t3
  t35 = torch.reshape(t34, (-1, 128256))  # t35: "cpu f32[4096, 128256]"
  t36 = torch.matmul(t35, weight)  # t36: "cpu f32[4096, 4096]"
  del t35, weight
  t37 = torch.reshape(t36, (4096, 4096))  # t37: "cpu f32[4096, 4096]"
  del t36
  t38 = torch.reshape(t34, (-1, 128256))  # t38: "cpu f32[4096, 128256]"
  del t34
  t39 = torch.permute(t38, (1, 0))  # t39: "cpu f32[128256, 4096]"
  del t38
  t40 = torch.reshape(t1, (-1, 4096))  # t40: "cpu f32[4096, 4096]"
  del t1
  t41 = torch.matmul(t39, t40)  # t41: "cpu f32[128256, 4096]"
  del t39, t40
  t42 = torch.unsqueeze(t37, 0)  # t42: "cpu f32[1, 4096, 4096]"
  del t37
  t43 = Tensor.expand(t42, [1, 4096, 4096])  # t43: "cpu f32[1, 4096, 4096]"
  del t42
  t44 = torch_pad_prim_impl(t43, 0.0, ((0, 1, 0), (0, 0, 0), (0, 0, 0)))  # t44: "cpu f32[2, 4096, 4096]"
  del t43
  return (t44, t41, None)
