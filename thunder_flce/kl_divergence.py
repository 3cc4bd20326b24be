"""`linear_kl_divergence` for PyTorch: distillation from a teacher's hidden states and head, chunk by chunk."""

import torch
from torch import Tensor

from thunder_flce.calls import autocast, run, scalar_tensor
from thunder_flce.functional import one_call
from thunder_flce.operation.call import Call, is_tensor, named_tensors
from thunder_flce.operation.checks import check_fits_float32
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import NOTHING_IGNORED, loss_of
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
    cross_entropy_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    options: Options | None = None,
) -> Tensor:
    """Computes the divergence of a student's distribution over the vocabulary from a teacher's, for distillation.

    The student's logits z are ``linear(input, linear_weight)``, the teacher's z′ are ``linear(teacher_input,
    teacher_weight)``. Both are computed chunk by chunk, and are not materialised as a whole. For each token,

        p = softmax(z / temperature),   q = softmax(z′ / temperature),   m = beta · q + (1 − beta) · p
        "forward"         KL(q‖p) = Σ q log(q / p)
        "cross_entropy"   - Σ q log p, with the gradients of "forward"
        "reverse"         KL(p‖q) = Σ p log(p / q)
        "jensen_shannon"  beta · KL(q‖m) + (1 − beta) · KL(p‖m)

    The last is the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649), with TRL's and Liger's convention
    for beta. The loss is not multiplied by temperature². With labels, ``cross_entropy_weight`` times the cross-entropy
    ``-log softmax(z)[target]`` is added, at temperature 1 (arXiv:1503.02531); the logits and their gradient are then
    computed once for both.

    For "mean" and "sum", the forward computes the gradients. For "none", and for float16 without
    `Options(expected_gradient=)`, the backward computes the logits again and then the gradients. This works eagerly and
    in torch.compile, where the call is one operator, but not in `thunder.jit`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the student's hidden states.
        linear_weight: (V, H), input's dtype and device: the weight of the student's head.
        teacher_input: (..., H′) floating point, on input's device: the teacher's hidden states. They must not require
            a gradient: compute them under `torch.no_grad`.
        teacher_weight: (V, H′), teacher_input's dtype, on input's device: the weight of the teacher's head. It gets no
            gradient, even if it requires one.
        target: (...) integers in [0, V), or ignore_index for tokens to ignore. None: no token is ignored.
        divergence: "forward", "cross_entropy", "reverse" or "jensen_shannon".
        beta: weight of the teacher in the mixture m, between 0 and 1, both excluded; for "jensen_shannon" only.
        temperature: positive divisor of the logits in the divergence. On a GPU, kernels are compiled for each value.
        cross_entropy_weight: factor of the target's cross-entropy; requires a target unless it is 0.
        ignore_index: tokens whose target has this value are ignored. It may lie in [0, V).
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".
        options: choices about time and memory. memory_budget covers the logits of both; strategy must be None.
            batch_invariant requires of teacher_input's dtype what it requires of input's.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for reduction "none", (...), with 0 for ignored tokens.
        For "mean" without a valid target, the loss is NaN and the gradients are zeros.

    Raises:
        IndexError: if a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError: if an argument has a wrong type, dtype, shape, device or value; the message names it.
        NotImplementedError: inside `thunder.jit` and in transforms of torch.func.
        RuntimeError: for second derivatives.
    """
    # In thunder's interpreter, isinstance takes thunder's proxies for tensors.
    if not issubclass(type(input), Tensor) and is_tensor(input):
        raise NotImplementedError(_NO_THUNDER)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NO_TRANSFORMS)
    options = as_options(options)
    if options.strategy is not None:
        raise ValueError(f"options.strategy must be None for linear_kl_divergence, but got {options.strategy!r}")
    tensors = {
        "input": input, "linear_weight": linear_weight, "target": target,
        "expected_gradient": options.expected_gradient,
        "teacher_input": teacher_input, "teacher_weight": teacher_weight,
    }  # fmt: skip
    check_fits_float32("cross_entropy_weight", cross_entropy_weight)
    # Compared, a symbol would be specialised.
    has_labels = isinstance(cross_entropy_weight, torch.SymInt | torch.SymFloat) or cross_entropy_weight != 0
    if target is None and has_labels:
        raise ValueError(f"target must be given with a cross_entropy_weight other than 0, here {cross_entropy_weight}")
    if isinstance(input, Tensor) and input.ndim and not input.is_nested:
        tokens = input.shape[:-1]
        if target is None:
            # No row is ignored.
            tensors["target"] = torch.zeros(tokens, dtype=torch.int64, device=input.device)
            ignore_index = NOTHING_IGNORED
        if has_labels:
            tensors["label_weights"] = scalar_tensor(cross_entropy_weight, like=input).expand(tokens)
    kind = Divergence(kind=divergence, beta=plain(beta), temperature=plain(temperature))
    loss = loss_of(reduction=reduction, ignore_index=ignore_index, divergence=kind)
    return run(Call(tensors=autocast(named_tensors(tensors)), loss=loss), options)[0]
