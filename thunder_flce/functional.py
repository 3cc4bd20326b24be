"""`linear_cross_entropy` for PyTorch: from arguments to a call, which the operators run."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thunder_flce.calls import autocast, loss_of, run
from thunder_flce.importing import when_imported, without_dynamo
from thunder_flce.operation.call import named_tensors
from thunder_flce.options import FIELDS, OPTIONS, Options, as_options
from thunder_flce.ranks import on_ranks
from thunder_flce.token_losses import token_loss_of
from thunder_flce.vocab_parallel import ONLY_EAGER, VocabParallel, as_literal, has_dtensor, tell

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Dynamo see one call of a function, which AOTAutograd or thunder looks into, and not what it does.

    The graph breaks around DTensors, and where ranks tell each other how many tokens they have.
    """
    eager = without_dynamo(function, ONLY_EAGER)
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(function))

    # Dynamo looks into this wrapper, and sees one call of `function` in it.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return eager(*args, **kwargs)
        if kwargs.get("token_loss") is not None:
            kwargs["token_loss"] = token_loss_of(kwargs["token_loss"], kwargs.get("token_inputs", ()))
        parallel = kwargs.get("vocab_parallel")
        if has_dtensor((*args, *kwargs.values())) or getattr(parallel, "data_parallel", False):
            return eager(*args, **kwargs)
        if parallel is not None:
            kwargs = {**kwargs, "vocab_parallel": as_literal(parallel)}
        if isinstance(options := kwargs.get("options"), Options):
            # Dynamo would make an object of them whose numbers are its symbols.
            kwargs = {**kwargs, "options": (FIELDS, *(getattr(options, name) for name in OPTIONS))}
        return function(*args, **kwargs)

    return call


@one_call
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    token_weights: Tensor | None = None,
    target_weights: Tensor | None = None,
    target_rest: bool = False,
    token_loss: Callable[..., Tensor] | str | None = None,
    token_inputs: Sequence[Tensor] = (),
    num_items: Tensor | float | None = None,
    expected_gradient: Tensor | float | None = None,
    outputs: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
    terms: Sequence[tuple[Tensor, Tensor]] = (),
    vocab_parallel: "VocabParallel | ProcessGroup | DeviceMesh | None" = None,
    options: Options | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Cross-entropy of a linear layer's output, chunk by chunk, so that the logits are not materialised.

    Computes ``cross_entropy(logits, target, ...)`` for

        logits = softcap * tanh(logit_scale * linear(input, linear_weight, linear_bias).float() / softcap)

    Works eagerly and inside `thunder.jit`. For torch.compile and torch.export it is one operator, whose strategy then
    depends neither on the number of tokens nor on free memory: logits are saved only if the options say so. Under
    `torch.autocast`, the linears' operands are cast. The formulas are in `operation.loss`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the hidden states.
        linear_weight: (V, H), input's dtype and device.
        target: (...) integers in [0, V), or ignore_index; with target_weights (..., K).
        linear_bias: (V,), input's dtype and device.
        weight: (V,) class weights, of input's dtype or float32; they get no gradient.
        reduction: "mean" over the targets that are not ignored (over their class weights, where there are any), "sum"
            or "none".
        ignore_index: targets of this value contribute neither to the loss nor to a gradient; may lie in [0, V).
        label_smoothing: as in `torch.nn.functional.cross_entropy`, between 0 and 1.
        softcap: positive; None for none.
        logit_scale: what the logits are multiplied by before the softcap; not 0.
        z_loss: adds z_loss · lse² for each valid token, lse being the log-sum-exp of its logits; not weighted by class
            weights, and averaged over the valid tokens for "mean".
        vocab_size: only the first vocab_size rows of linear_weight are columns of the logits (1 to V); the others, such
            as padding, get gradients of zero. None: all V.
        token_weights: (...) floating point: what multiplies each token's loss; "mean" divides by their sum over the
            valid tokens (with class weights, of the products). A token of weight 0 is ignored. They get no gradient.
        target_weights: (..., K) floating point: what each of K targets of a token counts, such as a teacher's K largest
            probabilities, of which target then has the columns. A token's loss is -Σ_k q_k log p_k; the weights q need
            not add up to 1, and a column that comes twice counts twice. Targets of ignore_index contribute nothing; a
            token all of whose targets are, is ignored. They get no gradient, and go neither with class weights nor with
            label smoothing, "log_prob" or "accuracy". Less the teacher's entropy -Σ_k q_k log q_k, the loss is the
            Kullback-Leibler divergence KL(q‖p), with the same gradients.
        target_rest: whether what target_weights leave of 1 is the weight of all other columns together, as of one
            class: adds -(1 - Σ_k q_k) log(1 - Σ_k p_k), the second sum over the columns that are targets, each once,
            and nothing where the weights sum to 1 or more. With reduction "mean" or "sum"; gradients are computed in
            the forward, and outputs get none. Below 6e-8, 1 - Σ_k p_k counts as that.
        token_loss: what each token adds to the loss in place of its cross-entropy, the negative log-probability: a
            function of its log-probability, its entropy and token_inputs, such as GRPO's clipped ratio. One that has an
            argument log_sum_exp, as for a z-loss, or mean_logit, as for label smoothing, gets that by name. It is
            called once, with stand-ins, and must be made of PyTorch's operations on single tokens (those of
            `operation.pointwise`; no sums, no branches). Gradients are still computed in the forward; outputs get none
            then.
        token_inputs: (...) each, of any floating-point dtype, integers or bool: further arguments of token_loss, such
            as old log-probabilities and advantages. They get no gradient.
        num_items: what "mean" divides by, in place of what it counts: such as the number of valid tokens of all
            micro-batches and ranks. A number or a tensor without dimensions, on input's device, which the host never
            waits for. Where it is 0, so are the loss and the gradients.
        outputs: names of what is to be returned with the loss, from the same logits. (...) each in the loss's dtype and
            0 for ignored tokens: "log_prob", the target's log-probability, "entropy", "log_sum_exp", that of the
            logits, and "mean_logit", the mean of the logits over their columns, which are differentiable (the last two
            are NaN where the largest logit is infinite), and "log_sum_sq_probs", the logarithm of the sum of the
            squared probabilities, without a gradient. With both class weights and label smoothing, "mean_logit" must be
            in detached. "argmax", (...) int64, the column of the largest logit before a softcap, which keeps their
            order but may make equals of the largest; for it, ignored tokens are also computed; "valid_argmax", the same
            for less, since it is -1 for ignored tokens; "accuracy", (), the fraction of the valid tokens whose argmax
            is their target. These three have no gradient, and take another pass over the logits.
        detached: those of the differentiable outputs that get no gradient, as what is only logged: then gradients need
            not wait for theirs.
        terms: further linears that are added to the logits, such as LoRA on the head: pairs of an
            input (..., H_i) and a weight (V, H_i), of input's dtype and device.
        expected_gradient: the upstream gradient of the loss that gradients in the forward are finished for, where it is
            not 1: a number, or a tensor without dimensions on input's device, such as a `GradScaler`'s scale, which the
            host never waits for; neither 0 nor infinite. Another upstream gradient is also right, but then 16-bit
            gradients are rounded once more. With it, float16 gradients may also be computed in the forward.
        vocab_parallel: the process group, the one-dimensional device mesh or the `VocabParallel` of the ranks that
            divide the vocabulary. linear_weight, linear_bias and the weights of terms are then this rank's rows, V
            those of all; weight is the whole vector, and input and target are the same on all ranks. Loss, outputs and
            the input's gradient are those of the whole vocabulary, with the same bits on all ranks. The weights may be
            DTensors, Shard(0) over these ranks. Where input is also one, placements take its place: see `dtensor`.
        options: choices about time and memory. Inside `thunder.jit`, give them to `thunder_flce.jit` or to
            `FuseLinearCrossEntropy` instead.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for reduction "none", (...). With "mean" and no valid
        target, NaN, with gradients of zeros, as `torch.nn.functional.cross_entropy`. With outputs, a tuple of the loss
        and of these, in their order.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError: see `checks.check_call`.
        RuntimeError: for second derivatives, forward-mode derivatives and `torch.vmap`.
    """
    parallel = None if vocab_parallel is None else VocabParallel.of(vocab_parallel)
    try:
        options = as_options(options)
        if expected_gradient is None:
            expected_gradient = options.expected_gradient
        if torch._C._is_any_autocast_enabled():
            input, linear_weight, linear_bias, terms = autocast((input, linear_weight, linear_bias, terms))
        if token_loss is not None:
            token_loss = token_loss_of(token_loss, token_inputs)
        tensors = named_tensors({
            "input": input, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias,
            "weight": weight, "token_weights": token_weights, "target_weights": target_weights, "num_items": num_items,
            "expected_gradient": expected_gradient, "token_inputs": token_inputs, "terms": terms,
        })  # fmt: skip
        loss = loss_of(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale,
            softcap=softcap, z_loss=z_loss, vocab_size=vocab_size, outputs=outputs, detached=detached,
            token_loss=token_loss or "", target_rest=target_rest,
        )  # fmt: skip
        call: Callable[[], Sequence[Tensor]] = functools.partial(run, tensors, loss, options)
        if parallel is not None or has_dtensor([*tensors.values()]):
            call = on_ranks(tensors, loss, options, parallel=parallel)
    except Exception as error:
        tell(error, parallel, linear_weight)
        raise
    results = call()
    return tuple(results) if outputs else results[0]
