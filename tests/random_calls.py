"""Any number of random calls over every argument, against eager PyTorch in float64:

    python tests/random_calls.py --count 10000
    python tests/random_calls.py --count 2000 --device cuda

Beside what `problems.drawn_problem` draws, there are token losses, token and target weights, detached outputs,
expected gradients, and calls that come again; by `--way "data parallel"` and others, on ranks and in compilers. Call N
is always the same one: `--first N --count 1` repeats it alone.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import thunder
import torch
from torch import Tensor

import thunder_flce
from divided import BOTH, divided, on_a_mesh
from poison import poison_memory
from problems import DIFFERENTIABLE_OUTPUTS, Problem, chooser, drawn_problem, named
from reference import Case, Result, assert_close_to_truth, differentiate, ours
from thunder_flce import LinearCrossEntropyLoss, Options, linear_cross_entropy
from thunder_flce.engine.kernels import torch_rows


def grpo(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """A clipped ratio, with a penalty and a bonus. It has corners, which 16 bits put elsewhere."""
    ratio = torch.exp(torch.tanh(log_prob - old))
    clipped = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
    return torch.where(mask, -clipped, 0.1 * log_prob) - 0.01 * entropy


def focal(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return -((1 - log_prob.exp()) ** 2) * log_prob * advantage.abs() * (1 + mask)


def of_all(
    log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, *, log_sum_exp: Tensor,
    mean_logit: Tensor,
) -> Tensor:  # fmt: skip
    value = -log_prob * advantage + 0.01 * log_sum_exp.square() - entropy * log_sum_exp.tanh()
    return value + advantage * (log_sum_exp - mean_logit)


def sigmoids(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return -torch.nn.functional.logsigmoid(0.5 * (log_prob - old)) + torch.sigmoid(entropy) * log_prob.detach()


TOKEN_LOSSES = (grpo, focal, of_all, sigmoids)
SMOOTH = TOKEN_LOSSES[1:]


@dataclass(frozen=True)
class Call:
    """A problem, and what there may be beside it."""

    problem: Problem
    token_weights: torch.dtype | None
    targets: int
    """K with target weights, or 0"""
    target_rest: bool
    token_loss: Callable[..., Tensor] | None
    expected: str | float | None
    """The expected gradient: a number, or the name of a tensor's value"""
    detached: tuple[str, ...]
    is_repeated: bool
    """Whether the same call comes a second time, when it is known"""

    def given(self, device: str) -> tuple[Case, Tensor, dict[str, Any]]:
        """Operands, the gradient at the loss, and the other arguments. What ignored tokens weigh and have is NaN."""
        problem = self.problem
        case, arguments = problem.case(device), problem.settings(device)
        generator = torch.Generator().manual_seed(problem.seed + 2)
        tokens, ignored = problem.shape, case.target == problem.loss["ignore_index"]

        def rand(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator)

        if self.token_weights is not None:
            weights = (rand(*tokens) + 0.1).masked_fill(rand(*tokens) < 0.2, 0)
            arguments["token_weights"] = weights.to(device, self.token_weights).masked_fill(ignored, torch.nan)
        if self.targets:
            case = with_several_targets(case, problem, rand(*tokens, self.targets), generator)
            # With some, more than 1 in all.
            of_targets = (rand(*tokens, self.targets) * 1.5 / self.targets).to(device, problem.dtype)
            of_targets = of_targets.masked_fill(case.target == problem.loss["ignore_index"], torch.nan)
            arguments |= {"target_weights": of_targets, "target_rest": self.target_rest}
        if self.token_loss is not None:
            old = (rand(*tokens) - 0.5 - float(torch.tensor(problem.vocab).log())).to(device, problem.dtype)
            advantage, mask = (rand(*tokens) * 2 - 1).to(device), (rand(*tokens) < 0.5).to(device)
            old, advantage = (each.masked_fill(ignored, torch.nan) for each in (old, advantage))
            arguments |= {"token_loss": self.token_loss, "token_inputs": (old, advantage, mask)}
        if self.expected is not None:
            is_number = isinstance(self.expected, float)
            arguments["expected_gradient"] = (
                self.expected if is_number else torch.tensor(float(self.expected), device=device)
            )
        arguments["detached"] = tuple(dict.fromkeys((*self.detached, *arguments["detached"])))
        return case, problem.incoming(device), arguments

    def run(self, device: str, way: str = "eager") -> None:
        """Compares the results with the truth, and their errors with those of eager PyTorch."""
        case, grad, arguments = self.given(device)
        for _ in range(1 + self.is_repeated):
            with named(self):
                found = (RANKS | WAYS)[way](case, grad, self.problem.options, arguments)
                result, *of_truth, others = found if way in RANKS else (found, case, grad, arguments)
                assert_close_to_truth(result, *of_truth, 2.0, True, **others)


def run_compiled(compiler: Callable, case: Case, grad: Tensor, options: Options, arguments: dict[str, Any]) -> Result:
    """The call as a program of its tensors."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}

    def program(x, weight, target, bias, terms, class_weight, tensors, **settings):
        operands = {"linear_bias": bias, "terms": terms, "weight": class_weight}
        return linear_cross_entropy(x, weight, target, **operands, **others, **tensors, **settings)

    step = compiler(program, options)
    results = step(case.x, case.weight, case.target, case.bias, case.terms, case.class_weight, tensors)
    return differentiate(results, case, grad, arguments["outputs"])


def by_dynamo(program: Callable, options: Options) -> Callable:
    torch._dynamo.reset()  # After a few programs of one code, it would run more of them uncompiled.
    return torch.compile(partial(program, options=options), backend="aot_eager", fullgraph=True)


COMPILERS = {
    "torch.compile": by_dynamo,
    "thunder.jit": lambda program, options: thunder.jit(program),
    "with our executor": lambda program, options: thunder.jit(program, executors=[thunder_flce.executor]),
    "with our transform": lambda program, options: thunder_flce.jit(program, options=options),
}
OF_FORWARD = ("token_weights", "target_weights", "token_inputs", "num_items", "expected_gradient")


def by_module(case: Case, grad: Tensor, options: Options, arguments: dict[str, Any]) -> Result:
    given = {name: arguments[name] for name in OF_FORWARD if name in arguments}
    settings = {name: value for name, value in arguments.items() if name not in given}
    (vocab, hidden), has_bias = case.weight.shape, case.bias is not None
    of = {"dtype": case.x.dtype, "device": case.x.device, "weight": case.class_weight, "options": options}
    module = LinearCrossEntropyLoss(hidden, vocab, bias=has_bias, **of, **settings)
    for name, tensor in (("weight", case.weight), ("bias", case.bias)):
        if tensor is not None:
            setattr(module.linear, name, torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad))
    case = replace(case, weight=module.linear.weight, bias=module.linear.bias)
    return differentiate(module(case.x, case.target, **given), case, grad, arguments["outputs"])


WAYS = {
    "eager": lambda case, grad, options, arguments: ours(case, grad, options=options, **arguments),
    "module": by_module,
    **{name: partial(run_compiled, compiler) for name, compiler in COMPILERS.items()},
}


def on_ranks(of_tokens: str = "") -> Callable:
    """The vocabulary divided among ranks, and the tokens too by sequence or data parallel."""

    def run(case: Case, grad: Tensor, options: Options, arguments: dict[str, Any]) -> tuple:
        vocab, tokens = case.weight.shape[0], case.x.shape[:-1].numel()
        sizes = SIZES[tokens % len(SIZES)]
        sizes = tuple(vocab - sum(each or 0 for each in sizes) if size is None else size for size in sizes)
        if not of_tokens or not case.needing_grad():
            return divided(case, sizes, grad, options=options, **arguments), case, grad, arguments

        def flat(tensor: Tensor, dimensions: int = 0) -> Tensor:
            shape = (tokens, *tensor.shape[tensor.ndim - dimensions :])
            return tensor.detach().reshape(shape).requires_grad_(tensor.requires_grad)

        terms = tuple((flat(x, 1), weight) for x, weight in case.terms)
        case = replace(
            case, x=flat(case.x, 1), target=flat(case.target, case.target.ndim - case.x.ndim + 1), terms=terms
        )
        grad, arguments = flat(grad) if arguments["reduction"] == "none" else grad, dict(arguments)
        for name, dimensions in (("token_weights", 0), ("target_weights", 1)):
            if name in arguments:
                arguments[name] = flat(arguments[name], dimensions)
        if "token_inputs" in arguments:
            arguments["token_inputs"] = tuple(map(flat, arguments["token_inputs"]))
        ranks, averages = len(sizes), of_tokens == "data_parallel"
        counts = [tokens // ranks] * ranks
        if averages and ranks > 1:
            counts = (tokens - tokens // 3, *[0] * (ranks - 2), tokens // 3)
        how = {of_tokens: True}
        result = divided(case, sizes, grad, counts=counts, how=how, options=options, **arguments)
        if averages and arguments["reduction"] == "sum":
            arguments |= {"reduction": "mean", "num_items": float(ranks)}
        elif averages and arguments["num_items"] is not None:
            arguments["num_items"] = arguments["num_items"] * ranks
        return result, case, grad, arguments

    return run


def as_dtensors(case: Case, grad: Tensor, options: Options, arguments: dict[str, Any]) -> tuple:
    """Of two by two ranks: sequences divided along the first dimension, tokens and vocabulary along the second."""
    return on_a_mesh(case, BOTH, grad, options=options, **arguments), case, grad, arguments


SIZES = ((None, 4), (3, 0, None), (None, 0), (None,), (1, None, 1, 0), (0, None))
"""Columns of each rank; None for those that are left"""
RANKS = {
    "ranks": on_ranks(),
    "sequence parallel": on_ranks("sequence_parallel"),
    "data parallel": on_ranks("data_parallel"),
    "DTensors": as_dtensors,
}


def with_several_targets(case: Case, problem: Problem, ignored: Tensor, generator: torch.Generator) -> Case:
    """A case with K targets a token, some ignored, and some in one column."""
    columns, ignore_index = problem.loss["vocab_size"] or problem.vocab, problem.loss["ignore_index"]
    several = torch.randint(0, columns, ignored.shape, generator=generator)
    first = case.target.detach().cpu().long()
    several[..., 0] = first
    if several.shape[-1] > 2:
        several[..., 2] = several[..., 1]
    several = several.masked_fill(ignored < 0.2, ignore_index)
    several = torch.where((first == ignore_index)[..., None], ignore_index, several)
    return replace(case, target=several.to(case.target.device))


def drawn_call(one_of: Callable, device: str, way: str = "eager") -> Call:
    """Any call; `one_of` chooses among its arguments."""
    # No vocabulary is as large as a dimension of tokens, which ranks may divide.
    problem = drawn_problem(one_of, device, (7, 33, 101) if way in RANKS else ())
    if way == "sequence parallel":
        problem = replace(problem, shape=one_of((12,), (3, 8), (2, 3, 4), (1, 48)))
    elif way == "module":
        problem = replace(problem, terms=())
    elif way == "DTensors":
        problem = replace(problem, shape=one_of((4, 8), (3, 6), (1, 2)))
    kind = one_of("cross-entropy", "cross-entropy", "token loss", "several targets")
    is_half = problem.dtype is torch.float16
    expected = one_of(None, None, 0.5, "2", "0", "inf", "nan")
    targets, target_rest, token_loss = 0, False, None
    loss = dict(problem.loss)
    if kind == "several targets":
        targets, target_rest = one_of(1, 2, 5), one_of(False, False, True) and problem.vocab > 3
        outputs = tuple(name for name in loss["outputs"] if name not in ("log_prob", "accuracy"))
        loss |= {"label_smoothing": 0.0, "outputs": outputs}
        problem = replace(problem, class_weight=None)
        if target_rest:
            # Every column may be a target then, so that little is left: a quotient of rounding errors.
            loss |= {"reduction": one_of("mean", "sum"), "ignore_index": -100, "vocab_size": None}
            problem = replace(problem, scale=1.0)
    elif kind == "token loss":
        token_loss = one_of(*(TOKEN_LOSSES if problem.dtype.itemsize >= 4 else SMOOTH))
        loss |= {"label_smoothing": 0.0, "reduction": one_of("mean", "sum")}
        problem = replace(problem, class_weight=None)
    only_in_forward = token_loss is not None or target_rest
    if only_in_forward:
        strategy = one_of(None, "gradients_in_forward")
        problem = replace(problem, options=replace(problem.options, strategy=strategy))
        expected = one_of(1.0, "2") if is_half else expected
        if loss["reduction"] != "mean":
            problem = replace(problem, num_items=None)
    if way == "DTensors":
        # A mean over each rank's tokens has no meaning.
        problem = replace(problem, num_items=one_of(17, 2.5, "5") if loss["reduction"] == "mean" else None)
        loss["outputs"] = tuple(name for name in loss["outputs"] if name != "accuracy")
    differentiable = [name for name in loss["outputs"] if name in DIFFERENTIABLE_OUTPUTS]
    detached = tuple(name for name in differentiable if one_of(False, True))
    return Call(
        problem=replace(problem, loss=loss), token_weights=one_of(None, None, torch.float32, problem.dtype),
        targets=targets, target_rest=target_rest, token_loss=token_loss, expected=expected, detached=detached,
        is_repeated=one_of(False, False, False, True),
    )  # fmt: skip


def numbered(number: int, device: str, seed: int = 0, way: str = "eager") -> Call:
    """One call, by its number."""
    return drawn_call(chooser(seed, number), device, way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--way", default="eager", choices=(*WAYS, *RANKS))
    parser.add_argument("--seed", type=int, default=0, help="other calls")
    arguments = parser.parse_args()
    poison_memory()
    torch_rows.BLOCK_BYTES = torch_rows.THREAD_BYTES = 512  # Several blocks for each chunk.
    failed, kinds, start = [], Counter[str](), time.time()
    numbers = range(arguments.first, arguments.first + arguments.count)
    for number in numbers:
        call = numbered(number, arguments.device, arguments.seed, arguments.way)
        kinds[str(call.problem.dtype)] += 1
        kinds["token losses"] += call.token_loss is not None
        kinds["several targets"] += call.targets > 0
        kinds["token weights"] += call.token_weights is not None
        kinds[f"strategy {call.problem.options.strategy}"] += 1
        try:
            call.run(arguments.device, arguments.way)
        except Exception:
            failed.append(number)
            print(f"call {number}: {call}\n{traceback.format_exc()}", flush=True)
        if (number + 1) % (1000 if arguments.device == "cpu" else 20) == 0:
            print(
                f"{number + 1 - arguments.first} calls, {time.time() - start:.0f} s, {len(failed)} failed", flush=True
            )
    print(f"{len(numbers)} calls on {arguments.device}: {len(failed)} failed {failed[:50]}")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
