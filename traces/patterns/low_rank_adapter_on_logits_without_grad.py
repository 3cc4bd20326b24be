# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def low_rank_adapter_on_logits_without_grad(hidden, weight, adapter_down, adapter_up, labels):
#         """Gradients flow through one of the two linears only."""
#         with torch.no_grad():
#             logits = F.linear(hidden, weight)
#         return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up), labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: f32[2, 4096, 4], 131,072 bytes
#     t10: f32[128256, 4], 2,052,096 bytes

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

  # return _loss(logits + F.linear(F.linear(hidden, adapter_down), adapter_up), labels)
  t0 = torch.nn.functional.linear(hidden, adapter_down, None)  # t0: "cpu f32[2, 4096, 4]"

  # return single_device_symbol(*args, **kwargs)
  t1 = torch.reshape(labels, (-1,))  # t1: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t2 = torch.detach(hidden)  # t2: "cpu f32[2, 4096, 4096]"
  t3 = torch.detach(weight)  # t3: "cpu f32[128256, 4096]"
  t4 = torch.reshape(t1, (2, 4096))  # t4: "cpu i64[2, 4096]"
  del t1
  (t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(t2, t3, t4, None, needs_grad=("terms[0].input", "terms[0].weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65, terms=((t0, adapter_up),))
    # x = t2, W = t3, y = t4, x1 = t0, W1 = adapter_up
    # loss = t5: f32[], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX1 = t9: f32[2, 4096, 4], dW1 = t10: f32[128256, 4]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, x1, y = x[valid], x1[valid], y[valid]                                                                            PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x1[chunk] @ W1.t()                                                                        PyTorch
    #   logits f32[C, 128256] += x[chunk] @ W.t()                                                                         PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW1 f32[128256, 4] += dlogits.t() @ x1[chunk]                                                                     PyTorch
    #   dX1[chunk] f32[C, 4] = dlogits @ W1                                                                               PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX1 f32[8192, 4] = scatter(dX1)                                                                                     PyTorch
  del t6, t7, t2, t3, t4, t0
  return {'output': (t5,), 'flat_args': [hidden, weight, adapter_down, adapter_up, labels], 'flat_output': (t5,)}, ((t8, t9, t10, adapter_down, hidden), ())


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
  t11, = cotangents
  # t11: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t10, adapter_down, hidden, = C0
  # t8: "cpu i64[]"
  # t9: "cpu f32[2, 4096, 4]"
  # t10: "cpu f32[128256, 4]"
  # adapter_down: "cpu f32[4, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t12, t13) = scale_gradients(t11, t8, t9, t10)
    # t9 f32[2, 4096, 4] = t9 * where(t8 == 0, 0, t11)  (skipped where that is 1)  PyTorch
    # t10 f32[128256, 4] = t10 * where(t8 == 0, 0, t11)  (skipped where that is 1)   PyTorch
  del t11, t8, t9, t10
  t14 = torch.reshape(t12, (-1, 4))  # t14: "cpu f32[8192, 4]"
  t15 = torch.matmul(t14, adapter_down)  # t15: "cpu f32[8192, 4096]"
  del t14, adapter_down
  t16 = torch.reshape(t15, (2, 4096, 4096))  # t16: "cpu f32[2, 4096, 4096]"
  del t15
  t17 = torch.reshape(t12, (-1, 4))  # t17: "cpu f32[8192, 4]"
  del t12
  t18 = torch.permute(t17, (1, 0))  # t18: "cpu f32[4, 8192]"
  del t17
  t19 = torch.reshape(hidden, (-1, 4096))  # t19: "cpu f32[8192, 4096]"
  del hidden
  t20 = torch.matmul(t18, t19)  # t20: "cpu f32[4, 4096]"
  del t18, t19
  return (t16, None, t20, t13, None)
