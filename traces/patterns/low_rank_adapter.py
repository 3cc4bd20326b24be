# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def low_rank_adapter(hidden, weight, adapter_down, adapter_up, labels):
#         """LoRA around lm_head; the weight is frozen."""
#         logits = F.linear(hidden, weight.detach())
#         return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up) * 2.0, labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: f32[2, 4096, 4096], 134,217,728 bytes
#     t10: f32[2, 4096, 4], 131,072 bytes
#     t11: f32[128256, 4], 2,052,096 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, adapter_down, adapter_up, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # adapter_down: "cpu f32[4, 4096]"
  # adapter_up: "cpu f32[128256, 4]"
  # labels: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight.detach())
  t0 = torch.detach(weight)  # t0: "cpu f32[128256, 4096]"

  # return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up) * 2.0, labels)
  t1 = torch.nn.functional.linear(hidden, adapter_down, None)  # t1: "cpu f32[2, 4096, 4]"

  # return single_device_symbol(*args, **kwargs)
  t2 = torch.reshape(labels, (-1,))  # t2: "cpu i64[8192]"
  t3 = torch.mul(t1, 2.0)  # t3: "cpu f32[2, 4096, 4]"
  del t1

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t4 = torch.reshape(t2, (2, 4096))  # t4: "cpu i64[2, 4096]"
  del t2
  (t5, t6, t7, t8, t9, t10, t11) = linear_cross_entropy_fwd(hidden, t0, t4, None, needs_grad=("input", "terms[0].input", "terms[0].weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, terms=((t3, adapter_up),))
    # x = hidden, W = t0, y = t4, x1 = t3, W1 = adapter_up
    # loss = t5: f32[], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX = t9: f32[2, 4096, 4096], dX1 = t10: f32[2, 4096, 4], dW1 = t11: f32[128256, 4]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, x1, y = x[valid], x1[valid], y[valid]                                                                            PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x1[chunk] @ W1.t()                                                                        PyTorch
    #   logits f32[C, 128256] += x[chunk] @ W.t()                                                                         PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    #   dW1 f32[128256, 4] += dlogits.t() @ x1[chunk]                                                                     PyTorch
    #   dX1[chunk] f32[C, 4] = dlogits @ W1                                                                               PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
    # dX1 f32[8192, 4] = scatter(dX1)                                                                                     PyTorch
  del t6, t7, t0, t4, t3
  return {'output': (t5,), 'flat_args': [hidden, weight, adapter_down, adapter_up, labels], 'flat_output': (t5,)}, ((t8, t9, t10, t11, adapter_down, hidden), ())


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
  t8, t9, t10, t11, adapter_down, hidden, = C0
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4096, 4096]"
  # t10: "cpu f32[2, 4096, 4]"
  # t11: "cpu f32[128256, 4]"
  # adapter_down: "cpu f32[4, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t13, t14, t15) = scale_gradients(t12, t8, t9, t10, t11)
    # t9 f32[2, 4096, 4096] = t9 * where(t8 == 0, 0, t12)  (skipped where that is 1)  PyTorch
    # t10 f32[2, 4096, 4] = t10 * where(t8 == 0, 0, t12)  (skipped where that is 1)     PyTorch
    # t11 f32[128256, 4] = t11 * where(t8 == 0, 0, t12)  (skipped where that is 1)      PyTorch
  del t12, t8, t9, t10, t11
  t16 = torch.mul(2.0, t14)  # t16: "cpu f32[2, 4096, 4]"
  del t14
  t17 = torch.reshape(t16, (-1, 4))  # t17: "cpu f32[8192, 4]"
  t18 = torch.matmul(t17, adapter_down)  # t18: "cpu f32[8192, 4096]"
  del t17, adapter_down
  t19 = torch.reshape(t18, (2, 4096, 4096))  # t19: "cpu f32[2, 4096, 4096]"
  del t18
  t20 = torch.reshape(t16, (-1, 4))  # t20: "cpu f32[8192, 4]"
  del t16
  t21 = torch.permute(t20, (1, 0))  # t21: "cpu f32[4, 8192]"
  del t20
  t22 = torch.reshape(hidden, (-1, 4096))  # t22: "cpu f32[8192, 4096]"
  del hidden
  t23 = torch.matmul(t21, t22)  # t23: "cpu f32[4, 4096]"
  del t21, t22
  t24 = torch.add(t13, t19, alpha=1)  # t24: "cpu f32[2, 4096, 4096]"
  del t13, t19
  return (t24, None, t23, t15, None)
