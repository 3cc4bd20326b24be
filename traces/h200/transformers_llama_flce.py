# Printed by: python traces/regenerate.py --device cuda
# thunder_flce.jit, thunder 0.2.6, torch 2.11. Compiled and run on NVIDIA H200, bfloat16.
#
#     def transformers_llama(hidden, weight, labels):
#         """The loss of transformers' causal language models, with the labels shifted after the linear."""
#         logits = F.linear(hidden, weight).float()
#         labels = F.pad(labels, (0, 1), value=-100)
#         labels = labels[..., 1:].contiguous()
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
#
# fused, gradients in forward, chunks of 2048 tokens, 192 rows of dW summed in float32, products tuned
# Saved for backward, beside the arguments and views of them:
#     t8: i64[], 8 bytes
#     t9: bf16[2, 4096, 4096], 67,108,864 bytes
#     t10: bf16[128256, 4096], 1,050,673,152 bytes

# Constructed by Delete Last Used
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"
  [t0] = nvFusion0(labels)
    # t1 = prims.pad(labels, -100, [(0, 0, 0), (0, 1, 0)])  # t1: "cuda:0 i64[2, 4097]"
    # t2 = prims.slice_prim(t1, [0, 1], [2, 4097], [1, 1])  # t2: "cuda:0 i64[2, 4096]"
    # t3 = prims.stride_order(t2, (1, 0))  # t3: "cuda:0 i64[2, 4096]"
    # t4 = prims.reshape(t3, (8192,))  # t4: "cuda:0 i64[8192]"
    # t0 = prims.reshape(t4, (2, 4096))  # t0: "cuda:0 i64[2, 4096]"

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
  (t5, t6, t7, t8, t9, t10) = linear_cross_entropy_fwd(hidden, weight, t0, None, needs_grad=("input", "linear_weight"), reduction='mean', ignore_index=-100, strategy='gradients_in_forward', tune_products=True, chunk_rows=2048, float32_rows=192)
    # x = hidden, W = weight, y = t0
    # loss = t5: f32[], row_max = t6: f32[8192], row_log_sum = t7: f32[8192], valid_count = t8: i64[], dX = t9: bf16[2, 4096, 4096], dW = t10: bf16[128256, 4096]
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
  del t6, t7, t0
  return {'output': (t5,), 'flat_args': [hidden, weight, labels], 'flat_output': (t5,)}, ((t8, t9, t10), ())


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
  t11, = cotangents
  # t11: "cuda:0 f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t8, t9, t10, = C0
  # t8: "cuda:0 i64[]"
  # t9: "cuda:0 bf16[2, 4096, 4096]"
  # t10: "cuda:0 bf16[128256, 4096]"
  clear_mutable_collection(C0)
  del C0
  (t12, t13) = scale_gradients(t11, t8, t9, t10)
    # t9 bf16[2, 4096, 4096] = t9 * where(t8 == 0, 0, t11)  (skipped on the device where that is 1)  Triton
    # t10 bf16[128256, 4096] = t10 * where(t8 == 0, 0, t11)  (skipped on the device where that is 1)   Triton
  del t11, t8, t9, t10
  return (t12, t13, None)
