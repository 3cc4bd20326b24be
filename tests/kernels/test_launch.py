"""What compiled kernels are found by, without Triton's own look at each argument."""

from types import SimpleNamespace

import pytest
import torch

from interpreted import needs_compiler
from thunder_flce.engine.kernels import launch as launching


class Kernel:
    """Stands for one of Triton's, and counts how often it is compiled and run."""

    arg_names = ("z", "vector", "count", "BLOCK")

    def __init__(self):
        self.compiled, self.ran = 0, []

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *arguments, **constants):
        self.compiled += 1
        return SimpleNamespace(run=lambda *given: self.ran.append(given[9:]), function=0, packed_metadata=())


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return Kernel()


SETTINGS = {"BLOCK": 8, "threads": 32}


def _compiled_for(kernel, *launches):
    """How many of the launches, of tensors and integers, ask Triton."""
    for tensors, *integers in launches:
        launching.launch(kernel, 1, tensors, SETTINGS, *integers)
    return kernel.compiled


def test_what_triton_compiles_anew_for(kernel):
    z, vector = torch.zeros(64), torch.zeros(64)
    assert _compiled_for(kernel, ([z, vector], 5), ([z[4:], vector[4:]], 2**31 - 1), ([z, vector], -(2**31))) == 1
    pointers = [[each.data_ptr() for each in of] for of in ((z[4:], vector[4:]), (z, vector))]
    assert kernel.ran == [(*pointers[0], 2**31 - 1, 8), (*pointers[1], -(2**31), 8)]
    of_other_tensors = ([z.half(), vector], 5), ([z[1:], vector], 5), ([z, None], 5)
    others = (*of_other_tensors, ([z, vector], 2**31), ([z, vector], -(2**31) - 1))
    assert [_compiled_for(kernel, other) for other in others] == [2, 3, 4, 5, 5]


def test_amd_reads_no_more_than_32_bits_reach(kernel, monkeypatch):
    """Triton compiles other loads for a storage of 2 GiB, which a kernel compiled for a small one would not read."""
    small, large = torch.zeros(8, dtype=torch.uint8), torch.empty(2**31, dtype=torch.uint8)
    assert _compiled_for(kernel, ([small, None], 1), ([large, None], 1)) == 1
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert _compiled_for(kernel, ([small, None], 1), ([large, None], 1), ([large[:8], None], 1)) == 3


@needs_compiler
def test_only_three_tensors_may_be_specialised_on_their_alignment():
    """Of others, nothing is looked at."""
    import triton

    from thunder_flce.engine.kernels import triton_divergence, triton_logits, triton_rows, triton_vectors

    modules = (triton_divergence, triton_logits, triton_rows, triton_vectors)
    kernels = [value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")]
    assert len(kernels) == 9 and all(isinstance(kernel, triton.JITFunction) for kernel in kernels)
    for kernel in kernels:
        for at, parameter in enumerate(kernel.params):
            is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            assert at < 3 or parameter.is_constexpr or is_free, (kernel, parameter.name)
