"""`linear_kl_divergence` for PyTorch: distillation from a teacher's hidden states and head, without whole logits."""

import torch
from torch import Tensor

from thunder_flce.calls import autocast, loss_of, run
from thunder_flce.functional import one_call
from thunder_flce.operation.call import named_tensors
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import NOTHING_IGNORED
from thunder_flce.options import Options, as_options, plain

_NO_THUNDER = "linear_kl_divergence does not run inside thunder.jit: call it outside, or compile with torch.compile"
_NO_TRANSFORMS = "linear_kl_divergence has no transforms of torch.func: call backward, or torch.autograd.grad"


@one_call
def linear_kl_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    options: Options | None = None,
) -> Tensor:
    """Divergence of a student's distribution over the vocabulary from a teacher's, for distillation.

    The logits of both, ``linear(input, linear_weight)`` and ``linear(teacher_input, teacher_weight)``, exist a chunk of
    tokens at a time. For their rows z and z′,

        p = softmax(z / temperature),   q = softmax(z′ / temperature),   m = beta · q + (1 − beta) · p
        "forward"         KL(q‖p) = Σ q log(q / p)
        "reverse"         KL(p‖q) = Σ p log(p / q)
        "jensen_shannon"  beta · KL(q‖m) + (1 − beta) · KL(p‖m)

    The last is the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649), with TRL's and Liger's convention
    for beta. Nothing is multiplied by temperature². The gradients for "mean" and "sum" are computed in the forward;
    those for "none", and for float16 without `Options(expected_gradient=)`, in the backward, which computes the logits
    again. Works eagerly and in torch.compile, where it is one operator; not in `thunder.jit`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the student's hidden states.
        linear_weight: (V, H), input's dtype and device.
        teacher_input: (..., H′) floating point, on input's device: the teacher's hidden states. They must not require
            a gradient: compute them under `torch.no_grad`.
        teacher_weight: (V, H′), teacher_input's dtype. A constant: it gets no gradient, even if it requires one.
        target: (...) integers in [0, V), or ignore_index in the rows that take no part; None: all rows do.
        divergence: "forward", "reverse" or "jensen_shannon".
        beta: between 0 and 1, both excluded; of "jensen_shannon" alone.
        temperature: positive.
        ignore_index: targets of this value leave their row out; may lie in [0, V).
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        options: choices about time and memory. The memory budget is for both logits; there is no choice of a strategy.
            `batch_invariant` asks for the same of teacher_input as of input.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for reduction "none", (...), 0 in ignored rows. With
        "mean" and no valid target, NaN, with gradients of zeros.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError: see `checks.check_call`; and for options that cannot be.
        NotImplementedError: inside `thunder.jit` and in transforms of torch.func.
        RuntimeError: for second derivatives.
    """
    # thunder's interpreter has isinstance take its proxies for tensors.
    if not issubclass(type(input), Tensor) and hasattr(input, "shape"):
        raise NotImplementedError(_NO_THUNDER)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NO_TRANSFORMS)
    options = as_options(options)
    if options.strategy is not None:
        raise ValueError(f"linear_kl_divergence has no choice of a strategy, but options has {options.strategy!r}")
    input, linear_weight = autocast((input, linear_weight))
    teacher_input, teacher_weight = autocast((teacher_input, teacher_weight))
    tensors = {
        "input": input, "linear_weight": linear_weight, "target": target,
        "expected_gradient": options.expected_gradient,
        "teacher_input": teacher_input, "teacher_weight": teacher_weight,
    }  # fmt: skip
    if target is None and isinstance(input, Tensor) and input.ndim and not input.is_nested:
        # All rows take part.
        tensors["target"] = torch.zeros(input.shape[:-1], dtype=torch.int64, device=input.device)
        ignore_index = NOTHING_IGNORED
    kind = Divergence(kind=divergence, beta=plain(beta), temperature=plain(temperature))
    loss = loss_of(reduction=reduction, ignore_index=ignore_index, divergence=kind)
    return run(named_tensors(tensors), loss, options)[0]
