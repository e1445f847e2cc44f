"""The documentation runs, its ledger is complete, and its numbers are those of the records."""

import re
from pathlib import Path

import pytest

from kexpfam.experiments import pages

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


PAGES = ("tutorial", "conditional", "algorithms", "maximum-entropy", "dual-distributions")


@pytest.mark.slow
@pytest.mark.parametrize("page", [f"docs/{name}.md" for name in PAGES])
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


def test_the_pages_are_the_rendering_of_the_records():
    records = pages.load_all(ROOT / "reproductions")
    assert (ROOT / "reproductions/README.md").read_text() == pages.rendered(records)
    for page in (ROOT / "README.md", ROOT / "docs/how-to-choose.md"):
        assert page.read_text() == pages.with_headlines(page.read_text(), records)


def test_no_record_was_made_by_code_that_was_not_committed():
    records = pages.load_all(ROOT / "reproductions")
    assert not [record["cell"] for rows in records.values() for record in rows if record["commit"].endswith("-dirty")]
