"""The program that is printed is the region: evaluated by its words alone, it gives the loss and its gradients."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from program_interpreter import evaluate
from reference import composed, composed_of_several
from thunder_flce.execution.plan import (
    GradientsInForward,
    LossOnly,
    Plan,
    RecomputeLogits,
    SaveLogits,
    SaveSomeLogits,
)
from thunder_flce.graph.trace_printer import stage_lines
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.options import IGNORED_ROWS
from thunder_flce.planning.program import program, term_names

T, H, V = 50, 6, 37

# Several chunks and blocks, of different sizes.
PLANS: dict[str, Plan] = {
    "gradients in forward": GradientsInForward(chunk_rows=20),
    "gradients in forward, one chunk": GradientsInForward(chunk_rows=T),
    "gradients in forward, float32 dW": GradientsInForward(chunk_rows=20, float32_accumulator=True),
    "gradients in forward, float32 rows": GradientsInForward(chunk_rows=20, float32_rows=5),
    "gradients in forward, float32 logits": GradientsInForward(chunk_rows=20, float32_logits=True),
    "gradients in forward, first tokens staged": GradientsInForward(chunk_rows=20, float32_rows=5, staged=(12, 2)),
    "gradients in forward, all tokens staged": GradientsInForward(chunk_rows=T, staged=(T, 2)),
    "save logits": SaveLogits(),
    "save logits, float32": SaveLogits(float32_logits=True),
    "save some logits": SaveSomeLogits(saved_rows=15, chunk_rows=12, block_columns=16),
    # dX of the others is summed where dW of the first block will be.
    "save most logits": SaveSomeLogits(saved_rows=40, chunk_rows=12, block_columns=24),
    "recompute logits": RecomputeLogits(chunk_rows=20, block_columns=16),
    "recompute logits, one block": RecomputeLogits(chunk_rows=T, block_columns=V),
    "loss only": LossOnly(chunk_rows=20),
}


@dataclass(frozen=True)
class Case:
    """A loss, and what there is beside x, W and y."""

    loss: Loss = field(default_factory=Loss)
    bias: bool = False
    bias_grad: bool = True
    class_weight: bool = False
    num_items: float | None = None
    expected_gradient: bool = False
    targets: int | None = None
    terms: tuple[TermShape, ...] = (TermShape(hidden=H, input_grad=True, weight_grad=True),)
    token_inputs: int = 0


HEAD = TermShape(hidden=H, input_grad=True, weight_grad=True)
FROZEN = TermShape(hidden=H, input_grad=True, weight_grad=False)
ADAPTER = TermShape(hidden=2, input_grad=True, weight_grad=True)
OUTPUTS = ("log_prob", "valid_argmax", "entropy", "accuracy", "log_sum_exp", "mean_logit", "log_sum_sq_probs")
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 0.7, "vocab_size": V - 4}

CLIPPED_RATIO = (
    ("f0", "sub", ("log_prob", "i0")),
    ("f1", "exp", ("f0",)),
    ("f2", "clamp", ("f1", 0.8, 1.2)),
    ("f3", "mul", ("f1", "i1")),
    ("f4", "mul", ("f2", "i1")),
    ("f5", "minimum", ("f3", "f4")),
    ("f6", "neg", ("f5",)),
)
OF_EVERYTHING = (
    ("f0", "gt", ("entropy", "i0")),
    ("f1", "logical_not", ("f0",)),
    ("f2", "logsigmoid", ("log_prob",)),
    ("f3", "pow", ("entropy", 3)),
    ("f4", "div", ("f2", "f3")),
    ("f5", "where", ("f1", "f4", "log_prob")),
    ("f6", "detach", ("f5",)),
    ("f7", "abs", ("f6",)),
    ("f8", "add", ("f7", 1.5)),
    ("f9", "sqrt", ("f8",)),
    ("f10", "mul", ("f9", "f5")),
    ("f11", "mul", ("f10", "log_sum_exp")),
)

CASES = {
    "plain": Case(),
    "sum": Case(Loss(reduction="sum")),
    "none": Case(Loss(reduction="none")),
    "ignore_index in the vocabulary": Case(Loss(ignore_index=3)),
    "bias": Case(bias=True),
    "frozen bias": Case(bias=True, bias_grad=False),
    "class weights": Case(class_weight=True),
    "label smoothing": Case(Loss(label_smoothing=0.1)),
    "label smoothing, class weights, bias": Case(Loss(label_smoothing=0.1), class_weight=True, bias=True),
    "z-loss": Case(Loss(z_loss=0.01)),
    "z-loss of each row": Case(Loss(z_loss=0.01, reduction="none"), class_weight=True),
    "scale": Case(Loss(logit_scale=-0.5)),
    "softcap": Case(Loss(softcap=3.0, logit_scale=0.5), bias=True),
    "vocab_size": Case(Loss(vocab_size=20), bias=True),
    "num_items": Case(Loss(z_loss=0.01), num_items=7.0, class_weight=True),
    "no items": Case(num_items=0.0),
    "expected gradient": Case(Loss(z_loss=0.01), bias=True, expected_gradient=True),
    "argmax": Case(Loss(outputs=("argmax", "accuracy"), logit_scale=-1.5)),
    "values without gradients": Case(Loss(outputs=("mean_logit", "valid_argmax", "log_sum_sq_probs"), softcap=2.0)),
    "log_prob": Case(Loss(outputs=("log_prob",))),
    "entropy": Case(Loss(outputs=("entropy",), label_smoothing=0.2), class_weight=True, bias=True),
    "all outputs": Case(Loss(outputs=OUTPUTS, softcap=3.0), bias=True),
    "several targets": Case(Loss(softcap=3.0, logit_scale=0.5), targets=3),
    "the rest of several targets": Case(Loss(softcap=3.0, z_loss=0.01, target_rest=True), targets=3, bias=True),
    "token loss": Case(Loss(token_loss=CLIPPED_RATIO, reduction="sum"), token_inputs=2),
    "token loss with entropy": Case(
        Loss(token_loss=OF_EVERYTHING, z_loss=0.01, softcap=3.0, outputs=("accuracy",)), bias=True, token_inputs=1
    ),
    "adapter": Case(terms=(HEAD, ADAPTER)),
    "adapter beside a frozen head": Case(Loss(vocab_size=20), terms=(FROZEN, ADAPTER), bias=True),
    "frozen input": Case(terms=(TermShape(hidden=H, input_grad=False, weight_grad=True),)),
    "everything": Case(Loss(**EVERYTHING), bias=True, class_weight=True, terms=(HEAD, ADAPTER), num_items=11.0),
    "everything, each row": Case(
        Loss(**EVERYTHING, reduction="none", outputs=OUTPUTS), bias=True, class_weight=True, terms=(HEAD, ADAPTER)
    ),
}  # fmt: skip


def problem_of(case: Case, plan: Plan, *, tokens: int = T, vocab: int = V, dtype=torch.bfloat16) -> Problem:
    """The problem of a case, on CUDA in 16 bits, for which the most is printed."""
    needs_grad = not isinstance(plan, LossOnly)
    terms = case.terms
    if not needs_grad:
        terms = tuple(replace(term, input_grad=False, weight_grad=False) for term in terms)
    return Problem(
        tokens=tokens,
        terms=terms,
        vocab=case.loss.vocab_size or vocab,
        weight_rows=vocab,
        dtype=dtype,
        device_type="cuda",
        loss=case.loss,
        has_bias=case.bias,
        bias_grad=case.bias and case.bias_grad and needs_grad,
        has_class_weight=case.class_weight,
        has_num_items=case.num_items is not None,
        has_expected_gradient=case.expected_gradient,
        targets_per_token=case.targets,
        token_inputs=case.token_inputs,
        float32_logits=plan.float32_logits,
    )


def can_run(plan: Plan, case: Case) -> bool:
    """Whether a plan is one for such a loss."""
    if not isinstance(plan, GradientsInForward):
        return not case.loss.needs_gradients_in_forward or isinstance(plan, LossOnly)
    is_staged = plan.staged is not None
    can_stage = case.loss.is_plain and len(case.terms) == 1 and not (case.bias and case.bias_grad)
    return not case.loss.has_row_gradients and (can_stage or not is_staged)


def operands_of(problem: Problem, *, num_items: float | None, ignored: float) -> dict[str, torch.Tensor]:
    """Random operands in float64, by the names that the program prints."""
    rows, loss = problem.weight_rows, problem.loss
    names = {}
    for number, term in enumerate(problem.terms):
        x, weight = term_names(number)
        names[x] = torch.randn(problem.tokens, term.hidden, dtype=torch.float64).requires_grad_(term.input_grad)
        names[weight] = torch.randn(rows, term.hidden, dtype=torch.float64).requires_grad_(term.weight_grad)
    several = () if problem.targets_per_token is None else (problem.targets_per_token,)
    target = torch.randint(0, problem.vocab, (problem.tokens, *several))
    if 0 <= loss.ignore_index:
        target[target == loss.ignore_index] = 0
    target[torch.randperm(problem.tokens)[: round(ignored * problem.tokens)]] = loss.ignore_index
    if several:
        names["q"] = torch.rand(target.shape, dtype=torch.float64)
        target[torch.rand(target.shape) < ignored] = loss.ignore_index
        target[:, 1] = target[:, 0]
    names["y"] = target
    if problem.has_bias:
        names["b"] = torch.randn(rows, dtype=torch.float64).requires_grad_(problem.bias_grad)
    if problem.has_class_weight:
        names["w"] = torch.rand(rows, dtype=torch.float64)
    for number in range(problem.token_inputs):
        names[f"i{number}"] = torch.randn(problem.tokens, dtype=torch.float64)
    if num_items is not None:
        names["num_items"] = torch.tensor(num_items, dtype=torch.float64)
    if problem.has_expected_gradient:
        names["expected_gradient"] = torch.tensor(-0.3, dtype=torch.float64)
    return names


def upstream_of(loss: Loss, tokens: int) -> dict[str, torch.Tensor]:
    """Random upstream gradients."""
    shape = (tokens,) if loss.reduction == "none" else ()
    names = ["grad", *(f"{name}_grad" for name in loss.outputs if name in DIFFERENTIABLE_OUTPUTS)]
    return {name: torch.randn(shape if name == "grad" else (tokens,), dtype=torch.float64) for name in names}


def eager(problem: Problem, operands: dict[str, torch.Tensor], upstream: dict[str, torch.Tensor]):
    """Eager PyTorch: the loss and the outputs by name, and the gradients by name."""
    pairs = [term_names(number) for number in range(len(problem.terms))]
    logits = sum(F.linear(operands[x], operands[weight]) for x, weight in pairs)
    logits = logits + operands["b"] if problem.has_bias else logits
    if "q" in operands:
        results = composed_of_several(logits, operands["y"], operands["q"], problem.loss)
    else:
        given = {"class_weight": operands.get("w"), "num_items": operands.get("num_items")}
        given |= {"token_inputs": [operands[f"i{number}"] for number in range(problem.token_inputs)]}
        given |= {name: value for name, value in vars(problem.loss).items() if name != "target_rest"}
        results = composed(logits, operands["y"], **given)
    named = dict(zip(("loss", *problem.loss.outputs), results if problem.loss.outputs else (results,), strict=True))
    # What needs a gradient, by the name of the gradient.
    needing = {f"d{name}": tensor for name, tensor in operands.items() if tensor.requires_grad}
    gradients = ()
    if needing:
        differentiable = [named[name.removesuffix("_grad")] if name != "grad" else named["loss"] for name in upstream]
        gradients = torch.autograd.grad(differentiable, [*needing.values()], [*upstream.values()])
    return named, dict(zip(needing, gradients, strict=True))


def interpreted(problem: Problem, plan: Plan, operands: dict, upstream: dict, *, check_types: bool) -> dict[str, Any]:
    """What the printed program gives, by name."""

    def as_printed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        of_columns = {name: tensor.detach()[None] for name, tensor in tensors.items() if name in ("b", "w")}
        plain = {name: tensor.detach() for name, tensor in tensors.items() if name not in of_columns}
        return of_columns | {name: tensor[:, None] if tensor.ndim == 1 else tensor for name, tensor in plain.items()}

    found = program(problem, plan)
    names = as_printed(operands)
    evaluate(stage_lines(found.forward), names, problem.vocab, check_types=check_types)
    if isinstance(plan, LossOnly):
        assert not found.backward
        return names
    # What the forward returns, and what it saves: of its logits, those of the first rows.
    results = {name: names[name] for name in ("loss", *problem.loss.outputs)}
    saved = {name: names[name] for name in ("row_max", "row_log_sum", "valid_count")}
    if isinstance(plan, GradientsInForward):
        saved |= {name: tensor for name, tensor in names.items() if name in _gradient_names(problem)}
        saved |= {name: names[name] for name in ("expected_gradient",) if name in names}
        backward = saved | as_printed(upstream)
    else:
        saved |= {name: names[name] for name in ("entropy",) if name in problem.loss.outputs}
        saved_rows = {SaveLogits: problem.tokens, SaveSomeLogits: getattr(plan, "saved_rows", 0)}.get(type(plan), 0)
        if saved_rows:
            saved |= {name: names[name][:saved_rows] for name in ("z", "logits") if name in names}
        backward = as_printed(operands) | saved | as_printed(upstream)
    evaluate(stage_lines(found.backward), backward, problem.vocab, check_types=check_types)
    return results | {name: backward[name] for name in _gradient_names(problem)}


def _gradient_names(problem: Problem) -> list[str]:
    names = ["db"] if problem.bias_grad else []
    for number, term in enumerate(problem.terms):
        x, weight = term_names(number)
        names += [f"d{x}"] * term.input_grad + [f"d{weight}"] * term.weight_grad
    return [name if name == "db" else f"d{name[1].upper()}{name[2:]}" for name in names]


def assert_program_is_the_region(problem: Problem, plan: Plan, *, num_items: float | None, ignored: float) -> None:
    operands = operands_of(problem, num_items=num_items, ignored=ignored)
    upstream = upstream_of(problem.loss, problem.tokens)
    results, gradients = eager(problem, operands, upstream)
    got = interpreted(problem, plan, operands, upstream, check_types=not ignored)
    for name, right in results.items():
        torch.testing.assert_close(got[name].reshape(right.shape), right, msg=lambda text, n=name: f"{n}: {text}")
    for name, right in gradients.items():
        name = name if name == "db" else f"d{name[1].upper()}{name[2:]}"
        torch.testing.assert_close(got[name].reshape(right.shape), right, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("plan", "case"), [(plan, case) for plan in PLANS for case in CASES if can_run(PLANS[plan], CASES[case])]
)
def test_the_printed_program_is_the_region(plan, case):
    """For each way to treat ignored rows, with some rows ignored; with none, the printed sizes are those of the run."""
    plan, case = PLANS[plan], CASES[case]
    for ignored_rows in IGNORED_ROWS:
        plan = replace(plan, ignored_rows=ignored_rows)
        problem = problem_of(case, plan)
        for ignored in (0.0, 0.4) if ignored_rows == "skip" else (0.4,):
            assert_program_is_the_region(problem, plan, num_items=case.num_items, ignored=ignored)


@pytest.mark.parametrize("ignored_rows", IGNORED_ROWS)
@pytest.mark.parametrize("plan", PLANS)
def test_without_a_valid_target_gradients_are_zeros(plan, ignored_rows):
    """And the mean over nothing is NaN."""
    plan = replace(PLANS[plan], ignored_rows=ignored_rows)
    problem = problem_of(Case(), plan)
    operands = operands_of(problem, num_items=None, ignored=1.0)
    got = interpreted(problem, plan, operands, upstream_of(problem.loss, T), check_types=False)
    assert got["loss"].isnan()
    gradients = {name: got[name] for name in _gradient_names(problem)}
    assert {name: tuple(tensor.shape) for name, tensor in gradients.items()} == (
        {} if isinstance(plan, LossOnly) else {"dX": (T, H), "dW": (V, H)}
    )
    assert not any(tensor.any() for tensor in gradients.values())


@st.composite
def small_plans(draw) -> Plan:
    """Any plan, with chunks and blocks of any size."""
    rows, columns = st.integers(1, 30), st.integers(1, 30)
    kind = draw(st.sampled_from((GradientsInForward, SaveLogits, SaveSomeLogits, RecomputeLogits, LossOnly)))
    if kind is GradientsInForward:
        staged = draw(st.one_of(st.none(), st.tuples(rows, st.integers(2, 3))))
        return kind(chunk_rows=draw(rows), staged=staged, float32_rows=draw(st.sampled_from((0, 2, 5))))
    sizes = {"chunk_rows": rows, "block_columns": columns, "saved_rows": rows}
    return kind(**{name: draw(size) for name, size in sizes.items() if name in {f.name for f in fields(kind)}})


@settings(max_examples=100, deadline=None)
@given(
    plan=small_plans(),
    case=st.sampled_from([case for name, case in CASES.items() if case.loss.vocab_size is None]),
    tokens=st.integers(4, 40),
    vocab=st.integers(24, 40),
    ignored=st.sampled_from((0.0, 0.5)),
)
def test_the_printed_program_is_the_region_for_any_sizes(plan, case, tokens, vocab, ignored):
    """Such as chunks of as many tokens as there are columns, or of a single one."""
    if isinstance(plan, GradientsInForward) and not can_run(plan, case):
        plan = replace(plan, staged=None)
    assume(can_run(plan, case))
    if isinstance(plan, SaveSomeLogits):
        plan = replace(plan, saved_rows=min(plan.saved_rows, tokens - 1))
    elif isinstance(plan, GradientsInForward) and plan.staged:
        plan = replace(plan, staged=(min(plan.staged[0], tokens), plan.staged[1]))
    problem = problem_of(case, plan, tokens=tokens, vocab=vocab)
    assert_program_is_the_region(problem, plan, num_items=case.num_items, ignored=ignored)
