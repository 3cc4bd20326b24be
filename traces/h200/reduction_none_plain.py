# Printed by: python traces/regenerate.py --device cuda
# thunder.jit with its default executors, thunder 0.2.6, torch 2.11. Compiled and run on NVIDIA H200, bfloat16.
#
#     def reduction_none(hidden, weight, labels):
#         """One loss a token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
#         logits = F.linear(hidden, weight)
#         return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
#
# Saved for backward, beside the arguments and views of them:
#     t1: bf16[8192, 128256], 2,101,346,304 bytes

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
  [t1, t2] = TorchCompile0(t0, labels)
    # t3 = prims.reshape(t0, (8192, 128256))  # t3: "cuda:0 bf16[8192, 128256]"
    # t4 = ltorch.view(labels, -1)  # t4: "cuda:0 i64[8192]"
    # t1 = ltorch.log_softmax(t3, 1, dtype=None)  # t1: "cuda:0 bf16[8192, 128256]"
    # t5 = ltorch.neg(t1)  # t5: "cuda:0 bf16[8192, 128256]"
    # t6 = ltorch.unsqueeze(t4, 1)  # t6: "cuda:0 i64[8192, 1]"
    # t7 = ltorch.ne(t6, -100)  # t7: "cuda:0 b8[8192, 1]"
    # t8 = ltorch.where(t7, t6, 128256)  # t8: "cuda:0 i64[8192, 1]"
    # t9 = prims.pad(t5, 0.0, [(0, 0, 0), (0, 1, 0)])  # t9: "cuda:0 bf16[8192, 128257]"
    # t2 = ltorch.take_along_dim(t9, t8, 1)  # t2: "cuda:0 bf16[8192, 1]"
  del t0

  # return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")
  t10 = torch.squeeze(t2, 1)  # t10: "cuda:0 bf16[8192]"
  del t2
  return {'output': (t10,), 'flat_args': [hidden, weight, labels], 'flat_output': (t10,)}, ((labels, t1, weight, hidden), ())


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
  # t11: "cuda:0 bf16[8192]"
  clear_mutable_collection(cotangents)
  del cotangents
  labels, t1, weight, hidden, = C0
  # labels: "cuda:0 i64[2, 4096]"
  # t1: "cuda:0 bf16[8192, 128256]"
  # weight: "cuda:0 bf16[128256, 4096]"
  # hidden: "cuda:0 bf16[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  [t12, t13] = TorchCompile1(labels, t11, t1)
    # t4 = ltorch.view(labels, -1)  # t4: "cuda:0 i64[8192]"
    # t14 = ltorch.nll_loss_backward(t11, t1, t4, None, 'none', -100, None)  # t14: "cuda:0 bf16[8192, 128256]"
    # t15 = ltorch.log_softmax_backward(t14, t1, 1, dtypes.bfloat16)  # t15: "cuda:0 bf16[8192, 128256]"
    # t12 = prims.reshape(t15, (2, 4096, 128256))  # t12: "cuda:0 bf16[2, 4096, 128256]"
    # t13 = ltorch.reshape(t12, -1, 128256)  # t13: "cuda:0 bf16[8192, 128256]"
  del labels, t11, t1
  t16 = torch.matmul(t13, weight)  # t16: "cuda:0 bf16[8192, 4096]"
  del t13, weight
  t17 = torch.reshape(t16, (2, 4096, 4096))  # t17: "cuda:0 bf16[2, 4096, 4096]"
  del t16
  t18 = torch.reshape(t12, (-1, 128256))  # t18: "cuda:0 bf16[8192, 128256]"
  del t12
  t19 = torch.permute(t18, (1, 0))  # t19: "cuda:0 bf16[128256, 8192]"
  del t18
  t20 = torch.reshape(hidden, (-1, 4096))  # t20: "cuda:0 bf16[8192, 4096]"
  del hidden
  t21 = torch.matmul(t19, t20)  # t21: "cuda:0 bf16[128256, 4096]"
  del t19, t20
  return (t17, t21, None)
