# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def reduction_none(hidden, weight, labels):
#         """One loss per token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
#
# fused, recompute logits, chunks of 1024 tokens; its gradients wait for the backward, because its result, or a tensor computed from it, is returned or used after a graph break, and not detached
# Saved for backward, beside the arguments and views of them:
#     t1: f32[8192], 32,768 bytes
#     t2: f32[8192], 32,768 bytes
#     t3: i64[], 8 bytes
#     t4: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
  (t0, t1, t2, t3, t4) = flce_linear_cross_entropy_fwd(
    (hidden, weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "none", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "recompute_logits", 'chunk_rows': 1024})
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[2, 4096], row_max = t1: f32[8192], row_log_sum = t2: f32[8192], valid_count = t3: i64[],
    # computed_rows = t4: i64[]
    # valid_count i64[] = count of valid rows    targets are checked                           PyTorch
    # x, y = valid rows of x, y
    # for each chunk of C tokens (8 × 1024):
    #   logits f32[C, 128256] = x @ W.t()                                                      PyTorch
    #   row_max, row_log_sum f32[C] = max(logits), log(sum(exp(logits - row_max))); logits[y]  PyTorch
    # loss f32[8192] = row_log_sum + row_max - logits[y] of each row                           PyTorch
  t5 = torch_prims_reshape_impl(t0, (8192,))  # t5: "cpu f32[8192]"
  del t0
  return {'output': (t5,), 'flat_args': [hidden, weight, labels], 'flat_output': (t5,)}, ((t1, t2, t3, t4, hidden, weight, labels), ())


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
  # t6: "cpu f32[8192]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t3, t4, hidden, weight, labels, = C0
  # t1: "cpu f32[8192]"
  # t2: "cpu f32[8192]"
  # t3: "cpu i64[]"
  # t4: "cpu i64[]"
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  t7 = torch_prims_reshape_impl(t6, (2, 4096))  # t7: "cpu f32[2, 4096]"
  del t6
  (t8, t9) = flce_linear_cross_entropy_bwd(
    (t7,), (t1, t2, t3, t4), (hidden, weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "none", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "recompute_logits", 'chunk_rows': 1024})
    # x = hidden, W = weight, y = labels, grad = t7, row_max = t1, row_log_sum = t2, valid_count = t3,
    # computed_rows = t4
    # dX = t8: f32[2, 4096, 4096], dW = t9: f32[128256, 4096]
    # valid_count i64[] = count of valid rows                                  PyTorch
    # x, y = valid rows of x, y
    # for each chunk of C tokens (8 × 1024):
    #   logits f32[C, 128256] = x @ W.t()                                      PyTorch
    #   dlogits f32[C, 128256] = A softmax(logits) - B one_hot(y)    in place  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                PyTorch
    #   dX f32[C, 4096] = dlogits @ W                                          PyTorch
  del t7, t1, t2, t3, t4, hidden, weight, labels
  return (t8, t9, None)
