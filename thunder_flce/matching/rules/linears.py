"""Linear layers, at which logits begin: one matrix for all rows, by whichever operation."""

from string import ascii_letters, digits
from typing import Any

from thunder_flce.matching.algebra import Argmax, Class, Logits, Row, RowStep, Term, Unknown, poly, require
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import PERMUTATIONS, Op, Tensor, order_of, same, same_shape
from thunder_flce.matching.rules.arithmetic import at_one_hot
from thunder_flce.matching.rules.distributions import weighted


def _product(
    interpreter: Interpreter, op: Op, equation: str, input: Tensor, weight: Tensor, *, bias: Tensor | None = None
) -> Class:
    """Describes a linear, from its equation such as "bth,vh->btv": one matrix for all rows, and no sum over rows."""
    # A number of each row is needed as a tensor.
    require(not any(isinstance(interpreter.get(operand), Row | Argmax) for operand in (input, weight)))
    operand_dims, _, result = equation.partition("->")
    input_dims, _, weight_dims = operand_dims.partition(",")
    out = op.output
    while (producer := weight.op) is not None and producer.name in (*PERMUTATIONS, "expand"):
        source = producer.operands[0]
        if out.needs_grad and weight.needs_grad != source.needs_grad:
            break
        if producer.name in PERMUTATIONS:
            # By the order of the dimensions: the shape of a square matrix does not tell that it was transposed.
            by_dim = dict(zip(order_of(producer), weight_dims, strict=True))
            weight_dims = "".join(by_dim[dim] for dim in range(source.ndim))
        else:
            weight_dims = weight_dims[weight.ndim - source.ndim :]
        weight = source
    classes = [name for name in weight_dims if name not in input_dims and name in result]
    features = [name for name in weight_dims if name in input_dims and name not in result]
    require(len(classes) == len(features) == 1)
    rows, out_rows = input_dims.replace(features[0], ""), result.replace(classes[0], "")
    sizes = dict(zip(input_dims, input.shape, strict=True))
    dim = result.index(classes[0])
    # The weight must have these sizes itself: one row that is expanded to all classes is no matrix.
    matrix_sizes = {features[0]: sizes[features[0]], classes[0]: out.shape[dim]}
    is_matrix = all(same(size, matrix_sizes.get(name, 1)) for name, size in zip(weight_dims, weight.shape, strict=True))
    keeps_rows = sorted(rows) == sorted(out_rows) and len(set(input_dims)) == len(input_dims)
    out_shape = (*out.shape[:dim], *out.shape[dim + 1 :])
    require(is_matrix and keeps_rows and same_shape(out_shape, [sizes[name] for name in out_rows]))
    dims = weight_dims.index(classes[0]), weight_dims.index(features[0])
    term = Term(
        interpreter.first_of(input, op), interpreter.first_of(weight, op),
        input_dims.index(features[0]), dims, input.dtype, has_grad=out.needs_grad,
        changes=interpreter.program.changes_before(op, *op.operands), outputs=(out,),
    )  # fmt: skip
    steps = () if rows == out_rows else (RowStep("permute", tuple(map(rows.index, out_rows)), out_shape),)
    bias = None if bias is None else interpreter.first_of(bias, op)
    logits = Logits((term,), bias, bias_has_grad=out.needs_grad, bias_read_at=op.position, rows=steps)
    return Class(logits, dim, (*out.shape[:dim], term.columns, *out.shape[dim + 1 :]), poly(u=1))


@rule("linear", "inner")
def _linear(interpreter: Interpreter, op: Op, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Class:
    rows = ascii_letters[: input.ndim - 1]
    require(weight.ndim == 2)
    return _product(interpreter, op, f"{rows}H,VH->{rows}V", input, weight, bias=bias)


@rule("matmul", "mm", "bmm")
def _matmul(interpreter: Interpreter, op: Op, input: Tensor, other: Tensor, *, bias: Tensor | None = None) -> Class:
    """Describes a linear whose second operand is a matrix, (H, V), also if it is repeated for each item of a batch."""
    require(isinstance(other, Tensor) and isinstance(input, Tensor) and 2 <= other.ndim <= max(2, input.ndim))
    rows = ascii_letters[: input.ndim - 1]
    return _product(
        interpreter, op, f"{rows}H,{rows[input.ndim - other.ndim : -1]}HV->{rows}V", input, other, bias=bias
    )


@rule("addmm", "baddbmm")
def _addmm(
    interpreter: Interpreter, op: Op, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Class:
    require((beta, alpha) == (1, 1) and same_shape(input.shape, (mat2.shape[-1],)))
    return _matmul(interpreter, op, mat1, mat2, bias=input)


@rule("tensordot")
def _tensordot(interpreter: Interpreter, op: Op, a: Tensor, b: Tensor, dims: Any = 2) -> Class:
    a_dims, b_dims = list(ascii_letters[: a.ndim]), list(ascii_letters[a.ndim : a.ndim + b.ndim])
    dim_pairs = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    for dim, other in zip(*dim_pairs, strict=True):
        b_dims[other] = a_dims[dim]
    result = "".join(name for name in a_dims + b_dims if (name in a_dims) != (name in b_dims))
    return _product(interpreter, op, f"{''.join(a_dims)},{''.join(b_dims)}->{result}", a, b)


@rule("conv1d")
def _conv1d(
    interpreter: Interpreter, op: Op, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: Any = 1,
) -> Class:  # fmt: skip
    """Describes a convolution whose kernel has the size of one token."""
    require((stride, padding, groups) in ((1, 0, 1), ((1,), (0,), 1)))
    batch = "B" if input.ndim == 3 else ""
    return _product(interpreter, op, f"{batch}HT,VHK->{batch}VT", input, weight, bias=bias)


@rule("einsum")
def _einsum(interpreter: Interpreter, op: Op, equation: str, *operands: Any) -> Class | Row:
    """Describes a linear, or Σ p log p as in `einsum("btv,btv->bt", p, log_p)`."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    require(len(tensors) == 2 and isinstance(equation, str))
    operand_dims, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(name for name in set(operand_dims) - set(".,") if operand_dims.count(name) == 1)
        result = "..." * ("..." in operand_dims) + "".join(once)
    # The dimensions of an ellipsis are aligned to the right.
    a_dims, b_dims, result = (
        dims.replace("...", digits[10 - tensor.ndim + len(dims.replace("...", "")) :])
        for dims, tensor in zip((*operand_dims.split(","), result), (*tensors, op.output), strict=True)
    )
    a, b = map(interpreter.get, tensors)
    if isinstance(a, Class) and isinstance(b, Class) and (a.form or b.form):
        product = weighted(op, a, b)
        is_row_sum = a_dims == b_dims and result == a_dims[: product.dim] + a_dims[product.dim + 1 :]
        require(is_row_sum and len(set(a_dims)) == len(a_dims))
        return product.summed(op.output.shape)
    for classes, one_hot in ((a, tensors[1]), (b, tensors[0])):
        if isinstance(classes, Class) and a_dims == b_dims and result == a_dims[: classes.dim]:
            if (taken := at_one_hot(interpreter, op, classes, one_hot)) is not None:
                return taken.summed(op.output.shape)
    require(all(each.is_logits for each in (a, b) if isinstance(each, Class)))
    candidates = [(f"{a_dims},{b_dims}->{result}", *tensors), (f"{b_dims},{a_dims}->{result}", *tensors[::-1])]
    # If both are matrices, the last dimension of the result is that of the classes.
    first, second = candidates if result[-1:] in b_dims else candidates[::-1]
    try:
        return _product(interpreter, op, *first)
    except Unknown:
        return _product(interpreter, op, *second)
