# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def reduction_none(hidden, weight, labels):
#         """One loss a token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
#
# fused, recompute logits, chunks of 65 tokens; its gradients wait for the backward, because its result, or what is made of it, is returned and not detached
# Saved for backward, beside the arguments and views of them:
#     t3: f32[8192], 32,768 bytes
#     t4: f32[8192], 32,768 bytes
#     t5: i64[], 8 bytes
#     t6: i64[], 8 bytes

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

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
  t0 = Tensor.view(labels, -1)  # t0: "cpu i64[8192]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cpu i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-100, strategy='recompute_logits', chunk_rows=65)
    # x = hidden, W = weight, y = t1
    # loss = t2: f32[2, 4096], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[],
    # computed_rows = t6: i64[]
    # valid_count i64[] = sum(y != -100)    targets are checked                                     PyTorch
    # x, y = rows of x, y that are valid
    # for each chunk of 65 tokens, 127 in all, the last of 2:
    #   logits f32[65, 128256] = x @ W.t()                                                          PyTorch
    #   row_max, row_log_sum f32[65] = max_v(logits), log(sum_v(exp(logits - row_max))); logits[y]  PyTorch
    # loss f32[8192] = row_log_sum - (logits[y] - row_max)                                          PyTorch
  t7 = torch_prims_reshape_impl(t2, (8192,))  # t7: "cpu f32[8192]"
  del t2
  return {'output': (t7,), 'flat_args': [hidden, weight, labels], 'flat_output': (t7,)}, ((hidden, weight, t1, t3, t4, t5, t6), ())


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
  t8, = cotangents
  # t8: "cpu f32[8192]"
  clear_mutable_collection(cotangents)
  del cotangents
  hidden, weight, t1, t3, t4, t5, t6, = C0
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # t1: "cpu i64[2, 4096]"
  # t3: "cpu f32[8192]"
  # t4: "cpu f32[8192]"
  # t5: "cpu i64[]"
  # t6: "cpu i64[]"
  clear_mutable_collection(C0)
  del C0
  t9 = torch_prims_reshape_impl(t8, (2, 4096))  # t9: "cpu f32[2, 4096]"
  del t8
  (t10, t11) = linear_cross_entropy_bwd(t9, hidden, weight, t1, None, t3, t4, t5, t6, needs_grad=("input", "linear_weight"), reduction='none', ignore_index=-100, strategy='recompute_logits', chunk_rows=65)
    # x = hidden, W = weight, y = t1, grad = t9, row_max = t3, row_log_sum = t4, valid_count = t5,
    # computed_rows = t6
    # dX = t10: f32[2, 4096, 4096], dW = t11: f32[128256, 4096]
    # valid_count i64[] = sum(y != -100)                                        PyTorch
    # x, y = rows of x, y that are valid
    # for each chunk of 65 tokens, 127 in all, the last of 2:
    #   logits f32[65, 128256] = x @ W.t()                                      PyTorch
    #   dlogits f32[65, 128256] = A softmax(logits) - B one_hot(y)    in place  PyTorch
    #   dW f32[128256, 4096] += dlogits.t() @ x                                 PyTorch
    #   dX f32[65, 4096] = dlogits @ W                                          PyTorch
  del t9, hidden, weight, t1, t3, t4, t5, t6
  return (t10, t11, None)
