# Printed by: python traces/regenerate.py --device cpu
# nvFuser 0.2.36, bfloat16 logits, vocabulary 128256.

def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1, 8], contiguity=[True, True], dtype=DataType.Float, is_cpu=False)
    tv1 = fd.define_tensor(shape=[-1, 8], contiguity=[True, True], dtype=DataType.Float, is_cpu=False)
    tv2 = fd.ops.max(tv0, dims=[1])
    tv3 = fd.ops.broadcast(tv2, is_broadcast_dim=[False, True])
    tv4 = fd.ops.sub(tv0, tv3)
    tv5 = fd.ops.exp(tv4)
    tv6 = fd.ops.mul(tv1, tv5)
    tv7 = fd.ops.sum(tv6, dims=[1], dtype=DataType.Float)
    tv8 = fd.ops.log(tv7)
    fd.add_output(tv2)
    fd.add_output(tv8)
