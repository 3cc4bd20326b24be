"""A program as the matcher reads it: operations by PyTorch's names, on tensors, in order.

`dynamo.reading` makes one of a graph of Dynamo's, `graph.reading` of a trace of thunder's.
"""

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

CHANGED = "a change in place"
"""The name of an operation that stands for what a change in place has made of its operands."""


# Of thunder's, torch.mm has the name of its sparse sister.
NAMES = {
    "truediv": "div", "true_divide": "div", "itruediv": "div", "iadd": "add", "isub": "sub", "imul": "mul",
    "iand": "and_", "ior": "or_", "ixor": "xor", "concatenate": "cat", "concat": "cat", "multiply": "mul",
    "subtract": "sub", "divide": "div", "negative": "neg", "clip": "clamp", "special_entr": "entr",
    "special_xlogy": "xlogy", "special_log_softmax": "log_softmax", "special_softmax": "softmax",
    "special_logsumexp": "logsumexp", "special_expit": "sigmoid", "torch_max": "max", "stop_gradient": "detach",
    "spmm": "mm", "mod": "remainder", "slice_prim": "slice", "_softmax": "softmax",
    "update_aliases": CHANGED, "__eq__": "eq", "__abs__": "abs",
    "_get_data_attr": "detach", "numpy_T": "T",
}  # fmt: skip
"""Other names of operations that have one here: one for each meaning."""


class Source(NamedTuple):
    """A line of the user's."""

    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return "unknown source"
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(eq=False, slots=True, repr=False)
class Tensor:
    """A tensor of a program. Two are equal only if they are the same."""

    name: str
    shape: tuple[Any, ...]
    """Sizes: numbers, or symbols of Dynamo's, which only `same` compares."""
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    """Whether a gradient flows back through it: not if it was detached, or computed under `torch.no_grad`."""
    handle: Any = None
    """The graph's own: a node of Dynamo's, or a proxy of thunder's."""
    storage: Any = None
    """The same for tensors that share memory; None where nobody knows"""
    is_plain: bool = True
    """False for a DTensor and the like."""
    op: "Op | None" = None
    """What computes it; None for an argument of the program."""
    users: "list[Op]" = field(default_factory=list)
    is_number_read: bool = False
    """Whether the program reads it as a number, which may be a factor of anything: `item`"""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> Any:
        """The number of elements."""
        return math.prod(self.shape)

    def shares_memory(self, other: "Tensor") -> bool:
        """Whether both are known to have the same memory: they are one tensor, or have one storage."""
        if self.storage is None or other.storage is None:
            return self is other
        return bool(self.storage == other.storage)


@dataclass(eq=False, slots=True, repr=False)
class Op:
    """An operation."""

    name: str
    """Such as "view"; a method, a function and an operator of one meaning have one name."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    """A tensor, or a sequence of tensors."""
    source: Source = Source()
    writes: tuple[Tensor, ...] = ()
    """The operands that it changes in place."""
    is_random: bool = False
    """Whether another run may give other results: a draw, or what is not PyTorch's own"""
    grad_mode: bool = True
    """Whether gradients are recorded where it is"""
    handle: Any = None
    """The graph's own."""
    inside: Any = None
    """The checkpoint of the graph that it is in, which is not opened yet."""
    position: int = 0
    outs: list[Tensor] = field(init=False)
    """The tensors that it returns"""
    operands: list[Tensor] = field(init=False)
    """The tensors among its arguments"""

    def __post_init__(self) -> None:
        self.outs, self.operands = tensors_in(self.output), tensors_in((self.args, self.kwargs))

    @property
    def leaves_gradient(self) -> bool:
        """Whether it changes a tensor in place that keeps its gradient, as gradients are not recorded."""
        return not self.grad_mode and any(each.needs_grad for each in self.writes)

    def may_pass_gradient(self, logged: Container[Tensor]) -> bool:
        """Whether a gradient may come back through it: not through `detach` or a comparison, or from what is logged."""
        has_none = not self.grad_mode or self.name == "detach"
        outs = (out for out in self.outs if out not in logged)
        may_have = any(out.needs_grad or (out.dtype.is_floating_point and not has_none) for out in outs)
        return may_have or ((not self.outs or bool(self.writes)) and (self.grad_mode or self.leaves_gradient))

    @property
    def where(self) -> str:
        """Such as " in line 12", where that is known."""
        return f" in line {self.source.line}" if self.source.line else ""

    def __str__(self) -> str:
        return f"{self.name}{self.where}"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]


class Program:
    """All operations in order, the tensors that are returned, and which tensors have equal values."""

    def __init__(self, ops: Iterable[Op], results: Sequence[Tensor]):
        self.all_ops = list(ops)
        """With those that nothing needs, such as one whose result was read for its shape alone"""
        self.ops = live(self.all_ops, set(results))
        self.results = list(results)
        for position, op in enumerate(self.ops):
            op.position = position
            for out in op.outs:
                if out.op is None:
                    out.op = op
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                operand.users.append(op)
        self._writers = [op for op in self.ops if op.writes]
        self._count = itertools.count()
        self._numbers: dict[Any, int] = {}
        self._number_of: dict[Tensor, int] = {}
        self._changed: set[Tensor] = set()
        for op in self.ops:
            self._number(op)
        needed, logged = {*self.results}, set[Tensor]()
        for out in (out for op in reversed(self.ops) if not op.writes for out in op.outs):
            is_needed = out in needed or any(user.may_pass_gradient(logged) for user in out.users)
            if out.needs_grad and not is_needed and not self.may_have_changed(out):
                # As under `torch.no_grad`: no region computes a gradient of it.
                out.needs_grad = False
                logged.add(out)

    def writers(self, first: int, last: int) -> Iterator[Op]:
        """The operations in a range of positions that change a tensor in place."""
        return (op for op in self._writers if first <= op.position <= last)

    def changes_before(self, reader: Op, *tensors: Tensor) -> int:
        """How many changes in place some tensors may have had where an operation reads them."""
        writers = self.writers(0, reader.position)
        return sum(any(may_share(a, b) for a in op.writes for b in tensors) for op in writers)

    def value_number(self, tensor: Tensor) -> int:
        """The same for tensors that are known to be equal, and for a tensor of labels in any shape."""
        if tensor not in self._number_of:
            self._number_of[tensor] = next(self._count)
        return self._number_of[tensor]

    def number_at(self, tensor: Tensor, reader: Op) -> tuple[int, int]:
        """`value_number`, and `changes_before`: the same for tensors that are equal where operations read them."""
        return self.value_number(tensor), self.changes_before(reader, tensor)

    def may_have_changed(self, tensor: Tensor) -> bool:
        """Whether an operation in place may have written to it, or to what it is a view of."""
        return tensor in self._changed

    def origin(self, tensor: Tensor) -> Op | None:
        """What computes its elements, before reshapes and copies; None where any of these may be changed in place."""
        while not self.may_have_changed(tensor):
            op = tensor.op
            if op is None or not op.operands or not keeps_elements(op):
                return op
            tensor = op.operands[0]
        return None

    def _number(self, op: Op) -> None:
        """Numbers the results of an operation; of a tensor that it changes in place, and of its views, anew."""
        for tensor in op.writes:
            for known in self._number_of:
                if may_share(tensor, known):
                    self._number_of[known] = next(self._count)
                    self._changed.add(known)
        outs = op.outs
        has_floats = any(out.dtype.is_floating_point for out in outs)
        if op.is_random or op.writes or (has_floats and op.name not in _THE_SAME_AGAIN):
            # Many operations may draw floats, and not all of them say so.
            for out in outs:
                self.value_number(out)
            return
        if len(outs) == 1 and op.operands and keeps_elements(op) and not op.operands[0].dtype.is_floating_point:
            self._number_of[outs[0]] = self.value_number(op.operands[0])
            return
        # The same number in another shape is expanded to other elements, and a mask picks others than its integers.
        given = tree_map_only(Tensor, lambda x: (self.value_number(x), x.shape, x.dtype), (op.args, op.kwargs))
        key = op.name, repr(given)
        for at, out in enumerate(outs):
            # What is made of one without a gradient has less of a gradient, too.
            of_out = (*key, at, str(out.dtype), out.needs_grad)
            if of_out not in self._numbers:
                self._numbers[of_out] = next(self._count)
            self._number_of[out] = self._numbers[of_out]


def live(
    ops: Sequence[Op], needed: set[Tensor], *, given: Container[Tensor] = (), dropped: Container[Op] = ()
) -> list[Op]:
    """Without operations that nothing needs.

    Args:
        ops: in order.
        needed: the tensors that are; those that the operations read are added.
        given: tensors that something else computes.
        dropped: changes in place that something else makes.
    """
    kept = []
    for op in reversed(ops):
        changes = (op.writes or not op.outs) and op not in dropped
        if changes or any(out in needed and out not in given for out in op.outs):
            needed.update(op.operands)
            kept.append(op)
    return kept[::-1]


def may_share(written: Tensor, other: Tensor) -> bool:
    """Whether tensors may share memory: by their storages or, where these are not known, by their dtypes."""
    if written.storage is not None and other.storage is not None:
        return bool(written.storage == other.storage)
    return written.dtype == other.dtype


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal for every call; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def agree(a: Any, b: Any) -> bool:
    """Whether two sizes are equal. Where they are so in this call, a guard makes sure of it for all others.

    Dynamo has a symbol for each input's length once lengths have changed, though labels have that of the logits. Of one
    of them it may have the number instead, such as of the labels of two sequences, whose losses are split into two.
    """
    if same(a, b):
        return True
    symbolic = [each for each in (a, b) if isinstance(each, torch.SymInt)]
    if any(map(depends_on_values, symbolic)) or hint(a) != hint(b):
        return False
    if len(symbolic) == 1:
        # Nor one that the caller has said will change.
        return all(each.warn_only for each in _declared(symbolic[0])) and bool(a == b)
    bounds = [each.node.shape_env.bound_sympy(each.node.expr) for each in symbolic]
    is_range = any(hasattr(each, "vr") for size in symbolic for each in _declared(size))
    return (not is_range or bounds[0] == bounds[1]) and bool(a == b)


def _declared(size: Any) -> list[Any]:
    """What the caller has said of the lengths that a size is made of, as by `mark_dynamic`: no guard may narrow that.

    Bounds of a symbol may come from guards alone, such as a model's check of the longest sequence.
    """
    node, found = size.node, []
    for each in node.shape_env.tracked_fakes or ():
        constraints = getattr(each.symbolic_context, "constraint_sizes", None) or ()
        for length, constraint in zip(getattr(each.fake, "shape", ()), constraints, strict=False):
            if constraint is not None and isinstance(length, torch.SymInt):
                found += [constraint] * bool(length.node.expr.free_symbols & node.expr.free_symbols)
    return found


def hint(size: Any) -> int:
    """The size in the call that is compiled; 1 where that is not known, as it depends on a tensor's values."""
    return 1 if depends_on_values(size) else size if isinstance(size, int) else size.node.hint


def depends_on_values(size: Any) -> bool:
    """Whether a size depends on a tensor's values, as that of `rows[mask]`."""
    return not isinstance(size, int) and not size.node.has_hint()


def gives_a_size(op: Op) -> bool:
    """Whether a size of its result depends on values, and no size of an operand says it."""
    sizes, known = ([size for each in of for size in each.shape] for of in (op.outs, op.operands))
    if not any(map(depends_on_values, sizes)):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not free_unbacked_symbols(sizes) <= free_unbacked_symbols(known)


def holds(condition: Any) -> bool:
    """Whether a condition of sizes holds, as far as that is known.

    Where lengths change, a guard makes sure of it for all other calls, unless a range is declared: see `agree`.
    """
    if isinstance(condition, bool) or same(condition, True):
        return bool(condition)
    node = condition.node
    is_declared = any(hasattr(each, "vr") for each in _declared(condition))
    return node.has_hint() and bool(node.hint) and not is_declared and bool(condition)


def has_elements(tensor: Tensor) -> bool:
    """Whether it has elements, as far as that is known: the mean of none is NaN, and no sum."""
    return not depends_on_values(tensor.numel) and holds(tensor.numel > 0)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether all sizes are the same."""
    return len(a) == len(b) and all(map(same, a, b))


def is_number(value: Any) -> bool:
    """Whether it is a finite number that is known."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


COPIES = {
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "convert_element_type", "clone", "contiguous",
    "shallow_copy", "alias",
}  # fmt: skip
"""Return the same elements, in another dtype or place."""
RESHAPES = {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"}
PERMUTATIONS = {"permute", "transpose", "movedim", "t", "swapaxes", "swapdims", "mT", "T", "moveaxis"}
SPLITS = ("split", "chunk", "tensor_split", "unbind")
_THE_SAME_AGAIN = {
    *COPIES, *RESHAPES, *PERMUTATIONS, "add", "sub", "mul", "div", "neg", "exp", "sum", "mean", "getitem",
    "select", "expand", "clamp", "clamp_min", "pow", "sqrt", "rsqrt", "reciprocal", "detach", "norm", "normalize",
    "_weight_norm", "linear", "matmul", "mm", "cat",
}  # fmt: skip
"""Give the same floats of the same operands"""


def is_plain(key: tuple[Any, ...]) -> bool:
    """Whether an index has numbers and slices alone, and so picks nothing twice."""
    sizes = (int, torch.SymInt, type(None))
    return all(
        all(isinstance(each, sizes) for each in (part.start, part.stop, part.step))
        if isinstance(part, slice)
        else part is None or part is Ellipsis or type(part) is int
        for part in key
    )


def is_pick(op: Op) -> bool:
    """Whether each of its results has elements of its operand, in any order, and none twice."""
    is_of_one = not op.writes and len(op.operands) == 1
    return is_of_one and (op.name in (*PERMUTATIONS, "select", "flip", "roll") or indices_of(op) is not None)


def stored(weight: Tensor) -> Tensor:
    """A weight, or the first of several, as it was before copies and changes of its shape."""
    names = {*COPIES, *PERMUTATIONS, *RESHAPES, "detach", "expand", "stack", "cat"}
    while weight.op is not None and weight.op.name in names:
        weight = weight.op.operands[0]
    return weight


def without_tensors(op: Op) -> tuple[list[Any], dict[str, Any]]:
    """Its arguments that are no tensors: a function may be given its tensor by name, a method may not."""
    given = [each for each in op.args if not isinstance(each, Tensor)]
    return given, {name: each for name, each in op.kwargs.items() if not isinstance(each, Tensor)}


def order_of(op: Op) -> tuple[int, ...]:
    """The order of the dimensions that an operation of `PERMUTATIONS` makes."""
    # Of sizes that are all different.
    like = torch.empty(tuple(range(op.operands[0].ndim)), device="meta")
    given, named = without_tensors(op)
    # thunder's primitive has the order as its only argument.
    name = "permute" if op.name == "transpose" and len(given) + len(named) == 1 else op.name
    permuted = getattr(like, name)
    return tuple((permuted(*given, **named) if callable(permuted) else permuted).shape)


_PICKS = {
    "getitem": ("key",), "select": ("dim", "index"), "narrow": ("dim", "start", "length"), "unbind": ("dim",),
    "split": ("size", "dim"), "chunk": ("count", "dim"), "tensor_split": ("at", "dim"),
}  # fmt: skip
"""What these operations are given beside their operand."""


def indices_of(op: Op) -> list[tuple[Any, ...]] | None:
    """The index into the operand that each result has: for each dimension, a number or a slice.

    A dimension that is new has a None. None where an operation is no such index, or may have others.
    """
    if op.name not in _PICKS or len(op.operands) != 1:
        return None
    operand, (given, named) = op.operands[0], without_tensors(op)
    known: dict[str, Any] = dict(zip(_PICKS[op.name], given, strict=False)) | named
    if op.name == "getitem":
        key = known["key"] if isinstance(known["key"], tuple) else (known["key"],)
        return [full_index(key, operand.ndim)] if is_plain(key) else None
    dim, parts, end = known.get("dim", 0) % operand.ndim, list[Any](), 0
    if op.name == "select":
        parts = [known["index"]]
    elif op.name == "narrow":
        start = known["start"]
        if type(start) is not int and not holds(start >= 0):
            start = start % operand.shape[dim]  # From the end, up to which a slice that ends at 0 would not go.
        end = start + known["length"]
        parts = [slice(start, None if type(start) is int and start < 0 and end == 0 else end)]
    elif op.name == "unbind":
        parts = [*range(len(op.outs))]
    else:
        for out in op.outs:
            parts.append(slice(end, end + out.shape[dim]))
            end = parts[-1].stop
        if op.name == "tensor_split" and not same(end, operand.shape[dim]):
            return None  # At indices that are not in order.
    found = [(*[slice(None)] * dim, part, *[slice(None)] * (operand.ndim - dim - 1)) for part in parts]
    return found if all(map(is_plain, found)) else None


def full_index(key: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """An index with a part for each dimension."""
    dots = next((at for at, part in enumerate(key) if part is Ellipsis), len(key))
    head, tail = key[:dots], key[dots + 1 :]
    given = sum(part is not None for part in (*head, *tail))
    return (*head, *(slice(None),) * (ndim - given), *tail)


def keeps_elements(op: Op) -> bool:
    """Whether a result has all elements of the first operand in their order: a reshape, a copy, or such an index."""
    operand, out = op.operands[0], op.output
    if not isinstance(out, Tensor) or op.writes:
        return False
    if op.name in COPIES:
        # A narrower integer might be another label.
        return out.dtype == operand.dtype or out.dtype is torch.int64 or out.dtype.is_floating_point
    is_all = op.name in ("long", "detach") or indices_of(op) is not None
    return op.name in RESHAPES or (is_all and same(operand.numel, out.numel))
