"""The sections of a report, each a function of its subject; one that has nothing to say is empty."""

import warnings
from typing import Any

import numpy as np

from kexpfam.data.columns import check_columns, check_targets
from kexpfam.data.kinds import AbstractKind
from kexpfam.estimators.base import UncertainNormaliserWarning, warn_of_uncertain_normaliser
from kexpfam.judge.bands import simultaneous_limits
from kexpfam.model.distributions import AbstractDensity
from kexpfam.plot import (
    plot_conditional,
    plot_density,
    plot_given,
    plot_marginal,
    plot_pairs,
    plot_pit,
    plot_ranking,
    plot_reliability,
    plot_trace,
)
from kexpfam.plot.canvas import panels
from kexpfam.plot.conditionals import cell
from kexpfam.plot.numbers import levels_of, training_rows
from kexpfam.report.page import code, drawing, grid, items, paragraph, section, table, text
from kexpfam.report.subject import Subject
from kexpfam.report.trials import trials_table

__all__ = ["SECTIONS", "title_of"]

MOST_MARGINALS, MOST_BANDS = 24, 4
LEVELS = (0.5, 0.8, 0.9, 0.95)
WORDS = {
    "good": "Nothing that was measured speaks against this density or its sampler.",
    "fair": "The density can be used, with what stands below in mind.",
    "poor": "Do not rely on this density before what stands below is mended.",
}


def title_of(subject: Subject) -> str:
    """Return what was estimated, as a formula: p(y | x), p(a, b, ...)."""
    listed = lambda names: ", ".join(names[:6]) + (f", … {len(names) - 6} more" if len(names) > 6 else "")
    given = f" | {listed(subject.features)}" if subject.conditional else ""
    return f"p({listed(subject.targets)}{given})"


def header(subject: Subject) -> str:
    """Return what was fitted, and the verdict in words."""
    model, diagnosis = subject.model, subject.diagnosis
    rows = getattr(model, "n_rows_", len(model.training_weight_))
    weighted = (
        f" (with weights, {model._effective_rows:,.0f} in effect)"
        if getattr(model, "_weight", None) is not None
        else ""
    )
    what = f"{type(model).__name__}, fitted to {rows:,} rows{weighted}" + (
        f": {_count(len(subject.targets), 'target')} given {_count(len(subject.features), 'feature')}."
        if subject.conditional
        else f" of {_count(len(subject.targets), 'column')}."
    )
    words = " ".join([WORDS[diagnosis.verdict], *_in_words(subject)])
    verdict = paragraph(f"<strong>{text(diagnosis.verdict)}.</strong>", text(words))
    listed = items([*diagnosis.advice, *_warnings(subject)])
    top = f"<h1>{text(title_of(subject))}</h1>{paragraph(text(what), kind='soft')}"
    return f'<header>{top}<div class="verdict {diagnosis.verdict}">{verdict}{listed}</div></header>'


def fitted(subject: Subject) -> str:
    """Return what was chosen and how well it does."""
    X, Y = subject.some()
    scores = subject.log_density(X, Y)
    error = scores.std() / np.sqrt(len(scores))
    mean = f"{scores.mean():.4f} ± {error:.2g} nats over {len(scores):,} rows"
    measured = [row for row in subject.diagnosis.lines() if row[0] != "held-out log density"]
    settings = {
        name: value
        for name, value in _changed(subject.model).items()
        if name not in ("progress", "checkpoint")
    }
    asked = ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "the defaults"
    rows = [(f"mean log density of {subject.rows}", mean), *measured, ("settings that were asked for", asked)]
    return section("What was measured", table(rows))


def columns(subject: Subject) -> str:
    """Return the columns, their values, and what the model says of each on its own."""
    wide, names = len(subject.features), [*subject.features, *subject.targets]
    values, kinds = (
        np.concatenate([subject.X, subject.Y], axis=1),
        [*subject.kinds.features, *subject.kinds.targets],
    )
    rows = []
    for k, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        seen = values[np.isfinite(values[:, k]), k]
        role = "" if not subject.conditional else "feature" if k < wide else "target"
        known = "" if subject.kinds.plain else kind.description
        ends = (
            ["–"] * 3
            if kind.categorical
            else [f"{end:.4g}" for end in (seen.min(), np.median(seen), seen.max())]
        )
        missing = f"{1.0 - len(seen) / len(values):.1%}" if len(seen) < len(values) else ""
        rows.append([name, role, known, *ends, len(np.unique(seen)), missing])
    header = ["column", "role", "kind", "smallest", "median", "largest", "distinct", "missing"]
    kept = [k for k in range(len(header)) if any(row[k] != "" for row in rows)]
    shown = table([[row[k] for k in kept] for row in rows], [header[k] for k in kept])
    places = [*range(wide, len(names)), *range(wide)][:MOST_MARGINALS]
    return section(
        "Columns", shown, grid(_marginal(subject, values[:, k], k, names[k], kinds[k]) for k in places)
    )


def _marginal(subject: Subject, values: np.ndarray, place: int, name: str, kind: AbstractKind) -> str:
    drawn = place - len(subject.features)
    figure = plot_marginal(
        values, None if drawn < 0 else subject.draws[:, drawn], name=name, levels=levels_of(kind)
    )
    what = (
        ""
        if drawn < 0
        else " and the probabilities of the model"
        if kind.discrete
        else " and the density of the model"
    )
    return drawing(figure, f"column{place}", f"{name}: {subject.rows}{what}")


def shape(subject: Subject) -> str:
    """Return the picture of the density as a whole."""
    if subject.conditional and len(subject.targets) == 1:
        if not subject.ordered:
            return section("The density under three conditions", grid(_given(subject)))
        return section(
            "The density along the features", grid(_bands(subject), large=True), grid(_given(subject))
        )
    if len(subject.targets) == 1:
        return ""
    caption = f"{subject.rows.capitalize()} and draws of the model"
    levels = [levels_of(kind) for kind in subject.kinds.targets]
    if len(subject.targets) == 2 and subject.kinds.plain and not subject.conditional:
        figure = plot_density(subject.model, *subject.given, random_state=subject.seed)
        return section("Density and draws", drawing(figure, "plane", caption, many=True))
    figure = plot_pairs(subject.Y, subject.draws, subject.targets, levels=levels)
    note = ", each under the features of a row." if subject.conditional else "."
    return section("Data and draws, pair by pair", drawing(figure, "pairs", caption + note, many=True))


def calibration(subject: Subject) -> str:
    """Return whether rows look like draws of the model."""
    needed, regions, found = subject.coverage
    note = (
        ""
        if subject.unseen
        else " These are the rows of the fit, which flatter it: pass held-out rows for a fair check."
    )
    if found is not None:
        name = found.words[0]
        caption = f"Flat within the band if calibrated; KS p = {found.ks_p_value:.2g}."
        first = drawing(plot_pit(found.pit, name=name), "pit", caption)
    else:
        figure = plot_pit(needed, name="level of the region that holds the row")
        first = drawing(figure, "pit", "Flat within the band if the rows look like draws of the model.")
    second = drawing(
        plot_reliability(needed), "reliability", f"Share of rows inside {regions}, over their nominal share."
    )
    rows = len(needed)
    limits = [simultaneous_limits(rows, np.array([level, 1.0 - level]), cumulative=True) for level in LEVELS]
    shares = [
        [f"{level:.0%}", f"{np.mean(needed <= level):.1%}", f"{low[0] / rows:.1%} to {high[0] / rows:.1%}"]
        for level, (low, high) in zip(LEVELS, limits, strict=True)
    ]
    words = paragraph(text(f"{rows:,} {subject.rows}, {regions}.{note}"))
    return section(
        "Calibration and coverage",
        words,
        grid([first, second], large=True),
        table(shares, ["nominal", "observed", "chance (95 %)"]),
    )


def relevance(subject: Subject) -> str:
    """Return what matters: candidates, length scales, and what shuffling a column costs."""
    candidates = getattr(subject.model, "candidates_", None) or []
    rows = [
        (one.name, f"{one.weight:.0%}", f"{one.score:.4f} ± {one.standard_error:.2g}") for one in candidates
    ]
    competed = table(rows, ["candidate", "weight", "log density of held-out rows"]) if len(rows) > 1 else ""
    scales = table(_scales(subject), ["column", "length scale (standardised units)"])
    losses = subject.losses
    caption = "Mean log density that is lost where the column is shuffled: " + (
        "what a feature tells of the target."
        if subject.conditional
        else "what a column has to do with the others."
    )
    figure = ""
    if losses:
        values, errors = zip(*losses.values(), strict=True)
        figure = drawing(plot_ranking(list(losses), values, errors, label="nats"), "losses", caption)
    return section("What matters", grid([figure], large=True), scales, competed)


def search(subject: Subject) -> str:
    """Return the settings that were tried, and the steps of the solver if it took any."""
    steps = ""
    if getattr(getattr(subject.model, "solution_", None), "trace", None):
        steps = drawing(plot_trace(subject.model), "trace", "The solver's steps.", many=True)
    return section(
        "How the settings were found", trials_table(getattr(subject.model, "selection_", None)), steps
    )


def calls(subject: Subject) -> str:
    """Return how the model is called from Python and from the command line."""
    load = ["import kexpfam", "", 'model = kexpfam.load("model.kexpfam")']
    if subject.conditional:
        single = len(subject.targets) == 1
        lines = [
            f"model.score_samples(X, y)  # log p({', '.join(subject.targets[:3])} | features) of each row",
            "model.sample(X, 100, random_state=0)  # draws of the target for each row",
            "model.predict(X)  # conditional means",
            *(["model.interval(X, 0.9)  # central intervals"] if single else []),
            "model.given(x).plot()  # the density under one condition",
            "model.diagnose(X_new, y_new)  # calibration on held-out rows" if single else "model.diagnose()",
        ]
        shell = [
            "kexpfam sample model.kexpfam --at new.csv -n 100 -o draws.csv",
            "kexpfam diagnose model.kexpfam --data new.csv",
        ]
    else:
        lines = [
            "model.score_samples(X)  # log p of each row, normalised",
            "model.sample(1000, random_state=0)  # draws",
            "model.diagnose()  # a verdict on the fit",
        ]
        shell = ["kexpfam sample model.kexpfam -n 1000 -o draws.csv", "kexpfam diagnose model.kexpfam"]
    shell = ["kexpfam score model.kexpfam new.csv -o scores.csv", *shell]
    order = f"Columns: {', '.join([*subject.features, *subject.targets])}."
    return section("How to call it", paragraph(text(order), kind="soft"), code(*load, *lines), code(*shell))


# The pictures come first, and the numbers behind them where one looks for them.
SECTIONS = (header, shape, columns, calibration, relevance, fitted, search, calls)


def _in_words(subject: Subject) -> list[str]:
    """Return what the numbers say: whether regions hold the share of unseen rows that they should, and what tells most."""
    lines = []
    if subject.unseen:
        needed, regions, _ = subject.coverage
        (low,), (high,) = simultaneous_limits(len(needed), np.array([0.9, 0.1]), cumulative=True)
        held = int(np.sum(needed <= 0.9))
        outcome = (
            "which is within chance"
            if low <= held <= high
            else f"{'more' if held > high else 'fewer'} than chance explains"
        )
        lines.append(
            f"{regions.capitalize()} of 90 % hold {held / len(needed):.1%} of the {subject.rows}, {outcome}."
        )
    telling = next(((name, loss) for name, loss in subject.losses.items()), None)
    if telling is not None and telling[1].value > 2.0 * telling[1].standard_error:
        what = "tells most of the target" if subject.conditional else "has most to do with the others"
        lines.append(f"Column {telling[0]} {what}: {telling[1].value:.2f} nats.")
    return lines


def _bands(subject: Subject) -> list[str]:
    """Return the intervals along the features that tell most."""
    others = ", the other features at their medians" if len(subject.features) > 1 else ""
    figures = []
    for k, name in enumerate(list(subject.losses)[:MOST_BANDS]):
        figure, (axis,) = panels(1, width=4.6, height=3.2)
        plot_conditional(subject.model, *subject.given, feature=subject.features.index(name), ax=axis)
        axis.set_xlabel(name)
        words = f"{subject.targets[0]} along {name}{others}: median, intervals of 50 % and 90 %, and {subject.rows}."
        figures.append(drawing(figure, f"band{k}", words))
    return figures


def _given(subject: Subject) -> list[str]:
    """Return the densities under three conditions: those of a low, a middling and a high prediction."""
    X, _ = subject.some()
    order, figures = np.argsort(np.asarray(subject.model.density_.mean(X)).ravel()), []
    words = (
        ("A low prediction", "A middling one", "A high one")
        if subject.ordered
        else ("A row", "Another", "A third")
    )
    for k, (share, called) in enumerate(zip((0.1, 0.5, 0.9), words, strict=True)):
        row = X[order[int(share * (len(order) - 1))]]
        figure, (axis,) = panels(1, width=3.4, height=2.6)
        given = subject.model._given(row)
        plot_given(given, ax=axis)
        axis.set_title("")
        figures.append(drawing(figure, f"given{k}", f"{called}: {_values(given)}."))
    return figures


def _values(given: Any) -> str:
    listed = [f"{name} = {cell(value)}" for name, value in given.condition.items()]
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")


def _scales(subject: Subject) -> list[tuple[str, str]]:
    """Return the length scale of each column of a kernel model; an infinite one says that f does not depend on it."""
    shown = lambda scale: f"{scale:.3g}" if np.isfinite(scale) else "∞: f does not depend on it"
    settings = getattr(getattr(subject.model, "selection_", None), "settings", None)
    used = {"lengthscale_": getattr(settings, "dims", None)}
    rows = []
    for names, attribute in ((subject.features, "condition_lengthscale_"), (subject.targets, "lengthscale_")):
        scales = getattr(subject.model, attribute, None)
        places = list(used.get(attribute) or range(len(names)))
        # Labels have several coordinates each: their length scales have no name to stand beside.
        if scales is not None and np.size(scales) in (1, len(places)) and names:
            every: np.ndarray = np.full(len(names), np.inf)
            every[places] = np.asarray(scales, float)
            rows += [(name, shown(scale)) for name, scale in zip(names, every, strict=True)]
    return rows


def _warnings(subject: Subject) -> list[str]:
    """Return what a fit to these rows warns of."""
    model = subject.model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables = training_rows(model)
        if subject.kinds.plain and not any(np.any(np.isnan(part)) for part in tables):
            check: Any = check_targets if subject.conditional else check_columns
            check(*tables, subject.features or subject.targets)
        if isinstance(model.density_, AbstractDensity):
            warn_of_uncertain_normaliser(model.density_, subject.X)
    uncertain = any("log Z" in line for line in subject.diagnosis.advice)
    return [
        str(one.message)
        for one in caught
        if not (uncertain and issubclass(one.category, UncertainNormaliserWarning))
    ]


def _changed(model: Any) -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    defaults = type(model)().get_params(deep=False)
    return {
        name: value
        for name, value in model.get_params(deep=False).items()
        if repr(value) != repr(defaults[name])
    }


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
