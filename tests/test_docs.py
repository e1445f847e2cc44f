"""The documentation runs, its ledger is complete, and its numbers are those of the records."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/conditional.md", "docs/algorithms.md"])
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def test_every_key_of_the_ledger_is_in_the_code_and_the_other_way_round():
    ledger = set(re.findall(r"^\| `([A-Z-]+)`", (ROOT / "docs/equations.md").read_text(), re.MULTILINE))
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert ledger == set(re.findall(r"Equation ledger: ``([A-Z-]+)``", code))


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", ["unconditional", "conditional"])
def test_the_readme_table_is_the_rendering_of_the_records(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shown = (ROOT / "README.md").read_text().split(benchmark.BEGIN)[1].split(benchmark.END)[0].strip()
    assert shown == benchmark.rendered().strip()
