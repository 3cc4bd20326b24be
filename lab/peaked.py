"""Loss regions with targets and logits distributed as in a trained model, instead of uniform and normal.

Targets follow Zipf's law: low columns are frequent, as in a byte-pair vocabulary. A logit is the logarithm of its
column's frequency plus normal noise with a standard deviation of about 1. Only the logit of a row's target is around
-0.5 with a standard deviation of 3: most targets are likely and some very unlikely, at a mean loss near 2.
"""

from dataclasses import replace
from functools import partial

import torch

from thunder_flce.bench.cli import SUBSETS
from thunder_flce.bench.regions import measure
from thunder_flce.bench.shapes import Inputs, Shape, parse_shape


def parse(text: str) -> Shape:
    shape = parse_shape(text)
    return replace(shape, name=f"{shape.name}, peaked")


@torch.no_grad()
def sharpen(inputs: Inputs) -> None:
    """Makes random inputs peaked, in place."""
    generator = torch.Generator(inputs.x.device).manual_seed(1)
    device, tokens, (vocab, hidden) = inputs.x.device, inputs.x.shape[0], inputs.weight.shape
    ranks = torch.arange(1, vocab + 1, device=device, dtype=torch.float32)
    log_frequency = -(ranks.log() + ranks.reciprocal().sum().log())
    drawn = torch.multinomial(log_frequency.exp(), tokens, replacement=True, generator=generator)
    inputs.target.copy_(torch.where(inputs.target < 0, inputs.target, drawn))
    # All x share a direction, along which each row of W has its column's log-frequency: a bias, as models learn it.
    # 16 is large compared with the noise of x along this direction, which changes the frequencies from row to row.
    shared = torch.randn(hidden, device=device, generator=generator).mul_(16 * hidden**-0.5)
    noise = torch.randn(tokens, device=device, generator=generator)
    margin = -0.5 + 8**0.5 * noise - log_frequency[drawn]
    rows = inputs.weight[drawn].float()
    inputs.x.copy_(inputs.x + shared + margin[:, None] * rows)
    inputs.weight.copy_(inputs.weight + (log_frequency / 256)[:, None] * shared)
    if inputs.bias is not None:
        # W has the frequencies already; a random bias of full size would only add noise.
        inputs.bias.mul_(0.1)


SUBSET = replace(
    SUBSETS["regions"],
    help="the regions of the bench, with data distributed as in a trained model",
    measure=partial(measure, change=sharpen),
    parse=parse,
)
