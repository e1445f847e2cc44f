"""Run an experiment: its missing cells in parallel processes of one thread each, one record per cell."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import joblib
from threadpoolctl import threadpool_limits

from kexpfam.progress import Listener, Report
from reproduction.records import Ledger, Record, Unavailable, provenance
from reproduction.specs import Cell, Spec

__all__ = ["measured", "run"]

# Threads of two processes on two cores would wait for each other, and programs that an earlier run left on
# disk would make fits look faster than a first one is.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "KEXPFAM_CACHE": "off",
}


def run(spec: Spec, ledger: Ledger, *, jobs: int | None = None, report: Listener | None = None) -> None:
    """Measure the cells without a record and append each record on arrival; warn of missing requirements.

    ``jobs=None`` leaves the number of processes, and where they run, to ``joblib.parallel_config``: a Dask
    cluster, say.
    """
    # Seed by seed, so that a run that is broken off has something of every method.
    todo, total = sorted(ledger.missing(spec), key=lambda cell: cell.get("seed", 0)), len(spec.cells)
    done, made_by, absent = total - len(todo), provenance(), []
    if report is not None:
        report(Report(spec.name, done, total, {}))
    with _environment(ENVIRONMENT):
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
        for record in parallel(joblib.delayed(_measured_if_possible)(cell) for cell in todo):
            if isinstance(record, Unavailable):
                absent.append(str(record))
                continue
            ledger.append(record | made_by)
            done += 1
            if report is not None:
                report(Report(spec.name, done, total, {}))
    if absent:
        warnings.warn(
            f"{len(absent)} cells of {spec.name} left out: {' '.join(dict.fromkeys(absent))}", stacklevel=2
        )


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Set the variables that the user has not set, for the processes that are started inside."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _measured_if_possible(cell: Cell) -> Record | Unavailable:
    """Return the record of one cell, or its missing requirement; an exception would end the other cells."""
    try:
        return measured(cell)
    except Unavailable as lack:
        return lack


def measured(cell: Cell) -> Record:
    """Return the record of one cell; a failure is recorded too."""
    from reproduction.measurements import MEASUREMENTS

    record: Record = {"cell": cell, "status": "ok", "warnings": []}
    with threadpool_limits(1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            record |= {"values": MEASUREMENTS[cell["measure"]](cell)}
        except Unavailable:
            raise
        except Exception as error:
            record |= {"status": f"{type(error).__name__}: {error}"[:300], "values": {}}
    said = {
        type(warning.message).__name__
        for warning in caught
        if warning.category.__module__.startswith("kexpfam")
    }
    return record | {"warnings": sorted(said)}
