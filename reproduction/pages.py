"""The page of a reproduction, and tables in other pages: pure functions of the records."""

from pathlib import Path

from reproduction import claims, figures, mixed_tables, real_tables, saddle_tables, tables
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
    "joint": real_tables.joint,
    "posteriors": real_tables.posteriors,
    "mixed": mixed_tables.mixed,
    "spaces": saddle_tables.spaces,
    "stationarity": saddle_tables.stationarity,
    "reach": saddle_tables.reach,
    "arrival": saddle_tables.arrival,
}
# Tables that are made of several experiments.
OF_ALL = {"standing": saddle_tables.standing}
# What the page of the reproduction shows of the experiments that are not the paper's; of the others, the
# table of their name.
FULL_TABLES = {
    "uci": real_tables.details,
    "joint": real_tables.details,
    "posteriors": real_tables.posteriors,
    "mixed": mixed_tables.mixed,
    "spaces": saddle_tables.spaces,
    "stationarity": saddle_tables.stationarity,
    "reach": saddle_tables.reach,
    "arrival": saddle_tables.arrival,
}
# What the readers of several tables have to know.
ALONE = (
    "*DDE alone* is the paper's algorithm from f = 0 and q = p0, without a warm start and without a convex "
    "polish."
)
FOLDS = "≥: the transport folds space, and the figure is a lower bound."
PEAK = (
    "MB: the largest peak above the start of a fit; what the process still held from fits before is not "
    "in it."
)
NOTES = {
    "table1": (
        "Means over training draws, ± their standard error. Every fit starts with no compiled programs, two "
        "at a time, one "
        f"thread each. {ALONE} *auto (default)* solves the convex problem outright, in two dimensions on the "
        "same grid as "
        "*exact*. NLL: mean negative log density of held-out points, nats. MMD²: the paper's distance "
        "between draws and "
        f"held-out points; *refined*: after ten steps of HMC. {FOLDS} {PEAK}"
    ),
    "table2": (
        "Mean NLL of the unseen half ± standard deviation over random halves. Everything is standardised and "
        "selected by the "
        "training half; normalisers are exact. The competitors were re-run on the same halves (*re-run*), "
        "and stand beside the "
        f"figures that the paper prints (*printed*). {ALONE} *its protocol*: the released code's, which "
        "takes the best of many "
        "looks at the test half. A star marks targets with so many ties that their likelihood has no bound: "
        "there a low figure "
        "says how narrow the spikes are. *bare ε-KDE*: with a density of 0 where an input has no neighbour. "
        "PIT: p-values of "
        "the sampler's calibration on the unseen half, one per half."
    ),
    "larger": "Half of the rows train, the other half tests; targets in units of the training half.",
    "algorithms": (
        "The same draws and the same selected settings for all; 500 rows. Every solver runs alone, from a "
        "cold start and "
        "without a polish. *+ warm start*: the same from the convex optimum and a law distilled from it. *+ "
        "polish*: with the "
        "f that was found replaced by the convex optimum; *gain of the polish*: what that added to the "
        "penalised likelihood, "
        "which is how far (nats) the solver alone had stayed from the optimum in its space. A dash: the "
        "solver has no such "
        f"option, or nothing was measured. {FOLDS} {PEAK}"
    ),
    "duals": "500 rows of the rings; f as the saddle left it.",
    "cost": (
        "Given length scale and penalty. Seconds are those of a second fit, with all programs compiled; "
        "memory is the peak "
        "above the start of the first one."
    ),
    "rate": "KL(truth ‖ fit) in nats for a potential inside the space; the penalty falls like 1/n.",
    "uci": (
        "Not the paper's. Mean NLL in the target's own units over standard splits ± its standard error. PIT: "
        "on how many of "
        f"them a Kolmogorov-Smirnov test lets the PIT of the test rows pass for uniform, at 0.01. {PEAK}"
    ),
    "joint": (
        "Not the paper's. Mean NLL of the test fifth, in units of the training rows; the chain has units of "
        "its own, and 5,000 "
        f"test rows. {PEAK}"
    ),
    "posteriors": (
        "Not the paper's. How well a network tells 5,000 draws from 5,000 reference draws of the posterior "
        "(C2ST, by "
        "cross-validation), mean over ten observations: 0.5 if it cannot, 1 if it always can."
    ),
    "mixed": (
        "Not the paper's. How far the mean log density of 4,000 unseen rows is below the true one, in nats "
        "per column. Ours is "
        "told the kinds, and in *all* has rows with a fifth of their cells missing; the others have complete "
        "rows alone. Vine "
        "and flow are fitted to jittered data, whose log densities are at most the log probabilities on "
        "average; a vine needs "
        f"two columns. {PEAK}"
    ),
    "spaces": f"500 rows of the two moons. {ALONE}",
    "stationarity": (
        "‖∇L̂‖² of the dual objective, which has f and ν at their best in closed form, mean over the "
        "iterates of L steps. The "
        "theorem bounds it by a multiple of L^(−1/2), or L^(−1) without noise, for stochastic gradients with "
        "steps that "
        "fall like L^(−1/2). *Algorithm 1*: as printed, such steps. *plain players*: the nested players with "
        "plain gradients "
        "of f and Adam for the networks. *DDE alone*: `solver='dde'`, its schedules over L. *folded*: the "
        "share of noise at "
        "which the last transport turns space over, where the change of variables is no longer the density's."
    ),
    "reach": (
        "Not the paper's. The chain in twenty dimensions, 5,000 rows; f a sum of functions of any two "
        "columns at most two "
        "apart, in the same 800 random features with the same penalty for every road. NLL: the normaliser by "
        "tempered "
        "sequential Monte Carlo, with its error; a dash where repetitions or draws of the truth contradict "
        "it. Fisher "
        "divergence: half the mean squared distance of the scores; needs no normaliser. *effective*: how "
        "many importance "
        "draws of base and mixture would bear the normaliser of this f. MMD² (with the median distance as "
        "length scale) and "
        "C2ST (a network, on unseen draws; 0.5 is best): plain draws of the sampler beside unseen rows."
    ),
    "arrival": (
        "500 rows of the two moons, `solver='dde'` as it is. Looked at every 25 updates of f; seconds of one "
        "processor from "
        "the first line of the fit on, with selection and compilation."
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
    return [name] if name in ("cost", "rate") and any(record["status"] == "ok" for record in records) else []


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
    page = folder / "README.md"
    page.write_text(rendered(records))
    return page
