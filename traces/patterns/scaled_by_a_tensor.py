# Printed by: python traces/regenerate.py --device cpu
# thunder_flce.jit, thunder 0.2.6, torch 2.10. Compiled for cpu, float32.
#
#     def scaled_by_a_tensor(hidden, weight, labels, temperature):
#         return _loss(F.linear(hidden, weight) / temperature, labels)
#
# not fused, because the logits are changed between the linear and the loss (by true_divide with something that is not a number known when the trace is compiled)
# Saved for backward, beside the arguments and views of them:
#     t2: f32[8192, 128256], 4,202,692,608 bytes
#     t5: f32[8192], 32,768 bytes
#     t6: f32[8192], 32,768 bytes
#     t7: i64[], 8 bytes

# Constructed by Delete Last Used
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden, weight, labels, temperature):
  # hidden: "cpu f32[2, 4096, 4096]"
  # weight: "cpu f32[128256, 4096]"
  # labels: "cpu i64[2, 4096]"
  # temperature: "cpu f32[]"

  # return _loss(F.linear(hidden, weight) / temperature, labels)
  t0 = torch.nn.functional.linear(hidden, weight, None)  # t0: "cpu f32[2, 4096, 128256]"
  t1 = torch_div_prim_impl(t0, temperature)  # t1: "cpu f32[2, 4096, 128256]"
  del t0

  # return single_device_symbol(*args, **kwargs)
  t2 = torch_prims_reshape_impl(t1, (8192, 128256))  # t2: "cpu f32[8192, 128256]"
  del t1
  t3 = torch.reshape(labels, (-1,))  # t3: "cpu i64[8192]"

  # return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **settings)
  (t4, t5, t6, t7) = cross_entropy_fwd(t2, t3, reduction='mean', ignore_index=-100)
  return {'output': (t4,), 'flat_args': [hidden, weight, labels, temperature], 'flat_output': (t4,)}, ((t2, t3, t5, t6, t7, temperature, weight, hidden), ())


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
  # t8: "cpu f32[]"
  clear_mutable_collection(cotangents)
  del cotangents
  t2, t3, t5, t6, t7, temperature, weight, hidden, = C0
  # t2: "cpu f32[8192, 128256]"
  # t3: "cpu i64[8192]"
  # t5: "cpu f32[8192]"
  # t6: "cpu f32[8192]"
  # t7: "cpu i64[]"
  # temperature: "cpu f32[]"
  # weight: "cpu f32[128256, 4096]"
  # hidden: "cpu f32[2, 4096, 4096]"
  clear_mutable_collection(C0)
  del C0
  t9 = cross_entropy_bwd(t8, t2, t3, t5, t6, t7, reduction='mean', ignore_index=-100)  # t9: "cpu f32[8192, 128256]"
  del t8, t2, t3, t5, t6, t7
  t10 = torch_prims_reshape_impl(t9, (2, 4096, 128256))  # t10: "cpu f32[2, 4096, 128256]"
  del t9
  t11 = torch.true_divide(t10, temperature)  # t11: "cpu f32[2, 4096, 128256]"
  del t10, temperature
  t12 = torch.reshape(t11, (-1, 128256))  # t12: "cpu f32[8192, 128256]"
  t13 = torch.matmul(t12, weight)  # t13: "cpu f32[8192, 4096]"
  del t12, weight
  t14 = torch.reshape(t13, (2, 4096, 4096))  # t14: "cpu f32[2, 4096, 4096]"
  del t13
  t15 = torch.reshape(t11, (-1, 128256))  # t15: "cpu f32[8192, 128256]"
  del t11
  t16 = torch.permute(t15, (1, 0))  # t16: "cpu f32[128256, 8192]"
  del t15
  t17 = torch.reshape(hidden, (-1, 4096))  # t17: "cpu f32[8192, 4096]"
  del hidden
  t18 = torch.matmul(t16, t17)  # t18: "cpu f32[128256, 4096]"
  del t16, t17
  return (t14, t18, None, None)
