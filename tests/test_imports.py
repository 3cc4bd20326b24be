"""What `import thunder_flce` imports, what works without thunder, and what thunder knows, each in a fresh process."""

import subprocess
import sys

import pytest

import thunder_flce

WITHOUT = """
import sys, warnings

class Absent:
    names = {"thunder", "triton", "nvfuser", "nvfuser_direct", "litgpt", "transformers"}

    def find_spec(self, name, *_):
        if name in self.names:
            raise ModuleNotFoundError(f"no {name} here")

absent = Absent()
sys.meta_path.insert(0, absent)
import torch
import thunder_flce

x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
thunder_flce.linear_cross_entropy(x, w, torch.tensor([0, 1, 2])).backward()
thunder_flce.LinearCrossEntropyLoss(4, 5)(x, torch.tensor([0, 1, 2])).backward()
assert x.grad.isfinite().all()
ours = {name.removeprefix("thunder_flce.") for name in sys.modules if name.startswith("thunder_flce.")}
heavy = {"graph", "inspection", "bench", "execution.row_kernels.nvfuser_rows", "execution.row_kernels.triton_rows"}
assert not ours & heavy, ours & heavy
assert set(thunder_flce.__all__) <= set(dir(thunder_flce))
classes = ["LinearCrossEntropyLoss", "Options", "Plan", "VocabParallel"]
for attempt in range(2):
    for name in ("jit", "thunderfx", "executor", "explain"):
        try:
            getattr(thunder_flce, name)
        except ImportError as error:
            cause = "failed with ModuleNotFoundError: no thunder here"
            assert f"thunder_flce.{name} needs lightning-thunder" in str(error) and cause in str(error), error
            without = str(error).rpartition("works without it: ")[2].split(", ")
            assert without == [*classes, "count_items", "linear_cross_entropy", "loss_only", "shift_labels"], error
        else:
            raise AssertionError(name)
assert not hasattr(thunder_flce, "jitt")

# A thunder that we cannot use can be imported all the same.
absent.names = set()
sys.path.insert(0, sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import thunder
assert thunder.is_another
(warning,) = [w for w in caught if "thunder_flce" in str(w.message)]
assert "not work with this lightning-thunder: ModuleNotFoundError: No module named 'thunder." in str(warning.message)
"""


def _run(program, *arguments):
    process = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_without_thunder(tmp_path):
    package = tmp_path / "thunder"
    package.mkdir()
    (package / "__init__.py").write_text("is_another = True")
    _run(WITHOUT, str(tmp_path))


WITH = """
import torch
{imports}
import sys

assert thunder.plugins.get_plugin("flce").__module__ == "thunder_flce.graph.plugin"
assert thunder.extend.get_executor("flce") is thunder_flce.executor
assert [finder for finder in sys.meta_path if "thunder" in type(finder).__module__] == []
assert "exec_module" not in vars(thunder.__spec__.loader) and thunder.__spec__.loader is thunder.__loader__


def program(x, w, target):
    return thunder_flce.linear_cross_entropy(x * 2, w, target)


tensors = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
jitted = thunder.jit(program)
torch.testing.assert_close(jitted(*tensors), program(*tensors))
called = [bsym.sym.id for bsym in thunder.last_traces(jitted)[0].bound_symbols]
assert "thunder_flce.linear_cross_entropy" in called, called
"""


@pytest.mark.parametrize("imports", ["import thunder, thunder_flce", "import thunder_flce, thunder"])
def test_thunder_knows_of_us_in_both_orders(imports):
    """Its plugin, its executor and the function, though nothing of ours that needs thunder was touched before."""
    _run(WITH.format(imports=imports))


@pytest.mark.parametrize("name", thunder_flce.__all__)
def test_names(name):
    namespace = {}
    exec(f"from thunder_flce import {name}", namespace)
    assert namespace[name] is getattr(thunder_flce, name)
    assert name in dir(thunder_flce)
