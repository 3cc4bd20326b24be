"""What README.md and the other pages say is there: snippets run, links lead somewhere, and numbers are counted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "traces/README.md",
    ROOT / "traces/h200/README.md",
]


def test_snippets_of_readme_run(tmp_path):
    """One after another, as one program; what the comments say it prints is what it prints."""
    snippets = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = tmp_path / "model.py"
    program.write_text("\n".join(snippets), encoding="utf-8")
    run = subprocess.run([sys.executable, program.name], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    expected = re.findall(r"^# …(/model\.py:.*)$", program.read_text(encoding="utf-8"), re.MULTILINE)
    assert expected and all(f"{line}\n" in run.stdout for line in expected), run.stdout


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []
    named = re.findall(r"`((?:thunder_flce|tests|traces|examples|docs)/[\w./-]+)(?:::(\w+))?`", text)
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    tests = [(path, test) for path, test in named if test]
    assert [test for path, test in tests if f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8")] == []


def test_counts_of_readme(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "traces"))
    from patterns import FUSED, NOT_FUSED

    zoo = pytest.importorskip("zoo")
    text = README.read_text(encoding="utf-8")
    assert f"{len(FUSED)} programs that are fused and {len(NOT_FUSED)} that are not" in text
    assert f"{len(zoo.ENTRIES)} configurations" in text
