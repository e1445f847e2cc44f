"""The table of tables with columns of several kinds: records in, Markdown out."""

from reproduction.records import Record, chosen, good
from reproduction.tables import failures, label, markdown, mean, most

__all__ = ["mixed"]

METHODS = ("auto", "vine", "mixed kde", "spline flow")


def mixed(records: list[Record]) -> str:
    """Return the shortfall of each method below the true log density (nats per column), and our cost."""
    rows = []
    for dataset, size in sorted({(record["cell"]["dataset"], record["cell"]["rows"]) for record in records}):
        here = chosen(records, dataset=dataset, rows=size)
        mine = good(here, method="auto")
        outside = mean(mine, "outside", 1, factor=100.0)
        cost = f"{mean(mine, 'seconds', 0)} / {most(mine, 'megabytes')}"
        rows.append([dataset, f"{size:,}", *(_shortfall(here, method) for method in METHODS), outside, cost])
    names = [f"**{label(method)}**" if method == "auto" else label(method) for method in METHODS]
    return markdown(("set", "rows", *names, "% of draws off the support", "fit s / MB"), rows)


def _shortfall(here: list[Record], method: str) -> str:
    mine = good(here, method=method)
    error = f" ± {mine[0]['values']['shortfall_error']:.3f}" if len(mine) == 1 else ""
    text, impossible = (
        mean(mine, "shortfall", 3) + error,
        sum(record["values"].get("impossible_rows", 0) for record in mine),
    )
    text = f"∞ (rows of density 0: {impossible}; {text} without)" if impossible else text
    return text + failures(chosen(here, method=method))
