# Printed by: python traces/regenerate.py --device cpu
# nvFuser 0.2.36, bfloat16 logits, vocabulary 128256.

def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1, 8, 16032], contiguity=[True, True, True], dtype=DataType.BFloat16, is_cpu=False)
    tv1 = fd.ops.cast(tv0, dtype=DataType.Float)
    tv2 = fd.ops.max(tv1, dims=[2])
    c17 = fd.define_scalar(float("-inf"), dtype=DataType.Float)
    tv3 = fd.ops.eq(tv2, c17)
    c23 = fd.define_scalar(0.00000, dtype=DataType.Float)
    tv4 = fd.ops.where(tv3, c23, tv2)
    tv5 = fd.ops.broadcast(tv4, is_broadcast_dim=[False, False, True])
    tv6 = fd.ops.sub(tv1, tv5)
    tv7 = fd.ops.exp(tv6)
    tv8 = fd.ops.sum(tv7, dims=[2], dtype=DataType.Float)
    c49 = fd.define_scalar(0.750000, dtype=DataType.Float)
    tv9 = fd.ops.lt(tv7, c49)
    c57 = fd.define_scalar(0.00000, dtype=DataType.Float)
    tv10 = fd.ops.where(tv9, tv7, c57)
    tv11 = fd.ops.sum(tv10, dims=[2], dtype=DataType.Float)
    fd.add_output(tv2)
    fd.add_output(tv8)
    fd.add_output(tv11)
