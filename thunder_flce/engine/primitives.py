"""The primitives through which the engine launches everything, in the libraries that a plan has chosen.

`printing` has other primitives, which write a line for each launch. Legend: T tokens, N rows computed, C rows in a
chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from thunder_flce.device import is_capturing
from thunder_flce.engine import collectives, row_loss, rows, token_parts
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.kernels.interface import (
    LabelTerm,
    RowKernels,
    RowStatistics,
    TokenVectors,
    at_columns,
    empty_logits,
    gradient,
)
from thunder_flce.engine.matmul import matmul
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.row_loss import RowResults
from thunder_flce.engine.rows import Rows
from thunder_flce.operation.call import Call, Linear, Shard
from thunder_flce.operation.loss import RowCoefficients
from thunder_flce.options import RECOMPUTE_LOGITS

# While the host waits for the number of valid rows, the device computes the logits of the first 1 / _EARLY_PART of the
# tokens, which takes longer than the wait in calls that wait. If fewer rows are valid, some of that work is wasted.
_EARLY_PART = 4


class Region:
    """Everything about a region that does not depend on its tensors or their number of tokens; kept for later calls."""

    def __init__(self, call: Call, plan: Plan):
        """`call` has specs for tensors."""
        self.call, self.plan = call, plan
        for name, value in vars(Call).items():
            if isinstance(value, cached_property):
                # Computes and caches the property, so that calls made from this one have it.
                getattr(call, name)
        self.device_type = call.device.type
        self.logits_dtype = plan.logits_dtype(call.dtype)
        self.saves_unit_gradients = plan.saves_unit_gradients(call)
        self.reads_statistics = plan.reads_statistics(call)

    @cached_property
    def backend(self) -> str:
        """The backend that runs the softmax kernels, by its name in `dispatch.BACKENDS`."""
        return dispatch.backend(self.plan.row_kernels, dtype=self.logits_dtype, device_type=self.device_type)

    @cached_property
    def kernels(self) -> RowKernels:
        """The softmax kernels of the plan."""
        return dispatch.kernels_of(self.backend, self.call.loss.logit_map)

    @cached_property
    def vector_kernels(self) -> Any:
        """The module of Triton kernels that compute token vectors and the loss; None if PyTorch's operations do."""
        call = self.call
        is_plain = call.loss.divergence is None and call.targets_per_token is None and call.row_dtype is torch.float32
        if self.device_type != "cuda" or not is_plain or self.backend != "triton":
            return None
        from thunder_flce.engine.kernels import triton_vectors

        return triton_vectors

    @cached_property
    def token_kernel(self) -> Any:
        """The function that computes token losses and coefficients in one kernel; None if PyTorch's operations do."""
        if self.vector_kernels is None or self.call.whole_vocab == 1:
            return None
        from thunder_flce.engine.kernels.triton_tokens import kernel_for

        return kernel_for(
            self.call.loss.token_loss, tuple([each.dtype for each in self.call.token_inputs]), self.call.loss.logit_map
        )

    @cached_property
    def logits_(self) -> Callable[..., None]:
        """The function that writes logits: see `matmul.logits_`."""
        if not self.plan.batch_invariant:
            return partial(matmul.logits_, tune=self.plan.tune_products)
        if self.device_type == "cpu":
            return matmul.invariant_logits_
        from thunder_flce.engine.kernels.triton_logits import logits_

        return logits_

    @cached_property
    def takes_one_pass(self) -> bool:
        """Whether one kernel computes a chunk's statistics and, in place of its logits, their gradient.

        False if the gradient needs new memory, if the loss needs more than a row's statistics, if ranks must combine
        the statistics, or if db is needed, a sum over rows, while the kernel sees one row at a time. Also False if a
        row's log-probability must have the same bits as without gradients: this kernel adds in another order.
        """
        call, plan = self.call, self.plan
        is_plain = call.loss.is_plain and call.shard is None and not plan.batch_invariant
        return self.logits_dtype == call.dtype and is_plain and not call.bias_grad

    @cached_property
    def token_shard(self) -> Shard | None:
        """This rank's shard if each rank has a part of the tokens, otherwise None."""
        return self.call.shard if self.call.shard is not None and self.call.shard.sequence_parallel else None

    @cached_property
    def may_skip(self) -> bool:
        """Whether ignored rows are skipped, provided that the host can wait for the number of valid rows."""
        call = self.call
        return call.ignores_rows and self.plan.ignored_rows == "skip" and not call.loss.needs_every_row

    @cached_property
    def starts_early(self) -> bool:
        """Whether the device computes the first logits while the host waits for the number of valid rows."""
        # A backward that computes the logits again must run the same matmuls to get the same bits.
        recomputes = self.plan.strategy == RECOMPUTE_LOGITS
        return self.may_skip and self.device_type == "cuda" and self.token_shard is None and not recomputes


def _start_reading(numbers: Tensor) -> Callable[[], list[int]]:
    """Starts a copy of `numbers` to the host, and returns a function that waits for it, but not for later launches."""
    if not numbers.is_cuda:
        return numbers.tolist
    # PyTorch allocates pinned memory for this copy.
    copy = numbers.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream(numbers.device).record_event()

    def read() -> list[int]:
        copied.synchronize()
        return copy.tolist()

    return read


class Primitives:
    """The primitives of one region, for a flat call of tensors."""

    def __init__(self, call: Call, region: Region):
        self.call, self.region, self.plan = call, region, region.plan

    # Rows.

    def select_rows(self, upstream: Tensor | None, *, meanwhile: Callable[[Tensor], None] | None = None) -> Rows:
        """Checks the targets in a forward, and returns the rows to compute.

        Args:
            upstream: () the upstream gradient of the loss, if it is known and one number.
            meanwhile: computes the logits of some tokens, (C,), while the host waits for the number of valid rows.

        Raises:
            IndexError: if a target is neither in [0, V) nor ignore_index. If the host does not wait for the device, a
                device-side assertion fails instead, as in PyTorch.
        """
        call = self.call
        host_waits = self.region.device_type != "cuda" or (self.region.may_skip and not is_capturing(call.device))
        skips = self.region.may_skip and host_waits
        vectors = (self.region.vector_kernels or rows).token_vectors(call, upstream=upstream)
        order = rows.valid_first(vectors) if skips and self.region.token_shard is None else None
        if not host_waits:
            is_right = vectors.counts[1] == 0 if vectors.is_right is None else vectors.is_right
            allowed = f"[0, {call.whole_vocab}) nor ignore_index ({call.loss.ignore_index})"
            torch._assert_async(is_right, f"target is neither in {allowed}")
            return self._selected(vectors, call.tokens, order)
        counts = vectors.counts
        if skips and self.region.token_shard is not None:
            counts = torch.stack([token_parts.most_valid(self.region.token_shard, vectors), counts[1]])
        read = _start_reading(counts)
        if self.region.starts_early and order is not None and meanwhile is not None and call.tokens:
            meanwhile(order[: min(-(-call.tokens // _EARLY_PART), self.plan.first_rows(call.tokens))])
        count, wrong_count = read()
        if wrong_count:
            self._raise_wrong_targets(wrong_count)
        return self._selected(vectors, count if skips else call.tokens, order)

    def select_rows_again(self, upstream: Tensor, count: int) -> Rows:
        """Returns, in a backward, the `count` rows that its forward computed.

        `upstream` is the upstream gradient of the loss: () or one number for each of the caller's tokens.
        """
        if upstream.ndim:
            upstream = upstream.reshape(-1)
            if self.region.token_shard is not None:
                upstream = collectives.start_gathering(self.region.token_shard, upstream).wait()
        if upstream.dtype is not self.call.row_dtype:
            upstream = upstream.to(self.call.row_dtype)
        vectors = (self.region.vector_kernels or rows).token_vectors(self.call, upstream=upstream)
        is_ordered = count < self.call.tokens and self.region.token_shard is None
        return self._selected(vectors, count, rows.valid_first(vectors) if is_ordered else None)

    def _selected(self, vectors: TokenVectors, count: int, order: Tensor | None) -> Rows:
        """Returns the first `count` rows of the order; if ranks divide the tokens, their rows have another order."""
        if self.region.token_shard is None:
            return Rows(vectors, count, order=None if count == self.call.tokens else order)
        return token_parts.RowsOfParts(self.region.token_shard, vectors, chunk_rows=self.plan.chunk_rows, count=count)

    def count_of(self, computed_rows: Tensor) -> int:
        """Returns the number of rows that a forward computed; the host waits only if `computed_rows` is a copy."""
        if computed_rows.is_cpu:
            return int(computed_rows)
        count = rows.recalled(computed_rows)
        if count is not None:
            return count
        if is_capturing(computed_rows.device):
            # A forward that was captured, too, has computed all rows.
            problem = "a CUDA graph captures this backward, but not its forward, which skipped ignored rows"
            torch._assert_async(computed_rows == self.call.tokens, f'{problem}: use ignored_rows="compute"')
            return self.call.tokens
        return int(computed_rows)

    def _raise_wrong_targets(self, count: int) -> NoReturn:
        """Raises an IndexError with the number of wrong targets and the first of them."""
        call = self.call
        target, vocab, ignore_index = call.tensors["target"].long(), call.whole_vocab, call.loss.ignore_index
        values = target[(target != ignore_index) & ((target < 0) | (target >= vocab))]
        unit = "values" if target.ndim == 1 else "rows with values"
        raise IndexError(
            f"target has {count} of {target.shape[0]} {unit} that are neither in [0, {vocab}), the "
            f"vocabulary, nor ignore_index ({ignore_index}); the first is {values[0].item()}"
        )

    def chunks(self, selected: Rows) -> Iterable[slice]:
        """Yields the chunks of the rows: first the rows whose logits are saved, then chunks of the plan's size.

        If the first logits are computed early, the first chunk has the full size.
        """
        largest, saved = self.plan.chunk_rows, self.plan.rows_saved(selected.count)
        return selected.chunks(largest, saved or (largest if self.region.starts_early else 0))

    def gather(self, selected: Rows, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """Returns the rows of a chunk from `tensor` (T, H): see `Rows.gather_chunk`."""
        return selected.gather_chunk(tensor, chunk, out)

    @cached_property
    def class_weight(self) -> Tensor | None:
        """(V,) the class weights of this rank's columns, in the row dtype; None unless label smoothing needs them."""
        if "weight" not in self.call.tensors or not self.call.loss.label_smoothing:
            return None
        shard, weights = self.call.shard, row_loss.class_weights(self.call)
        return weights if shard is None else weights[shard.start : shard.start + shard.columns]

    def local_columns(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns each target's column on this rank, and a mask of the targets that this rank has; None: it has all.

        Targets of other ranks get an arbitrary column of this rank.
        """
        shard = self.call.shard
        if shard is None:
            return target, None
        column = target - shard.start
        return column.clamp(0, max(shard.columns - 1, 0)), (column >= 0) & (column < shard.columns)

    # Memory.

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised tensor."""
        # Sizes are passed one by one: with a tuple, torch.empty takes the host twice as long.
        return torch.empty(*shape, dtype=dtype, device=self.call.device)

    def dlogits_buffer(self, z: Tensor) -> Tensor:
        """Returns a (C, V) buffer for the gradient of z: z itself if it has x's dtype."""
        return z if z.dtype == self.call.dtype else self.logits_buffer(z.shape[0], self.call.dtype)

    def logits_buffer(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a buffer (count, V) for logits."""
        dtype = dtype or self.region.logits_dtype
        return empty_logits(
            count, self.call.vocab, dtype=dtype, device=self.call.device, device_type=self.region.device_type
        )

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype: itself, or a new tensor."""
        return tensor if tensor.dtype is dtype else tensor.to(dtype)

    # Matmuls.

    def logits_(self, out: Tensor, xs: list[Tensor], linears: Sequence[Linear]) -> None:
        """Fills out (C, V) with z = Σ x Wᵀ + b over the linears; `xs` has an x (C, H) for each.

        The smallest linear is written first, and the head's matmul accumulates: that is faster than the reverse order.
        """
        call = self.call
        if not call.vocab:
            return
        bias, accumulate = call.tensors.get("linear_bias"), False
        if bias is not None:
            bias = self._in_vocab(bias)
        terms = list(zip(linears, xs, strict=True))
        if len(terms) > 1:
            terms.sort(key=lambda term: term[1].shape[1])
        for linear, x in terms:
            self.region.logits_(out, x, self._in_vocab(call.tensors[linear.weight]), bias=bias, accumulate=accumulate)
            bias, accumulate = None, True

    def _in_vocab(self, parameter: Tensor) -> Tensor:
        """Returns the rows of a weight or a bias that belong to columns of the logits."""
        return parameter if parameter.shape[0] == self.call.vocab else parameter[: self.call.vocab]

    def start_input_gradient(self, dlogits: Tensor, linear: Linear) -> Callable[[Tensor], None]:
        """Starts dX (C, H) = dlogits (C, V) @ W, summed over the ranks that divide the vocabulary.

        Returns a function that writes dX, rounded once, into a tensor (C, H). Without a sum over ranks, the matmul runs
        only there.
        """
        weight, shard = self._in_vocab(self.call.tensors[linear.weight]), self.call.shard
        if shard is None or not shard.reduces_input_grad:
            return lambda out: matmul.input_gradient_(out, dlogits, weight)
        dtype = self.call.row_dtype if shard.float32_input_grad else self.call.dtype
        part = self.empty((dlogits.shape[0], weight.shape[1]), dtype)
        matmul.input_gradient_(part, dlogits, weight)
        pending, factor = collectives.start_sum(shard, part), shard.input_grad_factor

        def finish(out: Tensor) -> None:
            if factor == 1:
                out.copy_(pending.wait())
            else:
                torch.mul(pending.wait(), factor, out=out)

        return finish

    def weight_gradient_(
        self, out: Tensor, dlogits: Tensor, x: Tensor, *, linear: Linear, accumulate: bool, frequent: bool = False
    ) -> None:
        """out (V, H) = dlogits (C, V)ᵀ @ x (C, H), added to `out` if `accumulate`."""
        if out.shape[0]:
            matmul.weight_gradient_(out, dlogits, x, accumulate=accumulate, tune=self.plan.tune_products)

    # The row kernels.

    def one_pass_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> RowResults:
        """Returns the statistics of z (C, V) and z at the targets, (C,) or (C, K); z is overwritten by its gradient."""
        if target.ndim == 1:
            return RowResults(*self.region.kernels.one_pass_(z, target, coefficients))
        z_y = z.gather(1, target)
        # The kernel also writes the entry of the first target. Its value does not matter: it is overwritten below.
        statistics, _ = self.region.kernels.one_pass_(
            z, target[:, 0], coefficients._replace(one_hot=coefficients.probability)
        )
        self._write_target_entries_(z, z_y, statistics, coefficients, target)
        return RowResults(statistics, z_y)

    def results(self, z: Tensor, target: Tensor) -> RowResults:
        """Returns the row results of z (C, V), except for token losses; z stays as it is.

        If ranks divide the vocabulary, the results are those of whole rows, with the same bits on all ranks.
        """
        call, names = self.call, self.call.loss.moments
        row_results = self._whole_row_results(z, target)
        if not names:
            return row_results
        if call.vocab:
            moments = self.region.kernels.moments(z, row_results.statistics, self.class_weight, names)
        else:
            moments = dict.fromkeys(names, torch.zeros_like(row_results.statistics.row_max))
        if call.shard is not None:
            parts = collectives.all_gathered(call.shard, [moments[name] for name in names])
            moments = {name: part.sum(0) for name, part in zip(names, parts, strict=True)}
        return row_results._replace(moments=moments)

    def _whole_row_results(self, z: Tensor, target: Tensor) -> RowResults:
        shard, loss, dtype = self.call.shard, self.call.loss, self.call.row_dtype
        # The argmax of the logits is found in z: the logit map keeps the order, or reverses it for a negative scale.
        find = torch.argmax if loss.logit_scale > 0 else torch.argmin
        if shard is None:
            argmax = find(z, 1) if loss.needs_argmax else None
            statistics, z_y = self.region.kernels.statistics(z, target if target.ndim == 1 else None)
            return RowResults(statistics, z.gather(1, target) if z_y is None else z_y, {}, argmax)
        largest = None
        if not self.call.vocab:
            z_y = torch.zeros_like(target, dtype=dtype)
            nothing = z_y.new_full(target.shape[:1], float("-inf"))
            statistics = RowStatistics(nothing, nothing)
            if loss.needs_argmax:
                largest = torch.full_like(nothing, collectives.NO_COLUMN, dtype=torch.int64), nothing
        else:
            column, is_local = self.local_columns(target)
            z_y = z.gather(1, column if target.ndim > 1 else column[:, None]).reshape(target.shape)
            z_y = torch.where(is_local, z_y.to(dtype), 0)  # type: ignore[arg-type]
            statistics, _ = self.region.kernels.statistics(z)
            if loss.needs_argmax:
                argmax = find(z, 1)
                entry = at_columns(z, argmax).to(dtype)
                largest = argmax + shard.start, entry if loss.logit_scale > 0 else -entry
        row_max, row_log_sum, z_y, argmax = collectives.combined(shard, statistics, z_y, largest=largest)
        return RowResults(RowStatistics(row_max, row_log_sum), z_y, {}, argmax)

    def gradient_(
        self, z: Tensor, results: RowResults, coefficients: RowCoefficients, target: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns dz of some rows (C, V), in x's dtype, and its sum over rows, (V,), if the bias needs a gradient.

        dz overwrites z if z has x's dtype. The target's entry is computed from the old z in float32: near p = 1, p − 1
        keeps digits there that p, rounded to 16 bits, has lost.
        """
        call = self.call
        out = self.dlogits_buffer(z)
        if not call.vocab:
            return out, self.empty((0,), call.row_dtype) if call.bias_grad else None
        if target.ndim > 1:
            return out, self._gradient_of_several_targets_(out, z, results, coefficients, target)
        column, is_local = self.local_columns(target)
        sums = self.region.kernels.gradient_(
            z, results.statistics, coefficients, class_weight=self.class_weight, out=out, column_sums=call.bias_grad,
            target=column if is_local is None else torch.where(is_local, column, -1),
        )  # fmt: skip
        return out, sums

    def _gradient_of_several_targets_(
        self, out: Tensor, z: Tensor, results: RowResults, coefficients: RowCoefficients, target: Tensor
    ) -> Tensor | None:
        """`gradient_` for targets (C, K): runs the kernel, then writes the targets' entries, made from the old z."""
        column, is_local = self.local_columns(target)
        if is_local is not None:
            coefficients = coefficients._replace(one_hot=torch.where(is_local, coefficients.one_hot, 0))
        z_y = z.gather(1, column)
        sums = self.region.kernels.gradient_(
            z, results.statistics, coefficients._replace(one_hot=None), out=out, column_sums=self.call.bias_grad
        )
        self._write_target_entries_(out, z_y, results.statistics, coefficients, column)
        if sums is not None:
            slope = self.call.loss.logit_map.slope(z_y.to(self.call.row_dtype))
            one_hot = coefficients.one_hot if slope is None else coefficients.one_hot * slope
            sums.index_add_(0, column.reshape(-1), one_hot.reshape(-1), alpha=-1)
        return sums

    def _write_target_entries_(
        self, dlogits: Tensor, z_y: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, column: Tensor
    ) -> None:
        """Writes the entries of the gradient at each row's K targets, with the one_hot term."""
        # Targets in the same column write the same number, their sum, so the order of the writes does not matter.
        first = torch.searchsorted(column.sort(1).values, column)
        total = torch.zeros_like(coefficients.one_hot).scatter_add_(1, first, coefficients.one_hot).gather(1, first)
        vectors = (None if v is None else v[:, None] for v in coefficients._replace(one_hot=None))
        factors, of_row = RowCoefficients(*vectors)._replace(one_hot=total), statistics.rows((slice(None), None))
        entry = gradient(z_y.to(self.call.row_dtype), self.call.loss.logit_map, of_row, factors)
        # Not scatter_: on a CPU, it would copy all of 16-bit dlogits to float32 and back.
        row = torch.arange(column.shape[0], device=column.device)[:, None]
        dlogits[row, column] = entry.to(dlogits.dtype)

    def divergence_(
        self, z: Tensor, teacher: Tensor, factors: Tensor | None, labels: LabelTerm | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (C,) each row's divergence from the teacher, and dlogits, which are written only with `factors`."""
        call, divergence = self.call, self.call.loss.divergence
        compute = dispatch.divergence_for(
            self.plan.row_kernels, dtypes=(z.dtype, teacher.dtype), device_type=self.region.device_type
        )
        out = z if factors is None else self.dlogits_buffer(z)
        is_invariant = self.plan.batch_invariant and factors is not None
        divergences = compute(z, teacher, divergence, factors=None if is_invariant else factors, out=out, labels=labels)
        if is_invariant:
            # A kernel that computes values and gradients at once may add in another order.
            compute(z, teacher, divergence, factors=factors, out=out, labels=labels)
        return divergences.to(call.row_dtype), out

    def token_loss(
        self, results: RowResults, inputs: Sequence[Tensor], s: Tensor | None
    ) -> tuple[Tensor, RowCoefficients | None]:
        """Returns the token losses of some rows, (C,), and with `s` the coefficients: see `row_loss.token_loss`."""
        kernel = self.region.token_kernel
        if kernel is None or s is None:
            return row_loss.token_loss(self.call, results, inputs, s)
        return kernel(results.statistics, results.z_y, results.moments, s, inputs, columns=self.call.whole_vocab)

    # Results.

    def loss(self, selected: Rows, results: RowResults) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, () or (N,) for reduction "none", from all row results, and outputs of the same kernel."""
        loss, logit, at_target, row_losses = self.call.loss, results.z_y, selected.at_target, results.row_losses
        if self.region.vector_kernels is None:
            row: Any = None if results.z_y is None else results.row(self.call)
            row_losses = row_loss.cross_entropy(self.call, selected, row) if row_losses is None else row_losses
            return row_loss.reduced(self.call, selected, row_losses, loss.z_term(row)), {}
        if loss.maps_logits or loss.label_smoothing:
            # The kernel neither maps z to logits nor takes the moments that smoothing needs.
            row = results.row(self.call)
            logit = row.target_logit
            if loss.label_smoothing:
                row_losses, at_target = row_loss.cross_entropy(self.call, selected, row), None
        return self.region.vector_kernels.finish(
            loss, results.statistics, logit, row_factor=selected.row_factor, at_target=at_target,
            divisors=selected.divisors, row_losses=row_losses,
        )  # fmt: skip

    def scaled_rows(self, gradient: Tensor, factors: Tensor) -> Tensor:
        """Returns dX (T, H): `gradient`, for an upstream gradient of 1 at each row, times the rows' `factors` (T,)."""
        # Both are float32 or float64, so the product is rounded once.
        return torch.mul(gradient, factors[:, None], out=torch.empty_like(gradient, dtype=self.call.dtype))
