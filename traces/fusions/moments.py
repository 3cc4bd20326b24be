# Printed by: python traces/regenerate.py --device cpu
# nvFuser 0.2.36, bfloat16 logits, vocabulary 128256.

def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1, 128256], contiguity=[True, True], dtype=DataType.BFloat16, is_cpu=False)
    tv1 = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False)
    tv2 = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False)
    tv3 = fd.define_tensor(shape=[1, 128256], contiguity=[None, True], dtype=DataType.Float, is_cpu=False)
    tv4 = fd.ops.cast(tv0, dtype=DataType.Float)
    tv5 = fd.ops.sub(tv4, tv1)
    tv6 = fd.ops.sub(tv5, tv2)
    tv7 = fd.ops.exp(tv6)
    c32 = fd.define_scalar(float("-inf"), dtype=DataType.Float)
    tv8 = fd.ops.eq(tv5, c32)
    c38 = fd.define_scalar(-3.40282e+38, dtype=DataType.Float)
    tv9 = fd.ops.where(tv8, c38, tv5)
    tv10 = fd.ops.mul(tv7, tv9)
    tv11 = fd.ops.sum(tv10, dims=[1], dtype=DataType.Float)
    tv12 = fd.ops.mul(tv5, tv3)
    tv13 = fd.ops.sum(tv12, dims=[1], dtype=DataType.Float)
    fd.add_output(tv11)
    fd.add_output(tv13)
