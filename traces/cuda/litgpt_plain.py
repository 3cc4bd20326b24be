# Printed by: python traces/regenerate.py --device cuda
# thunder.jit with its default executors, thunder 0.2.6, torch 2.10. Compiled for cuda, bfloat16.
#
#     def litgpt(hidden, weight, labels):
#         """Loss as in training scripts for litgpt's models: the logits keep the model's dtype."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
#
# Saved for backward, beside the arguments and views of them:
#     t1: bf16[8192, 128256], 2,101,346,304 bytes
#     t2: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # labels: "cuda:0 i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cuda:0 bf16[2, 4096, 128256]"
  [t1, t2, t3] = TorchCompile0(t0, labels)
    # t4 = prims.reshape(t0, (8192, 128256))  # t4: "cuda:0 bf16[8192, 128256]"
    # t5 = ltorch.view(labels, -1)  # t5: "cuda:0 i64[8192]"
    # t1 = ltorch.log_softmax(t4, 1, dtype=None)  # t1: "cuda:0 bf16[8192, 128256]"
    # t6 = ltorch.neg(t1)  # t6: "cuda:0 bf16[8192, 128256]"
    # t7 = ltorch.unsqueeze(t5, 1)  # t7: "cuda:0 i64[8192, 1]"
    # t8 = ltorch.ne(t7, -100)  # t8: "cuda:0 b8[8192, 1]"
    # t9 = ltorch.where(t8, t7, 128256)  # t9: "cuda:0 i64[8192, 1]"
    # t10 = prims.pad(t6, 0.0, [(0, 0, 0), (0, 1, 0)])  # t10: "cuda:0 bf16[8192, 128257]"
    # t11 = ltorch.take_along_dim(t10, t9, 1)  # t11: "cuda:0 bf16[8192, 1]"
    # t12 = ltorch.sum(t11, None, False, dtype=None)  # t12: "cuda:0 bf16[]"
    # t2 = ltorch.sum(t8, None, False, dtype=None)  # t2: "cuda:0 i64[]"
    # t3 = ltorch.true_divide(t12, t2)  # t3: "cuda:0 bf16[]"
  del t0
  return {'output': (t3,), 'flat_args': [hidden, weight, labels], 'flat_output': (t3,)}, ((labels, t1, t2, weight, hidden), ())


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
  t13, = cotangents
  # t13: "cuda:0 bf16[]"
  clear_mutable_collection(cotangents)
  del cotangents
  labels, t1, t2, weight, hidden, = C0
  # labels: "cuda:0 i64[2, 4096]"
  # t1: "cuda:0 bf16[8192, 128256]"
  # t2: "cuda:0 i64[]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  [t14, t15] = TorchCompile1(labels, t13, t1, t2)
    # t5 = ltorch.view(labels, -1)  # t5: "cuda:0 i64[8192]"
    # t16 = ltorch.nll_loss_backward(t13, t1, t5, None, 'mean', -100, t2)  # t16: "cuda:0 bf16[8192, 128256]"
    # t17 = ltorch.log_softmax_backward(t16, t1, 1, dtypes.bfloat16)  # t17: "cuda:0 bf16[8192, 128256]"
    # t14 = prims.reshape(t17, (2, 4096, 128256))  # t14: "cuda:0 bf16[2, 4096, 128256]"
    # t15 = ltorch.reshape(t14, -1, 128256)  # t15: "cuda:0 bf16[8192, 128256]"
  del labels, t13, t1, t2
  t18 = torch.matmul(t15, weight)  # t18: "cuda:0 bf16[8192, 4096]"
  del t15, weight
  t19 = torch.reshape(t18, (2, 4096, 4096))  # t19: "cuda:0 bf16[2, 4096, 4096]"
  del t18
  t20 = torch.reshape(t14, (-1, 128256))  # t20: "cuda:0 bf16[8192, 128256]"
  del t14
  t21 = torch.permute(t20, (1, 0))  # t21: "cuda:0 bf16[128256, 8192]"
  del t20
  t22 = torch.reshape(hidden, (-1, 4096))  # t22: "cuda:0 bf16[8192, 4096]"
  del hidden
  t23 = torch.matmul(t21, t22)  # t23: "cuda:0 bf16[128256, 4096]"
  del t21, t22
  return (t19, t23, None)
