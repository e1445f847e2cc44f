"""The command ``kexpfam reproduce``: the paper's tables and figures, in a checkout of the repository."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import kexpfam

__all__ = ["checkout", "reproduce"]


def reproduce(
    what: Annotated[
        str,
        typer.Argument(help="all, page, or the name of an experiment; a name that is none lists them all."),
    ],
    folder: Annotated[
        Path | None, typer.Option(help="Where the records are; default: reproduction, or reproduction-quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The whole chain on reduced sizes.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes at a time, one thread each.")] = 2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget earlier records of these experiments first.")
    ] = False,
    tables_in: Annotated[
        list[Path] | None, typer.Option(help="A page whose marked tables are made anew as well.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure the paper's tables and figures, cell by cell; cells that have a record are skipped.

    Needs a checkout of the repository, where the specs and the paper's numbers are.
    """
    place = checkout()
    if place is None:
        raise ValueError(
            "kexpfam reproduce needs the repository: run it in a checkout, where the folder 'reproduction' is."
        )
    sys.path.insert(0, str(place))
    from kexpfam.estimators.base import listening
    from reproduction import pages, records, runner, specs

    if what not in ("all", "page", *specs.EXPERIMENTS):
        raise ValueError(
            f"unknown experiment {what!r}: choose one of all, page, {', '.join(specs.EXPERIMENTS)}."
        )
    folder = folder or Path("reproduction-quick" if quick else "reproduction")
    with listening(not quiet and sys.stderr.isatty()) as listener:
        for name in specs.EXPERIMENTS if what == "all" else () if what == "page" else (what,):
            ledger = records.Ledger(folder, name)
            if fresh:
                ledger.path.unlink(missing_ok=True)
            runner.run(specs.load_spec(name, quick=quick), ledger, jobs=jobs, report=listener)
    page = pages.write(folder)
    for other in tables_in or ():
        other.write_text(pages.with_headlines(other.read_text(), pages.load_all(folder)))
    failed = [
        record for rows in pages.load_all(folder).values() for record in rows if record["status"] != "ok"
    ]
    typer.echo(f"{page} written; {len(failed)} failed cells." if failed else f"{page} written.")


def checkout() -> Path | None:
    """Return the checkout whose package ``reproduction`` is used: the current folder, or the one the library is in."""
    for folder in (Path.cwd(), Path(kexpfam.__file__).parents[2]):
        if (folder / "reproduction" / "__init__.py").is_file():
            return folder
    return None
