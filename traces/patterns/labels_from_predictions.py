# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def labels_from_predictions(hidden, weight, labels):
#         """The region would need what it computes."""
#         logits = F.linear(hidden, weight)
#         is_wrong = logits.argmax(-1) != labels
#         return _loss(logits, torch.where(is_wrong, labels, -100))
#
# not fused, because the logits, or something between them and the loss, are also used elsewhere (the loss depends on their argmax or entropy)
# Saved for backward, beside the arguments and views of them:
#     t4: f32[8192, 128256], 4,202,692,608 bytes
#     t5: i64[8192], 65,536 bytes
#     t7: f32[8192], 32,768 bytes
#     t8: f32[8192], 32,768 bytes
#     t9: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"

  # logits = F.linear(hidden, weight)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"

  # is_wrong = logits.argmax(-1) != labels
  t1 = torch.argmax(t0, 2)  # t1: "cpu i64[2, 4096]"
  t2 = torch.ne(t1, labels)  # t2: "cpu b8[2, 4096]"
  del t1

  # return _loss(logits, torch.where(is_wrong, labels, -100))
  t3 = torch.where(t2, labels, -100)  # t3: "cpu i64[2, 4096]"
  del t2

  # return single_device_symbol(*args, **kwargs)
  t4 = torch_prims_reshape_impl(t0, (8192, 128256))  # t4: "cpu f32[8192, 128256]"
  del t0
  t5 = torch.reshape(t3, (-1,))  # t5: "cpu i64[8192]"
  del t3

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t6, t7, t8, t9) = cross_entropy_fwd(t4, t5, reduction='mean', ignore_index=-100)
  return {'output': (t6,), 'flat_args': [hidden, weight, labels], 'flat_output': (t6,)}, ((t4, t5, t7, t8, t9, weight, hidden), ())


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
  t10, = cotangents
  # t10: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t4, t5, t7, t8, t9, weight, hidden, = C0
  # t4: "cpu f32[8192, 128256]"
  # t5: "cpu i64[8192]"
  # t7: "cpu f32[8192]"
  # t8: "cpu f32[8192]"
  # t9: "cpu i64[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t11 = cross_entropy_bwd(t10, t4, t5, t7, t8, t9, reduction='mean', ignore_index=-100)  # t11: "cpu f32[8192, 128256]"
  del t10, t4, t5, t7, t8, t9
  t12 = torch_prims_reshape_impl(t11, (2, 4096, 128256))  # t12: "cpu f32[2, 4096, 128256]"
  del t11
  t13 = torch.reshape(t12, (-1, 128256))  # t13: "cpu f32[8192, 128256]"
  t14 = torch.matmul(t13, weight)  # t14: "cpu f32[8192, 4096]"
  del t13, weight
  t15 = torch.reshape(t14, (2, 4096, 4096))  # t15: "cpu f32[2, 4096, 4096]"
  del t14
  t16 = torch.reshape(t12, (-1, 128256))  # t16: "cpu f32[8192, 128256]"
  del t12
  t17 = torch.permute(t16, (1, 0))  # t17: "cpu f32[128256, 8192]"
  del t16
  t18 = torch.reshape(hidden, (-1, 4096))  # t18: "cpu f32[8192, 4096]"
  del hidden
  t19 = torch.matmul(t17, t18)  # t19: "cpu f32[128256, 4096]"
  del t17, t18
  return (t15, t19, None)
