"""The command ``kexpfam reproduce``: the paper's tables and figures, in a checkout of the repository."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import kexpfam


def reproduce(
    what: Annotated[str, Argument(help="all, page, or an experiment; an unknown name lists the valid ones.")],
    folder: Annotated[Path | None, Option(help="Folder of records; default: reproduction[-quick].")] = None,
    quick: Annotated[bool, Option("--quick", help="Run all steps on reduced sizes.")] = False,
    jobs: Annotated[int, Option(help="Number of processes, with one thread each.")] = 2,
    fresh: Annotated[bool, Option("--fresh", help="Delete earlier records of the experiments.")] = False,
    tables_in: Annotated[list[Path] | None, Option(help="A page whose marked tables are updated.")] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Show no progress bar.")] = False,
) -> None:
    """Measure the paper's tables and figures cell by cell; cells with a record are skipped.

    Requires a checkout of the repository, which contains the specs and the paper's numbers.
    """
    place = checkout()
    if place is None:
        raise ValueError("kexpfam reproduce needs the repository: run it in a checkout.")
    sys.path.insert(0, str(place))
    from kexpfam.estimators.base import listening
    from kexpfam.settings import one_of
    from reproduction import pages, records, runner, specs

    one_of("experiment", what, ("all", "page", *specs.EXPERIMENTS))
    folder = folder or Path("reproduction-quick" if quick else "reproduction")
    with listening(not quiet and sys.stderr.isatty()) as listener:
        for name in {"all": tuple(specs.EXPERIMENTS), "page": ()}.get(what, (what,)):
            ledger = records.Ledger(folder, name)
            if fresh:
                ledger.path.unlink(missing_ok=True)
            runner.run(specs.load_spec(name, quick=quick), ledger, jobs=jobs, report=listener)
    page = pages.write(folder)
    for other in tables_in or ():
        other.write_text(pages.with_headlines(other.read_text(), pages.load_all(folder)))
    failed = sum(one["status"] != "ok" for rows in pages.load_all(folder).values() for one in rows)
    typer.echo(f"{page} written; {failed} failed cells." if failed else f"{page} written.")


def checkout() -> Path | None:
    """Return the checkout of the repository: the current folder or the library's, or None."""
    for folder in (Path.cwd(), Path(kexpfam.__file__).parents[2]):
        if (folder / "reproduction" / "__init__.py").is_file():
            return folder
    return None
