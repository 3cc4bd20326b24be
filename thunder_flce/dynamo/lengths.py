"""Decisions by the number of tokens: if it is a symbol, a guard ensures that a decision holds in each call."""

import math
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from thunder_flce.device import TILE_ROWS, Device
from thunder_flce.engine.choose import ONE_CHUNK_BYTES, choose, matmul_seconds
from thunder_flce.matching.program import depends_on_values
from thunder_flce.matching.regions import Region
from thunder_flce.operation.call import Call
from thunder_flce.options import SAVE_LOGITS, Options

# Time of a head's matmuls, by the formula, up to which a step waits for the host. With four layers, on an H100: the
# matmuls of pythia-160m's head take 0.7 ms for 2048 tokens, and a step took 10.2 ms with our operator and 9.1 with
# Inductor alone, with 1536 to 2560 tokens 6.5 and 5.3; those of SmolLM2-135M take 1.0 ms for 4096 tokens, and a step
# 8.2 and 7.5 ms; those of Qwen 2.5 0.5B take 2.5 ms for 2048 tokens, and a step 8.1 and 8.5 ms.
_SMALL_SECONDS = 1.5e-3
_MOST_TOKENS = 2**31


def are_small(regions: Sequence[Region]) -> bool:
    """Whether fusion on a GPU would gain neither time nor memory: the logits are one chunk, and the host's time counts.

    Estimated by the time of a mean loss of the same sizes. All regions of one head count together.
    """
    terms = [region.parts[0].logits.terms[0] for region in regions]
    rows = {(term.weight, term.input): math.prod(term.rows_shape) for term in terms}
    tokens = [sum(count for (weight, _), count in rows.items() if weight is term.weight) for term in terms]
    return all(map(_is_small, regions, tokens))


def _is_small(region: Region, tokens: Any) -> bool:
    term, *others = region.parts[0].logits.terms
    device, dtype = term.input.device, term.input.dtype
    if others or len(region.row_groups) > 1 or device.type != "cuda":
        return False
    if not all(isinstance(size, int) for size in term.weight.shape):
        return False
    vocab, hidden = term.columns, term.features
    tile_call = Call.of_mean(TILE_ROWS, vocab, hidden, dtype=dtype, device=device)
    seconds = matmul_seconds(tile_call, Device.of(device))
    if not seconds:
        return False
    limit = min(_SMALL_SECONDS * TILE_ROWS // seconds, ONE_CHUNK_BYTES // (vocab * dtype.itemsize))
    return _is_at_most(tokens, int(limit))


def may_save_logits(call: Call, tokens: "int | torch.SymInt", options: Options) -> bool:
    """Whether a call, with these specs and this number of tokens, saves all logits, as it would outside of a graph.

    False if it would save the logits of some tokens: how many are saved has to follow from the number of tokens alone.
    """
    return _is_at_most(tokens, _most_saved_tokens(call.specs(tokens=1), options, Device.of(call.device)))


def _is_at_most(tokens: "int | torch.SymInt", limit: int) -> bool:
    if not limit or depends_on_values(tokens):
        return False
    if not isinstance(tokens, torch.SymInt):
        return tokens <= limit
    environment, expression = tokens.node.shape_env, tokens.node.expr
    if any(environment.var_to_range[symbol].upper.is_Integer for symbol in expression.free_symbols):
        # The caller has declared a range of lengths: no guard may exclude some of them.
        return bool(environment.bound_sympy(expression).upper <= limit)
    return bool(tokens <= limit)


@lru_cache(maxsize=1024)
def _most_saved_tokens(call: Call, options: Options, device: Device) -> int:
    """Returns the largest number of tokens with which a call saves all logits."""

    def saves_less(tokens: int) -> bool:
        plan = choose(call.specs(tokens=tokens), options, device)
        return plan.strategy != SAVE_LOGITS or plan.saved_rows is not None

    return bisect(range(1, _MOST_TOKENS), False, key=saves_less)
