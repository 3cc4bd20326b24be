# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def matrix_transposed(hidden, weight, labels):
#         return CROSS_ENTROPY(F.linear(hidden, weight).mT, labels)
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t3: i64[], 8 bytes
#     t4: f32[2, 4096, 4096], 134,217,728 bytes
#     t5: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(
  (t0, t1, t2, t3, t4, t5) = linear_cross_entropy_fwd(hidden, weight, labels, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[], row_max = t1: f32[8192], row_logsumexp = t2: f32[8192], valid_count = t3: i64[], dX = t4: f32[2, 4096, 4096], dW = t5: f32[128256, 4096]
    # x, y = the rows whose target is not ignore_index                                                PyTorch
    # for each chunk of 65 tokens, 127 in all:
    #   logits f32[65, 128256] = x @ W.t()                                                            PyTorch
    #   row_max, row_logsumexp f32[65] = max(logits), log(sum(exp(logits - row_max)))                 PyTorch
    #   dlogits f32[65, 128256] = exp(logits - row_max - row_logsumexp) * s - s * [v == y], in place  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                                       PyTorch
    #   dX f32[65, 4096] = dlogits @ W                                                                PyTorch
    # cross_entropy f32[8192] = row_logsumexp - (logits[y] - row_max)                                 PyTorch
    # loss = sum(cross_entropy) / valid_count                                                         PyTorch
  del t1, t2
  return {'output': (t0,), 'flat_args': [hidden, weight, labels], 'flat_output': (t0,)}, ((t3, t4, t5), ())


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
  t6, = cotangents
  # t6: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t4, t5, = C0
  # t3: "cpu i64[]"
  # t4: "cpu f32[2, 4096, 4096]"
  # t5: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t7, t8) = scale_gradients(t6, t3, t4, t5)
    # t4, t5 of the forward *= t6, where that is not 1
  del t6, t3, t4, t5
  return (t7, t8, None)
