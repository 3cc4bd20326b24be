"""A program as the matcher reads it: operations by PyTorch's names, on tensors, in order.

`dynamo.reading` makes a program from Dynamo's graph, `graph.reading` from thunder's trace.
"""

import itertools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_map_only

CHANGED = "a change in place"
"""Name of an operation whose results are its operands after an in-place change."""


# thunder gives torch.mm the name of its sparse variant, spmm.
_NAMES = {
    "truediv": "div", "true_divide": "div", "itruediv": "div", "iadd": "add", "isub": "sub", "imul": "mul",
    "iand": "and_", "ior": "or_", "ixor": "xor", "concatenate": "cat", "concat": "cat", "multiply": "mul",
    "subtract": "sub", "divide": "div", "negative": "neg", "clip": "clamp", "special_entr": "entr",
    "special_xlogy": "xlogy", "special_log_softmax": "log_softmax", "special_softmax": "softmax",
    "special_logsumexp": "logsumexp", "special_expit": "sigmoid", "torch_max": "max", "stop_gradient": "detach",
    "spmm": "mm", "mod": "remainder", "slice_prim": "slice", "_softmax": "softmax",
    "update_aliases": CHANGED, "__eq__": "eq", "__abs__": "abs",
    "_get_data_attr": "detach", "numpy_T": "T",
}  # fmt: skip
"""Maps other names of an operation to its name here, so that each meaning has one name."""
_RESHAPED = " of a tensor that is reshaped or detached in place"


class Source(NamedTuple):
    """A line of the user's code."""

    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return "unknown source"
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(eq=False, slots=True, repr=False)
class Tensor:
    """A tensor of a program, compared by identity."""

    name: str
    shape: tuple[Any, ...]
    """Sizes: integers, or Dynamo's symbols, which must be compared by `same`."""
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    """Whether a gradient flows back through it: not if it was detached, or computed under `torch.no_grad`."""
    handle: Any = None
    """The tensor in the compiler's graph: a node of Dynamo's, or a proxy of thunder's."""
    storage: Any = None
    """Equal for tensors that share memory; None if unknown"""
    is_plain: bool = True
    """False for a DTensor, a tensor of a torch.func transform, and the like."""
    op: "Op | None" = None
    """The operation that computes it; None for an argument of the program."""
    users: "list[Op]" = field(default_factory=list)
    is_reshaped: bool = False
    """Whether a later operation reshapes or detaches it in place: Dynamo describes it as it is then"""
    is_number_read: bool = False
    """Whether the program reads it as a number, by `item`; that number may be a factor anywhere"""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> Any:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def position(self) -> int:
        """Position of the operation that computes it; -1 for an argument of the program."""
        return -1 if self.op is None else self.op.position

    def shares_memory(self, other: "Tensor") -> bool:
        """Whether both are known to share memory: they have one storage or, if one is unknown, are the same tensor."""
        if self.storage is None or other.storage is None:
            return self is other
        return bool(self.storage == other.storage)


@dataclass(eq=False, slots=True, repr=False)
class Op:
    """An operation of a program."""

    name: str
    """Such as "view"; methods, functions and operators of one meaning have one name."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    """A tensor, or a sequence of tensors."""
    source: Source = Source()
    writes: tuple[Tensor, ...] = ()
    """The operands that it changes in place."""
    is_random: bool = False
    """Whether a second run may give other results: it is random, or not an operation of PyTorch"""
    is_reshaped: bool = False
    """Whether it has a tensor that `is_reshaped`; no rule knows its name then, so that none reads that shape"""
    numbers: tuple[Tensor, ...] = ()
    """Tensors of which it takes numbers that were read before, by an operation "item" without a result"""
    grad_mode: bool = True
    """Whether autograd records this operation"""
    handle: Any = None
    """The operation in the compiler's graph."""
    inside: Any = None
    """The graph's node of the checkpointed function that contains it; None if it is a node of the graph itself."""
    position: int = 0
    outs: list[Tensor] = field(init=False)
    """The tensors that it returns"""
    operands: list[Tensor] = field(init=False)
    """The tensors among its arguments"""

    def __post_init__(self) -> None:
        self.name = _NAMES.get(self.name, self.name) + _RESHAPED * self.is_reshaped
        self.outs, self.operands = tensors_in(self.output), tensors_in((self.args, self.kwargs))

    @property
    def plain_name(self) -> str:
        """Its name if no tensor were reshaped."""
        return self.name.removesuffix(_RESHAPED)

    @property
    def is_change(self) -> bool:
        """Whether it changes a tensor in place, or has one that is reshaped in place."""
        return bool(self.writes) or self.name == CHANGED or self.is_reshaped

    @property
    def leaves_gradient(self) -> bool:
        """Whether it changes a tensor that needs a gradient, unrecorded by autograd: the gradient stays the old one."""
        return not self.grad_mode and any(tensor.needs_grad for tensor in self.writes)

    def may_change(self, tensor: Tensor) -> bool:
        """Whether it may change a tensor in place: judged by their storages or, if one is unknown, by their dtypes."""
        return any(
            written.storage == tensor.storage if written.storage and tensor.storage else written.dtype == tensor.dtype
            for written in self.writes
        )

    def may_pass_gradient(self, unreached: Container[Tensor]) -> bool:
        """Whether a gradient may flow back through it: not through `detach` or a comparison, nor from `unreached`."""
        has_none = not self.grad_mode or self.name == "detach"
        outs = (out for out in self.outs if out not in unreached)
        may_have = any(out.needs_grad or (out.dtype.is_floating_point and not has_none) for out in outs)
        return may_have or ((not self.outs or bool(self.writes)) and (self.grad_mode or self.leaves_gradient))

    @property
    def where(self) -> str:
        """Such as " in line 12"; empty if the line is unknown."""
        return f" in line {self.source.line}" if self.source.line else ""

    def __str__(self) -> str:
        return f"{self.name}{self.where}"


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dictionaries."""
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]


class Program:
    """All operations in order, the tensors that the program returns, and which tensors have equal values."""

    def __init__(self, ops: Iterable[Op], results: Sequence[Tensor]):
        self.all_ops = list(ops)
        """Includes dead code, such as an operation whose result was read for its shape alone"""
        self.ops = live(self.all_ops, results)
        self.results = list(results)
        for position, op in enumerate(self.ops):
            op.position = position
            for out in op.outs:
                if out.op is None:
                    out.op = op
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                operand.users.append(op)
        self.writers = [op for op in self.ops if op.writes]
        """The operations that change a tensor in place"""
        self._count = itertools.count()
        self._numbers: dict[Any, int] = {}
        self._number_of: dict[Tensor, int] = {}
        self.changed: set[Tensor] = set()
        """The tensors that an operation may have changed in place, itself or through memory that they share"""
        for op in self.ops:
            self._number(op)
        needed, unreached = {*self.results}, set[Tensor]()
        for out in (out for op in reversed(self.ops) if not op.writes for out in op.outs):
            is_needed = out in needed or any(user.may_pass_gradient(unreached) for user in out.users)
            if out.needs_grad and not is_needed and out not in self.changed:
                # No gradient flows back to it, as under `torch.no_grad`: regions need not compute one.
                out.needs_grad = False
                unreached.add(out)

    def changes_before(self, reader: Op, *tensors: Tensor) -> int:
        """Returns how many in-place changes tensors may have had before an operation reads them."""
        return sum(any(map(op.may_change, tensors)) for op in self.writers if op.position <= reader.position)

    def value_number(self, tensor: Tensor) -> int:
        """Returns a number that is equal for tensors known to have equal values, and for labels in any shape."""
        if tensor not in self._number_of:
            self._number_of[tensor] = next(self._count)
        return self._number_of[tensor]

    def number_at(self, tensor: Tensor, reader: Op) -> tuple[int, int]:
        """Returns `value_number` and `changes_before`: equal for tensors with equal values when they are read."""
        return self.value_number(tensor), self.changes_before(reader, tensor)

    def is_read_after(self, tensor: Tensor, op: Op) -> bool:
        """Whether the program returns a tensor, or an operation after `op` reads it."""
        return tensor in self.results or any(user.position > op.position for user in tensor.users)

    def origin(self, tensor: Tensor) -> Op | None:
        """Returns the operation that computes a tensor's elements, before reshapes and copies.

        None for an argument of the program, and if any tensor on the way may be changed in place.
        """
        while tensor not in self.changed:
            if tensor.op is None or not keeps_elements(tensor.op):
                return tensor.op
            tensor = tensor.op.operands[0]
        return None

    def _number(self, op: Op) -> None:
        """Numbers the results of an operation, and renumbers the tensors that it changes in place, with their views."""
        for tensor in filter(op.may_change, self._number_of if op.writes else ()):
            self._number_of[tensor] = next(self._count)
            self.changed.add(tensor)
        outs = op.outs
        has_floats = any(out.dtype.is_floating_point for out in outs)
        if op.is_random or op.is_change or (has_floats and op.name not in _DETERMINISTIC):
            # Many operations may be random, and not all say so: only known ones are taken to give equal floats again.
            for out in outs:
                self.value_number(out)
            return
        if len(outs) == 1 and keeps_elements(op) and not op.operands[0].dtype.is_floating_point:
            self._number_of[outs[0]] = self.value_number(op.operands[0])
            return
        # With shapes and dtypes: equal labels of another shape expand differently, and a mask indexes unlike integers.
        operands = tree_map_only(Tensor, lambda x: (self.value_number(x), x.shape, x.dtype), (op.args, op.kwargs))
        key = op.name, repr(operands)
        for position, out in enumerate(outs):
            # A result of a detached operand has equal values, but not the same gradient.
            out_key = (*key, position, str(out.dtype), out.needs_grad)
            if out_key not in self._numbers:
                self._numbers[out_key] = next(self._count)
            self._number_of[out] = self._numbers[out_key]


def live(
    ops: Sequence[Op], results: Iterable[Tensor], *, computed: Container[Tensor] = (), dropped: Container[Op] = ()
) -> list[Op]:
    """Returns the operations without dead code.

    Args:
        ops: in order.
        results: the tensors that are needed, also if no operation reads them.
        computed: tensors that are computed elsewhere.
        dropped: in-place changes that are made elsewhere.
    """
    kept, needed = [], {*results}
    for op in reversed(ops):
        changes = (op.writes or not op.outs) and op not in dropped
        if changes or any(out in needed and out not in computed for out in op.outs):
            needed.update(op.operands)
            kept.append(op)
    return kept[::-1]


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal in every call; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def agree(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; if they are equal in this call, a guard ensures it for all others.

    Once lengths have changed, Dynamo has a symbol for each input's length, though labels are as long as the logits. It
    may have a number for one of the two, such as for the labels of two sequences, whose losses are split into two.
    """
    if same(a, b):
        return True
    symbols = [size for size in (a, b) if isinstance(size, torch.SymInt)]
    if any(map(depends_on_values, symbols)) or hint(a) != hint(b):
        return False
    if len(symbols) == 1:
        # A guard must not fix a length that the caller has declared as dynamic.
        return all(constraint.warn_only for constraint in _declared(symbols[0])) and bool(a == b)
    bounds = [size.node.shape_env.bound_sympy(size.node.expr) for size in symbols]
    is_range = any(hasattr(constraint, "vr") for size in symbols for constraint in _declared(size))
    return (not is_range or bounds[0] == bounds[1]) and bool(a == b)


def _declared(size: Any) -> list[Any]:
    """Returns the caller's constraints on the lengths in a size, as by `mark_dynamic`: no guard may narrow them.

    A symbol's bounds do not tell: they may come from guards, such as a model's check of the longest sequence.
    """
    node, declared = size.node, []
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for length, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if constraint is not None and isinstance(length, torch.SymInt):
                declared += [constraint] * bool(length.node.expr.free_symbols & node.expr.free_symbols)
    return declared


def hint(size: Any) -> int:
    """Returns the size in the call that is compiled; 1 if it depends on a tensor's values and is not known."""
    return 1 if depends_on_values(size) else size if isinstance(size, int) else size.node.hint


def depends_on_values(size: Any) -> bool:
    """Whether a size depends on a tensor's values, as the number of rows of `rows[mask]` does."""
    return not isinstance(size, int) and not size.node.has_hint()


def gives_a_size(op: Op) -> bool:
    """Whether a result has a size that depends on values and does not follow from the operands' sizes."""
    sizes, operand_sizes = ([size for tensor in tensors for size in tensor.shape] for tensors in (op.outs, op.operands))
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not free_unbacked_symbols(sizes) <= free_unbacked_symbols(operand_sizes)


def holds(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold.

    If lengths change, a guard ensures it for all other calls, unless the caller has declared a range: see `agree`.
    """
    if isinstance(condition, bool) or same(condition, True):
        return bool(condition)
    node = condition.node
    is_declared = any(hasattr(each, "vr") for each in _declared(condition))
    return node.has_hint() and bool(node.hint) and not is_declared and bool(condition)


def has_elements(tensor: Tensor) -> bool:
    """Whether a tensor is known to have elements: without any, a mean is NaN, and not a weighted sum."""
    return not depends_on_values(tensor.numel) and holds(tensor.numel > 0)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether all sizes of two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same, a, b))


def constant_of(value: Any, program: Program) -> float | None:
    """Returns the number that a scalar always is, as of `torch.log(torch.tensor(0.5))`; None if it is not known."""
    if not isinstance(value, Tensor):
        return float(value) if is_number(value) else None
    op = value.op
    if op is None or value.ndim or value in program.changed or not value.dtype.is_floating_point or not op.args:
        return None
    if op.name in _OF_CONSTANTS and not op.kwargs:
        operands = [constant_of(each, program) for each in op.args]
        function = getattr(torch, op.name)
    elif op.name in ("tensor", *COPIES) and op.kwargs.keys() <= {"dtype", "device"}:
        operands, function = [constant_of(op.args[0], program)], torch.clone
    else:
        return None
    if None in operands:
        return None
    # While a program is compiled, new tensors may be fake.
    with unset_fake_temporarily():
        return float(function(*(torch.tensor(each, dtype=value.dtype, device="cpu") for each in operands)))


_OF_CONSTANTS = ("add", "sub", "mul", "div", "neg", "log", "log1p", "exp")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and neither a symbol nor a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


COPIES = {
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "convert_element_type", "clone", "contiguous",
    "shallow_copy", "alias",
}  # fmt: skip
"""Operations that return the same elements in another dtype or place."""
RESHAPES = {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"}
PERMUTATIONS = {"permute", "transpose", "movedim", "t", "swapaxes", "swapdims", "mT", "T", "moveaxis"}
SPLITS = ("split", "chunk", "tensor_split", "unbind")
_DETERMINISTIC = {
    *COPIES, *RESHAPES, *PERMUTATIONS, "add", "sub", "mul", "div", "neg", "exp", "sum", "mean", "getitem",
    "select", "expand", "clamp", "clamp_min", "pow", "sqrt", "rsqrt", "reciprocal", "detach", "norm", "normalize",
    "_weight_norm", "linear", "matmul", "mm", "cat",
}  # fmt: skip
"""Operations that give equal floats for equal operands"""


def is_plain(key: tuple[Any, ...]) -> bool:
    """Whether an index has only numbers, slices, None and an ellipsis, so that it selects nothing twice.

    Not if a bound of a slice depends on a tensor's values, as after `item`: it cannot be compared with other bounds.
    """

    def is_size(bound: Any) -> bool:
        return bound is None or (isinstance(bound, int | torch.SymInt) and not depends_on_values(bound))

    return all(
        all(map(is_size, (part.start, part.stop, part.step)))
        if isinstance(part, slice)
        else part is None or part is Ellipsis or type(part) is int
        for part in key
    )


def is_selection(op: Op) -> bool:
    """Whether each result has some of its operand's elements, in any order, and none twice."""
    has_one_operand = not op.writes and len(op.operands) == 1
    return has_one_operand and (op.name in (*PERMUTATIONS, "select", "flip", "roll") or indices_of(op) is not None)


def stored(weight: Tensor) -> Tensor:
    """Returns the tensor that a weight was before copies and reshapes; of several that were joined, the first."""
    names = {*COPIES, *PERMUTATIONS, *RESHAPES, "detach", "expand", "stack", "cat"}
    while weight.op is not None and weight.op.name in names:
        weight = weight.op.operands[0]
    return weight


def without_tensors(op: Op) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments that are not tensors, to call a method: only a function may get its tensor by name."""
    arguments = [each for each in op.args if not isinstance(each, Tensor)]
    return arguments, {name: each for name, each in op.kwargs.items() if not isinstance(each, Tensor)}


def order_of(op: Op) -> tuple[int, ...]:
    """Returns the order of the dimensions after an operation of `PERMUTATIONS`."""
    # The size of each dimension is its number, so that the new shape is the order.
    example = torch.empty(tuple(range(op.operands[0].ndim)), device="meta")
    arguments, options = without_tensors(op)
    # thunder's primitive "transpose" takes the order as its only argument.
    name = "permute" if op.name == "transpose" and len(arguments) + len(options) == 1 else op.name
    permuted = getattr(example, name)
    return tuple((permuted(*arguments, **options) if callable(permuted) else permuted).shape)


_SELECTIONS = {
    "getitem": ("key",), "select": ("dim", "index"), "narrow": ("dim", "start", "length"), "unbind": ("dim",),
    "split": ("size", "dim"), "chunk": ("count", "dim"), "tensor_split": ("at", "dim"),
}  # fmt: skip
"""Parameters of operations that select by numbers and slices, after the operand."""


def indices_of(op: Op) -> list[tuple[Any, ...]] | None:
    """Returns for each result its index into the operand: a number or a slice for each dimension.

    The index has a None for a new dimension. Returns None if the operation is no such index, or may be another one.
    """
    if op.name not in _SELECTIONS or len(op.operands) != 1:
        return None
    operand, (arguments, options) = op.operands[0], without_tensors(op)
    values: dict[str, Any] = dict(zip(_SELECTIONS[op.name], arguments, strict=False)) | options
    if op.name == "getitem":
        key = values["key"] if isinstance(values["key"], tuple) else (values["key"],)
        if not is_plain(key):
            return None
        ellipsis = key.index(Ellipsis) if Ellipsis in key else len(key)
        missing = operand.ndim - sum(part is not None and part is not Ellipsis for part in key)
        return [(*key[:ellipsis], *[slice(None)] * missing, *key[ellipsis + 1 :])]
    dim, parts, end = values.get("dim", 0) % operand.ndim, list[Any](), 0
    if op.name == "select":
        parts = [values["index"]]
    elif op.name == "narrow":
        start = values["start"]
        if type(start) is not int and not holds(start >= 0):
            start = start % operand.shape[dim]  # From the end: a slice that stops at 0 would be empty.
        end = start + values["length"]
        parts = [slice(start, None if type(start) is int and start < 0 and end == 0 else end)]
    elif op.name == "unbind":
        parts = [*range(len(op.outs))]
    else:
        for out in op.outs:
            parts.append(slice(end, end + out.shape[dim]))
            end = parts[-1].stop
        if op.name == "tensor_split" and not same(end, operand.shape[dim]):
            return None  # Its indices are not in order.
    indices = [(*[slice(None)] * dim, part, *[slice(None)] * (operand.ndim - dim - 1)) for part in parts]
    return indices if all(map(is_plain, indices)) else None


def keeps_elements(op: Op) -> bool:
    """Whether a result has all elements of the first operand in order: after a reshape, a copy or an index of all."""
    if not op.operands or op.writes or not isinstance(op.output, Tensor):
        return False
    operand, out = op.operands[0], op.output
    if op.name in COPIES:
        # A cast to a narrower integer may change a label.
        return out.dtype == operand.dtype or out.dtype is torch.int64 or out.dtype.is_floating_point
    is_all = op.name in ("long", "detach") or indices_of(op) is not None
    return op.name in RESHAPES or (is_all and same(operand.numel, out.numel))
