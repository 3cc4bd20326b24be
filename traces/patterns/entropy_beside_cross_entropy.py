# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def entropy_beside_cross_entropy(hidden, weight, labels):
#         """A penalty of confidence: a gradient of the entropy, of ignored tokens, too."""
#         log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
#         loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
#         return loss + 0.01 * (log_probs.exp() * log_probs).sum(-1).mean()
#
# fused, recompute logits, chunks of 65 tokens, blocks of 1024 columns of the vocabulary; its gradients wait for the backward, because the entropy stands beside a cross-entropy that is reduced itself
# Saved for backward, beside the arguments and views of them:
#     t14: f32[], 4 bytes
#     t9: b8[8192], 8,192 bytes
#     t3: i64[2, 4096], 65,536 bytes
#     t6: f32[8192], 32,768 bytes
#     t7: f32[8192], 32,768 bytes
#     t8: i64[], 8 bytes
#     t5: f32[2, 4096], 32,768 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # loss = F.nll_loss(log_probs.view(-1, weight.shape[0]), labels.view(-1), ignore_index=-100)
  t0 = Tensor.view(labels, -1)  # t0: "cpu i64[8192]"
  t1 = torch.ne(t0, -100)  # t1: "cpu b8[8192]"
  t2 = torch.where(t1, t0, 0)  # t2: "cpu i64[8192]"
  del t1
  t3 = torch.reshape(t2, (2, 4096))  # t3: "cpu i64[2, 4096]"
  del t2
  (t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(hidden, weight, t3, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t3
    # loss = t4: f32[2, 4096], entropy = t5: f32[2, 4096], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[]
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                           PyTorch
    #   logits_y f32[C] = logits[y[chunk]]                                                 PyTorch
    #   row_max, row_log_sum f32[C] = max_v(logits), log(sum_v(exp(logits - row_max)))     PyTorch
    #   expected f32[C] = sum_v(exp(logits - row_max - row_log_sum) * (logits - row_max))  PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)               PyTorch
    # loss f32[8192] = cross_entropy                                                       PyTorch
    # entropy f32[8192] = row_log_sum - expected                                           PyTorch
  t9 = torch.ne(t0, -100)  # t9: "cpu b8[8192]"
  del t0
  t10 = torch_prims_reshape_impl(t4, (8192,))  # t10: "cpu f32[8192]"
  del t4
  t11 = torch.where(t9, t10, 0.0)  # t11: "cpu f32[8192]"
  del t10
  t12 = torch.sum(t11, None, False, dtype=None)  # t12: "cpu f32[]"
  del t11
  t13 = torch.sum(t9, None, False, dtype=None)  # t13: "cpu i64[]"
  t14 = Tensor.to(t13, torch.float32, copy=True)  # t14: "cpu f32[]"
  del t13
  t15 = torch_div_prim_impl(t12, t14)  # t15: "cpu f32[]"
  del t12
  t16 = torch.neg(t5)  # t16: "cpu f32[2, 4096]"

  # return loss + 0.01 * (log_probs.exp() * log_probs).sum(-1).mean()
  t17 = shallow_copy(t16)  # t17: "cpu f32[2, 4096]"
  del t16
  t18 = torch.sum(t17, (0, 1))  # t18: "cpu f32[]"
  del t17
  t19 = torch_div_prim_impl(t18, 8192.0)  # t19: "cpu f32[]"
  del t18
  t20 = shallow_copy(t19)  # t20: "cpu f32[]"
  del t19
  t21 = torch.mul(0.01, t20)  # t21: "cpu f32[]"
  del t20
  t22 = torch.add(t15, t21, alpha=1)  # t22: "cpu f32[]"
  del t15, t21
  return {'output': (t22,), 'flat_args': [hidden, weight, labels], 'flat_output': (t22,)}, ((t14, t9, hidden, weight, t3, t6, t7, t8, t5), ())


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
  t14, t9, hidden, weight, t3, t6, t7, t8, t5, = C0
  # t14: "cpu f32[]"
  # t9: "cpu b8[8192]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t3: "cpu i64[2, 4096]"
  # t6: "cpu f32[8192]"
  # t7: "cpu f32[8192]"
  # t8: "cpu i64[]"
  # t5: "cpu f32[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  t24 = torch.mul(0.01, t23)  # t24: "cpu f32[]"
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
  t30 = torch.neg(t29)  # t30: "cpu f32[2, 4096]"
  del t29
  t31 = torch.true_divide(t23, t14)  # t31: "cpu f32[]"
  del t23, t14
  t32 = Tensor.expand(t31, (8192,))  # t32: "cpu f32[8192]"
  del t31
  t33 = Tensor.to(t32, copy=False, dtype=torch.float32)  # t33: "cpu f32[8192]"
  del t32
  t34 = torch.where(t9, t33, 0)  # t34: "cpu f32[8192]"
  del t9, t33
  t35 = torch_prims_reshape_impl(t34, (2, 4096))  # t35: "cpu f32[2, 4096]"
  del t34
  (t36, t37) = linear_cross_entropy_bwd(t35, hidden, weight, t3, None, t6, t7, t8, None, needs_grad=("input", "linear_weight"), entropy_grad=t30, entropy=t5, reduction='none', ignore_index=-4611686018427387905, outputs=("entropy",), strategy='recompute_logits', chunk_rows=65, block_columns=1024)
    # x = hidden, W = weight, y = t3, grad = t35, entropy_grad = t30, row_max = t6, row_log_sum = t7, entropy = t5
    # dX = t36: f32[2, 4096, 4096], dW = t37: f32[128256, 4096]
    # s f32[8192] = grad                                                                                                                                        PyTorch
    # g_e f32[8192] = entropy_grad                                                                                                                              PyTorch
    # for each block of 1024 (125 times) and 256 columns of the vocabulary:
    #   logits f32[8192, K] = x @ W[block].t()                                                                                                                  PyTorch
    #   dlogits f32[8192, K] = exp(logits - row_max - row_log_sum) * (s + g_e * (row_log_sum - entropy) - g_e * (logits - row_max)) - s * [v == y]  (in place)  PyTorch
    #   dX f32[8192, 4096] += dlogits @ W[block]                                                                                                                PyTorch
    #   dW[block] f32[K, 4096] = dlogits.t() @ x                                                                                                                PyTorch
  del t35, hidden, weight, t3, t6, t7, t8, t5, t30
  return (t36, t37, None)
