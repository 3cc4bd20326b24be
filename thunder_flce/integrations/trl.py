"""TRL: replaces the head of its trainers, which computes log-probabilities in chunks, by `linear_cross_entropy`."""

import inspect
import warnings
from typing import Any

from torch import Tensor

from thunder_flce.functional import linear_cross_entropy
from thunder_flce.options import Options, as_options

_NAME = "_ChunkedLogProbFunction"
_PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
_OUTPUTS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "valid_argmax",
}
"""Names of our outputs by TRL's names, in TRL's order."""


def replace_trl_head(*, options: Options | None = None) -> None:
    """Makes the trainers of TRL compute log-probabilities, entropies and other metrics by `linear_cross_entropy`.

    Call it once, before training; it affects the whole process. SFT, DPO, KTO, GRPO and RLOO use TRL's head, with and
    without peft. Temperatures, softcaps and scales of logits are applied as in TRL. Nothing is compiled.

    Args:
        options: choices about time and memory.

    Raises:
        ImportError: if TRL is not installed, or its head differs from that of TRL 1.16.
        TypeError: if `options` is not an `Options`.
    """
    from trl import __version__
    from trl.trainer import utils

    options = as_options(options)
    head = getattr(utils, _NAME, None)
    if isinstance(head, _Head):
        head = head.trl_head
    parameters = () if head is None else tuple(inspect.signature(head.forward).parameters)[1:]
    if parameters != _PARAMETERS:
        actual = f"takes {', '.join(parameters)}" if parameters else "does not exist"
        raise ImportError(
            f"replace_trl_head needs trl.trainer.utils.{_NAME} of TRL 1.16, which takes {', '.join(_PARAMETERS)}; in "
            f"TRL {__version__}, it {actual}. Install trl==1.16.*, or do not call replace_trl_head"
        )
    setattr(utils, _NAME, _Head(head, options))


class _Head:
    """Called by TRL in place of its autograd function."""

    def __init__(self, trl_head: Any, options: Options):
        self.trl_head, self._options = trl_head, options

    def apply(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Takes `_PARAMETERS`; returns log-probabilities (N,), then each of `_OUTPUTS`, None if not requested."""
        named = dict(zip(_PARAMETERS, arguments, strict=True))
        hidden, weight, bias = named["hidden"], named["weight"], named["bias"]
        if hasattr(weight, "ds_id"):
            # DeepSpeed's ZeRO-3 frees the gathered weight after the forward; TRL's backward gathers it again.
            warnings.warn("with ZeRO-3, TRL's own head computes the log-probabilities", stacklevel=2)
            return self.trl_head.apply(*arguments)
        names = [name for name in _OUTPUTS if name in named["outputs"]]
        softcap, scale = named["final_logit_softcapping"], named["logit_scale"]
        # c tanh(s z / c) / T, with the softcap c and the scale s, is that of the softcap c / T and the scale s / T.
        results = linear_cross_entropy(
            hidden,
            weight.to(hidden.dtype),
            named["targets"],
            linear_bias=None if bias is None else bias.to(hidden.dtype),
            reduction="none",
            softcap=None if softcap is None else softcap / named["temperature"],
            logit_scale=scale / named["temperature"],
            outputs=("log_prob", *(_OUTPUTS[name] for name in names)),
            detached=("mean_logit",) if "mean_logits" in names else (),
            options=self._options,
        )
        _, log_probs, *outputs = results
        named_outputs = dict(zip(names, outputs, strict=True))
        if "is_top1" in named_outputs:
            named_outputs["is_top1"] = named_outputs["is_top1"] == named["targets"]
        return log_probs, *(named_outputs.get(name) for name in _OUTPUTS)
