"""What `random_calls` runs by the thousand: some of them here, in every way but eagerly, see `test_properties`."""

import pytest

import random_calls
from thunder_flce.engine.kernels import torch_rows

COUNTS = {"module": 60, "torch.compile": 20, "thunder.jit": 15, "with our executor": 10, "with our transform": 10}


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Of rows, for each chunk."""
    for name in ("BLOCK_BYTES", "THREAD_BYTES"):
        monkeypatch.setattr(torch_rows, name, 512)


@pytest.mark.parametrize("way", COUNTS)
def test_some(way, device):
    for number in range(COUNTS[way]):
        random_calls.numbered(number, device, way=way).run(device, way)


@pytest.mark.parametrize("way", random_calls.RANKS)
def test_on_ranks(way):
    """The vocabulary in parts of all sizes, and the tokens too: the results of the whole, with the same bits on all."""
    for number in range(100):
        random_calls.numbered(number, "cpu", way=way).run("cpu", way)


def test_failures_are_found(monkeypatch, capsys):
    call = random_calls.numbered(6, "cpu")  # It has a z-loss.
    monkeypatch.setattr("sys.argv", ["random_calls.py", "--count", "3"])
    monkeypatch.setattr("thunder_flce.operation.loss.Loss.z_term", lambda self, row: None)
    monkeypatch.setattr("random_calls.drawn_call", lambda *_: call)
    with pytest.raises(SystemExit) as ended:
        random_calls.main()
    assert ended.value.code and "3 failed [0, 1, 2]" in capsys.readouterr().out
