"""The operators `torch.ops.thunder_flce.linear_cross_entropy` and `…_backward`, which compilers and exporters see.

Each is opaque: it runs the engine. It takes a call's tensors in their order, and everything else as one string, a
Python literal (`Settings`). This holds a plan or, where a program is compiled for any number of tokens, options from
which the operator makes the plan when it runs. Such options name the strategy, since that decides what is returned.

They return fresh, contiguous tensors and change none of their arguments, but for `…_backward_`, by which Inductor
replaces `…_backward`: see `inductor`. `autograd` differentiates them.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from thunder_flce.device import TILE_ROWS, Device
from thunder_flce.engine import engine
from thunder_flce.engine.choose import choose
from thunder_flce.engine.collectives import gathered
from thunder_flce.engine.plan import RECOMPUTE_LOGITS, Plan
from thunder_flce.engine.primitives import Primitives, Region
from thunder_flce.engine.rows import remember
from thunder_flce.importing import when_imported
from thunder_flce.operation.call import Call, Shard, gradient_name, result_names, result_specs
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import Loss
from thunder_flce.options import Options, PlainValues
from thunder_flce.vocab_parallel import VocabParallel, agreed_call

_SCHEMA = 6
"""Of the settings. PyTorch keeps compiled graphs on disk, and finds them by their arguments, not by what an operator
takes."""


_MOST_REGIONS = 1024


@dataclass(frozen=True, kw_only=True)
class Settings(PlainValues):
    """Everything about a call that is no tensor: plain values that the operators take as one string."""

    names: tuple[str, ...]
    """Of the tensors, in order; see `operation.call`"""
    loss: Loss
    needs_grad: tuple[str, ...]
    plan: Plan
    """Where `options` are given, only what is known for any number of tokens: the strategy and the logits' dtype"""
    options: Options | None = None
    """What the plan is made from when the operator runs; None where it is made"""
    shard: Shard | None = None
    vocab_parallel: str | None = None
    """The ranks that divide the vocabulary, by `as_literal`, which agree when the operator runs"""
    regions: dict[tuple[int, torch.Size], Region] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What is known of such calls, by the tokens they are planned for (0: any) and the shape of the weight"""

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return written(self.non_defaults())

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> "Settings":
        """The settings that were `written` as `text`."""
        kinds = {"loss": Loss, "divergence": Divergence, "plan": Plan, "options": Options, "shard": Shard}

        def made(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: kinds[name](**made(each)) if name in kinds else each for name, each in values.items()}

        values = ast.literal_eval(text)
        if values.pop("schema") != _SCHEMA:
            raise ValueError("this program was exported with another version of thunder_flce; export it again")
        return Settings(**made(values))

    def call(self, tensors: Sequence[Any]) -> Call:
        """The call of these tensors."""
        return Call(
            tensors=dict(zip(self.names, tensors, strict=True)), loss=self.loss, needs_grad=self.needs_grad,
            shard=self.shard,
        )  # fmt: skip

    @cached_property
    def finishes_in_forward(self) -> bool:
        """Whether the backward has nothing left to do but to multiply the gradients by one number."""
        return self.plan.finishes_in_forward and not self.loss.has_row_gradients

    @cached_property
    def grad_positions(self) -> tuple[int, ...]:
        """Where, among the tensors, those are whose gradient is needed."""
        return tuple(map(self.names.index, self.needs_grad))

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """What the forward returns, in order."""
        return result_names(self.call([None] * len(self.names)), self.plan)

    @cached_property
    def upstream_names(self) -> tuple[str, ...]:
        """The results with a gradient."""
        return ("loss", *self.loss.differentiable_outputs)

    @cached_property
    def saved_names(self) -> tuple[str, ...]:
        """The results that the backward reads."""
        names = self.result_names[1 + len(self.loss.outputs) :]
        return (*names, "entropy") if "entropy" in self.loss.differentiable_outputs else names

    @property
    def logits_position(self) -> int | None:
        """Where the logits are among what the backward reads."""
        return self.saved_names.index("logits") if "logits" in self.saved_names else None


def written(values: Mapping[str, Any]) -> str:
    """What an operator takes as its settings, from their values."""
    return repr({"schema": _SCHEMA, **values})


def forward(settings: Settings, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Runs the forward: what `Settings.result_names` names, in the shapes of the call."""
    results = engine.forward(_primitives(settings, tensors))
    if tensors[0].ndim != 2:
        for name in ("loss", *settings.loss.outputs):
            if results[name].ndim:
                # What the user may change in place must not be a view.
                results[name] = torch.ops.aten._unsafe_view(results[name], tensors[0].shape[:-1])
        for operand, at in zip(settings.needs_grad, settings.grad_positions, strict=True):
            if (name := gradient_name(operand)) in results:
                results[name] = results[name].view(tensors[at].shape)
    return [results[name] for name in settings.result_names]


def _primitives(settings: Settings, tensors: Sequence[Tensor]) -> Primitives:
    """The primitives of a call. What follows from the sizes but the number of tokens is found out once for a plan."""
    has_ranks = settings.shard is not None or settings.vocab_parallel is not None
    tokens = 0 if settings.options is None else planned_tokens(tensors[0].shape[:-1].numel())
    key = tokens, tensors[1].shape
    region = settings.regions.get(key)
    if region is not None and not has_ranks and (found := region.call_of(tensors)) is not None:
        return Primitives(found, region)
    call, plan = _planned(settings, tensors)
    call = call.flat()
    if region is not None and (region.plan, region.call.shard) == (plan, call.shard):
        found = region.call_of([*call.tensors.values()])
        if found is not None:
            return Primitives(found, region)
    if len(settings.regions) >= _MOST_REGIONS:
        settings.regions.clear()
    region = settings.regions[key] = Region(call.specs(), plan)
    return Primitives(call, region)


def backward(
    settings: Settings, upstream: Sequence[Tensor | None], saved: Sequence[Tensor], tensors: Sequence[Tensor], *,
    may_overwrite: bool,
) -> list[Tensor]:  # fmt: skip
    """Runs the backward, unless the forward has finished it: the needed gradients, in their order and shapes.

    Args:
        settings: those of the forward.
        upstream: the gradients of `Settings.upstream_names`.
        saved: what `Settings.saved_names` names.
        tensors: those of the forward.
        may_overwrite: whether what is saved may be used up.
    """
    known = dict(zip(settings.saved_names, saved, strict=True))
    ops = _primitives(settings, tensors)
    if ops.plan.finishes_in_forward:
        known["dX"] = known["dX"].reshape(ops.call.tensors["input"].shape)
    elif "logits" in known and not may_overwrite and known["logits"].dtype == ops.call.dtype:
        known["logits"] = known["logits"].clone()
    found = engine.backward(ops, known, dict(zip(settings.upstream_names, upstream, strict=True)))
    return [
        found[name].view(tensors[at].shape)
        for name, at in zip(settings.needs_grad, settings.grad_positions, strict=True)
    ]


def _planned(settings: Settings, tensors: Sequence[Tensor]) -> tuple[Call, Plan]:
    """The call, with the numbers of all ranks' tokens, and its plan."""
    call, options = settings.call(tensors), settings.options
    if settings.vocab_parallel is not None:
        call = agreed_call(call, settings.vocab_parallel, options or Options())
    return gathered(call), settings.plan if options is None else plan_for(call, options)


# More tokens than these are planned for in whole tiles: lengths that change have few plans.
_FEW_TOKENS = 512


def planned_tokens(tokens: int) -> int:
    """The number of tokens that a call of so many is planned for."""
    return tokens if tokens <= _FEW_TOKENS else -(-tokens // TILE_ROWS) * TILE_ROWS


def plan_for(call: Call, options: Options) -> Plan:
    """The plan for a call, or for one of up to 127 more tokens; for a divided vocabulary, on the device agreed on.

    The same whichever calls came before.
    """
    device = None if call.shard is None else call.shard.device
    call = call.specs(tokens=planned_tokens(call.own_tokens))
    return _plan(call, options, device or Device.of(call.device))


_plan = lru_cache(maxsize=4096)(choose)


# The operators.


def run_forward(tensors: list[Tensor], settings: str) -> list[Tensor]:
    """What `torch.ops.thunder_flce.linear_cross_entropy` does with tensors that have values."""
    known = Settings.parse(settings)
    results = dict(zip(known.result_names, forward(known, tensors), strict=True))
    if "computed_rows" in results:
        # Programs expect all results on one device; a copy to it would wait, and cannot be captured.
        count = int(results["computed_rows"])
        results["computed_rows"] = tensors[0].new_full((), count, dtype=torch.int64)
        remember(results["computed_rows"], count)
    if "row_log_sum" in results:
        # A kernel's statistics are one piece of memory, which an operator's results may not share.
        results["row_log_sum"] = results["row_log_sum"].clone()
    return [*results.values()]


def _forward_fake(tensors: list[Tensor], settings: str) -> list[Tensor]:
    known = Settings.parse(settings)
    call = known.call(tensors)
    if known.vocab_parallel is not None:
        parallel = VocabParallel.of(known.vocab_parallel)
        if parallel.sequence_parallel:
            call = call.with_tensors(call.tensors, tokens=call.own_tokens * parallel.process_group.size())
    like = call.tensors["target"]
    return [like.new_empty(spec.shape, dtype=spec.dtype) for spec in result_specs(call, known.plan).values()]


def _backward(upstream: list[Tensor | None], saved: list[Tensor], tensors: list[Tensor], settings: str) -> list[Tensor]:
    return backward(Settings.parse(settings), upstream, saved, tensors, may_overwrite=False)


def _backward_in_place(
    upstream: list[Tensor | None], logits: Tensor, saved: list[Tensor], tensors: list[Tensor], settings: str
) -> tuple[Tensor, ...]:
    """Overwrites the logits, which stand apart from what else is saved."""
    known = Settings.parse(settings)
    at = known.logits_position
    return _padded(backward(known, upstream, [*saved[:at], logits, *saved[at:]], tensors, may_overwrite=True))


MOST_IN_PLACE = 3
"""Gradients: Inductor takes no operator that changes an argument and returns a list."""


def _padded(gradients: list[Tensor]) -> tuple[Tensor, ...]:
    return *gradients, *(gradients[0].new_empty(0) for _ in range(MOST_IN_PLACE - len(gradients)))


def _backward_fake(
    upstream: list[Tensor | None], saved: list[Tensor], tensors: list[Tensor], settings: str
) -> list[Tensor]:
    known = Settings.parse(settings)
    operands = dict(zip(known.names, tensors, strict=True))
    return [operands[name].new_empty(operands[name].shape) for name in known.needs_grad]


library = torch.library.Library("thunder_flce", "FRAGMENT")


def define(name: str, schema: str, run: Any, fake: Any) -> None:
    """Defines an operator, with what runs it and what gives the shapes of its results."""
    library.define(f"{name}{schema}")
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


define("linear_cross_entropy", "(Tensor[] tensors, str settings) -> Tensor[]", run_forward, _forward_fake)
define(
    "linear_cross_entropy_backward",
    "(Tensor?[] upstream, Tensor[] saved, Tensor[] tensors, str settings) -> Tensor[]",
    _backward,
    _backward_fake,
)
define(
    "linear_cross_entropy_backward_",
    "(Tensor?[] upstream, Tensor(a!) logits, Tensor[] saved, Tensor[] tensors, str settings)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_in_place,
    lambda upstream, logits, *others: _padded(_backward_fake(upstream, *others)),
)


def _flops(*given: Any, is_forward: bool, **_: Any) -> int:
    """What FlopCounterMode counts: two operations a product, for the tokens that are ignored, too."""
    tensors, known = given[-2], Settings.parse(given[-1])
    call, plan = known.call(tensors), known.plan
    logits = is_forward or plan.strategy == RECOMPUTE_LOGITS
    gradients = plan.finishes_in_forward == is_forward
    linears = [*call.linears, *([("teacher_input", "teacher_weight")] if call.loss.divergence is not None else [])]
    products = [
        (logits + gradients * sum(name in call.needs_grad for name in linear)) * call.tensors[linear[0]].shape[-1]
        for linear in linears
    ]
    return 2 * call.tokens * call.vocab * sum(products)


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    operators = torch.ops.thunder_flce
    backwards = [operators.linear_cross_entropy_backward, operators.linear_cross_entropy_backward_]
    register_flop_formula(operators.linear_cross_entropy, get_raw=True)(partial(_flops, is_forward=True))
    register_flop_formula(backwards, get_raw=True)(partial(_flops, is_forward=False))


# It imports Triton, from torch 2.15 on.
when_imported("torch.utils.flop_counter", _register_flops)


def is_watched() -> bool:
    """Whether a mode, a profiler or a transform of torch.func has to see the operator."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
    )


def is_traced(tensor: Any) -> bool:
    """Whether a tensor is of a program that is compiled, traced or exported, or has no values. False for no tensor."""
    is_of_program = torch.compiler.is_compiling() or torch._C._is_tracing()
    return isinstance(tensor, Tensor) and (is_of_program or tensor.is_meta or is_fake(tensor))
