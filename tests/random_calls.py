"""Random calls over every argument, any number of them, compared with eager PyTorch in float64:

    python tests/random_calls.py --count 10000
    python tests/random_calls.py --count 2000 --device cuda

`--way "data parallel"` and other ways run them on ranks and in compilers. Call N is always the same: `--first N
--count 1` repeats it alone.
"""

import argparse
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import thunder
import torch
from torch import Tensor

import thunder_flce
from divided import BOTH, divided, mesh_result
from reference import Case, Result, assert_close_to_truth, differentiate, ours, poison_memory
from thunder_flce import LinearCrossEntropyLoss, Options, linear_cross_entropy
from thunder_flce.engine.kernels import dispatch, torch_rows
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, OUTPUTS
from thunder_flce.options import ACCUMULATE, IGNORED_ROWS, LOGITS_DTYPES, STRATEGIES

# Each vocabulary, dtype and map of the logits needs an nvFuser definition, which takes a third of a second to compile.
VOCABULARIES = {"cpu": (2, 3, 7, 8, 33, 101, 1009, 16383, 16385), "cuda": (7, 1009, 16385)}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (2,), (13,), (3, 5), (2, 3, 4))
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")
# Twice the value, as ranks of data parallel need it, does not fit into the last two dtypes.
ITEMS = {"5": torch.int64, "0": torch.int64, "200": torch.uint8, "40000": torch.float16}
SPECIAL = {
    "masked columns": -math.inf, "masked target": -math.inf, "only masked columns": -math.inf, "infinity": math.inf,
    "NaN": math.nan, "NaN in a row": math.nan, "large": 1e4,
}  # fmt: skip
"""Values that the bias, or a row of the input, brings into the logits"""


@dataclass(frozen=True)
class Call:
    """A call of `linear_cross_entropy`, as values that can be printed. Defaults are those of a plain cross-entropy."""

    seed: int
    shape: tuple[int, ...]
    hidden: int
    vocab: int
    dtype: torch.dtype
    scale: float  # Standard deviation of the logits, before scale and softcap
    bias: bool
    class_weight: torch.dtype | None
    targets: str  # Distribution over the columns
    ignored: str
    needs_grad: tuple[bool, bool, bool]  # The input, the weight, the bias
    terms: tuple[tuple[int, bool, bool], ...]  # Of each, hidden size, and whether input and weight need a gradient
    grad: str  # Kind of the loss's upstream gradient
    layouts: tuple[str, ...]  # Layouts of the input, weight, bias, targets and class weights
    num_items: str | float | None  # For a mean: a number, or the name of a tensor's value
    loss: dict[str, Any]
    options: Options
    token_weights: torch.dtype | None = None
    several: int = 0  # K with target weights, or 0
    token_loss: Callable[..., Tensor] | None = None
    expected: str | float | None = None  # The expected gradient: a number, or the name of a tensor's value
    detached: tuple[str, ...] = ()
    target_dtype: torch.dtype = torch.int64  # Used only if all targets fit: `ignore_index` or the columns may not
    is_repeated: bool = False  # Whether the same call runs a second time, from the cache of calls
    special: str | None = None  # One of `SPECIAL`

    @property
    def columns(self) -> int:
        """Number of columns that `vocab_size` leaves."""
        return self.loss["vocab_size"] or self.vocab

    def case(self, device: str) -> Case:
        """Makes the operands."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int, factor: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * factor).to(self.dtype)

        def linear(hidden: int) -> tuple[Tensor, Tensor]:
            return randn(*self.shape, hidden), randn(self.vocab, hidden, factor=self.scale * max(hidden, 1) ** -0.5)

        def placed(tensor: Tensor | None, layout: str, needs_grad: bool = False) -> Tensor | None:
            return None if tensor is None else laid_out(tensor.to(device), layout).requires_grad_(needs_grad)

        count = math.prod(self.shape)
        targets = torch.randint(0, self.columns, (count,), generator=generator)
        if self.targets != "anywhere":
            targets.fill_({"first": 0, "last": self.columns - 1}[self.targets])
        chance, at = torch.rand(count, generator=generator), torch.arange(count)
        ignored = {
            "none": at < 0, "some": chance < 0.3, "all": at >= 0, "first": at == 0, "last": at == count - 1,
        }[self.ignored]  # fmt: skip
        targets[ignored] = self.loss["ignore_index"]
        class_weight = None
        if self.class_weight is not None:
            # Some weights are 0, but no target's: a mean over weights of 0 is a quotient of rounding errors.
            class_weight = torch.rand(self.vocab, generator=generator) + 0.1
            may_be_zero = torch.ones(self.vocab, dtype=torch.bool)
            may_be_zero[targets[~ignored]] = False
            may_be_zero[0] = False  # An expanded layout repeats this weight.
            class_weight[may_be_zero & (torch.rand(self.vocab, generator=generator) < 0.2)] = 0
            class_weight = class_weight.to(self.class_weight)
        operands = *linear(self.hidden), randn(self.vocab, factor=self.scale) if self.bias else None
        others = map(placed, (targets.view(self.shape), class_weight), self.layouts[3:])
        # Terms swap the layouts of input and weight, so that they differ from those of the head.
        terms = [tuple(map(placed, linear(rank), self.layouts[1::-1], needs_grad)) for rank, *needs_grad in self.terms]
        case = Case(*map(placed, operands, self.layouts, self.needs_grad), *others, tuple(terms))
        if self.special is not None:
            self.make_special(case)
        return case

    def make_special(self, case: Case) -> None:
        """Writes special values into operands, and changes targets so that these values matter."""
        value, half = SPECIAL[self.special], self.columns // 2
        target = case.target.view(-1)
        with torch.no_grad():
            if self.special == "NaN in a row":
                case.x.view(target.numel(), self.hidden)[2:3, :1] = value
            elif self.special == "only masked columns":
                case.bias.fill_(value)
            elif self.special in ("masked columns", "large"):
                case.bias[:half] = value
                target[: None if self.special == "masked columns" else 5].clamp_(min=half)
            else:
                case.bias[0] = value
                target[:5] = 0

    @property
    def any_grad(self) -> bool:
        return any(self.needs_grad[: 2 + self.bias]) or any(any(needs_grad) for _, *needs_grad in self.terms)

    def incoming(self, device: str) -> Tensor:
        shape = self.shape if self.loss["reduction"] == "none" else ()
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.grad in (values := {"one": 1.0, "power of two": 0.25, "expanded": 0.7}):
            return torch.tensor(values[self.grad], dtype=dtype, device=device).expand(shape)
        random = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + 1), dtype=dtype)
        if self.grad == "zero first" and shape:
            random[:1] = 0
        return laid_out(random.to(device), "transposed" if self.grad == "transposed" else "contiguous")

    def arguments(self, device: str) -> tuple[Case, Tensor, dict[str, Any]]:
        """Returns operands, upstream gradient and other arguments; weights and inputs of ignored tokens are NaN."""
        case, generator = self.case(device), torch.Generator().manual_seed(self.seed + 2)
        ignored = case.target == self.loss["ignore_index"]
        arguments = self.loss | {"num_items": self.num_items if self.loss["reduction"] == "mean" else None}

        def rand(*sizes: int) -> Tensor:
            return torch.rand((*self.shape, *sizes), generator=generator)

        if isinstance(arguments["num_items"], str):
            arguments["num_items"] = torch.tensor(int(self.num_items), dtype=ITEMS[self.num_items], device=device)
        if self.token_weights is not None:
            weights = (rand() + 0.1).masked_fill(rand() < 0.2, 0)
            arguments["token_weights"] = weights.to(device, self.token_weights).masked_fill(ignored, torch.nan)
        if self.several:
            case = self.with_several_targets(case, rand(self.several), generator)
            # The weights of some tokens add up to more than 1.
            weights = (rand(self.several) * 1.5 / self.several).to(device, self.dtype)
            arguments["target_weights"] = weights.masked_fill(case.target == self.loss["ignore_index"], torch.nan)
        if self.token_loss is not None:
            old = (rand() - 0.5 - float(torch.tensor(self.vocab).log())).to(device, self.dtype)
            advantage, mask = (rand() * 2 - 1).to(device), (rand() < 0.5).to(device)
            old, advantage = (values.masked_fill(ignored, torch.nan) for values in (old, advantage))
            arguments |= {"token_loss": self.token_loss, "token_inputs": (old, advantage, mask)}
        if self.expected is not None:
            is_number, as_tensor = isinstance(self.expected, float), torch.tensor(float(self.expected), device=device)
            arguments["expected_gradient"] = self.expected if is_number else as_tensor
        weighs_smoothing = self.class_weight is not None and self.loss["label_smoothing"]
        detached = ("mean_logit",) if weighs_smoothing and "mean_logit" in self.loss["outputs"] else ()
        arguments["detached"] = tuple(dict.fromkeys((*self.detached, *detached)))
        narrow = case.target.to(self.target_dtype)
        case = replace(case, target=narrow if torch.equal(narrow.long(), case.target) else case.target)
        return case, self.incoming(device), arguments

    def with_several_targets(self, case: Case, chance: Tensor, generator: torch.Generator) -> Case:
        """Returns a case with K targets per token; some are ignored, by `chance`, and some in the same column."""
        first, ignore_index = case.target.detach().cpu().long(), self.loss["ignore_index"]
        targets = torch.randint(0, self.columns, chance.shape, generator=generator)
        targets[..., 0] = first
        if self.several > 2:
            targets[..., 2] = targets[..., 1]
        targets = targets.masked_fill(chance < 0.2, ignore_index)
        # `where` keeps the layout of the first targets.
        targets = torch.where((first == ignore_index)[..., None], ignore_index, targets)
        return replace(case, target=targets.to(case.target.device))

    def run(self, device: str, way: str = "eager") -> None:
        """Runs the call, and compares its errors with those of eager PyTorch."""
        case, grad, arguments = self.arguments(device)
        for _ in range(1 + self.is_repeated):
            with named(self):
                result, exact_arguments = WAYS[way](case, grad, self.options, arguments)
                assert_close_to_truth(result, case, grad, 2.0, True, **exact_arguments)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns a tensor in another layout, if it can have that; "expanded" repeats the first row, others keep values."""
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and tensor.ndim:
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 77)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        flat = tensor.new_full((tensor.numel() + 3,), 77)
        flat[3:] = tensor.reshape(-1)
        return flat[3:].view(tensor.shape)
    if layout == "expanded" and tensor.ndim and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor


def row_kernels(dtype: torch.dtype, device: str) -> list[str]:
    """Returns all choices of row kernels that can run."""
    runs_on = ["torch"] if device == "cpu" or dtype is torch.float64 else dispatch.BACKENDS
    return ["auto", *(name for name in runs_on if dispatch.is_installed(name))]


def plain_call(one_of: Callable, device: str, vocabularies: tuple[int, ...] = ()) -> Call:
    """Returns a random cross-entropy over all arguments; `one_of` chooses values."""

    def some_of(*values: Any, most: int) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(one_of(*values) for _ in range(one_of(*range(most + 1)))))

    dtype = one_of(*DTYPES)
    vocab = one_of(*(vocabularies or VOCABULARIES[device]))
    reduction = one_of("mean", "sum", "none")
    outputs = one_of((), some_of(*sorted({*OUTPUTS} - {"divergence"}), most=4))
    vocab_size = one_of(None, vocab, max(vocab - 2, 1), 1 + vocab // 2)
    # Gradients in float16 have to know the loss scale.
    in_forward = dtype is not torch.float16 and reduction != "none" and not {*outputs} & {*DIFFERENTIABLE_OUTPUTS}
    strategy = one_of(None, *(s for s in STRATEGIES if s != "gradients_in_forward" or in_forward))
    ranks = [(one_of(2, 1, 8), one_of(False, True), one_of(False, True)) for _ in range(one_of(1, 2, 3))]
    return Call(
        seed=one_of(*range(2**12)), shape=one_of((13,), (3, 5), *SHAPES), hidden=one_of(5, 1, 16, 0), vocab=vocab,
        dtype=dtype, scale=one_of(1.0, 4.0), bias=one_of(False, True),
        class_weight=one_of(None, dtype, dtype if dtype is torch.float64 else torch.float32),
        targets=one_of("anywhere", "first", "last"),
        ignored=one_of("none", "some", "some", "first", "last", "all"),
        needs_grad=(one_of(True, False), one_of(True, False), one_of(True, False)),
        terms=one_of((), (), tuple(ranks)),
        grad=one_of("one", "power of two", "random", "expanded", "transposed", "zero first"),
        layouts=tuple(one_of(*LAYOUTS) for _ in range(5)),
        num_items=one_of(None, None, 17, 2.5, *ITEMS) if reduction == "mean" else None,
        loss={
            "reduction": reduction, "ignore_index": one_of(-100, -1, 2**40, (vocab_size or vocab) - 1),
            "label_smoothing": one_of(0.0, 0.1, 1.0), "softcap": one_of(None, 2.0, 30.0),
            "logit_scale": one_of(1.0, 0.25, -1.5), "z_loss": one_of(0.0, 1e-3, 0.1), "vocab_size": vocab_size,
            "outputs": outputs,
        },
        options=Options(
            strategy=strategy, chunk_rows=None if strategy == "save_logits" else one_of(None, 1, 4, 5, 64),
            # Sums in a 16-bit parameter's dtype lose precision with the number of chunks, by design.
            accumulate=one_of(*ACCUMULATE) if dtype.itemsize >= 4 else one_of("auto", "float32"),
            ignored_rows=one_of(*IGNORED_ROWS), logits_dtype=one_of(*LOGITS_DTYPES),
            row_kernels=one_of(*row_kernels(dtype, device)),
        ),
    )  # fmt: skip


def one_pass(call: Call, one_of: Callable) -> Call:
    """Returns a call that computes statistics and gradient in one pass (see `engine`), in small chunks."""
    loss = {"reduction": one_of("mean", "sum"), "label_smoothing": 0.0, "z_loss": 0.0, "outputs": ()}
    input_grad, weight_grad, _ = call.needs_grad
    if call.dtype is torch.float16:
        class_weight = torch.bfloat16 if call.class_weight is torch.float16 else call.class_weight
        call = replace(call, dtype=torch.bfloat16, class_weight=class_weight)
    in_forward = {"strategy": "gradients_in_forward", "accumulate": "auto", "logits_dtype": "input"}
    options = replace(call.options, chunk_rows=one_of(None, 1, 5), **in_forward)
    needs_grad = (input_grad or not weight_grad, weight_grad, False)
    return replace(call, needs_grad=needs_grad, loss=call.loss | loss, options=options)


def several_targets(call: Call, one_of: Callable) -> Call:
    """Returns a call with several targets per token, each with a weight."""
    loss = call.loss | {"label_smoothing": 0.0, "outputs": without(call.loss["outputs"], "accuracy")}
    return replace(call, loss=loss, class_weight=None, several=one_of(1, 2, 5))


def special(call: Call, one_of: Callable) -> Call:
    """Returns a call with one of the values of `SPECIAL` among its logits."""
    kind = one_of(*SPECIAL)
    # In PyTorch, ignored rows and columns beyond vocab_size bring NaN into gradients: 0 · NaN.
    loss = call.loss | {"ignore_index": -100} | ({"vocab_size": None} if kind == "NaN in a row" else {})
    ordinary = {"ignored": "none", "layouts": ("contiguous",) * 5, "targets": "anywhere"}
    return replace(call, loss=loss, special=kind, bias=True, **ordinary)


def with_token_loss(call: Call, one_of: Callable) -> Call:
    """Returns a call with a token loss, whose gradients can be computed in the forward only."""
    token_loss = one_of(*(TOKEN_LOSSES if call.dtype.itemsize >= 4 else SMOOTH))
    loss = call.loss | {"label_smoothing": 0.0, "reduction": one_of("mean", "sum")}
    options = replace(call.options, strategy=one_of(None, "gradients_in_forward"))
    # Gradients in float16 have to know the loss scale.
    expected = one_of(1.0, "2") if call.dtype is torch.float16 else call.expected
    return replace(call, token_loss=token_loss, class_weight=None, loss=loss, options=options, expected=expected)


def without(names: tuple[str, ...], *excluded: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in excluded)


def numbered(number: int, device: str, way: str = "eager") -> Call:
    """Returns a random call that can run in this way, by its number."""
    one_of = chooser(0, number)
    # On ranks, no vocabulary equals the size of a dimension of tokens, which ranks may divide, too.
    call = plain_call(one_of, device, (7, 33, 101) if way in RANKS else ())
    if way == "sequence parallel":
        call = replace(call, shape=one_of((12,), (4,), (28,), (48,)))
    elif way == "data parallel":
        call = replace(call, shape=(math.prod(call.shape),))
    elif way == "module":
        call = replace(call, terms=(), hidden=max(call.hidden, 1))
    elif way == "DTensors":
        call = replace(call, shape=one_of((4, 8), (3, 6), (1, 2)))
    kind = one_of("cross-entropy", "cross-entropy", "token loss", "several targets", "one pass", "special")
    call = replace(call, expected=one_of(None, None, 0.5, "2", "0", "inf", "-inf", "nan"))
    if kind == "one pass" or (kind == "special" and one_of(False, True)):
        call = one_pass(call, one_of)
    kinds = {"token loss": with_token_loss, "several targets": several_targets, "special": special}
    if kind in kinds:
        call = kinds[kind](call, one_of)
    if way == "DTensors":
        # A mean over a rank's own tokens would be another loss.
        loss = call.loss | {"outputs": without(call.loss["outputs"], "accuracy")}
        num_items = one_of(17, 2.5, "5", "200", "40000") if loss["reduction"] == "mean" else None
        call = replace(call, num_items=num_items, loss=loss)
    differentiable = [name for name in call.loss["outputs"] if name in DIFFERENTIABLE_OUTPUTS]
    return replace(
        call, detached=tuple(name for name in differentiable if one_of(False, True)),
        token_weights=None if call.special else one_of(None, None, torch.float32, call.dtype),
        is_repeated=one_of(False, False, False, True),
        target_dtype=one_of(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )  # fmt: skip


def chooser(*seed: Any) -> Callable:
    """Returns a function that chooses one of its arguments at random; a seed repeats all choices."""
    generator = random.Random(" ".join(map(str, seed)))
    return lambda *values: generator.choice(values)


def few_rows_at_a_time(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes the row kernels of PyTorch process several blocks per chunk."""
    set_attribute(torch_rows, "BLOCK_BYTES", 512)
    set_attribute(torch_rows, "THREAD_BYTES", 256)


@contextmanager
def named(example: Any) -> Iterator[None]:
    """Puts an example in front of an error's message."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{example}: {error}") from error


def grpo(log_prob, entropy, old, advantage, mask):
    """A clipped ratio, with a penalty and a bonus; in 16 bits, rounding moves the corners of the clipping."""
    ratio = torch.exp(torch.tanh(log_prob - old))
    clipped = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
    return torch.where(mask, -clipped, 0.1 * log_prob) - 0.01 * entropy


def focal(log_prob, entropy, old, advantage, mask):
    return -((1 - log_prob.exp()) ** 2) * log_prob * advantage.abs() * (1 + mask)


def with_all_variables(log_prob, entropy, old, advantage, mask, *, log_sum_exp, mean_logit):
    value = -log_prob * advantage + 0.01 * log_sum_exp.square() - entropy * log_sum_exp.tanh()
    return value + advantage * (log_sum_exp - mean_logit)


def sigmoids(log_prob, entropy, old, advantage, mask):
    return -torch.nn.functional.logsigmoid(0.5 * (log_prob - old)) + torch.sigmoid(entropy) * log_prob.detach()


TOKEN_LOSSES = (grpo, focal, with_all_variables, sigmoids)
SMOOTH = TOKEN_LOSSES[1:]


# Ways to run a call. Each returns the result, and the arguments by which eager PyTorch computes the same.

Arguments = dict[str, Any]
Outcome = tuple[Result, Arguments]


def by_function(case: Case, grad: Tensor, options: Options, arguments: Arguments) -> Outcome:
    return ours(case, grad, options=options, **arguments), arguments


def by_module(case: Case, grad: Tensor, options: Options, arguments: Arguments) -> Outcome:
    forward_names = ("token_weights", "target_weights", "token_inputs", "num_items", "expected_gradient")
    forward_arguments = {name: arguments[name] for name in forward_names if name in arguments}
    settings = {name: value for name, value in arguments.items() if name not in forward_arguments}
    operands = {"linear.weight": case.weight} | ({} if case.bias is None else {"linear.bias": case.bias})
    sizes = {"in_features": case.weight.shape[1], "num_classes": case.weight.shape[0], "bias": case.bias is not None}
    module = LinearCrossEntropyLoss(**sizes, weight=case.class_weight, options=options, device="meta", **settings)
    results = torch.func.functional_call(module, operands, (case.x, case.target), forward_arguments)
    return differentiate(results, case, grad, arguments["outputs"]), arguments


def by_compiler(compiler: Callable, case: Case, grad: Tensor, options: Options, arguments: Arguments) -> Outcome:
    """Runs the call as a compiled program of its tensors."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}

    def program(x, weight, target, bias, terms, class_weight, tensors, **settings):
        operands = {"linear_bias": bias, "terms": terms, "weight": class_weight}
        return linear_cross_entropy(x, weight, target, **operands, **others, **tensors, **settings)

    step = compiler(program, options)
    results = step(case.x, case.weight, case.target, case.bias, case.terms, case.class_weight, tensors)
    return differentiate(results, case, grad, arguments["outputs"]), arguments


def compiled_by_dynamo(program: Callable, options: Options) -> Callable:
    torch._dynamo.reset()  # After a few programs with the same code, it would not compile more.
    return torch.compile(partial(program, options=options), backend="aot_eager", fullgraph=True)


COMPILERS = {
    "torch.compile": compiled_by_dynamo,
    "thunder.jit": lambda program, options: thunder.jit(program),
    "with our executor": lambda program, options: thunder.jit(program, executors=[thunder_flce.executor]),
    "with our transform": lambda program, options: thunder_flce.jit(program, options=options),
}
SIZES = ((None, 4), (3, 0, None), (None, 0), (None,), (1, None, 1, 0), (0, None))
"""Numbers of columns of the ranks; None for the rest"""


def on_ranks(case: Case, grad: Tensor, options: Options, arguments: Arguments, parallel: str = "") -> Outcome:
    """Divides the vocabulary among ranks and, by "sequence_parallel" or "data_parallel", also the tokens."""
    vocab, tokens = case.weight.shape[0], case.x.shape[:-1].numel()
    sizes = SIZES[tokens % len(SIZES)]
    sizes = tuple(vocab - sum(filter(None, sizes)) if size is None else size for size in sizes)
    if not parallel or not case.needing_grad():
        return divided(case, sizes, grad, options=options, **arguments), arguments
    ranks, is_averaged = len(sizes), parallel == "data_parallel"
    counts = [tokens // ranks] * ranks
    if is_averaged and ranks > 1:
        counts = (tokens - tokens // 3, *[0] * (ranks - 2), tokens // 3)
    result = divided(case, sizes, grad, counts=counts, how={parallel: True}, options=options, **arguments)
    if is_averaged and arguments["reduction"] == "sum":
        arguments = arguments | {"reduction": "mean", "num_items": float(ranks)}
    elif is_averaged and arguments["num_items"] is not None:
        arguments = arguments | {"num_items": float(arguments["num_items"]) * ranks}
    return result, arguments


def as_dtensors(case: Case, grad: Tensor, options: Options, arguments: dict[str, Any]) -> tuple[Result, dict[str, Any]]:
    """Runs on a mesh of 2 × 2 ranks: the first dimension divides sequences, the second tokens and vocabulary."""
    return mesh_result(case, BOTH, grad, options=options, **arguments), arguments


RANKS = {
    "ranks": on_ranks,
    "sequence parallel": partial(on_ranks, parallel="sequence_parallel"),
    "data parallel": partial(on_ranks, parallel="data_parallel"),
    "DTensors": as_dtensors,
}
WAYS = {
    "eager": by_function,
    "module": by_module,
    **{name: partial(by_compiler, compiler) for name, compiler in COMPILERS.items()},
    **RANKS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--way", default="eager", choices=WAYS)
    arguments = parser.parse_args()
    poison_memory()
    few_rows_at_a_time()
    failed, start = [], time.time()
    for number in range(arguments.first, arguments.first + arguments.count):
        call = numbered(number, arguments.device, arguments.way)
        try:
            call.run(arguments.device, arguments.way)
        except Exception:
            failed.append(number)
            print(f"call {number}: {call}\n{traceback.format_exc()}", flush=True)
        if (number + 1) % (1000 if arguments.device == "cpu" else 20) == 0:
            print(f"up to call {number}: {time.time() - start:.0f} s, {len(failed)} failed", flush=True)
    print(f"{arguments.count} calls on {arguments.device}: {len(failed)} failed {failed[:50]}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
