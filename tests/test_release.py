"""Version, citation, changelog, extras, workflows and hooks of a release agree with each other."""

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


def test_the_workflow_runs_the_checks_on_lowest_and_newest_versions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert workflow[True]["schedule"][0]["cron"]  # YAML reads the key `on` as a boolean
    lowest = PROJECT["project"]["requires-python"].removeprefix(">=")
    expected = {"checks": (lowest, ".ci/run"), "lowest": (lowest, "make check-lowest")}
    expected["newest"] = ("${{ matrix.python-version }}", "make test check release-check CONSTRAINTS=")
    for name, (python, command) in expected.items():
        steps = workflow["jobs"][name]["steps"]
        assert command in [step.get("run") for step in steps]
        assert python in [step.get("with", {}).get("python-version") for step in steps]
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(
        re.fullmatch(r"actions/(checkout|setup-python|upload-artifact|cache)@v\d+", one) for one in used
    )
    assert "$(CONSTRAINTS)" in (ROOT / "Makefile").read_text()
    pythons = [lowest, *workflow["jobs"]["newest"]["strategy"]["matrix"]["python-version"]]
    named = [line.rpartition(":: ")[2] for line in PROJECT["project"]["classifiers"] if ":: 3." in line]
    assert pythons == named


def test_the_commit_hooks_are_those_of_the_static_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].split()[:2] for hook in hooks] == [
        [".venv/bin/ruff", "check"],
        [".venv/bin/ruff", "format"],
    ]


def test_every_adapter_has_its_extra_and_its_test():
    modules = {path.stem for path in (ROOT / "src/kexpfam/adapters").glob("*.py")} - {
        "__init__",
        "outliers",
        "scipy",
    }
    extras = PROJECT["project"]["optional-dependencies"]
    assert modules <= set(extras)
    assert modules == {
        path.stem.removeprefix("test_") for path in (ROOT / "tests_adapters").glob("test_*.py")
    }
    makefile = (ROOT / "Makefile").read_text()
    installed = re.search(r'-e "\.\[([\w,]+)\]" pytest', makefile)
    assert installed and modules <= set(installed[1].split(","))
