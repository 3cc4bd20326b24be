"""Trainers of other libraries: each run is compared, step by step, with the same run without us.

Skipped where a library is not installed: `make matrix` has an environment with the newest ones.
"""

import importlib
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import thunder_flce
from front_ends import assert_fused, decisions
from ranks import as_processes
from reference import composed, map_logits
from thunder_flce import NotFusedError, NotFusedWarning, backend
from thunder_flce.integrations import trl as our_trl

transformers = pytest.importorskip("transformers", reason="needs the extra 'examples'")
accelerate = pytest.importorskip("accelerate", reason="needs the extra 'examples'")

import tiny  # noqa: E402
import zoo  # noqa: E402

B16 = torch.bfloat16
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
needs_trl = pytest.mark.skipif(not find_spec("trl"), reason="needs TRL")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def state_of_accelerate(monkeypatch):
    """The process keeps the mixed precision of the last trainer."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def history(trainer):
    """Losses, norms of gradients and metrics that a trainer has logged; no times."""
    logged = [item for entry in trainer.state.log_history for item in sorted(entry.items())]
    times = re.compile("time|second|flos|train_loss|epoch")
    logged = [(name, float(value)) for name, value in logged if not times.search(name)]
    assert len(logged) > 3
    return logged


def assert_same(trainer, our_trainer, rtol=1e-4):
    (names, expected), (our_names, values) = zip(*history(trainer)), zip(*history(our_trainer))  # noqa: B905
    assert names == our_names
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=rtol, atol=1e-5)


def arguments(folder, config=transformers.TrainingArguments, **settings):
    """Arguments of a run of three steps, of two micro-batches each."""
    return config(**{
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
        "optim": "sgd", "learning_rate": 0.1, "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": 0, **settings,
    })  # fmt: skip


def collate(rows):
    """Pads rows on the right; padding is no label."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    ids, mask = pad(tokens, batch_first=True), pad(list(map(torch.ones_like, tokens)), batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class OurTrainer(thunder_flce.LossTrainerMixin, transformers.Trainer):
    """The class that a user writes; in these tests, a loss that is not fused is an error."""

    backend_options = {"strict": True}


def train(trainer_class, folder, *, model=None, settings=None, rows=None, **others):
    model = tiny.model(num_hidden_layers=0) if model is None else model
    rows = tiny.rows(16) if rows is None else rows
    others |= {"train_dataset": rows, "eval_dataset": rows[:6], "data_collator": collate}
    trainer = trainer_class(model=model, args=arguments(folder, **(settings or {})), **others)
    transformers.set_seed(0)
    trainer.train()
    trainer.evaluate()
    return trainer


def compiled_loss(only, batch):
    """The loss of a model that returns only its loss, compiled."""
    step = torch.compile(only, backend="thunder_flce", options={"strict": True})
    loss = step(**batch)
    assert_fused(step, times=1)
    return loss


@pytest.fixture
def not_fused(monkeypatch):
    """A check that a step raises an error with `strict`, and else warns; returns the step's result."""

    def check(step, message):
        with pytest.raises(NotFusedError, match=message):
            step()
        monkeypatch.setattr(OurTrainer, "backend_options", {})
        with pytest.warns(NotFusedWarning, match=message):
            return step()

    return check


def assert_plans(trainer):
    """One for the first length, one for all others, and one for the evaluation, which needs no gradient."""
    report = thunder_flce.explain(trainer.compiled_loss)
    strategies = [decision.plan.strategy for decision in report.decisions]
    assert strategies in (["gradients_in_forward"] * count + ["loss_only"] for count in (1, 2)), strategies
    assert len(report) == len(strategies)


def accuracy(results):
    predicted, labels = results.predictions.argmax(-1)[:, :-1], results.label_ids[:, 1:]
    return {"accuracy": (predicted == labels)[labels != -100].mean()}


def shifted_by_one(outputs, labels, num_items_in_batch=None):
    """The loss that is usual, and 1; older versions give no number of items in the evaluation."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count + 1


def with_adapter(model_settings=None, **settings):
    """Returns a builder for a model of peft."""

    def make():
        peft, model = pytest.importorskip("peft"), tiny.model(**(model_settings or {}))
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        return peft.get_peft_model(model, config)

    return make


def t5():
    sizes = {"vocab_size": tiny.VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


CHECKPOINTS = {"gradient_checkpointing": True}
WITHOUT_REENTRY = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
TRAINED_HEAD = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
# One program serves all steps.
ONE_LENGTH = [{"input_ids": row["input_ids"][:4]} for row in tiny.rows(16)]
RUNS = {
    "lengths": {},
    "bf16": {"settings": {"bf16": True}},
    "logged warnings": {
        "model": partial(tiny.model, "Gemma2", num_hidden_layers=0, use_cache=False), "rows": ONE_LENGTH,
    },
    "encoder and decoder": {"model": t5, "rows": ONE_LENGTH},
    "label smoothing": {"settings": {"label_smoothing_factor": 0.1}},
    "gradient checkpointing": {"settings": CHECKPOINTS, "model": tiny.model, "rows": ONE_LENGTH},
    "predictions and metrics": {"settings": {"max_steps": 1}, "compute_metrics": accuracy},
    "loss function": {"settings": {"max_steps": 2}, "compute_loss_func": shifted_by_one},
    "adapter of the head": {
        "settings": {"label_smoothing_factor": 0.1}, "model": with_adapter(target_modules=["q_proj", "lm_head"]),
    },
    "trained head": {"model": with_adapter(**TRAINED_HEAD)},
    "tied head": {"model": with_adapter({"tie_word_embeddings": True}, **TRAINED_HEAD)},
    "frozen head": {"settings": CHECKPOINTS | WITHOUT_REENTRY, "model": with_adapter(target_modules=["q_proj"])},
}  # fmt: skip

COMPILED_LAYERS = ("logged warnings", "gradient checkpointing", "frozen head")


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(
    ("name", "compile_layers"),
    [(name, False) for name in RUNS] + [(name, True) for name in COMPILED_LAYERS],
)
def test_trainer(name, compile_layers, tmp_path, monkeypatch):
    monkeypatch.setattr(OurTrainer, "compile_layers", compile_layers)
    run = dict(RUNS[name])
    make = run.pop("model", partial(tiny.model, num_hidden_layers=0))
    theirs, ours = (train(kind, tmp_path, model=make(), **run) for kind in (transformers.Trainer, OurTrainer))
    assert_same(theirs, ours, 2e-2 if name == "bf16" else 1e-4)
    assert ours.model.config.to_dict() == theirs.model.config.to_dict()
    if "metrics" not in name:
        assert_plans(ours)
        return
    assert "eval_accuracy" in ours.state.log_history[-1]
    predictions = [torch.tensor(trainer.predict(tiny.rows(4)).predictions) for trainer in (ours, theirs)]
    torch.testing.assert_close(*predictions)


@torch._dynamo.config.patch(recompile_limit=2)
def test_several_trainers_in_a_process(tmp_path):
    """Each is compiled, also where one alone needs as many programs as Dynamo allows a function."""
    trainers = [train(OurTrainer, tmp_path, settings={"max_steps": 1}, rows=ONE_LENGTH) for _ in range(2)]
    first, second = map(decisions, trainers)
    assert len(first) == len(second) == 2 and first[0] is not second[0]


ALL = {"bf16": True, "label_smoothing_factor": 0.1, "gradient_checkpointing": True}


def _on_a_rank(rank, folder):
    """Compares our Trainer's numbers with the Trainer's, as torchrun starts them; returns ours."""
    histories = []
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.Inductor, "__call__", lambda self, graph, inputs: graph)
        for name, value in environment.items():
            patch.setenv(name, str(value))
        for others, layers, rows in (({}, 0, tiny.rows(32)), (ALL, 1, 2 * ONE_LENGTH)):
            settings = {"average_tokens_across_devices": True, "ddp_backend": "gloo", **others}
            theirs, ours = (
                train(kind, folder, model=tiny.model(num_hidden_layers=layers), settings=settings, rows=rows)
                for kind in (transformers.Trainer, OurTrainer)
            )
            # Mixed precision of accelerate has a forward of its own there.
            assert ("forward" in vars(theirs.model)) == ("forward" in vars(ours.model))
            assert_plans(ours)
            assert_same(theirs, ours, 2e-2 if others else 1e-4)
            histories.append(history(ours))
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            torch._dynamo.reset()
    return histories


def test_two_processes(tmp_path):
    """The same numbers as without us and, but for the evaluation, as one process has with the same batches."""
    results = as_processes(2, partial(_on_a_rank, folder=str(tmp_path)))
    assert all(isinstance(result, list) for result in results), results
    one = train(transformers.Trainer, tmp_path, settings={"gradient_accumulation_steps": 4}, rows=tiny.rows(32))
    histories = (history(one), results[0][0])
    expected, values = ([value for name, value in logged if "eval" not in name] for logged in histories)
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def _sharded(model, version, dtype):
    """Makes units of FSDP of a model's layers, as accelerate does on GPUs."""
    layers = [*model.model.layers]
    if version == 1:
        mixed = None if dtype is None else fsdp.MixedPrecision(dtype, torch.float32)
        policy = partial(fsdp.wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: module in layers)
        return fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, mixed_precision=mixed, device_id=torch.device("cpu")
        )
    settings = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if dtype is not None:
        settings["mp_policy"] = fsdp.MixedPrecisionPolicy(dtype, torch.float32)
    for layer in layers:
        fsdp.fully_shard(layer, **settings)
    return fsdp.fully_shard(model, **settings)


def _sharded_on_a_rank(rank, version, dtype, tied, folder):
    """Returns losses and norms of gradients, step by step, of the Trainer and of ours."""
    histories = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.Inductor, "__call__", lambda self, graph, inputs: graph)
        for trainer_class in (transformers.Trainer, OurTrainer):
            model = tiny.model("Llama", num_hidden_layers=2, tie_word_embeddings=tied)
            trainer = trainer_class(model=model, args=arguments(folder))
            model = _sharded(model, version, dtype)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            histories.append([])
            for first in (0, 4, 8):
                inputs = collate(ONE_LENGTH[first + rank :: 2][:2])
                loss = trainer.compute_loss(model.train(), inputs, num_items_in_batch=torch.tensor(20))
                loss.backward()
                clip = getattr(model, "clip_grad_norm_", partial(torch.nn.utils.clip_grad_norm_, model.parameters()))
                norm = clip(1.0)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                histories[-1].append([loss.item(), norm.item()])
                optimizer.step()
                optimizer.zero_grad()
        assert {decision.plan.strategy for decision in decisions(trainer.compiled_loss)} == {"gradients_in_forward"}
        assert "forward" not in {name for module in model.modules() for name in vars(module)}
        inner = trainer.accelerator.unwrap_model(model)
        patch.setattr(inner, "forward", lambda forward=inner.forward, **inputs: forward(**inputs) and forward(**inputs))
        patch.setattr(OurTrainer, "backend_options", {})
        with pytest.raises(RuntimeError, match="the layers once per step, but this model's forward calls them again"):
            OurTrainer(model=tiny.model(), args=arguments(folder)).compute_loss(model, inputs)
    return histories


@pytest.mark.parametrize("version, dtype, tied", [(1, None, True), (1, B16, False), (2, None, False), (2, B16, True)])
def test_sharded(version, dtype, tied, tmp_path):
    """By FSDP, whose hooks around each layer break graphs."""
    run = partial(_sharded_on_a_rank, version=version, dtype=dtype, tied=tied, folder=str(tmp_path))
    for histories in as_processes(2, run):
        assert isinstance(histories, list), histories
        theirs, ours = map(torch.tensor, histories)
        torch.testing.assert_close(ours, theirs, rtol=1e-4 if dtype is None else 2e-2, atol=1e-5)


class CallsItsLayers(torch.nn.Module):
    """A model that calls no module around its layers: neither a dictionary, nor a decoder that has a forward."""

    def __init__(self, around):
        super().__init__()
        self.decoder = around({"layers": torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))})
        self.embedding, self.head, self.calls = torch.nn.Embedding(tiny.VOCAB, 32), torch.nn.Linear(32, tiny.VOCAB), 0

    def forward(self, input_ids, labels, attention_mask):
        hidden = self.embedding(input_ids)
        self.calls += 1
        for layer in self.decoder["layers"]:
            hidden = layer(hidden).tanh()
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


class UncalledDecoder(torch.nn.ModuleDict):
    def forward(self, hidden):
        raise AssertionError("it is not called")


def _without_a_decoder_on_a_rank(rank, around, folder):
    """Returns how often the forward runs in three steps."""
    model = CallsItsLayers(around)
    trainer = OurTrainer(model=model, args=arguments(folder))
    trainer.compiled_loss = trainer._loss
    for layer in model.decoder["layers"]:
        fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for _ in range(3):
        trainer.compute_loss(model, collate(tiny.rows(2))).backward()
    return model.calls


@pytest.mark.parametrize(("around", "calls"), [(torch.nn.ModuleDict, 3), (UncalledDecoder, 4)])
def test_sharded_without_a_decoder(around, calls, tmp_path):
    """The layers run once a step; where only a forward shows that a module is not called, once more in all."""
    run = partial(_without_a_decoder_on_a_rank, around=around, folder=str(tmp_path))
    assert as_processes(2, run) == [calls] * 2


def calls_its_layers_twice():
    model = tiny.model("Llama")

    def looped(input_ids=None, forward=model.model.forward, **inputs):
        if input_ids is not None:
            inputs["inputs_embeds"] = model.model.embed_tokens(input_ids)
            inputs["inputs_embeds"] = model.model(**inputs).last_hidden_state
        return forward(**inputs)

    model.model.forward = looped
    return model


def has_its_head_in_its_decoder():
    """As BLIP."""

    class Captioner(transformers.Qwen2PreTrainedModel):
        def __init__(self, decoder):
            super().__init__(decoder.config)
            self.text_decoder = decoder

        def get_decoder(self):
            return self.text_decoder

        def forward(self, input_ids, attention_mask=None, labels=None):
            return self.text_decoder(input_ids, attention_mask, labels=labels)

    return Captioner(tiny.model())


def has_hooks():
    """As DeepSpeed has them around the model, where they break the graph."""
    model = tiny.model()
    model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return model


def is_its_own_base():
    """As Gemma 3."""
    model = tiny.model("Llama")
    type(model).base_model_prefix = "another"
    return model


NEWER = pytest.mark.skipif(VERSION >= (5, 0), reason="newer ones find a decoder by the prefix alone, and all have it")


@pytest.mark.parametrize(("make", "compile_layers"), [
    (partial(tiny.model, "Llama"), False),
    (partial(tiny.model, "Llama"), True),
    # Its base_model is not called.
    (partial(tiny.model, "OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0), False),
    pytest.param(is_its_own_base, False, marks=NEWER),
    (calls_its_layers_twice, False),
    (has_its_head_in_its_decoder, False),
    (has_hooks, False),
])  # fmt: skip
def test_a_model(make, compile_layers, tmp_path, monkeypatch):
    """The loss is the model's, and its layers run as they are, unless they are to be compiled."""
    monkeypatch.setattr(OurTrainer, "compile_layers", compile_layers)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "base_model_prefix", "model")
    model, inputs, traced = make(), collate(tiny.rows(4)), []
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            module.register_forward_hook(lambda *_: traced.append(torch.compiler.is_compiling()))
    trainer = OurTrainer(model=model, args=arguments(tmp_path))
    loss = trainer.compute_loss(model, dict(inputs))
    assert set(traced) == {compile_layers}
    torch.testing.assert_close(loss, model(**inputs).loss)
    assert_fused(trainer.compiled_loss)


def test_random_numbers_before_the_layers(tmp_path):
    """A mask of inputs and labels would be drawn twice; one of the inputs alone may be."""
    model = tiny.model("Llama")

    def masked(input_ids, labels, forward=model.forward, labels_are_masked=True, **others):
        mask = torch.rand(input_ids.shape) < 0.5
        labels = labels.masked_fill(~mask, -100) if labels_are_masked else labels
        return forward(input_ids=input_ids.masked_fill(mask, 2), labels=labels, **others)

    inputs, losses = collate(tiny.rows(4)), []
    model.forward = partial(masked, labels_are_masked=False)
    for trainer_class in (transformers.Trainer, OurTrainer):
        trainer = trainer_class(model=model, args=arguments(tmp_path))
        transformers.set_seed(0)
        losses.append([trainer.compute_loss(model, dict(inputs)).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0])
    model.forward = masked
    with pytest.raises(RuntimeError, match="draws random numbers there, .* set compile_layers = True in the class"):
        trainer.compute_loss(model, dict(inputs))


def test_a_custom_label_smoother(tmp_path):
    class Twice(transformers.trainer_pt_utils.LabelSmoother):
        def __call__(self, *args, **settings):
            return 2 * super().__call__(*args, **settings)

    batch, losses = collate(tiny.rows(3)), []
    for trainer_class in (transformers.Trainer, OurTrainer):
        trainer = trainer_class(model=tiny.model(num_hidden_layers=0), args=arguments(tmp_path))
        trainer.label_smoother = Twice(epsilon=0.1)
        losses.append(trainer.compute_loss(trainer.model, dict(batch)))
    torch.testing.assert_close(*losses)


def test_data_parallel(tmp_path, not_fused):
    """Of threads, as the Trainer has it for several GPUs in one process."""
    trainer, inputs = OurTrainer(model=tiny.model(), args=arguments(tmp_path)), collate(tiny.rows(4))
    step = partial(trainer.compute_loss, torch.nn.DataParallel(trainer.model), inputs)
    loss = not_fused(step, "nn.DataParallel .* start one process for each")
    torch.testing.assert_close(loss, trainer.model(**inputs).loss)


@pytest.mark.parametrize(("options", "settings", "message"), [
    (thunder_flce.Options(chunk_rows=4), {}, 'options must be a dict, such as .*"chunk_rows": 512.*, but got Options'),
    ({"chunk_row": 4}, {}, "has no option 'chunk_row'; did you mean 'chunk_rows'"),
    ({}, {"torch_compile": True}, "torch_compile must be False in TrainingArguments with LossTrainerMixin"),
])  # fmt: skip
def test_wrong_settings(options, settings, message, tmp_path, monkeypatch):
    """They are errors before the first step."""
    monkeypatch.setattr(OurTrainer, "backend_options", options)
    changed = arguments(tmp_path)
    # Not as an argument, of which accelerate would tell later trainers of the process.
    vars(changed).update(settings)
    with pytest.raises((TypeError, RuntimeError, ValueError), match=message):
        OurTrainer(model=tiny.model(num_hidden_layers=0), args=changed)


def test_batches_without_labels(tmp_path):
    rows, no_labels = tiny.rows(4), lambda rows: {"input_ids": collate(rows)["input_ids"]}
    settings = {"args": arguments(tmp_path), "train_dataset": rows, "data_collator": no_labels}
    trainer = OurTrainer(model=tiny.model(num_hidden_layers=0), **settings)
    with pytest.raises(ValueError, match="The model did not return a loss from the inputs"):
        trainer.train()


@pytest.mark.parametrize(("members", "message"), [
    ({"__module__": "trl.trainer.sft_trainer"}, r"MyTrainer has LossTrainerMixin, but TRL .*replace_trl_head\(\)"),
    ({"compute_loss": lambda *_: None}, "MyTrainer has LossTrainerMixin before a compute_loss of its own"),
])  # fmt: skip
def test_trainers_that_the_mixin_does_not_fit(members, message, tmp_path):
    base = type("Base", (transformers.Trainer,), members)
    ours = type("MyTrainer", (thunder_flce.LossTrainerMixin, base), {})
    with pytest.raises(TypeError, match=message):
        ours(model=tiny.model(num_hidden_layers=0), args=arguments(tmp_path))
    with pytest.raises(TypeError, match="MyTrainer has LossTrainerMixin behind the Trainer"):
        type("MyTrainer", (base, thunder_flce.LossTrainerMixin), {})


class OwnLoss(OurTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class AsksForOutputs(OurTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        both = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return both if return_outputs else both[0]


@pytest.mark.parametrize("trainer_class", [OwnLoss, AsksForOutputs])
def test_training_without_the_compiled_loss(trainer_class, tmp_path, not_fused):
    """The mixin cannot see at the start that a subclass does not call it."""
    name, step = trainer_class.__name__, partial(train, trainer_class, tmp_path, settings={"max_steps": 1})
    cause = "has a compute_loss of its own, which .* give the Trainer a compute_loss_func"
    not_fused(step, f"{name} trains without the loss of LossTrainerMixin.* {cause}")


def test_a_loss_function_without_labels(tmp_path, monkeypatch):
    """The Trainer's own loss, which depends on the version of transformers."""

    class Model(torch.nn.Module):
        def forward(self, start_positions):
            return {"loss": start_positions.mean(), "logits": start_positions}

    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].sum()

    monkeypatch.setattr(OurTrainer, "backend_options", {})
    inputs = {"start_positions": torch.arange(4.0)}
    theirs, ours = (
        kind(model=Model(), args=arguments(tmp_path), compute_loss_func=compute_loss_func)
        for kind in (transformers.Trainer, OurTrainer)
    )
    with pytest.warns(NotFusedWarning, match='the batch has no "labels"'):
        loss = ours.compute_loss(ours.model, dict(inputs))
    assert loss == theirs.compute_loss(theirs.model, dict(inputs))


def test_a_compute_loss_around_the_compiled_one(tmp_path):
    class Scales(OurTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return result if return_outputs else 2 * result

    assert_plans(train(Scales, tmp_path, settings={"max_steps": 1}))


def test_reentrant_checkpoints_of_a_frozen_trunk(tmp_path, monkeypatch):
    monkeypatch.setattr(OurTrainer, "compile_layers", True)
    model = tiny.model()
    model.requires_grad_(False).lm_head.requires_grad_(True)
    model.enable_input_require_grads()
    settings = CHECKPOINTS | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match='gradient_checkpointing_kwargs must be {"use_reentrant": False}'):
        train(OurTrainer, tmp_path, model=model, settings=settings)


@pytest.mark.parametrize("prepared", ["loss_only", "the model, then loss_only", "the model of loss_only"])
def test_accelerate(prepared):
    """Mixed precision sets a forward on what is prepared."""
    model = tiny.model(num_hidden_layers=0)
    only = None if "then" in prepared else thunder_flce.loss_only(model)
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(only if prepared == "loss_only" else model)
    only = thunder_flce.loss_only(model) if only is None else only
    batch = collate(tiny.rows(2))
    for loss in (only(**batch), compiled_loss(only, batch)):
        torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-2, atol=0)
    float32 = tiny.model(num_hidden_layers=0)(**batch).loss
    assert not torch.allclose(only(**batch), float32, rtol=1e-6)


def test_loss_only_of_gpt2():
    """It has no type of the loss, and a warning that says so would break the graph."""
    model, batch = tiny.model("GPT2").eval(), collate(tiny.rows(2))
    torch.testing.assert_close(compiled_loss(thunder_flce.loss_only(model), batch), model(**batch).loss)


# TRL.


def head_of_trl(hidden, weight, bias, targets, temperature, _, softcap, scale, names):
    """The results that TRL's documentation says, in float64."""
    z = map_logits(F.linear(hidden.double(), weight.double(), bias.double()), softcap=softcap, logit_scale=scale)
    outputs = ("log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "argmax")
    _, *results, argmax = composed(z / temperature, targets, outputs=outputs)
    return *results, argmax == targets


def replace_head(monkeypatch, head, version="1.16.0"):
    """Replaces the head of a package that has nothing of TRL but its head, and its version; returns ours."""
    utils = SimpleNamespace(_ChunkedLogProbFunction=head)
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__=version, trainer=SimpleNamespace(utils=utils)))
    monkeypatch.setitem(sys.modules, "trl.trainer", SimpleNamespace(utils=utils))
    thunder_flce.replace_trl_head()
    return utils._ChunkedLogProbFunction


class HeadOfTrl:
    """TRL's, but for its body."""

    apply = staticmethod(lambda *arguments: "TRL's own")

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
    ):
        """Not called."""


F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(("dtypes", "temperature", "softcap", "scale"), [
    ((F64, F64), 0.7, None, 0.5), ((F64, F64), 0.7, 3.0, 1.5),
    ((F32, B16), 1.0, None, 1.0), ((B16, F32), 0.7, 3.0, 1.5),
])  # fmt: skip
def test_numbers_of_the_head(monkeypatch, dtypes, temperature, softcap, scale):
    head, (hidden_dtype, weight_dtype) = replace_head(monkeypatch, HeadOfTrl), dtypes
    hidden = torch.randn(11, 16, dtype=hidden_dtype, requires_grad=True)
    weight = torch.randn(23, 16, dtype=weight_dtype, requires_grad=True)
    bias = torch.randn(23, dtype=weight_dtype, requires_grad=True)
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    others = (torch.randint(23, (11,)), temperature, 32768, softcap, scale, names)
    tolerance = {F64: 1e-9, F32: 1e-5, B16: 5e-2}[hidden_dtype]
    results = head.apply(hidden, weight, bias, *others)
    expected = head_of_trl(hidden, weight.to(hidden_dtype), bias.to(hidden_dtype), *others)
    for result, right in zip(results[:4], expected, strict=False):
        torch.testing.assert_close(result.double(), right, rtol=tolerance, atol=4 * tolerance)
    assert results[4].dtype == torch.bool
    if hidden_dtype == F64:
        assert torch.equal(results[4], expected[4])
    weights = torch.randn(2, 11, dtype=F64)
    sums = ((weights * torch.stack(outputs[:2])).sum() for outputs in (results, expected))
    gradients = (torch.autograd.grad(total, (hidden, weight, bias)) for total in sums)
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=20 * tolerance)


def test_calls_of_the_head(monkeypatch):
    head = replace_head(monkeypatch, HeadOfTrl)
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4)
    arguments = (hidden, weight, None, torch.empty(0, dtype=torch.int64), 1.0, 32768, None, 1.0)
    log_probs, *others = head.apply(*arguments, ("log_probs",))
    assert log_probs.shape == (0,) and log_probs.requires_grad and others == [None] * 4
    weight.ds_id = 3  # As DeepSpeed's ZeRO-3 marks what it divides.
    with pytest.warns(UserWarning, match="with ZeRO-3, TRL's own head"):
        assert head.apply(*arguments, ()) == "TRL's own"
    thunder_flce.replace_trl_head(options=thunder_flce.Options(row_kernels="triton"))  # Again is fine.
    head = sys.modules["trl.trainer"].utils._ChunkedLogProbFunction
    with pytest.raises(ValueError, match='row_kernels="triton" runs on CUDA'):
        head.apply(torch.ones(2, 4), torch.ones(9, 4), None, torch.arange(2), *arguments[4:], ())
    with pytest.raises(TypeError, match="options must be thunder_flce.Options"):
        thunder_flce.replace_trl_head(options={"chunk_rows": 4})


@pytest.mark.parametrize("head", [None, SimpleNamespace(forward=lambda ctx, hidden, weight, targets: None)])
def test_another_trl(monkeypatch, head):
    actual = "does not exist" if head is None else "takes hidden, weight, targets"
    with pytest.raises(ImportError, match=f"needs trl.trainer.utils._Chunked.*in TRL 9.0, it {actual}. Install trl=="):
        replace_head(monkeypatch, head, version="9.0")


def make_trl_trainer(name, folder, *, config=None, model=None, **others):
    """Returns a trainer of TRL, with a model from a folder, as TRL loads its reference model, and with data for it."""
    import trl
    from datasets import Dataset

    folder.mkdir(exist_ok=True)
    (tiny.model() if model is None else model).save_pretrained(folder / "model")
    texts = tiny.sentences(24)
    columns = {"SFT": ["text"], "DPO": ["prompt", "chosen", "rejected"], "KTO": ["prompt", "completion"]}
    columns = columns.get(name, ["prompt"])
    rows = [{column: texts[i - at] for at, column in enumerate(columns)} for i in range(24)]
    if name == "KTO":
        rows = [{**row, "label": bool(i % 2)} for i, row in enumerate(rows)]
    if (config or {}).get("assistant_only_loss"):
        messages = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant") * 12, texts, strict=True)
        ]
        rows = [{"messages": messages[at : at + 2]} for at in range(0, len(messages), 2)]
    if name in ("GRPO", "RLOO"):
        others["reward_funcs"] = lambda completions, **_: [float(len(text.split()) % 5) for text in completions]
        config = {"num_generations": 2, "max_completion_length": 8, "beta": 0.04, "num_iterations": 2, **config}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    others |= {"train_dataset": Dataset.from_list(rows), "processing_class": tiny.tokenizer()}
    args = arguments(folder, getattr(trl, f"{name}Config"), **(config or {}))
    return getattr(trl, f"{name}Trainer")(model=loaded, args=args, **others)


TRL_RUNS = {
    "SFT": {}, "SFT, packing": {"packing": True, "max_length": 32}, "SFT, dft": {"loss_type": "dft"}, "SFT, LoRA": {},
    "SFT, padding-free": {"padding_free": True, "max_length": None}, "SFT, bf16": {"bf16": True},
    "SFT, assistant only": {"assistant_only_loss": True}, "DPO": {}, "DPO, weighting": {"use_weighting": True},
    "KTO": {}, "GRPO, two iterations": {"temperature": 0.7}, "GRPO, Gemma 2": {"temperature": 0.7}, "RLOO": {},
}  # fmt: skip
"""Configurations of runs, by the name of the trainer and what is particular"""


@needs_trl
@pytest.mark.parametrize("name", TRL_RUNS)
def test_trl(name, tmp_path, monkeypatch):
    """All that TRL logs: losses, norms of gradients, entropies, accuracies, rewards, divergences."""
    kind, config = name.partition(",")[0], TRL_RUNS[name]
    utils = importlib.import_module("trl.trainer.utils")
    monkeypatch.setattr(utils, our_trl._NAME, utils._ChunkedLogProbFunction)
    others = {}
    if name == "SFT, LoRA":
        from peft import LoraConfig

        others["peft_config"] = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = tiny.model("Gemma2", head_dim=8, final_logit_softcapping=5.0) if "Gemma" in name else None

    def run():
        transformers.set_seed(0)
        trainer = make_trl_trainer(kind, tmp_path, config=config, model=model, **others)
        trainer.train()
        return trainer

    theirs, calls = run(), []
    thunder_flce.replace_trl_head()
    apply = utils._ChunkedLogProbFunction.apply
    utils._ChunkedLogProbFunction = SimpleNamespace(apply=lambda *values: (calls.append(values), apply(*values))[1])
    assert_same(theirs, run(), rtol=2e-2 if "bf16" in config else 2e-4)
    assert len(calls) >= 5


@needs_trl
def test_loss_only_of_what_trl_holds(tmp_path):
    model = make_trl_trainer("SFT", tmp_path).model
    assert "forward" in vars(model)
    batch = collate(tiny.rows(2))
    loss = compiled_loss(thunder_flce.loss_only(model), batch)
    torch.testing.assert_close(loss, tiny.model()(**batch).loss, rtol=1e-4, atol=0)


# litgpt and Lightning. Its Trainer is that of lightning 2.6.


def litgpt_loss():
    """litgpt's model with its loss, as in its `pretrain`."""
    litgpt = pytest.importorskip("litgpt", reason="needs the extra 'examples'")
    sizes = {"block_size": 32, "vocab_size": 61, "padded_vocab_size": 64, "n_layer": 0, "n_head": 4, "n_embd": 32}
    torch.manual_seed(0)
    return zoo.Litgpt(litgpt.GPT(litgpt.Config(**sizes, intermediate_size=48)))


def token_batches(lengths):
    """Yields tokens, and the next ones, of which the first are a prompt."""
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        tokens = torch.randint(61, (3, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:].clone().index_fill_(1, torch.arange(2), -100)


def by_backend(module):
    return torch.compile(module, backend="thunder_flce")


@pytest.mark.parametrize(("compiled_by", "is_first", "precision", "lengths"), [
    (thunder_flce.jit, True, "32-true", (12, 12)),
    (by_backend, False, "32-true", (12, 17, 9)),
    (by_backend, True, "bf16-mixed", (12, 17, 9)),
], ids=["jit, then setup", "setup, then the backend", "the backend, then setup, bf16"])  # fmt: skip
def test_fabric(compiled_by, is_first, precision, lengths, monkeypatch):
    lightning_fabric = pytest.importorskip("lightning.fabric", reason="needs the extra 'examples'")
    # As lightning has it, until a use of thunder's thunderfx in the same process takes that away.
    capturing = importlib.import_module("lightning.fabric.wrappers")._capture_compile_kwargs
    monkeypatch.setattr(torch, "compile", capturing(torch.compile))

    def run(before=lambda module: module, after=lambda step: step):
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, precision=precision)
        module, logged = before(litgpt_loss()), []
        step, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
        step = after(step)
        for tokens, targets in token_batches(lengths):
            loss = step(tokens, targets)
            fabric.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(step.parameters(), 100)
            logged += [loss.item(), norm.item()]
            optimizer.step()
            optimizer.zero_grad()
        return torch.tensor(logged), step

    (expected, _), (logged, step) = run(), run(**{"before" if is_first else "after": compiled_by})
    torch.testing.assert_close(logged, expected, rtol=2e-2 if "bf16" in precision else 1e-4, atol=0)
    assert_fused(step)


def test_torchtitan():
    losses = pytest.importorskip("torchtitan.components.loss", reason="needs torchtitan")
    program = next(program for title, program in PROGRAMS if title == "torchtitan")
    ours = {}
    exec(program, ours)
    hidden, head = torch.randn(2, 16, 8, requires_grad=True), torch.nn.Linear(8, 50, bias=False)
    labels = torch.randint(50, (2, 16)).index_fill_(1, torch.arange(3), -100)
    results = []
    for config in (losses.ChunkedLossWrapper.Config(num_chunks=4), ours["FusedLoss"].Config()):
        loss = config.build()
        loss.set_lm_head(head)
        hidden.grad, head.weight.grad = None, None
        value, _ = loss(hidden, labels, torch.tensor(26))
        value.backward()
        results.append((value.detach(), hidden.grad, head.weight.grad))
    assert type(loss).__name__ == "FusedLoss"
    torch.testing.assert_close(*results)


# The page.

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
PROGRAMS = [
    (section.partition("\n")[0], program)
    for section in PAGE.split("\n## ")[1:]
    for program in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("title", "program"), PROGRAMS, ids=[title for title, _ in PROGRAMS])
def test_programs_of_the_page(title, program, tmp_path, monkeypatch, capsys):
    """With models, data and arguments for the names that a user has."""
    for library in re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    tiny.model(num_hidden_layers=1 if "peft" in title else 0).save_pretrained("model")
    models = {name: transformers.AutoModelForCausalLM.from_pretrained("model") for name in ("model", "teacher")}
    names = {**models, "tokenizer": tiny.tokenizer()}
    if title == "TRL":
        import trl
        from datasets import Dataset

        utils = importlib.import_module("trl.trainer.utils")
        monkeypatch.setattr(utils, our_trl._NAME, utils._ChunkedLogProbFunction)
        columns = {"texts": ("text",), "preferences": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}
        for name, columns_of_set in columns.items():
            names[name] = Dataset.from_list([dict.fromkeys(columns_of_set, text) for text in tiny.sentences(8)])
        generation = {"num_generations": 2, "max_completion_length": 4}
        for kind, settings in (("SFT", {}), ("DPO", {}), ("GRPO", generation)):
            config = getattr(trl, f"{kind}Config")
            names[f"{kind.lower()}_arguments"] = arguments(tmp_path, config, max_steps=1, **settings)
        names["reward"] = lambda completions, **_: list(map(len, completions))
    elif "litgpt" in title:
        names |= {"gpt": litgpt_loss().model, "token_batches": token_batches((12, 17))}
    else:
        rows = tiny.rows(6)
        batches = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)
        names |= {"batches": batches, "optimizer": torch.optim.SGD(names["model"].parameters(), lr=0.1)}
        names |= {"arguments": arguments(tmp_path), "dataset": rows, "collate": collate}
    before = len(thunder_flce.explain().decisions)
    # Dynamo looks there for what a function reads, and keeps modules by their names.
    module = ModuleType(f"program_{PROGRAMS.index((title, program))}")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(program, vars(module))
    program_decisions = thunder_flce.explain().decisions[before:]
    assert all(decision.fused for decision in program_decisions)
    assert bool(program_decisions) == (title != "TRL" and "linear_cross_entropy" not in program)
    assert ("gradients in forward" in capsys.readouterr().out) == ("explain(" in program)
