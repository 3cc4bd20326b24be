# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def addmm(hidden, weight, bias, labels):
#         return F.cross_entropy(torch.addmm(bias, hidden.view(-1, hidden.shape[-1]), weight.t()), labels.view(-1))
#
# fused, gradients in forward, chunks of 65 tokens
# Saved for backward, beside the arguments and views of them:
#     t5: i64[], 8 bytes
#     t6: f32[8192, 4096], 134,217,728 bytes
#     t7: f32[128256, 4096], 2,101,346,304 bytes
#     t8: f32[128256], 513,024 bytes

# Constructed by Delete Last Used
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, bias, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # bias: "cpu f32[128256]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(torch.addmm(bias, hidden.view(-1, hidden.shape[-1]), weight.t()), labels.view(-1))
  t0 = torch_prims_reshape_impl(hidden, (8192, 4096))  # t0: "cpu f32[8192, 4096]"
  t1 = Tensor.view(labels, -1)  # t1: "cpu i64[8192]"
  (t2, t3, t4, t5, t6, t7, t8) = linear_cross_entropy_fwd(t0, weight, t1, bias, needs_grad=("input", "linear_weight", "linear_bias"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', chunk_rows=65)
    # x = t0, W = weight, y = t1, b = bias
    # loss = t2: f32[], row_max = t3: f32[8192], row_logsumexp = t4: f32[8192], valid_count = t5: i64[], dX = t6: f32[8192, 4096], dW = t7: f32[128256, 4096], db = t8: f32[128256]
    # x, y = the rows whose target is not ignore_index                                                         PyTorch
    # for each chunk of 65 tokens, 127 in all:
    #   logits f32[65, 128256] = x @ W.t() + b                                                                 PyTorch
    #   row_max, row_logsumexp f32[65] = max(logits), log(sum(exp(logits - row_max)))                          PyTorch
    #   dlogits f32[65, 128256], db f32[128256] = exp(logits - row_max - row_logsumexp) * s, in place; sum(0)  PyTorch
    #   dlogits[y] f32[65] = exp(logits[y] - row_max - row_logsumexp) * s - s                                  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                                                PyTorch
    #   dX f32[65, 4096] = dlogits @ W                                                                         PyTorch
    # cross_entropy f32[8192] = row_logsumexp - (logits[y] - row_max)                                          PyTorch
    # loss = sum(cross_entropy) / valid_count                                                                  PyTorch
  del t3, t4, t0, t1
  return {'output': (t2,), 'flat_args': [hidden, weight, bias, labels], 'flat_output': (t2,)}, ((t5, t6, t7, t8), ())


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
  t9, = cotangents
  # t9: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t5, t6, t7, t8, = C0
  # t5: "cpu i64[]"
  # t6: "cpu f32[8192, 4096]"
  # t7: "cpu f32[128256, 4096]"
  # t8: "cpu f32[128256]"
  clear_mutable_collection(C0)
  del C0
  (t10, t11, t12) = scale_gradients(t9, t5, t6, t7, t8)
    # t6, t7, t8 of the forward *= t9, where that is not 1
  del t9, t5, t6, t7, t8
  t13 = torch_prims_reshape_impl(t10, (2, 4096, 4096))  # t13: "cpu f32[2, 4096, 4096]"
  del t10
  return (t13, t11, t12, None)
