"""Runs a program on descriptions of tensors (`algebra`) in place of numbers.

If an operation has a rule, the rule describes its result. Otherwise the operation demands its operands as tensors. An
operand that is a number of each row becomes a result, which a region can return; logits, or log-probabilities of all
classes, become an `Escape`, which prevents fusion.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

from thunder_flce.matching.algebra import Argmax, Class, Logits, Row, Unknown, Value, linears_of, require
from thunder_flce.matching.decisions import Decision, NotFused, Reason
from thunder_flce.matching.program import (
    PERMUTATIONS,
    RESHAPES,
    SPLITS,
    Op,
    Program,
    Tensor,
    agree,
    hint,
    is_number,
    keeps_elements,
    same,
    same_shape,
    stored,
)

LINEARS = ("linear", "inner", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "conv1d")
LOSSES = ("cross_entropy", "nll_loss")
NORMALISERS = ("log_softmax", "logsumexp")
_RESIZES_CLASSES = {
    "getitem", "narrow", "select", "index_select", "gather", "take_along_dim", "topk", *SPLITS, "cat", "pad", "repeat",
    "repeat_interleave", "tile", "setitem", "scatter", "scatter_add", "index_add", "index_copy",
}  # fmt: skip
"""Operations whose results may have another number of classes than their operands"""

_RULES: dict[str, Callable[..., Any]] = {}
"""The rules, by the names of operations"""


def rule(*names: str) -> Callable[[Callable], Callable]:
    """Registers a rule, which describes an operation's result, for the operations of these names.

    The rule is called with the interpreter, the operation, and the operation's arguments by PyTorch's names. For a
    parameter that is annotated as a description (`Class`, `Row`, `Argmax`), it gets the operand's description, and
    otherwise the operand itself. It returns the description of the result, or of each result. It raises `Unknown` if
    the result cannot be described; then, as if a description is not of the annotated type or an argument is not among
    the rule's, the interpreter demands the operands. It raises `NotFused` if the result is a loss.
    """

    def registered(function: Callable) -> Callable:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return registered


@dataclass(eq=False)
class Escape:
    """A use of a tensor that is computed from logits and that no region can return."""

    tensor: Tensor
    value: Class | Row
    user: Op | None
    """None if the program returns the tensor"""
    detail: str = ""
    columns: Any = None
    """In `Interpreter._escape_of`: number of classes of the tensor that is computed from it"""

    @property
    def linears(self) -> set[Tensor]:
        """Outputs of the linears that the tensor is computed from, also of a teacher's."""
        return linears_of(self.value.logits, self.value.labels)

    @property
    def problem(self) -> NotFused:
        """The reason why the logits are not fused."""
        if self.user is None and isinstance(self.value, Class):
            return NotFused(Reason.LOGITS_RETURNED)
        if self.user is not None and self.user.is_change:
            return NotFused(Reason.OPERAND_MODIFIED, f"by {self.user}")
        # Without a user, the tensor is one that the program returns, such as a maximum.
        return NotFused(Reason.LOGITS_USED, f"by {self.user or self.tensor.op}")

    @property
    def change(self) -> NotFused:
        """The reason why the user's result, which is computed from logits, has no description."""
        assert self.user is not None
        if self.value.logits.is_similarity:
            return NotFused(Reason.NO_LINEAR)
        reason = Reason.OPERAND_MODIFIED if self.user.is_change else Reason.TRANSFORMED_LOGITS
        return NotFused(reason, f"by {self.user.name}{self.detail}")


class Interpreter:
    """The descriptions of a program's tensors, its results, and its escapes."""

    def __init__(self, program: Program, *, joins: bool = True):
        self.program = program
        self.joins = joins
        """Whether rows that the program joins become rows of one call; all rows of one linear, in order, always do"""
        self.has_joined = False
        self.values: dict[Tensor, Value] = {}
        self.results: dict[Tensor, Row | Argmax] = {}
        """The tensors that the program needs, and that a region can return"""
        self.escapes: list[Escape] = []
        self.refusals: list[Decision] = []
        """Decisions about losses, and about normalisations that may lead to one, whose logits cannot be described"""
        self.broadcast: dict[Tensor, Tensor] = {}
        """Maps tensors that `broadcast_tensors` gave the shape of logits to its operands"""
        self._escape_of: dict[Tensor, Escape] = {}
        """Maps tensors of classes that are computed from logits, but not described, to the use without a rule"""
        self._first: dict[Any, Tensor] = {}
        self.followed: list[Op] = []
        """The in-place changes that are described"""
        for op in program.ops:
            self._interpret(op)
        for tensor in dict.fromkeys(program.results):
            self.demand(tensor, None)

    def get(self, tensor: Any) -> Value | None:
        """Returns the description of a tensor; None if it has none."""
        return self.values.get(tensor) if isinstance(tensor, Tensor) else None

    def _interpret(self, op: Op) -> None:
        described = [operand for operand in op.operands if operand in self.values]
        is_start = op.name in LINEARS or op.name in LOSSES
        if not described and not is_start:
            self._demand_operands(op)
            return
        detail = ""
        results: Any = None
        try:
            results = self._by_rule(op)
        except Unknown as problem:
            detail = f" {problem}" if str(problem) else ""
        except NotFused as problem:
            kind = "cross-entropy" if op.name in LOSSES else "log-probability"
            self.refusals.append(problem.at(op.source, kind))
            for operand in described:
                self._escape(operand, op)
            return
        if results is None:
            self._demand_operands(op, detail)
            return
        for out, result in zip(op.outs, results if isinstance(results, tuple) else (results,), strict=True):
            if result is not None:
                self.values[out] = result if out.needs_grad or isinstance(result, Argmax) else result.detached()
        row = self.get(op.output)
        if isinstance(row, Row) and (op.name in LOSSES or row.reduction != "none") and not row.is_term:
            self._add_result(row, op)
        if self.starts_logits(op.output):  # New logits, such as of the mean embedding under a softmax.
            for operand in described:
                self._escape(operand, op)
        if op.writes:
            self._update_views(op)

    def _by_rule(self, op: Op) -> Any:
        """Returns what a rule returns; None if there is none for the operation, or it does not take the arguments."""
        rule = None if op.writes and not self._is_written_out_of_place(op) else _RULES.get(op.name)
        if rule is None:
            return None
        signature, kinds = _signature(rule)
        try:
            bound = signature.bind(self, op, *op.args, **op.kwargs)
        except TypeError:
            return None
        for name, kind in kinds.items():
            value = bound.arguments[name] = self.get(bound.arguments[name])
            if not isinstance(value, kind):
                return None
        result = rule(*bound.args, **bound.kwargs)
        return None if isinstance(result, Row | Argmax) and self._is_seen_as_view(op) else result

    # In-place changes.

    def _is_written_out_of_place(self, op: Op) -> bool:
        """Whether an in-place change of logits is equivalent to a new tensor, for all tensors that share the memory."""
        written = op.operands[0]
        if op.name not in ("mul", "div", "neg", "add", "sub") or len(op.writes) != 1 or op.writes[0] is not written:
            return False
        values = [self.get(each) for each in (*op.args[1:], *op.kwargs.values()) if isinstance(each, Tensor)]
        is_plain = op.name in ("mul", "div", "add") and not any(values)  # A factor, or a bias.
        value = self.get(written)
        is_known = isinstance(value, Class) and (is_plain or all(isinstance(each, Row) for each in values))
        if isinstance(value, Class) and value.form == "product":
            # Views of it would not get the other's labels.
            others = (each for each in self.values if each is not written and each.shares_memory(written))
            is_known = not any(self.program.is_read_after(each, op) for each in others if each is not op.output)
        if not is_known or op.leaves_gradient or written.storage is None:
            return False
        # If only one of two aliases is detached, they do not have the same gradient after the change.
        return all(tensor.needs_grad == written.needs_grad for tensor in self.values if tensor.shares_memory(written))

    def _update_views(self, op: Op) -> None:
        """Changes the descriptions of all views that are read afterwards; views of other elements escape."""
        written = op.operands[0]
        old, new = self.values[written], self.values[op.output]
        self.followed.append(op)
        for tensor, value in list(self.values.items()):
            if tensor is op.output or not isinstance(value, Class) or not tensor.shares_memory(written):
                continue
            if not self.program.is_read_after(tensor, op):
                continue
            is_same = same(tensor.numel, written.numel) and value.logits.selection == old.logits.selection
            if not is_same or not isinstance(new, Class):
                self._escape(tensor, op)
            elif new.logits.rows == old.logits.rows:
                logits = replace(new.logits, rows=value.logits.rows)
                self.values[tensor] = replace(value, logits=logits, sum=new.sum, factor=new.factor, labels=new.labels)
            elif value.logits.rows == old.logits.rows:
                # A factor of each row, for a view whose rows are in the same order.
                self.values[tensor] = replace(value, logits=new.logits, sum=new.sum, labels=new.labels)
            else:
                self._escape(tensor, op)

    def _is_seen_as_view(self, op: Op) -> bool:
        """Whether the result shares memory with an operand, and it shows: that may change, or two are returned."""
        if not any(each.shares_memory(op.output) for each in op.operands):
            return False
        is_shared = sum(each.shares_memory(op.output) for each in {*self.program.results}) > 1
        return is_shared or op.output in self.program.changed

    def _drop_written_rows(self, op: Op) -> None:
        """Drops the descriptions of numbers of each row that an in-place change without a description writes to."""
        for written in op.writes:
            row_tensors = [tensor for tensor, value in self.values.items() if isinstance(value, Row | Argmax)]
            for tensor in filter(written.shares_memory, row_tensors):
                del self.values[tensor]

    # Results and escapes.

    def _add_result(self, row: Row, op: Op) -> None:
        """Makes a cross-entropy, or a sum over tokens, a result; `sums`, and no rule, follows its further use."""
        del self.values[op.output]
        self.results[op.output] = row
        for tensor in (*row.labels.tensors, row.class_weight):
            self.demand(tensor, op)

    def demand(self, tensor: Tensor | None, user: Op | None, detail: str = "") -> None:
        """Notes that an operation reads a tensor itself: its numbers are a result, or an escape."""
        value = self.get(tensor)
        if tensor is None or value is None:
            return
        if isinstance(value, Class) and user is not None and _sums(user, tensor, value.dim, self.program):
            value = self._later_sum(value)
        if isinstance(value, Class) or (isinstance(value, Row) and not value.is_whole):
            self._escape(tensor, user, detail)
        else:
            self.results.setdefault(tensor, value)

    def _later_sum(self, classes: Class) -> Class | Row:
        """Returns the sum over the classes, which the program computes later; the classes if it has no description."""
        try:
            require(classes.known_columns)
            return replace(classes.summed(classes.kept_shape), is_summed_later=True)
        except Unknown:
            return classes

    def _escape(self, tensor: Tensor, user: Op | None, detail: str = "") -> None:
        value = self.values.get(tensor)
        if isinstance(value, Class | Row):
            self.escapes.append(Escape(tensor, value, user, detail))

    def _demand_operands(self, op: Op, detail: str = "") -> None:
        """Demands the operands of an operation without a description; notes if its result is computed from logits."""
        operands = op.operands
        for operand in dict.fromkeys(operands):
            self.demand(operand, op, detail)
        self._drop_written_rows(op)
        described = ((each, self.get(each)) for each in operands)
        escapes = (
            Escape(each, value, op, detail, value.columns) if isinstance(value, Class) else self._escape_of.get(each)
            for each, value in described
        )
        escape = next(filter(None, escapes), None)
        # Not of a product, as of queries and keys: there may be as many tokens as a query has columns.
        if escape is not None and op.plain_name not in LINEARS:
            for out in (out for out in (*op.outs, *op.writes) if out not in self.values and out.shape):
                if any(same(size, escape.columns) for size in out.shape):
                    self._escape_of.setdefault(out, escape)
                elif op.name in _RESIZES_CLASSES:
                    self._escape_of.setdefault(out, replace(escape, columns=out.shape[-1]))
        value = None if escape is None else escape.value
        if op.name == "autograd_function_apply" and isinstance(value, Class) and value.logits.is_head:
            # Activations, and layers such as Mamba's, have more than one number for each row.
            sizes = 1, math.prod(value.rows_shape)
            is_loss = any(out.needs_grad and any(same(out.numel, size) for size in sizes) for out in op.outs)
            if is_loss and self.results.keys().isdisjoint(operands):  # Else it changes a loss's gradient.
                self.refusals.append(NotFused(Reason.CUSTOM_FUNCTION).at(op.source, "cross-entropy"))
        # Another softmax may be a gate's, or attention's.
        is_normalised = op.plain_name in NORMALISERS or (op.plain_name == "softmax" and escape is not None)
        if is_normalised and operands and op.outs[0].needs_grad:
            problem = escape.change if escape else self.why_unknown(operands[0], is_loss=False)
            if problem.reason is not Reason.NO_LINEAR and (escape is None or escape.value.logits.is_head):
                self.refusals.append(problem.at(op.source, "log-probability"))

    def why_unknown(self, logits: Tensor, *, is_loss: bool = True) -> NotFused:
        """Returns the reason why logits have no description: those of a loss, or of a softmax that may be no loss."""
        if logits in self._escape_of:
            return self._escape_of[logits].change
        origin, reader = logits, logits.op
        while (op := origin.op) is not None and op.operands:
            if not (keeps_elements(op) or op.plain_name in (*PERMUTATIONS, *RESHAPES, "getitem", "div", "mul")):
                break
            if op.name == "getitem" and isinstance(self.get(op.operands[0]), Class):
                break  # Selected columns of logits are no longer classes of the vocabulary.
            origin, reader = op.operands[0], op
        if op is None and origin.needs_grad:
            return NotFused(Reason.ARGUMENT)
        if op is not None and op.plain_name in LINEARS and (is_loss or _may_be_head(op)):
            if op.is_change:
                return NotFused(Reason.OPERAND_MODIFIED, f"by {op}")
            if self.get(origin) is not None and reader is not None:
                return NotFused(Reason.TRANSFORMED_LOGITS, f"by {reader.name}")
            return NotFused(Reason.ANOTHER_PRODUCT, str(op))
        return NotFused(Reason.NO_LINEAR)

    # Called by rules.

    def is_row_of(self, row: Row, classes: Class) -> bool:
        """Whether a number of each row belongs to the same rows, and its shape is broadcast along the classes."""
        return row.logits == classes.logits and same_shape(row.shape, classes.kept_shape)

    def labels_of(self, index: Tensor) -> Tensor:
        """Returns labels as they were before `broadcast_tensors`, if an index reads the first column of its result."""
        op = index.op
        if op is None or op.name != "getitem" or op.operands[0] not in self.broadcast:
            return index
        source, key = self.broadcast[op.operands[0]], op.args[1]
        is_first_column = isinstance(key, tuple) and key == (Ellipsis, slice(None, 1, None))
        are_same = is_first_column and same(source.shape[-1], 1) and same(source.numel, index.numel)
        require(are_same, "labels that are broadcast to other rows")
        return source

    def first_of(self, operand: Tensor, op: Op) -> Tensor:
        """Returns the first of all equal operands: autocast, for example, casts a parameter anew for each linear."""
        key = self.program.number_at(operand, op), operand.needs_grad
        return self._first.setdefault(key, operand)

    def starts_logits(self, tensor: Tensor) -> bool:
        """Whether a tensor is the output of a linear, with which logits begin."""
        value = self.get(tensor)
        return isinstance(value, Class) and tensor in value.logits.linears

    def depends_on(self, tensor: Tensor, *logits: Logits) -> bool:
        """Whether a tensor is computed from any of these logits."""
        linears = {linear for rows in logits for linear in rows.linears}
        first = min(out.position for out in linears)
        pending, seen = [tensor], set()
        while pending:
            each = pending.pop()
            if each in linears:
                return True
            if each not in seen and each.op is not None and each.position > first:
                seen.add(each)
                pending += [self.broadcast[each]] if each in self.broadcast else each.op.operands
        return False

    def is_every_index(self, index: Any, dim: int, shape: tuple[Any, ...]) -> bool:
        """Whether an index is 0, 1, … along one dimension of a shape, and constant along the others."""
        count = shape[dim]
        if isinstance(index, list | range):
            return len(shape) == 1 and list(index) == list(range(count))
        if not isinstance(index, Tensor):
            return False
        sizes = [1] * (len(shape) - index.ndim) + list(index.shape)
        if not all(position == dim or same(size, 1) for position, size in enumerate(sizes)):
            return False
        op = self.program.origin(index)
        if op is None or op.name != "arange":
            return False
        arguments = dict(zip(("start", "end", "step"), op.args, strict=False)) | op.kwargs
        start, end = arguments.get("start", 0), arguments.get("end")
        start, end = (0, start) if end is None else (start, end)
        return same(start, 0) and same(arguments.get("step", 1), 1) and agree(end, count)


def _sums(op: Op, classes: Tensor, dim: int, program: Program) -> bool:
    """Whether a program needs only the sum over the classes of what an operation makes of them.

    It may multiply those of a row by one number, or mask them, so that it would give the same sum if there were only
    one class, with the sum over all.
    """
    if op.name == "sum":
        dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        return not dims or dim in [each % classes.ndim for each in dims]
    is_first, is_zero = op.operands[0] is classes, [is_number(each) and each == 0 for each in op.args]
    is_linear = {
        "neg": True, "mul": True, "div": is_first and bool(op.args) and op.args[0] is classes,
        "masked_fill": is_first and any(is_zero), "where": any(is_zero),
    }.get(op.name, False)  # fmt: skip
    if not is_linear or op.kwargs or op.writes or op.operands.count(classes) != 1:
        return False
    others, from_end = [each for each in op.operands if each is not classes], dim - classes.ndim
    are_alike = all(each.ndim < -from_end or same(each.shape[from_end], 1) for each in others)
    out = op.output
    are_summed = out not in program.results and all(_sums(user, out, dim, program) for user in out.users)
    return are_alike and same_shape(out.shape, classes.shape) and are_summed


def _may_be_head(product: Op) -> bool:
    """Whether a product without a description may be a head: a weight's largest dimension is one of the result."""
    operands, shape = [stored(operand) for operand in product.operands], product.outs[0].shape
    weights = [each for each in operands if each.op is None and each.ndim > 1 and operands.count(each) == 1]
    return any(any(same(size, max(weight.shape, key=hint)) for size in shape) for weight in weights)


_DESCRIPTIONS = {Class, Row, Argmax}


@lru_cache(maxsize=512)
def _signature(rule: Any) -> tuple[inspect.Signature, dict[str, Any]]:
    """Returns the signature of a rule, and its parameters that are descriptions, with the types that these may have."""
    signature = inspect.signature(rule)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return signature, {name: kind for name, kind in kinds.items() if {*(get_args(kind) or (kind,))} <= _DESCRIPTIONS}
