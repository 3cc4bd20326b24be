"""What users of other fused losses have reported, where no property draws it: a test each, which the bug would fail."""

import pytest
import torch

from reference import assert_as_exact_as_eager, error, make_case, ours, truth
from thunder_flce import Options
from thunder_flce.options import STRATEGIES

ON_EVERY_BACKEND = True
IN_BACKWARD = ("save_logits", "recompute_logits")
TILE = 128


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
