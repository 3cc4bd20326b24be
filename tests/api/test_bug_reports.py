"""What users of other fused losses have reported, where no property draws it: a test each, which the bug would fail."""

import itertools
import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_flce
from reference import Case, assert_as_exact_as_eager, error, make_case, ours, run_inside, truth
from thunder_flce import NotFusedWarning, Options, linear_cross_entropy, linear_kl_divergence
from thunder_flce.options import STRATEGIES

ON_EVERY_BACKEND = True
IN_BACKWARD = ("save_logits", "recompute_logits")
TILE = 128


class _LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = run_inside(self, func, args, kwargs)
        made = "empty" in func.__name__ or "zeros" in func.__name__ or func.__name__.startswith(("mm", "addmm", "_to"))
        if made and isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def _largest_tensor(case: Case, **settings) -> int:
    with _LargestTensor() as largest:
        ours(case, **settings)
    return largest.elements


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_frozen_operands(reduction, needs, device):
    """PrimeIntellect-ai/prime-rl#3011: a frozen head still pays for its gradient; head-only training gets none."""
    case = make_case(tokens=16, hidden=64, vocab=300, device=device, bias=True)
    for tensor, needed in zip(case.operands(), needs, strict=True):
        tensor.requires_grad_(needed)
    assert_as_exact_as_eager(case, reduction=reduction, factor=1.5, tiny=True)
    if not needs[1] and device == "cpu":
        assert _largest_tensor(case, reduction=reduction) < case.weight.numel()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("vocab", [TILE - 1, TILE, TILE + 1, 1009, 129920])
def test_log_probabilities_of_low_logits(vocab, strategy, device):
    """verl-project/verl#2656: log-probabilities above 0, as zeros that pad the vocabulary add exp(0)."""
    case = make_case(tokens=5, hidden=4, vocab=vocab, device=device, bias=True, ignored=0.0)
    with torch.no_grad():
        case.bias.fill_(-60.0)
    result = ours(case, options=Options(strategy=strategy), reduction="sum")
    assert error(result.loss, truth(case, reduction="sum").loss) < 1e-6
    log_prob = ours(case, outputs=("log_prob",)).outputs[0]
    assert (log_prob <= 0).all() and error(log_prob, truth(case, outputs=("log_prob",)).outputs[0]) < 1e-6


@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("vocab", [TILE - 1, TILE, TILE + 1, 1009])
def test_padding_under_a_softcap(vocab, softcap, device):
    """unslothai/unsloth#10616: padding of -inf becomes -softcap, which has a probability."""
    case = make_case(tokens=5, hidden=4, vocab=vocab, device=device, bias=True, ignored=0.0)
    with torch.no_grad():
        case.bias.fill_(-100.0)
    for strategy in STRATEGIES:
        assert_as_exact_as_eager(case, softcap=softcap, options=Options(strategy=strategy), tiny=True)
    case.target.clamp_(max=vocab - 3)
    assert_as_exact_as_eager(case, softcap=softcap, vocab_size=vocab - 2, tiny=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bias_is_added_once(strategy, device):
    """apple/ml-cross-entropy#52: the loss is too low, as the bias is added several times to the target's logit."""
    case = make_case(device=device, bias=True, ignored=0.0)
    with torch.no_grad():
        case.bias.mul_(5)
        case.x.zero_()
    result = ours(case, options=Options(strategy=strategy))
    bias = case.bias.detach().double()
    closed_form = torch.logsumexp(bias, 0) - bias[case.target].mean()
    assert error(result.loss, closed_form) < 1e-6
    frequency = torch.bincount(case.target, minlength=101) / 37
    assert error(result.gradients[2], bias.softmax(0) - frequency) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("logits_dtype", ["input", "float32"])
def test_confident_rows_have_no_negative_loss(logits_dtype, strategy, device):
    """apple/ml-cross-entropy#55: the target's logit, rounded in another kernel, lies above the log-sum-exp."""
    case = make_case(tokens=64, hidden=64, vocab=512, dtype=torch.bfloat16, device=device, ignored=0.0)
    case.target = torch.arange(64, device=device)
    with torch.no_grad():
        case.x.copy_(case.weight[:64] * 17)
    options = Options(strategy=strategy, logits_dtype=logits_dtype, chunk_rows=None if strategy in IN_BACKWARD else 7)
    assert ours(case, options=options, reduction="sum").loss >= 0
    loss = linear_cross_entropy(case.x, case.weight, case.target, reduction="none")
    assert (loss >= 0).all() and (ours(case, outputs=("log_prob",)).outputs[0] <= 0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_large_offset_of_all_logits(offset, strategy, device):
    """pytorch/pytorch#195829: lse - logit loses the digits that log(sum) - (logit - max) keeps."""
    # Integers and an offset that float32 holds exactly: only the loss itself can lose digits.
    case = make_case(hidden=4, device=device, bias=True, ignored=0.0)
    with torch.no_grad():
        for tensor in (case.x, case.weight):
            tensor.copy_(tensor.round())
        case.bias.fill_(offset)
    result, exact = ours(case, options=Options(strategy=strategy)), truth(case)
    assert error(result.loss, exact.loss) < 1e-6
    assert error(result.gradients[0], exact.gradients[0]) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("class_weight", [False, True])
def test_fully_masked_micro_batch(class_weight, strategy, device):
    """unslothai/unsloth#10892: one micro-batch without a target makes every gradient NaN."""
    case = make_case(device=device, bias=True, ignored=1.0, class_weight=class_weight)
    options = Options(strategy=strategy)
    result = ours(case, torch.tensor(float("nan"), device=device), options=options)
    assert result.loss.isnan() and all((gradient == 0).all() for gradient in result.gradients)
    for settings in ({"reduction": "sum"}, {"num_items": 0}, {"num_items": torch.tensor(0, device=device)}):
        result = ours(case, options=options, **settings)
        assert result.loss == 0 and all((gradient == 0).all() for gradient in result.gradients)


def test_ranks_with_different_numbers_of_targets(device):
    """huggingface/trl#6696: ranks hang, as what a rank executes depends on how many targets it has."""
    weight = torch.randn(101, 24, device=device, requires_grad=True)
    jitted = thunder_flce.jit(lambda x, w, y: F.cross_entropy(F.linear(x, w), y))
    for valid in (64, 320, 0):
        case = make_case(tokens=320, device=device, ignored=0.0)
        case.target[valid:] = -100
        jitted(case.x, weight, case.target).backward()
        assert weight.grad is not None and weight.grad.isfinite().all()
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(0, 24), "linear_weight must have at least one row"),
        (torch.zeros(101 * 24), r"linear_weight must be two-dimensional, \(V, H\), but got \(2424,\)"),
        (torch.zeros(0), r"linear_weight must be two-dimensional, \(V, H\), but got \(0,\)"),
    ],
)
def test_weight_that_was_not_gathered(weight, message):
    """linkedin/Liger-Kernel#332: the shard that FSDP or ZeRO-3 left of a weight fails far from its cause."""
    case = make_case()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(case.x, weight, case.target)


@pytest.fixture
def device_mesh():
    """Of two ranks, of which the other one does not exist."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.tensor import init_device_mesh

    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def test_sharded_vocabulary_is_refused(device_mesh):
    """apple/ml-cross-entropy#31: a DTensor fails somewhere inside, or gives the loss of one shard."""
    from torch.distributed.tensor import Shard, distribute_tensor

    case = make_case()
    weight = distribute_tensor(case.weight.detach(), device_mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"input must be a DTensor where others are \(linear_weight\), but got Tensor"):
        linear_cross_entropy(case.x, weight, case.target)
    with pytest.raises(TypeError, match=r"linear_weight must be a tensor on one device, but got DTensor"):
        linear_kl_divergence(case.x, weight, case.x.detach(), case.weight)


def test_packed_sequences(device):
    """verl-project/verl#3723: packed into one sequence, (1, T, H), the same tokens have other log-probabilities."""
    case = make_case(tokens=24, device=device)
    results = []
    for shape in ((24,), (1, 24), (4, 6)):
        x, target = case.x.view(*shape, -1), case.target.view(shape)
        results.append(linear_cross_entropy(x, case.weight, target, reduction="none", outputs=("log_prob",)))
    for loss, log_prob in results[1:]:
        assert torch.equal(loss.flatten(), results[0][0]) and torch.equal(log_prob.flatten(), results[0][1])
    exact = truth(case, reduction="none", outputs=("log_prob",))
    assert error(results[0][0], exact.loss) < 1e-6 and error(results[0][1], exact.outputs[0]) < 1e-6


def test_a_loss_that_is_not_fused_says_so():
    """NVIDIA-NeMo/Automodel#2681: the fused path is not taken, and nothing says so."""
    case = make_case(ignored=0.0)
    fused = thunder_flce.jit(lambda x, w, y: F.cross_entropy(F.linear(x, w), y))
    fused(case.x, case.weight, case.target)
    assert "flce_linear_cross_entropy_fwd" in [bsym.sym.name for bsym in thunder.last_traces(fused)[-1].bound_symbols]
    not_fused = thunder_flce.jit(lambda x, w, y: F.cross_entropy((logits := F.linear(x, w)), y) + logits.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFusedWarning)
        with pytest.raises(NotFusedWarning, match="not fused, because"):
            not_fused(case.x, case.weight, case.target)


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, frozen, reduction, ignore_index, device):
    """linkedin/Liger-Kernel#305, Lightning-AI/lightning-thunder#1744: dtypes differ under autocast; the backward of a
    sum fails; a label of -100 is out of range."""
    case = make_case(device=device, dtype=dtype, ignore_index=ignore_index)
    case.weight.requires_grad_(not frozen)
    jitted = thunder_flce.jit(
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y, reduction=reduction, ignore_index=ignore_index)
    )
    with torch.autocast(device, torch.bfloat16):
        loss = jitted(case.x, case.weight, case.target)
    gradients = torch.autograd.grad(loss.sum(), case.needing_grad())
    exact = truth(case, reduction=reduction, ignore_index=ignore_index)
    assert thunder_flce.explain(jitted)[0].decisions[0].fused
    for got, right in zip((loss, *gradients), (exact.loss, *exact.gradients), strict=True):
        assert error(got, right) < 2e-2
    assert [gradient.dtype for gradient in gradients] == [dtype] * (2 - frozen)
