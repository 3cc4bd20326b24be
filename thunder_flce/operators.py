"""The operators `torch.ops.thunder_flce.linear_cross_entropy` and `…_backward`, which compilers and exporters see.

Each is opaque: it runs the engine. Its fake implementation knows the shapes of what it returns, also where the number
of tokens is symbolic. What is no tensor is one string, `settings`, a Python literal. It holds a plan or, where a
program is compiled for any number of tokens, options from which the operator makes the plan when it runs. Such options
name the strategy, since that decides what is returned.

They return fresh, contiguous tensors and change none of their arguments. `autograd` differentiates them.
"""

import ast
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from thunder_flce.device import DeviceMemory
from thunder_flce.execution import engine
from thunder_flce.execution.layout import layout_for
from thunder_flce.execution.operands import ForwardResult, Operands, SavedStatistics, Term, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward, LossOnly, Plan, SaveLogits, SaveSomeLogits
from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.execution.shards import Pending, start_gathering
from thunder_flce.operation.arguments import check_linear_cross_entropy, named_operands
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, OUTPUTS, Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.operation.shard import Shard
from thunder_flce.options import Options
from thunder_flce.planning.choose import agreed_plan, cached_plan, lasting_strategy
from thunder_flce.vocab_parallel import VocabParallel, agree


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The plain values that the operators take as one string."""

    loss: Loss
    needs_grad: tuple[str, ...]
    """Of the names of `named_operands`, those whose gradient is needed, in their order."""
    strategy: str
    plan: Plan | None = None
    """None: made from the options when the operator runs."""
    options: Options = Options()
    shard: Shard | None = None
    vocab_parallel: str | None = None
    """Without a plan: the ranks that divide the vocabulary, by `as_literal`, which agree when the operator runs."""
    divergence: Divergence | None = None
    """Of `linear_kl_divergence`, whose operators have no plan."""

    @classmethod
    def planned(cls, loss: Loss, needs_grad: tuple[str, ...], plan: Plan, *, shard: Shard | None = None) -> "Settings":
        """Those for a plan that is known."""
        return cls(loss=loss, needs_grad=needs_grad, strategy=plan.strategy, plan=plan, shard=shard)

    @classmethod
    def unplanned(
        cls, operands: Operands, needs_grad: tuple[str, ...], options: Options, *, vocab_parallel: str | None = None
    ) -> "Settings":
        """Those for any number of tokens, for operands that may be fake.

        Raises:
            ValueError: see `planning.choose.make_plan`; and for logits to save, of columns that only all ranks together
                know.
        """
        strategy = lasting_strategy(problem_of(operands, options), options)
        has_known_columns = vocab_parallel is None or operands.loss.vocab_size is None
        if strategy == SaveLogits.strategy and not has_known_columns:
            raise ValueError(
                'strategy must not be "save_logits" with vocab_size and vocab_parallel in a program to be compiled, '
                "which has to know how many columns of the logits this rank saves"
            )
        if strategy != LossOnly.strategy:
            options = replace(options, strategy=strategy)
        settings = cls(loss=operands.loss, needs_grad=needs_grad, strategy=strategy, options=options)
        return replace(settings, vocab_parallel=vocab_parallel)

    def __str__(self) -> str:
        return _written(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> "Settings":
        """The settings that were written as `text`."""
        values = ast.literal_eval(text)
        plan = values.get("plan")
        return Settings(
            loss=Loss(**values["loss"]),
            needs_grad=values["needs_grad"],
            strategy=values["strategy"],
            plan=None if plan is None else Plan.of({"strategy": values["strategy"], **plan}),
            options=Options(**values.get("options", {})),
            shard=Shard(**values["shard"]) if "shard" in values else None,
            vocab_parallel=values.get("vocab_parallel"),
            divergence=Divergence(**values["divergence"]) if "divergence" in values else None,
        )

    @property
    def finishes_in_forward(self) -> bool:
        """Whether the backward has nothing left to do but to multiply the gradients by one number."""
        return self.strategy == GradientsInForward.strategy and not self.loss.has_row_gradients

    def float32_logits(self, operands: Operands) -> bool:
        """Whether the logits of 16-bit operands stay in float32."""
        return self.options.has_float32_logits(operands.dtype) if self.plan is None else self.plan.float32_logits


@lru_cache(maxsize=1024)
def _written(settings: Settings) -> str:
    values: dict[str, Any] = {
        "loss": settings.loss.non_defaults(),
        "needs_grad": settings.needs_grad,
        "strategy": settings.strategy,
    }
    # PyTorch keeps compiled graphs on disk, and finds them by their arguments, not by what an operator takes.
    values["schema"] = _SCHEMA
    if settings.plan is not None:
        values["plan"] = {name: value for name, value in settings.plan.non_defaults().items() if name != "strategy"}
    if settings.shard is not None:
        values["shard"] = asdict(settings.shard)
    if settings.vocab_parallel is not None:
        values["vocab_parallel"] = settings.vocab_parallel
    if settings.divergence is not None:
        values["divergence"] = asdict(settings.divergence)
    if options := settings.options.non_defaults():
        values["options"] = options
    return repr(values)


def operands_of(
    arguments: Mapping[str, Any], loss: Loss, needs_grad: Collection[str], *, shard: Shard | None = None
) -> Operands:
    """What the engine takes.

    Args:
        arguments: those of `linear_cross_entropy` by name; others are passed over.
        loss: the loss.
        needs_grad: of the names of `named_operands`, those whose gradient is needed.
        shard: of a vocabulary that ranks divide.
    """
    input, target = arguments["input"], arguments["target"]
    linears = [*named_operands(input, arguments["linear_weight"], None, arguments["terms"]).items()]
    row_dtype = statistics_dtype(input.dtype)
    token_weights, target_weights = arguments.get("token_weights"), arguments.get("target_weights")
    several = () if target_weights is None else (target.shape[-1],)
    if target_weights is not None:
        target_weights = target_weights.reshape(-1, *several).to(row_dtype)
    # The targets are those of all ranks, which may divide the tokens.
    target = target.reshape(-1, *several)
    tokens = target.shape[0] // (1 if shard is None else shard.token_parts)
    return Operands(
        terms=tuple(
            Term(
                x=x.reshape(tokens, x.shape[-1]),
                weight=weight,
                input_grad=of_input in needs_grad,
                weight_grad=of_weight in needs_grad,
            )
            for (of_input, x), (of_weight, weight) in zip(linears[::2], linears[1::2], strict=True)
        ),
        bias=arguments["linear_bias"],
        target=target,
        loss=loss,
        target_weights=target_weights,
        class_weight=arguments["weight"],
        token_weights=None if token_weights is None else token_weights.reshape(-1).to(row_dtype),
        token_inputs=tuple(
            # Integers stay as they are: float32 is not exact beyond 2²⁴.
            vector.reshape(-1).to(row_dtype if vector.is_floating_point() else vector.dtype)
            for vector in arguments.get("token_inputs") or ()
        ),
        num_items=_as_row_scalar(arguments["num_items"], target, row_dtype),
        expected_gradient=_as_row_scalar(arguments["expected_gradient"], target, row_dtype),
        bias_grad="linear_bias" in needs_grad,
        shard=shard,
    )


def with_all_tokens(arguments: Mapping[str, Any], shard: Shard | None) -> dict[str, Any]:
    """The arguments; where ranks divide the tokens, tensors with numbers of each token are gathered from all ranks."""
    if shard is None or not shard.sequence_parallel:
        return {**arguments}
    tokens = arguments["input"].shape[:-1]

    def started(part: Tensor) -> Pending:
        return start_gathering(shard, part.reshape(tokens.numel(), *part.shape[len(tokens) :]))

    names = ("target", "token_weights", "target_weights")
    pending = {name: started(part) for name in names if (part := arguments.get(name)) is not None}
    inputs = [started(part) for part in arguments["token_inputs"]]
    gathered = {name: each.wait() for name, each in pending.items()}
    return {**arguments, **gathered, "token_inputs": [each.wait() for each in inputs]}


def _as_row_scalar(number: Tensor | float | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A number as a tensor of a dtype, on the device of `like`."""
    if number is None:
        return None
    if isinstance(number, Tensor):
        return number.to(dtype)
    return torch.full((), number, dtype=dtype, device=like.device)


def problem_of(operands: Operands, options: Options) -> Problem:
    """What is known of a call before it runs; of a divided vocabulary, what is known of the largest part."""
    problem = Problem(
        tokens=operands.tokens,
        terms=tuple(
            TermShape(hidden=term.x.shape[1], input_grad=term.input_grad, weight_grad=term.weight_grad)
            for term in operands.terms
        ),
        vocab=operands.vocab,
        weight_rows=operands.weight_rows,
        shard=operands.shard,
        dtype=operands.dtype,
        device_type=operands.device.type,
        loss=operands.loss,
        has_bias=operands.bias is not None,
        bias_grad=operands.bias_grad,
        has_class_weight=operands.class_weight is not None,
        has_num_items=operands.num_items is not None,
        has_token_weights=operands.token_weights is not None,
        targets_per_token=None if operands.target_weights is None else operands.target_weights.shape[1],
        token_inputs=len(operands.token_inputs),
        has_expected_gradient=operands.expected_gradient is not None,
        float32_logits=options.has_float32_logits(operands.dtype),
    )
    return problem.largest_part


def plan_for(operands: Operands, options: Options, memory: DeviceMemory | None = None) -> Plan:
    """The plan for tensors that are there; for a divided vocabulary, with the least memory of all ranks."""
    problem = problem_of(operands, options)
    if problem.shard is not None:
        return agreed_plan(problem, options, memory)
    return cached_plan(problem, options, operands.device)


def is_traced(tensor: Any) -> bool:
    """Whether a tensor is of a program that is compiled or exported, or has no values; not so of what is no tensor."""
    return isinstance(tensor, Tensor) and (torch.compiler.is_compiling() or tensor.is_meta or is_fake(tensor))


def needs_operator(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call must go through the dispatcher, as one operator, instead of straight to the engine.

    It must where a compiler, a mode, a profiler, a transform of torch.func or a tensor subclass has to see the
    operator, and for tensors that are lazily negated (`is_neg`), which the dispatcher materialises.
    """
    is_watched = (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.autograd._profiler_enabled()
    )
    return is_watched or not all(t is None or _is_plain(t) for t in tensors)


def _is_plain(tensor: Tensor) -> bool:
    is_wrapper = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    return type(tensor) in _PLAIN and not (tensor.is_meta or tensor.is_neg() or is_wrapper)


_PLAIN = (Tensor, torch.nn.Parameter)


def differentiate(settings: Settings, arguments: Mapping[str, Any], *, may_overwrite: bool = True) -> list[Tensor]:
    """The needed gradients, for the strategies that compute them in the backward, of tensors that are there.

    Args:
        settings: those of the forward.
        arguments: those of the backward operator, by name.
        may_overwrite: whether what was kept may be used up where autograd will not read it again.
    """
    operands, plan = _planned(settings, arguments)
    statistics = SavedStatistics(*(arguments[name] for name in SavedStatistics._fields))
    upstream = UpstreamGradients(arguments["grad"], *(arguments[name] for name in OUTPUT_GRADS))
    kept = arguments["kept"]
    return engine.backward(operands, plan, statistics, kept, upstream, may_overwrite=may_overwrite).needed()


def _arguments(names: Sequence[str], tensors: Sequence[Tensor | None], others: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name: PyTorch does not hand over those that have their defaults."""
    return {**dict.fromkeys(_DEFAULTS), **dict(zip(names, tensors, strict=True)), **others}


def _operands(settings: Settings, arguments: Mapping[str, Any]) -> Operands:
    given = {**arguments, "terms": _pairs(arguments["terms"])}
    return operands_of(given, settings.loss, settings.needs_grad, shard=settings.shard)


def _pairs(terms: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(terms[::2], terms[1::2], strict=True))


def _planned(settings: Settings, arguments: Mapping[str, Any]) -> tuple[Operands, Plan]:
    """Operands that are there, and their plan; ranks that divide the vocabulary agree on it."""
    if settings.vocab_parallel is None:
        operands = _operands(settings, arguments)
        return operands, settings.plan or plan_for(operands, settings.options)
    given = {name: arguments[name] for name in (*_POSITIONAL, *_OPTIONAL)}
    given |= {"terms": _pairs(arguments["terms"]), "token_inputs": arguments.get("token_inputs") or ()}

    def described(name: str, operand: Tensor | None) -> Tensor | None:
        """The operand, marked as needing a gradient or not: inside the operator, the mark is lost."""
        return None if operand is None else operand.detach().requires_grad_(name in settings.needs_grad)

    call = {**given, **{name: described(name, given[name]) for name in ("input", "linear_weight", "linear_bias")}}
    call["terms"] = [
        tuple(described(f"terms[{at}].{kind}", each) for kind, each in zip(("input", "weight"), term, strict=True))
        for at, term in enumerate(given["terms"])
    ]
    parallel = VocabParallel.of(settings.vocab_parallel)
    agreement = agree(parallel, call, loss=settings.loss, options=settings.options)
    check_linear_cross_entropy(**given, loss=settings.loss, vocab=agreement.weight_rows)
    given = with_all_tokens(given, agreement.shard)
    operands = operands_of(given, settings.loss, settings.needs_grad, shard=agreement.shard)
    return operands, plan_for(operands, settings.options, agreement.memory)


def _forward(*tensors: Tensor, settings: str, **others: Any) -> list[Tensor]:
    known = Settings.parse(settings)
    return results(known, engine.forward(*_planned(known, _arguments(_POSITIONAL, tensors, others))))


def results(settings: Settings, result: ForwardResult) -> list[Tensor]:
    """What the operator returns: the loss, its outputs and what is saved for the backward."""
    found = [result.loss, *result.outputs]
    if result.gradients is not None:
        return [*found, result.statistics.valid_count, *result.gradients.needed()]
    if settings.strategy == LossOnly.strategy:
        return found
    # The entropy is among the outputs.
    return [*found, *result.statistics[:3], *([] if result.kept is None else [result.kept])]


def _forward_fake(*tensors: Tensor, settings: str, **others: Any) -> list[Tensor]:
    known = Settings.parse(settings)
    operands, loss = _operands(known, _arguments(_POSITIONAL, tensors, others)), known.loss
    tokens, row_dtype = operands.tokens, operands.row_dtype

    def new(*shape: int, dtype: torch.dtype = row_dtype) -> Tensor:
        return operands.target.new_empty(shape, dtype=dtype)

    results = [new(tokens) if loss.reduction == "none" else new()]
    for output in (OUTPUTS[name] for name in loss.outputs):
        shape = () if output.is_mean else (tokens,)
        results.append(new(*shape, dtype=torch.int64 if output.is_index else row_dtype))
    if known.strategy == LossOnly.strategy:
        return results
    valid_count = new(dtype=torch.int64)
    if known.vocab_parallel is not None:
        parallel = VocabParallel.of(known.vocab_parallel)
        tokens *= parallel.process_group.size() if parallel.sequence_parallel else 1
    if known.finishes_in_forward:
        return [*results, valid_count, *_gradients_fake(operands)]
    results += [new(tokens), new(tokens), valid_count]
    if known.strategy == GradientsInForward.strategy:
        return [*results, *(each.to(row_dtype) for each in _gradients_fake(operands))]
    if known.strategy == SaveLogits.strategy:
        dtype = torch.float32 if known.float32_logits(operands) else operands.dtype
        row = layout_for(operands.vocab, dtype=dtype, device_type=operands.device.type).row_stride
        rows = known.plan.saved_rows if isinstance(known.plan, SaveSomeLogits) else tokens
        results.append(new(rows, row, dtype=dtype))
    return results


def _gradients_fake(operands: Operands) -> list[Tensor]:
    needed = [
        operand for term in operands.terms for operand in ((term.x, term.input_grad), (term.weight, term.weight_grad))
    ]
    if operands.bias is not None:
        needed.insert(2, (operands.bias, operands.bias_grad))
    return [operand.new_empty(operand.shape) for operand, is_needed in needed if is_needed]


def _backward(*tensors: Tensor | None, settings: str, **others: Any) -> list[Tensor]:
    arguments = _arguments(_BACKWARD_POSITIONAL, tensors, others)
    return differentiate(Settings.parse(settings), arguments, may_overwrite=False)


def _backward_fake(*tensors: Tensor | None, settings: str, **others: Any) -> list[Tensor]:
    arguments = _arguments(_BACKWARD_POSITIONAL, tensors, others)
    return _gradients_fake(_operands(Settings.parse(settings), arguments))


def define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, returns: str = "Tensor[]"
) -> None:
    """Defines an operator, with what runs it and what gives the shapes of its results."""
    library.define(f"{name}({schema}) -> {returns}")
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


OUTPUT_GRADS = tuple(f"{name}_grad" for name in DIFFERENTIABLE_OUTPUTS)
"""What the backward calls the upstream gradients of the outputs, in the order of `UpstreamGradients`."""

_POSITIONAL = ("input", "linear_weight", "target")
_BACKWARD_POSITIONAL = ("grad", *_POSITIONAL, "row_max", "row_log_sum", "valid_count")
_OPTIONAL = ("linear_bias", "weight", "token_weights", "target_weights", "num_items", "expected_gradient")
_DEFAULTS = (*_OPTIONAL, "entropy", "kept", *OUTPUT_GRADS)
_KEYWORDS = (
    "*, Tensor[] terms, str settings, Tensor? linear_bias=None, Tensor? weight=None, Tensor? token_weights=None, "
    "Tensor? target_weights=None, Tensor? num_items=None, Tensor? expected_gradient=None"
)
_FORWARD = f"Tensor input, Tensor linear_weight, Tensor target, {_KEYWORDS}, Tensor[]? token_inputs=None"
_BACKWARD = (
    "Tensor? grad, Tensor input, Tensor linear_weight, Tensor target, Tensor row_max, Tensor row_log_sum, "
    f"Tensor valid_count, {_KEYWORDS}, Tensor? entropy=None, "
    f"Tensor? kept=None, {', '.join(f'Tensor? {name}=None' for name in OUTPUT_GRADS)}"
)
_SCHEMA = zlib.crc32(f"{_FORWARD} {_BACKWARD}".encode())
library = torch.library.Library("thunder_flce", "FRAGMENT")
define("linear_cross_entropy", _FORWARD, _forward, _forward_fake)
define("linear_cross_entropy_backward", _BACKWARD, _backward, _backward_fake)
