"""The operators `torch.ops.thunder_flce.linear_cross_entropy` and `…_backward`, which compilers and exporters see.

Each is opaque: it runs the engine. An operator takes a call's tensors in their order, and everything else as one
string, a Python literal (`Settings`). This holds a plan or, for programs that are compiled for any number of tokens,
the options from which the operator makes the plan when it runs. Such options name the strategy, since that decides
which results are returned.

The operators return fresh, contiguous tensors and change none of their arguments. The exception is `…_backward_`, with
which Inductor replaces `…_backward` (see `inductor`). `autograd` differentiates them.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.agreement import agreed_call
from thunder_flce.device import TILE_ROWS, Device
from thunder_flce.engine import engine
from thunder_flce.engine.choose import choose, strategy_of
from thunder_flce.engine.collectives import gathered
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.engine.primitives import Primitives, Region
from thunder_flce.engine.rows import remember
from thunder_flce.importing import when_imported
from thunder_flce.operation.call import TEACHER, Call, Shard, gradient_name, have_token_dimensions
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import Loss
from thunder_flce.options import RECOMPUTE_LOGITS, SAVE_LOGITS, Options, PlainValues
from thunder_flce.vocab_parallel import VocabParallel

_SCHEMA = 7
"""Version of the settings' format, for exported programs: another one if a field is removed or its meaning changes, but
not for a new field with a default. PyTorch's caches on disk see all code: `inductor`"""


_MOST_REGIONS = 1024


@dataclass(frozen=True, kw_only=True)
class Settings(PlainValues):
    """Everything about a call except its tensors: plain values that the operators take as one string."""

    names: tuple[str, ...]
    """Names of the tensors, in order; see `operation.call`"""
    loss: Loss
    needs_grad: tuple[str, ...]
    plan: Plan
    """The plan. If `options` are given, it has only the strategy and the logits' dtype, which hold for all sizes"""
    options: Options | None = None
    """Options from which the operator makes the plan when it runs; None if the plan is complete"""
    shard: Shard | None = None
    vocab_parallel: str | None = None
    """See `Call`"""
    regions: dict[Any, Region] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cached regions of calls with these settings, by planned number of tokens (0: any), sizes, dtypes and devices"""
    _text: str = field(init=False, repr=False, compare=False)

    @classmethod
    def planned(cls, call: Call, plan: Plan, options: Options | None = None) -> "Settings":
        """Returns the settings of a call with its plan."""
        return cls(
            names=tuple(call.tensors), loss=call.loss, needs_grad=call.needs_grad, plan=plan, options=options,
            shard=call.shard, vocab_parallel=call.vocab_parallel,
        )  # fmt: skip

    @classmethod
    def unplanned(cls, call: Call, options: Options) -> "Settings":
        """Returns settings for any number of tokens: the operator makes the plan when it runs.

        Raises:
            ValueError: see `engine.choose`; and for "save_logits" if only the ranks' agreement gives the number of
                columns.
        """
        strategy = strategy_of(call, options)
        if strategy == SAVE_LOGITS and call.vocab_parallel is not None and call.loss.vocab_size is not None:
            raise ValueError(
                'strategy must not be "save_logits" with vocab_size and vocab_parallel in a program that is traced or '
                "compiled, which has to know how many columns of the logits this rank saves"
            )
        if strategy != LOSS_ONLY:
            options = replace(options, strategy=strategy)
        plan = Plan(strategy=strategy, float32_logits=options.has_float32_logits(call.dtype))
        return cls.planned(call, plan, options)

    def __post_init__(self) -> None:
        # Not in `__str__`: a backward that Dynamo traces, for compiled autograd, cannot set an attribute.
        object.__setattr__(self, "_text", settings_text(self.non_defaults()))

    def __str__(self) -> str:
        return self._text

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> "Settings":
        """Returns the settings of a text from `settings_text`."""
        classes = {"loss": Loss, "divergence": Divergence, "plan": Plan, "options": Options, "shard": Shard}

        def made(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: classes[name](**made(value)) if name in classes else value for name, value in values.items()}

        values = ast.literal_eval(text)
        if values.pop("schema") != _SCHEMA:
            raise ValueError("this program was exported with another version of thunder_flce; export it again")
        return Settings(**made(values))

    def call(self, tensors: Sequence[Any]) -> Call:
        """Returns the call of these tensors."""
        return Call(
            tensors=dict(zip(self.names, tensors, strict=True)), loss=self.loss, needs_grad=self.needs_grad,
            shard=self.shard, vocab_parallel=self.vocab_parallel,
        )  # fmt: skip

    @cached_property
    def backward_only_scales(self) -> bool:
        """Whether the backward only multiplies the gradients by one number."""
        return self.plan.finishes_in_forward and not self.loss.has_row_gradients

    @cached_property
    def grad_positions(self) -> tuple[int, ...]:
        """Positions of the tensors whose gradient is needed."""
        return tuple(map(self.names.index, self.needs_grad))

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """Names of the forward's results, in order."""
        return self.plan.result_names(self.call([None] * len(self.names)))

    @cached_property
    def upstream_names(self) -> tuple[str, ...]:
        """Names of the results that have an upstream gradient."""
        return ("loss", *self.loss.differentiable_outputs)

    @cached_property
    def saved_names(self) -> tuple[str, ...]:
        """Names of the results that the backward reads."""
        names = self.result_names[1 + len(self.loss.outputs) :]
        return (*names, "entropy") if "entropy" in self.loss.differentiable_outputs else names

    @property
    def logits_position(self) -> int | None:
        """Position of the logits among the results that the backward reads; None if they are not saved."""
        return self.saved_names.index("logits") if "logits" in self.saved_names else None


def settings_text(values: Mapping[str, Any]) -> str:
    """Returns the operators' argument `settings`, from values of fields by name."""
    return repr({"schema": _SCHEMA, **values})


def forward(settings: Settings, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Runs the forward; returns the results of `Settings.result_names`, in the shapes of the call."""
    results = engine.forward(_primitives(settings, tensors))
    if tensors[0].ndim != 2:
        for name in ("loss", *settings.loss.outputs):
            if results[name].ndim:
                # The user may change the result in place, so it must not be a view.
                shape = (*tensors[0].shape[:-1], *results[name].shape[1:])
                results[name] = torch.ops.aten._unsafe_view(results[name], shape)
        for operand, at in zip(settings.needs_grad, settings.grad_positions, strict=True):
            if (name := gradient_name(operand)) in results:
                results[name] = results[name].view(tensors[at].shape)
    return [results[name] for name in settings.result_names]


def _primitives(settings: Settings, tensors: Sequence[Tensor]) -> Primitives:
    """Returns the primitives of a call; a cached region has everything that does not depend on the number of tokens."""
    dimensions = tensors[0].ndim - 1
    tokens = 0 if settings.options is None else planned_tokens(tensors[0].shape[:-1].numel())
    each = zip(tensors, have_token_dimensions(settings.names), strict=True)
    sizes = [(t.shape[dimensions if has_tokens else 0 :], t.dtype, t.device) for t, has_tokens in each]
    key = (tokens, *sizes)
    region = settings.regions.get(key)
    if region is None or settings.shard is not None or settings.vocab_parallel is not None:
        call, plan = settings.call(tensors), settings.plan
        if settings.options is not None:
            if call.vocab_parallel is not None:
                call = agreed_call(call, settings.options)
            plan = plan_for(call, settings.options)
        call = gathered(call)
        tensors = [*call.tensors.values()]
        if region is None or (region.plan, region.call.shard) != (plan, call.shard):
            if len(settings.regions) >= _MOST_REGIONS:
                settings.regions.clear()
            region = settings.regions[key] = Region(call.flat().specs(), plan)
    return Primitives(region.call.flat(tensors), region)


def backward(
    settings: Settings, upstream: Sequence[Tensor | None], saved: Sequence[Tensor], tensors: Sequence[Tensor], *,
    may_overwrite: bool,
) -> list[Tensor]:  # fmt: skip
    """Runs the backward of a call whose forward has not finished it; returns the needed gradients in order and shape.

    `upstream` has the upstream gradients of the results in `Settings.upstream_names`, or None; `saved` has the results
    in `Settings.saved_names`, which may change only if `may_overwrite`.
    """
    results = dict(zip(settings.saved_names, saved, strict=True))
    ops = _primitives(settings, tensors)
    if ops.plan.finishes_in_forward:
        results["dX"] = results["dX"].reshape(ops.call.tensors["input"].shape)
    elif "logits" in results and not may_overwrite and results["logits"].dtype == ops.call.dtype:
        results["logits"] = results["logits"].clone()
    gradients = engine.backward(ops, results, dict(zip(settings.upstream_names, upstream, strict=True)))
    return [
        gradients[name].view(tensors[at].shape)
        for name, at in zip(settings.needs_grad, settings.grad_positions, strict=True)
    ]


# Larger numbers of tokens are rounded up to whole tiles, so that few plans cover sequences of varying length.
_FEW_TOKENS = 512


def planned_tokens(tokens: int) -> int:
    """Returns the number of tokens for which a call of `tokens` tokens is planned."""
    return tokens if tokens <= _FEW_TOKENS else -(-tokens // TILE_ROWS) * TILE_ROWS


def plan_for(call: Call, options: Options) -> Plan:
    """Returns the plan for a call, which may serve up to 127 more tokens; it does not depend on earlier calls.

    If ranks divide the vocabulary, it is the plan for the device on which they agreed.
    """
    device = None if call.shard is None else call.shard.device
    call = call.specs(tokens=planned_tokens(call.own_tokens))
    return _plan(call, options, device or Device.of(call.device))


_plan = lru_cache(maxsize=4096)(choose)


# The operators.


def run_forward(tensors: list[Tensor], settings: str) -> list[Tensor]:
    """Implements `torch.ops.thunder_flce.linear_cross_entropy` for tensors with values."""
    parsed = Settings.parse(settings)
    results = dict(zip(parsed.result_names, forward(parsed, tensors), strict=True))
    if "computed_rows" in results:
        # Programs expect all results on one device. Copying the number there would wait, which a CUDA graph prohibits.
        count = int(results["computed_rows"])
        results["computed_rows"] = tensors[0].new_full((), count, dtype=torch.int64)
        remember(results["computed_rows"], count)
    if "row_log_sum" in results:
        # The kernels' statistics share one allocation, but results of an operator must not alias.
        results["row_log_sum"] = results["row_log_sum"].clone()
    return [*results.values()]


def _forward_fake(tensors: list[Tensor], settings: str) -> list[Tensor]:
    parsed = Settings.parse(settings)
    call = parsed.call(tensors)
    if parsed.vocab_parallel is not None:
        parallel = VocabParallel.of(parsed.vocab_parallel)
        if parallel.sequence_parallel:
            call = call.with_tensors(call.tensors, tokens=call.own_tokens * parallel.process_group.size())
    like = call.tensors["target"]
    return [like.new_empty(spec.shape, dtype=spec.dtype) for spec in parsed.plan.result_specs(call).values()]


def _backward(upstream: list[Tensor | None], saved: list[Tensor], tensors: list[Tensor], settings: str) -> list[Tensor]:
    return backward(Settings.parse(settings), upstream, saved, tensors, may_overwrite=False)


def _backward_in_place(
    upstream: list[Tensor | None], logits: Tensor, saved: list[Tensor], tensors: list[Tensor], settings: str
) -> tuple[Tensor, ...]:
    """Runs the backward, overwriting the saved logits, which are an argument of their own."""
    parsed = Settings.parse(settings)
    at = parsed.logits_position
    return _padded(backward(parsed, upstream, [*saved[:at], logits, *saved[at:]], tensors, may_overwrite=True))


MOST_IN_PLACE = 3
"""Number of tensors that `…_backward_` returns: Inductor takes no operator that changes an argument and returns a list,
so calls with more gradients do not use it, and fewer are padded."""


def _padded(gradients: list[Tensor]) -> tuple[Tensor, ...]:
    return *gradients, *(gradients[0].new_empty(0) for _ in range(MOST_IN_PLACE - len(gradients)))


def _backward_fake(
    upstream: list[Tensor | None], saved: list[Tensor], tensors: list[Tensor], settings: str
) -> list[Tensor]:
    return [tensors[at].new_empty(tensors[at].shape) for at in Settings.parse(settings).grad_positions]


library = torch.library.Library("thunder_flce", "FRAGMENT")


def define(name: str, schema: str, run: Any, fake: Any) -> None:
    """Defines an operator by its schema, its implementation and its fake implementation."""
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


def _flops(*arguments: Any, is_forward: bool, **_: Any) -> int:
    """Returns the operations for FlopCounterMode: two per product, for ignored tokens, too."""
    tensors, parsed = arguments[-2], Settings.parse(arguments[-1])
    call, plan = parsed.call(tensors), parsed.plan
    logits = is_forward or plan.strategy == RECOMPUTE_LOGITS
    gradients = plan.finishes_in_forward == is_forward
    linears = call.linears if call.loss.divergence is None else (*call.linears, TEACHER)
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


# Registered lazily: importing it imports Triton from torch 2.15 on.
when_imported("torch.utils.flop_counter", _register_flops)
