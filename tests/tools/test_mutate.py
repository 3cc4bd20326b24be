"""`mutate` changes what computes, one place at a time, and tells what is tested from what is not."""

from pathlib import Path

import mutate

SOURCE = '''
def scaled(rows: list[int | None], *, é=1) -> int | None:
    """Not 0 or 1."""
    if not rows or rows[0] is None:
        raise ValueError(f"{len(rows) + 1}")
    rows.sort()
    return max(rows) * é - (2)
'''


def test_mutants_of_a_function():
    mutants = list(mutate.mutants_of(SOURCE, Path("source.py")))
    assert {" ".join(mutant.after.split()) for mutant in mutants} == {
        *("0", "(not rows and rows[0] is None)", "(rows)", "(rows[0] is not None)", "1", "pass"),
        *("(max(rows) * é + 2)", "(max(rows) / é)", "min"),
    }
    assert all(compile(mutant.applied(SOURCE), "", "exec") and mutant.applied(SOURCE) != SOURCE for mutant in mutants)


def test_survivors(tmp_path, monkeypatch, capsys):
    for path, text in {
        "thunder_flce/__init__.py": "",
        "thunder_flce/operation/sums.py": "def plus(x, y):\n    return x + y\n\n\ndef times(x, y):\n    return x * y\n",
        "tests/test_sums.py": "from thunder_flce.operation.sums import plus\ndef test_plus(): assert plus(1, 2) == 3\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    assert mutate.main(["--tests", "tests/test_sums.py"]) == 1
    printed = capsys.readouterr().out
    assert "caught    thunder_flce/operation/sums.py:2: x + y  →  (x - y)" in printed
    assert "survived  thunder_flce/operation/sums.py:6: x * y  →  (x / y)\n" in printed and "1 of 2 caught" in printed
