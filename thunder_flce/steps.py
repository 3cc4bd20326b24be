"""What a plan runs, step by step: the one description that traces, `explain` and the cost model read.

`engine` runs these steps; tests/test_steps.py compares the two call by call. Names are those of `engine`: x (N, H),
W (V, H), b (V,) and y (N,), s the row's share of the incoming gradient; rows whose target is ignore_index are counted
as if there were none, since their number is not known when a plan is made.
"""

from dataclasses import dataclass

import torch

from thunder_flce.plan import Plan, Problem
from thunder_flce.row_kernels import runs_nvfuser

_SHORT_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the engine, or a few lines of it that belong together."""

    result: str
    """What it makes, with dtype and shape, such as "logits bf16[2048, 128256]"."""

    expression: str
    """How, in the engine's names."""

    runs_in: str
    """The library: "cuBLAS", "nvFuser" or "PyTorch"."""

    assignment: str = "="
    """"=", or "+=" for what is added to."""

    call: str = ""
    """The function of `products` or method of `RowKernels`; "" for a few operations of PyTorch."""

    fusions: tuple[str, ...] = ()
    """The nvFuser fusions that it runs, by the names of `nvfuser_fusions`."""

    operations: int = 0
    """Floating-point operations of a product, in all repetitions together."""

    bytes: int = 0
    """Bytes that it moves beside what a product of the whole has to, in all repetitions together."""

    def __str__(self) -> str:
        return f"{self.result} {self.assignment} {self.expression}"

    @property
    def runner(self) -> str:
        """The library and its fusions, such as "nvFuser: part_statistics, merge_parts"."""
        return f"{self.runs_in}: {', '.join(self.fusions)}" if self.fusions else self.runs_in


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps that follow each other, once or for each chunk."""

    title: str
    """Such as "for each of 4 chunks of 2048 tokens"; "" for what runs once."""

    steps: tuple[Step, ...]
    repeats: int = 1


def forward_stages(problem: Problem, plan: Plan) -> tuple[Stage, ...]:
    """What the forward of the region runs."""
    run = _Run(problem, plan)
    chunks = run.chunks()
    in_forward = plan.strategy == "gradients_in_forward"
    stages = [Stage(title="", steps=run.select_rows())] if plan.skip_ignored_rows else []
    steps = [run.logits(chunks), *run.statistics(chunks)]
    if in_forward:
        steps += run.gradients(chunks)
    stages.append(Stage(title=chunks.title, steps=tuple(steps), repeats=chunks.count))
    stages.append(Stage(title="", steps=(run.loss(), *(run.finish() if in_forward else ()))))
    return tuple(stages)


def backward_stages(problem: Problem, plan: Plan) -> tuple[Stage, ...]:
    """What the backward of the region runs; nothing where no gradient is needed."""
    run = _Run(problem, plan)
    if plan.strategy == "loss_only":
        return ()
    if plan.strategy == "gradients_in_forward":
        return (Stage(title="", steps=run.scale_gradients()),)
    select = [Stage(title="", steps=run.select_rows())] if plan.skip_ignored_rows else []
    if plan.strategy == "save_logits":
        tiles, steps = run.chunks(), []
    else:
        tiles = run.slabs()
        steps = [run.logits(tiles)]
    steps += run.gradients(tiles)
    finish = run.finish()
    last = [Stage(title="", steps=finish)] if finish else []
    return (*select, Stage(title=tiles.title, steps=tuple(steps), repeats=tiles.count), *last)


@dataclass(frozen=True)
class _Tiles:
    """How the logits are cut: into chunks of tokens, or into slabs of the vocabulary."""

    rows: int
    columns: int
    count: int
    by_columns: bool

    @property
    def again(self) -> int:
        """How many add to what another has written."""
        return max(self.count - 1, 0)

    @property
    def title(self) -> str:
        size, unit = (self.columns, "columns of the vocabulary") if self.by_columns else (self.rows, "tokens")
        kind = "slab" if self.by_columns else "chunk"
        if self.count == 1:
            return f"for the only {kind}, of {size} {unit}"
        return f"for each {kind} of {size} {unit}, {self.count} in all"


class _Run:
    """The steps that strategies share."""

    def __init__(self, problem: Problem, plan: Plan):
        self._problem = problem
        self._plan = plan
        on_cuda = problem.device_type == "cuda"
        self._products = "cuBLAS" if on_cuda else "PyTorch"
        self._fused = runs_nvfuser(dtype=problem.dtype, device_type=problem.device_type)
        self._row_dtype = torch.float64 if problem.dtype is torch.float64 else torch.float32

    def chunks(self) -> _Tiles:
        rows = max(min(self._plan.chunk_rows, self._problem.tokens), 1)
        return _Tiles(rows, self._problem.vocab, -(-self._problem.tokens // rows), by_columns=False)

    def slabs(self) -> _Tiles:
        columns = min(self._plan.slab_columns, self._problem.vocab)
        return _Tiles(self._problem.tokens, columns, -(-self._problem.vocab // columns), by_columns=True)

    def select_rows(self) -> tuple[Step, ...]:
        return (Step(result="x, y", expression="the rows whose target is not ignore_index", runs_in="PyTorch"),)

    def logits(self, tiles: _Tiles) -> Step:
        weight = "W[slab].t()" if tiles.by_columns else "W.t()"
        bias = ("b[slab]" if tiles.by_columns else "b") if self._problem.has_bias else ""
        return self._product(
            f"logits {self._type(tiles.rows, tiles.columns)}",
            f"x @ {weight}" + (f" + {bias}" if bias else ""),
            call="products.logits_",
        )

    def statistics(self, tiles: _Tiles) -> list[Step]:
        """Both come from the same call; where a row is one part, its loss needs no fusion."""
        has_parts = self._problem.layout.parts > 1
        shape = self._type(tiles.rows, dtype=self._row_dtype)
        statistics = self._row_pass(
            f"row_max, row_logsumexp {shape}",
            "max(logits), log(sum(exp(logits - row_max)))",
            call="kernels.statistics",
            fusions=("part_statistics", "merge_parts") if has_parts else ("part_statistics",),
            passes=1,
        )
        is_fused = self._fused and has_parts
        row_loss = Step(
            result=f"row_loss {shape}",
            expression="row_logsumexp - (logits[y] - row_max)",
            runs_in="nvFuser" if is_fused else "PyTorch",
            fusions=("merge_parts",) if is_fused else (),
        )
        return [statistics, row_loss]

    def gradients(self, tiles: _Tiles) -> list[Step]:
        """From logits to dX, dW and db, in the engine's order."""
        problem = self._problem
        steps = [
            self._row_pass(
                f"dlogits {self._type(tiles.rows, tiles.columns)}"
                + (f", db {self._type(tiles.columns, dtype=self._row_dtype)}" if problem.bias_grad else ""),
                "exp(logits - row_max - row_logsumexp) * s, in place" + ("; sum(0)" if problem.bias_grad else ""),
                call="kernels.gradient_",
                fusions=("gradient_with_column_sums" if problem.bias_grad else "gradient",),
                passes=2,
            ),
            self._row_pass(
                f"dlogits[y] {self._type(tiles.rows)}",
                "exp(logits[y] - row_max - row_logsumexp) * s - s",
                call="kernels.target_gradient",
                fusions=("target_gradient",),
                passes=0,
            ),
        ]
        products = [self._input_gradient(tiles)] if problem.input_grad else []
        if problem.weight_grad:
            # A slab has its rows of dW written last; a chunk adds to dW first.
            at = len(products) if tiles.by_columns else 0
            products[at:at] = self._weight_gradient(tiles)
        return steps + products

    def _weight_gradient(self, tiles: _Tiles) -> list[Step]:
        problem, plan = self._problem, self._plan
        size = problem.vocab * problem.hidden
        if tiles.by_columns:
            result = f"dW[slab] {self._type(tiles.columns, problem.hidden)}"
            return [self._product(result, "dlogits.t() @ x", call="products.weight_gradient_")]
        dtype = torch.float32 if plan.float32_accumulator else problem.dtype
        steps = [
            self._product(
                f"dW {self._type(problem.vocab, problem.hidden, dtype=dtype)}",
                "dlogits.t() @ x",
                call="products.weight_gradient_",
                adds=tiles.count > 1,
                # Read and written once more by each chunk but the first.
                bytes=tiles.again * 2 * size * dtype.itemsize,
            )
        ]
        if plan.float32_rows:
            rows = min(plan.float32_rows, problem.vocab)
            steps.append(
                Step(
                    result=f"dW[hot] {self._type(rows, problem.hidden, dtype=torch.float32)}",
                    expression="dlogits[:, hot].t() @ x",
                    runs_in=self._products,
                    assignment="+=",
                    call="products.weight_gradient_",
                )
            )
        return steps

    def _input_gradient(self, tiles: _Tiles) -> Step:
        problem = self._problem
        if not tiles.by_columns:
            result = f"dX {self._type(tiles.rows, problem.hidden)}"
            return self._product(result, "dlogits @ W", call="products.input_gradient_")
        return self._product(
            f"dX {self._type(tiles.rows, problem.hidden, dtype=self._row_dtype)}",
            "dlogits @ W[slab]",
            call="products.input_gradient_",
            adds=tiles.count > 1,
            bytes=tiles.again * 2 * tiles.rows * problem.hidden * self._row_dtype.itemsize,
        )

    def loss(self) -> Step:
        expressions = {"mean": "sum(row_loss) / valid_count", "sum": "sum(row_loss)", "none": "row_loss"}
        return Step(result="loss", expression=expressions[self._problem.reduction], runs_in="PyTorch")

    def finish(self) -> tuple[Step, ...]:
        """What gives the gradients their dtypes."""
        problem, plan = self._problem, self._plan
        size = problem.vocab * problem.hidden
        steps = []
        if plan.float32_rows:
            steps.append(Step(result="dW[hot]", expression="the rows summed in float32", runs_in="PyTorch"))
        if plan.float32_accumulator:
            result, moved = f"dW {self._type(problem.vocab, problem.hidden)}", (4 + problem.dtype.itemsize) * size
            steps.append(Step(result=result, expression="dW, rounded once", runs_in="PyTorch", bytes=moved))
        if plan.strategy == "recompute_logits" and problem.input_grad and problem.dtype.itemsize < 4:
            result = f"dX {self._type(problem.tokens, problem.hidden)}"
            moved = (4 + problem.dtype.itemsize) * problem.tokens * problem.hidden
            steps.append(Step(result=result, expression="dX, rounded once", runs_in="PyTorch", bytes=moved))
        return tuple(steps)

    def scale_gradients(self) -> tuple[Step, ...]:
        problem = self._problem
        needed = {"dX": problem.input_grad, "dW": problem.weight_grad, "db": problem.bias_grad}
        names = ", ".join(name for name, is_needed in needed.items() if is_needed)
        runner = "Triton" if problem.device_type == "cuda" and problem.dtype is not torch.float64 else "PyTorch"
        expression = "the incoming gradient, where that is not 1"
        return (Step(result=names, assignment="*=", expression=expression, runs_in=runner),)

    def _product(self, result: str, expression: str, *, call: str, adds: bool = False, bytes: int = 0) -> Step:
        problem = self._problem
        tail = problem.vocab % 8 if problem.has_tail else 0
        return Step(
            result=result,
            expression=expression + (f", the last {tail} columns apart" if tail else ""),
            runs_in=self._products,
            assignment="+=" if adds else "=",
            call=call,
            operations=2 * problem.tokens * problem.hidden * problem.vocab,
            bytes=bytes,
        )

    def _row_pass(self, result: str, expression: str, *, call: str, fusions: tuple[str, ...], passes: int) -> Step:
        return Step(
            result=result,
            expression=expression,
            runs_in="nvFuser" if self._fused else "PyTorch",
            call=call,
            fusions=fusions if self._fused else (),
            bytes=passes * self._problem.logits_bytes(self._problem.tokens),
        )

    def _type(self, *shape: int, dtype: torch.dtype | None = None) -> str:
        return f"{_SHORT_NAMES[dtype or self._problem.dtype]}[{', '.join(map(str, shape))}]"
