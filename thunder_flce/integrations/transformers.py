"""transformers' Trainer: compiles model and loss together, since the output of a compiled model would have logits."""

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states

from thunder_flce.backend import compile_graph, split_options
from thunder_flce.matching.decisions import NotFusedError, NotFusedWarning
from thunder_flce.modules import takes_no_cache, without_peft


class LossTrainerMixin:
    """Makes a Trainer of transformers compile its loss with the backend "thunder_flce", so that it needs no logits.

    Usage: `class MyTrainer(thunder_flce.LossTrainerMixin, Trainer): pass`. Training, and evaluation without metrics,
    fuse the loss: the model's own, that of a `compute_loss_func` for batches with "labels", or that of
    `label_smoothing_factor`. Predictions, evaluation with `compute_metrics` and custom label smoothers need the logits,
    and run as in the Trainer. The head and the loss are compiled, which takes seconds; the layers run as in the
    Trainer, unless `compile_layers` is set. Leave `torch_compile` off. Numbers, checkpoints and everything else stay
    the same. `thunder_flce.explain(trainer)` reports what was fused. If the Trainer's training step gets its loss
    elsewhere, such as from a `compute_loss` of your class or under `nn.DataParallel`, a `NotFusedWarning` says so; with
    `strict`, an error.

    Attributes:
        backend_options: options of the backend: `strict` and the fields of `thunder_flce.Options`; set in the class.
        compile_layers: whether the layers are compiled, too, except under FSDP; set in the class. Layers that the model
            itself calls one by one, such as T5's, are compiled even without it.
        compiled_loss: the function that torch.compile returned.

    Raises:
        TypeError: for trainers of TRL, which have a head of their own: call `thunder_flce.replace_trl_head()` instead;
            if the class after the mixin has its own `compute_loss`; if the mixin comes after the Trainer.
        TypeError, ValueError, RuntimeError: if `backend_options` are not right, as in the backend.
        NotFusedError: with `strict`, also if the Trainer's training step does not use the compiled loss.
        ValueError: if `torch_compile` is on; with `compile_layers`, for reentrant gradient checkpointing of a model
            that needs a hook for it, as with peft.
        RuntimeError: if the layers are not compiled, and the model calls them twice in a forward, or draws random
            numbers both before them and for its loss.
    """

    backend_options: dict[str, Any] = {}
    compile_layers: bool = False
    # Attributes of the Trainer
    accelerator: Any
    args: Any
    model: Any
    label_smoother: Any
    compute_loss_func: Any

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__[: cls.__mro__.index(LossTrainerMixin)]
        if any(base.__module__ == "transformers.trainer" for base in bases):
            raise TypeError(
                f"{cls.__name__} has LossTrainerMixin behind the Trainer, where it has no effect: put the mixin first"
            )

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        from transformers import Trainer

        if any(base.__module__.startswith("trl.") for base in type(self).__mro__):
            raise TypeError(
                f"{type(self).__name__} has LossTrainerMixin, but TRL computes its losses in a head of its own: remove "
                "the mixin, and call thunder_flce.replace_trl_head()"
            )
        if super().compute_loss.__func__ is not Trainer.compute_loss:  # type: ignore[misc]
            raise TypeError(
                f"{type(self).__name__} has LossTrainerMixin before a compute_loss of its own, which calls the model "
                'itself: remove the mixin, and compile that loss by torch.compile(…, backend="thunder_flce")'
            )
        if self.args.torch_compile:
            raise ValueError(
                "torch_compile must be False in TrainingArguments with LossTrainerMixin, which compiles the loss "
                "itself, and the layers if compile_layers is set in the class"
            )
        split_options(self.backend_options)
        # Dynamo's cache is keyed by the code object: shared, the trainers of a process would count as recompilations of
        # one function, and later ones would not be compiled at all.
        loss = LossTrainerMixin._loss
        own_loss = MethodType(FunctionType(loss.__code__.replace(), loss.__globals__), self)
        self.compiled_loss = torch.compile(own_loss, backend=compile_graph, options=self.backend_options)
        self._needs_loss_only = False
        self._is_settled = False  # whether this step used the compiled loss, or reported why not
        self._calls_decoder = True
        # One function for all steps, since Dynamo would recompile for a new one.
        self._decoded: list[Any] = []
        self._decoded_forward = partial(_pop_once, self._decoded)
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        self._shifts_labels = type(without_peft(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the Trainer's step, and reports if the step did not take its loss from the mixin."""
        self._is_settled = False
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self._is_settled:
            self._report_unfused(
                "it has a compute_loss of its own, which does not call super().compute_loss or asks it for model "
                "outputs, or a label smoother of its own; give the Trainer a compute_loss_func, or remove the mixin "
                'and compile the loss by torch.compile(…, backend="thunder_flce")'
            )
        return loss

    def _report_unfused(self, reason: str) -> None:
        """Warns that a step is not fused, or raises an error if `strict`."""
        self._is_settled = True
        message = f"thunder_flce: {type(self).__name__} trains without the loss of LossTrainerMixin: {reason}"
        if self.backend_options.get("strict", False):
            raise NotFusedError(message)
        warnings.warn(message, NotFusedWarning, stacklevel=3)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Returns the loss; with `return_outputs`, the loss and the model's outputs, {} if it was compiled."""
        from transformers.trainer_pt_utils import LabelSmoother

        is_unfused = return_outputs and not self._needs_loss_only
        is_unfused = is_unfused or type(self.label_smoother) not in (type(None), LabelSmoother)
        if isinstance(model, nn.DataParallel):
            self._report_unfused(
                "nn.DataParallel copies the model in each step; start one process for each GPU by torchrun, or let the "
                "process see one GPU"
            )
            is_unfused = True
        elif self.compute_loss_func is not None and "labels" not in inputs and not is_unfused:
            self._report_unfused('the batch has no "labels", without which transformers 4 ignores a compute_loss_func')
            is_unfused = True
        if is_unfused:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        self._is_settled = True
        custom, loss_of, labels = self.compute_loss_func, None, None
        if custom is None and self.label_smoother is not None and "labels" in inputs:
            # The smoother changes tensors in place, so gradients would wait; `_smoothed` computes the same without.
            loss_of, labels = self._smoothed, inputs["labels"]
            inputs = {name: value for name, value in inputs.items() if name != "labels"}

        def call(**inputs: Any) -> dict[str, Tensor]:
            loss = self._loss_inside_wrappers(model, loss_of, inputs, labels, num_items_in_batch)
            return {} if loss is None else {"loss": loss}

        with _untraced_logs(), self._traceable_checkpoints():
            # The Trainer's own compute_loss is not compiled: Dynamo cannot trace it in every version.
            stand_in = nn.Module()
            # With a compute_loss_func, the stand-in returns the inputs, which the Trainer passes on as outputs.
            stand_in.forward = call if custom is None else dict
            loss_func = None if custom is None else partial(self._loss_inside_wrappers, model, custom)
            with mock.patch.object(self, "compute_loss_func", loss_func):
                loss = super().compute_loss(stand_in, inputs, num_items_in_batch=num_items_in_batch)  # type: ignore[misc]
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Runs the Trainer's step; tells `compute_loss` whether the Trainer uses the outputs that it asks for."""
        with mock.patch.object(self, "_needs_loss_only", prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]

    @contextmanager
    def _traceable_checkpoints(self) -> Iterator[None]:
        """Turns off what breaks the graph in checkpointed models, so that no part of it has to return the logits."""
        if not self.compile_layers or not getattr(self.model, "is_gradient_checkpointing", False):
            yield
            return
        if getattr(self.model, "_require_grads_hook", None) is not None:
            modules = [module for module in self.model.modules() if hasattr(module, "_gradient_checkpointing_func")]
            if any(module._gradient_checkpointing_func.keywords.get("use_reentrant", True) for module in modules):
                raise ValueError(
                    'gradient_checkpointing_kwargs must be {"use_reentrant": False}: the hook that this model has for '
                    "reentrant checkpoints (enable_input_require_grads) cannot be compiled"
                )
            self.model.disable_input_require_grads()
        # With checkpoints, the model itself turns the cache off, but logs a warning that Dynamo cannot trace.
        with mock.patch.object(self.model.config, "use_cache", False, create=True):
            yield

    def _loss_inside_wrappers(
        self,
        model: nn.Module,
        loss_of: Callable[..., Any] | None,
        inputs: dict[str, Any],
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor | None:
        """Runs the compiled loss as the forward of the innermost module, inside all wrappers and hooks.

        Dynamo breaks the graph at the wrappers and hooks of DDP, FSDP and DeepSpeed. If the loss were compiled around
        them, the graph inside would have to return the logits.
        """
        inner = self.accelerator.unwrap_model(model)
        decoder = None
        if self._calls_decoder:
            decoder = _parent_of_sharded_layers(inner) or (None if self.compile_layers else _layers_of(inner))
        if decoder is None and takes_no_cache(inner):
            inputs = {"use_cache": False, **inputs}
        # accelerate's mixed precision has replaced the class's forward by an attribute of the module.
        forward = inner.forward

        def loss(**inputs: Any) -> Tensor | None:
            with nullcontext() if decoder is None else self._decoder_run_before(decoder, forward, inputs):
                return self.compiled_loss(forward, loss_of, inputs, labels, num_items_in_batch)

        with mock.patch.object(inner, "forward", loss):
            return model(**inputs)

    @contextmanager
    def _decoder_run_before(
        self, decoder: nn.Module, forward: Callable[..., Any], inputs: dict[str, Any]
    ) -> Iterator[None]:
        """Runs a model's decoder uncompiled; inside the context, the decoder's forward returns that output.

        The head and the loss thus are one graph, which the hooks around each sharded layer would break otherwise.
        """
        decoder_forward, states, draws_before = decoder.forward, _random_states(inputs), False

        def interrupting(*args: Any, **kwargs: Any) -> NoReturn:
            nonlocal draws_before
            draws_before = _random_states(inputs) != states
            with mock.patch.object(decoder, "forward", decoder_forward):  # A decoder may call itself.
                self._decoded.append(decoder_forward(*args, **kwargs))
            raise _Decoded

        try:
            with mock.patch.object(decoder, "forward", interrupting):
                forward(**inputs)
            # The model calls the layers itself. Later steps skip this trial, which costs a forward.
            self._calls_decoder = False
        except _Decoded:
            pass
        states = _random_states(inputs)
        with mock.patch.object(decoder, "forward", self._decoded_forward) if self._decoded else nullcontext():
            try:
                yield
            finally:
                self._decoded.clear()
        if draws_before and _random_states(inputs) != states:
            raise RuntimeError(
                "LossTrainerMixin runs the forward twice up to the layers, but this model draws random numbers there, "
                f"which its loss may need again: {_CURE}"
            )

    def _loss(
        self,
        model: Callable[..., Any],
        loss_of: Callable[..., Any] | None,
        inputs: dict[str, Any],
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor | None:
        """Computes the loss by `loss_of`, or without it takes the model's own, None if it returns none; compiled."""
        outputs = model(**inputs)
        if loss_of is not None:
            return loss_of(outputs, labels, num_items_in_batch=num_items_in_batch)
        return outputs.get("loss") if isinstance(outputs, dict) else outputs[0]

    def _smoothed(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        logits, smoother = outputs["logits"] if isinstance(outputs, dict) else outputs[0], self.label_smoother
        if self._shifts_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        # The smoother of transformers 4 divides by the number of labels of the micro-batch.
        if "num_items_in_batch" not in inspect.signature(type(smoother).__call__).parameters:
            num_items_in_batch = None
        loss = F.cross_entropy(
            logits.flatten(0, -2).float(),
            labels.flatten(),
            ignore_index=smoother.ignore_index,
            label_smoothing=smoother.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@contextmanager
def _untraced_logs() -> Iterator[None]:
    """Skips messages that models log once, such as that GPT-2's loss has no type: they break the graph before the loss.

    torch 2.11 cannot serialise this setting into its compilation metrics, and would log an error each time.
    """
    ignored = {*torch._dynamo.config.ignore_logger_methods, logging.Logger.warning_once}  # type: ignore[attr-defined]
    metrics = logging.getLogger("torch._dynamo.metrics_context")
    with mock.patch.object(metrics, "disabled", True), torch._dynamo.config.patch(ignore_logger_methods=ignored):
        yield


def _layers_of(model: nn.Module) -> nn.Module | None:
    """Returns the module that a model of transformers calls for its hidden states; None if that is the model."""
    unwrapped = without_peft(model)
    layers = getattr(unwrapped, "base_model", unwrapped)
    if hasattr(unwrapped, "get_decoder") and not unwrapped.config.is_encoder_decoder:
        decoder = unwrapped.get_decoder()
        # Gemma 3's base_model is the model itself; OPT's forward calls the decoder inside its base_model.
        if layers is unwrapped or getattr(layers, "decoder", None) is decoder:
            layers = decoder
    if layers is unwrapped:
        return None
    # BLIP's decoder is a whole language model, with head and loss: look for the layers inside it.
    head = layers.get_output_embeddings() if hasattr(layers, "get_output_embeddings") else None
    return _layers_of(layers) if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding) else layers


def _parent_of_sharded_layers(model: nn.Module) -> nn.Module | None:
    """Returns the smallest module that calls all layers which FSDP shards; None if there is none below the model."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    sharded = (FSDPModule, FullyShardedDataParallel)
    paths = [name.split(".") for name, submodule in model.named_modules() if name and isinstance(submodule, sharded)]
    path = os.path.commonprefix(paths)
    while path:
        module = model.get_submodule(".".join(path))
        # Lists and dictionaries of modules have no forward of their own.
        if type(module).forward is not nn.Module.forward and not isinstance(module, sharded):
            return module
        path = path[:-1]
    return None


def _random_states(inputs: Mapping[str, Any]) -> list[bytes]:
    """Returns the random states of the CPU and of the inputs' devices."""
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), *get_device_states(*inputs.values())[1])]


_CURE = "set compile_layers = True in the class or, under FSDP, remove the mixin"


def _pop_once(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
    if not outputs:
        raise RuntimeError(
            f"LossTrainerMixin runs the layers once per step, but this model's forward calls them again: {_CURE}"
        )
    return outputs.pop()


class _Decoded(BaseException):
    """Raised to end a forward once its decoder has run."""
