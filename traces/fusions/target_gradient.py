# Printed by: python traces/regenerate.py --device cpu
# nvFuser 0.2.36, bfloat16 logits, vocabulary 128256.

def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, is_cpu=False)
    tv1 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float, is_cpu=False)
    tv2 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float, is_cpu=False)
    tv3 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float, is_cpu=False)
    tv4 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float, is_cpu=False)
    tv5 = fd.ops.cast(tv0, dtype=DataType.Float)
    tv6 = fd.ops.sub(tv5, tv1)
    tv7 = fd.ops.sub(tv6, tv2)
    tv8 = fd.ops.exp(tv7)
    tv9 = fd.ops.mul(tv8, tv3)
    tv10 = fd.ops.sub(tv9, tv4)
    tv11 = fd.ops.cast(tv10, dtype=DataType.BFloat16)
    fd.add_output(tv11)
