# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def tied_embeddings(tokens, weight, labels):
#         return _loss(F.linear(torch.tanh(F.embedding(tokens, weight)), weight), labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t7: i64[], 8 bytes
#     t8: f32[2, 4096, 4096], 134,217,728 bytes
#     t9: f32[128256, 4096], 2,101,346,304 bytes
#     t1: f32[2, 4096, 4096], 134,217,728 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(tokens, weight, labels):
  # tokens: "cpu i64[2, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return _loss(F.linear(torch.tanh(F.embedding(tokens, weight)), weight), labels)
  t0 = torch.nn.functional.embedding(tokens, weight, None, None, 2.0, False, False)  # t0: "cpu f32[2, 4096, 4096]"
  t1 = torch.tanh(t0)  # t1: "cpu f32[2, 4096, 4096]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t2 = torch.reshape(labels, (-1,))  # t2: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  t3 = torch.reshape(t2, (2, 4096))  # t3: "cpu i64[2, 4096]"
  del t2
  (t4, t5, t6, t7, t8, t9) = linear_cross_entropy_fwd(t1, weight, t3, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t1, W = weight, y = t3
    # loss = t4: f32[], row_max = t5: f32[8192], row_log_sum = t6: f32[8192], valid_count = t7: i64[], dX = t8: f32[2, 4096, 4096], dW = t9: f32[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                      PyTorch
    # x, y = x[valid], y[valid]                                                                                           PyTorch
    # s f32[8192] = 1 / valid_count                                                                                       PyTorch
    # for each chunk of 65 (126 times) and 2 tokens:
    #   logits f32[C, 128256] = x[chunk] @ W.t()                                                                          PyTorch
    #   row_max, row_log_sum, logits_y f32[C] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]        PyTorch
    #   dlogits f32[C, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place)  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x[chunk]                                                                    PyTorch
    #   dX[chunk] f32[C, 4096] = dlogits @ W                                                                              PyTorch
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                              PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                       PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                        PyTorch
    # dX f32[8192, 4096] = scatter(dX)                                                                                    PyTorch
  del t5, t6, t3
  return {'output': (t4,), 'flat_args': [tokens, weight, labels], 'flat_output': (t4,)}, ((t7, t8, t9, t1, tokens), ())


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
  t10, = cotangents
  # t10: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t7, t8, t9, t1, tokens, = C0
  # t7: "cpu i64[]"
  # t8: "cpu f32[2, 4096, 4096]"
  # t9: "cpu f32[128256, 4096]"
  # t1: "cpu f32[2, 4096, 4096]"
  # tokens: "cpu i64[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t11, t12) = scale_gradients(t10, t7, t8, t9)
    # t8 f32[2, 4096, 4096] = t8 * where(t7 == 0, 0, t10)  (skipped where that is 1)  PyTorch
    # t9 f32[128256, 4096] = t9 * where(t7 == 0, 0, t10)  (skipped where that is 1)   PyTorch
  del t10, t7, t8, t9
  t13 = torch.mul(t1, t1)  # t13: "cpu f32[2, 4096, 4096]"
  del t1
  t14 = torch.sub(1, t13, alpha=1)  # t14: "cpu f32[2, 4096, 4096]"
  del t13
  t15 = torch.mul(t11, t14)  # t15: "cpu f32[2, 4096, 4096]"
  del t11, t14
  t16 = torch.torch.ops.aten.embedding_backward(t15, tokens, 128256, -1, False, False)  # t16: "cpu f32[128256, 4096]"
  del t15, tokens
  t17 = torch.add(t12, t16, alpha=1)  # t17: "cpu f32[128256, 4096]"
  del t12, t16
  return (None, t17, None)
