# Printed by: python traces/regenerate.py --device cuda
# thunder_flce.jit, thunder 0.2.6, torch 2.11. Compiled and run on NVIDIA H200, bfloat16.
#
#     def litgpt(hidden, weight, labels):
#         """The usual training loop around litgpt's models: the logits keep the model's dtype."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
# fused, gradients in forward, chunks of 2048 tokens, 192 rows of dW summed in float32, products tuned
# Saved for backward, beside the arguments and views of them:
#     t5: i64[], 8 bytes
#     t6: bf16[2, 4096, 4096], 67,108,864 bytes
#     t7: bf16[128256, 4096], 1,050,673,152 bytes

# Constructed by Delete Last Used
import thunder.core.dtypes as dtypes
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
  t0 = Tensor.view(labels, -1)  # t0: "cuda:0 i64[8192]"
  t1 = torch.reshape(t0, (2, 4096))  # t1: "cuda:0 i64[2, 4096]"
  del t0
  (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, needs_grad=("input", "linear_weight"), dtype=dtypes.bfloat16, reduction='mean', ignore_index=-100, strategy='gradients_in_forward', tune_products=True, chunk_rows=2048, float32_rows=192)
    # x = hidden, W = weight, y = t1
    # loss = t2: bf16[], row_max = t3: f32[8192], row_log_sum = t4: f32[8192], valid_count = t5: i64[], dX = t6: bf16[2, 4096, 4096], dW = t7: bf16[128256, 4096]
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
  del t3, t4, t1
  return {'output': (t2,), 'flat_args': [hidden, weight, labels], 'flat_output': (t2,)}, ((t5, t6, t7), ())


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
  # t8: "cuda:0 bf16[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t5, t6, t7, = C0
  # t5: "cuda:0 i64[]"
  # t6: "cuda:0 bf16[2, 4096, 4096]"
  # t7: "cuda:0 bf16[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t9, t10) = scale_gradients(t8, t5, t6, t7)
    # t6 bf16[2, 4096, 4096] = t6 * where(t5 == 0, 0, t8)  (skipped on the device where that is 1)  Triton
    # t7 bf16[128256, 4096] = t7 * where(t5 == 0, 0, t8)  (skipped on the device where that is 1)   Triton
  del t8, t5, t6, t7
  return (t9, t10, None)
