# Printed by: python traces/regenerate.py --device cuda
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cuda, bfloat16.
#
#     def reduction_none(hidden, weight, labels):
#         """One loss per token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
#
# fused, recompute logits, chunks of 2048 tokens, 192 rows of dW summed in float32, products tuned; its gradients wait for the backward, because its result, or a tensor computed from it, is returned or used after a graph break, and not detached
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
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
  (t0, t1, t2, t3, t4) = flce_linear_cross_entropy_fwd(
    (hidden, weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "none", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "recompute_logits", 'chunk_rows': 2048, 'float32_rows': 192, 'tune_products': True})
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[2, 4096], row_max = t1: f32[8192], row_log_sum = t2: f32[8192], valid_count = t3: i64[],
    # computed_rows = t4: i64[]
    # valid_count i64[] = count of valid rows    targets are checked                           Triton
    # x, y = valid rows of x, y    the host waits for their number
    # for each chunk of C tokens (4 × 2048):
    #   logits bf16[C, 128256] = x @ W.t()                                                     cuBLAS
    #   row_max, row_log_sum f32[C] = max(logits), log(sum(exp(logits - row_max))); logits[y]  Triton
    # loss f32[8192] = row_log_sum + row_max - logits[y] of each row                           Triton
  [t5] = nvFusion0(t0)
    # t6 = prims.reshape(t0, (8192,))  # t6: "cuda:0 f32[8192]"
    # t5 = prims.convert_element_type(t6, dtypes.bfloat16)  # t5: "cuda:0 bf16[8192]"
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
  t7, = cotangents
  # t7: "cuda:0 bf16[8192]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t3, t4, hidden, weight, labels, = C0
  # t1: "cuda:0 f32[8192]"
  # t2: "cuda:0 f32[8192]"
  # t3: "cuda:0 i64[]"
  # t4: "cuda:0 i64[]"
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"
  clear_mutable_collection(C0)
  del C0
  [t8] = nvFusion1(t7)
    # t9 = prims.convert_element_type(t7, dtypes.float32)  # t9: "cuda:0 f32[8192]"
    # t8 = prims.reshape(t9, (2, 4096))  # t8: "cuda:0 f32[2, 4096]"
  del t7
  (t10, t11) = flce_linear_cross_entropy_bwd(
    (t8,), (t1, t2, t3, t4), (hidden, weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "none", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "recompute_logits", 'chunk_rows': 2048, 'float32_rows': 192, 'tune_products': True})
    # x = hidden, W = weight, y = labels, grad = t8, row_max = t1, row_log_sum = t2, valid_count = t3,
    # computed_rows = t4
    # dX = t10: bf16[2, 4096, 4096], dW = t11: bf16[128256, 4096]
    # valid_count i64[] = count of valid rows                                   Triton
    # x, y = valid rows of x, y
    # for each chunk of C tokens (4 × 2048):
    #   logits bf16[C, 128256] = x @ W.t()                                      cuBLAS
    #   dlogits bf16[C, 128256] = A softmax(logits) - B one_hot(y)    in place  Triton
    #   dW bf16[128256, 4096] += dlogits.t() @ x                                cuBLAS
    #   frequent rows of dW f32[192, 4096] += dlogits[:, frequent].t() @ x      cuBLAS
    #   dX bf16[C, 4096] = dlogits @ W                                          cuBLAS
  del t8, t1, t2, t3, t4, hidden, weight, labels
  return (t10, t11, None)
