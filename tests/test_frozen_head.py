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
CLASS_WEIGHT = torch.linspace(0, 2, 40)
UPSTREAM = torch.linspace(-1, 2, 32).view(2, 16)
WAYS = {
    "eager": lambda function: function,
    "thunder": thunder_flce.jit,
    "torch.compile": lambda function: torch.compile(function, backend="aot_eager", fullgraph=True),
}


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 16, 24, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.randn(40, 24, generator=generator).mul(0.3).to(dtype)


def ours(hidden, head, *, reduction, outputs, class_weights=False, **settings):
    settings |= {"reduction": reduction, "outputs": outputs, "weight": CLASS_WEIGHT if class_weights else None}
    results = linear_cross_entropy(hidden, head, TARGET, **settings)
    loss, *others = results if outputs else (results,)
    total = (loss * UPSTREAM).sum() if reduction == "none" else loss * 1.7
    return total + (others[0] * UPSTREAM.square()).sum() if outputs else total


def exact(hidden, head, *, reduction, outputs, class_weights=False, softcap=None, logit_scale=1.0):
    logits = F.linear(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32)) * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits.flatten(0, 1), TARGET.flatten(), CLASS_WEIGHT if class_weights else None, reduction=reduction
    )
    total = (loss.view(TARGET.shape) * UPSTREAM).sum() if reduction == "none" else loss * 1.7
    log_prob = logits.log_softmax(-1).gather(-1, TARGET.clamp(min=0)[..., None]).squeeze(-1)
    return total + (log_prob * UPSTREAM.square())[TARGET >= 0].sum() if outputs else total


def test_gradients_are_rounded_once():
    """The gradient for an upstream gradient of 1 is not rounded to 16 bits before it is multiplied by 1.5."""
    case = make_case(tokens=64, hidden=64, vocab=1000, dtype=torch.bfloat16, scale=0.1)
    case.weight = case.weight.detach()
    upstream = torch.full((64,), 1.5)
    exact = truth(case, upstream, reduction="none").gradients[0]
    found = ours_of(case, upstream, reduction="none").gradients[0]
    theirs = eager(case, upstream, reduction="none").gradients[0]
    assert error(found, exact) < 1.1 * error(theirs, exact)


CASES = {
    "none": {"reduction": "none", "outputs": ()},
    "log_prob": {"reduction": "none", "outputs": ("log_prob",)},
    "mean and log_prob": {"reduction": "mean", "outputs": ("log_prob", "argmax")},
    "sum, class weights": {"reduction": "sum", "outputs": ("log_prob",), "class_weights": True},
    "softcap": {"reduction": "none", "outputs": ("log_prob",), "softcap": 3.0, "logit_scale": 0.5},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way, settings):
    """Twice, over a graph that is kept; the chunks and ignored rows are those of the option."""
    hidden, head = operands()
    expected = torch.autograd.grad(exact(hidden, head, **settings), hidden)
    for options in (None, Options(chunk_rows=7), Options(ignored_rows="compute")):
        if options is not None and way == "thunder":
            continue
        given = settings if options is None else {**settings, "options": options}
        loss = WAYS[way](lambda hidden, given=given: ours(hidden, head, **given))(hidden)
        torch.testing.assert_close(loss, exact(hidden, head, **settings))
        for again in (True, False):
            torch.testing.assert_close(torch.autograd.grad(loss, hidden, retain_graph=again), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_as_exact_as_eager(dtype):
    """Rounded twice: once for an upstream gradient of 1, and once for that which comes."""
    case = make_case(tokens=256, vocab=300, hidden=64, dtype=dtype, device="cpu", ignored=0.0)
    upstream = torch.randn(256)
    weight = case.weight.detach()

    def gradient(function, x, weight):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((function(x, weight) * upstream).sum(), x)[0]

    def eager(x, weight):
        logits = F.linear(x, weight)
        return F.cross_entropy(
            logits.double() if x.dtype is torch.float64 else logits.float(), case.target, reduction="none"
        )

    right = gradient(eager, case.x.double(), weight.double())
    got = gradient(lambda x, w: linear_cross_entropy(x, w, case.target, reduction="none"), case.x, weight)
    assert error(got, right) <= 1.25 * error(gradient(eager, case.x, weight), right)


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
