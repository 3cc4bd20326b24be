"""Linear layers, at which logits begin: one matrix for all rows, by whichever operation."""

from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any

from thunder_flce.matching.algebra import Argmax, Class, Logits, Row, RowStep, Term, Unknown, poly
from thunder_flce.matching.program import PERMUTATIONS, Op, Tensor, order_of, same, same_shape
from thunder_flce.matching.rules.arithmetic import at_one_hot, weighted
from thunder_flce.matching.rules.reductions import summed
from thunder_flce.matching.rules.registry import rule

if TYPE_CHECKING:
    from thunder_flce.matching.interpreter import Interpreter


LINEARS = ("linear", "inner", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "conv1d")


def _product(
    interpreter: "Interpreter", op: Op, equation: str, input: Tensor, weight: Tensor, *, bias: Tensor | None = None
) -> Class:
    """Describes a linear, from its equation such as "bth,vh->btv": one matrix for all rows, and no sum over rows."""
    if any(isinstance(interpreter.get(each), Row | Argmax) for each in (input, weight)):
        raise Unknown  # Such a number of each row is needed as a tensor.
    names, _, result = equation.partition("->")
    of_input, _, of_weight = names.partition(",")
    out = op.output
    while (before := weight.op) is not None and before.name in (*PERMUTATIONS, "expand"):
        source = before.operands[0]
        if out.needs_grad and weight.needs_grad != source.needs_grad:
            break
        if before.name in PERMUTATIONS:
            # By the order of the dimensions: the shape of a square matrix does not tell that it was transposed.
            by_dim = dict(zip(order_of(before), of_weight, strict=True))
            of_weight = "".join(by_dim[dim] for dim in range(source.ndim))
        else:
            of_weight = of_weight[weight.ndim - source.ndim :]
        weight = source
    classes = [name for name in of_weight if name not in of_input and name in result]
    features = [name for name in of_weight if name in of_input and name not in result]
    if (len(classes), len(features)) != (1, 1):
        raise Unknown
    rows, out_rows = of_input.replace(features[0], ""), result.replace(classes[0], "")
    sizes = dict(zip(of_input, input.shape, strict=True))
    dim = result.index(classes[0])
    # The weight must have these sizes itself: one row that is expanded to all classes is no matrix.
    of_matrix = {features[0]: sizes[features[0]], classes[0]: out.shape[dim]}
    is_one = all(same(size, of_matrix.get(name, 1)) for name, size in zip(of_weight, weight.shape, strict=True))
    is_of_rows = sorted(rows) == sorted(out_rows) and len(set(of_input)) == len(of_input)
    out_shape = (*out.shape[:dim], *out.shape[dim + 1 :])
    if not is_one or not is_of_rows or not same_shape(out_shape, [sizes[name] for name in out_rows]):
        raise Unknown
    dims = of_weight.index(classes[0]), of_weight.index(features[0])
    term = Term(
        interpreter.first_of(input, op), interpreter.first_of(weight, op),
        of_input.index(features[0]), dims, input.dtype, has_grad=out.needs_grad,
        changes=interpreter.program.changes_before(op, *op.operands), outputs=(out,),
    )  # fmt: skip
    steps = () if rows == out_rows else (RowStep("permute", tuple(map(rows.index, out_rows)), out_shape),)
    bias = None if bias is None else interpreter.first_of(bias, op)
    logits = Logits((term,), bias, bias_has_grad=out.needs_grad, rows=steps)
    return Class(logits, dim, out.shape, poly(u=1))


@rule("linear", "inner")
def _linear(interpreter: "Interpreter", op: Op, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Class:
    rows = ascii_letters[: input.ndim - 1]
    if weight.ndim != 2:
        raise Unknown
    return _product(interpreter, op, f"{rows}H,VH->{rows}V", input, weight, bias=bias)


@rule("matmul", "mm", "bmm")
def _matmul(interpreter: "Interpreter", op: Op, input: Tensor, other: Tensor, *, bias: Tensor | None = None) -> Class:
    """Describes a linear whose second operand is a matrix, (H, V), also if it is repeated for each item of a batch."""
    if not isinstance(other, Tensor) or not isinstance(input, Tensor) or not 2 <= other.ndim <= max(2, input.ndim):
        raise Unknown
    rows = ascii_letters[: input.ndim - 1]
    return _product(
        interpreter, op, f"{rows}H,{rows[input.ndim - other.ndim : -1]}HV->{rows}V", input, other, bias=bias
    )


@rule("addmm", "baddbmm")
def _addmm(
    interpreter: "Interpreter", op: Op, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Class:
    if (beta, alpha) != (1, 1) or not same_shape(input.shape, (mat2.shape[-1],)):
        raise Unknown
    return _matmul(interpreter, op, mat1, mat2, bias=input)


@rule("tensordot")
def _tensordot(interpreter: "Interpreter", op: Op, a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Class:
    of_a, of_b = list(ascii_letters[: a.ndim]), list(ascii_letters[a.ndim : a.ndim + b.ndim])
    both = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    for dim, other in zip(*both, strict=True):
        of_b[other] = of_a[dim]
    result = "".join(name for name in of_a + of_b if (name in of_a) != (name in of_b))
    return _product(interpreter, op, f"{''.join(of_a)},{''.join(of_b)}->{result}", a, b)


@rule("conv1d")
def _conv1d(
    interpreter: "Interpreter", op: Op, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: Any = 1,
) -> Class:  # fmt: skip
    """Describes a convolution whose kernel has the size of one token."""
    if (stride, padding, groups) not in ((1, 0, 1), ((1,), (0,), 1)):
        raise Unknown
    batch = "B" if input.ndim == 3 else ""
    return _product(interpreter, op, f"{batch}HT,VHK->{batch}VT", input, weight, bias=bias)


@rule("einsum")
def _einsum(interpreter: "Interpreter", op: Op, equation: str, *operands: Any) -> Class | Row:
    """Describes a linear, or Σ p log p as in `einsum("btv,btv->bt", p, log_p)`."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if len(tensors) != 2 or not isinstance(equation, str):
        raise Unknown
    names, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(name for name in set(names) - set(".,") if names.count(name) == 1)
        result = "..." * ("..." in names) + "".join(once)
    # The dimensions of an ellipsis are aligned to the right.
    of_a, of_b, result = (
        each.replace("...", digits[10 - tensor.ndim + len(each.replace("...", "")) :])
        for each, tensor in zip((*names.split(","), result), (*tensors, op.output), strict=True)
    )
    a, b = map(interpreter.get, tensors)
    if isinstance(a, Class) and isinstance(b, Class) and (a.form or b.form):
        of = weighted(a, b) if a.form == "exp" else weighted(b, a)
        if of_a != of_b or len(set(of_a)) < len(of_a) or result != of_a[: of.dim] + of_a[of.dim + 1 :]:
            raise Unknown
        return summed(of, op.output.shape)
    for known_of, one_hot in ((a, tensors[1]), (b, tensors[0])):
        found = at_one_hot(interpreter, known_of, one_hot) if isinstance(known_of, Class) and of_a == of_b else None
        if found is not None and result == of_a[: found.dim]:
            return summed(found, op.output.shape)
    if any(isinstance(of, Class) and not of.is_logits for of in (a, b)):
        raise Unknown
    ways = [(f"{of_a},{of_b}->{result}", *tensors), (f"{of_b},{of_a}->{result}", *tensors[::-1])]
    # If both are matrices, the last dimension of the result is that of the classes.
    first, second = ways if result[-1:] in of_b else ways[::-1]
    try:
        return _product(interpreter, op, *first)
    except Unknown:
        return _product(interpreter, op, *second)
