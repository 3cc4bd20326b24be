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
from thunder_flce import NotFusedError, NotFusedWarning, backend
from thunder_flce.integrations import trl as our_trl

transformers = pytest.importorskip("transformers", reason="needs the extra 'examples'")
accelerate = pytest.importorskip("accelerate", reason="needs the extra 'examples'")

import tiny  # noqa: E402

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
    """What was logged, but for times: losses, norms of gradients, metrics."""
    logged = [each for entry in trainer.state.log_history for each in sorted(entry.items())]
    times = re.compile("time|second|flos|train_loss|epoch")
    logged = [(name, float(value)) for name, value in logged if not times.search(name)]
    assert len(logged) > 3
    return logged


def assert_same(trainer, of_ours, rtol=1e-4):
    (names, expected), (our_names, got) = zip(*history(trainer)), zip(*history(of_ours))  # noqa: B905
    assert names == our_names
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=rtol, atol=1e-5)


def arguments(folder, config=transformers.TrainingArguments, **settings):
    """Of a run of three steps, of two micro-batches each."""
    return config(**{
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
        "optim": "sgd", "learning_rate": 0.1, "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": 0, **settings,
    })  # fmt: skip


def collate(rows):
    """Padded on the right; padding is no label."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    ids, mask = pad(tokens, batch_first=True), pad(list(map(torch.ones_like, tokens)), batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class OurTrainer(thunder_flce.LossTrainerMixin, transformers.Trainer):
    """What a user writes; in these tests, what is not fused is an error."""

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


def assert_same_loss(model, folder):
    """Of one call, without a step."""
    trainer, inputs = OurTrainer(model=model, args=arguments(folder)), collate(tiny.rows(4))
    torch.testing.assert_close(trainer.compute_loss(model, dict(inputs)), model(**inputs).loss)
    assert_fused(trainer.compiled_loss)


def compiled_loss(only, batch):
    """Of a model that returns only its loss."""
    step = torch.compile(only, backend="thunder_flce", options={"strict": True})
    loss = step(**batch)
    assert_fused(step, times=1)
    return loss


@pytest.fixture
def not_fused(monkeypatch):
    """Asserts that a step raises where it is strict, and else warns; returns what it gives then."""

    def check(step, message):
        with pytest.raises(NotFusedError, match=message):
            step()
        monkeypatch.setattr(OurTrainer, "backend_options", {})
        with pytest.warns(NotFusedWarning, match=message):
            return step()

    return check


def assert_plans(trainer):
    """Once for the first length, once for all others, and once in the evaluation, which needs no gradient."""
    report = thunder_flce.explain(trainer.compiled_loss)
    strategies = [decision.plan.strategy for decision in report.decisions]
    assert strategies in (["gradients_in_forward"] * count + ["loss_only"] for count in (1, 2)), strategies
    assert len(report) == len(strategies)


def accuracy(results):
    predicted, labels = results.predictions.argmax(-1)[:, :-1], results.label_ids[:, 1:]
    return {"accuracy": (predicted == labels)[labels != -100].mean()}


def shifted_by_one(outputs, labels, num_items_in_batch=None):
    """Older versions give no number in the evaluation."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count + 1


def with_adapter(of_model=None, **of_adapter):
    """Makes a model of PEFT."""

    def make():
        peft, made = pytest.importorskip("peft"), tiny.model(**(of_model or {}))
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **of_adapter)
        return peft.get_peft_model(made, config)

    return make


def gpt2():
    sizes = {"vocab_size": tiny.VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


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
    "a decoder in what is not called": {
        "model": partial(tiny.model, "OPT", ffn_dim=48, word_embed_proj_dim=32), "rows": ONE_LENGTH,
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

WITH_LAYERS = ("logged warnings", "gradient checkpointing", "frozen head")


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(
    ("name", "compile_layers"),
    [(name, False) for name in RUNS] + [(name, True) for name in WITH_LAYERS],
)
def test_trainer(name, compile_layers, tmp_path, monkeypatch):
    monkeypatch.setattr(OurTrainer, "compile_layers", compile_layers)
    run = dict(RUNS[name])
    make = run.pop("model", partial(tiny.model, num_hidden_layers=0))
    expected, ours = (train(each, tmp_path, model=make(), **run) for each in (transformers.Trainer, OurTrainer))
    assert_same(expected, ours, 2e-2 if name == "bf16" else 1e-4)
    assert ours.model.config.to_dict() == expected.model.config.to_dict()
    if "metrics" not in name:
        assert_plans(ours)
        return
    assert "eval_accuracy" in ours.state.log_history[-1]
    found, right = (torch.tensor(each.predict(tiny.rows(4)).predictions) for each in (ours, expected))
    torch.testing.assert_close(found, right)


ALL = {"bf16": True, "label_smoothing_factor": 0.1, "gradient_checkpointing": True}


def _on_a_rank(rank, folder):
    """Compares what the Trainer logs with what ours does, as torchrun starts them; returns the latter."""
    found = []
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.Inductor, "__call__", lambda self, graph, inputs: graph)
        for name, value in environment.items():
            patch.setenv(name, str(value))
        for others, layers, rows in (({}, 0, tiny.rows(32)), (ALL, 1, 2 * ONE_LENGTH)):
            settings = {"average_tokens_across_devices": True, "ddp_backend": "gloo", **others}
            theirs, ours = (
                train(each, folder, model=tiny.model(num_hidden_layers=layers), settings=settings, rows=rows)
                for each in (transformers.Trainer, OurTrainer)
            )
            # Mixed precision of accelerate has a forward of its own there.
            assert ("forward" in vars(theirs.model)) == ("forward" in vars(ours.model))
            assert_plans(ours)
            assert_same(theirs, ours, 2e-2 if others else 1e-4)
            found.append(history(ours))
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            torch._dynamo.reset()
    return found


def test_two_processes(tmp_path):
    """The same as without us and, but for the evaluation, as one process with the same batches."""
    found = as_processes(2, partial(_on_a_rank, folder=str(tmp_path)))
    assert all(isinstance(each, list) for each in found), found
    one = train(transformers.Trainer, tmp_path, settings={"gradient_accumulation_steps": 4}, rows=tiny.rows(32))
    of_one, of_two = ([value for name, value in each if "eval" not in name] for each in (history(one), found[0][0]))
    torch.testing.assert_close(torch.tensor(of_two), torch.tensor(of_one), rtol=1e-4, atol=1e-5)


def _sharded(model, version, dtype):
    """A model whose layers are units of FSDP, as accelerate makes them on GPUs."""
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
    """Losses and norms of gradients, step by step, of the Trainer and of ours."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.Inductor, "__call__", lambda self, graph, inputs: graph)
        for trainer_class in (transformers.Trainer, OurTrainer):
            model = tiny.model("Llama", num_hidden_layers=2, tie_word_embeddings=tied)
            trainer = trainer_class(model=model, args=arguments(folder))
            model = _sharded(model, version, dtype)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            found.append([])
            for first in (0, 4, 8):
                inputs = collate(ONE_LENGTH[first + rank :: 2][:2])
                loss = trainer.compute_loss(model.train(), inputs, num_items_in_batch=torch.tensor(20))
                loss.backward()
                clip = getattr(model, "clip_grad_norm_", partial(torch.nn.utils.clip_grad_norm_, model.parameters()))
                norm = clip(1.0)
                found[-1].append([loss.item(), getattr(norm, "full_tensor", lambda norm=norm: norm)().item()])
                optimizer.step()
                optimizer.zero_grad()
        assert {each.plan.strategy for each in decisions(trainer.compiled_loss)} == {"gradients_in_forward"}
        assert "forward" not in {name for module in model.modules() for name in vars(module)}
        inner = trainer.accelerator.unwrap_model(model)
        patch.setattr(inner, "forward", lambda forward=inner.forward, **given: forward(**given) and forward(**given))
        patch.setattr(OurTrainer, "backend_options", {})
        with pytest.raises(RuntimeError, match="the layers once per step, but this model's forward calls them again"):
            OurTrainer(model=tiny.model(), args=arguments(folder)).compute_loss(model, inputs)
    return found


@pytest.mark.parametrize("version, dtype, tied", [(1, None, True), (1, B16, False), (2, None, False), (2, B16, True)])
def test_sharded(version, dtype, tied, tmp_path):
    """By FSDP, whose hooks around each layer break graphs."""
    run = partial(_sharded_on_a_rank, version=version, dtype=dtype, tied=tied, folder=str(tmp_path))
    for found in as_processes(2, run):
        assert isinstance(found, list), found
        torch.testing.assert_close(*map(torch.tensor, reversed(found)), rtol=1e-4 if dtype is None else 2e-2, atol=1e-5)


class CallsItsLayers(torch.nn.Module):
    """No module around them is called: neither a dictionary, nor a decoder that has a forward, too."""

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


class Decoder(torch.nn.ModuleDict):
    def forward(self, hidden):
        raise AssertionError("it is not called")


def _without_a_decoder_on_a_rank(rank, around, folder):
    """How often the forward runs in three steps."""
    model = CallsItsLayers(around)
    trainer = OurTrainer(model=model, args=arguments(folder))
    trainer.compiled_loss = trainer._loss
    for layer in model.decoder["layers"]:
        fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for _ in range(3):
        trainer.compute_loss(model, collate(tiny.rows(2))).backward()
    return model.calls


@pytest.mark.parametrize(("around", "calls"), [(torch.nn.ModuleDict, 3), (Decoder, 4)])
def test_sharded_without_a_decoder(around, calls, tmp_path):
    """The layers run once a step; where only a forward shows that a module is not called, once more in all."""
    run = partial(_without_a_decoder_on_a_rank, around=around, folder=str(tmp_path))
    assert as_processes(2, run) == [calls] * 2


GEMMA_3 = pytest.mark.skipif(VERSION >= (5, 0), reason="newer ones find a decoder by the prefix alone, and all have it")


@pytest.mark.parametrize(
    ("prefix", "compile_layers"), [("model", False), pytest.param("another", False, marks=GEMMA_3), ("model", True)]
)
def test_layers(prefix, compile_layers, tmp_path, monkeypatch):
    """They run as they are; also those of Gemma 3, whose base is the model itself."""
    monkeypatch.setattr(OurTrainer, "compile_layers", compile_layers)
    model, traced = tiny.model("Llama"), []
    monkeypatch.setattr(type(model), "base_model_prefix", prefix)
    model.model.layers[0].register_forward_hook(lambda *_: traced.append(torch.compiler.is_compiling()))
    assert_same_loss(model, tmp_path)
    assert traced == [compile_layers, False]


def that_calls_its_layers_twice():
    model = tiny.model("Llama")

    def looped(input_ids=None, own=model.model.forward, **given):
        if input_ids is not None:
            given["inputs_embeds"] = model.model.embed_tokens(input_ids)
            given["inputs_embeds"] = model.model(**given).last_hidden_state
        return own(**given)

    model.model.forward = looped
    return model


def with_the_head_in_its_decoder():
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


def with_hooks():
    """As DeepSpeed has them around the model, where they break the graph."""
    model = tiny.model()
    model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return model


@pytest.mark.parametrize("make", [that_calls_its_layers_twice, with_the_head_in_its_decoder, with_hooks])
def test_a_model(make, tmp_path):
    assert_same_loss(make(), tmp_path)


def test_random_numbers_before_the_layers(tmp_path):
    """A mask of the inputs that the loss has, too, would be drawn twice; what the loss does not read may be."""
    model = tiny.model("Llama")

    def masked(input_ids, labels, own=model.forward, is_lost=False, **given):
        is_masked = torch.rand(input_ids.shape) < 0.5
        labels = labels if is_lost else labels.masked_fill(~is_masked, -100)
        return own(input_ids=input_ids.masked_fill(is_masked, 2), labels=labels, **given)

    inputs, losses = collate(tiny.rows(4)), []
    model.forward = partial(masked, is_lost=True)
    for trainer_class in (transformers.Trainer, OurTrainer):
        trainer = trainer_class(model=model, args=arguments(tmp_path))
        transformers.set_seed(0)
        losses.append([trainer.compute_loss(model, dict(inputs)).item() for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1])
    model.forward = masked
    with pytest.raises(RuntimeError, match="draws random numbers there, .* set compile_layers = True in the class"):
        trainer.compute_loss(model, dict(inputs))


def test_a_label_smoother_of_ones_own(tmp_path):
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


def test_options_that_are_no_dictionary(tmp_path, monkeypatch):
    monkeypatch.setattr(OurTrainer, "backend_options", thunder_flce.Options(chunk_rows=4))
    trainer = OurTrainer(model=tiny.model(num_hidden_layers=0), args=arguments(tmp_path))
    with pytest.raises(Exception, match='options must be a dict, such as .*"chunk_rows": 512.*, but got Options'):
        trainer.training_step(trainer.model, collate(tiny.rows(4)))


def test_batches_without_labels(tmp_path):
    rows, no_labels = tiny.rows(4), lambda rows: {"input_ids": collate(rows)["input_ids"]}
    given = {"args": arguments(tmp_path), "train_dataset": rows, "data_collator": no_labels}
    trainer = OurTrainer(model=tiny.model(num_hidden_layers=0), **given)
    with pytest.raises(ValueError, match="The model did not return a loss from the inputs"):
        trainer.train()


@pytest.mark.parametrize(("members", "message"), [
    ({"__module__": "trl.trainer.sft_trainer"}, r"MyTrainer has LossTrainerMixin, but TRL .*replace_trl_head\(\)"),
    ({"compute_loss": lambda *_: None}, "MyTrainer has LossTrainerMixin before a compute_loss of its own"),
])  # fmt: skip
def test_trainers_that_the_mixin_does_not_fit(members, message, tmp_path):
    ours = type("MyTrainer", (thunder_flce.LossTrainerMixin, type("Its", (transformers.Trainer,), members)), {})
    with pytest.raises(TypeError, match=message):
        ours(model=tiny.model(num_hidden_layers=0), args=arguments(tmp_path))
    with pytest.raises(TypeError, match="MyTrainer has LossTrainerMixin behind the Trainer"):
        type("MyTrainer", ours.__bases__[::-1], {})


class WithoutOurs(OurTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class AsksForOutputs(OurTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        both = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return both if return_outputs else both[0]


@pytest.mark.parametrize("trainer_class", [WithoutOurs, AsksForOutputs])
def test_training_without_the_compiled_loss(trainer_class, tmp_path, not_fused):
    """The other way to write it than the last: the mixin cannot see at the start what a subclass will call."""
    name, step = trainer_class.__name__, partial(train, trainer_class, tmp_path, settings={"max_steps": 1})
    own = "has a compute_loss of its own, which .* give the Trainer a compute_loss_func"
    not_fused(step, f"{name} trains without the loss of LossTrainerMixin.* {own}")


def test_a_loss_function_without_labels(tmp_path):
    """What the Trainer makes of it depends on the version of transformers."""

    class Model(torch.nn.Module):
        def forward(self, start_positions):
            return {"loss": start_positions.mean(), "logits": start_positions}

    class Ours(thunder_flce.LossTrainerMixin, transformers.Trainer):
        pass

    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].sum()

    given, kwargs = torch.arange(4.0), {"args": arguments(tmp_path), "compute_loss_func": compute_loss_func}
    theirs, ours = (each(model=Model(), **kwargs) for each in (transformers.Trainer, Ours))
    with pytest.warns(NotFusedWarning, match='the batch has no "labels"'):
        found = ours.compute_loss(ours.model, {"start_positions": given})
    assert found == theirs.compute_loss(theirs.model, {"start_positions": given})


def test_a_compute_loss_around_the_compiled_one(tmp_path):
    class Scales(OurTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return found if return_outputs else 2 * found

    assert_plans(train(Scales, tmp_path, settings={"max_steps": 1}))


def test_reentrant_checkpoints_of_a_frozen_trunk(tmp_path, monkeypatch):
    monkeypatch.setattr(OurTrainer, "compile_layers", True)
    model = tiny.model()
    model.requires_grad_(False).lm_head.requires_grad_(True)
    model.enable_input_require_grads()
    settings = CHECKPOINTS | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match='gradient_checkpointing_kwargs must be {"use_reentrant": False}'):
        train(OurTrainer, tmp_path, model=model, settings=settings)


@pytest.mark.parametrize("is_first", [True, False], ids=["then prepare", "prepared"])
def test_accelerate(is_first):
    """Mixed precision sets a forward on the model."""
    model = tiny.model(num_hidden_layers=0)
    only = thunder_flce.loss_only(model) if is_first else None
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    only = thunder_flce.loss_only(model) if only is None else only
    batch = collate(tiny.rows(2))
    for loss in (only(**batch), compiled_loss(only, batch)):
        torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-2, atol=0)
    float32 = tiny.model(num_hidden_layers=0)(**batch).loss
    assert not torch.allclose(only(**batch), float32, rtol=1e-6)


@pytest.mark.parametrize("make", [gpt2, t5])
def test_loss_only_of_models_that_break_graphs(make):
    """By a warning that the loss has no type, and by the cache."""
    model, batch = make().eval(), collate(tiny.rows(2))
    torch.testing.assert_close(compiled_loss(thunder_flce.loss_only(model), batch), model(**batch).loss)


# TRL.


def head_of_trl(given):
    """What its documentation says, in float64."""
    hidden, weight, bias, targets, temperature, _, softcap, scale, _ = given
    z = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double()) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    of_labels, entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return of_labels, entropy, (2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets


def replace_head(monkeypatch, head, version="1.16.0"):
    """In a package that has nothing of TRL but its head, and its version."""
    utils = SimpleNamespace(_ChunkedLogProbFunction=head)
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__=version, trainer=SimpleNamespace(utils=utils)))
    monkeypatch.setitem(sys.modules, "trl.trainer", SimpleNamespace(utils=utils))
    thunder_flce.replace_trl_head()
    return utils._ChunkedLogProbFunction


class HeadOfTrl:
    """TRL's, but for its body."""

    apply = staticmethod(lambda *given: "TRL's own")

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
    ):
        """Not called."""


@pytest.mark.parametrize("dtypes", [("float64", "float64"), ("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize(("temperature", "softcap", "scale"), [(1.0, None, 1.0), (0.7, None, 0.5), (0.7, 3.0, 1.5)])
def test_numbers_of_the_head(monkeypatch, dtypes, temperature, softcap, scale):
    head = replace_head(monkeypatch, HeadOfTrl)
    of_hidden, of_weight = (getattr(torch, dtype) for dtype in dtypes)
    hidden = torch.randn(11, 16, dtype=of_hidden, requires_grad=True)
    weight = torch.randn(23, 16, dtype=of_weight, requires_grad=True)
    bias = torch.randn(23, dtype=of_weight, requires_grad=True)
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    given = (hidden, weight, bias, torch.randint(23, (11,)), temperature, 32768, softcap, scale, names)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2}[of_hidden]
    rounded = [each.to(of_hidden) for each in given[1:3]]
    results, expected = head.apply(*given), head_of_trl((hidden, *rounded, *given[3:]))
    for result, of_float64 in zip(results[:4], expected, strict=False):
        torch.testing.assert_close(result.double(), of_float64, rtol=tolerance, atol=4 * tolerance)
    assert results[4].dtype == torch.bool
    if of_hidden == torch.float64:
        assert torch.equal(results[4], expected[4])
    weights = torch.randn(2, 11, dtype=torch.float64)
    sums = ((weights * torch.stack(each[:2])).sum() for each in (results, expected))
    gradients = (torch.autograd.grad(each, given[:3]) for each in sums)
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=20 * tolerance)


def test_calls_of_the_head(monkeypatch):
    head = replace_head(monkeypatch, HeadOfTrl)
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4)
    given = (hidden, weight, None, torch.empty(0, dtype=torch.int64), 1.0, 32768, None, 1.0)
    log_probs, *others = head.apply(*given, ("log_probs",))
    assert log_probs.shape == (0,) and log_probs.requires_grad and others == [None] * 4
    weight.ds_id = 3  # As DeepSpeed's ZeRO-3 marks what it divides.
    with pytest.warns(UserWarning, match="with ZeRO-3, TRL's own head"):
        assert head.apply(*given, ()) == "TRL's own"
    thunder_flce.replace_trl_head(options=thunder_flce.Options(row_kernels="triton"))  # Again is fine.
    utils = sys.modules["trl.trainer"].utils
    with pytest.raises(ValueError, match='row_kernels="triton" runs on CUDA'):
        utils._ChunkedLogProbFunction.apply(torch.ones(2, 4), torch.ones(9, 4), None, torch.arange(2), *given[4:], ())
    with pytest.raises(TypeError, match="options must be thunder_flce.Options"):
        thunder_flce.replace_trl_head(options={"chunk_rows": 4})


@pytest.mark.parametrize("head", [None, SimpleNamespace(forward=lambda ctx, hidden, weight, targets: None)])
def test_another_trl(monkeypatch, head):
    found = "does not exist" if head is None else "takes hidden, weight, targets"
    with pytest.raises(ImportError, match=f"needs trl.trainer.utils._Chunked.*in TRL 9.0, it {found}. Install trl=="):
        replace_head(monkeypatch, head, version="9.0")


def make_trl_trainer(name, folder, *, config=None, model=None, **others):
    """A trainer of TRL with a model from a folder, as TRL loads its reference model, and data as it takes them."""
    import trl
    from datasets import Dataset

    folder.mkdir(exist_ok=True)
    (tiny.model() if model is None else model).save_pretrained(folder / "model")
    texts = tiny.sentences(24)
    columns = {"SFT": "text", "DPO": "prompt chosen rejected", "KTO": "prompt completion"}.get(name, "prompt").split()
    rows = [dict(zip(columns, each, strict=True)) for each in zip(*(texts[i:] for i in range(len(columns))))]  # noqa: B905
    rows = [{**row, "label": bool(i % 2)} for i, row in enumerate(rows)] if name == "KTO" else rows
    if (config or {}).get("assistant_only_loss"):
        said = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 12, texts, strict=True)]
        rows = [{"messages": said[at : at + 2]} for at in range(0, len(said), 2)]
    if name in ("GRPO", "RLOO"):
        others["reward_funcs"] = lambda completions, **_: [float(len(each.split()) % 5) for each in completions]
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
"""By the name of a trainer and what is particular: its configuration"""


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

    expected, calls = run(), []
    thunder_flce.replace_trl_head()
    head = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = SimpleNamespace(apply=lambda *given: (calls.append(given), head.apply(*given))[1])
    assert_same(expected, run(), rtol=2e-2 if "bf16" in config else 2e-4)
    assert len(calls) >= 5


@needs_trl
def test_loss_only_of_what_trl_holds(tmp_path):
    model = make_trl_trainer("SFT", tmp_path).model
    assert "forward" in vars(model)
    batch = collate(tiny.rows(2))
    found = compiled_loss(thunder_flce.loss_only(model), batch)
    torch.testing.assert_close(found, tiny.model()(**batch).loss, rtol=1e-4, atol=0)


# litgpt and Lightning. Its Trainer is that of lightning 2.6.


class Loss(torch.nn.Module):
    """litgpt's model and its loss, as in its `pretrain`."""

    def __init__(self):
        super().__init__()
        litgpt = pytest.importorskip("litgpt", reason="needs the extra 'examples'")
        sizes = {"block_size": 32, "vocab_size": 61, "padded_vocab_size": 64, "n_layer": 0, "n_head": 4, "n_embd": 32}
        torch.manual_seed(0)
        self.gpt = litgpt.GPT(litgpt.Config(**sizes, intermediate_size=48))

    def forward(self, tokens, targets):
        """Without chunks of its own."""
        from litgpt.utils import chunked_cross_entropy

        return chunked_cross_entropy(self.gpt(tokens), targets, chunk_size=0)


def batches_of(lengths):
    """Tokens, and the next ones, of which the first are a prompt."""
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
    fabric_of = pytest.importorskip("lightning.fabric", reason="needs the extra 'examples'").Fabric
    # As lightning has it, until a use of thunder's thunderfx in the same process takes that away.
    capturing = importlib.import_module("lightning.fabric.wrappers")._capture_compile_kwargs
    monkeypatch.setattr(torch, "compile", capturing(torch.compile))

    def run(before=lambda module: module, after=lambda step: step):
        fabric, module = fabric_of(accelerator="cpu", devices=1, precision=precision), before(Loss())
        step, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
        step, logged = after(step), []
        for tokens, targets in batches_of(lengths):
            loss = step(tokens, targets)
            fabric.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(step.parameters(), 100)
            logged += [loss.item(), norm.item()]
            optimizer.step()
            optimizer.zero_grad()
        return logged, step

    (expected, _), (got, step) = run(), run(**{"before" if is_first else "after": compiled_by})
    rtol = 2e-2 if "bf16" in precision else 1e-4
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=rtol, atol=0)
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
    """What the page says is yours, they are given here."""
    for library in re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    model = tiny.model(num_hidden_layers=1 if "peft" in title else 0)
    model.save_pretrained("model")
    yours = {"model": transformers.AutoModelForCausalLM.from_pretrained("model"), "tokenizer": tiny.tokenizer()}
    if title == "TRL":
        import trl
        from datasets import Dataset

        utils = importlib.import_module("trl.trainer.utils")
        monkeypatch.setattr(utils, our_trl._NAME, utils._ChunkedLogProbFunction)
        columns = {"texts": ("text",), "preferences": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}
        for name, of_row in columns.items():
            yours[name] = Dataset.from_list([dict.fromkeys(of_row, text) for text in tiny.sentences(8)])
        for kind in ("SFT", "DPO"):
            yours[f"{kind.lower()}_arguments"] = arguments(tmp_path, getattr(trl, f"{kind}Config"), max_steps=1)
        of_grpo = {"num_generations": 2, "max_completion_length": 4, "max_steps": 1}
        yours["grpo_arguments"] = arguments(tmp_path, trl.GRPOConfig, **of_grpo)
        yours["reward"] = lambda completions, **_: list(map(len, completions))
    elif "litgpt" in title:
        yours |= {"gpt": Loss().gpt, "token_batches": batches_of((12, 17))}
    else:
        rows = tiny.rows(6)
        batches = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)
        yours |= {"batches": batches, "optimizer": torch.optim.SGD(yours["model"].parameters(), lr=0.1)}
        yours |= {"arguments": arguments(tmp_path), "dataset": rows, "collate": collate}
    before = len(thunder_flce.explain().decisions)
    module = ModuleType("program")
    vars(module).update(yours)
    monkeypatch.setitem(sys.modules, "program", module)  # Dynamo looks there for what a function reads.
    exec(program, vars(module))
    found = thunder_flce.explain().decisions[before:]
    assert all(decision.fused for decision in found)
    assert bool(found) == (title != "TRL" and "linear_cross_entropy" not in program)
    assert ("gradients in forward" in capsys.readouterr().out) == ("explain(" in program)
