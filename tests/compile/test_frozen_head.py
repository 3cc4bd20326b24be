"""A frozen head: each row's gradient is computed in the forward, whatever its upstream gradient will be."""

import pytest
import thunder
import torch
import torch.nn.functional as F

import test_patterns  # noqa: F401 (finds traces/patterns.py)
import thunder_flce
from reference import eager, error, make_case, truth
from reference import ours as ours_of
from test_plan import H200
from test_plan import call as a_call
from test_readings import regions, tensors_for
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine.choose import choose, strategy_of
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss

import patterns  # isort: skip

TARGET = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
TARGET[0, :3] = -100
WAYS = {
    "eager": lambda function: function,
    "thunder": thunder_flce.jit,
    "torch.compile": lambda function: torch.compile(function, backend="aot_eager", fullgraph=True),
}


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 16, 24, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.randn(40, 24, generator=generator).mul(0.3).to(dtype)


def test_gradients_are_rounded_once():
    """The gradient for an upstream gradient of 1 is not rounded to 16 bits before it is multiplied by 1.5."""
    case = make_case(tokens=64, hidden=64, vocab=1000, dtype=torch.bfloat16, scale=0.1)
    case.weight = case.weight.detach()
    upstream = torch.full((64,), 1.5)
    exact = truth(case, upstream, reduction="none").gradients[0]
    found = ours_of(case, upstream, reduction="none").gradients[0]
    theirs = eager(case, upstream, reduction="none").gradients[0]
    assert error(found, exact) < 1.1 * error(theirs, exact)


@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_outputs_that_are_only_logged(compiled, frozen):
    """The loss has its gradients in the forward, as without them."""
    hidden, head = operands()
    needing = (hidden,) if frozen else (hidden, head.requires_grad_())
    reduction = "none" if frozen else "mean"

    def function(hidden, head):
        settings = {"reduction": reduction, "outputs": ("entropy",), "detached": ("entropy",)}
        return linear_cross_entropy(hidden, head, TARGET, **settings)

    jitted = compiled(function)
    loss, entropy = jitted(hidden, head)
    log_probs = F.linear(hidden, head).log_softmax(-1)
    right = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(entropy, torch.where(TARGET == -100, 0, right).detach())
    # thunder says that all of its results require a gradient.
    assert compiled is thunder_flce.jit or not entropy.requires_grad
    got = torch.autograd.grad(loss.sum(), needing)
    right = F.cross_entropy(F.linear(hidden, head).flatten(0, 1), TARGET.flatten(), reduction=reduction).sum()
    torch.testing.assert_close(got, torch.autograd.grad(right, needing))
    if compiled is thunder_flce.jit:
        assert regions(jitted)[0]["strategy"] == "gradients_in_forward"
    with pytest.raises(ValueError, match=r"detached must be a tuple of outputs that could have a gradient, here \[\]"):
        linear_cross_entropy(hidden, head, TARGET, outputs=("argmax",), detached=("argmax",))


def call(**changes) -> Call:
    """The shape of a preference loss."""
    return a_call(8192, 151936, 4096, **{"needs_grad": ("input",), "loss": Loss(reduction="none"), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"needs_grad": ("input", "linear_weight")},
        {"bias": True},
        {"loss": Loss(reduction="none", label_smoothing=0.1)},
        {"loss": Loss(reduction="none", z_loss=0.1)},
        {"loss": Loss(reduction="none", outputs=("entropy",))},
        {"rank": 8},
    ],
    ids=str,
)
def test_what_has_no_unit_gradient(changes):
    of = call(**changes)
    assert choose(of, Options(memory_budget=10**9), H200).strategy != "gradients_in_forward"
    assert strategy_of(of, Options()) == "recompute_logits"
    with pytest.raises(ValueError, match="needs a frozen weight and bias, no further terms, no label smoothing"):
        choose(of, Options(strategy="gradients_in_forward"), H200)


@pytest.mark.parametrize(
    ("program", "waits"),
    [
        (patterns.preference_loss, True),
        (patterns.entropy_as_verl_has_it, False),
        (patterns.clipped_ratio_with_entropy, False),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_in_a_trace(program, waits):
    """What mixes tokens waits for the upstream gradient of each row; a sum over them does not."""
    hidden, weight, tokens = tensors_for(program)
    weight = weight.detach()
    jitted = thunder_flce.jit(program)
    losses = [function(hidden, weight, tokens) for function in (jitted, program)]
    losses = [loss[0] if isinstance(loss, tuple) else loss for loss in losses]
    got, right = (torch.autograd.grad(loss, hidden) for loss in losses)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    (region,) = regions(jitted)
    assert region["strategy"] == "gradients_in_forward"
    backward = thunder.last_backward_traces(jitted)[-1].python()
    assert ("    each row" in backward) == waits
