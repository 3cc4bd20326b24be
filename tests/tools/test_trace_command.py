"""`python -m thunder_flce trace`, end to end on a CPU."""

import re
import runpy
import sys

import pytest
import torch.nn.functional as F

from front_ends import Model, batch
from thunder_flce.__main__ import main
from thunder_flce.inspection.trace_text import renumbered

SMALL = ["--device", "cpu", "--batch", "2", "--sequence", "24", "--hidden", "16", "--vocab", "100"]


def test_traces_before_and_after(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thunder_flce", "trace", "litgpt", *SMALL])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("thunder_flce", run_name="__main__")
    assert not exit.value.code
    printed = capsys.readouterr().out
    names = "before, forward", "before, backward", "after, forward", "after, backward"
    traces = re.search("".join(f"# {name}\n(.*)" for name in names), printed, re.DOTALL)
    before_forward, before_backward, after_forward, after_backward = traces.groups()
    assert "torch.nn.functional.linear(" in before_forward and "matmul(" in before_backward
    assert "linear_cross_entropy" not in before_forward + before_backward
    assert "flce_linear_cross_entropy_fwd(" in after_forward and "'strategy': \"gradients_in_forward\"" in after_forward
    assert "    # logits f32[48, 100] = x @ W.t()" in after_forward
    assert "flce_scale_gradients(" in after_backward and "matmul(" not in after_backward
    assert "fused, gradients in forward" in printed and "\x1b[" not in printed


def test_fake_tensors_have_no_memory(capsys):
    # Logits and weight would take 147 GB each. More tokens would be more chunks, each of which is run.
    assert main(["trace", "litgpt", "--device", "cpu", "--batch", "1", "--vocab", "9000000"]) == 0
    assert "f32[4096, 9000000]" in capsys.readouterr().out


def test_a_header_with_the_name_of_a_proxy_is_unchanged():
    assert renumbered("# in /tmp/t3", "t5 = exp(t7)") == "# in /tmp/t3\n\nt0 = exp(t1)\n"


def own_loss(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="sum")


def model_and_arguments():
    return Model(bias=True), batch(2, 12)


def without_a_loss(hidden, weight):
    return F.linear(hidden, weight).sum()


@pytest.mark.parametrize(("function", "line"), [
    ("own_loss", "    # logits f32[48, 100] = x @ W.t()"),
    ("model_and_arguments", "    # logits f32[24, 97] = x @ W.t() + b"),
    ("without_a_loss", "# after: thunder_flce.jit\n# no cross-entropy, divergence, log-probability, "),
])  # fmt: skip
def test_programs_of_users(function, line, capsys):
    assert main(["trace", f"{__name__}:{function}", *SMALL]) == 0
    assert line in capsys.readouterr().out


def number_and_arguments():
    return 1, batch(2, 12)


@pytest.mark.parametrize(("example", "message"), [
    ("nothing", "an example must be one of litgpt"),
    (":loss", "an example must be one of litgpt"),
    ("no_such_module:loss", "No module named 'no_such_module'"),
    (f"{__name__}:missing", "has no attribute 'missing'"),
    ("torch.nn.functional:rms_norm", "has arguments ['eps', 'input', 'normalized_shape'], but can only have"),
    (f"{__name__}:SMALL", "is no function, but a "),
    ("threading:active_count", "must return a function or module and a tuple"),
    (f"{__name__}:number_and_arguments", "must return a function or module and a tuple"),
    ("litgpt --vocab 0", "--batch, --sequence, --hidden, --vocab must be positive"),
])  # fmt: skip
def test_examples_that_make_no_sense(example, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["trace", *SMALL, *example.split()])
    assert exit.value.code == 2 and message in capsys.readouterr().err
