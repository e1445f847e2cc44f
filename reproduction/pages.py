"""The page of a reproduction, and tables in other pages: pure functions of the records."""

from pathlib import Path

from reproduction import (
    claims,
    figures,
    held_out,
    mixed_tables,
    real_tables,
    saddle_tables,
    tables,
    using_tables,
)
from reproduction.records import Ledger, Record, good
from reproduction.specs import COMMAND, EXPERIMENTS, load_spec

__all__ = ["load_all", "pictured", "provenance", "rendered", "with_headlines", "write"]

BEGIN, END = "<!-- records: {} -->", "<!-- end of records: {} -->"
HEADLINES = {
    "table1": tables.headline1,
    "table2": tables.headline2,
    "larger": tables.larger,
    "algorithms": tables.headline_of_solvers,
    "uci": real_tables.uci,
    "unseen": real_tables.unseen,
    "labelled": real_tables.labelled,
    "ablation": real_tables.ablation,
    "joint": real_tables.joint,
    "posteriors": real_tables.posteriors,
    "mixed": mixed_tables.mixed,
    "spaces": saddle_tables.spaces,
    "stationarity": saddle_tables.stationarity,
    "reach": saddle_tables.reach,
    "arrival": saddle_tables.arrival,
    "using": using_tables.using,
}
# Tables that are made of several experiments.
OF_ALL = {"standing": saddle_tables.standing, "held-out": held_out.caption, "fit-times": held_out.cost}
# Tables of the experiments that are not in the paper; the others have the table of their name.
FULL_TABLES = {
    "uci": real_tables.details,
    "unseen": real_tables.unseen,
    "labelled": real_tables.labelled,
    "ablation": real_tables.ablation,
    "joint": real_tables.details,
    "posteriors": real_tables.posteriors,
    "mixed": mixed_tables.mixed,
    "spaces": saddle_tables.spaces,
    "stationarity": saddle_tables.stationarity,
    "reach": saddle_tables.reach,
    "arrival": saddle_tables.arrival,
    "using": using_tables.using,
}
# Notes shared by several tables.
ALONE = (
    "*DDE alone* is the paper's algorithm, without a warm start or a convex polish. It starts from f = 0 and "
    "q = p0; where targets are a narrow ridge, q starts at a ridge regression and f at its log ratio to p0."
)
FOLDS = "≥: the transport folds space, and the value is a lower bound."
PEAK = "MB: the largest peak above the start of a fit, without memory still allocated by earlier fits."
NOTES = {
    "table1": (
        "Means over training draws, ± their standard error. Two fits run at a time, one thread each, with "
        f"an empty compilation cache. {ALONE} *auto (default)* solves the convex problem directly, in two "
        "dimensions on the same grid as *exact*. NLL: mean negative log density of held-out points, nats. "
        "MMD²: the paper's distance between draws and held-out points; *refined*: after ten steps of HMC. "
        f"{FOLDS} {PEAK}"
    ),
    "moons": (
        "Distance of 5,000 draws to the 5,000 test rows that were released with the paper, ± standard error "
        "over runs. *paper*: fitted to the 1,000 training rows that were released, another seed in each run; "
        "*fresh*: fitted to 1,000 new draws of the truth in each run; *none*: draws of the truth."
    ),
    "table2": (
        "Mean NLL of the held-out half ± standard deviation over random halves that no choice has seen; "
        "*halves seen before*: the default on five that were looked at. Standardisation and "
        "selection use the training half; normalisers are exact. The competitors were re-run on the same "
        f"halves (*re-run*); *printed*: the values of the paper. {ALONE} *its protocol*: that of the "
        "released code, which selects on the test half. A star marks targets with so many ties that their "
        "likelihood is unbounded: a low value there measures the width of spikes. *bare ε-KDE*: with a "
        "density of 0 at inputs without neighbours. PIT: p-values of the sampler's calibration on the "
        "held-out half, one per half."
    ),
    "larger": "Half of the rows train, the other half tests; targets in units of the training half.",
    "algorithms": (
        "The same draws and the same selected settings for all; 500 rows. Every solver starts cold, without "
        "a polish. *+ warm start*: started at the convex optimum and a distribution distilled from it. *+ "
        "polish*: with f replaced by the convex optimum; *gain of the polish*: the increase of the "
        "penalised likelihood, which is the distance (nats) of the solver alone from the optimum in its "
        f"space. A dash: the solver has no such option, or there is no record. {FOLDS} {PEAK}"
    ),
    "duals": "500 rows of the rings; f of the saddle point, without a polish.",
    "cost": (
        "Fixed length scale and penalty. Processor seconds of a second fit, with all programs compiled; "
        "memory is the peak above the start of the first one. KCEF is the density of the last column given "
        "the others."
    ),
    "rate": "KL(truth ‖ fit) in nats for a potential inside the space; the penalty falls like 1/n.",
    "uci": (
        "Not in the paper. Mean NLL in the target's units over standard splits ± its standard error. PIT: "
        "the number of splits on which a Kolmogorov-Smirnov test does not reject uniform PIT values at "
        f"0.01. {PEAK}"
    ),
    "unseen": (
        "Not in the paper. The default on splits that no choice has seen: 15 to 19, of airfoil 5 to 9, of "
        f"protein all five. Mean NLL in the target's units ± its standard error over splits. {PEAK}"
    ),
    "labelled": (
        "Not in the paper. Price of houses in California and age in census rows, given labels and numbers "
        "with missing cells; a random tenth of the rows tests. NLL and CRPS in the target's units ± their "
        f"standard error over splits. {PEAK}"
    ),
    "ablation": (
        "Not in the paper. NLL in the target's units ± its standard error over splits, on sets that no "
        "choice was made on: the default, chains of the inputs as they are, of their encoding, and "
        "of inputs and predictions by trees, each alone; boosted trees with normal errors."
    ),
    "joint": (
        "Not in the paper. Mean NLL of the test fifth, in units of the training rows; the chain has its own "
        f"units and 5,000 test rows. {PEAK}"
    ),
    "posteriors": (
        "Not in the paper. Cross-validated accuracy of a network that separates 5,000 draws from 5,000 "
        "reference draws of the posterior (C2ST), mean over ten observations: 0.5 is best, 1 is worst."
    ),
    "mixed": (
        "Not in the paper. Shortfall of the mean log density of 4,000 held-out rows below the true one, in "
        "nats per column. Ours has the kinds of the columns, and in *all* rows with a fifth of their cells "
        "missing; the others use complete rows only. Vine and flow are fitted to jittered data, whose log "
        f"densities are at most the log probabilities on average; a vine needs two columns. {PEAK}"
    ),
    "spaces": f"500 rows of the two moons. {ALONE}",
    "stationarity": (
        "‖∇L̂‖² of the dual objective, with f and ν optimal in closed form, mean over the iterates of L "
        "steps. The theorem bounds it by a multiple of L^(−1/2), or L^(−1) without noise, for stochastic "
        "gradients with steps of order L^(−1/2). *Algorithm 1*: as printed, such steps. *plain players*: "
        "the nested scheme with plain gradients of f and Adam for the networks. *DDE alone*: "
        "`solver='dde'`, its schedules over L. *folded*: the share of noise at which the last transport "
        "reverses orientation, where the change of variables does not give the density."
    ),
    "reach": (
        "Not in the paper. The chain in twenty dimensions, 5,000 rows; f is a sum of functions of pairs of "
        "columns at most two apart, in the same 800 random features with the same penalty for every method. "
        "NLL: the normaliser by tempered sequential Monte Carlo, with its error; a dash if repetitions or "
        "draws of the truth contradict it. Fisher divergence: half the mean squared distance of the scores; "
        "it needs no normaliser. *effective*: the number of effective importance draws of base and mixture "
        "for the normaliser of this f. MMD² (length scale: median distance) and C2ST (a network, on held-out "
        "draws; 0.5 is best): plain draws of the sampler against held-out rows."
    ),
    "arrival": (
        "500 rows of the two moons, `solver='dde'` with its defaults. Checked every 25 updates of f; seconds "
        "of one processor from the start of the fit, with selection and compilation."
    ),
    "using": (
        "Not in the paper. `effort='fast'`. p-values: 500 training rows, 2,000 new rows per refit; *all* has "
        "six kinds of columns and a fifth of its cells missing. Anomalies: half of the other rows train. "
        "Planted changes: 5 standard deviations of a random column of a real row."
    ),
}


def load_all(folder: Path) -> dict[str, list[Record]]:
    """Return the records of every experiment."""
    return {name: _in_order(name, Ledger(folder, name).records()) for name in EXPERIMENTS}


def _in_order(name: str, records: list[Record]) -> list[Record]:
    """Return the records method by method in the order of the spec; they were kept as they came in."""
    methods = dict.fromkeys(cell.get("method") for cell in load_spec(name).cells)
    place = {method: index for index, method in enumerate(methods)}
    return sorted(records, key=lambda record: place.get(record["cell"].get("method"), len(place)))


def rendered(records: dict[str, list[Record]]) -> str:
    """Return the page: claims, tables, figures, and where the numbers come from."""
    parts = [
        "# The paper, reproduced",
        f"Made by `{COMMAND} page` from the records in this folder, and from nothing else.",
    ]
    parts += ["## Claims", claims.INTRODUCTION, claims.page(records)]
    for name in EXPERIMENTS:
        if not records[name]:
            continue
        parts += [
            f"## {load_spec(name).title}",
            f"`{COMMAND} {name}`" + (f". {NOTES[name]}" if name in NOTES else ""),
        ]
        if name != "figures":
            parts.append((FULL_TABLES.get(name) or getattr(tables, name))(records[name]))
        parts += [f"![{stem}](figures/{stem}.png)" for stem in pictured(name, records[name])]
    parts += ["## Provenance", provenance(records)]
    return "\n\n".join(parts) + "\n"


def pictured(name: str, records: list[Record]) -> list[str]:
    """Return the names of the figures that belong to an experiment."""
    if name == "figures":
        runs, portraits = good(records, measure="convergence"), good(records, measure="portrait")
        methods = dict.fromkeys(record["cell"]["method"] for record in portraits)
        return [figures.portrait_name(method) for method in methods] + [
            f"convergence-{r['cell']['dataset']}" for r in runs
        ]
    return (
        [name]
        if name in ("cost", "rate", "reach") and any(record["status"] == "ok" for record in records)
        else []
    )


def provenance(records: dict[str, list[Record]]) -> str:
    """Return how many cells were run at which commit with which versions."""
    counts: dict[tuple, int] = {}
    for name, rows in records.items():
        for record in rows:
            made_by = tuple(
                str(record[key]) for key in ("kexpfam", "commit", "python", "jax", "numpy", "scikit-learn")
            )
            counts[name, *made_by] = counts.get((name, *made_by), 0) + 1
    lines = [[*key, str(number)] for key, number in sorted(counts.items())]
    return tables.markdown(
        ("experiment", "kexpfam", "commit", "python", "jax", "numpy", "scikit-learn", "cells"), lines
    )


def with_headlines(page: str, records: dict[str, list[Record]]) -> str:
    """Return a page with its tables made anew, between their marks."""
    for name in (*HEADLINES, *OF_ALL):
        begin, end = BEGIN.format(name), END.format(name)
        if begin in page:
            table = OF_ALL[name](records) if name in OF_ALL else HEADLINES[name](records[name])
            before, rest = page.split(begin)
            page = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return page


def write(folder: Path) -> Path:
    """Write the page and its figures, and return the page's path."""
    records = load_all(folder)
    figures.draw_all(records, folder / "figures")
    for name, chart in held_out.charts(records).items():
        (folder / "figures" / name).write_text(chart)
    page = folder / "README.md"
    page.write_text(rendered(records))
    return page
