# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def preference_loss(hidden, weight, tokens):
#         """DPO without a reference: a loss of sums of log-probabilities."""
#         log_probs = F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
#         chosen, rejected = log_probs.sum(-1).chunk(2)
#         return -F.logsigmoid(0.1 * (chosen - rejected)).mean()
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because chunk is no operation on single tokens
# Saved for backward, beside the arguments and views of them:
#     t11: f32[1], 4 bytes
#     t1: i64[2, 4096], 65,536 bytes
#     t3: f32[8192], 32,768 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, tokens):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # tokens: "cpu i64[2, 4096]"

  # log_probs = F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
  t0 = torch.unsqueeze(tokens, -1)  # t0: "cpu i64[2, 4096, 1]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[2, 4096], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                        PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                              PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)            PyTorch
    # loss f32[8192] = cross_entropy                                                    PyTorch
  t6 = torch.neg(t2)  # t6: "cpu f32[2, 4096]"
  del t2

  # chosen, rejected = log_probs.sum(-1).chunk(2)
  t7 = torch.sum(t6, -1, False, dtype=None)  # t7: "cpu f32[2]"
  del t6
  t8 = torch_slice_prim_impl(t7, [0], [1], [1])  # t8: "cpu f32[1]"
  t9 = torch_slice_prim_impl(t7, [1], [2], [1])  # t9: "cpu f32[1]"
  del t7

  # return -F.logsigmoid(0.1 * (chosen - rejected)).mean()
  t10 = torch.sub(t8, t9, alpha=1)  # t10: "cpu f32[1]"
  del t8, t9
  t11 = torch.mul(0.1, t10)  # t11: "cpu f32[1]"
  del t10
  t12 = torch.nn.functional.logsigmoid(t11)  # t12: "cpu f32[1]"
  t13 = shallow_copy(t12)  # t13: "cpu f32[1]"
  del t12
  t14 = torch.sum(t13, (0,))  # t14: "cpu f32[]"
  del t13
  t15 = torch_div_prim_impl(t14, 1.0)  # t15: "cpu f32[]"
  del t14
  t16 = shallow_copy(t15)  # t16: "cpu f32[]"
  del t15
  t17 = torch.neg(t16)  # t17: "cpu f32[]"
  del t16
  return {'output': (t17,), 'flat_args': [hidden, weight, tokens], 'flat_output': (t17,)}, ((t11, hidden, weight, t1, t3, t4, t5), ())


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
  t18, = cotangents
  # t18: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t11, hidden, weight, t1, t3, t4, t5, = C0
  # t11: "cpu f32[1]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu i64[2, 4096]"
  # t3: "cpu f32[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t19 = torch.neg(t18)  # t19: "cpu f32[]"
  del t18
  t20 = torch.true_divide(t19, 1.0)  # t20: "cpu f32[]"
  del t19
  t21 = torch.unsqueeze(t20, 0)  # t21: "cpu f32[1]"
  del t20
  t22 = Tensor.expand(t21, [1])  # t22: "cpu f32[1]"
  del t21
  t23 = Tensor.expand(t22, (1,))  # t23: "cpu f32[1]"
  del t22
  t24 = torch.abs(t11)  # t24: "cpu f32[1]"
  t25 = torch.neg(t24)  # t25: "cpu f32[1]"
  del t24
  t26 = torch.exp(t25)  # t26: "cpu f32[1]"
  del t25
  t27 = torch.ops.aten.log_sigmoid_backward(t23, t11, t26)  # t27: "cpu f32[1]"
  del t23, t11, t26
  t28 = torch.mul(0.1, t27)  # t28: "cpu f32[1]"
  del t27
  t29 = torch.neg(t28)  # t29: "cpu f32[1]"
  t30 = torch_pad_prim_impl(t29, 0.0, ((1, 0, 0),))  # t30: "cpu f32[2]"
  del t29
  t31 = torch_pad_prim_impl(t28, 0.0, ((0, 1, 0),))  # t31: "cpu f32[2]"
  del t28
  t32 = torch.add(t30, t31, alpha=1)  # t32: "cpu f32[2]"
  del t30, t31
  t33 = torch.unsqueeze(t32, 1)  # t33: "cpu f32[2, 1]"
  del t32
  t34 = Tensor.expand(t33, (2, 4096))  # t34: "cpu f32[2, 4096]"
  del t33
  t35 = Tensor.to(t34, copy=False, dtype=torch.float32)  # t35: "cpu f32[2, 4096]"
  del t34
  t36 = torch.neg(t35)  # t36: "cpu f32[2, 4096]"
  del t35
  (t37, t38) = linear_cross_entropy_bwd(t36, hidden, weight, t1, None, t3, t4, t5, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t1, grad = t36, row_max = t3, row_log_sum = t4
    # dX = t37: f32[2, 4096, 4096], dW = t38: f32[128256, 4096]
    # s f32[8192] = grad                                                                           PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                     PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * s - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                   PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                   PyTorch
  del t36, hidden, weight, t1, t3, t4, t5
  return (t37, t38, None)
