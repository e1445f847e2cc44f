"""The sections of a report, each a function of its subject."""

import itertools
import warnings
from typing import Any

import numpy as np

from kexpfam import plot
from kexpfam.data.columns import check_columns, check_targets
from kexpfam.data.kinds import AbstractKind
from kexpfam.estimators.base import UncertainNormaliserWarning, warn_of_uncertain_normaliser
from kexpfam.judge.diagnosis import Judgement
from kexpfam.judge.metrics import simultaneous_limits
from kexpfam.model.distributions import AbstractDensity
from kexpfam.plot.canvas import panels
from kexpfam.plot.conditionals import cell
from kexpfam.plot.numbers import training_rows
from kexpfam.report.page import Section, block, drawn, figures, paragraph, table
from kexpfam.report.subject import Subject

# Most columns with a marginal plot, and most features with a plot of intervals.
MOST_MARGINALS, MOST_BANDS = 24, 4
# Rows of smallest p-value that are shown.
MOST_UNUSUAL = 5
OUTCOMES = ("score", "loss", "standard_error")
HALVES = (
    "Solved: {} (did the solver converge, and are normaliser and sampler accurate?). "
    "Fits: {} (do rows that were held out look like draws of the density?). The verdict is the lower of both."
)
UNLIKE = (
    "The held-out rows do not look like draws of the density: check that they come from the population of "
    "the training rows, and fit more rows."
)
# Probability of a coverage within chance.
CHANCE = 0.99
WORDS = {
    "good": "All measurements of the density and its sampler are good.",
    "fair": "The density is usable; see the remarks below.",
    "poor": "Not reliable: fix the issues listed below first.",
}


def title_of(subject: Subject) -> str:
    """Return the estimated density as a formula: p(y | x), p(a, b, ...)."""
    listed = lambda names: ", ".join(names[:6]) + (f", … {len(names) - 6} more" if len(names) > 6 else "")
    given = f" | {listed(subject.features)}" if subject.conditional else ""
    return f"p({listed(subject.targets)}{given})"


def lead(subject: Subject) -> list[str]:
    """Return the model, its rows, and the verdict with advice."""
    model, diagnosis = subject.model, subject.diagnosis
    rows = f"{getattr(model, 'n_rows_', len(model.training_weight_)):,} rows"
    if getattr(model, "_weight", None) is not None:
        rows += f" (effective sample size {model._effective_rows:,.0f})"
    count = lambda names, what: f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
    columns = f" of {count(subject.targets, 'column')}."
    if subject.conditional:
        columns = f": {count(subject.targets, 'target')} given {count(subject.features, 'feature')}."
    covered, found = _coverage(subject)
    verdict = _lower(diagnosis.verdict, covered)
    fits = _lower(diagnosis.fits, covered) if subject.unseen else diagnosis.fits
    advice = [*diagnosis.advice, *([UNLIKE] if covered != "good" else []), *_warnings(subject)]
    words = " ".join([WORDS[verdict], *found, *_most_important(subject)])
    return [
        paragraph(f"{type(model).__name__}, fitted to {rows}{columns}", soft=True),
        block("verdict", verdict, words, advice),
        paragraph(HALVES.format(diagnosis.solved, fits), soft=True),
    ]


def shape(subject: Subject) -> Section:
    """Return plots of the density as a whole."""
    if len(subject.targets) == 1:
        if not subject.conditional:
            return Section("Density")
        if not subject.ordered:
            return Section("The density under three conditions", figures(_given(subject)))
        bands = figures(_bands(subject), large=True)
        return Section("The density along the features", bands, figures(_given(subject)))
    caption = f"{subject.rows.capitalize()} and draws of the model"
    if len(subject.targets) == 2 and subject.kinds.plain and not subject.conditional:
        figure = plot.plot_density(subject.model, *subject.given, random_state=subject.seed)
        return Section("Density and draws", drawn(figure, "plane", f"{caption}.", many=True))
    levels = [kind.labels for kind in subject.kinds.targets]
    figure = plot.plot_pairs(subject.Y, subject.draws, subject.targets, levels=levels)
    note = ", each under the features of a row." if subject.conditional else "."
    return Section("Data and draws, pair by pair", drawn(figure, "pairs", caption + note, many=True))


def columns(subject: Subject) -> Section:
    """Return the columns: kind, range, and a plot of the marginal distribution."""
    wide, names = len(subject.features), [*subject.features, *subject.targets]
    values = np.concatenate([subject.X, subject.Y], axis=1)
    kinds = [*subject.kinds.features, *subject.kinds.targets]
    rows = []
    for k, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        seen = values[np.isfinite(values[:, k]), k]
        role = "" if not subject.conditional else "feature" if k < wide else "target"
        known = "" if subject.kinds.plain else kind.description
        ends = ["–"] * 3
        if not kind.categorical:
            ends = [f"{end:.4g}" for end in (seen.min(), np.median(seen), seen.max())]
        missing = f"{1.0 - len(seen) / len(values):.1%}" if len(seen) < len(values) else ""
        rows.append([name, role, known, *ends, len(np.unique(seen)), missing])
    header = ["column", "role", "kind", "smallest", "median", "largest", "distinct", "missing"]
    kept = [k for k in range(len(header)) if any(row[k] != "" for row in rows)]
    shown = table([[row[k] for k in kept] for row in rows], [header[k] for k in kept])
    places = [*range(wide, len(names)), *range(wide)][:MOST_MARGINALS]
    marginals = [_marginal(subject, values[:, k], k, names[k], kinds[k]) for k in places]
    return Section("Columns", shown, figures(marginals))


def _marginal(subject: Subject, values: np.ndarray, place: int, name: str, kind: AbstractKind) -> str:
    target = place - len(subject.features)
    draws, model = None, ""
    if target >= 0:
        draws = subject.draws[:, target]
        model = f" and the {'probabilities' if kind.discrete else 'density'} of the model"
    figure = plot.plot_marginal(values, draws, name=name, levels=kind.labels)
    return drawn(figure, f"column{place}", f"{name}: {subject.rows}{model}")


def calibration(subject: Subject) -> Section:
    """Return the calibration: PIT values, and observed against nominal coverage."""
    levels, regions, found = subject.coverage
    rows = len(levels)
    note = "" if subject.unseen else " These rows were used in the fit: pass held-out rows for a fair check."
    if found is not None:
        caption = f"Flat within the band if calibrated; p of all tests: {found.pit_p_value:.2g}."
        pit = drawn(plot.plot_pit(found.pit, name=found["pit"].text), "pit", caption)
    else:
        figure = plot.plot_pit(levels, name="level of the region that contains the row")
        pit = drawn(figure, "pit", "Flat within the band if the rows look like draws of the model.")
    caption = f"Share of rows inside {regions}, over their nominal share."
    reliability = drawn(plot.plot_reliability(levels), "reliability", caption)
    shares = []
    for level in Judgement().coverages:
        (low,), (high,) = simultaneous_limits(rows, np.array([level, 1.0 - level]), cumulative=True)
        observed = f"{np.mean(levels <= level):.1%}"
        shares.append([f"{level:.0%}", observed, f"{low / rows:.1%} to {high / rows:.1%}"])
    return Section(
        "Calibration and coverage",
        paragraph(f"{rows:,} {subject.rows}, {regions}.{note}"),
        figures([pit, reliability], large=True),
        table(shares, ["nominal", "observed", "chance (95 %)"]),
    )


def importance(subject: Subject) -> Section:
    """Return permutation losses of the columns, length scales, and weights of the candidates."""
    candidates = getattr(subject.model, "candidates_", None) or []
    score = lambda one: f"{one.score:.4f} ± {one.standard_error:.2g}"
    rows = [(one.name, f"{one.weight:.0%}", score(one)) for one in candidates]
    header = ["candidate", "weight", "log density of held-out rows"]
    what = "dependence of a column on the others."
    if subject.conditional:
        what = "information of a feature about the target."
    drawings = []
    if losses := subject.losses:
        values, errors, _ = zip(*losses.values(), strict=True)
        figure = plot.plot_ranking(list(losses), values, errors, label="nats")
        drawings = [drawn(figure, "losses", f"Mean log density lost when the column is permuted: {what}")]
    scales = table(_scales(subject), ["column", "length scale (standardised units)"])
    competed = table(rows if len(rows) > 1 else [], header)
    return Section("What matters", figures(drawings, large=True), scales, competed)


def fitted(subject: Subject) -> Section:
    """Return the measurements of the diagnosis and the settings of the model."""
    scores = subject.log_density(*subject.some())
    mean = f"{scores.mean():.4f} ± {scores.std() / np.sqrt(len(scores)):.2g} nats over {len(scores):,} rows"
    measured = [one for one in subject.diagnosis.labelled() if one.name != "held_out_score"]
    defaults = type(subject.model)().get_params(deep=False)
    settings = {
        name: value
        for name, value in subject.model.get_params(deep=False).items()
        if name not in ("progress", "checkpoint") and repr(value) != repr(defaults[name])
    }
    listed = ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "the defaults"
    rows = [
        (f"mean log density of {subject.rows}", mean),
        *((one.label, one.shown) for one in measured),
        ("settings that were asked for", listed),
    ]
    return Section("What was measured", table(rows))


def search(subject: Subject) -> Section:
    """Return the settings that were tried, and the trace of an iterative solver."""
    blocks = trial_blocks(getattr(subject.model, "selection_", None))
    if getattr(getattr(subject.model, "solution_", None), "trace", None):
        blocks.append(drawn(plot.plot_trace(subject.model), "trace", "Trace of the solver.", many=True))
    return Section("How the settings were found", *blocks)


def unusual(subject: Subject) -> Section:
    """Return the held-out rows of smallest p-value and the column that makes each unusual."""
    title, model = "Unusual rows", subject.model
    known = getattr(model, "_reference", None) or getattr(model, "_calibrated", None)
    if not subject.unseen or subject.conditional or known is None or not hasattr(model, "explain"):
        return Section(title)
    rows = model._codec.decode(subject.Y)
    p_values = model.novelty(rows)
    lowest = np.argsort(p_values)[:MOST_UNUSUAL]
    found = model.explain(rows[lowest], random_state=subject.seed)
    first = found.surprise.argmax(axis=1)
    rows_shown = [
        [int(row), f"{p_values[row]:.2g}", found.names[j], found.cell(k, int(j))]
        for k, (row, j) in enumerate(zip(lowest, first, strict=True))
    ]
    note = f"{np.mean(p_values <= 0.05):.1%} of the rows have p-values of at most 5 %."
    return Section(title, paragraph(note), table(rows_shown, ["row", "p-value", "column", "value"]))


def copying(subject: Subject) -> Section:
    """Return whether draws repeat training rows."""
    if not subject.unseen or not hasattr(subject.model, "copying"):
        return Section("Draws and training rows")
    found = subject.model.copying(subject.model._codec.decode(subject.Y), random_state=subject.seed)
    note = "Measured on the held-out rows. This is no proof of privacy."
    return Section("Draws and training rows", table(found.lines()), paragraph(note, soft=True))


def calls(subject: Subject) -> Section:
    """Return example calls in Python and on the command line."""
    names = f"Columns: {', '.join([*subject.features, *subject.targets])}."
    return Section(
        "How to call it",
        paragraph(names, soft=True),
        block("calls", subject.targets, subject.conditional),
    )


# Plots first, then the numbers behind them.
SECTIONS = (shape, columns, calibration, importance, unusual, copying, fitted, search, calls)


def _lower(*levels: str) -> str:
    """Return the lowest level; one that is unknown does not count."""
    return max((level for level in levels if level in WORDS), key=list(WORDS).index)


def _coverage(subject: Subject, nominal: float = 0.9) -> tuple[str, list[str]]:
    """Return a level for the coverage on held-out rows, and a sentence on it."""
    if not subject.unseen:
        return "good", []
    levels, regions, _ = subject.coverage
    shares = np.array([nominal, 1.0 - nominal])
    (low,), (high,) = simultaneous_limits(len(levels), shares, cumulative=True, coverage=CHANCE)
    inside = int(np.sum(levels <= nominal))
    share = inside / len(levels)
    level, outcome = "good", "within chance"
    if not low <= inside <= high:
        level = "poor" if abs(share - nominal) > Judgement().poor_distance else "fair"
        outcome = f"{'more' if inside > high else 'fewer'} than chance explains"
    return level, [
        f"{regions.capitalize()} of {nominal:.0%} contain {share:.1%} of the {subject.rows}, {outcome}."
    ]


def _most_important(subject: Subject) -> list[str]:
    """Return a sentence on the column with the largest permutation loss, if it is significant."""
    name, loss = next(iter(subject.losses.items()), (None, None))
    if loss is None or loss.value <= 2.0 * loss.standard_error:
        return []
    what = "is most informative about the target" if subject.conditional else "depends most on the others"
    return [f"Column {name} {what}: {loss.value:.2f} nats."]


def _bands(subject: Subject) -> list[str]:
    """Return plots of intervals along the most important features."""
    others = ", the other features at their medians" if len(subject.features) > 1 else ""
    drawings = []
    for k, name in enumerate(list(subject.losses)[:MOST_BANDS]):
        figure, (axis,) = panels(1, width=4.6, height=3.2)
        plot.plot_conditional(subject.model, *subject.given, feature=subject.features.index(name), ax=axis)
        axis.set_xlabel(name)
        what = f"median, intervals of 50 % and 90 %, and {subject.rows}"
        drawings.append(drawn(figure, f"band{k}", f"{subject.targets[0]} along {name}{others}: {what}."))
    return drawings


def _given(subject: Subject) -> list[str]:
    """Return the densities under the conditions of a low, a median and a high prediction."""
    X, _ = subject.some()
    order = np.argsort(np.asarray(subject.model.density_.mean(X)).ravel())
    words = ("A row", "A second row", "A third row")
    if subject.ordered:
        words = ("A low prediction", "A median prediction", "A high prediction")
    drawings = []
    for k, (share, called) in enumerate(zip((0.1, 0.5, 0.9), words, strict=True)):
        figure, (axis,) = panels(1, width=3.4, height=2.6)
        given = subject.model._given(X[order[int(share * (len(order) - 1))]])
        plot.plot_given(given, ax=axis)
        axis.set_title("")
        listed = [f"{name} = {cell(value)}" for name, value in given.condition.items()]
        values = ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")
        drawings.append(drawn(figure, f"given{k}", f"{called}: {values}."))
    return drawings


def _scales(subject: Subject) -> list[tuple[str, str]]:
    """Return the length scale of each column of a kernel model."""
    shown = lambda scale: f"{scale:.3g}" if np.isfinite(scale) else "∞: f does not depend on it"
    settings = getattr(getattr(subject.model, "selection_", None), "settings", None)
    used = {"lengthscale_": getattr(settings, "dims", None)}
    rows = []
    for names, attribute in ((subject.features, "condition_lengthscale_"), (subject.targets, "lengthscale_")):
        scales = getattr(subject.model, attribute, None)
        places = list(used.get(attribute) or range(len(names)))
        # Categories have several coordinates each, and no single length scale.
        if scales is not None and np.size(scales) in (1, len(places)) and names:
            every: np.ndarray = np.full(len(names), np.inf)
            every[places] = np.asarray(scales, float)
            rows += [(name, shown(scale)) for name, scale in zip(names, every, strict=True)]
    return rows


def _warnings(subject: Subject) -> list[str]:
    """Return the warnings of a fit to the training rows."""
    model = subject.model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables = training_rows(model)
        if subject.kinds.plain and not any(np.any(np.isnan(part)) for part in tables):
            check: Any = check_targets if subject.conditional else check_columns
            check(*tables, subject.features or subject.targets)
        if isinstance(model.density_, AbstractDensity):
            warn_of_uncertain_normaliser(model.density_, subject.X)
    normaliser = subject.diagnosis.get("log_partition")
    known = normaliser is not None and normaliser.level == "poor"
    repeated = lambda one: known and issubclass(one.category, UncertainNormaliserWarning)
    return [str(one.message) for one in caught if not repeated(one)]


def trial_blocks(selection: Any, *, most_shown: int = 8, most_listed: int = 200) -> list[str]:
    """Return the settings that all trials share, the best trials and the others; empty without a search."""
    trials = _trials(selection)
    if not trials:
        return []
    score = "score" if "score" in trials[0] else "loss"
    trials.sort(key=lambda trial: -trial[score] if score == "score" else trial[score])
    names = [name for name in trials[0] if name not in OUTCOMES]
    shown = [{name: _value(trial[name]) for name in names} for trial in trials]
    varied = [name for name in names if len({trial[name] for trial in shown}) > 1]
    same = [name for name in names if name not in varied and shown[0][name]]
    outcomes = [name for name in OUTCOMES if name in trials[0]]
    rows = [
        [*(text[name] for name in varied), *(trial[name] for name in outcomes)]
        for text, trial in zip(shown, trials, strict=True)
    ]
    what = "a lower loss is better."
    if score == "score":
        what = "the score is the mean log density of held-out rows."
    words = f"{len(rows):,} settings were tried, the best first; {what}"
    if same:
        words += f" All have {', '.join(f'{_words(name)} {shown[0][name]}' for name in same)}."
    header = [_words(name) for name in (*varied, *outcomes)]
    rest = table(rows[most_shown:most_listed], header, summary=f"{len(rows) - most_shown} more")
    return [paragraph(words), table(rows[:most_shown], header), rest]


def _trials(selection: Any) -> list[dict[str, Any]]:
    """Return each trial as its settings and its score or loss."""
    if hasattr(selection, "grids"):
        losses = np.asarray(selection.losses).ravel()
        return [
            dict(zip(selection.names, place, strict=True)) | {"loss": float(loss)}
            for place, loss in zip(itertools.product(*selection.grids), losses, strict=True)
        ]
    found = []
    for trial in getattr(selection, "trials", None) or ():
        fields = trial._asdict()
        settings = fields.pop("settings", None)
        found.append(({} if settings is None else settings._asdict()) | fields)
    return found


def _value(value: Any) -> str:
    """Return a setting as text: equal numbers once, at most six different ones."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    shown = [f"{number:.3g}" if np.isfinite(number) else "∞" for number in np.asarray(value, float).ravel()]
    if len(set(shown)) == 1:
        return shown[0]
    return ", ".join(shown[:6]) + (", …" if len(shown) > 6 else "")


def _words(name: str) -> str:
    return name.replace("_", " ")
