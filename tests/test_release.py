"""What a release says of itself is said once: version, citation, changelog, extras."""

import re
import tomllib
from pathlib import Path

import yaml

import kexpfam

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kexpfam.version.__version__"}
    assert "version" not in PROJECT["project"]


def test_citation_and_changelog_name_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == kexpfam.__version__
    assert f"\n## {kexpfam.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_issue_forms_ask_for_something():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.stem == "config" or {part["type"] for part in form["body"]} <= {"textarea", "input"}


def test_every_adapter_has_its_extra_and_its_test():
    modules = {path.stem for path in (ROOT / "src/kexpfam/adapters").glob("*.py")} - {"__init__", "scipy"}
    extras = PROJECT["project"]["optional-dependencies"]
    assert modules <= set(extras)
    assert modules == {
        path.stem.removeprefix("test_") for path in (ROOT / "tests_adapters").glob("test_*.py")
    }
    makefile = (ROOT / "Makefile").read_text()
    installed = re.search(r'-e "\.\[([\w,]+)\]" pytest', makefile)
    assert installed and modules <= set(installed[1].split(","))
