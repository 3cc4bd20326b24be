"""Log-probabilities and entropies that a program spells out: what becomes one region, and what is reported."""

import warnings
from functools import partial

import pytest
import thunder
import torch
import torch.nn.functional as F

import test_patterns  # noqa: F401 (finds traces/patterns.py)
import thunder_flce
from front_ends import decisions
from reference import error
from thunder_flce import NotFusedWarning, Options
from thunder_flce.backend import compile_graph
from thunder_flce.inspection import programs
from thunder_flce.matching.decisions import Reason

import patterns  # isort: skip

SIZES = programs.Sizes(batch=2, sequence=24, hidden=16, vocab=100)


def tensors_for(program, dtype=torch.float32):
    tensors = programs.arguments(program, SIZES, device="cpu", dtype=dtype)
    return [tensor.detach().mul(0.5).requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]


def results(fn, tensors):
    """The first output, and its gradients for random upstream ones."""
    output = fn(*tensors)
    output = output[0] if isinstance(output, tuple) else output
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype)
    needing = [tensor for tensor in tensors if tensor.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, needing, upstream)]


def regions(jitted):
    """The arguments of the regions in the final trace."""
    bsyms = thunder.last_traces(jitted)[-1].bound_symbols
    return [bsym.kwargs for bsym in bsyms if bsym.sym.name == "flce_linear_cross_entropy_fwd"]


READINGS = (
    patterns.log_softmax_gathered,
    patterns.log_probability_as_trl_has_it,
    patterns.log_probability_of_each_sequence,
    patterns.probability_gathered,
    patterns.log_probability_indexed,
    patterns.log_probability_indexed_in_three_dimensions,
    patterns.preference_loss,
    patterns.clipped_ratio_with_entropy,
    patterns.entropy_as_verl_has_it,
    patterns.entropy_of_probabilities,
    patterns.entropy_in_chunks,
    patterns.label_smoothing_by_hand,
    patterns.mean_logit_beside_cross_entropy,
)


@pytest.mark.parametrize("program", READINGS, ids=lambda program: program.__name__)
def test_as_exact_as_eager(program):
    """In bfloat16, against float64. Eager rounds a log_softmax of 16 bits, and we do not."""
    tensors = tensors_for(program, torch.bfloat16)
    exact = results(program, [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors])
    for got, eager, right in zip(
        results(thunder_flce.jit(program), tensors), results(program, tensors), exact, strict=True
    ):
        assert got.dtype == eager.dtype
        assert error(got, right) <= 1.25 * error(eager, right) + 2**-9


def test_labels_that_do_not_exist():
    """gather knows no ignore_index."""
    hidden, weight, tokens = tensors_for(patterns.log_softmax_gathered)
    tokens[1, 2] = -100
    with pytest.raises(IndexError, match="target has 1 of 48 values"):
        thunder_flce.jit(patterns.log_softmax_gathered)(hidden, weight, tokens)


@pytest.mark.parametrize("program", [patterns.entropy_beside_cross_entropy, patterns.z_term_beside_cross_entropy])
def test_beside_a_cross_entropy_that_waits(program):
    tensors = tensors_for(program)
    jitted = thunder_flce.jit(program, strict=True, options=Options(strategy="recompute_logits"))
    torch.testing.assert_close(results(jitted, tensors), results(program, tensors))
    (region,) = regions(jitted)
    assert region["outputs"] and region["strategy"] == "recompute_logits"
    (decision,) = thunder_flce.explain(jitted)[-1].decisions
    assert "the options say recompute_logits" in decision.note


@pytest.mark.parametrize("picked", [lambda rows, t, y: rows[t][y[t]], lambda rows, t, y: rows[t, y[t]]])
def test_one_row_at_a_time(picked):
    """Their rows become one region."""

    def program(hidden, weight, tokens):
        log_probs = F.linear(hidden[0], weight).log_softmax(-1)
        return -torch.stack([picked(log_probs, at, tokens[0]) for at in range(4)]).mean()

    tensors = tensors_for(program)
    jitted = thunder_flce.jit(program)
    torch.testing.assert_close(results(jitted, tensors), results(program, tensors))
    (decision,) = decisions(jitted)
    assert decision.fused


def test_columns_of_logits_beside_a_loss():
    """The scores of two answers, and rows of a hidden layer that is centred, are not its business."""

    def program(hidden, weight, bias, labels):
        answers = F.linear(hidden[0, -1:], weight).index_select(-1, labels.new_tensor([3, 7]))
        centred = F.linear(hidden[0], weight, bias)
        centred = (centred - centred.mean(0, keepdim=True)).index_select(0, labels[0, :2] * 0)
        return F.cross_entropy(F.linear(hidden[0], weight), labels[0]) + F.softplus(answers).sum() + centred.sum()

    tensors = tensors_for(program)
    jitted = thunder_flce.jit(program, strict=True)
    torch.testing.assert_close(jitted(*tensors), program(*tensors))
    assert [decision.kind for decision in decisions(jitted)] == ["cross-entropy"]


def test_a_loss_beside_what_is_not_fused():
    """All logits are there then."""

    def program(hidden, weight, tokens):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + logits.gather(-1, tokens[..., None]).mean()

    jitted = thunder_flce.jit(program)
    with pytest.warns(NotFusedWarning, match="the cross-entropy at .*by something that is not fused itself"):
        jitted(*tensors_for(program))
    assert [decision.fused for decision in decisions(jitted)] == [False, False]


def gate_of_experts(hidden, weight, tokens):
    scores = F.linear(hidden, weight).softmax(-1)
    _, chosen = scores.topk(2, dim=-1)
    weights = scores.gather(-1, chosen)
    return (weights / weights.sum(-1, keepdim=True)).square().sum()


def greedy_choice(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return log_probs.gather(-1, log_probs.argmax(-1, keepdim=True)).sum()


def most_likely_choice(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return (F.one_hot(log_probs.argmax(-1), weight.shape[0]) * log_probs).sum(-1).mean()


def choices_of_flattened_rows(hidden, weight, tokens):
    probabilities = F.linear(hidden[0], weight).softmax(-1)
    starts = torch.arange(probabilities.shape[0]) * weight.shape[0]
    return probabilities.view(-1)[starts + probabilities.argmax(-1)].sum()


def choices_by_where(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return torch.where(log_probs > -3.0, log_probs, 0.0).sum(-1).mean()


def rows_of_a_mask(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return torch.where(tokens[..., None] > 3, log_probs, 0.0).sum(-1).mean()


def numbers_of_flattened_hidden_states(hidden, weight, tokens):
    return F.linear(hidden, weight).view(-1)[tokens.view(-1)].sum()


def similar_tokens(hidden, weight, tokens):
    hidden = hidden[0]
    log_probs = (hidden @ hidden.t()).log_softmax(-1)
    return -(torch.eq(tokens[0][:, None], tokens[0]).float() * log_probs).sum(-1).mean()


def divergence_from_the_uniform(hidden, weight, tokens):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    return F.kl_div(torch.full_like(log_probs, -3.0), log_probs, reduction="batchmean", log_target=True)


def classifier(hidden, weight, tokens):
    return F.linear(hidden, weight).softmax(-1).square().sum()


def attention(hidden, weight, tokens):
    scores = (hidden @ hidden.transpose(1, 2)).softmax(-1)
    return -(scores * scores.log()).sum() + (scores @ hidden).sum()


def attention_entropy(hidden, weight, tokens):
    scores = (hidden @ hidden.transpose(1, 2)).log_softmax(-1)
    return -(scores.exp() * scores).sum(-1).mean()


def relative_positions(hidden, weight, tokens):
    scores = hidden @ hidden.transpose(1, 2)
    return scores.gather(-1, tokens.new_zeros(tokens.shape)[..., None]).sum()


def embeddings_gathered(hidden, weight, tokens):
    hidden = F.layer_norm(F.linear(hidden, weight), weight.shape[:1])
    return hidden.gather(-1, tokens[..., None]).sum()


def norm(hidden, weight, tokens):
    hidden = F.linear(hidden, weight)
    return (hidden * hidden).sum(-1).sqrt().sum()


@pytest.mark.parametrize(
    "program",
    [
        gate_of_experts,
        numbers_of_flattened_hidden_states,
        similar_tokens,
        attention,
        attention_entropy,
        relative_positions,
        embeddings_gathered,
        norm,
    ],
    ids=lambda program: program.__name__,
)
def test_what_is_none_of_its_business(program):
    tensors = tensors_for(program)
    if program is gate_of_experts:
        # A gate has fewer columns than its input has features.
        tensors[1] = tensors[1][:8].detach().requires_grad_()
    jitted = thunder_flce.jit(program, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFusedWarning)
        torch.testing.assert_close(jitted(*tensors), program(*tensors))
    assert not regions(jitted) and not decisions(jitted)
    assert "no cross-entropy, log-probability, entropy" in str(thunder_flce.explain(jitted))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (greedy_choice, Reason.NOT_A_LOG_PROBABILITY),
        (most_likely_choice, Reason.CLASS_PROBABILITIES),
        (choices_of_flattened_rows, Reason.TRANSFORMED_LOGITS),
        (choices_by_where, Reason.NOT_FOLLOWED),
        (rows_of_a_mask, Reason.CLASS_PROBABILITIES),
        (divergence_from_the_uniform, Reason.NOT_FOLLOWED),
        (classifier, Reason.TRANSFORMED_LOGITS),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_probabilities_of_a_head_are_never_dropped_in_silence(program, reason):
    tensors = tensors_for(program)
    jitted = thunder_flce.jit(program)
    with pytest.warns(NotFusedWarning, match="not fused, because"):
        torch.testing.assert_close(jitted(*tensors), program(*tensors))
    assert [decision.reason for decision in decisions(jitted)] == [reason]


def _log_prob(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def _without_gradients(function, *tensors):
    with torch.no_grad():
        return function(*tensors)


def _constant_probabilities(logits, labels):
    probabilities = logits.softmax(-1)
    return -(probabilities.detach() * probabilities.log()).sum(-1)


def _weighted_by_entropy(logits, labels):
    constant = logits.detach()
    return (constant.softmax(-1) * constant.log_softmax(-1)).sum(-1) * _log_prob(logits, labels)


def _difference_of_constant(logits, labels):
    return (logits - _without_gradients(lambda z: z.logsumexp(-1, keepdim=True), logits)).gather(-1, labels[:, None])


def _by_hand(logits, labels, in_sum):
    """A log-probability if the function returns the same logits."""
    return logits.gather(-1, labels[:, None])[:, 0] - in_sum(logits).exp().sum(-1).log()


def _less_maximum(logits):
    return logits - logits.amax(-1, keepdim=True)


def _row_sums(counts):
    return counts.sum(-1, keepdim=True)


def _of_counts(logits, labels, total=_row_sums):
    """A log-probability where the total is the sum of each row."""
    counts = logits.exp()
    return (counts / total(counts)).gather(-1, labels[:, None]).log()


def _over_the_other_half(logits, labels):
    first, second = logits.exp().chunk(2)
    of_first, of_second = labels[:, None].chunk(2)
    total = _row_sums(first)
    return torch.cat([(first / total).gather(-1, of_first), (second / total).gather(-1, of_second)])


def _of_counts_that_are_used(logits, labels):
    counts = logits.exp()
    return (counts / counts.sum(-1, keepdim=True)).gather(-1, labels[:, None])[:, 0].log() + counts.sum(-1)


def _of_rows_changed(logits, labels):
    rows = torch.arange(6)
    rows[0] = 3
    return logits.log_softmax(-1)[rows, labels]


def _of_rows_changed_in_a_view(logits, labels):
    rows = torch.arange(6)
    rows.view(-1)[1:].clamp_(max=3)
    return logits.log_softmax(-1)[rows, labels]


def _of_rows_flipped(logits, labels):
    rows = torch.arange(2)
    rows.neg_().add_(1)
    return logits.view(2, 3, -1).log_softmax(-1)[rows[:, None], torch.arange(3), labels.view(2, 3)]


def _with_labels_returned(logits, labels):
    """And broadcast labels that something else reads, as a whole, and by a maximum that is a pair of tensors."""
    labels, log_probs = torch.broadcast_tensors(labels[:, None], logits.log_softmax(-1))
    return log_probs.gather(-1, labels[..., :1]).squeeze(-1) * labels.max(-1)[0]


def _clamped(logits, labels):
    """No logarithm: neither integers nor a clamp at other tensors."""
    counts = (labels.clamp(min=0) * labels).sum(-1, keepdim=True)
    return _log_prob(logits, labels) * counts + (logits.clamp(min=logits.detach() - 1) * logits.softmax(-1)).sum(-1)


def _of_broadcast_labels(logits, labels):
    labels, log_probs = torch.broadcast_tensors(labels[:, None], logits.log_softmax(-1))
    return log_probs.gather(-1, labels[..., :1]).squeeze(-1) + labels.sum()


# Of float64 logits (6, V) and labels.
LOOKALIKES = {
    "rows in another order": lambda z, y: _log_prob(z, y)[[3, 1, 0, 2, 5, 4]],
    "rows picked in another order": lambda z, y: z.log_softmax(-1)[torch.arange(6).flip(0), y],
    "rows listed in another order": lambda z, y: z.log_softmax(-1)[[3, 1, 0, 2, 5, 4], y],
    "rows of an index": lambda z, y: _log_prob(z, y)[y.argsort()],
    "labels in another order": lambda z, y: F.logsigmoid(_log_prob(z, y) - _log_prob(z, y[[1, 0, 2, 3, 5, 4]])),
    "two labels of three rows": lambda z, y: z.log_softmax(-1).gather(-1, y.view(3, 2)),
    "constant log-sum-exp": lambda z, y: z.gather(-1, y[:, None])[:, 0] - _without_gradients(torch.logsumexp, z, -1),
    "log-sum-exp of constants": lambda z, y: z.gather(-1, y[:, None])[:, 0] - z.detach().logsumexp(-1),
    "logits of labels of constants": lambda z, y: z.detach().gather(-1, y[:, None])[:, 0] - z.logsumexp(-1),
    "constant log-sum-exp of all": _difference_of_constant,
    "constant probabilities": _constant_probabilities,
    "constant expectation": lambda z, y: (
        z.logsumexp(-1) - _without_gradients(lambda logits: (logits.softmax(-1) * logits).sum(-1), z)
    ),
    "ratio to itself": lambda z, y: (_log_prob(z, y) - _log_prob(z.detach(), y)).exp(),
    "log-probabilities of at least -3": lambda z, y: (z.softmax(-1) * z.log_softmax(-1).clamp(min=-3.0)).sum(-1),
    "logarithm of other probabilities": lambda z, y: torch.xlogy(z.softmax(-1).square(), z.softmax(-1)).sum(-1),
    "logarithm of constants": lambda z, y: torch.xlogy(z.softmax(-1), z.softmax(-1).detach()).sum(-1),
    "products of all rows": lambda z, y: torch.einsum("rv,qv->r", z.softmax(-1), z.log_softmax(-1)),
    "less the maximum in the sum": lambda z, y: _by_hand(z, y, _less_maximum),
    "exponentials of constants": lambda z, y: _by_hand(z, y, torch.detach),
    "maximum that is used": lambda z, y: _log_prob(_less_maximum(z), y) * z.amax(-1),
    "counts over a constant sum": lambda z, y: _of_counts(z, y, lambda counts: _row_sums(counts).detach()),
    "constant counts": lambda z, y: (z.exp().detach() / _row_sums(z.exp())).gather(-1, y[:, None]).log(),
    "counts over the sum of others": lambda z, y: _of_counts(z, y, lambda counts: _row_sums((z / 2).exp())),
    "counts over the sum of their roots": lambda z, y: _of_counts(z, y, lambda counts: _row_sums(counts.sqrt())),
    "counts over the sum of all": lambda z, y: _of_counts(z, y, torch.sum),
    "counts over the sums of columns": lambda z, y: _of_counts(z, y, lambda counts: counts.sum(0, keepdim=True)),
    "counts over sums without gradients": lambda z, y: _of_counts(
        z, y, lambda counts: _without_gradients(_row_sums, counts)
    ),
    "probabilities at another temperature": lambda z, y: ((z / 2).softmax(-1) * z.log_softmax(-1)).sum(-1),
    "counts over the sums of other rows": _over_the_other_half,
    "counts that are used": _of_counts_that_are_used,
    "expectation of counts": lambda z, y: -(z.exp() / z.exp().sum(-1, keepdim=True) * z.exp()).sum(-1),
    "softmax of counts": lambda z, y: _log_prob(z.exp(), y),
    "divided after the maximum": lambda z, y: _log_prob(_less_maximum(z) / 0.7, y),
    "divided after the maximum, as a sum": lambda z, y: _by_hand(_less_maximum(z) / 0.7, y, lambda logits: logits),
    "expectation less the maximum": lambda z, y: z.logsumexp(-1) - (z.softmax(-1) * _less_maximum(z)).sum(-1),
    "row numbers that are changed": _of_rows_changed,
    "row numbers that are changed in a view": _of_rows_changed_in_a_view,
    "row numbers that are flipped": _of_rows_flipped,
    "labels that are read twice": _with_labels_returned,
    "labels under an empty index": lambda z, y: z.log_softmax(-1).gather(-1, y[:, None][()]),
    "clamps": _clamped,
    "labels that stay broadcast": _of_broadcast_labels,
    "weighted by a constant entropy": _weighted_by_entropy,
    "weighted by a constant log-sum-exp": lambda z, y: z.detach().logsumexp(-1) * _log_prob(z, y),
    "mean of all classes": lambda z, y: z.log_softmax(-1).mean(-1) * _log_prob(z, y),
    "sum of constants": lambda z, y: z.detach().log_softmax(-1).sum(-1, keepdim=True) * _log_prob(z, y)[:, None],
    "mean less a constant log-sum-exp": lambda z, y: z.mean(-1) - z.detach().logsumexp(-1),
    "constant mean less the log-sum-exp": lambda z, y: _without_gradients(torch.mean, z, -1) - z.logsumexp(-1),
    "mean of constants less the log-sum-exp": lambda z, y: (z.detach() - z.logsumexp(-1, keepdim=True)).mean(-1),
    "mean of a factor": lambda z, y: (2 * z).mean(-1) - (z / 3).sum(-1) + _log_prob(z / 3, y),
    "mean of half of the rows": lambda z, y: z[:3].mean(-1).repeat(2) + _log_prob(z, y),
    "mean over the rows": lambda z, y: z.log_softmax(-1).mean(0).sum() + _log_prob(z, y),
    "mean of all classes and rows": lambda z, y: z.log_softmax(-1).mean() * _log_prob(z, y),
    "less the mean of the row": lambda z, y: _log_prob((z - z.mean(-1, keepdim=True)) / 0.7, y),
    "mean of probabilities": lambda z, y: (z.softmax(-1) * z).mean(-1) + z.softmax(-1).mean(-1),
    "exponential of the row's mean": lambda z, y: z.mean(-1).exp() * _log_prob(z, y),
}


# Behind thunderfx, what Dynamo makes of a program is what it makes for the backend.
ALL_FRONT_ENDS = {"thunder.jit": thunder_flce.jit, "torch.compile": partial(torch.compile, backend=compile_graph)}


@pytest.mark.parametrize("compiled", ALL_FRONT_ENDS.values(), ids=ALL_FRONT_ENDS)
def test_entropy_of_a_single_row(compiled):
    """Whose sum over everything is one over the classes; not so of several rows."""

    def program(hidden, weight):
        logits = F.linear(hidden, weight)
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()

    hidden, weight = tensors_for(program)
    step = compiled(program)
    torch.testing.assert_close(step(hidden[0, 0], weight), program(hidden[0, 0], weight))
    assert [decision.fused for decision in thunder_flce.explain(step).decisions] == [True]
    with pytest.warns(NotFusedWarning, match="by sum over other dimensions"):
        torch.testing.assert_close(step(hidden[0], weight), program(hidden[0], weight))


def _straight_through(logits, of_rows):
    """The logits; their gradients less what comes back through a number of each row."""
    return logits - of_rows(logits, -1, True) + of_rows(logits.detach(), -1, True)


BIAS = torch.arange(29, dtype=torch.float64)

# Of what cancels, or is detached, something is left in the gradient.
OF_GRADIENTS_ALONE = {
    "log-sum-exp": lambda z, y: (z.logsumexp(-1), z.mean(-1) - z.detach().logsumexp(-1)),
    "log-sum-exp and log-probability": lambda z, y: (z.logsumexp(-1), _log_prob(z, y) - z.detach().logsumexp(-1)),
    "entropy": lambda z, y: (-(z.softmax(-1) * z.log_softmax(-1)).sum(-1), (z.softmax(-1).detach() * z).sum(-1)),
    "mean before a softcap": lambda z, y: (_log_prob(3 * torch.tanh(_straight_through(z, torch.mean) / 3), y),),
    "mean before a bias": lambda z, y: ((_straight_through(z, torch.mean) + BIAS).logsumexp(-1),),
    "maximum before a softcap": lambda z, y: (_log_prob(3 * torch.tanh(_straight_through(z, torch.amax) / 3), y),),
}


@pytest.mark.parametrize("compiled", ALL_FRONT_ENDS.values(), ids=ALL_FRONT_ENDS)
@pytest.mark.parametrize("name", OF_GRADIENTS_ALONE)
@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
def test_parts_of_the_gradient_alone(name, compiled):
    labels = torch.arange(6)

    def program(hidden, weight):
        return OF_GRADIENTS_ALONE[name](F.linear(hidden, weight), labels)

    operands = [torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (6, 29)]
    results, expected = (
        torch.autograd.grad([each.dot(torch.arange(1.0, 7, dtype=each.dtype)) for each in step(*operands)], operands)
        for step in (compiled(program), program)
    )
    torch.testing.assert_close(results, expected)


def test_sums_over_classes_of_any_number():
    """Compile no more often than without us: a matrix of similarities is no head."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return compile_graph(graph, inputs)

    step = torch.compile(lambda a, b: (a @ b.T).log_softmax(-1).mean(-1).sum(), backend=counting)
    for count in (5, 7, 9, 6):
        a, b = torch.randn(2, count, 8, requires_grad=True)
        step(a, b).backward()
    assert len(graphs) == 2


CANCELLED = {
    "sum of centered logits": lambda z, y: (F.cross_entropy(z, y), (z - z.mean(-1, keepdim=True)).sum(-1)),
    "sum of a softmax": lambda z, y: (F.cross_entropy(z, y), z.softmax(-1).sum(-1)),
    "log-sum-exp of a log-softmax": lambda z, y: (F.cross_entropy(z, y), 2 * z.log_softmax(-1).logsumexp(-1)),
    "a log-probability less itself": lambda z, y: (-_log_prob(z, y).mean(), (_log_prob(z, y) - _log_prob(z, y)).exp()),
}


@pytest.mark.parametrize("compiled", ALL_FRONT_ENDS.values(), ids=ALL_FRONT_ENDS)
@pytest.mark.parametrize("name", CANCELLED)
def test_a_number_of_a_row_that_does_not_depend_on_the_logits(name, compiled):
    """As the ratio of an on-policy step has it."""
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((6, 8), (29, 8)))
    labels, found = torch.tensor([3, 28, 0, 11, 7, 7]), []

    def program(hidden, weight, labels):
        return CANCELLED[name](F.linear(hidden, weight), labels)

    for step in (program, compiled(program)):
        loss, other = step(hidden, weight, labels)
        found.append((loss, other, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


# One matcher decides. What thunder's traces have in another way than Dynamo's graphs goes through both.
IN_THUNDER = [name for name in LOOKALIKES if any(word in name for word in ("constant", "row", "label", "without"))]


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, "torch.compile") for name in LOOKALIKES), *((name, "thunder.jit") for name in IN_THUNDER)],
)
@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
def test_what_looks_like_a_reading(name, compiled):
    """Rows or labels in another order, and gradients that flow to a part of what is computed."""
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 8), (29, 8)))
    labels, factors, found = torch.tensor([3, 28, 0, 11, 7, 7]), torch.arange(1.0, 7), []

    def program(hidden, weight, labels, factors):
        losses = LOOKALIKES[name](F.linear(hidden, weight), labels)
        return (losses * factors.view(losses.shape)).sum()

    for run in (ALL_FRONT_ENDS[compiled](program), program):
        loss = run(hidden, weight, labels, factors)
        found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(*found)


def _labels_filled(logits, labels):
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None])
    labels.masked_fill_(labels == 7, 0)
    return log_probs.squeeze(-1)


def _labels_changed_before_the_difference(logits, labels):
    of_labels = logits.gather(-1, labels[:, None])
    log_sum = logits.logsumexp(-1, keepdim=True)
    labels[0] = 9
    return of_labels - log_sum


def _labels_in_one_buffer(logits, labels):
    buffer, found = torch.empty(2, 3, dtype=torch.int64), []
    for number, part in enumerate(logits.view(2, 3, -1)):
        buffer[number] = labels.view(2, 3)[number]
        found.append(part.log_softmax(-1).gather(-1, buffer[number][:, None])[:, 0])
        buffer[number] = 0
    return torch.stack(found)


def _labels_changed_before_the_sum(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    labels.mul_(0)
    return losses.sum()


def _labels_changed_before_the_weighted_sum(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    labels.mul_(0)
    return (losses * torch.arange(6.0)).sum()


def _labels_changed_between_chunks(logits, labels):
    found = []
    for part, of_part in zip(logits.chunk(2), labels.chunk(2), strict=True):
        found.append(F.cross_entropy(part, of_part, reduction="none"))
        labels.mul_(0)
    return torch.cat(found)


def _labels_masked_before(logits, labels):
    labels.masked_fill_(labels == 7, 0)
    return logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


@pytest.mark.parametrize("name", ["thunder.jit", "torch.compile"])
@pytest.mark.parametrize(
    "function",
    [
        _labels_filled,
        _labels_changed_before_the_difference,
        _labels_in_one_buffer,
        _labels_changed_before_the_sum,
        _labels_changed_before_the_weighted_sum,
        _labels_changed_between_chunks,
        _labels_masked_before,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
def test_labels_changed_in_place(function, name):
    """A region takes the place of the last operation, and would read them there. Eager has gradients of no others."""
    hidden, weight = torch.randn(6, 8), torch.randn(29, 8)

    def program(hidden, weight, labels):
        return function(F.linear(hidden, weight), labels.clone())

    labels = torch.tensor([3, 28, 0, 11, 7, 7])
    compiled = ALL_FRONT_ENDS[name](program)
    torch.testing.assert_close(compiled(hidden, weight, labels), program(hidden, weight, labels))
    found = thunder_flce.explain(compiled)
    decisions = [each for report in (found if isinstance(found, list) else [found]) for each in report.decisions]
    # A cross-entropy is where the labels are read, and its sum may follow.
    is_fused = function in (
        *(_labels_masked_before, _labels_changed_before_the_sum, _labels_changed_before_the_weighted_sum),
        _labels_changed_between_chunks,
    )
    assert decisions and all(decision.fused == is_fused for decision in decisions)


@pytest.mark.parametrize("compiled", ALL_FRONT_ENDS.values(), ids=ALL_FRONT_ENDS)
def test_other_tensors_changed_in_place(compiled):
    """Activations that come from the labels and the row numbers by an embedding: they share no memory with them."""

    def program(table, weight, labels):
        positions, rows = torch.arange(3), torch.arange(2)
        hidden = (F.embedding(labels, table) + F.embedding(positions, table)).relu_()
        log_probs = F.linear(hidden, weight).log_softmax(-1)
        parts = [row.gather(-1, y[:, None]).squeeze(-1) for row, y in zip(log_probs, labels, strict=True)]
        return (torch.stack(parts) + log_probs[rows[:, None], positions, labels]).sum()

    operands = [torch.randn(29, 8, requires_grad=True) for _ in range(2)]
    labels = torch.tensor([[3, 28, 0], [11, 7, 7]])
    run, results = compiled(program), []
    for function in (run, program):
        loss = function(*operands, labels)
        results.append([loss.detach(), *torch.autograd.grad(loss, operands)])
    torch.testing.assert_close(*results)
    found = thunder_flce.explain(run)
    decisions = [each for report in (found if isinstance(found, list) else [found]) for each in report.decisions]
    assert decisions and all(decision.fused for decision in decisions)


ONE_ROW = {
    "entropy": lambda z, y: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "entr": lambda z, y: torch.special.entr(z.softmax(-1)).sum(-1),
    "difference": lambda z, y: z.gather(-1, y)[0] - z.logsumexp(-1),
    "Categorical": lambda z, y: torch.distributions.Categorical(logits=z, validate_args=False).log_prob(y[0]),
}


@pytest.mark.parametrize("compiled", ALL_FRONT_ENDS.values(), ids=ALL_FRONT_ENDS)
@pytest.mark.parametrize("function", ONE_ROW.values(), ids=ONE_ROW)
def test_one_row_of_logits(function, compiled):
    """Hidden states (H,), and results without dimensions."""

    def program(hidden, weight, labels):
        return function(F.linear(hidden, weight), labels)

    operands = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((8,), (29, 8))]
    found, expected = (run(*operands, torch.tensor([11])) for run in (compiled(program), program))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(result, operands) for result in (found, expected)]
    torch.testing.assert_close(*gradients)
