"""What a plan runs, step by step: the one description that traces, `explain` and the cost model read.

`engine` runs these steps; tests/test_steps.py compares the two call by call. Names are those of `engine` and `loss`:
x (N, H), W (V, H), b (V,), y (N,), class weights w (V,), and s, A, B, C and g_e for a row's shares of the incoming
gradients. Rows whose target is ignore_index are counted as if there were none, since their number is not known when a
plan is made.
"""

from dataclasses import dataclass, replace

import torch

from thunder_flce.execution.row_kernels.interface import SHORT_ROWS, runs_nvfuser
from thunder_flce.operation.loss import Loss
from thunder_flce.planning.plan import Plan, Problem, VocabLayout, layout_for, products_end_early

_SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
}


@dataclass(frozen=True, kw_only=True)
class PlannedRegion:
    """A loss region and how it will run: everything that is known when its trace is compiled."""

    problem: Problem
    plan: Plan
    loss: Loss
    has_bias: bool = False
    has_class_weight: bool = False
    has_num_items: bool = False

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of the products of x and W."""
        return torch.float32 if self.plan.float32_logits else self.problem.dtype

    @property
    def takes_one_pass(self) -> bool:
        """See `Plan.takes_one_pass`."""
        return self.plan.takes_one_pass(is_plain_loss=self.loss.is_plain, bias_grad=self.problem.bias_grad)

    @property
    def has_moments(self) -> bool:
        """Whether the loss needs more of a row than its statistics: see `row_kernels.RowMoments`."""
        return self.loss.needs_entropy or self.loss.label_smoothing != 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the engine, or a few lines of it that belong together."""

    result: str
    """What it makes, with dtype and shape, such as "logits bf16[2048, 128256]"."""

    expression: str
    """How, in the engine's names."""

    runs_in: str
    """The library: "cuBLAS", "nvFuser", "Triton" or "PyTorch"."""

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
        """The library and its fusions, such as "nvFuser: gradient"."""
        return f"{self.runs_in}: {', '.join(self.fusions)}" if self.fusions else self.runs_in


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps that follow each other, once or for each chunk."""

    title: str
    """Such as "for each chunk of 2048 tokens, 4 in all"; "" for what runs once."""

    steps: tuple[Step, ...]
    repeats: int = 1


def forward_stages(region: PlannedRegion) -> tuple[Stage, ...]:
    """What the forward of the region runs."""
    steps = _Steps(region)
    in_forward = region.plan.strategy == "gradients_in_forward"
    of_tiles = steps.first_part()
    for tiles in (*steps.saved_part(), *steps.chunks()):
        of_tile = [steps.logits(tiles)]
        if region.takes_one_pass:
            of_tile += steps.statistics_and_gradient(tiles)
        else:
            of_tile += steps.statistics(tiles)
            of_tile += steps.dlogits(tiles) if in_forward else []
        of_tiles.append((tiles, of_tile + (steps.products_of_dlogits(tiles) if in_forward else [])))
    return _stages(steps.select(), of_tiles, [*steps.outputs(), *(steps.finish() if in_forward else [])])


def backward_stages(region: PlannedRegion) -> tuple[Stage, ...]:
    """What the backward of the region runs; nothing where no gradient is needed."""
    steps = _Steps(region)
    if region.plan.strategy == "loss_only":
        return ()
    if region.plan.strategy == "gradients_in_forward":
        return (Stage(title="", steps=(steps.scale_gradients(),)),)
    if not region.plan.slab_columns:
        of_tiles = [(chunks, steps.gradients(chunks)) for chunks in steps.chunks()]
        return _stages(steps.select(), of_tiles, steps.finish())
    # The slabs give dW of all tokens, those whose logits were saved included.
    of_tiles = [(tiles, steps.gradients(tiles, with_weight=False)) for tiles in steps.saved_part()]
    slabs = steps.slabs()
    of_tiles.append((slabs, [steps.logits(slabs), *steps.gradients(slabs)]))
    return _stages(steps.select(), of_tiles, steps.finish())


def _stages(first: list[Step], of_tiles: "list[tuple[_Tiles, list[Step]]]", last: list[Step]) -> tuple[Stage, ...]:
    stages = (
        Stage(title="", steps=tuple(first)),
        *(Stage(title=tiles.title, steps=tuple(steps), repeats=tiles.count) for tiles, steps in of_tiles),
        Stage(title="", steps=tuple(last)),
    )
    return tuple(stage for stage in stages if stage.steps)


@dataclass(frozen=True)
class _Tiles:
    """How the logits are cut: into chunks of tokens, or into slabs of the vocabulary."""

    tokens: int
    """Of all tiles together"""
    rows: int
    columns: int
    count: int
    by_columns: bool = False
    part: str = ""
    """"saved", "first" or "later", where tokens are divided into such whose logits are kept, or lie in dW's memory, and
    others."""

    @property
    def again(self) -> int:
        """How many add to what another has written."""
        return max(self.count - (self.part != "later"), 0)

    @property
    def title(self) -> str:
        if self.part == "saved":
            return f"for the first {self.rows} tokens, whose logits are kept"
        if self.part == "first" and not self.by_columns:
            return f"for the first {self.rows} tokens, whose logits lie in dW's memory"
        size = f"{self.columns} columns of the vocabulary" if self.by_columns else f"{self.rows} tokens"
        size += {"": "", "first": f", of the first {self.rows} tokens", "later": ", of the others"}[self.part]
        kind = "slab" if self.by_columns else "chunk"
        one, each = f"for the only {kind}, of {size}", f"for each {kind} of {size}, {self.count} in all"
        return one if self.count == 1 else each


class _Steps:
    """The steps that strategies share."""

    def __init__(self, region: PlannedRegion):
        self._region = region
        self._problem = problem = region.problem
        self._plan = region.plan
        self._loss = region.loss
        self._products = "cuBLAS" if problem.device_type == "cuda" else "PyTorch"
        self._large_products = "Triton" if products_end_early(problem, self._plan) else self._products
        self._fused = runs_nvfuser(dtype=region.logits_dtype, device_type=problem.device_type)
        self._reductions = "Triton" if self._fused else "PyTorch"
        self._row_dtype = torch.float64 if problem.dtype is torch.float64 else torch.float32
        # The engine's names: u are the logits where they are another function of x than the products z.
        is_mapped = self._loss.logit_scale != 1 or self._loss.softcap is not None
        self._z, self._u = ("z", "u") if is_mapped else ("logits", "logits")

    @property
    def _is_mixed(self) -> bool:
        """Whether some logits are saved and the others recomputed."""
        return self._plan.saved_rows > 0 and self._plan.slab_columns > 0

    def first_part(self) -> "list[tuple[_Tiles, list[Step]]]":
        """What comes first where the first tokens' logits lie in the memory of dW, slab by slab."""
        problem, plan = self._problem, self._plan
        layout = plan.logits_in_slabs(hidden=problem.hidden, vocab=problem.vocab, dtype=problem.dtype)
        if layout is None:
            return []
        rows = layout.rows
        slabs = _Tiles(rows, rows, layout.width, layout.count, by_columns=True, part="first")
        whole = _Tiles(rows, rows, problem.vocab, 1, part="first")
        of_tiles = [(slabs, [self.logits(slabs)]), (whole, self.statistics_and_gradient(whole))]
        if problem.input_grad:
            of_tiles.append((slabs, [self._input_gradient(slabs)]))
            if problem.dtype.itemsize < 4:
                of_tiles.append((whole, [self._rounded_input_gradient(rows)]))
        of_tiles.append((slabs, self._weight_gradient(slabs)))
        if plan.float32_rows:
            of_tiles.append((whole, [self._torch(f"dW[hot] {self._hot_type}", "dW[hot] of the first tokens")]))
        return of_tiles

    def saved_part(self) -> list[_Tiles]:
        """The tokens whose logits are saved, where the others' are not."""
        rows = self._plan.saved_rows
        return [_Tiles(rows, rows, self._problem.vocab, 1, part="saved")] if self._is_mixed else []

    def chunks(self) -> list[_Tiles]:
        """The tokens that are neither first nor saved apart, if there are any."""
        tokens, first = self._problem.tokens, self._plan.first_rows
        tokens -= self._plan.saved_rows if self._is_mixed else first
        if first and not tokens:
            return []
        rows = max(min(self._plan.chunk_rows, tokens), 1)
        return [_Tiles(tokens, rows, self._problem.vocab, -(-tokens // rows), part="later" if first else "")]

    def slabs(self) -> _Tiles:
        columns = min(self._plan.slab_columns, self._problem.vocab)
        tokens = self._problem.tokens - self._plan.saved_rows
        return _Tiles(tokens, tokens, columns, -(-self._problem.vocab // columns), by_columns=True)

    def select(self) -> list[Step]:
        """What part of the operands takes part."""
        steps = []
        if self._plan.ignored_rows != "compute" and not self._loss.needs_every_row:
            rows = "the rows whose target is not ignore_index"
            steps.append(self._torch("x, y", rows if self._plan.ignored_rows == "skip" else f"{rows}, then zeros"))
        if self._loss.vocab_size is not None:
            steps.append(self._torch("W", f"W[:{self._loss.vocab_size}], and whatever else has its rows"))
        return steps

    def logits(self, tiles: _Tiles) -> Step:
        slab = "[slab]" if tiles.by_columns else ""
        return self._product(
            f"{self._z} {self._type(tiles.rows, tiles.columns, dtype=self._region.logits_dtype)}",
            f"x @ W{slab}.t()" + (f" + b{slab}" if self._region.has_bias else ""),
            tiles.tokens,
            call="products.logits_",
        )

    def statistics_and_gradient(self, tiles: _Tiles) -> list[Step]:
        """Both in one kernel, which reads a row again while the cache holds most of it.

        That counts as a third of a read: on an H200 the kernel takes 1.14 (50257 columns), 1.16 (128256, 256000) or 1.2
        times (200064) as long as the gradient alone, which is a read and a write (traces/h200/kernels.jsonl).
        """
        (statistics,) = self.statistics(tiles, call="kernels.statistics_and_gradient")
        return [
            replace(statistics, bytes=statistics.bytes // 3),
            Step(
                result=f"dlogits {self._type(tiles.rows, tiles.columns)}",
                expression=f"{self._gradient_expression(everywhere=True)}, in place",
                runs_in=f"{self._reductions}, same kernel" if self._fused else self._reductions,
                bytes=2 * self._logits_bytes(tiles.tokens),
            ),
        ]

    def statistics(self, tiles: _Tiles, *, call: str = "kernels.statistics") -> list[Step]:
        """What the loss needs of each row."""
        u, loss = self._u, self._loss
        shape = self._type(tiles.rows, dtype=self._row_dtype)
        mapped = f", u = {_logit_map(loss)}" if u == "u" else ""
        steps = [
            Step(
                result=f"row_max, row_log_sum {shape}",
                expression=f"max({u}), log(sum(exp({u} - row_max))){mapped}",
                runs_in=self._reductions,
                call=call,
                bytes=self._logits_bytes(tiles.tokens),
            )
        ]
        if self._region.has_moments:
            weight = "w * " if self._region.has_class_weight else ""
            sums = {
                "expected": f"sum(p * ({u} - row_max))" if loss.needs_entropy else "",
                "weighted_sum": f"sum({weight}({u} - row_max))" if loss.label_smoothing else "",
            }
            needed = {name: expression for name, expression in sums.items() if expression}
            steps.append(
                self._row_pass(
                    f"{', '.join(needed)} {shape}",
                    ", ".join(needed.values()),
                    call="kernels.moments",
                    fusions=("moments",),
                    bytes=self._logits_bytes(tiles.tokens),
                )
            )
        if loss.needs_argmax:
            result = f"argmax {self._type(tiles.rows, dtype=torch.int64)}"
            steps.append(self._torch(result, f"argmax({u}, 1)", bytes=self._logits_bytes(tiles.tokens)))
        return steps

    def gradients(self, tiles: _Tiles, *, with_weight: bool = True) -> list[Step]:
        """From logits to dX, dW and db, in the engine's order."""
        return self.dlogits(tiles) + self.products_of_dlogits(tiles, with_weight=with_weight)

    def dlogits(self, tiles: _Tiles) -> list[Step]:
        """The gradient of the logits and its sum over the rows, db."""
        problem = self._problem
        in_place = not self._plan.float32_logits
        is_plain = not self._loss.label_smoothing and not self._loss.needs_entropy
        gradient = self._row_pass(
            f"dlogits {self._type(tiles.rows, tiles.columns)}"
            + (f", db {self._type(tiles.columns, dtype=self._row_dtype)}" if problem.bias_grad else ""),
            f"{self._gradient_expression()}, {'in place' if in_place else 'in new memory'}"
            + ("; sum(0)" if problem.bias_grad else ""),
            call="kernels.gradient",
            fusions=("gradient_with_column_sums" if problem.bias_grad else "gradient",),
            bytes=self._logits_bytes(tiles.tokens) + self._dlogits_bytes(tiles.tokens),
        )
        if is_plain and in_place:
            # So it is for a loss with an entropy that no gradient arrives at, which is not known here.
            is_triton = {problem.bias_grad or self._layout(n).row_stride in SHORT_ROWS for n in self._widths(tiles)}
            if is_triton == {True}:
                gradient = replace(gradient, runs_in=self._reductions, fusions=())
            elif True in is_triton and self._fused:
                gradient = replace(gradient, runs_in="nvFuser and Triton")
        return [
            gradient,
            self._row_pass(
                f"dlogits[y] {self._type(tiles.rows)}",
                self._gradient_expression(at_target=True),
                call="kernels.target_gradient",
                fusions=("target_gradient",),
                bytes=0,
            ),
        ]

    def products_of_dlogits(self, tiles: _Tiles, *, with_weight: bool = True) -> list[Step]:
        """dX and dW."""
        problem = self._problem
        products = [self._input_gradient(tiles)] if problem.input_grad else []
        if problem.weight_grad and with_weight:
            # A slab has its rows of dW written last; a chunk adds to dW first.
            at = len(products) if tiles.by_columns else 0
            products[at:at] = self._weight_gradient(tiles)
        return products

    def _gradient_expression(self, *, at_target: bool = False, everywhere: bool = False) -> str:
        """The gradient of the products as `loss` has it: at the target, everywhere, or without its one-hot term."""
        loss = self._loss
        one_hot = " * [v == y]" if everywhere else ""
        u = f"{self._u}[y]" if at_target else self._u
        probability = f"exp({u} - row_max - row_log_sum)"
        if loss.is_plain and not self._region.has_class_weight and self._z == "logits":
            return f"{probability} * s" + (f" - s{one_hot}" if at_target or everywhere else "")
        terms = f"{probability} * A"
        if loss.needs_entropy:
            terms = f"{probability} * (A - g_e * ({u} - row_max))"
        if loss.label_smoothing:
            weight = "w[y]" if at_target else "w"
            terms += f" - C * {weight}" if self._region.has_class_weight else " - C"
        if at_target or everywhere:
            terms += f" - B{one_hot}"
        scale = f" * {loss.logit_scale:g}" if loss.logit_scale != 1 else ""
        slope = f" * (1 - ({u} / {loss.softcap:g})**2)" if loss.softcap is not None else ""
        return f"({terms}){scale}{slope}" if scale or slope else terms

    def _weight_gradient(self, tiles: _Tiles) -> list[Step]:
        problem, plan = self._problem, self._plan
        size = problem.vocab * problem.hidden
        dtype = torch.float32 if plan.float32_accumulator else problem.dtype
        if tiles.by_columns:
            result = f"dW[slab] {self._type(tiles.columns, problem.hidden, dtype=dtype)}"
            if not self._is_mixed:
                return [self._product(result, "dlogits.t() @ x", tiles.tokens, call="products.weight_gradient_")]
            saved = self._plan.saved_rows
            wide = f"dW[slab] {self._type(tiles.columns, problem.hidden, dtype=self._row_dtype)}"
            call = "products.weight_gradient_"
            return [
                self._product(wide, "dlogits.t() @ x", tiles.tokens, call=call),
                self._product(wide, "kept dlogits[:, slab].t() @ x", saved, call=call, adds=True),
                self._torch(result, "dW[slab], rounded once"),
            ]
        steps = [
            self._product(
                f"dW {self._type(problem.vocab, problem.hidden, dtype=dtype)}",
                "dlogits.t() @ x",
                tiles.tokens,
                call="products.weight_gradient_",
                adds=tiles.again > 0,
                # Read and written once more by each chunk but the first. A third of that shows where products are
                # tuned: 0.15 of 0.51 ms at 512 × 128256 × 4096 (traces/h200/regions.jsonl).
                bytes=tiles.again * 2 * size * dtype.itemsize // (3 if plan.tune_products else 1),
            )
        ]
        if plan.float32_rows:
            steps.append(
                Step(
                    result=f"dW[hot] {self._hot_type}",
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
            return self._product(result, "dlogits @ W", tiles.tokens, call="products.input_gradient_")
        return self._product(
            f"dX {self._type(tiles.rows, problem.hidden, dtype=self._row_dtype)}",
            "dlogits @ W[slab]",
            tiles.tokens,
            call="products.input_gradient_",
            adds=tiles.count > 1,
            bytes=tiles.again * 2 * tiles.rows * problem.hidden * self._row_dtype.itemsize,
        )

    def outputs(self) -> list[Step]:
        """The loss and its further outputs, from what is known of all rows."""
        loss, u = self._loss, self._u
        shape = self._type(self._problem.tokens, dtype=self._row_dtype)
        has_class_weight = self._region.has_class_weight
        cross_entropy = f"row_log_sum - ({u}[y] - row_max)"
        terms = {"cross_entropy": f"w[y] * ({cross_entropy})" if has_class_weight else cross_entropy}
        if loss.label_smoothing:
            hard = terms["cross_entropy"] if has_class_weight else f"({cross_entropy})"
            total = "sum(w)" if has_class_weight else str(self._problem.vocab)
            smooth = f"{loss.label_smoothing / self._problem.vocab:.3g} * (row_log_sum * {total} - weighted_sum)"
            terms["cross_entropy"] = f"{1 - loss.label_smoothing:g} * {hard} + {smooth}"
        if loss.z_loss:
            terms["z_term"] = f"{loss.z_loss:g} * (row_max + row_log_sum)**2"
        steps = [self._torch(f"{name} {shape}", expression) for name, expression in terms.items()]
        divisors = {"cross_entropy": "sum(w[y])" if has_class_weight else "valid_count", "z_term": "valid_count"}
        if self._region.has_num_items:
            divisors = dict.fromkeys(divisors, "num_items")
        forms = {"mean": "sum({0}) / {1}", "sum": "sum({0})", "none": "{0}"}
        form = forms[loss.reduction]
        steps.append(self._torch("loss", " + ".join(form.format(name, divisors[name]) for name in terms)))
        further = {
            "log_prob": f"{u}[y] - row_max - row_log_sum",
            "entropy": "row_log_sum - expected",
            "argmax": "argmax of the rows",
            "valid_argmax": "argmax of the rows, -1 where they are ignored",
            "accuracy": "sum(argmax == y) / valid_count",
        }
        return steps + [self._torch(name, further[name]) for name in loss.outputs]

    def finish(self) -> list[Step]:
        """What gives the gradients their dtypes."""
        problem, plan = self._problem, self._plan
        size = problem.vocab * problem.hidden
        steps = []
        if plan.float32_rows:
            steps.append(self._torch("dW[hot]", "the rows summed in float32"))
        if plan.float32_accumulator:
            result, moved = f"dW {self._type(problem.vocab, problem.hidden)}", (4 + problem.dtype.itemsize) * size
            steps.append(self._torch(result, "dW, rounded once", bytes=moved))
        if plan.slab_columns and problem.input_grad and problem.dtype.itemsize < 4:
            steps.append(self._rounded_input_gradient(problem.tokens))
        return steps

    def _rounded_input_gradient(self, tokens: int) -> Step:
        problem = self._problem
        moved = (4 + problem.dtype.itemsize) * tokens * problem.hidden
        return self._torch(f"dX {self._type(tokens, problem.hidden)}", "dX, rounded once", bytes=moved)

    @property
    def _hot_type(self) -> str:
        rows = min(self._plan.float32_rows, self._problem.vocab)
        return self._type(rows, self._problem.hidden, dtype=torch.float32)

    def scale_gradients(self) -> Step:
        problem = self._problem
        needed = {"dX": problem.input_grad, "dW": problem.weight_grad, "db": problem.bias_grad}
        names = ", ".join(name for name, is_needed in needed.items() if is_needed)
        runner = "Triton" if problem.device_type == "cuda" and problem.dtype is not torch.float64 else "PyTorch"
        expression = "the incoming gradient, where that is not 1"
        return Step(result=names, assignment="*=", expression=expression, runs_in=runner)

    def _product(
        self, result: str, expression: str, tokens: int, *, call: str, adds: bool = False, bytes: int = 0
    ) -> Step:
        problem = self._problem
        tail = problem.vocab % 8 if problem.has_tail else 0
        return Step(
            result=result,
            expression=expression + (f", the last {tail} columns apart" if tail else ""),
            runs_in=self._large_products,
            assignment="+=" if adds else "=",
            call=call,
            operations=2 * tokens * problem.hidden * problem.vocab,
            bytes=bytes,
        )

    def _row_pass(self, result: str, expression: str, *, call: str, fusions: tuple[str, ...], bytes: int) -> Step:
        return Step(
            result=result,
            expression=expression,
            runs_in="nvFuser" if self._fused else "PyTorch",
            call=call,
            fusions=fusions if self._fused else (),
            bytes=bytes,
        )

    def _torch(self, result: str, expression: str, *, bytes: int = 0) -> Step:
        return Step(result=result, expression=expression, runs_in="PyTorch", bytes=bytes)

    def _widths(self, tiles: _Tiles) -> set[int]:
        """Columns of the tiles; the last slab may have fewer than the others."""
        last = self._problem.vocab - (tiles.count - 1) * tiles.columns if tiles.by_columns else tiles.columns
        return {tiles.columns, last}

    def _layout(self, columns: int) -> VocabLayout:
        return layout_for(columns, dtype=self._region.logits_dtype, device_type=self._problem.device_type)

    def _logits_bytes(self, tokens: int) -> int:
        return tokens * self._layout(self._problem.vocab).row_stride * self._region.logits_dtype.itemsize

    def _dlogits_bytes(self, tokens: int) -> int:
        return tokens * self._layout(self._problem.vocab).row_stride * self._problem.dtype.itemsize

    def _type(self, *shape: int, dtype: torch.dtype | None = None) -> str:
        return f"{_SHORT_NAMES[dtype or self._problem.dtype]}[{', '.join(map(str, shape))}]"


def _logit_map(loss: Loss) -> str:
    """u, in words of z."""
    scaled = "z" if loss.logit_scale == 1 else f"{loss.logit_scale:g} * z"
    return scaled if loss.softcap is None else f"{loss.softcap:g} * tanh({scaled} / {loss.softcap:g})"
