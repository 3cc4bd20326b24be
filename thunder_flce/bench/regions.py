"""Loss regions: forward, backward and both; time, peak memory and error of all methods in one run.

Results are compared with the definition in a wider dtype, and times with those of the matmuls alone that the results
need.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from thunder_flce.bench.measure import MATMULS, Mark, Run, Step, no_mark, peak_bytes, release, synchronize
from thunder_flce.bench.methods import Method, maker
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.engine.matmul import algorithms

Results = dict[str, Tensor]
"""The "loss", and the gradients by the names of `Inputs.named_operands`."""


def measure(
    shape: Shape, methods: list[str], run: Run, *, change: Callable[[Inputs], object] = lambda inputs: None
) -> None:
    """Measures methods, by names for `methods.maker`, on one shape; `change` may alter the inputs in place."""
    inputs, reference, matmuls = prepared(shape, run), Results(), 2 if shape.frozen else 3
    change(inputs)
    with run.attempt("reference"):
        reference = mean_reference(inputs)
    add_matmuls(run, inputs, matmuls)
    for name in methods:
        with run.attempt(name):
            add(run, name, partial(run_step, inputs, maker(name)()), reference=reference, matmuls=matmuls)
    del reference
    run.report()


def prepared(shape: Shape, run: Run) -> Inputs:
    """Returns random inputs of a shape, and adds the shape to all further rows of the run."""
    # If it remembered earlier shapes, torch.compile would try symbolic sizes, or stop compiling.
    torch.compiler.reset()
    release(run.device)
    run.fields |= shape.as_record()
    return Inputs.random(shape, run.device)


def run_step(inputs: Inputs, method: Method, mark: Mark, *, upstream: Tensor | None = None) -> Results:
    """Runs forward and, if an input requires a gradient, backward; returns the results and clears all `.grad`.

    `upstream` is (T,), for a loss of shape (T,).

    Raises:
        RuntimeError: if an operand got no gradient.
    """
    operands = inputs.named_operands()
    try:
        loss = inputs.apply(method)
        mark("forward")
        if operands:
            loss.backward(upstream if loss.ndim else None)
        mark("backward")
        gradients = {name: tensor.grad for name, tensor in operands.items() if tensor.grad is not None}
    finally:
        for tensor in operands.values():
            tensor.grad = None
    if missing := operands.keys() - gradients.keys():
        raise RuntimeError(f"the backward computed no {' and no '.join(sorted(missing))}")
    return {"loss": loss.detach(), **gradients}


def add(run: Run, name: str, step: Step, *, reference: Results, matmuls: int | None = None) -> dict[str, Any]:
    """Adds a method to a run, after a first call whose results are compared, and a second call for its memory.

    The method's choice of cuBLAS algorithms does not depend on earlier methods, as if it had a process of its own.

    Args:
        run: the run.
        name: the method's name.
        step: the method's step, which returns `Results`.
        reference: the right results, or some of them.
        matmuls: the number of matmuls that the time is compared with, if `add_matmuls` has added them.

    Returns:
        The fields that the method's row will have beside times; the caller may add more.
    """
    measurements: dict[Any, Any] = {}

    def alone(mark: Mark) -> Any:
        with algorithms.alone(measurements):
            return step(mark)

    start = time.perf_counter()
    results = alone(no_mark)
    synchronize(run.device)
    numbers: dict[str, Any] = {"matmuls": matmuls, "first_call_s": time.perf_counter() - start}
    for field, expected in reference.items():
        difference = torch.linalg.vector_norm(results[field].to(expected.dtype) - expected)
        numbers[f"{field}_error"] = (difference / torch.linalg.vector_norm(expected)).item()
    outputs = sum(result.nbytes for field, result in results.items() if field != "loss")
    del results
    peak = peak_bytes(partial(alone, no_mark), run.device)
    numbers |= {"memory_gb": peak / 1e9, "above_outputs_gb": (peak - outputs) / 1e9}
    with algorithms.alone(measurements):
        if tuned := [tuning.to_dict() for tuning in algorithms.tunings()]:
            numbers["tuned_products"] = tuned
    run.added[name] = alone, numbers
    return numbers


def mean_reference(inputs: Inputs) -> Results:
    """Returns the right results of the mean loss."""
    row_losses = partial(F.cross_entropy, reduction="none")
    return make_reference(inputs, row_losses, lambda losses: losses.sum() / (inputs.target != -100).sum())


def make_reference(
    inputs: Inputs, per_token: Callable[..., Tensor], reduce: Callable[..., Tensor], *, extras: Sequence[Tensor] = (),
    token_extras: int = 0,
) -> Results:  # fmt: skip
    """Returns the right results, computed a few rows at a time, in float32 for 16-bit inputs, otherwise in float64.

    Args:
        inputs: the inputs; they are not changed.
        per_token: computes one number per token from the logits, targets and extra tensors of some tokens.
        reduce: computes the loss from the numbers of all tokens and the extra tensors.
        extras: tensors that the loss takes beside the inputs.
        token_extras: how many of the extra tensors, the first ones, have a row for each token.
    """
    dtype = torch.float32 if inputs.x.element_size() == 2 else torch.float64
    wide = inputs.map(lambda tensor: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad))
    extras = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in extras]

    def row_numbers(rows: slice) -> Tensor:
        token_values = (tensor[rows] for tensor in extras[:token_extras])
        return per_token(wide.logits(rows), wide.target[rows], *token_values, *extras[token_extras:])

    operands = wide.named_operands()
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    loss = reduce(torch.cat([checkpoint(row_numbers, rows, **settings) for rows in row_slices(inputs.x)]), *extras)
    gradients = torch.autograd.grad(loss, [*operands.values()]) if operands else ()
    return {"loss": loss.detach(), **dict(zip(operands, gradients, strict=True))}


def row_slices(x: Tensor, rows: int = 512) -> Iterator[slice]:
    """Yields slices that cover the rows of x, `rows` at a time."""
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))


def add_matmuls(run: Run, inputs: Inputs, count: int) -> None:
    """Adds the first `count` matmuls of logits (the forward), dX, dW and a teacher's logits, over all tokens.

    The vocabulary is rounded down to a multiple of 8, where cuBLAS is fast. dlogits has the values of the loss, since
    at its power limit a chip multiplies some numbers faster than others.
    """
    with run.attempt(MATMULS[count]):
        inputs = inputs.map(Tensor.detach)
        vocab = inputs.weight.shape[0]
        vocab = vocab - vocab % 8 or vocab
        x, weight = inputs.x, inputs.weight[:vocab]
        dlogits = torch.empty(x.shape[0], vocab, dtype=x.dtype, device=x.device)
        for rows in row_slices(x):
            logits = inputs.logits(rows).float().requires_grad_()
            loss = F.cross_entropy(logits, inputs.target[rows], reduction="sum") / (inputs.target != -100).sum()
            dlogits[rows] = torch.autograd.grad(loss, logits)[0][:, :vocab]
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)

        def step(mark: Mark) -> None:
            torch.mm(x, weight.t())
            mark("forward")
            if count > 1:
                torch.mm(dlogits, weight, out=dx)
            if count > 2:
                torch.mm(dlogits.t(), x, out=dweight)
            if count > 3:
                torch.mm(x, weight.t())
            mark("backward")

        step(no_mark)
        run.added[MATMULS[count]] = step, {"matmuls": count}
