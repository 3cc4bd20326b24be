# Printed by: python traces/regenerate.py --device cuda
# thunder_flce.jit, thunder 0.2.6, torch 2.11. Compiled and run on NVIDIA H200, bfloat16.
#
#     def functional(hidden, weight, labels):
#         """The operation called by name; without the executor its decomposition runs."""
#         return thunder_flce.linear_cross_entropy(hidden, weight, labels)
#
# fused, gradients in forward, chunks of 2048 tokens, 192 rows of dW summed in float32, products tuned
# Saved for backward, beside the arguments and views of them:
#     t3: i64[], 8 bytes
#     t4: bf16[2, 4096, 4096], 67,108,864 bytes
#     t5: bf16[128256, 4096], 1,050,673,152 bytes

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
  (t0, t1, t2, t3, t4, t5) = linear_cross_entropy_fwd(hidden, weight, labels, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', tune_products=True, chunk_rows=2048, float32_rows=192)
    # x = hidden, W = weight, y = labels
    # loss = t0: f32[], row_max = t1: f32[8192], row_log_sum = t2: f32[8192], valid_count = t3: i64[], dX = t4: bf16[2, 4096, 4096], dW = t5: bf16[128256, 4096]
    # valid, valid_count = y != -100, sum(y != -100)                                                                                       PyTorch
    # x, y = x[valid], y[valid]  (the host waits for their number while the first logits are computed)                                     PyTorch
    # s f32[8192] = 1 / valid_count                                                                                                        PyTorch
    # frequent i64[192] = most_frequent(y, 192)                                                                                            PyTorch
    # for each chunk of 2048 tokens, 4 in all:
    #   logits bf16[2048, 128256] = x[chunk] @ W.t()                                                                                       cuBLAS
    #   row_max, row_log_sum, logits_y f32[2048] = max_v(logits), log(sum_v(exp(logits - row_max))), logits[y[chunk]]                      Triton
    #   dlogits bf16[2048, 128256] = exp(logits - row_max - row_log_sum) * s[chunk] - s[chunk] * [v == y[chunk]]  (in place, same kernel)  Triton
    #   dW bf16[128256, 4096] += dlogits.t() @ x[chunk]                                                                                    cuBLAS
    #   dW_frequent f32[192, 4096] += dlogits[:, frequent].t() @ x[chunk]                                                                  cuBLAS
    #   dX[chunk] bf16[2048, 4096] = dlogits @ W                                                                                           cuBLAS
    # cross_entropy f32[8192] = row_log_sum - minimum(logits_y - row_max, 0)                                                               PyTorch
    # loss f32[] = sum(cross_entropy) / valid_count                                                                                        PyTorch
    # row_max f32[8192] = scatter(row_max)                                                                                                 PyTorch
    # row_log_sum f32[8192] = scatter(row_log_sum)                                                                                         PyTorch
    # dW[frequent] bf16[192, 4096] = dW_frequent                                                                                           PyTorch
    # dX bf16[8192, 4096] = scatter(dX)                                                                                                    PyTorch
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
  # t6: "cuda:0 f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t3, t4, t5, = C0
  # t3: "cuda:0 i64[]"
  # t4: "cuda:0 bf16[2, 4096, 4096]"
  # t5: "cuda:0 bf16[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t7, t8) = scale_gradients(t6, t3, t4, t5)
    # t4 bf16[2, 4096, 4096] = t4 * where(t3 == 0, 0, t6)  (skipped on the device where that is 1)  Triton
    # t5 bf16[128256, 4096] = t5 * where(t3 == 0, 0, t6)  (skipped on the device where that is 1)   Triton
  del t6, t3, t4, t5
  return (t7, t8, None)
