"""Finds the sum over tokens that a program computes from its log-probabilities, entropies and token losses.

    ratio = (log_prob - old).exp()                                          on single tokens: `operation.pointwise`
    per_token = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    loss = (per_token * mask).sum() / mask.sum()                            linear in these: a weight for each token

The gradients of such a sum can be computed while a chunk's logits are there. If a loss mixes tokens in another way,
such as a preference loss of whole sequences, its gradients are known only once all tokens are computed.

Of each operation of the linear part, the search only checks that it is linear. The weights are the derivative of
that part, which the writer of the graph gets from autograd.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.parts import Part, TokenInput
from thunder_flce.matching.program import (
    COPIES,
    PERMUTATIONS,
    RESHAPES,
    SPLITS,
    Op,
    Tensor,
    depends_on_values,
    has_elements,
    holds,
    indices_of,
    is_number,
    is_selection,
    keeps_elements,
    live,
    same,
    tensors_in,
    without_tensors,
)
from thunder_flce.operation.pointwise import (
    VARIABLES,
    Handle,
    NotPointwise,
    evaluate,
    input_name,
    renumber_inputs,
    uses,
)

CASTS = {*COPIES, "bool", "int", "long"}
"""Operations that change at most the dtype."""

# A region runs the operations of a token loss one by one for each chunk, and a compiler would fuse them. PPO with a
# penalty has 37. With 37, 148, 296, 592 and 1184 operations, 8192 × 151936 × 896 takes 10.7, 12.1, 12.5, 20.2 and
# 28.0 ms, and 12.8 to 13.0 ms if gradients wait (H100).
MOST_OPERATIONS = 250


class NotASum(Exception):
    """Raised if gradients have to wait for the backward; the message says why."""


class FactorNeedsGradient(NotASum):
    """Raised for a factor that needs a gradient itself, whether or not the operations after it are linear."""


@dataclass(eq=False)
class Summand:
    """A number of each token that enters the sum with weights, or the mean or sum of such a number."""

    part: Part
    handle: Handle
    """Its handle in the part's recorder"""
    tensor: Tensor
    text: str
    """The token loss that computes it"""
    inputs: list[TokenInput]
    """The tensors that the token loss reads"""
    selections: tuple[Tensor, ...] = ()
    """Results of the operations that selected its tokens, in order; empty if it has all tokens in their order"""


@dataclass(eq=False)
class TokenSum:
    """A scalar through which all gradients of the sources flow; the sources are the parts' results."""

    place: Tensor
    """The scalar, whose place in the program the region takes"""
    summands: list[Summand]
    ops: list[Op]
    """The linear operations from the summands to the place, in order"""
    parts: Sequence[Part]
    kept: set[Tensor]
    """The parts' results that the program needs elsewhere, too, without a gradient"""
    writes: set[Op]
    """The in-place changes that it replaces"""
    other_losses: list[Tensor]
    """Other losses that are added between its terms"""
    has_constant: bool
    """Whether a number that does not depend on the summands may be added to it, too"""

    @property
    def as_losses(self) -> tuple[list[Fraction], Fraction] | None:
        """Factor of each part, and label smoothing of all, if every summand has a `Part.as_loss`; else None."""
        factors, smoothings = list[Fraction](), set[Fraction]()
        has_teacher = any(part.teacher is not None for part in self.parts)
        for part in self.parts:
            if has_teacher and not any(summand.part is part for summand in self.summands):
                factors.append(Fraction(0))  # A cross-entropy that is only logged, beside a divergence.
                continue
            losses = {part.handles[tensor]: part.as_loss(tensor) for tensor in part.rows if tensor.needs_grad}
            part_losses = {losses.get(summand.handle) for summand in self.summands if summand.part is part}
            if len(part_losses) != 1 or (loss := part_losses.pop()) is None:
                return None
            factors.append(loss[0])
            smoothings.add(loss[1])
        return (factors, smoothings.pop()) if len(smoothings) == 1 else None

    def groups_of(self, part: Part) -> list[list[Summand]]:
        """Returns the summands of a part in groups: each group is one loss of different tokens, computed once."""
        groups: list[list[Summand]] = []
        partners: dict[tuple[TokenInput, int], TokenInput] = {}
        for summand in self.summands:
            if summand.part is not part:
                continue
            for group in groups:
                first, number = group[0], len(group)
                pairs = [*zip(first.inputs, summand.inputs, strict=False)]
                is_same = first.text == summand.text and all(a.dtype == b.dtype for a, b in pairs)
                # An input that several losses share must have one partner.
                is_same = is_same and all(partners.get((a, number), b) is b for a, b in pairs)
                if is_same and _come_after(summand.selections, group[-1].selections):
                    partners |= {(a, number): b for a, b in pairs}
                    group.append(summand)
                    break
            else:
                groups.append([summand])
        return groups

    def loss_of(self, part: Part, *, has_weights: bool = True) -> tuple[str, list[tuple[TokenInput, ...] | int]]:
        """Returns the token loss of a part's rows, and the inputs that it reads.

        If an input differs for selected tokens, it has a `TokenInput` for each selection. A number stands for the
        weights of the tokens of a group: with `has_weights`, the loss is multiplied by them.
        """
        recorder, loss = part.recorder.copy(), None
        inputs: dict[Any, Any] = {input: (input,) for input in part.inputs.values()}
        for number, group in enumerate(self.groups_of(part)):
            handle = group[0].handle
            # If several losses read one input, the largest group has it for all their tokens.
            for partners in zip(*(each.inputs for each in group), strict=True):
                inputs[partners[0]] = max(inputs[partners[0]], partners, key=len)
            if has_weights:
                weight = recorder.add_input(torch.float32)
                inputs[weight] = number
                # The loss of tokens that are left out, such as ignored ones, may be infinite.
                handle = recorder.write("where", (recorder.write("ne", (weight, 0.0), {}), handle, 0.0), {})
                handle = recorder.write("mul", (handle, weight), {})
            loss = handle if loss is None else recorder.write("add", (loss, handle), {})
        if loss is None:  # No result is a term of the sum, such as losses of which a histogram is made.
            return "", []
        (text, read), numbered = renumber_inputs(recorder.finish(loss)), [*inputs.values()]
        return text, [numbered[number] for number in read]

    def counts_ignored(self, part: Part) -> bool:
        """Whether a row with an ignored label, whose loss is 0, may add a number other than 0 to the sum."""
        if self.as_losses is not None:
            return False
        # While a program is compiled, new tensors may be fake.
        with unset_fake_temporarily():
            zeros = {"log_prob": torch.zeros(1, device="cpu")}
            valid = torch.ones(1, dtype=torch.bool, device="cpu")
            return any(
                any(input.ignored is None for input in summand.inputs)
                or any(uses(summand.text, name) for name in VARIABLES[1:])
                or evaluate(summand.text, zeros | {input_name(at): valid for at in range(len(summand.inputs))}).any()
                for summand, *_ in self.groups_of(part)
            )


def find_sum(parts: Sequence[Part], interpreter: Interpreter) -> TokenSum:
    """Returns the scalar through which all gradients of some parts flow, with the factors that follow it.

    Raises:
        NotASum: if gradients reach the parts' results in another way, too, or the program mixes tokens.
    """
    if any(same(part.count, 0) for part in parts):
        raise NotASum("there are no tokens")  # Their mean is NaN.
    search, result = _Search(parts, interpreter), None
    for place in search.scalars():
        try:
            total = search.sum_at(place)
        except NotASum:
            if result is None:
                return search.sum_at(place, others={})
            break
        if result is not None and result.kept != total.kept:
            break  # A source is needed without the factor, too.
        result = total
    if result is None:
        raise NotASum(search.problem or "the program does not reduce its results to one scalar")
    return result


# Linear in their first operand, if no other argument depends on the tokens.
_LINEAR_IN_FIRST = {
    *RESHAPES, *PERMUTATIONS, *COPIES, *SPLITS, "sum", "mean", "neg", "getitem", "select", "narrow", "index_select",
    "flip", "roll", "expand", "expand_as", "repeat", "repeat_interleave", "cumsum", "diagonal", "masked_select",
    "gather", "take", "take_along_dim", "broadcast_to", "sum_to_size", "tile", "atleast_1d", "atleast_2d", "tril",
    "triu",
}  # fmt: skip
PRODUCTS = ("mul", "dot", "matmul", "mv", "mm", "bmm", "einsum", "inner", "outer", "vdot", "tensordot", "linear")
_JOINS = ("cat", "stack", "hstack", "vstack")


class _Tokens(NamedTuple):
    """A tensor that is computed token by token: see `Summand`."""

    part: Part
    handle: Handle
    selections: tuple[Tensor, ...] = ()


class _Search:
    """Follows a program forwards from the sources, token by token, and back from a scalar, while it is linear."""

    def __init__(self, parts: Sequence[Part], interpreter: Interpreter):
        self._interpreter, self._program, self._parts = interpreter, interpreter.program, parts
        self._sources: dict[Tensor, _Tokens] = {}
        self._logged: set[Tensor] = set()
        """The parts' results that are no sources"""
        self._tokens: dict[Tensor, _Tokens] = {}
        """The tensors that are computed token by token"""
        self._unselected: dict[tuple[Part, Handle], Handle] = {}
        """For a handle of selected tokens: the handle of all tokens that they were selected from"""
        self._problems: dict[Tensor, NotASum] = {}
        """Why other tensors are not computed token by token"""
        self._writes: set[Op] = set()
        self._is_read: dict[tuple[Tensor, Op], bool] = {}
        for part in parts:
            for tensor, row in part.rows.items():
                if row.has_maximum:
                    self._logged.add(tensor)
                    continue
                if tensor not in part.handles:
                    part.handles[tensor] = _record_source(tensor, part)
                self._sources[tensor] = _Tokens(part, part.handles[tensor])
                if row.reduction == "none" and not part.has_several_labels and not row.is_summed_later:
                    self._tokens[tensor] = self._sources[tensor]
        self._dependent = set(self._sources)
        self._with_grad = {tensor for tensor in self._sources if tensor.needs_grad}
        """Tensors from which gradients flow back to the sources"""
        for op in self._program.ops:
            self._follow(op)
        self._last_read, self.problem = self._follow_gradients()

    def _operands(self, op: Op) -> list[Tensor]:
        return [operand for operand in dict.fromkeys(op.operands) if operand in self._dependent]

    def _follow(self, op: Op) -> None:
        """Records the result of an operation if it is computed token by token; else notes why not."""
        operands, outs = self._operands(op), op.outs
        # A described result is computed from logits: if it is needed, it is a source, or another region's result.
        if not operands or (
            outs and all(out in self._interpreter.values and not self._interpreter.starts_logits(out) for out in outs)
        ):
            return
        self._dependent.update(outs)
        if any(operand in self._with_grad for operand in operands):
            self._with_grad.update(out for out in outs if out.needs_grad)
        if not outs or not self._sources.keys().isdisjoint(outs):
            return
        if not all(operand in self._tokens for operand in operands):
            self._pass_on_problems(operands, outs[0])
            return
        *others, tokens = (self._tokens[operand] for operand in operands)
        if any(each.part is not tokens.part or _key(each.selections) != _key(tokens.selections) for each in others):
            self._problems[outs[0]] = NotASum(f"{op} combines different tokens")
            return
        if is_selection(op) and not keeps_elements(op) and all(map(has_elements, outs)):
            self._tokens |= {out: self._selected(out, op, tokens) for out in outs}
            return
        if not isinstance(op.output, Tensor) or op.name in ("sum", "mean", *PERMUTATIONS):
            return
        # PyTorch may not know that a reshape keeps the product of symbolic sizes.
        if not (keeps_elements(op) or same(outs[0].numel, operands[0].numel)):
            return
        try:
            self._tokens[outs[0]] = tokens._replace(handle=self._record_operation(op, tokens))
        except NotPointwise as problem:
            self._problems[outs[0]] = NotASum(f"{problem}{op.where} is not an operation on single tokens")
        except NotASum as problem:
            self._problems[outs[0]] = problem

    def _pass_on_problems(self, operands: Sequence[Tensor], out: Tensor) -> None:
        """Passes on to a result why its operands are not computed token by token, unless a sum allows it."""
        for operand in operands:
            op, problem = operand.op, self._problems.get(operand)
            if problem is not None and op is not None:
                if isinstance(problem, FactorNeedsGradient) or not self._is_linear(op):
                    self._problems[out] = problem

    def _selected(self, out: Tensor, op: Op, tokens: _Tokens) -> _Tokens:
        """Records selected tokens: all others become 0, and so do their gradients, whatever is computed from them."""
        part, handle, selections = tokens.part, tokens.handle, (*tokens.selections, out)
        mask = part.add_input(
            TokenInput(True, torch.bool, out.shape, op.position, selections=selections, key=_key(selections))
        )
        handle = handle if out.needs_grad else part.recorder.detached(handle)
        selected = part.recorder.write("where", (mask, handle, 0.0 if out.dtype.is_floating_point else False), {})
        self._unselected[part, selected] = self._unselected.get((part, handle), handle)
        return _Tokens(part, selected, selections)

    def scalars(self) -> Iterator[Tensor]:
        """Yields the scalars through which all gradients of the sources flow, in order."""
        last_source = max((each.position for each in self._sources if each in self._last_read), default=0)
        last_read: float = 0  # of what is computed before the scalar
        for op in (op for op in self._program.ops if not self._last_read.keys().isdisjoint(op.outs)):
            out = op.outs[0]
            has_all_tokens = out in self._tokens and not self._tokens[out].selections
            is_scalar = len(op.outs) == 1 and out.ndim == 0 and out in self._with_grad
            # A source that is computed later is also read later.
            if is_scalar and not has_all_tokens and max(last_source, last_read) <= op.position:
                yield out
            last_read = max(last_read, *(self._last_read.get(each, 0) for each in op.outs))

    def _follow_gradients(self) -> tuple[dict[Tensor, float], str]:
        """Returns, for each tensor that gradients pass on their way to the sources, the position of its last reader.

        The position is infinite if gradients also come from elsewhere, as to a result; the text then says from where.
        """
        reached = {source for source in self._sources if source.needs_grad}
        last_read: dict[Tensor, float] = {}
        readers: list[tuple[Op, list[Tensor]]] = []
        problem = ""
        for op in self._program.ops:
            read = [operand for operand in op.operands if operand in reached]
            outs = [out for out in op.outs if out.needs_grad]
            # A change through a view reaches all later readers of its base.
            is_seen = bool(read and outs) and any(self._is_read_after(written, op) for written in op.writes)
            has_gradient = op.grad_mode or op.leaves_gradient
            if is_seen or (read and op.writes and not op.outs and has_gradient):
                problem = problem or f"{op} changes a tensor in place"
                last_read |= dict.fromkeys(read, math.inf)
            if read and outs:
                readers.append((op, read))
                reached.update(outs)
        if returned := reached.intersection(self._program.results):
            text = "its result, or a tensor computed from it, is returned or used after a graph break, and not detached"
            problem = problem or text
            last_read |= dict.fromkeys(returned, math.inf)
        for op, read in reversed(readers):
            # No gradient comes back from some readers, such as a write to a buffer under `torch.no_grad`.
            if any(out in last_read for out in op.outs if out.needs_grad):
                for operand in read:
                    last_read.setdefault(operand, op.position)
        return last_read, problem

    def sum_at(self, place: Tensor, others: dict[Tensor, None] | None = None) -> TokenSum:
        """Returns a scalar as a sum. With `others`, its terms may include other losses, which are added to that dict.

        Raises:
            NotASum: if it is none.
        """
        linear: dict[Op, None] = {}
        starts: dict[Tensor, None] = {}
        waiting = [place]
        while waiting:
            tensor = waiting.pop()
            op = tensor.op
            if tensor in self._sources or op is None or not self._is_linear_step(tensor, op, others):
                starts[tensor] = None
            elif op not in linear:
                linear[op] = None
                waiting += self._operands(op)
        order = sorted(linear, key=lambda op: op.position)
        if any(tensor in op.operands for op in order if op.name not in ("add", "sub") for tensor in others or ()):
            raise NotASum("another loss is both added to it and multiplied with it")
        is_read = any(tensor.is_number_read for op in order for tensor in op.operands)
        if is_read or any(not self._dependent.isdisjoint(op.numbers) for op in order):
            raise NotASum("the program reads one of its terms as a number, such as by item()")
        in_order = [tensor for op in order for tensor in op.operands if tensor in starts] or [place]
        summands = [self._summand(tensor) for tensor in dict.fromkeys(in_order)]
        results, computed = self._program.results, {place, *self._sources}
        rest = live(self._program.ops, results, computed=computed, dropped=self._writes)
        kept = {*results, *(each for op in rest for each in op.operands)}.intersection(self._sources) - {place}
        kept |= self._logged
        has_constant = any(self._is_affine(op) and not self._is_linear(op) for op in order)
        total = TokenSum(place, summands, order, self._parts, kept, self._writes, list(others or ()), has_constant)
        # A region runs the same token loss for all its parts: the operations of one part count.
        operations = max(sum(each.text.count(" = ") for each, *_ in total.groups_of(part)) for part in self._parts)
        if operations > MOST_OPERATIONS and total.as_losses is None:
            taken = f"{operations} operations on tokens, more than the limit of {MOST_OPERATIONS}"
            raise NotASum(f"the loss and its derivatives take {taken}")
        return total

    def _summand(self, tensor: Tensor) -> Summand:
        part, handle, selections = self._tokens.get(tensor) or self._sources[tensor]
        handle = self._unselected.get((part, handle), handle)
        try:
            text, read = renumber_inputs(part.recorder.copy().finish(handle))
        except NotPointwise:
            raise NotASum(f"{_name(tensor)} does not depend on the logits") from None
        inputs = [*part.inputs.values()]
        return Summand(part, handle, tensor, text, [inputs[at] for at in read], selections)

    def _is_linear_step(self, tensor: Tensor, op: Op, others: dict[Tensor, None] | None) -> bool:
        """Whether a tensor counts as a linear combination of its operands, and not as a summand.

        A product of tokens that comes last, as with a mask, counts as one: its factors become weights, and tokens of
        weight 0 are left out.
        """
        operands = self._operands(op)
        is_linear = self._is_linear(op) or (tensor not in self._tokens and self._is_affine(op))
        if tensor in self._tokens:
            is_product = is_linear and len(operands) == 1 and operands[0] in self._with_grad and not op.writes
            return is_product and tensor in self._with_grad and tensor.dtype == operands[0].dtype
        added = [operand for operand in op.operands if operand not in self._dependent]
        if others is not None and op.name in ("add", "sub") and len(operands) == len(added) == 1 and tensor.ndim == 0:
            # The factor of the other loss is the derivative with respect to it.
            is_linear = len(op.args) == 2 and added[0].dtype.is_floating_point
            others.update(dict.fromkeys(added))
        if not is_linear:
            if any(operand not in self._tokens and operand not in self._with_grad for operand in operands):
                raise NotASum(f"{op} mixes tokens{self._after_text(op)}")
            if op.name in ("add", "sub") and len(operands) == 1 and tensor.ndim == 0:
                raise NotASum(f"{op} adds another loss before the last term of this one: add the other loss last")
            if op.name == "mean" and any(depends_on_values(operand.numel) for operand in operands):
                raise NotASum(f"the number of tokens in {op} depends on the values of a tensor")
            problem = f"{op} is neither linear nor an operation on single tokens in their order{self._after_text(op)}"
            raise self._problems.get(tensor) or NotASum(problem)
        if tensor not in self._with_grad:
            raise NotASum(f"{op} mixes tokens{self._after_text(op)}")
        if any(depends_on_values(size) for out in op.outs for size in out.shape):
            # Its traced derivative would have another size that depends on values.
            raise NotASum(f"the number of tokens that {op} returns depends on the values of a tensor")
        for other in op.operands:
            # Dynamo says that zeros need a gradient if a loss was added to them in place.
            if other not in operands and other not in (others or ()) and not self._is_zero(other, op):
                _check_factor(other, op)
        self._check_writes(op)
        return True

    def _is_linear(self, op: Op) -> bool:
        """Whether an operation is linear in its operands that depend on tokens."""
        name, args, operands = op.name, op.args, self._operands(op)
        only: Any = operands[0] if len(operands) == 1 else None
        if name in PRODUCTS:
            # With equal factors it is a square, and with a bias not linear.
            has_bias = name == "linear" and len(op.operands) > 2
            return op.operands.count(only) == 1 and not has_bias
        if name in _LINEAR_IN_FIRST:
            # The sum over no tokens, divided by their number, is NaN.
            if op.operands[0] is not only or (name == "mean" and not has_elements(only)):
                return False
            return all(
                out.dtype.is_floating_point and (depends_on_values(out.numel) or has_elements(out)) for out in op.outs
            )
        if tensors_in(op.kwargs):
            return False  # The checks below know arguments by their position.

        def is_token_or_zero(each: Any) -> bool:
            return any(each is operand for operand in operands) or self._is_zero(each, op)

        if name == "div":
            is_exact = op.kwargs.get("rounding_mode") is None
            return is_exact and len(args) == 2 and args[0] is only and args[1] is not only
        if name in ("add", "sub"):
            return len(args) == 2 and all(map(is_token_or_zero, args)) and is_number(op.kwargs.get("alpha", 1))
        if name in _JOINS:
            return all(map(is_token_or_zero, args[0]))
        if name in ("index_add", "scatter_add") and len(args) == 4:
            is_weighted = args[2] in operands or not is_number(op.kwargs.get("alpha", 1))
            return is_token_or_zero(args[0]) and is_token_or_zero(args[3]) and not is_weighted
        if name == "pad":
            return args[0] is only and all(each in ("constant", None, 0) for each in (*args[2:], *op.kwargs.values()))
        if name == "where" and len(args) == 3:
            return args[0] not in operands and all(map(is_token_or_zero, args[1:]))
        if name == "masked_fill":
            filled, _, value = (*args, *op.kwargs.values())
            return filled is only and self._is_zero(value, op)
        return False

    def _is_affine(self, op: Op) -> bool:
        """Whether an operation adds numbers without a gradient to a linear function of its only operand of tokens."""
        operands = self._operands(op)
        if len(operands) != 1 or any(each.needs_grad for each in op.operands if each is not operands[0]):
            return False
        if op.name == "kl_div":
            return op.kwargs.get("input", *op.args[:1]) is operands[0]
        # The program adds a number to a scalar itself.
        is_sum = op.name in ("add", "sub") and op.output.ndim > 0 and not op.writes
        return is_sum and len(op.args) == 2 and op.args[0] is not op.args[1] and is_number(op.kwargs.get("alpha", 1))

    def _after_text(self, op: Op) -> str:
        """Returns ", after …" with the operation that has mixed the tokens which `op` reads; empty if it is `op`."""
        first: Op | None = op
        while first is not None:
            mixed = (each for each in self._operands(first) if each not in self._tokens and each not in self._sources)
            last, first = first, next((each.op for each in mixed), None)
        return "" if last is op else f", after {last}"

    def _record_operation(self, op: Op, tokens: _Tokens) -> Handle:
        """Records an operation on single tokens; returns the handle of its result."""
        part, _, selections = tokens
        recorder, shape = part.recorder, op.output.shape
        # Any gradient counts, not only the sources': that of another head must not be lost.
        has_grad = op.output.needs_grad

        def argument(value: Any) -> Any:
            dtype = op.output.dtype if op.output.dtype.is_floating_point else first.dtype
            # Integers and 16 bits would round it, and a number that is read of a tensor may be known too late.
            is_exact = dtype in (torch.float32, torch.float64) and all(each.op is None for each in op.numbers)
            if isinstance(value, torch.SymFloat | torch.SymInt) and is_exact:
                return part.add_input(TokenInput(value, dtype, shape, op.position, selections=selections))
            if not isinstance(value, Tensor):
                return [argument(item) for item in value] if isinstance(value, list | tuple) else value
            if value in self._tokens:
                return self._tokens[value].handle
            if has_grad:
                _check_factor(value, op)
            # A mask and its cast to floats have the same number.
            key = repr((self._program.value_number(value), value.dtype, value.shape, _key(selections)))
            return part.add_input(TokenInput(value, value.dtype, shape, op.position, selections=selections, key=key))

        first = op.operands[0]
        if first in self._tokens and (op.name in RESHAPES | CASTS or keeps_elements(op)):
            # From further operands, such an operation takes only the shape or the dtype.
            handle = self._tokens[first].handle
            if op.output.dtype != first.dtype:
                handle = recorder.write("to", (handle, op.output.dtype), {})
        else:
            self._check_writes(op)
            handle = recorder.write(
                op.name, [argument(value) for value in op.args],
                {name: argument(value) for name, value in op.kwargs.items() if name != "inplace"},
            )  # fmt: skip
            if op.writes:  # An in-place change keeps the dtype; all floats are float64 to the recorder.
                dtype = torch.float64 if op.output.dtype.is_floating_point else op.output.dtype
                handle = recorder.write("to", (handle, dtype), {})
        return handle if has_grad else recorder.detached(handle)

    def _check_writes(self, op: Op) -> None:
        """Raises for an in-place change that another reader sees, so that a new tensor cannot stand for it."""
        for written in op.writes:
            made_by = written.op
            is_new = made_by is not None and not any(map(written.shares_memory, made_by.operands))
            is_new = (is_new or self._is_zero(written, op)) and len(written.users) == 1
            is_replaceable = (written in self._dependent or is_new) and not op.leaves_gradient
            if not is_replaceable or self._is_read_after(written, op):
                raise NotASum(f"{op} changes a tensor in place")
            self._writes.add(op)

    def _is_read_after(self, written: Tensor, op: Op) -> bool:
        """Whether a tensor from before an in-place change, which shares the changed memory, is read after it.

        The caller may read an argument, such as a running sum of losses.
        """
        # Cached, since a loop that adds losses in place asks for each of its scalars.
        if (written, op) not in self._is_read:
            ops = self._program.ops
            read = [each for later in ops[op.position + 1 :] for each in later.operands] + self._program.results
            arguments = [each for earlier in ops[: op.position + 1] for each in earlier.operands if each.op is None]
            self._is_read[written, op] = any(
                tensor.shares_memory(written) and tensor.position < op.position for tensor in (*read, *arguments)
            )
        return self._is_read[written, op]

    def _is_zero(self, tensor: Any, reader: Op) -> bool:
        """Whether a value is 0, or a tensor that was created as zeros and not changed before `reader` reads it."""
        if not isinstance(tensor, Tensor):
            return is_number(tensor) and tensor == 0
        writers = (op for op in self._program.writers if op.position < reader.position)
        changed = [tensor for op in writers for tensor in op.writes]
        views = [tensor]
        while (op := views[-1].op) is not None and op.name in CASTS | RESHAPES | {"requires_grad_", "detach"}:
            views.append(op.operands[0])
        if op is None or any(view.shares_memory(tensor) for view in views for tensor in changed):
            return False
        is_full = op.name in ("full", "new_full", "full_like", "new_tensor", "tensor", "as_tensor", "scalar_tensor")
        numbers = [value for value in (*op.args[1:], *op.kwargs.values()) if is_number(value)] if is_full else []
        return op.name in ("zeros", "zeros_like", "new_zeros") or (bool(numbers) and not any(numbers))


def _come_after(selections: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether `selections` are of tokens that follow those of `others` along one of the dimensions."""
    differing: Any = ((a, b) for a, b in zip(selections, others, strict=False) if a is not b)
    for a, b in differing:
        pairs = zip(_bounds(a), _bounds(b), strict=False)
        bounds = [(0, *other_bounds, start) for (start, _), other_bounds in pairs if None not in (*other_bounds, start)]
        have_one_source = a.op.operands[0] is b.op.operands[0]
        return have_one_source and any(all(holds(x <= y) for x, y in pairwise(numbers)) for numbers in bounds)
    return False


def _bounds(selected: Any) -> list[tuple[Any, Any]]:
    """Returns where a selection begins and ends along each dimension, as far as its index says it."""
    indices = indices_of(selected.op)
    index = [part for part in indices[selected.op.outs.index(selected)] if part is not None] if indices else []
    return [(part.start or 0, part.stop) if isinstance(part, slice) else (part, part + 1) for part in index]


def _key(selections: Sequence[Tensor]) -> str:
    """Returns a key that is equal if the same tokens are selected."""
    ops = [(tensor.op, tensor.op.outs.index(tensor)) for tensor in selections if tensor.op]
    return repr([(op.operands[0].shape, op.name, without_tensors(op), position) for op, position in ops])


def _record_source(source: Tensor, part: Part) -> Handle:
    """Records a source, before its reduction: weights say which rows a mean or a sum is of."""
    row, recorder = part.rows[source], part.recorder

    def call(function: Callable, *args: Any) -> Handle:
        return recorder.write(function.__name__, args, {})

    if row.variables:
        number = row.evaluate({name: Handle(name) for name in VARIABLES}, call)
    else:  # All atoms cancel, as in the ratio of a probability to itself.
        number = call(torch.full_like, Handle(VARIABLES[0]), row.constant)
    if row.labels.has_ignored and row.reduction == "none":
        labels = row.labels
        valid = part.add_input(
            TokenInput(labels.tensors[0], torch.bool, row.shape, labels.read_at, ignored=labels.ignore_index)
        )
        number = call(torch.where, valid, number, 0.0)
    return number if source.needs_grad else recorder.detached(number)


def _check_factor(factor: Tensor, op: Op) -> None:
    """Raises for a factor that needs a gradient itself."""
    if factor.needs_grad:
        raise FactorNeedsGradient(f"{_name(factor)}, an operand of {op}, needs a gradient, too")


def _name(tensor: Tensor) -> str:
    """Describes a tensor for the user, who does not know the compiler's names."""
    if tensor.op is None:
        return f"the argument {tensor.name.removeprefix('l_').strip('_')}"
    return f"the result of {tensor.op}"
