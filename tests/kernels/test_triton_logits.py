"""Logits whose rows have the same bits in any batch: how exact they are, and that they do."""

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, on_device
from reference import error
from thunder_flce.engine.kernels.layout import empty_logits

DTYPES = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)


@on_device
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "hidden"), [(300, 40), (256, 64), (131, 33)])
def test_rows_alone_and_among_others(vocab, hidden, dtype, out_dtype):
    """With a bias, and added to what is there; also of a weight and a bias that lie in memory in another way."""
    from thunder_flce.engine.kernels.triton_logits import logits_

    of = {"dtype": dtype, "device": DEVICE}
    x, bias = torch.randn(200, hidden, device=DEVICE).to(dtype), torch.randn(vocab, device=DEVICE).to(dtype)
    weight = torch.randn(hidden, vocab, device=DEVICE).to(dtype).t()
    wide = torch.stack([bias, -bias], 1)[:, 0]

    def logits(rows, weight=weight.contiguous(), bias=bias):  # noqa: B008
        out = empty_logits(len(x[rows]), vocab, **of | {"dtype": out_dtype or dtype}, device_type="cuda")
        logits_(out, x[rows], weight, bias=bias)
        first = out.clone()
        logits_(out, x[rows], weight, accumulate=True)
        return torch.stack([first, out])

    found, product = logits(slice(None)), x.double() @ weight.double().t()
    for each, exact in zip(found, (product + bias.double(), 2 * product + bias.double()), strict=True):
        assert error(each, exact) < 1.5 * torch.finfo(each.dtype).eps + 1e-6
    # The interpreter multiplies by NumPy, whose sums are in an order of their own.
    most = 2 * torch.finfo(found.dtype).eps if INTERPRETED else 0
    assert error(logits(slice(None), weight, wide), found) <= most
    for rows in (slice(7, 8), slice(199, 200), slice(3, 100), slice(1, None, 2)):
        assert error(logits(rows), found[:, rows]) <= most
