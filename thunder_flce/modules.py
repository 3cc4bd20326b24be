"""Modules: a head with its loss as one module, and models that return only their loss."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_flce.functional import linear_cross_entropy
from thunder_flce.operation.checks import check_loss
from thunder_flce.operation.loss import LOSS_ARGUMENTS, Loss
from thunder_flce.options import Options, as_options
from thunder_flce.token_losses import check_function
from thunder_flce.vocab_parallel import VocabParallel

# token_loss is a function here, but a text in `Loss`.
_LOSS_FIELDS = tuple(name for name in LOSS_ARGUMENTS if name != "token_loss")


class LinearCrossEntropyLoss(nn.Module):
    """A language model's head and its loss as one module: `linear_cross_entropy` with the parameters of a linear.

    The module has the arguments, the parameters and the state dict of `torch.nn.LinearCrossEntropyLoss`, and most
    arguments of `thunder_flce.linear_cross_entropy`. It also loads the state dict of the `torch.nn.Linear` that it
    replaces. To share the weight of an embedding, assign it: `loss.linear.weight = embedding.weight`.

    Only `forward` uses the weight, so FSDP can shard the module as a unit.

    Args:
        in_features: H, the hidden size.
        num_classes: V, the size of the vocabulary.
        out_features: must be (), since there is one loss for each row of hidden states.
        bias: whether the linear has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        weight: (V,) class weights, kept as a buffer of that name.
        ignore_index: as in `thunder_flce.linear_cross_entropy`; None for -100.
        reduction: as in `thunder_flce.linear_cross_entropy`, as are label_smoothing, softcap, logit_scale, z_loss,
            vocab_size, outputs, detached, token_loss and options.
        vocab_parallel: the ranks that divide the vocabulary. Assign the weight and the bias of `linear` as DTensors,
            `Shard(0)` over these ranks. They are cast to input's dtype, as by the mixed precision of FSDP.

    Attributes:
        linear: a `torch.nn.Linear` that holds weight (V, H) and bias (V,). It is never called.
        weight: (V,) class weights, or None.

    Raises:
        TypeError, ValueError: if an argument has a wrong type or value; the message names it.
    """

    linear: nn.Linear
    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        vocab_size: int | None = None,
        outputs: tuple[str, ...] = (),
        detached: tuple[str, ...] = (),
        token_loss: Callable[..., Tensor] | None = None,
        vocab_parallel: "VocabParallel | dist.ProcessGroup | dist.DeviceMesh | None" = None,
        options: Options | None = None,
    ):
        super().__init__()
        for name, size in (("in_features", in_features), ("num_classes", num_classes)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive int, but got {size!r}")
        if out_features != ():
            raise ValueError(
                f"out_features must be (), but got {out_features!r}; give input as (..., H) and target as (...), which "
                "have one loss for each row of hidden states"
            )
        if not isinstance(weight, Tensor | None):
            raise TypeError(f"weight must be a tensor, but got {type(weight).__name__}")
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"weight must be (V,) = ({num_classes},), class weights, but got {tuple(weight.shape)}; to share an "
                "embedding's weight, assign it to linear.weight of the module"
            )
        self.in_features = in_features
        self.num_classes = num_classes
        self.reduction = reduction
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss = z_loss
        self.vocab_size = vocab_size
        self.outputs = outputs
        self.detached = detached
        self.token_loss = token_loss
        self.vocab_parallel = None if vocab_parallel is None else VocabParallel.of(vocab_parallel)
        self.options = options
        check_loss(Loss(**self._settings()), num_classes)
        if token_loss is not None:
            check_function(token_loss)
        as_options(options)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **settings: Any) -> "LinearCrossEntropyLoss":
        """Makes the loss of an existing head, which becomes its `linear`.

        Args:
            linear: the head. Its parameters are used, not copied.
            **settings: further arguments of `LinearCrossEntropyLoss`, such as reduction.

        Raises:
            TypeError: if linear is not a `torch.nn.Linear` with the forward of that class, has hooks, or computes its
                weight from other parameters.
        """
        _check_linear(linear)
        if "weight" not in linear._parameters:
            raise TypeError("linear.weight must be a parameter, but it is computed from other parameters")
        has_bias = linear.bias is not None
        loss = cls(linear.in_features, linear.out_features, bias=has_bias, device="meta", **settings)
        loss.linear = linear
        return loss

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weights: Tensor | None = None,
        target_weights: Tensor | None = None,
        token_inputs: Sequence[Tensor] = (),
        num_items: Tensor | float | None = None,
        expected_gradient: Tensor | float | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Computes the loss: returns it, or a tuple of the loss and `outputs`.

        `thunder_flce.linear_cross_entropy` describes the arguments in full.

        Args:
            input: (..., H) the hidden states, of the dtype and on the device of the linear's weight.
            target: (...) integers in [0, V), or ignore_index; with target_weights (..., K).
            token_weights: (...) factor of each token's loss.
            target_weights: (..., K) weights of the K targets of each token.
            token_inputs: tensors (...): further arguments of token_loss.
            num_items: what "mean" divides by, in place of the number of valid targets.
            expected_gradient: the upstream gradient for which the forward finishes gradients.

        Raises:
            IndexError, TypeError, ValueError: as in `thunder_flce.linear_cross_entropy`; and if `linear` was replaced
                by a module that is no plain `torch.nn.Linear`, or its weight by one of another shape.
        """
        _check_linear(self.linear)
        # Read once, since a parametrised weight is computed at each access.
        weight = self._operand("weight", input)
        expected, shape = (self.num_classes, self.in_features), tuple(weight.shape)
        if shape != expected:
            raise ValueError(
                f"linear.weight must be (num_classes, in_features) = {expected}, but got {shape}; create the module "
                "with the sizes of the weight that it shares"
            )
        return linear_cross_entropy(
            input,
            weight,
            target,
            linear_bias=self._operand("bias", input),
            weight=self.weight,
            token_weights=token_weights,
            target_weights=target_weights,
            token_loss=self.token_loss,
            token_inputs=token_inputs,
            num_items=num_items,
            expected_gradient=expected_gradient,
            vocab_parallel=self.vocab_parallel,
            options=self.options,
            **self._settings(),
        )

    def _operand(self, name: str, input: Tensor) -> Any:
        parameter = getattr(self.linear, name)
        if parameter is None or self.vocab_parallel is None:
            return parameter
        # In thunder's traces it is a proxy, which has the mesh but not the class.
        if not hasattr(parameter, "device_mesh"):
            raise TypeError(
                f"linear.{name} must be a DTensor with vocab_parallel, but is a plain tensor; assign "
                f"nn.Parameter(distribute_tensor({name}, mesh, [Shard(0)])) to it"
            )
        return parameter if parameter.dtype == input.dtype else parameter.to(input.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # State dicts of a `torch.nn.Linear` name its weight (V, H) as this module names its class weights (V,). They
        # have no class weights, so the module keeps its own.
        for name, kept in (("weight", self.weight), ("bias", None)):
            value = state_dict.get(prefix + name)
            if value is not None and (name == "bias" or value.ndim == 2):
                state_dict[f"{prefix}linear.{name}"] = state_dict.pop(prefix + name)
                if kept is not None:
                    state_dict[prefix + name] = kept
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Lists reduction, ignore_index, and the other settings that differ from their defaults."""
        settings = Loss(**self._settings()).non_defaults()
        for name in ("token_loss", "vocab_parallel", "options"):
            if getattr(self, name) is not None:
                settings[name] = getattr(self, name)
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _LOSS_FIELDS}


def _check_linear(linear: nn.Module) -> None:
    """Raises a TypeError if a head does not compute exactly what `torch.nn.Linear` does."""
    is_plain = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
    # Dynamo of torch 2.8 does not know `vars`.
    if not is_plain or "forward" in linear.__dict__:
        raise TypeError(
            f"linear must be a torch.nn.Linear with the forward of that class, but is {type(linear).__name__}; only "
            "its weight and bias are used, its forward is never called"
        )
    # `fully_shard` adds hooks, too. For its DTensors, `linear_cross_entropy` raises an error that says what to shard.
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    if any(hooks) and not hasattr(linear.weight, "device_mesh"):
        raise TypeError("linear must have no hooks: it is never called, so they would not run; remove them")


def loss_only(model: nn.Module, *, labels: str = "labels", loss: str | int = "loss") -> nn.Module:
    """Makes a model that returns only its loss from one that returns logits, too, such as those of transformers.

    A program that returns logits has to materialise them, so compile this model instead of the original one:
    `torch.compile(thunder_flce.loss_only(model), backend="thunder_flce")`. Call it as the original, with `labels=`.
    Models of transformers get `use_cache=False` unless the call sets it: a loss does not need the cache, and Dynamo
    cannot trace the caches of T5 and Gemma 4.

    Compile the returned model with a function, such as `torch.compile`: `Module.compile` would replace the call of
    both models. Only the call differs. The two share parameters, buffers, submodules, hooks, mode and every other
    attribute, so that setting one on either model sets it on both; this includes a `forward` that accelerate or TRL
    sets. Call `loss_only` before `fully_shard`, whose state belongs to the object that it was called with.

    Args:
        model: a model whose forward takes labels, and returns the loss or an output that has it.
        labels: the name of the forward's argument for the labels, such as "targets" in nanoGPT.
        loss: where the loss is in the output: the name of an attribute or an item, or the index of an item in a tuple,
            such as 1 for (logits, loss). With a name, the loss is the first item of an output that is a plain tuple.

    Raises:
        TypeError: if model is not a module, its forward has no such argument, or it was compiled before; when called,
            if the model returns no loss.
        ValueError: if model is a `loss_only` model with other labels or another loss.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but got {type(model).__name__}")
    model_class = type(model)
    name = model_class.__name__
    if (made_with := getattr(model_class, "loss_only_made_with", None)) is not None:
        if made_with != (labels, loss):
            raise ValueError(f"model is a loss_only model already, with labels={made_with[0]!r}, loss={made_with[1]!r}")
        return model
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise TypeError(f"this {name} was compiled; call loss_only before that")
    parameters = [*inspect.signature(model.forward).parameters]
    if labels not in parameters:
        raise TypeError(
            f"the forward of {name} takes no {labels}, so it computes no loss; pass loss_only the name of the argument "
            "for the labels, as labels=…, or the model that computes the loss, before it is compiled or wrapped; or "
            "return the loss from a module of your own"
        )

    cache_at = [*parameters, "use_cache"].index("use_cache") if takes_no_cache(model) else -1
    for module in model.modules():
        has_default = isinstance(getattr(type(module), "loss_function", None), property)
        if has_default and getattr(module, "loss_type", "") is None:
            # transformers falls back to this type, but warns, and Dynamo breaks the graph at the warning.
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]

    def raise_no_loss(output: Any) -> NoReturn:
        raise TypeError(
            f"{name} returned no loss; call it with {labels}=…, and have it return the loss as .loss of its output, as "
            'the item "loss", or as a scalar that is first in a tuple, or say where it is: loss_only(model, loss=…); '
            f"this is a {type(output).__name__}, and loss={loss!r}"
        )

    # If Dynamo traced into the raise, it would never compile that frame again, though the next call may have labels.
    raise_no_loss = torch.compiler.disable(raise_no_loss, reason="raises an error")

    class LossOnly(model_class):  # type: ignore[misc, valid-type]
        loss_only_made_with = (labels, loss)

        # This overrides the call, not `forward`: accelerate and TRL set a forward on the shared attributes, which would
        # replace the override. Such a forward is bound to one of the two models, and Dynamo cannot trace it from the
        # other.
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            is_own = isinstance(self.forward, MethodType) and self.forward.__self__ is self
            call = super().__call__ if is_own else model
            if len(args) <= cache_at:
                kwargs.setdefault("use_cache", False)
            output = call(*args, **kwargs)
            value = _loss_of(output, loss)
            if value is None:
                raise_no_loss(output)
            return value

        def __reduce__(self) -> tuple[Any, ...]:
            # Pickle cannot find this class by its name.
            return partial(loss_only, labels=labels, loss=loss), (_sharing_attributes(self, model_class),)

    # Dynamo's cache is keyed by the code object: shared, the models would count as recompilations of one function.
    LossOnly.__call__.__code__ = LossOnly.__call__.__code__.replace()
    # transformers writes a class's name into checkpoints.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(LossOnly, attribute, getattr(model_class, attribute))
    return _sharing_attributes(model, LossOnly)


def takes_no_cache(model: Any) -> bool:
    """Whether a model has the argument use_cache of transformers, and computes the same without a cache.

    In some versions of Gemma 3n and 4, layers share keys and values through the cache.
    """
    inner = without_peft(model)
    config = getattr(inner, "config", None)
    has_shared_layers = getattr(getattr(config, "text_config", config), "num_kv_shared_layers", 0)
    return "use_cache" in inspect.signature(inner.forward).parameters and not has_shared_layers


def without_peft(model: Any) -> Any:
    """Returns the model that peft has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _sharing_attributes(module: nn.Module, as_class: type[nn.Module]) -> nn.Module:
    """Returns an object of class `as_class` that shares the attribute dictionary of a module."""
    same: nn.Module = object.__new__(as_class)
    object.__setattr__(same, "__dict__", vars(module))
    return same


def _loss_of(output: Any, loss: str | int) -> Tensor | None:
    """Returns the loss in a model's output; None if there is none."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    if isinstance(output, tuple) and not hasattr(output, str(loss)):
        # Without labels, the first item is the logits, so only a scalar counts.
        index = loss if isinstance(loss, int) else 0
        item = output[index] if -len(output) <= index < len(output) else None
        return item if isinstance(item, Tensor) and item.ndim == 0 else None
    return output.get(loss) if isinstance(output, dict) else getattr(output, str(loss), None)
