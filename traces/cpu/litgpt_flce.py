# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def litgpt(hidden, weight, labels):
#         """Loss as in training scripts for litgpt's models: the logits keep the model's dtype."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
# fused, gradients in forward, chunks of 1024 tokens
# Saved for backward, beside the arguments and views of them:
#     t1: i64[], 8 bytes
#     t2: f32[2, 4096, 4096], 134,217,728 bytes
#     t3: f32[128256, 4096], 2,101,346,304 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  (t0, t1, t2, t3) = flce_linear_cross_entropy_fwd(
    (hidden, weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "mean", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "gradients_in_forward", 'chunk_rows': 1024})
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[], valid_count = t1: i64[], dX = t2: f32[2, 4096, 4096], dW = t3: f32[128256, 4096]
    # valid_count i64[] = count of valid rows    targets are checked                           PyTorch
    # x, y = valid rows of x, y
    # for each chunk of C tokens (8 × 1024):
    #   logits f32[C, 128256] = x @ W.t()                                                      PyTorch
    #   row_max, row_log_sum f32[C] = max(logits), log(sum(exp(logits - row_max))); logits[y]  PyTorch
    #   dlogits f32[C, 128256] = s (softmax(logits) - one_hot(y))    in place                  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                                PyTorch
    #   dX f32[C, 4096] = dlogits @ W                                                          PyTorch
    # loss f32[] = mean over valid rows of row_log_sum + row_max - logits[y]                   PyTorch
  return {'output': (t0,), 'flat_args': [hidden, weight, labels], 'flat_output': (t0,)}, ((t1, t2, t3), ())


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
  t4, = cotangents
  # t4: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t3, = C0
  # t1: "cpu i64[]"
  # t2: "cpu f32[2, 4096, 4096]"
  # t3: "cpu f32[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t5, t6) = flce_scale_gradients(t4, t1, t2, t3)
    # t2 *= grad    skipped where that is 1  PyTorch
    # t3 *= grad    skipped where that is 1  PyTorch
  del t4, t1, t2, t3
  return (t5, t6, None)
