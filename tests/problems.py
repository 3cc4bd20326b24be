"""Random problems over every argument of `linear_cross_entropy`, and their comparison with eager PyTorch in float64."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference import Case, assert_as_exact_as_eager
from thunder_flce import Options
from thunder_flce.engine.kernels import dispatch
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, OUTPUTS
from thunder_flce.options import ACCUMULATE, IGNORED_ROWS, LOGITS_DTYPES, STRATEGIES

# A new vocabulary, dtype or map of the logits is a new nvFuser definition, which takes a third of a second to compile.
VOCABULARIES = {"cpu": (2, 3, 7, 8, 33, 101, 1009, 16383, 16385), "cuda": (7, 1009, 16385)}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (2,), (13,), (3, 5), (2, 3, 4))
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")


@dataclass(frozen=True)
class Problem:
    """A call of `linear_cross_entropy`, in values that can be printed."""

    seed: int
    shape: tuple[int, ...]
    hidden: int
    vocab: int
    dtype: torch.dtype
    scale: float
    """Standard deviation of the logits, before they are mapped"""
    bias: bool
    class_weight: torch.dtype | None
    targets: str
    """How the targets are distributed over the columns"""
    ignored: str
    needs_grad: tuple[bool, bool, bool]
    """The input, the weight, the bias"""
    terms: tuple[tuple[int, bool, bool], ...]
    """Of each further term its hidden size, and whether its input and weight need a gradient"""
    grad: str
    """What the gradient at the loss is like"""
    layouts: tuple[str, ...]
    """Of the input, the weight, the bias, the targets and the class weights"""
    num_items: str | float | None
    """A number, or the name of a tensor's value"""
    loss: dict[str, Any]
    options: Options

    def case(self, device: str) -> Case:
        """The operands."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int, factor: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * factor).to(self.dtype)

        columns = self.loss["vocab_size"] or self.vocab
        count = torch.Size(self.shape).numel()
        targets = {
            "anywhere": torch.randint(0, columns, (count,), generator=generator),
            "first": torch.zeros(count, dtype=torch.long),
            "last": torch.full((count,), columns - 1),
        }[self.targets]
        ignored = {
            "none": torch.zeros(count, dtype=torch.bool),
            "some": torch.rand(count, generator=generator) < 0.3,
            "all": torch.ones(count, dtype=torch.bool),
            "first": torch.arange(count) == 0,
            "last": torch.arange(count) == count - 1,
        }[self.ignored]
        targets[ignored] = self.loss["ignore_index"]
        class_weight = None
        if self.class_weight is not None:
            # Some are 0, but never that of a target: a mean over weights of 0 is a quotient of rounding errors.
            class_weight = torch.rand(self.vocab, generator=generator) + 0.1
            unused = torch.ones(self.vocab, dtype=torch.bool)
            unused[targets[~ignored]] = False
            # The one that an expanded layout repeats.
            unused[0] = False
            class_weight[unused & (torch.rand(self.vocab, generator=generator) < 0.2)] = 0
            class_weight = class_weight.to(self.class_weight)
        tensors = [
            randn(*self.shape, self.hidden),
            randn(self.vocab, self.hidden, factor=self.scale * self.hidden**-0.5),
            randn(self.vocab, factor=self.scale) if self.bias else None,
            targets.view(self.shape),
            class_weight,
        ]
        x, weight, bias, target, class_weight = (
            None if tensor is None else laid_out(tensor.to(device), layout)
            for tensor, layout in zip(tensors, self.layouts, strict=True)
        )
        for tensor, needed in zip((x, weight, bias), self.needs_grad, strict=True):
            if tensor is not None:
                tensor.requires_grad_(needed)
        terms = []
        for rank, *needs_grad in self.terms:
            pair = (randn(*self.shape, rank), randn(self.vocab, rank, factor=self.scale * rank**-0.5))
            # Not the layouts of the head.
            laid = zip(pair, reversed(self.layouts[:2]), needs_grad, strict=True)
            terms.append(tuple(laid_out(t.to(device), layout).requires_grad_(needed) for t, layout, needed in laid))
        return Case(x, weight, bias, target, class_weight, tuple(terms))

    @property
    def any_grad(self) -> bool:
        """Whether anything needs a gradient."""
        return any(self.needs_grad[: 2 + self.bias]) or any(any(needs_grad) for _, *needs_grad in self.terms)

    def incoming(self, device: str) -> Tensor:
        """The gradient at the loss."""
        shape = self.shape if self.loss["reduction"] == "none" else ()
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(self.seed + 1)
        random = torch.randn(shape, generator=generator, dtype=dtype)
        if self.grad == "zero first" and random.ndim and random.shape[0]:
            random[0] = 0
        random = random.to(device)
        if self.grad == "transposed" and random.ndim > 1:
            return random.transpose(0, 1).contiguous().transpose(0, 1)
        if self.grad in ("one", "power of two", "expanded"):
            value = {"one": 1.0, "power of two": 0.25, "expanded": 0.7}[self.grad]
            return torch.tensor(value, dtype=dtype, device=device).expand(shape)
        return random

    def settings(self, device: str) -> dict[str, Any]:
        """The other arguments."""
        num_items = self.num_items
        if isinstance(num_items, str):
            num_items = torch.tensor(int(num_items), device=device)
        weighs_smoothing = self.class_weight is not None and self.loss["label_smoothing"]
        detached = ("mean_logit",) if weighs_smoothing and "mean_logit" in self.loss["outputs"] else ()
        return {**self.loss, "detached": detached, "num_items": num_items}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values, but for "expanded", in another memory layout; where a tensor has no such, as it is."""
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


def gradients_can_come_first(dtype: torch.dtype, reduction: str, outputs: tuple[str, ...]) -> bool:
    """Whether the strategy "gradients_in_forward" is one; those of float16 have to know the loss scale."""
    return dtype is not torch.float16 and reduction != "none" and not set(outputs) & set(DIFFERENTIABLE_OUTPUTS)


def row_kernels(dtype: torch.dtype, device: str) -> list[str]:
    """Every choice of row kernels that can run."""
    runs_on = ["torch"] if device == "cpu" or dtype is torch.float64 else dispatch.BACKENDS
    return ["auto", *(name for name in runs_on if dispatch.is_installed(name))]


def drawn_problem(one_of: Callable, device: str, vocabularies: tuple[int, ...] = ()) -> Problem:
    """Everything that the arguments allow; `one_of` chooses among its arguments."""

    def some_of(*values: Any, most: int) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(one_of(*values) for _ in range(one_of(*range(most + 1)))))

    dtype = one_of(*DTYPES)
    vocab = one_of(*(vocabularies or VOCABULARIES[device]))
    reduction = one_of("mean", "sum", "none")
    outputs = one_of((), some_of(*OUTPUTS, most=4))
    vocab_size = one_of(None, vocab, max(vocab - 2, 1), 1 + vocab // 2)
    in_forward = gradients_can_come_first(dtype, reduction, outputs)
    strategy = one_of(None, *(s for s in STRATEGIES if s != "gradients_in_forward" or in_forward))
    ranks = [(one_of(2, 1, 8), one_of(False, True), one_of(False, True)) for _ in range(one_of(1, 2, 3))]
    return Problem(
        seed=one_of(*range(2**12)),
        shape=one_of((13,), (3, 5), *SHAPES),
        hidden=one_of(5, 1, 16),
        vocab=vocab,
        dtype=dtype,
        scale=one_of(1.0, 4.0),
        bias=one_of(False, True),
        class_weight=one_of(None, dtype, dtype if dtype is torch.float64 else torch.float32),
        targets=one_of("anywhere", "first", "last"),
        ignored=one_of("none", "some", "some", "first", "last", "all"),
        needs_grad=(one_of(True, False), one_of(True, False), one_of(True, False)),
        terms=one_of((), (), tuple(ranks)),
        grad=one_of("one", "power of two", "random", "expanded", "transposed", "zero first"),
        layouts=tuple(one_of(*LAYOUTS) for _ in range(5)),
        num_items=one_of(None, None, 17, 2.5, "5", "0") if reduction == "mean" else None,
        loss={
            "reduction": reduction,
            "ignore_index": one_of(-100, -1, 2**40, (vocab_size or vocab) - 1),
            "label_smoothing": one_of(0.0, 0.1, 1.0),
            "softcap": one_of(None, 2.0, 30.0),
            "logit_scale": one_of(1.0, 0.25, -1.5),
            "z_loss": one_of(0.0, 1e-3, 0.1),
            "vocab_size": vocab_size,
            "outputs": outputs,
        },
        options=Options(
            strategy=strategy,
            chunk_rows=None if strategy == "save_logits" else one_of(None, 1, 4, 5, 64),
            # Sums in the parameter's dtype err with the number of chunks, which is what they are for.
            accumulate=one_of(*ACCUMULATE) if dtype.itemsize >= 4 else one_of("auto", "float32"),
            ignored_rows=one_of(*IGNORED_ROWS),
            logits_dtype=one_of(*LOGITS_DTYPES),
            row_kernels=one_of(*row_kernels(dtype, device)),
        ),
    )


def one_pass(problem: Problem, one_of: Callable) -> Problem:
    """The same with statistics and gradient from one kernel, see `engine`, and small chunks."""
    plain = {"label_smoothing": 0.0, "z_loss": 0.0, "outputs": ()}
    reduction = one_of("mean", "sum")
    input_grad, weight_grad, _ = problem.needs_grad
    if problem.dtype is torch.float16:
        in_float32 = problem.class_weight is torch.float32
        class_weight = problem.class_weight if in_float32 or problem.class_weight is None else torch.bfloat16
        problem = replace(problem, dtype=torch.bfloat16, class_weight=class_weight)
    chunk_rows = one_of(None, 1, 5)
    in_forward = {"strategy": "gradients_in_forward", "accumulate": "auto", "logits_dtype": "input"}
    return replace(
        problem,
        needs_grad=(input_grad or not weight_grad, weight_grad, False),
        num_items=problem.num_items if reduction == "mean" else None,
        loss={**problem.loss, **plain, "reduction": reduction},
        options=replace(problem.options, chunk_rows=chunk_rows, **in_forward),
    )


def chooser(*seed: Any) -> Callable:
    """Chooses one of its arguments, by chance: with a seed, always the same ones."""
    generator = random.Random(" ".join(map(str, seed)))
    return lambda *values: generator.choice(values)


def drawn(count: int, device: str, vocabularies: tuple[int, ...] = (), *, in_one_pass: bool = False) -> Iterator:
    """So many problems, with what goes on to choose."""
    for number in range(count):
        one_of = chooser(number)
        problem = drawn_problem(one_of, device, vocabularies)
        yield one_pass(problem, one_of) if in_one_pass else problem, one_of


@contextmanager
def named(example: Any) -> Iterator[None]:
    """Says of what an error is."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{example}: {error}") from error


def check(problem: Problem, device: str, case: Case | None = None) -> None:
    """Compares the results with the truth, and their errors with those of eager PyTorch."""
    case = problem.case(device) if case is None else case
    arguments = {**problem.settings(device), "options": problem.options}
    with named(problem):
        assert_as_exact_as_eager(case, problem.incoming(device), factor=2.0, tiny=True, **arguments)


SPECIAL = {
    "masked columns": float("-inf"),
    "masked target": float("-inf"),
    "only masked columns": float("-inf"),
    "infinity": float("inf"),
    "NaN": float("nan"),
    "NaN in a row": float("nan"),
    "large": 1e4,
}


def special_case(problem: Problem, special: str, device: str) -> tuple[Problem, Case]:
    """Such a problem, made of another one: the bias or a row of the input carries the values into the logits."""
    # From ignored rows and from columns outside of vocab_size, PyTorch lets NaN into gradients: 0 · NaN.
    loss = {**problem.loss, "ignore_index": -100}
    if special == "NaN in a row":
        loss["vocab_size"] = None
    layouts = ("contiguous",) * 5
    problem = replace(problem, bias=True, shape=(13,), ignored="none", layouts=layouts, targets="anywhere", loss=loss)
    case, value = problem.case(device), SPECIAL[special]
    half = (loss["vocab_size"] or problem.vocab) // 2
    with torch.no_grad():
        if special == "NaN in a row":
            case.x[2, 0] = value
        elif special == "only masked columns":
            case.bias.fill_(value)
        elif special in ("masked columns", "large"):
            case.bias[:half] = value
            case.target[:5].clamp_(min=half)
        else:
            case.bias[0] = value
            case.target[:5] = 0
        if special == "masked columns":
            case.target.clamp_(min=half)
    return problem, case
