"""The ways to write a loss (traces/patterns.py): fused or not as it says there, with the results of eager PyTorch."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import thunder
import torch
from thunder.core.proxies import TensorProxy

import thunder_flce
from front_ends import COMPILERS, assert_fused, assert_same, decisions, run, symbols
from reference import doubled, error
from thunder_flce import NotFusedError, NotFusedWarning
from thunder_flce.inspection import programs

sys.path.insert(0, str(Path(__file__).parents[2] / "traces"))

import patterns  # noqa: E402
import regenerate  # noqa: E402
from patterns import SIZES  # noqa: E402

TABLE = (regenerate.FOLDER / "patterns.md").read_text(encoding="utf-8").splitlines()


def _arguments(program, dtype=torch.float32):
    tensors = programs.arguments(program, SIZES, device="cpu", dtype=dtype)
    for name, tensor in zip(program.__code__.co_varnames, tensors, strict=False):
        if name == "labels":
            tensor[0, :5] = -100
        if name == "tokens":
            # One less is a label that counts from the end.
            tensor[0, 0] = 0
        if name == "weight":
            tensor.data.mul_(0.3)
    return tensors


def _largest_with_vocabulary(jitted):
    """Elements of the largest tensor in the final traces that has the vocabulary as one of its dimensions."""
    traces = [traces[-1] for traces in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted)) if traces]
    proxies = (proxy for trace in traces for bsym in symbols(trace) for proxy in bsym.flat_proxy_outs)
    return max((p.numel for p in proxies if isinstance(p, TensorProxy) and SIZES.vocab in p.shape), default=0)


def _assert_in_table(program, decisions):
    """Asserts that the table has the decisions on a program, unless it was printed with other versions."""
    if f"{regenerate.versions()}." in TABLE:
        printed = [row for row in TABLE if row.startswith(f"| `{program.__name__}` ")]
        assert printed == patterns.table_rows(program, decisions), "run `python traces/regenerate.py --device cpu`"


def test_table_has_every_program():
    printed = re.findall(r"^\| `(\w+)`", "\n".join(TABLE), re.MULTILINE)
    assert list(dict.fromkeys(printed)) == [program.__name__ for program in (*patterns.FUSED, *patterns.NOT_FUSED)]


# Those that cast something themselves, and one of each kind of the others: Dynamo traces each program once.
IN_BFLOAT16 = [
    *(program for program in patterns.FUSED if re.search(r"float|dtype|\.to\(|type_as", inspect.getsource(program))),
    *(patterns.flattened, patterns.divided, patterns.label_smoothing, patterns.class_weights),
    *(patterns.low_rank_adapter, patterns.predictions_returned, patterns.weighted_tokens),
    *(patterns.log_probability_indexed, patterns.probability_gathered, patterns.entropy_beside_cross_entropy),
    *(patterns.log_softmax_gathered, patterns.preference_loss, patterns.clipped_ratio_with_entropy),
    *(patterns.entropy_as_verl_has_it, patterns.mean_logit_beside_cross_entropy, patterns.label_smoothing_by_hand),
]


@pytest.mark.parametrize(("program", "compiler"), [
    pytest.param(program, compiler, id=f"{program.__name__}-{compiler}")
    for program in patterns.FUSED
    for compiler in ("thunder.jit", *(["backend"] if program not in IN_BFLOAT16 else []))
])  # fmt: skip
def test_fused(program, compiler):
    tensors, compiled = _arguments(program), COMPILERS[compiler](program)
    assert_same(compiled, program, tensors, rtol=1e-4, atol=1e-5)
    assert_fused(compiled)
    if compiler == "thunder.jit":
        _assert_in_table(program, decisions(compiled))
        # Weights and their gradients are smaller than half of the logits.
        assert _largest_with_vocabulary(compiled) < SIZES.tokens // 2 * SIZES.vocab


@pytest.mark.parametrize("program", IN_BFLOAT16, ids=lambda program: program.__name__)
def test_fused_in_bfloat16(program):
    """Against float64. Eager rounds a log_softmax of 16 bits, and we do not."""
    tensors = _arguments(program, dtype=torch.bfloat16)
    compiled = COMPILERS["backend"](program)
    runs = (run(compiled, tensors), run(program, tensors), run(program, [*map(doubled, tensors)]))
    assert_fused(compiled)
    for fused, eager, exact in zip(*((outputs[0], *gradients) for outputs, gradients in runs), strict=True):
        assert fused.dtype == eager.dtype
        assert error(fused, exact) <= 1.25 * error(eager, exact) + 2**-8, (error(fused, exact), error(eager, exact))


@pytest.mark.parametrize("compiler", ["thunder.jit", "backend"])
@pytest.mark.parametrize("program", patterns.NOT_FUSED, ids=lambda program: program.__name__)
def test_not_fused(program, compiler):
    if program is patterns.changed_in_place and compiler == "backend":
        pytest.skip("Dynamo's graph has changes out of place")
    tensors, compiled = _arguments(program), COMPILERS[compiler](program)
    copies = [tensor.clone() if tensor.is_floating_point() else tensor for tensor in tensors]
    with pytest.warns(NotFusedWarning, match="not fused, because"):
        outputs, _ = run(compiled, copies)
    torch.testing.assert_close(outputs, run(program, tensors)[0], rtol=1e-4, atol=1e-5)
    assert patterns.NOT_FUSED[program] in {decision.reason for decision in decisions(compiled)}
    if compiler == "thunder.jit":
        _assert_in_table(program, decisions(compiled))


@pytest.mark.parametrize("program", [patterns.shift_by_slices, patterns.log_softmax_by_logsumexp])
def test_symbolic_values_are_not_fused(program):
    """thunder's cache with symbolic values has no shapes to plan with."""
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program, cache="symbolic values")
    with pytest.warns(NotFusedWarning, match="not known when the trace is compiled"):
        results = run(jitted, tensors)
    torch.testing.assert_close(results, run(program, tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("compiler", "strict"), [("thunder.jit", {"strict": True}), ("backend", {"options": {"strict": True}})]
)
def test_strict_raises_what_would_be_a_warning(compiler, strict):
    """With source and reason, and again at the next call, since nothing was compiled."""
    program = patterns.logits_used_by_another_loss
    compiled = COMPILERS[compiler](program, **strict)
    for _ in range(2):
        with pytest.raises(NotFusedError, match=r"patterns.py:\d+: not fused, because .* used elsewhere .by square"):
            compiled(*_arguments(program))
