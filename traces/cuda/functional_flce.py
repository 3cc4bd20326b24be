# Printed by: python traces/regenerate.py --device cuda
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cuda, bfloat16.
#
#     def functional(hidden, weight, labels):
#         """Loss by a call of `linear_cross_entropy`."""
#         return thunder_flce.linear_cross_entropy(hidden, weight, labels)
#
# fused, gradients in forward, chunks of 2048 tokens, 192 rows of dW summed in float32, products tuned
# Saved for backward, beside the arguments and views of them:
#     t1: i64[], 8 bytes
#     t2: bf16[2, 4096, 4096], 67,108,864 bytes
#     t3: bf16[128256, 4096], 1,050,673,152 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"

  # return thunder_flce.linear_cross_entropy(hidden, weight, labels)
  (t0, t1, t2, t3) = flce_linear_cross_entropy_fwd(
    (hidden, weight, labels), names=("input", "linear_weight", "target"),
    loss={'reduction': "mean", 'ignore_index': -100}, needs_grad=("input", "linear_weight"),
    plan={'strategy': "gradients_in_forward", 'chunk_rows': 2048, 'float32_rows': 192, 'tune_products': True})
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[], valid_count = t1: i64[], dX = t2: bf16[2, 4096, 4096], dW = t3: bf16[128256, 4096]
    # valid_count i64[] = count of valid rows    targets are checked                                Triton
    # x, y = valid rows of x, y    the host waits for their number while the first logits run
    # for each chunk of C tokens (4 × 2048):
    #   logits bf16[C, 128256] = x @ W.t()                                                          cuBLAS
    #   row_max, row_log_sum f32[C] = max(logits), log(sum(exp(logits - row_max))); logits[y]       Triton
    #   dlogits bf16[C, 128256] = s (softmax(logits) - one_hot(y))    in place, by the same kernel  Triton
    #   dW bf16[128256, 4096] += dlogits.t() @ x                                                    cuBLAS
    #   frequent rows of dW f32[192, 4096] += dlogits[:, frequent].t() @ x                          cuBLAS
    #   dX bf16[C, 4096] = dlogits @ W                                                              cuBLAS
    # loss f32[] = mean over valid rows of row_log_sum + row_max - logits[y]                        Triton
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
  # t4: "cuda:0 f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, t2, t3, = C0
  # t1: "cuda:0 i64[]"
  # t2: "cuda:0 bf16[2, 4096, 4096]"
  # t3: "cuda:0 bf16[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t5, t6) = flce_scale_gradients(t4, t1, t2, t3)
    # t2 *= grad    skipped where that is 1  Triton
    # t3 *= grad    skipped where that is 1  Triton
  del t4, t1, t2, t3
  return (t5, t6, None)
