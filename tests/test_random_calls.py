"""What `random_calls` runs by the thousand: some of them here, and those that have failed."""

import pytest

import random_calls
from thunder_flce.engine.kernels import torch_rows

FAILED = {"cpu": (1377,), "cuda": ()}
"""1377: a token loss of the log-sum-exp, over one column"""


def test_some(device):
    for number in (*range(100), *FAILED[device]):
        random_calls.numbered(number, device).run(device)


def test_failures_are_found(monkeypatch, capsys):
    call = random_calls.numbered(6, "cpu")  # It has a z-loss.
    monkeypatch.setattr("sys.argv", ["random_calls.py", "--count", "3"])
    for name in ("BLOCK_BYTES", "THREAD_BYTES"):  # which `main` changes
        monkeypatch.setattr(torch_rows, name, getattr(torch_rows, name))
    monkeypatch.setattr("thunder_flce.operation.loss.Loss.z_term", lambda self, row: None)
    monkeypatch.setattr("random_calls.drawn_call", lambda *_: call)
    with pytest.raises(SystemExit) as ended:
        random_calls.main()
    assert ended.value.code and "3 failed [0, 1, 2]" in capsys.readouterr().out
