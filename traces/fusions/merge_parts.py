# Printed by: python traces/regenerate.py --device cpu
# nvFuser 0.2.36, bfloat16 logits, vocabulary 128256.

def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1, 8], contiguity=[True, True], dtype=DataType.Float, is_cpu=False)
    tv1 = fd.define_tensor(shape=[-1, 8], contiguity=[True, True], dtype=DataType.Float, is_cpu=False)
    tv2 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, is_cpu=False)
    tv3 = fd.ops.max(tv0, dims=[1])
    tv4 = fd.ops.broadcast(tv3, is_broadcast_dim=[False, True])
    tv5 = fd.ops.sub(tv0, tv4)
    tv6 = fd.ops.exp(tv5)
    tv7 = fd.ops.mul(tv1, tv6)
    tv8 = fd.ops.sum(tv7, dims=[1], dtype=DataType.Float)
    tv9 = fd.ops.log(tv8)
    tv10 = fd.ops.cast(tv2, dtype=DataType.Float)
    tv11 = fd.ops.sub(tv10, tv3)
    tv12 = fd.ops.sub(tv9, tv11)
    fd.add_output(tv3)
    fd.add_output(tv9)
    fd.add_output(tv12)
