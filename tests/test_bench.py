"""The benchmark command end to end, on shapes that a CPU runs in a second."""

import json

import pytest

from thunder_flce.__main__ import main
from thunder_flce.bench.methods import METHODS, Unavailable
from thunder_flce.bench.shapes import SHAPES, parse_shape


def test_results_can_be_read_back(tmp_path, capsys, monkeypatch):
    def unavailable():
        raise Unavailable("not here")

    def failing():
        raise RuntimeError("broken")

    monkeypatch.setitem(METHODS, "unavailable", unavailable)
    monkeypatch.setitem(METHODS, "failing", failing)
    path = tmp_path / "results.jsonl"
    shape = "tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32"
    methods = ["eager", "flce", "flce, recompute_logits", "unavailable", "failing"]
    command = [
        "bench",
        "--device",
        "cpu",
        "--shapes",
        shape,
        "--rounds",
        "1",
        "--json",
        str(path),
        "--methods",
        *methods,
    ]
    assert main(command) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["three products", *methods]
    for row in rows[1:4]:
        assert row["time_ms_p20"] <= row["time_ms"] <= row["time_ms_p80"]
        assert max(row["dx_error"], row["dw_error"], row["dbias_error"]) < 1e-5
    assert rows[4]["failed"] == "not here" and rows[5]["failed"] == "RuntimeError: broken"
    assert all(row["torch"] and row["command"].startswith("python -m thunder_flce bench") for row in rows)
    assert "three products" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["S9", "tokens=3", "tokens=3,vocab=x,hidden=4", "tokens=1,vocab=1,hidden=1,odd=1"])
def test_shapes_that_make_no_sense(text):
    with pytest.raises(ValueError, match="a shape must be one of S1"):
        parse_shape(text)
    with pytest.raises(SystemExit):
        main(["bench", "--shapes", text])


def test_names_of_shapes():
    assert parse_shape("U1") is SHAPES["U1"]
    assert str(SHAPES["S1i"]) == "S1i 8192 × 128256 × 4096, 60% ignored"
