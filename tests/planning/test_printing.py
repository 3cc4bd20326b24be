"""The printed lines of a call are those of the primitives that it runs, in their order."""

import itertools
from dataclasses import replace

import pytest
import torch

from reference import differentiate, make_case, run_by
from test_plan import call as a_call
from test_plan import shard_of
from thunder_flce import Options
from thunder_flce.calls import run
from thunder_flce.engine import printing
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.primitives import Primitives
from thunder_flce.operation.call import Call, Spec, argument, named_tensors
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import Loss

BF16 = torch.bfloat16
PRINTED = (
    "select_rows", "select_rows_again", "logits_", "one_pass_", "results", "gradient_", "start_input_gradient",
    "weight_gradient_", "rounded", "divergence_", "loss", "scaled_rows",
)  # fmt: skip


@pytest.fixture
def called(monkeypatch):
    """The names of the primitives that a run calls, and that printing calls, by their class."""
    names = {Primitives: [], printing._Writer: []}

    def logged(kind, name, run):
        def call(ops, *arguments, **settings):
            if type(ops) is kind:
                names[kind].append(name)
            return run(ops, *arguments, **settings)

        return call

    for kind, name in itertools.product(names, PRINTED):
        monkeypatch.setattr(kind, name, logged(kind, name, getattr(kind, name)))
    return names


IN_FORWARD = Plan(strategy="gradients_in_forward", chunk_rows=10)
RECOMPUTE = Plan(strategy="recompute_logits", chunk_rows=10)
# The plan, then arguments of `make_case` and of the loss.
CASES = {
    "one chunk": (replace(IN_FORWARD, chunk_rows=64), {}, {}),
    "chunks": (IN_FORWARD, {}, {}),
    "bias": (IN_FORWARD, {"bias": True}, {}),
    "terms": (IN_FORWARD, {"ranks": (4, 9)}, {}),
    "terms in 16 bits": (IN_FORWARD, {"ranks": (2, 9), "dtype": BF16}, {}),
    "float32 accumulator": (replace(IN_FORWARD, float32_accumulator=True), {"dtype": BF16}, {}),
    "frequent rows": (replace(IN_FORWARD, float32_rows=5), {"dtype": BF16}, {}),
    "float32 logits": (replace(IN_FORWARD, float32_logits=True), {"dtype": BF16}, {}),
    "batch invariant": (replace(IN_FORWARD, batch_invariant=True), {}, {}),
    "save logits": (Plan(strategy="save_logits"), {"bias": True}, {}),
    "save some logits": (Plan(strategy="save_logits", saved_rows=14, chunk_rows=10), {}, {"reduction": "none"}),
    "recompute logits": (RECOMPUTE, {}, {"reduction": "none", "label_smoothing": 0.1}),
    "outputs": (RECOMPUTE, {}, {"outputs": ("entropy", "argmax"), "z_loss": 0.1}),
    "loss only": (Plan(strategy="loss_only", chunk_rows=10), {}, {}),
    "divergence": (replace(IN_FORWARD, float32_logits=True), {"dtype": BF16}, {"divergence": Divergence()}),
    "divergence of each row": (RECOMPUTE, {}, {"divergence": Divergence(kind="jensen_shannon"), "reduction": "none"}),
    "frozen head": (IN_FORWARD, {}, {"reduction": "none"}),
    "weight alone": (IN_FORWARD, {}, {}),
}
FROZEN = {"frozen head": "linear_weight", "weight alone": "input"}


@pytest.mark.parametrize("ignored_rows", ["skip", "compute"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_runs_the_printed_primitives(name, ignored_rows, called, monkeypatch):
    (plan, sizes, settings), frozen = CASES[name], FROZEN.get(name)
    plan, case = replace(plan, ignored_rows=ignored_rows), make_case(**sizes, ignored=0.0)
    run_by(monkeypatch, plan)
    operands = {"input": case.x, "linear_weight": case.weight, "target": case.target, "linear_bias": case.bias}
    if "divergence" in settings:
        operands |= {"teacher_input": case.x.detach(), "teacher_weight": case.weight.detach()}
        operands["label_weights"] = torch.rand(case.target.shape)
    tensors, loss = named_tensors({**operands, "terms": case.terms}), Loss(**settings)
    for operand, tensor in tensors.items():
        tensor.requires_grad_(argument(operand).differentiable and operand != frozen and plan.strategy != "loss_only")
    results = run(Call(tensors=tensors, loss=loss), Options())
    differentiate(results if loss.outputs else results[0], case, None, loss.outputs)
    needs_grad = tuple(operand for operand, tensor in tensors.items() if tensor.requires_grad)
    program = printing.program(Call(tensors=tensors, loss=loss, needs_grad=needs_grad).specs(), plan)
    assert called[printing._Writer] == called[Primitives] != []
    is_scaled = plan.finishes_in_forward and frozen != "linear_weight"
    assert sum(" *= grad" in line for line in program.backward) == (len(needs_grad) if is_scaled else 0)
    assert max(map(len, program.forward + program.backward)) <= printing.WIDTH


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("outputs", [(), ("entropy",)])
def test_the_longest_lines_fit(softcap, outputs):
    """All terms of a gradient that stays in new memory, of many tokens in one chunk."""
    call = Call.of_mean(16384, 128256, 4096, dtype=BF16, device=torch.device("cuda"))
    bias = Spec((128256,), BF16, call.device)
    loss = Loss(reduction="none", label_smoothing=0.1, softcap=softcap, outputs=outputs)
    needs_grad = ("input", "linear_weight", "linear_bias")
    call = Call(tensors={**call.tensors, "linear_bias": bias}, loss=loss, needs_grad=needs_grad)
    program = printing.program(call, replace(RECOMPUTE, chunk_rows=16384, float32_logits=True))
    assert max(map(len, program.forward + program.backward)) <= printing.WIDTH


@pytest.mark.parametrize(("tokens", "title"), [
    (5000, "for each chunk of C tokens (1 × 2048, 1 × 1536, 1 × 1416):"),
    (3000, "for each chunk of C tokens (1 × 2048, 1 × 952):"),
    (2000, None),
])  # fmt: skip
def test_chunks_of_other_sizes(tokens, title):
    """If the host waits for the number of rows, the first chunk is as large as it may be."""
    program = printing.program(a_call(tokens=tokens), replace(IN_FORWARD, chunk_rows=2048))
    assert [line for line in program.forward if line.startswith("for ")] == ([title] if title else [])
    sums = [line.split(" dlogits")[0].strip() for line in program.forward if line.strip().startswith("dW")]
    assert sums == [f"dW bf16[128256, 4096] {'+=' if title else '='}"]


@pytest.mark.parametrize("divides_tokens", [False, True])
def test_what_ranks_exchange(divides_tokens):
    shard = shard_of(2, 100, sequence_parallel=divides_tokens)
    program = printing.program(a_call(12, 100, 8, shard=shard), replace(IN_FORWARD, chunk_rows=12))
    exchanged = ["row_max, row_log_sum = combined over the ranks", "dX bf16[12, 8] = summed over the ranks"]
    if divides_tokens:
        exchanged = ["y i64[12] = all_gather(y)", "x bf16[12, 8] = all_gather(x)", *exchanged]
    assert [line.removesuffix("NCCL").strip() for line in program.forward if line.endswith("NCCL")] == exchanged
