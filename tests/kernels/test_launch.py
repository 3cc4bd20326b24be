"""What compiled kernels are found by, without Triton's own look at each argument."""

from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from triton import JITFunction

from thunder_flce.engine.kernels import launch as launching
from thunder_flce.engine.kernels import triton_divergence, triton_logits, triton_rows, triton_vectors


@pytest.fixture
def kernel(monkeypatch):
    """Stands for one of Triton's: `kernel[grid]` compiles it, and returns a function of its arguments."""
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return MagicMock(arg_names=("z", "vector", "count", "BLOCK"))


SETTINGS = {"BLOCK": 8, "threads": 32}


def _compilations(kernel, *launches):
    """How often the kernel is compiled, after launches with tensors and an integer each."""
    for tensors, integer in launches:
        launching.launch(kernel, 1, tensors, SETTINGS, integer)
    return kernel.__getitem__.call_count


def test_what_triton_compiles_anew_for(kernel):
    z, vector = torch.zeros(64), torch.zeros(64)
    assert _compilations(kernel, ([z, vector], 5), ([z[4:], vector[4:]], 2**31 - 1), ([z, vector], -(2**31))) == 1
    compiled = kernel.__getitem__.return_value.return_value
    assert [run.args[9:] for run in compiled.run.call_args_list] == [
        (z[4:].data_ptr(), vector[4:].data_ptr(), 2**31 - 1, 8), (z.data_ptr(), vector.data_ptr(), -(2**31), 8)
    ]  # fmt: skip
    other_tensors = ([z.half(), vector], 5), ([z[1:], vector], 5), ([z, None], 5)
    launches = (*other_tensors, ([z, vector], 2**31), ([z, vector], -(2**31) - 1))
    assert [_compilations(kernel, launch) for launch in launches] == [2, 3, 4, 5, 5]


def test_amd_reads_no_more_than_32_bits_reach(kernel, monkeypatch):
    """Triton compiles other loads for a storage of 2 GiB, which a kernel compiled for a small one would not read."""
    small, large = torch.zeros(8, dtype=torch.uint8), torch.empty(2**31, dtype=torch.uint8)
    assert _compilations(kernel, ([small, None], 1), ([large, None], 1)) == 1
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert _compilations(kernel, ([small, None], 1), ([large, None], 1), ([large[:8], None], 1)) == 3


def test_only_three_tensors_may_be_specialised_on_their_alignment():
    """Of others, nothing is looked at."""
    modules = (triton_divergence, triton_logits, triton_rows, triton_vectors)
    kernels = [value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")]
    assert len(kernels) == 9 and all(isinstance(kernel, JITFunction) for kernel in kernels)
    for kernel in kernels:
        for parameter in kernel.params[3:]:
            is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            assert parameter.is_constexpr or is_free, (kernel, parameter.name)
