"""The loss and the coefficients of its gradient, from what is known of each row; the formulas are those of `Loss`.

Legend: T tokens, N rows computed, C rows in a chunk, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution import steps
from thunder_flce.execution.operands import ForwardResult, SavedStatistics, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.interface import LogitsBuffer, RowStatistics
from thunder_flce.execution.row_selection import Rows
from thunder_flce.operation.loss import (
    OUTPUTS,
    Rest,
    Row,
    RowCoefficients,
    RowWeights,
    SoftTargets,
    rest_coefficients,
    row_coefficients,
)
from thunder_flce.operation.token_loss import VARIABLES, differentiate, evaluate, input_name, uses


class RowScales(NamedTuple):
    """What depends on all rows at once; by default, every row counts once."""

    rows: Rows
    class_weight: Tensor | None = None
    """(V,) of the columns that are computed here, in the dtype of the rows; None for ones"""
    row_weights: RowWeights | None = None
    """The class weights' share in each row, (N,) and ()"""
    divisor: Tensor | None = None
    """() what the sum of the cross-entropies is divided by; None where nothing is averaged"""
    z_divisor: Tensor | None = None
    """() what the sum of the z terms is divided by; None where nothing is averaged"""
    token_weights: Tensor | None = None
    """(N,) what multiplies a row's loss; None for ones"""
    token_inputs: tuple[Tensor, ...] = ()
    """(N,) each, what the token loss reads"""

    @classmethod
    def of(cls, region: Region, rows: Rows) -> "RowScales":
        """For the rows of a region. num_items takes the place of both divisors; where it is 0, the results are 0."""
        operands, class_weight, row_weights = region.operands, region.operands.class_weight, None
        if class_weight is not None:
            class_weight = class_weight[: operands.whole_vocab].detach().to(operands.row_dtype)
            row_weights = RowWeights(class_weight[rows.target], class_weight.sum())
            if (shard := region.shard) is not None:
                class_weight = class_weight[shard.start : shard.start + shard.columns]
        divisor = z_divisor = token_weights = None
        if operands.token_weights is not None:
            # An ignored token's may be infinite, such as a ratio of probabilities at padding.
            token_weights = steps.let(region, "w_t", rows.mask_ignored(rows.gather(operands.token_weights)))
        if region.loss.reduction == "mean":
            divisor = z_divisor = rows.valid_count
            if token_weights is not None:
                divisor = z_divisor = token_weights.sum()
            if operands.num_items is not None:
                divisor = z_divisor = torch.where(operands.num_items == 0, float("inf"), operands.num_items)
            elif row_weights is not None:
                at_target = row_weights.at_target if token_weights is None else row_weights.at_target * token_weights
                divisor = rows.mask_ignored(at_target).sum()
        inputs = [
            steps.let(region, input_name(number), rows.gather(vector))
            for number, vector in enumerate(operands.token_inputs)
        ]
        return cls(rows, class_weight, row_weights, divisor, z_divisor, token_weights, tuple(inputs))


class RowGradients:
    """Gives each chunk of rows the coefficients of its gradient."""

    def __init__(self, region: Region, scales: RowScales, upstream: UpstreamGradients):
        loss, rows = region.loss, scales.rows
        dtype = region.operands.row_dtype

        def of_rows(grad: Tensor | None, divisor: Tensor | None = None) -> Tensor:
            """(N,) an upstream gradient, 0 where rows are ignored."""
            grad = region.scalar(0.0) if grad is None else grad.to(dtype)
            grad = grad.expand(rows.count) if grad.ndim == 0 else rows.received(grad.reshape(-1))
            return rows.mask_ignored(grad if divisor is None else grad / divisor).contiguous()

        def of_loss(divisor: Tensor | None) -> Tensor:
            grad = of_rows(upstream.loss, divisor)
            return grad if scales.token_weights is None else grad * scales.token_weights

        self._region, self._scale, self._rows = region, loss.logit_scale, rows
        self._s = s = steps.let(region, "s", of_loss(scales.divisor))
        # With `Loss.target_rest`, A and B are known when the chunk's logits are.
        weights = None if loss.target_rest else rows.target_weights
        probability, one_hot, uniform, _ = row_coefficients(
            loss, s, scales.row_weights, region.operands.whole_vocab, target_weights=weights
        )
        if upstream.log_prob is not None:
            g_p = steps.let(region, "g_p", of_rows(upstream.log_prob))
            probability, one_hot = probability - g_p, one_hot - g_p
        if upstream.log_sum_exp is not None:
            probability = probability + steps.let(region, "g_l", of_rows(upstream.log_sum_exp))
        entropy = None if upstream.entropy is None else of_rows(upstream.entropy)
        names = ("A", "B", "C", "g_e")
        vectors = (probability, one_hot, uniform, entropy)
        # A and B are s itself for a plain loss: then there is nothing to name.
        self._vectors = RowCoefficients(
            *(v if v is None or v is s else steps.let(region, n, v) for n, v in zip(names, vectors, strict=True))
        )
        self._z_term = None
        if loss.z_loss:
            self._z_term = steps.let(region, "s_z", 2 * loss.z_loss * of_loss(scales.z_divisor))

    @property
    def factors(self) -> Tensor:
        """(N,) A, what multiplies a row's gradient for 1, where `Loss.has_parallel_row_gradients`."""
        return self._vectors.probability

    def coefficients(
        self,
        chunk: slice,
        statistics: RowStatistics | None,
        entropy: Tensor | None = None,
        *,
        token_loss: "TokenLosses | None" = None,
        target_entry: Tensor | None = None,
    ) -> RowCoefficients:
        """The chunk's coefficients, from what is known of its rows, (C,) each.

        Statistics may be None where `Loss.is_plain`, `entropy` where it has no upstream gradient, and `target_entry`,
        z at the targets, without `Loss.target_rest`.
        """
        vectors: list[Any] = [None if vector is None else vector[chunk] for vector in self._vectors]
        if token_loss is not None:
            entropy = token_loss.entropy
            g_p, vectors[3], g_l = token_loss.gradients(self._region, self._s[chunk])
            vectors[0] = vectors[1] = -g_p
            if g_l is not None:
                vectors[0] = vectors[0] + g_l
        if self._region.loss.target_rest:
            assert statistics is not None and target_entry is not None
            u_y = self._region.logit_map(target_entry.to(self._region.operands.row_dtype))
            row = Row(*statistics, target_logit=u_y, moments={})
            targets = _soft_targets(self._region, self._rows, row, chunk)
            assert targets.rest is not None
            found = rest_coefficients(self._s[chunk], targets.weights, targets.rest)
            vectors[:2] = (steps.let(self._region, name, value) for name, value in zip("AB", found, strict=True))
        if statistics is not None:
            if self._z_term is not None:
                vectors[0] = vectors[0] + self._z_term[chunk] * (statistics.row_max + statistics.row_log_sum)
            if vectors[3] is not None and entropy is not None:
                vectors[0] = vectors[0] + vectors[3] * (statistics.row_log_sum - entropy)
        if self._scale != 1:
            vectors = [None if vector is None else vector * self._scale for vector in vectors]
        return RowCoefficients(*vectors)


class TokenLosses(NamedTuple):
    """What `Loss.token_loss` makes of the rows of a chunk, (C,) each."""

    value: Tensor
    derivatives: Mapping[str, Tensor | float] = MappingProxyType({})
    """With respect to each of `VARIABLES`; a number where it is the same for all rows"""
    entropy: Tensor | None = None
    """None where the loss does not depend on it"""

    def gradients(self, region: Region, s: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """g_p, g_e and g_l, from the upstream gradients of the rows, s (C,); the latter two None where they are 0."""

        def multiplied(name: str, derivative: Tensor | float) -> Tensor:
            if isinstance(derivative, float):
                return steps.let(region, name, s * derivative)
            # The derivative may be infinite in a row without an upstream gradient.
            return steps.let(region, name, torch.where(s == 0, 0.0, s * derivative))

        g_p = multiplied("g_p", self.derivatives["log_prob"])
        g_e = None if self.entropy is None else multiplied("g_e", self.derivatives["entropy"])
        uses_log_sum_exp = uses(region.loss.token_loss, "log_sum_exp")
        return g_p, g_e, multiplied("g_l", self.derivatives["log_sum_exp"]) if uses_log_sum_exp else None

    @classmethod
    def of(cls, region: Region, row: Row, inputs: Sequence[Tensor]) -> "TokenLosses":
        """The token losses of rows whose target's logit is known, from these rows and the further inputs, (C,) each."""
        loss, columns = region.loss, region.operands.whole_vocab
        variables = [name for name in VARIABLES if uses(loss.token_loss, name)]
        of_row = {name: steps.let(region, name, OUTPUTS[name].of(row, columns, torch.log)) for name in variables}
        values = of_row | {input_name(number): vector for number, vector in enumerate(inputs)}
        if not isinstance(region.plan, GradientsInForward):
            return cls(steps.let(region, "token_loss", evaluate(loss.token_loss, values, torch)))
        value, gradients = differentiate(loss.token_loss, values, torch, partial(steps.let, region))
        value = steps.let(region, "token_loss", value)
        return cls(value, gradients, of_row.get("entropy"))


class ChunkResult(NamedTuple):
    """What the forward computes of the rows of a chunk; (C,) each, None where the loss does not need it."""

    statistics: RowStatistics
    target_entry: Tensor
    """z at each row's target; (C, K) with target weights"""
    moments: dict[str, Tensor]
    argmax: Tensor | None = None
    targets: steps.Targets | None = None
    """Where the targets are in the chunk's logits; None where the gradient is already there"""
    token_loss: TokenLosses | None = None


def chunk_result(region: Region, scales: RowScales, logits: LogitsBuffer, chunk: slice) -> ChunkResult:
    """What the loss needs of a chunk's rows, from their logits (C, V), which stay as they are."""
    row, targets = steps.whole_rows(region, logits, steps.targets(region, scales.rows.target[chunk]))
    statistics = RowStatistics(row.row_max, row.row_log_sum)
    moments = steps.moments(region, logits, statistics, scales.class_weight)
    token_loss = None
    if region.loss.token_loss:
        u_y = region.logit_map(row.target_entry.to(region.operands.row_dtype))
        known = Row(*statistics, target_logit=u_y, moments=moments)
        token_loss = TokenLosses.of(region, known, [vector[chunk] for vector in scales.token_inputs])
    return ChunkResult(statistics, row.target_entry, moments, row.argmax, targets, token_loss)


def _soft_targets(region: Region, rows: Rows, row: Row, chunk: slice) -> SoftTargets:
    """The targets of the rows of `chunk`, where a row has several; `row` is what is known of these rows."""
    weights, first = rows.target_weights, rows.first_targets
    assert weights is not None
    if first is None:
        return SoftTargets(weights[chunk])
    return SoftTargets(weights[chunk], Rest.of(row, weights[chunk], first[chunk], let=partial(steps.let, region)))


def finish_loss(region: Region, scales: RowScales, chunks: list[ChunkResult]) -> ForwardResult:
    """The loss, its further outputs and the saved statistics, from the results of all chunks."""
    loss, rows, vocab = region.loss, scales.rows, region.operands.whole_vocab
    row, z_y = _concatenated(region, scales.rows, chunks)
    row = row._replace(target_logit=region.logit_map(z_y.to(region.operands.row_dtype)))

    def weighted(value: Tensor) -> Tensor:
        return rows.mask_ignored(value if scales.token_weights is None else value * scales.token_weights)

    if loss.token_loss:
        of_chunks = [chunk.token_loss.value for chunk in chunks if chunk.token_loss is not None]
        name, of_rows = "token_losses", steps.joined(of_chunks) if of_chunks else row.max
    else:
        name = "cross_entropy"
        every_row = slice(0, rows.count)
        targets = None if rows.target_weights is None else _soft_targets(region, rows, row, every_row)
        of_rows = loss.cross_entropy(row, scales.row_weights, vocab, targets=targets)
    terms = [(steps.let(region, name, weighted(of_rows)), scales.divisor)]
    if (z_term := loss.z_term(row)) is not None:
        terms.append((steps.let(region, "z_term", weighted(z_term)), scales.z_divisor))
    value = loss.reduce(terms)
    if loss.reduction == "none":
        value = rows.returned(value)
    value = steps.let(region, "loss", value)
    outputs = {name: _output(region, scales, name, row) for name in loss.outputs}
    saved = SavedStatistics(
        steps.let(region, "row_max", rows.scatter(row.max)),
        steps.let(region, "row_log_sum", rows.scatter(row.log_sum)),
        rows.valid_count,
        outputs.get("entropy"),
    )
    return ForwardResult(value, tuple(outputs.values()), saved)


def _output(region: Region, scales: RowScales, name: str, row: Row) -> Tensor:
    """One of the loss's further outputs, (T,), or () for a mean."""
    output, rows = OUTPUTS[name], scales.rows
    value = output.of(row, region.operands.whole_vocab, torch.log)
    if output.is_mean:
        hits = rows.mask_ignored(value, fill=-1) == rows.target
        value = hits.sum().to(region.operands.row_dtype) / rows.valid_count
    elif output.ignored is None:
        value = rows.returned(value)
    else:
        value = rows.returned(rows.mask_ignored(value, output.ignored), output.ignored)
    return steps.let(region, name, value)


def _concatenated(region: Region, rows: Rows, chunks: list[ChunkResult]) -> tuple[Row, Tensor]:
    """What is known of all rows, and z at their targets."""
    loss = region.loss
    if not chunks:
        nothing = region.empty("nothing", (0,), region.operands.row_dtype)
        moments = dict.fromkeys(loss.moments, nothing)
        at_targets = nothing if rows.target_weights is None else rows.target_weights
        chunks = [ChunkResult(RowStatistics(nothing, nothing), at_targets, moments, nothing.to(torch.int64))]

    columns = [chunk.argmax for chunk in chunks if chunk.argmax is not None]
    row = Row(
        max=steps.joined([chunk.statistics.row_max for chunk in chunks]),
        log_sum=steps.joined([chunk.statistics.row_log_sum for chunk in chunks]),
        target_logit=None,
        moments={name: steps.joined([chunk.moments[name] for chunk in chunks]) for name in loss.moments},
        argmax=steps.joined(columns) if loss.needs_argmax else None,
    )
    return row, steps.joined([chunk.target_entry for chunk in chunks])
