"""The tables of the use of a density: records in, Markdown out."""

import numpy as np

from reproduction.records import Record, chosen, good
from reproduction.tables import failures, label, markdown, mean

__all__ = ["anomalies", "using"]

METHODS = ("auto", "isolation forest", "LOF", "one-class SVM", "mixture")


def using(records: list[Record]) -> str:
    """Return all tables of the experiment."""
    return "\n\n".join(table for table in (levels(records), anomalies(records), others(records)) if table)


def levels(records: list[Record]) -> str:
    """Return the level of p-values and the false discovery rate over refits."""
    own, rows = chosen(records, measure="novelty"), []
    for dataset in dict.fromkeys(record["cell"]["dataset"] for record in own):
        here = good(own, dataset=dataset)
        level = [100.0 * record["values"]["level"] for record in here]
        error = f" ± {np.std(level) / np.sqrt(len(level)):.1f}"
        row = [dataset, mean(here, "columns", 0), str(len(here)) + failures(chosen(own, dataset=dataset))]
        shares = [mean(here, name, 1, factor=100.0) for name in ("level", "false_discoveries", "found")]
        rows.append([*row, shares[0] + error, *shares[1:]])
    names = ("set", "columns", "refits", "% of new rows with p ≤ 5 %", "% false among flagged, at 10 %")
    return markdown((*names, "% of outliers flagged"), rows) if rows else ""


def anomalies(records: list[Record]) -> str:
    """Return AUC and average precision of every method."""
    own, rows = chosen(records, measure="anomaly"), []
    for dataset in dict.fromkeys(record["cell"]["dataset"] for record in own):
        here = good(own, dataset=dataset)
        both = lambda method, here=here: " / ".join(
            mean(good(here, method=method), name, 3) for name in ("auc", "average_precision")
        )
        rows.append([dataset, mean(here, "anomalies", 1, factor=100.0), *map(both, METHODS)])
    names = [f"**{label(method)}**" if method == "auto" else label(method) for method in METHODS]
    return markdown(("set, AUC / average precision", "% anomalies", *names), rows) if rows else ""


def others(records: list[Record]) -> str:
    """Return how often a planted change is named, false alarms, and delays until drift is found."""
    rows = []
    for record in good(records, measure="planted"):
        share = 100.0 * record["values"]["named"]
        what = f"changed column named first, {record['cell']['dataset']}"
        rows.append([what, f"{share:.1f} % of {record['values']['rows']} rows"])
    drifts = [record["values"] for record in good(records, measure="drift")]
    if drifts:
        runs, alarms = (sum(one[name] for one in drifts) for name in ("runs", "alarms"))
        rows.append(["false alarms in 10,000 rows, at 5 %", f"{alarms} of {runs} runs"])
        delay = np.median([one["median_delay"] for one in drifts])
        rows.append(["rows until a shift of 0.5 sd in one of ten columns", f"{delay:.0f} (median)"])
    for record in good(records, measure="update"):
        values = record["values"]
        what = f"update with a tenth of new rows, {record['cell']['dataset']}"
        cost = f"{values['share']:.0%} of a fit's processor time"
        scores = f"NLL {values['updated_nll']:.3f} against {values['nll']:.3f} ± {values['error']:.3f}"
        rows.append([what, f"{cost}, {scores}"])
    return markdown(("measured", "result"), rows) if rows else ""
