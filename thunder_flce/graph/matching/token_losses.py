"""Losses that a program makes of log-probabilities and entropies, token by token, and sums up, as GRPO and PPO do.

    ratio = (log_prob - old).exp()                                          on single tokens: `operation.pointwise`
    per_token = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    loss = (per_token * mask).sum() / mask.sum()                            linear in these: a weight for each token

Such a sum can be differentiated while the logits are there. What mixes tokens in another way, such as a preference loss
of whole sequences, has gradients that are known only when all tokens are.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thunder_flce.graph.matching.logits_path import COPIES, RESHAPES
from thunder_flce.graph.matching.trace_index import TraceIndex, carries_grad, is_static, stops_gradients
from thunder_flce.graph.matching.upstream import Step, linear_step
from thunder_flce.operation.pointwise import (
    VARIABLES,
    Handle,
    NotOfTokens,
    Recorder,
    TokenLoss,
    evaluate,
    numbered,
    uses,
)

CASTS = ("float", "double", "half", "bfloat16", "bool", "int", "long")
"""Methods that change the dtype, beside those that are told which."""


class Source(NamedTuple):
    """What a program computes of each row: a factor times an output of a region, or the exponential of that."""

    tensor: TensorProxy
    variable: str
    """One of `operation.pointwise.VARIABLES`."""
    factor: int
    is_exponential: bool
    labels: TensorProxy | None = None
    """The labels, where the tensor is 0 in rows whose label is ignore_index."""
    ignore_index: int = 0


class TokenInput(NamedTuple):
    """A tensor that a token loss reads."""

    tensor: TensorProxy
    shape: tuple[int, ...]
    """What it is expanded to, of one element a token."""
    ignore_index: int | None = None
    """Where there is one, the loss reads `tensor != ignore_index` in place of the tensor."""

    def expanded(self, rows: Sequence[int]) -> TensorProxy:
        """In the shape of the rows. Adds operations to the trace."""
        is_label = self.ignore_index is not None
        tensor = ltorch.ne(self.tensor, self.ignore_index) if is_label else ltorch.detach(self.tensor)
        for shape in (self.shape, tuple(rows)):
            if tuple(tensor.shape) != shape:
                same_size = tensor.numel == math.prod(shape)
                tensor = ltorch.reshape(tensor, shape) if same_size else ltorch.expand(tensor, shape)
        return tensor


@dataclass(frozen=True, eq=False)
class TokenSum:
    """A sum of token losses, each times a weight without a gradient."""

    place: BoundSymbol
    """What computes the sum."""
    inputs: tuple[TokenInput, ...]
    replaced: tuple[BoundSymbol, ...]
    """What is not needed any more."""
    kept: frozenset[str]
    """The names of the sources that something else needs, without a gradient."""
    _recorder: Recorder
    _summands: dict[str, Handle]
    """For each tensor that is summed up: what it is in the recorder."""
    _steps: tuple[tuple[Step, str, str], ...]
    """The linear operations, with the names of operand and result."""

    @property
    def is_zero_without_loss(self) -> bool:
        """Whether a token whose log-probability is 0 adds nothing, whatever else there is."""
        losses = [numbered(self._recorder.copy().finish(summand)) for summand in self._summands.values()]
        # While a trace is printed, tensors may be fake.
        with unset_fake_temporarily():
            nothing = {"log_prob": torch.zeros(1, device="cpu")}
            return not any(
                read or any(uses(loss, name) for name in VARIABLES[1:]) or evaluate(loss, nothing).any()
                for loss, read in losses
            )

    def written(
        self, rows: Sequence[int], dtype: dtypes.dtype, *, is_alone: bool
    ) -> tuple[TokenLoss, tuple[TensorProxy, ...], TensorProxy | None]:
        """The sum as a region with reduction "sum" takes it. Adds operations to the trace.

        Args:
            rows: the shape of the region's rows.
            dtype: of weights.
            is_alone: whether nothing else is asked of the rows, so that those of weight 0 may be left out.

        Returns:
            The token loss, the token inputs that it reads, and the token weights.
        """
        grads: dict[str, Any] = {self.place.output.name: 1.0}
        for step, operand, result in reversed(self._steps):
            grad = step.pull_back(grads[result])
            grads[operand] = grad if operand not in grads else ltorch.add(grads[operand], grad)
        inputs: list[TokenInput | TensorProxy] = [*self.inputs]
        weights = [grads[name] for name in self._summands]
        weights = [
            ltorch.reshape(ltorch.to(weight, dtype), tuple(rows)) if isinstance(weight, TensorProxy) else weight
            for weight in weights
        ]
        token_weights = None
        if is_alone and all(isinstance(weight, TensorProxy) for weight in weights):
            if len(weights) == 1:
                token_weights, weights = weights[0], [1.0]
            else:
                counts = reduce(ltorch.logical_or, (ltorch.ne(weight, 0.0) for weight in weights))
                token_weights = ltorch.to(counts, dtype)
        recorder, total = self._recorder.copy(), None
        for factor, summand in zip(weights, self._summands.values(), strict=True):
            if isinstance(factor, TensorProxy):
                inputs.append(factor)
                factor = recorder.add_input(torch.float32)
            weighted = summand if factor == 1.0 else recorder.write("mul", (summand, factor), {})
            total = weighted if total is None else recorder.write("add", (total, weighted), {})
        assert total is not None
        token_loss, read = numbered(recorder.finish(total))
        given = [inputs[number] for number in read]
        tensors = tuple(each.expanded(rows) if isinstance(each, TokenInput) else each for each in given)
        return token_loss, tensors, token_weights


class NotASum(Exception):
    """Raised where gradients have to wait; says why."""


def find_token_sum(
    sources: Sequence[Source], own: Iterable[BoundSymbol], logits: TensorProxy, index: TraceIndex
) -> TokenSum:
    """The sum of token losses through which alone gradients reach some sources.

    Args:
        sources: of the same rows.
        own: what computes the sources from the operands of the linear.
        logits: the linear's output, on which nothing else in the sum may depend.
        index: of the trace.

    Raises:
        NotASum: where gradients reach the sources in another way, too, or the sum mixes tokens.
    """
    search = _Search(sources, own, logits, index)
    for bsym in index.bsyms:
        if search.add(bsym):
            return search.finished(bsym)
    raise NotASum("they do not become one sum")


class _Search:
    """Follows the program from the sources on."""

    def __init__(self, sources: Sequence[Source], own: Iterable[BoundSymbol], logits: TensorProxy, index: TraceIndex):
        self._own = {id(bsym) for bsym in own}
        self._sources, self._logits, self._index = sources, logits, index
        self._rows = sources[0].tensor.numel
        self._recorder = Recorder()
        self._inputs: dict[Handle, TokenInput] = {}
        self._tokens: dict[str, Handle] = {}
        """For each tensor that is computed from the sources token by token: what it is in the recorder."""
        self._sums: set[str] = set()
        """The names of tensors with a gradient that are linear in the losses of tokens."""
        self._dependent = {source.tensor.name for source in sources}
        self._with_grad = {source.tensor.name for source in sources if carries_grad(source.tensor)}
        self._steps: list[tuple[BoundSymbol, TensorProxy, Step]] = []
        """The linear operations, each with one of its operands."""
        self._passed: set[int] = set()
        self._upstream = _with_upstream_gradients(index)
        for source in sources:
            name = Handle(source.variable)
            if source.labels is not None:
                is_valid = self._recorder.add_input(torch.bool)
                shape = tuple(source.tensor.shape)
                self._inputs[is_valid] = TokenInput(source.labels, shape, source.ignore_index)
                name = self._recorder.write("where", (is_valid, name, 0.0), {})
            if source.tensor.name not in self._with_grad:
                name = self._recorder.detached(name)
            name = self._recorder.write("neg", (name,), {}) if source.factor == -1 else name
            self._tokens[source.tensor.name] = (
                self._recorder.write("exp", (name,), {}) if source.is_exponential else name
            )

    def add(self, bsym: BoundSymbol) -> bool:
        """Follows one operation; returns whether it is the sum that all gradients come from."""
        operands = [arg for arg in bsym.flat_proxy_args if arg.name in self._dependent]
        if not operands or id(bsym) in self._own:
            return False
        has_grad = any(arg.name in self._with_grad for arg in operands) and self._passes_grad(bsym)
        try:
            self._follow(bsym, operands, has_grad)
        except NotOfTokens as problem:
            if has_grad:
                raise NotASum(f"{problem} is no operation on single tokens") from problem
        except NotASum:
            if has_grad:
                raise
        self._dependent |= {out.name for out in bsym.flat_proxy_outs}
        self._passed.add(id(bsym))
        if has_grad:
            self._with_grad.add(bsym.output.name)
        return has_grad and bsym.output.name in self._sums and bsym.output.ndim == 0 and self._is_closed(bsym)

    def _follow(self, bsym: BoundSymbol, operands: list[TensorProxy], has_grad: bool) -> None:
        name, out = bsym.sym.name, bsym.output
        if bsym.sym.id == prims.PrimIDs.RETURN:
            raise NotASum("its result, or what is made of it, is returned and not detached")
        if not isinstance(out, TensorProxy) or not is_static(*bsym.flat_args):
            raise NotASum(f"{name} is no operation on single tokens")
        if all(arg.name in self._tokens for arg in operands):
            is_sum = bsym.sym.id in (ltorch.sum.id, ltorch.mean.id)
            if out.numel == self._rows and not is_sum:
                self._tokens[out.name] = self._written(bsym, has_grad)
                return
        elif not all(arg.name in self._sums or arg.name in self._tokens for arg in operands):
            raise NotASum(f"{name} mixes tokens")
        if not has_grad:
            raise NotASum(f"{name} is of no token")
        for operand in {operand.name: operand for operand in operands}.values():
            step = linear_step(bsym, operand, self._index, self._sums)
            if step is None:
                raise NotASum(f"{name} is not linear in the losses of tokens")
            self._steps.append((bsym, operand, step))
        self._sums.add(out.name)

    def _written(self, bsym: BoundSymbol, has_grad: bool) -> Handle:
        """The result of an operation on single tokens."""

        def argument(given: Any) -> Any:
            if not isinstance(given, TensorProxy):
                return given
            return self._tokens[given.name] if given.name in self._tokens else self._input(given, bsym, has_grad)

        if bsym.sym.id in RESHAPES | COPIES or bsym.sym.name in CASTS:
            # Of further operands, such an operation takes only the shape or the dtype.
            name = self._recorder.cast(argument(bsym.flat_proxy_args[0]), dtypes.to_torch_dtype(bsym.output.dtype))
        else:
            args = [argument(given) for given in bsym.args]
            kwargs = {name: argument(given) for name, given in bsym.kwargs.items()}
            if bsym.sym.name.endswith("_"):
                raise NotOfTokens(bsym.sym.name)
            try:
                name = self._recorder.write(bsym.sym.name, args, kwargs)
            except NotOfTokens:
                # thunder has names of its own for what another operation does, such as torch_max of two tensors.
                if len(bsym.subsymbols) != 1:
                    raise
                return self._written(bsym.subsymbols[0], has_grad)
        return name if has_grad else self._recorder.detached(name)

    def _input(self, tensor: TensorProxy, bsym: BoundSymbol, has_grad: bool) -> Handle:
        """What a tensor is in the recorder that does not depend on the sources."""
        if has_grad and tensor.name in self._index.need_grad:
            raise NotASum(f"{tensor.name} in {bsym.sym.name} needs a gradient, too")
        if self._index.derives_from(tensor, self._logits):
            raise NotASum(f"{tensor.name} in {bsym.sym.name} depends on the logits")
        shape = tuple(bsym.output.shape)
        for name, known in self._inputs.items():
            if known.ignore_index is None and known.shape == shape and self._index.same_values(known.tensor, tensor):
                return name
        name = self._recorder.add_input(dtypes.to_torch_dtype(tensor.dtype))
        self._inputs[name] = TokenInput(tensor, shape)
        return name

    def _is_closed(self, place: BoundSymbol) -> bool:
        """Whether no gradient reaches the sources but through one sum."""
        users = (user for name in self._with_grad - {place.output.name} for user in self._index.consumers.get(name, ()))
        return all(id(user) in self._passed | self._own or not self._passes_grad(user) for user in users)

    def _passes_grad(self, bsym: BoundSymbol) -> bool:
        """Whether a gradient may come back through an operation; what is returned may have one."""
        if stops_gradients(bsym):
            return False
        return bsym.sym.id == prims.PrimIDs.RETURN or any(out.name in self._upstream for out in bsym.flat_proxy_outs)

    def finished(self, place: BoundSymbol) -> TokenSum:
        """The sum."""
        self._peel()
        dead, kept = self._unused(place)
        return TokenSum(
            place=place,
            inputs=tuple(self._inputs.values()),
            replaced=tuple(dead),
            kept=kept,
            _recorder=self._recorder,
            _summands={name: self._tokens[name] for name in self._summed()},
            _steps=tuple((step, operand.name, bsym.output.name) for bsym, operand, step in self._steps),
        )

    def _summed(self) -> dict[str, TensorProxy]:
        """The tensors at which the linear operations begin, by name."""
        results = {bsym.output.name for bsym, _, _ in self._steps}
        return {operand.name: operand for _, operand, _ in self._steps if operand.name not in results}

    def _peel(self) -> None:
        """Takes the products that come last, as with a mask, for weights: tokens of weight 0 are left out."""
        while True:
            for name, tensor in self._summed().items():
                bsym = self._index.producers.get(name)
                operands = [arg for arg in bsym.flat_proxy_args if arg.name in self._with_grad] if bsym else []
                if bsym is None or id(bsym) not in self._passed or len(operands) != 1:
                    continue
                # Where something else uses the product, its gradient has another part.
                users = [user for user in self._index.users(tensor) if self._passes_grad(user)]
                are_steps = set(map(id, users)) <= {id(linear) for linear, _, _ in self._steps}
                dependent = [arg for arg in bsym.flat_proxy_args if arg.name in self._dependent]
                is_linear = are_steps and len(dependent) == 1
                step = linear_step(bsym, operands[0], self._index, self._sums) if is_linear else None
                if step is not None:
                    self._steps.insert(0, (bsym, operands[0], step))
                    self._sums.add(name)
                    break
            else:
                return

    def _unused(self, place: BoundSymbol) -> tuple[list[BoundSymbol], frozenset[str]]:
        """What nothing needs once the sum is there, and the names of the sources that something does need."""
        unused: list[BoundSymbol] = []
        needed: set[str] = set()
        sources = {source.tensor.name for source in self._sources}
        for bsym in reversed(self._index.bsyms):
            outs = {out.name for out in bsym.flat_proxy_outs}
            if bsym is place:
                continue
            if outs and outs <= self._dependent and outs.isdisjoint(needed):
                unused.append(bsym)
            elif outs.isdisjoint(sources):
                needed |= {arg.name for arg in bsym.flat_proxy_args}
        return unused, frozenset(needed & sources)


def _with_upstream_gradients(index: TraceIndex) -> set[str]:
    """The names of the tensors that a gradient may come back to, from what the program returns."""
    found: set[str] = set()
    for bsym in reversed(index.bsyms):
        is_return = bsym.sym.id == prims.PrimIDs.RETURN
        outs = [out for out in bsym.flat_proxy_outs if isinstance(out, TensorProxy)]
        is_passed = any(out.name in found and carries_grad(out) for out in outs)
        if is_return or (is_passed and not stops_gradients(bsym)):
            found |= {arg.name for arg in bsym.flat_proxy_args if arg.name in index.need_grad}
    return found
