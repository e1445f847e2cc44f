"""How the records are read for each claim of the paper that can be measured."""

import itertools
from collections.abc import Mapping

import numpy as np

from kexpfam.judge.metrics import mmd_squared
from reproduction.evidence import (
    BETTER,
    REPRODUCED,
    Finding,
    Reading,
    Records,
    because,
    by_seed,
    measured,
    paired,
    perhaps,
    standard_error,
    unless,
)
from reproduction.records import Record, chosen, good, unseen_halves
from reproduction.tables import PAPER, RIVALS, gaps_to_exact, label, slope, slope_text

__all__ = [
    "SETS",
    "beats_competitors",
    "cheaper",
    "converges",
    "covers",
    "flows_lag",
    "grows_in_dimension",
    "kernel_density_fails",
    "keeps_every_circle",
    "left_to_the_polish",
    "like_printed",
    "like_printed_on_its_files",
    "near_exact",
    "nearer",
    "rate_of",
    "released_protocol",
    "restricted_families",
    "samples_faster",
    "table_two",
    "unstable_on",
]

SETS = ("two-moons", "rings", "grid")
# A difference counts from so many of its standard errors on.
SIGMAS = 2
# Nats: as near as this is near, and further off than that is clearly worse.
NEAR, CLEARLY, FAILED = 0.05, 0.05, 0.5
# Shares of the circles of the rings, of covered rows, and of a distance that is left after the last step.
SHARE_ERROR, COVERED, LEFT = 0.3, 0.9, 0.1
# A row is covered by a draw that is nearer than its neighbour of this rank.
NEIGHBOUR = 5
FASTER = 50
LINEAR, EXPONENT_ERROR = 1.2, 0.5
AHEAD_ON, PROTOCOL_ON = 6, 12


def of_table1(records: Records, dataset: str, method: str, name: str, dim: int = 2) -> dict[int, float]:
    """Return a value of Table 1, by seed."""
    return by_seed(chosen(records.get("table1", []), dataset=dataset, method=method, dim=dim), name)


def mean(values: Mapping[int, float]) -> float:
    """Return the mean over seeds."""
    return float(np.mean(list(values.values())))


def like_printed(method: str, *datasets: str) -> Reading:
    """Read whether the distance of a method's draws to held-out points is the printed one, or smaller."""

    @measured(f"MMD² at most {SIGMAS} standard errors above the printed one; better: below it")
    def read(records: Records) -> Finding | None:
        texts, behind, below = [], [], []
        for key in datasets:
            ours, exact = (of_table1(records, key, which, "mmd") for which in (method, "exact"))
            if not ours or not exact:
                return None
            found, error, printed = (
                1e3 * mean(ours),
                1e3 * standard_error(ours),
                PAPER["table1"]["mmd"][key][method],
            )
            texts.append(f"{found:.2f}" + (f" ± {error:.2f}" if np.isfinite(error) else ""))
            below.append(found < printed)
            # One draw has no error: it has to be at the printed figure.
            if found > printed + (SIGMAS * error if np.isfinite(error) else 0.0):
                behind.append(
                    f"{key} {found:.2f}, where the exact optimum on the same draws has "
                    f"{1e3 * mean(exact):.2f}"
                )
        reason = because(f"it is further off: {'; '.join(behind)}")
        return Finding(
            ", ".join(texts), unless(not behind, reason, verdict=BETTER if all(below) else REPRODUCED)
        )

    return read


@measured(
    f"mean MMD² of DDE on the paper's training rows at most {SIGMAS} standard errors above the printed one"
)
def like_printed_on_its_files(records: Records) -> Finding | None:
    """Read whether the printed distance of the two moons is that of the paper's own training rows."""
    found = records.get("moons", [])
    ours = by_seed(chosen(found, train="paper", method="dde"), "mmd")
    others = {
        text: by_seed(chosen(found, train=train, method=method), "mmd")
        for text, train, method in (
            ("the exact optimum", "paper", "exact"),
            ("on fresh rows", "fresh", "exact"),
            ("the truth", "none", "truth"),
        )
    }
    if not ours or not all(others.values()):
        return None
    shown_as = lambda values: f"{1e3 * mean(values):.2f} ± {1e3 * standard_error(values):.2f}"
    text = "; ".join([shown_as(ours), *(f"{name} {shown_as(values)}" for name, values in others.items())])
    near = 1e3 * (mean(ours) - SIGMAS * standard_error(ours)) <= PAPER["table1"]["mmd"]["two-moons"]["dde"]
    return Finding(text, unless(near, because("it is further off on these rows too")))


def nearer(first: str, second: str, name: str, factor: float, digits: int) -> Reading:
    """Read whether a value of the first method is below that of the second on every set."""

    @measured(f"below on every set by {SIGMAS} standard errors of the paired difference")
    def read(records: Records) -> Finding | None:
        texts, level = [], []
        for key in SETS:
            one, other = (of_table1(records, key, method, name) for method in (first, second))
            differences = paired(one, other)
            if not differences:
                return None
            texts.append(f"{key} {factor * mean(one):.{digits}f} against {factor * mean(other):.{digits}f}")
            gap, error = factor * mean(differences), factor * standard_error(differences)
            if not gap < -SIGMAS * error:
                level.append(f"{gap:+.{digits}f} ± {error:.{digits}f} on {key}")
        return Finding(", ".join(texts), unless(not level, because(f"the difference is {', '.join(level)}")))

    return read


@measured(f"at least {FASTER} times on every set")
def samples_faster(records: Records) -> Finding | None:
    """Read how much faster the transport draws than a Markov chain."""
    texts, ratios = [], []
    for key in SETS:
        transport, chain = (
            of_table1(records, key, method, "sampling_seconds") for method in ("dde", "score matching")
        )
        if not transport or not chain:
            return None
        texts.append(f"{mean(transport):.3f} s")
        ratios.append(mean(chain) / mean(transport))
    text = f"{', '.join(texts)}; {min(ratios):.0f} to {max(ratios):.0f} times faster"
    return Finding(text, unless(min(ratios) >= FASTER, because(f"on one set it is {min(ratios):.0f} times")))


@measured(
    f"every circle's share of the draws within {SHARE_ERROR:.0%} of its true share, on every training draw"
)
def keeps_every_circle(records: Records) -> Finding | None:
    """Read the worst share of draws on a circle of the rings, beside its true share."""
    found = good(records.get("table1", []), dataset="rings", method="dde", dim=2)
    if not found:
        return None
    ratios = np.array([record["values"]["shares"] for record in found]) * np.array([9.0, 3.0, 1.8])
    worst = float(np.max(np.abs(ratios - 1.0)))
    text = f"off by at most {worst:.0%} over {len(found)} draws"
    fact = f"a circle has {ratios.min():.2f} times its share, or {ratios.max():.2f} times"
    return Finding(text, unless(worst < SHARE_ERROR, because(fact)))


@measured(f"NLL of the flow at least {CLEARLY} nats above the default's on every set")
def flows_lag(records: Records) -> Finding | None:
    """Read the likelihood of a spline flow beside ours."""
    excess = {}
    for key in SETS:
        differences = paired(*(of_table1(records, key, method, "nll") for method in ("spline flow", "auto")))
        if not differences:
            return None
        excess[key] = mean(differences)
    level = [f"{key} {value:+.2f}" for key, value in excess.items() if value < CLEARLY]
    text = ", ".join(f"{key} {value:+.2f}" for key, value in excess.items())
    return Finding(
        f"NLL of the flow − default: {text}",
        unless(not level, because(f"the flow keeps up: {', '.join(level)}")),
    )


@measured(f"NLL at least {FAILED} nats above the truth's in ten and twenty dimensions")
def kernel_density_fails(records: Records) -> Finding | None:
    """Read the likelihood of a kernel density estimate in ten and twenty dimensions beside the truth's."""
    excess = {}
    for key, dim in itertools.product(("rings", "grid"), (10, 20)):
        values, truth = (of_table1(records, key, "kde", name, dim) for name in ("nll", "truth_nll"))
        if not values:
            return None
        excess[f"{key} {dim}-D"] = mean(paired(values, truth))
    text = ", ".join(f"{key} {value:+.2f}" for key, value in excess.items())
    least = min(excess, key=lambda key: excess[key])
    fact = because(f"on {least} it is {excess[least]:+.2f} off")
    return Finding(f"NLL of KDE − truth: {text}", unless(excess[least] >= FAILED, fact))


@measured(
    f"at least {COVERED:.0%} of the training rows of every set have a draw nearer than their {NEIGHBOUR}th "
    "neighbour"
)
def covers(records: Records) -> Finding | None:
    """Read how much of the training rows the draws of the doubly dual embedding cover."""
    shares = {}
    for key in SETS:
        found = good(records.get("figures", []), measure="portrait", method="dde", dataset=key)
        if not found:
            return None
        shares[key] = coverage(np.array(found[0]["values"]["data"]), np.array(found[0]["values"]["draws"]))
    text = ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
    least = min(shares, key=lambda key: shares[key])
    return Finding(
        text,
        unless(shares[least] >= COVERED, because(f"the draws leave {1 - shares[least]:.0%} of {least} bare")),
    )


def coverage(rows: np.ndarray, draws: np.ndarray) -> float:
    """Return the share of the rows that have a draw nearer than their neighbour of rank ``NEIGHBOUR``."""
    distances = lambda others: np.sqrt(((rows[:, None] - others) ** 2).sum(-1))
    radius = np.partition(distances(rows), NEIGHBOUR, axis=1)[:, NEIGHBOUR]
    return float(np.mean(distances(draws).min(1) <= radius))


@measured(f"on every set the last draws' MMD² to the training rows is at most {LEFT:.0%} of the first ones'")
def converges(records: Records) -> Finding | None:
    """Read how the draws of the sampler come nearer to the training rows from the first step to the last."""
    texts, far = [], []
    for key in SETS:
        found = good(records.get("figures", []), measure="convergence", dataset=key)
        if not found:
            return None
        data, draws = np.array(found[0]["values"]["data"]), found[0]["values"]["draws"]
        steps = sorted(draws, key=int)
        first, last = (1e3 * mmd_squared(np.array(draws[step]), data).value for step in (steps[0], steps[-1]))
        texts.append(f"{key} {first:.1f} → {last:.1f} after {int(steps[-1]):,}")
        if len(steps) < 2 or last > LEFT * first:
            far.append(f"{last:.1f} of {first:.1f} are left on {key}")
    return Finding(f"MMD² ×10³: {', '.join(texts)}", unless(not far, because("; ".join(far))))


def near_exact(experiment: str, *solvers: str) -> Reading:
    """Read how far the densities of some solvers are from the convex optimum, at worst."""

    @measured(f"held-out NLL at most {NEAR} nats above the exact optimum's on every draw")
    def read(records: Records) -> Finding | None:
        gaps = {solver: gaps_to_exact(records.get(experiment, []), solver) for solver in solvers}
        if not all(gaps.values()):
            return None
        worst = {solver: max(found) for solver, found in gaps.items()}
        text = ", ".join(
            f"{label(solver)} {gap:+.3f} over {len(gaps[solver])} fits" for solver, gap in worst.items()
        )
        far = [
            f"{label(solver)} is {gap:+.3f} off{_of_its_space(records[experiment], solver)}"
            for solver, gap in worst.items()
            if gap > NEAR
        ]
        return Finding(f"NLL − exact, worst: {text}", unless(not far, because(", ".join(far))))

    return read


def _of_its_space(records: list[Record], solver: str) -> str:
    """Return how far the optimum in the solver's own features is from the exact one, if it was measured."""
    gaps = gaps_to_exact(records, f"{solver} + polish")
    return f", where the optimum in its own features is {max(gaps):+.3f} off" if gaps else ""


def left_to_the_polish(solver: str) -> Reading:
    """Read the distance of a solver from the optimal penalised likelihood, before a convex polish."""

    @measured(f"penalised likelihood at most {NEAR} nats below its optimum on every draw")
    def read(records: Records) -> Finding | None:
        polished = good(records.get("algorithms", []), method=f"{solver} + polish")
        found = [record["values"]["facts"]["polish_gain"] for record in polished]
        if not found:
            return None
        text = f"at most {max(found):.3f} nats below, over {len(found)} draws"
        return Finding(text, unless(max(found) <= NEAR, because(f"a run ended {max(found):.3f} nats below")))

    return read


@measured("KL(q ‖ p_f) of the Gaussian above 1 nat, and the largest")
def restricted_families(records: Records) -> Finding | None:
    """Read how far each family of dual distributions stays from the density it should follow."""
    found: dict[str, list[float]] = {}
    for record in good(records.get("duals", [])):
        found.setdefault(record["cell"]["method"], []).append(record["values"]["sampler_kl"])
    if "gaussian" not in found or len(found) < 2:
        return None
    means = {family: float(np.mean(values)) for family, values in found.items()}
    worst = max(means, key=lambda family: means[family])
    text = ", ".join(f"{family} {value:.2f}" for family, value in means.items())
    fact = because(f"{worst} is furthest off, by {means[worst]:.2f} nats")
    return Finding(f"KL(q ‖ p_f): {text}", unless(worst == "gaussian" and means[worst] > 1.0, fact))


def rate_of(method: str, expected: float, printed: str) -> Reading:
    """Read the slope of the error of one estimator: at least as steep as expected, and different from 0."""

    @measured(f"95 % interval of the slope reaches {printed} or below, and not 0")
    def read(records: Records) -> Finding | None:
        found = slope(good(records.get("rate", []), method=method))
        if found is None:
            return None
        excess = above_exact(records["rate"], method)
        reason = because(excess) if excess else perhaps("the features that matter grow in number like log n")
        return Finding(
            slope_text(found), unless(found[0] - found[1] <= expected and found[0] + found[1] < 0.0, reason)
        )

    return read


def above_exact(records: list[Record], method: str) -> str:
    """Return the excess of an estimator over the exact solution on the same largest draws, if any."""
    most = max(record["cell"]["rows"] for record in records)
    ours, exact = (by_seed(chosen(records, method=which, rows=most), "kl") for which in (method, "exact"))
    added = paired(ours, exact)
    if method == "exact" or not added:
        return ""
    return (
        f"at n = {most:,} it is {mean(added):+.4f} nats off the exact solution, which has {mean(exact):.4f}"
    )


def grows_in_dimension(method: str, *, memory: float | None, time: float | None) -> Reading:
    """Read how memory and time grow with the dimension; None for no faster than linearly."""
    wanted = {"megabytes": memory, "seconds": time}
    within = lambda value: f"{value:.0f} ± {EXPONENT_ERROR}" if value is not None else f"at most {LINEAR}"

    @measured(f"exponents of d between the two largest: memory {within(memory)}, time {within(time)}")
    def read(records: Records) -> Finding | None:
        mine = good(records.get("cost", []), method=method, rows=100)
        ends = sorted(mine, key=lambda record: record["cell"]["dim"])[-2:]
        if len(ends) < 2:
            return None
        ratio = lambda of: float(np.log(of(ends[1]) / of(ends[0])))
        found = {
            name: ratio(lambda record, name=name: record["values"][name]) / ratio(lambda r: r["cell"]["dim"])
            for name in wanted
        }
        fine = [
            found[n] <= LINEAR if want is None else abs(found[n] - want) <= EXPONENT_ERROR
            for n, want in wanted.items()
        ]
        text = f"memory d^{found['megabytes']:.1f}, time d^{found['seconds']:.1f}"
        return Finding(text, unless(all(fine), perhaps("what does not grow hides the growth at these sizes")))

    return read


@measured("less memory and less time at the most dimensions and at the most rows")
def cheaper(records: Records) -> Finding | None:
    """Read memory and time of DDE beside those of score matching."""
    found = good(records.get("cost", []))
    sizes = [(record["cell"]["dim"], record["cell"]["rows"]) for record in found]
    texts, ahead = [], []
    for dim, rows in (max(sizes), max(sizes, key=lambda size: size[::-1])) if sizes else ():
        both = [good(found, method=method, dim=dim, rows=rows) for method in ("dde", "score matching, full")]
        if not all(both):
            return None
        costs = [
            [float(np.mean([r["values"][name] for r in mine])) for name in ("megabytes", "seconds")]
            for mine in both
        ]
        each = " against ".join(f"{megabytes:.0f} MB, {seconds:.1f} s" for megabytes, seconds in costs)
        texts.append(f"{dim}-D, {rows:,} rows: {each}")
        ahead += [ours < theirs for ours, theirs in zip(*costs, strict=True)]
    reason = perhaps(
        "programs, importance draws and the sampler, which do not grow, outweigh the system of score matching"
    )
    return Finding("; ".join(texts), unless(all(ahead), reason)) if texts else None


def of_table2(records: Records, method: str) -> dict[str, dict[int, float]]:
    """Return the NLL of Table 2 by set and half; empty unless every set of the paper has records."""
    rows = chosen(unseen_halves(records.get("table2", [])), method=method)
    found = {name: by_seed(chosen(rows, dataset=name), "nll") for name in PAPER["table2"]}
    return found if all(found.values()) else {}


def table_two(method: str) -> Reading:
    """Read on how many sets a method is at or below the paper's figure."""

    @measured(
        "mean NLL at most a printed standard deviation above the printed mean on all sets; better: below it "
        "on most"
    )
    def read(records: Records) -> Finding | None:
        rows = of_table2(records, method)
        if not rows:
            return None
        printed = {name: PAPER["table2"][name]["dde"] for name in rows}
        below = sum(mean(rows[name]) < printed[name][0] for name in rows)
        beyond = [name for name in rows if mean(rows[name]) > sum(printed[name])]
        halves = min(len(values) for values in rows.values())
        within = len(rows) - len(beyond)
        text = f"below on {below} of {len(rows)}, within its standard deviation on {within}; {halves} halves"
        verdict = BETTER if 2 * below > len(rows) else REPRODUCED
        return Finding(
            text, unless(not beyond, because(f"it is beyond that on {', '.join(beyond)}"), verdict=verdict)
        )

    return read


@measured(
    f"below all three by {SIGMAS} standard errors of the paired difference on {AHEAD_ON} sets; better: on "
    "more"
)
def beats_competitors(records: Records) -> Finding | None:
    """Read on how many sets the default is clearly below each competitor as run here, on the same halves."""
    ours, rivals = of_table2(records, "auto"), {method: of_table2(records, method) for method in RIVALS}
    if not ours or not all(rivals.values()):
        return None

    def ahead(name: str, method: str) -> bool:
        differences = paired(ours[name], rivals[method][name])
        return bool(differences) and mean(differences) < -SIGMAS * standard_error(differences)

    wins = {method: sum(ahead(name, method) for name in ours) for method in RIVALS}
    best = sum(all(ahead(name, method) for method in RIVALS) for name in ours)
    text = ", ".join(f"clearly below {label(method)} on {won} of {len(ours)}" for method, won in wins.items())
    verdict = BETTER if best > AHEAD_ON else REPRODUCED
    fact = because(f"it is ahead of all on {best}")
    return Finding(f"{text}; below all on {best}", unless(best >= AHEAD_ON, fact, verdict=verdict))


@measured(f"at most a printed standard deviation above the printed mean on {PROTOCOL_ON} of 16 sets")
def released_protocol(records: Records) -> Finding | None:
    """Read the gain of selection on the test half."""
    looks = good(records.get("table2", []), measure="released_protocol")
    found = {name: [r["values"]["nll"] for r in good(looks, dataset=name)] for name in PAPER["table2"]}
    if not all(found.values()):
        return None
    near = sum(float(np.mean(values)) <= sum(PAPER["table2"][name]["dde"]) for name, values in found.items())
    gained = float(np.mean([record["values"]["last_nll"] - record["values"]["nll"] for record in looks]))
    text = f"within its standard deviation on {near} of {len(found)}; the chosen look is "
    text += f"{gained:.2f} nats below the last"
    reason = perhaps(
        "the published runs had other length scales, rates or numbers of steps, which are not printed"
    )
    return Finding(text, unless(near >= PROTOCOL_ON, reason))


def unstable_on(*datasets: str) -> Reading:
    """Read how often conditional score matching fails on these sets."""

    @measured("a half fails on each of them")
    def read(records: Records) -> Finding | None:
        seen = {name: chosen(records.get("table2", []), dataset=name, method="kcef") for name in datasets}
        if not all(seen.values()):
            return None
        failed = {name: sum(record["status"] != "ok" for record in rows) for name, rows in seen.items()}
        text = ", ".join(f"{name}: {failed[name]} of {len(rows)} halves fail" for name, rows in seen.items())
        return Finding(
            text, unless(all(failed.values()), perhaps("our solver of the same system is another one"))
        )

    return read
