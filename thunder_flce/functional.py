"""`linear_cross_entropy` for PyTorch: turns its arguments into a call, which the operators run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.agreement import share_error
from thunder_flce.calls import autocast, run
from thunder_flce.importing import when_imported, without_dynamo
from thunder_flce.inductor import mark_cacheable
from thunder_flce.operation.call import Call, named_tensors
from thunder_flce.operation.loss import loss_of
from thunder_flce.options import FIELDS, OPTIONS, Options, as_options
from thunder_flce.ranks import on_ranks
from thunder_flce.token_losses import token_loss_of
from thunder_flce.vocab_parallel import ONLY_EAGER, VocabParallel, as_literal, has_dtensor


def one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that Dynamo records its call as one node, which only AOTAutograd or thunder trace into.

    Dynamo breaks the graph at calls with DTensors or with `VocabParallel.data_parallel`.
    """
    eager = without_dynamo(function, ONLY_EAGER)

    @functools.wraps(function)
    def recorded(*args: Any, autocast: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # PyTorch's disk cache has to find it by its name.
    recorded.__qualname__ += ".__wrapped__"
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(recorded))
    mark_cacheable(recorded)

    # Dynamo traces this wrapper, and records the call of `recorded` in it.
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
            # Dynamo would build an `Options` whose numbers are symbols.
            kwargs = {**kwargs, "options": (FIELDS, *(getattr(options, name) for name in OPTIONS))}
        if torch._C._is_any_autocast_enabled():
            # Until torch 2.13, the disk cache tells programs apart only by whether autocast is on.
            dtypes = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
            kwargs = {**kwargs, "autocast": dtypes}
        return recorded(*args, **kwargs)

    call.__wrapped__ = recorded
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
    token_loss: Callable[..., Tensor] | str | None = None,
    token_inputs: Sequence[Tensor] = (),
    num_items: Tensor | float | None = None,
    expected_gradient: Tensor | float | None = None,
    outputs: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
    terms: Sequence[tuple[Tensor, Tensor]] = (),
    vocab_parallel: "VocabParallel | dist.ProcessGroup | dist.DeviceMesh | None" = None,
    options: Options | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes the cross-entropy of a linear layer's output chunk by chunk, so that the logits are not materialised.

    The result is that of ``cross_entropy(logits, target, ...)`` for

        logits = softcap * tanh(logit_scale * linear(input, linear_weight, linear_bias).float() / softcap)

    This works eagerly and inside `thunder.jit`. In torch.compile and torch.export, the call is one operator, whose
    strategy depends neither on the number of tokens nor on free memory: it saves logits only if the options ask for
    that. `torch.autocast` casts the linears' operands. The formulas are in `operation.loss`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the hidden states.
        linear_weight: (V, H), input's dtype and device: the weight of the linear layer.
        target: (...) integers in [0, V), or ignore_index: each token's class. With target_weights, (..., K).
        linear_bias: (V,), input's dtype and device: the bias of the linear layer.
        weight: (V,) class weights, of input's dtype, or float32 for 16-bit input. They get no gradient.
        reduction: "mean", which divides the sum by the number of valid tokens, or by the sum of their class weights if
            there are any; "sum"; or "none", one loss per token.
        ignore_index: targets with this value contribute neither to the loss nor to a gradient. It may lie in [0, V).
        label_smoothing: between 0 and 1, as in `torch.nn.functional.cross_entropy`.
        softcap: positive; None for no softcap.
        logit_scale: factor of the logits, applied before the softcap; not 0. On a GPU, kernels are compiled for each
            value, as they are for each softcap and z_loss: if a factor changes at each step, multiply input by it.
        z_loss: adds z_loss · lse² for each valid token, where lse is the log-sum-exp of its logits. Class weights do
            not apply to this term; "mean" averages it over the valid tokens.
        vocab_size: number of columns of the logits, 1 to V: only the first vocab_size rows of linear_weight are used.
            The other rows, such as padding, get gradients of zero. None: all V.
        token_weights: (...) floating point: factor of each token's loss. "mean" then divides by the sum of these
            weights over the valid tokens, each multiplied by its class weight if there is one. A token of weight 0 is
            ignored. They get no gradient.
        target_weights: (..., K) floating point: weights of the K targets of each token, such as a teacher's K largest
            probabilities, whose columns target then holds. A token's loss is -Σ_k q_k log p_k. The weights q need not
            sum to 1, and a column that occurs twice counts twice. A target of ignore_index, or of weight 0, contributes
            nothing; a token is ignored if all its targets are ignore_index. The weights get no gradient, and do not
            combine with class weights, label smoothing or "accuracy". The loss minus the teacher's entropy, -Σ_k q_k
            log q_k, is the Kullback-Leibler divergence KL(q‖p), which has the same gradients.
        token_loss: function whose value replaces a token's cross-entropy (its negative log-probability), such as GRPO's
            clipped ratio. Its arguments are the token's log-probability, its entropy and token_inputs. Parameters named
            log_sum_exp, as for a z-loss, or mean_logit, as for label smoothing, are passed by name. The function is
            traced on stand-ins, so it must consist of PyTorch's operations on single tokens (see `operation.pointwise`;
            no sums, no branches). Gradients are still computed in the forward; outputs get none.
        token_inputs: tensors (...) of any floating-point dtype, integers or bool: further arguments of token_loss, such
            as old log-probabilities and advantages. They get no gradient.
        num_items: what "mean" divides by instead of its own count, such as the number of valid tokens in all
            micro-batches on all ranks. A number, or a tensor without dimensions on input's device; the host never waits
            for its value. If it is 0, the loss and the gradients are 0.
        outputs: names of further results, computed from the same logits and returned with the loss. They have shape
            (...), the loss's dtype, and 0 for ignored tokens, unless their description says otherwise:

            - "log_prob", "entropy", "log_sum_exp", "mean_logit": log-probability of the target, (..., K) with
              target_weights, entropy, log-sum-exp of the logits, and mean of the logits over their columns. All are
              differentiable. The last two are NaN, not infinite, if the largest logit is infinite. With both weight and
              label_smoothing, "mean_logit" must be in detached.
            - "max_logit": the largest logit, without a gradient. exp(max_logit - log_sum_exp) is its probability.
            - "log_sum_sq_probs": logarithm of the sum of the squared probabilities, without a gradient.
            - "argmax": int64, column of the largest logit before the softcap, which keeps the order of the logits but
              may make the largest ones equal. Rows of ignored tokens are computed for it, too.
            - "valid_argmax": the same, but -1 for ignored tokens, which saves the time to compute them.
            - "accuracy": (), fraction of the valid tokens whose argmax is their target.

            The last three have no gradient, and take another pass over the logits.
        detached: differentiable outputs that get no gradient, for example because they are only logged. The other
            gradients then need not wait for the upstream gradients of these outputs.
        terms: further linears whose results are added to the logits, such as LoRA on the head: pairs of an
            input (..., H_i) and a weight (V, H_i), of input's dtype and device.
        expected_gradient: the upstream gradient of the loss for which the forward finishes gradients, if it is not 1. A
            number, or a tensor without dimensions on input's device, such as a `GradScaler`'s scale; the host never
            waits for its value. It must be finite and not 0. Any other upstream gradient gives right gradients, too,
            but rounds 16-bit ones once more. With expected_gradient, the forward may also compute float16 gradients.
        vocab_parallel: the ranks that divide the vocabulary: a process group, a one-dimensional device mesh or a
            `VocabParallel`. linear_weight, linear_bias and the weights of terms are then this rank's rows, and V is the
            number of rows on all ranks. weight is the whole vector; input and target are the same on all ranks. The
            loss, the outputs and input's gradient are those of the whole vocabulary, with the same bits on all ranks.
            The weights may be DTensors, Shard(0) over these ranks. If input is a DTensor, too, leave vocab_parallel
            out: the placements say which rank has which part (see `dtensor`).
        options: choices about time and memory. Inside `thunder.jit`, give them to `thunder_flce.jit` or to
            `FuseLinearCrossEntropy` instead.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for reduction "none", (...). If outputs are named, a tuple
        of the loss and the outputs, in the order of their names. For "mean" without a valid target, the loss is NaN and
        the gradients are zeros, as with `torch.nn.functional.cross_entropy`.

    Raises:
        IndexError: if a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError: if an argument has a wrong type, dtype, shape, device or value; the message names it.
        RuntimeError: for second derivatives, forward-mode derivatives and `torch.vmap`.
    """
    parallel = None if vocab_parallel is None else VocabParallel.of(vocab_parallel)
    try:
        options = as_options(options)
        if expected_gradient is None:
            expected_gradient = options.expected_gradient
        if token_loss is not None:
            token_loss = token_loss_of(token_loss, token_inputs)
        tensors = autocast(named_tensors({
            "input": input, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias,
            "weight": weight, "token_weights": token_weights, "target_weights": target_weights, "num_items": num_items,
            "expected_gradient": expected_gradient, "token_inputs": token_inputs, "terms": terms,
        }))  # fmt: skip
        loss = loss_of(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale,
            softcap=softcap, z_loss=z_loss, vocab_size=vocab_size, outputs=outputs, detached=detached,
            token_loss=token_loss or "",
        )  # fmt: skip
        call = Call(tensors=tensors, loss=loss)
        has_ranks = parallel is not None or has_dtensor([*tensors.values()])
        agree = on_ranks(call, options, parallel) if has_ranks else None
    except Exception as error:
        share_error(error, parallel, linear_weight)
        raise
    if agree is None:
        results = run(call, options)
    else:
        part, whole_results = agree()
        results = whole_results(run(part, options))
    return tuple(results) if outputs else results[0]
