"""What `import thunder_flce` imports, what works without thunder, and what thunder knows, each in a fresh process."""

import functools
import re
import subprocess
import sys
import tempfile

import pytest
import torch

# Each program runs in a fork of a process that has only imported a package, which takes seconds.
SERVER = """
import os, sys, traceback, {package}

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
def _server(package):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SERVER.format(package=package)], text=True, **pipes)


def _errors(program, *arguments, after="torch", fails=False):
    """Runs a program in a process that has imported `after`; returns what it prints as errors."""
    server = _server(after)
    with tempfile.NamedTemporaryFile("r") as errors:
        print(repr((program, arguments, errors.name)), file=server.stdin, flush=True)
        has_failed, printed = server.stdout.readline() != "0\n", errors.read()
    assert has_failed == fails, printed
    return printed


def test_nothing_heavy_is_imported():
    """Neither by the package nor by a step on a CPU, what PyTorch imports by itself aside."""
    _errors("""
import sys, torch
before = {*sys.modules}
import thunder_flce
x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
thunder_flce.linear_cross_entropy(x, w, torch.tensor([0, 1, 2])).backward()
thunder_flce.linear_kl_divergence(x, w, x.detach(), w).backward()
thunder_flce.LinearCrossEntropyLoss(4, 5)(x, torch.tensor([0, 1, 2])).backward()
heavy = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.proxy_tensor", "torch.distributed.tensor"}
heavy |= {"torch.distributed.device_mesh", "triton", "thunder", "nvfuser_direct"}
parts = "graph", "inspection.thunder_report", "bench", "engine.kernels.nvfuser_rows", "engine.kernels.triton_rows"
imported = {*sys.modules} - before & (heavy | {f"thunder_flce.{part}" for part in parts})
assert not imported, imported
""")


ABSENT = """
import sys, warnings, torch

class Absent:
    def find_spec(self, name, *_):
        if name in self.names or name.startswith(self.prefixes):
            raise ModuleNotFoundError(f"no {name} here", name=name)

absent = Absent()
absent.names, absent.prefixes = {"thunder", "triton", "nvfuser", "nvfuser_direct", "litgpt", "transformers"}, ()
sys.meta_path.insert(0, absent)
x, w, y = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2])
"""


def test_without_torch_distributed():
    """As in a PyTorch that was built without it."""
    _errors(f"""{ABSENT}
absent.prefixes = ("torch.distributed.", "torch.testing._internal.distributed")
torch.distributed.is_available = lambda: False
for name in [*sys.modules]:
    if name.startswith("torch.distributed."):
        del sys.modules[name]
import thunder_flce
thunder_flce.linear_cross_entropy(x, w, y).backward()
thunder_flce.linear_cross_entropy(x, w, y, terms=[(x, w)], reduction="none").sum().backward()
thunder_flce.LinearCrossEntropyLoss(4, 5)(x, y).backward()
assert x.grad.isfinite().all()
""")


def test_without_thunder(tmp_path):
    """The function, the modules, the backend and `explain` work; what needs thunder says so, at each use."""
    (tmp_path / "thunder").mkdir()
    (tmp_path / "thunder" / "__init__.py").write_text("is_another = True")
    program = """
import thunder_flce
import torch.nn.functional as F
from thunder_flce.__main__ import main
from thunder_flce.backend import compile_graph

thunder_flce.linear_cross_entropy(x, w, y).backward()
assert x.grad.isfinite().all()
# Programs that were compiled by another process, and are found on the disk, call it.
assert torch.ops.thunder_flce.scale_gradient_
assert set(thunder_flce.__all__) <= set(dir(thunder_flce)) and not hasattr(thunder_flce, "jitt")
needs_thunder = {"FlcePlugin", "FuseLinearCrossEntropy", "executor", "jit", "thunderfx"}
for name in [*needs_thunder] * 2:
    try:
        getattr(thunder_flce, name)
    except ImportError as error:
        needs, _, without = str(error).rpartition("These names work without it: ")
        assert f"thunder_flce.{name} needs lightning-thunder" in needs, error
        assert "failed with ModuleNotFoundError: no thunder here" in needs, error
        assert {*without.split(", ")} == {*thunder_flce.__all__} - needs_thunder, error
    else:
        raise AssertionError(name)
for name in {*thunder_flce.__all__} - needs_thunder:
    getattr(thunder_flce, name)

def program(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)

absent.names = {"thunder"}
torch._inductor.compile_fx.compile_fx = lambda graph, inputs, **_: graph
compiled = torch.compile(program, backend=compile_graph, options={"strict": True})
torch.testing.assert_close(compiled(x, w, y), program(x, w, y))
assert "1 of 1 cross-entropies fused" in str(thunder_flce.explain(compiled))
assert "1 of 1 cross-entropies fused" in str(thunder_flce.explain())
assert not [name for name in sys.modules if name.startswith("thunder_flce.graph")]
import thunder_flce.bench.cli  # It measures what works without thunder.
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
    printed = _errors(f"import torch._inductor.compile_fx\n{ABSENT}{program}", str(tmp_path))
    assert "trace needs lightning-thunder" in printed.splitlines()[-1], printed


# Runs after an import of thunder and of this package, in either order.
REGISTERED = """
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
thunder_first = pytest.mark.skipif(not hasattr(torch.Tensor, "align_as"), reason="not with torch 2.13 and newer")


@thunder_first
def test_after_thunder():
    """thunder knows the package, and is unchanged until the fusion is first used, when its faults are mended."""
    program = f"""
import torch, thunder
from thunder.dynamo import ThunderCompiler
from thunder.transforms.autocast import autocast_impls

def now():
    functions = thunder.clang.maybe_broadcast, ThunderCompiler.__call__
    return functions, {{name for name in autocast_impls if "flce" not in str(name)}}

before = now()
import thunder_flce
assert now() == before
{REGISTERED}
thunder_flce.FuseLinearCrossEntropy()
assert not any(mine is its for mine, its in zip(now()[0], before[0])) and now()[1] > before[1]
"""
    _errors(program, after="thunder")


@thunder_first
def test_a_private_name_that_thunder_lacks():
    """The import warns of it, and what needs thunder is an error."""
    program = (
        "import thunder.dynamo.compiler; del thunder.dynamo.compiler.ThunderCompiler\n"
        "import thunder_flce; thunder_flce.linear_cross_entropy; thunder_flce.jit"
    )
    printed = _errors(program, after="thunder", fails=True)
    thunder, lacks = r"lightning-thunder >=0\.2\.6,<0\.3", "ImportError: cannot import name 'ThunderCompiler'"
    warning = rf"UserWarning: thunder_flce works with {thunder}; \S+ fails with {lacks}"
    assert re.search(warning, printed), printed
    error = rf"ImportError: thunder_flce\.jit needs {thunder}, .*{lacks}"
    assert re.match(error, printed.strip().splitlines()[-1]), printed


def test_before_thunder():
    """thunder knows the package, though none of its names that need thunder was used before.

    `apply` is a builtin as it is since torch 2.14, without what thunder's import reads of it.
    """
    _errors(f"""
import torch
torch.autograd.Function.apply = builtin = torch._C._FunctionBase.__dict__["apply"]
import thunder_flce, thunder
{REGISTERED}
assert vars(torch.autograd.Function)["apply"] is builtin
x, w = (tensor.requires_grad_() for tensor in tensors[:2])
expected = torch.autograd.grad(program(x, w, tensors[2]), (x, w))
torch.testing.assert_close(torch.autograd.grad(jitted(x, w, tensors[2]), (x, w)), expected)
""")


def test_an_import_of_thunder_that_failed_before():
    """The second time, Python would name something else: what the first has left behind."""
    _errors("""
import torch
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
