"""README.md and the other pages are right: snippets run, and links, names, tables and lists are what there is."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

import mutate
import thunder_flce
from test_targets import CHIPS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FOLDERS = ("docs", "examples", "lab", "traces")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


def test_snippets_of_readme_run(tmp_path, capsys):
    """One after another, as one program, which prints what its comments say."""
    snippets = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = tmp_path / "model.py"
    program.write_text("\n".join(snippets), encoding="utf-8")
    runpy.run_path(str(program))
    printed = capsys.readouterr().out
    expected = re.findall(r"^# …(/model\.py:.*)$", program.read_text(encoding="utf-8"), re.MULTILINE)
    assert expected and all(f"{line}\n" in printed for line in expected), printed
    assert "flce_scale_gradients(" in printed


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_tables_have_the_numbers_of_the_rows(page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "lab"))
    import pages

    assert (ROOT / page).read_text(encoding="utf-8") == pages.written(page)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "noxfile.py"], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    """Also the suite for other versions."""
    text = page.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []
    named = re.findall(r"[`\"]((?:thunder_flce|tests|traces|examples|docs|lab)/[\w./-]+)(?:::\w+)?[`\"]", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    tests = re.findall(r"(tests/\w+/\w+\.py)::(\w+)", text)
    assert [test for path, test in tests if f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8")] == []
    tests_text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [test for test in re.findall(r"`(test_\w+)`", text) if f"def {test}(" not in tests_text] == []


@pytest.mark.parametrize("kind", [thunder_flce.Options, thunder_flce.Plan])
def test_the_reference_has_all_fields(kind):
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    (members,) = re.findall(rf"^::: thunder_flce\.{kind.__name__}\n    options:\n      members: \[(.*)\]$", text, re.M)
    assert members.split(", ") == [field.name for field in fields(kind)]


@pytest.mark.parametrize("page", ["README.md", "docs/support.md"])
def test_pages_name_the_devices_that_kernels_are_compiled_for(page):
    """They name the first and the last compute capability, and AMD's architectures."""
    nvidia = [chip.device.capability for name, chip in CHIPS.items() if name.startswith("sm")]
    first, last = (".".join(map(str, capability)) for capability in (min(nvidia), max(nvidia)))
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert f"compute capabilities {first} to {last}" in text and "NVIDIA's H200 and H100" in text
    assert all(name in text for name in CHIPS if name.startswith("gfx"))


def test_mutants_are_compared_with_no_change():
    """As `make mutants` does first, with what pytest prints not captured."""
    assert mutate.outcome(None, ["--version"]) == "survived"


def test_the_changelog_has_the_version():
    assert f"\n## {thunder_flce.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_table_of_folders_is_in_the_order_of_imports():
    (layers,) = re.findall(r'downwards".*?layers = \[(.*?)\]', (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    levels = {name: at for at, layer in enumerate(layers.split(",")) for name in re.findall(r"\w+", layer)}
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("\n## Folders\n")[2]
    cells = "".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))
    names = re.findall(r"`(\w+)(?:/|\.py)`", cells)
    assert {*names} == levels.keys() - {"__main__"} and names == sorted(names, key=levels.__getitem__)
