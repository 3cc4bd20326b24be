# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def batch_as_classes(hidden, weight, labels):
#         """(B, T, V) logits as if T were the number of classes."""
#         classes = torch.zeros(hidden.shape[0], weight.shape[0], dtype=torch.long, device=hidden.device)
#         with torch.no_grad():
#             # thunder itself has no backward of this.
#             return F.cross_entropy(F.linear(hidden, weight), classes)
#
# not fused, because the vocabulary is not the class dimension of the loss (logits of shape (2, 4096, 128256))
# Saved for backward, beside the arguments and views of them:
#     nothing

# Constructed by Unwrap the actual return value
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"

  # classes = torch.zeros(hidden.shape[0], weight.shape[0], dtype=torch.long, device=hidden.device)
  t0 = torch.zeros(2, 128256, device=torch.device("cpu"), dtype=torch.int64)  # t0: "cpu i64[2, 128256]"

  # return F.cross_entropy(F.linear(hidden, weight), classes)
  t1 = torch.nn.functional.linear(hidden, weight, None)  # t1: "cpu f32[2, 4096, 128256]"
  t2 = torch.permute(t1, (0, 2, 1))  # t2: "cpu f32[2, 128256, 4096]"
  del t1
  t3 = torch.reshape(t2, (-1, 4096))  # t3: "cpu f32[256512, 4096]"
  del t2
  t4 = torch.reshape(t0, (-1,))  # t4: "cpu i64[256512]"
  del t0
  (t5, t6, t7, t8) = cross_entropy_fwd(t3, t4, reduction='mean', ignore_index=-100)
  del t6, t7, t8, t3, t4
  return (t5,)
