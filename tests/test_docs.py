"""The documentation runs, its ledger is complete, and its numbers are those of the records."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

from reproduction import held_out, pages

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
REPRODUCTION = ROOT / "reproduction"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FRONT_PAGE = "docs/index.md"
SCRIPTS = sorted((ROOT / "docs/examples").glob("*/*.py"))
# The pages whose fits take more than about ten seconds.
SLOW_PAGES = (
    *("docs/algorithms.md", "docs/conditional.md", "docs/dual-distributions.md", "docs/maximum-entropy.md"),
    *("docs/stacks.md", "docs/mixed-tables.md", "docs/using-a-density.md"),
)
# What a module needs that may not be there.
OPTIONAL = {"kexpfam.adapters.skpro": "skpro", "kexpfam.baselines.flow": "flowjax"}


def _blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def _pages_with_blocks() -> list:
    """Return every page of the documentation that has Python code, without decisions and the front page."""
    names = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
    slow = lambda name: [pytest.mark.slow] if name in SLOW_PAGES else []
    return [pytest.param(name, marks=slow(name)) for name in names if name != FRONT_PAGE and _blocks(name)]


def _modules_with_examples() -> list[str]:
    paths = [
        path.relative_to(SOURCE).with_suffix("")
        for path in sorted(SOURCE.rglob("*.py"))
        if ">>>" in path.read_text()
    ]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


# A page may show densities of rare rows, of which a reader is warned.
@pytest.mark.filterwarnings("default::kexpfam.model.partial.FewDrawsWarning")
@pytest.mark.parametrize("page", _pages_with_blocks())
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    """An error or a failed assertion in a block fails the test."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in _blocks(page):
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.slow
def test_the_front_page_shows_what_its_code_prints(capsys):
    (block,) = _blocks(FRONT_PAGE)
    exec(compile(block, FRONT_PAGE, "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in (ROOT / FRONT_PAGE).read_text()


def test_readme_and_front_page_show_the_same_code_output_chart_and_cost():
    front, readme = (ROOT / FRONT_PAGE).read_text(), (ROOT / "README.md").read_text()
    assert _blocks("README.md") == _blocks(FRONT_PAGE) == _blocks("DESCRIPTION.md")
    for part in (r"```text\nlog density.*?```", r"<!-- records: [\w-]+ -->.*?<!-- end"):
        found = re.findall(part, front, re.DOTALL)
        assert found and sorted(found) == sorted(re.findall(part, readme, re.DOTALL))
    for name in held_out.charts({}):
        assert f"reproduction/figures/{name}" in front and f"reproduction/figures/{name}" in readme


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_compile_are_short_and_tutorials_end_with_remedies(path):
    """The build of the site runs them; an error there is an error of the build."""
    text = path.read_text()
    compile(text, path, "exec")
    if path.parent.name == "tutorials":
        assert "# When it goes wrong" in text.rsplit("# %%", 1)[1]
    else:
        assert len(text.split('"""\n', 2)[-1].strip().splitlines()) <= 30


@pytest.mark.parametrize("name", _modules_with_examples())
def test_the_examples_of_a_module_give_what_they_say(name):
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_every_key_of_the_ledger_is_in_the_code_and_the_other_way_round():
    ledger = set(re.findall(r"^\| `([A-Z-]+)`", (ROOT / "docs/equations.md").read_text(), re.MULTILINE))
    code = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert ledger == set(re.findall(r"Equation ledger: ``([A-Z-]+)``", code))


def _ledger() -> list[tuple[str, str, str]]:
    """Return key, place in the code and test of every equation."""
    row = r"^\| `([A-Z-]+)` \|.*\| `([\w.]+)` \| `([\w./]+)` \|$"
    return re.findall(row, (ROOT / "docs/equations.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("key", "place", "test"), _ledger())
def test_an_equation_is_where_the_ledger_says(key, place, test):
    module, _, name = place.rpartition(".")
    source = (SOURCE / "kexpfam" / module.replace(".", "/")).with_suffix(".py").read_text()
    assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE)
    assert f"Equation ledger: ``{key}``" in source
    assert name in (ROOT / test).read_text()


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paths_that_pages_name_are_there():
    """Paths of the repository that are written as code exist; older decisions are not checked."""
    named = re.compile(
        r"`((?:src|tests|docs|reproduction|benchmarks)/[\w./-]*"
        r"|(?:data|model|integrate|fit|judge|paper)/\w+\.py)`"
    )
    decisions = [path for path in (ROOT / "docs/decisions").glob("*.md") if path.name >= "0008"]
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *decisions]:
        if page.name == "CHANGELOG.md":
            continue
        for target in named.findall(page.read_text()):
            assert any((root / target).exists() for root in (ROOT, SOURCE / "kexpfam")), (
                f"{page.name} names {target}"
            )


def test_decisions_are_numbered_without_gaps_and_state_their_status():
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [page.name[:4] for page in decisions] == [f"{k:04d}" for k in range(1, len(decisions) + 1)]
    for page in decisions:
        title, blank, status, *_ = page.read_text().split("\n")
        assert title.startswith(f"# {page.name[:4]}: ") and not blank, page.name
        assert re.match(r"\*(In force|Superseded by \[\d{4}\])", status), page.name
        for other in re.findall(r"\((\d{4}-[\w-]+\.md)\)", page.read_text()):
            assert (page.parent / other).exists(), f"{page.name} links to {other}"


def test_every_registered_name_is_documented():
    from kexpfam.estimators import ESTIMATORS
    from kexpfam.fit.problem import SOLVERS

    choosing = (ROOT / "docs/how-to-choose.md").read_text()
    for name in SOLVERS:
        assert f'"{name}"' in choosing, name
    for name in ESTIMATORS:
        assert f"`{name}`" in choosing, name


def test_the_pages_are_the_rendering_of_the_records():
    records = pages.load_all(REPRODUCTION)
    assert (REPRODUCTION / "README.md").read_text() == pages.rendered(records)
    for name, chart in held_out.charts(records).items():
        assert (REPRODUCTION / "figures" / name).read_text() == chart
    written = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/decisions").glob("*.md")]
    marked = [page for page in written if "<!-- records: " in page.read_text()]
    assert len(marked) > 8
    for page in marked:
        assert page.read_text() == pages.with_headlines(page.read_text(), records), page.name


def test_no_record_was_made_by_code_that_was_not_committed():
    records = pages.load_all(REPRODUCTION)
    assert not [
        record["cell"] for rows in records.values() for record in rows if record["commit"].endswith("-dirty")
    ]


COSTS = [
    ("rows", "docs/many-rows.md", '"nll": '),
    ("fits", "docs/cost.md", '"seconds": '),
    ("inference", "docs/cost.md", '"predict": '),
]


@pytest.mark.parametrize(("name", "page", "number"), COSTS)
def test_the_costs_on_a_page_are_those_of_the_newest_records(name, page, number, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark, ledger = importlib.import_module(name), importlib.import_module("ledger")
    text, records = (ROOT / page).read_text(), ledger.lines(name)
    assert ledger.paged(text, name, benchmark.tabled(records)) == text
    newer = json.loads(records[-1])
    changed = json.loads(json.dumps(newer).replace(number, f"{number}77"))
    assert ledger.paged(text, name, benchmark.tabled([*records, json.dumps(changed)])) != text
