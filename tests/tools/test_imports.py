"""What `import thunder_flce` imports, what works without thunder, and what thunder knows, each in a fresh process."""

import functools
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch

ABSENT = """
import sys, warnings, torch, torch._inductor.compile_fx

class Absent:
    def find_spec(self, name, *_):
        if name in self.names or name.startswith(self.prefixes):
            raise ModuleNotFoundError(f"no {name} here", name=name)

absent = Absent()
absent.names, absent.prefixes = {"thunder", "triton", "nvfuser", "nvfuser_direct", "litgpt", "transformers"}, ()
sys.meta_path.insert(0, absent)
"""
WITHOUT = """
import thunder_flce

x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
thunder_flce.linear_cross_entropy(x, w, torch.tensor([0, 1, 2])).backward()
thunder_flce.LinearCrossEntropyLoss(4, 5)(x, torch.tensor([0, 1, 2])).backward()
assert x.grad.isfinite().all()
# Programs that were compiled by another process, and are found on the disk, call it.
assert torch.ops.thunder_flce.scale_gradient_
ours = {name.removeprefix("thunder_flce.") for name in sys.modules if name.startswith("thunder_flce.")}
heavy = {"graph", "inspection.thunder_report", "bench", "engine.kernels.nvfuser_rows", "engine.kernels.triton_rows"}
assert not ours & heavy, ours & heavy
assert set(thunder_flce.__all__) <= set(dir(thunder_flce))
classes = ["LinearCrossEntropyLoss", "LossTrainerMixin", "NotFusedError", "NotFusedWarning", "Options", "Plan"]
for attempt in range(2):
    for name in ("jit", "thunderfx", "executor", "FuseLinearCrossEntropy"):
        try:
            getattr(thunder_flce, name)
        except ImportError as error:
            cause = "failed with ModuleNotFoundError: no thunder here"
            assert f"thunder_flce.{name} needs lightning-thunder" in str(error) and cause in str(error), error
            without = str(error).rpartition("work without it: ")[2].split(", ")
            functions = ["explain", "linear_cross_entropy", "linear_kl_divergence", "loss_only"]
            others = ["replace_trl_head", "shift_labels"]
            assert without == [*classes, "Report", "VocabParallel", "count_items", *functions, *others], error
        else:
            raise AssertionError(name)
assert not hasattr(thunder_flce, "jitt")

import torch.nn.functional as F
from thunder_flce.__main__ import main
from thunder_flce.backend import compile_graph

def program(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)

# The backend and `explain` work, and a command that needs thunder says so.
absent.names = {"thunder"}
torch._inductor.compile_fx.compile_fx = lambda graph, inputs, **_: graph
tensors = x, w, torch.tensor([0, 1, 2])
compiled = torch.compile(program, backend=compile_graph, options={"strict": True})
torch.testing.assert_close(compiled(*tensors), program(*tensors))
assert "1 of 1 cross-entropies fused" in str(thunder_flce.explain(compiled))
assert "1 of 1 cross-entropies fused" in str(thunder_flce.explain())
assert not [name for name in sys.modules if name.startswith("thunder_flce.graph")]
try:
    main(["trace", "litgpt"])
except SystemExit as exit:
    assert exit.code == 2
else:
    raise AssertionError("it ran")

# A thunder that we cannot use can be imported all the same.
absent.names = set()
sys.path.insert(0, sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import thunder
assert thunder.is_another
(warning,) = [w for w in caught if "thunder_flce" in str(w.message)]
assert "fails with ModuleNotFoundError: No module named 'thunder." in str(warning.message)
"""


# Runs each program in a copy of a process that has imported PyTorch, and nothing else: that takes seconds.
COPIES = """
import os, sys, traceback, torch

for line in sys.stdin:
    program, sys.argv[1:], errors = eval(line)
    child = os.fork()
    if not child:
        for number, file in (1, os.devnull), (2, errors):
            os.dup2(os.open(file, os.O_WRONLY), number)
        try:
            exec(program)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@functools.cache
def _copies():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", COPIES], text=True, **pipes)


def _run(program, *arguments):
    """What it ended with, and what it has printed as errors."""
    with tempfile.NamedTemporaryFile("r") as errors:
        print(repr((program, arguments, errors.name)), file=_copies().stdin, flush=True)
        return SimpleNamespace(returncode=int(_copies().stdout.readline()), stderr=errors.read())


def _runs(program, *arguments):
    """What a program prints as errors that has none."""
    process = _run(program, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stderr


HEAVY = ["torch._dynamo", "torch._inductor", "torch.fx.experimental.proxy_tensor", "torch.distributed.tensor"]
HEAVY += ["torch.distributed.device_mesh", "triton", "thunder", "nvfuser_direct"]


def test_nothing_heavy_is_imported():
    """Nor by a step on a CPU; what PyTorch imports by itself aside."""
    _runs(f"""
import sys, torch
before = {{*sys.modules}}
import thunder_flce
x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
found = [name for name in {HEAVY} if name in sys.modules and name not in before]
assert not found, found
before |= {{*sys.modules}}
thunder_flce.linear_cross_entropy(x, w, torch.tensor([0, 1, 2])).backward()
thunder_flce.linear_kl_divergence(x, w, x.detach(), w).backward()
found = [name for name in {HEAVY} if name in sys.modules and name not in before]
assert not found, found
""")


def test_without_torch_distributed():
    """As in a PyTorch that was built without it."""
    _runs(f"""{ABSENT}
absent.prefixes = ("torch.distributed.", "torch.testing._internal.distributed")
torch.distributed.is_available = lambda: False
for name in [*sys.modules]:
    if name.startswith("torch.distributed."):
        del sys.modules[name]
import thunder_flce
x, w, y = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2])
thunder_flce.linear_cross_entropy(x, w, y).backward()
thunder_flce.linear_cross_entropy(x, w, y, terms=[(x, w)], reduction="none").sum().backward()
thunder_flce.LinearCrossEntropyLoss(4, 5)(x, y).backward()
assert x.grad.isfinite().all()
""")


def test_without_thunder(tmp_path):
    (tmp_path / "thunder").mkdir()
    (tmp_path / "thunder" / "__init__.py").write_text("is_another = True")
    errors = _runs(ABSENT + WITHOUT, str(tmp_path)).splitlines()
    assert "trace needs lightning-thunder" in errors[-1], errors


WITH = """
import torch
{imports}
import sys

assert thunder.plugins.get_plugin("flce").__module__ == "thunder_flce.graph.plugin"
assert thunder.extend.get_executor("flce") is thunder_flce.executor
assert [finder for finder in sys.meta_path if getattr(finder, "_name", "").startswith("thunder")] == []
assert "exec_module" not in vars(thunder.__spec__.loader) and thunder.__spec__.loader is thunder.__loader__

def program(x, w, target):
    return thunder_flce.linear_cross_entropy(x * 2, w, target)

tensors = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
jitted = thunder.jit(program)
torch.testing.assert_close(jitted(*tensors), program(*tensors))
called = [bsym.sym.id for bsym in thunder.last_traces(jitted)[0].bound_symbols]
assert "thunder_flce.flce_linear_cross_entropy" in called, called
"""

UNCHANGED = """
import thunder
from thunder.dynamo import ThunderCompiler
from thunder.transforms.autocast import autocast_impls

def now():
    functions = thunder.clang.maybe_broadcast, ThunderCompiler.__call__
    return functions, {name for name in autocast_impls if "flce" not in str(name)}

before = now()
import thunder_flce
assert now() == before
"""
MENDED = """
thunder_flce.FuseLinearCrossEntropy()
assert not any(mine is its for mine, its in zip(now()[0], before[0])) and now()[1] > before[1]
"""


@pytest.mark.skipif(not hasattr(torch.Tensor, "align_as"), reason="torch 2.13 and newer need the other order")
def test_after_thunder():
    """It knows of us, and is as it was until the fusion is first used, when what it has wrong is mended."""
    _runs(WITH.format(imports=UNCHANGED) + MENDED)


# As it is since torch 2.14: without what thunder's import reads of it.
BUILTIN_APPLY = """
torch.autograd.Function.apply = builtin = torch._C._FunctionBase.__dict__["apply"]
import thunder_flce, thunder
"""
AFTERWARDS = """
assert vars(torch.autograd.Function)["apply"] is builtin
x, w = (tensor.requires_grad_() for tensor in tensors[:2])
expected = torch.autograd.grad(program(x, w, tensors[2]), (x, w))
torch.testing.assert_close(torch.autograd.grad(jitted(x, w, tensors[2]), (x, w)), expected)
"""


def test_before_thunder():
    """It knows of us, too, though nothing of ours that needs thunder was touched before."""
    _runs(WITH.format(imports=BUILTIN_APPLY) + AFTERWARDS)


def test_an_import_of_thunder_that_failed_before():
    """The second time, Python would name something else: what the first has left behind."""
    _runs("""
import sys, torch
torch.autograd.Function.apply = torch._C._FunctionBase.__dict__["apply"]
for _ in range(2):
    try:
        import thunder
    except Exception as error:
        message = str(error)
    else:
        raise AssertionError("thunder was imported")
    import thunder_flce
assert message.endswith("import thunder_flce before thunder"), message
""")


def test_a_private_name_that_thunder_lacks():
    """The import warns of it, and what needs thunder is an error."""
    if not hasattr(torch.Tensor, "align_as"):
        pytest.skip("with torch 2.13 and newer, thunder cannot be imported first")
    program = (
        "import thunder.dynamo.compiler; del thunder.dynamo.compiler.ThunderCompiler\n"
        "import thunder_flce; thunder_flce.linear_cross_entropy; thunder_flce.jit"
    )
    process = _run(program)
    thunder, lacks = r"lightning-thunder >=0\.2\.6,<0\.3", "ImportError: cannot import name 'ThunderCompiler'"
    warning = rf"UserWarning: thunder_flce works with {thunder}; \S+ fails with {lacks}"
    assert re.search(warning, process.stderr), process.stderr
    message = process.stderr.strip().splitlines()[-1]
    assert re.match(rf"ImportError: thunder_flce\.jit needs {thunder}, .*{lacks}", message), process.stderr
