# Printed by: python traces/regenerate.py --device cpu
# nvFuser 0.2.36, bfloat16 logits, vocabulary 128256.

def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1, 128256], contiguity=[True, True], dtype=DataType.BFloat16, is_cpu=False)
    tv1 = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False)
    tv2 = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False)
    tv3 = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False)
    tv4 = fd.ops.cast(tv0, dtype=DataType.Float)
    tv5 = fd.ops.sub(tv4, tv1)
    tv6 = fd.ops.sub(tv5, tv2)
    tv7 = fd.ops.exp(tv6)
    tv8 = fd.ops.mul(tv7, tv3)
    tv9 = fd.ops.sum(tv8, dims=[0], dtype=DataType.Float)
    tv10 = fd.ops.cast(tv8, dtype=DataType.BFloat16)
    fd.add_output(tv9)
    fd.add_output(tv10, tv0)
