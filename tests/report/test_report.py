"""Sections and figures of reports on densities of every width, escaping, and links to other files."""

import html.parser
import re

import numpy as np
import pandas as pd
import pytest

from kexpfam.estimators import ConditionalKernelDensity, GaussianMixtureDensity, KernelDensity
from kexpfam.report import Page
from kexpfam.report.page import Section, drawn, paragraph, table
from kexpfam.report.sections import trial_blocks

SECTIONS = ["What was measured", "Columns", "Calibration and coverage", "How to call it"]
# Names as users have them: markup, entities, formulas of TeX that cannot be parsed, quotes, other scripts.
HOSTILE = ["<script>alert(1)</script>", "a & b", r"$\frac$", "\"quoted\" 'name'", "größe ≤ 3"]


class Outline(html.parser.HTMLParser):
    """Reads a page: its tags, its texts, where it points to, and whether every element is closed."""

    VOID = {"meta", "br", "hr", "img", "link", "input"}

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.texts, self.ids, self.links = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [
            value for name, value in attributes if name in ("href", "src", "xlink:href", "action", "data")
        ]
        assert not any(name.startswith("on") for name, _ in attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def said(self):
        return " ".join(" ".join(self.texts).split())


def frame(columns, rows=80):
    rng = np.random.default_rng(0)
    first = rng.normal(size=rows)
    return pd.DataFrame(
        {name: first + (0.3 + 0.3 * k) * rng.normal(size=rows) for k, name in enumerate(columns)}
    )


def joint(*columns):
    return GaussianMixtureDensity(random_state=0).fit(frame(columns))


def conditional(features, targets):
    whole = frame([*features, *targets])
    y = whole[targets[0]] if len(targets) == 1 else whole[list(targets)]
    return ConditionalKernelDensity(condition_width=0.3, width=0.3, random_state=0).fit(
        whole[list(features)], y
    )


MODELS = {
    "one column": (lambda: joint("a"), "p(a)", 3),
    "three columns": (lambda: joint("a", "b", "c"), "p(a, b, c)", 7),
    "one target": (lambda: conditional(["a", "b"], ["c"]), "p(c | a, b)", 11),
    "two targets": (lambda: conditional(["a"], ["b", "c"]), "p(b, c | a)", 7),
}


@pytest.fixture(scope="module", params=MODELS)
def reported(request):
    make, title, figures = MODELS[request.param]
    page = make().report()
    return page, Outline(page.html), title, figures


def test_every_kind_of_model_has_its_sections_and_figures(reported):
    page, outline, title, figures = reported
    assert page.title == title
    assert title in outline.said
    for name in SECTIONS:
        assert name in outline.said
    assert outline.tags.count("figure") == outline.tags.count("svg") == figures
    assert outline.open == []


def test_a_report_is_one_file_that_points_nowhere_and_runs_nothing(reported):
    page, outline, *_ = reported
    assert not {"script", "iframe", "link", "object", "embed", "form"} & set(outline.tags)
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    assert not re.search(r"url\((?!#)|@import", page.html)
    assert "default-src 'none'" in page.html


def test_names_within_figures_are_unique_and_found(reported):
    _, outline, *_ = reported
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)


def test_the_ink_of_figures_is_that_of_the_page(reported):
    page, *_ = reported
    drawn = "".join(re.findall(r"<svg.*?</svg>", page.html, re.DOTALL))
    assert "#000000" not in drawn and "#ffffff" not in drawn
    assert "currentColor" in drawn


def test_a_report_on_held_out_rows_says_so_and_takes_them_by_name():
    model, new = conditional(["a", "b"], ["c"]), frame(["a", "b", "c"], 150)
    said = Outline(model.report(X=new[["a", "b"]], y=new["c"]).html).said
    assert "150 held-out rows" in said and "training rows" not in said
    mean = model.score(new[["a", "b"]], new["c"])
    assert f"mean log density of held-out rows {mean:.4f} ±" in said
    with pytest.raises(ValueError, match="feature names should match"):
        model.report(X=new[["b", "a"]], y=new["c"])


def test_rows_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ValueError, match="y is for conditional models"):
        joint("a", "b").report(X=frame(["a", "b"]), y=np.zeros(80))
    with pytest.raises(ValueError, match="both X and y"):
        conditional(["a"], ["b"]).report(X=frame(["a"]))


def test_names_of_columns_are_text_and_nothing_else(tmp_path):
    page = conditional(HOSTILE[:4], HOSTILE[4:]).report(tmp_path / "report.html")
    outline = Outline(page.html)
    assert "script" not in outline.tags
    for name in HOSTILE:
        assert name in outline.said
    assert (tmp_path / "report.html").read_text("utf-8") == page.html


def test_a_page_shows_itself_in_a_notebook_and_says_what_it_is():
    sections = [Section("empty", table([])), Section("full", paragraph("text"))]
    page = Page("p(<a>)", [paragraph("<b>")], sections)
    assert page._repr_html_().startswith("<iframe") and "<h1>" not in page._repr_html_()
    assert "<p>&lt;b&gt;</p>" in page.html and page.html.count("<section>") == 1 and "empty" not in page.html
    assert str(page).startswith("p(<a>): a page of")
    assert "<title>p(&lt;a&gt;)</title>" in page.html


def test_a_table_escapes_its_cells_and_sets_numbers_to_the_right():
    shown = table([["<a>", 1234, 0.123456], ["b", 5, 1e-9]], ["name", "count", "value"])
    assert "&lt;a&gt;" in shown
    assert '<td class="number">1,234</td><td class="number">0.1235</td>' in shown
    assert '<th class="name">name</th><th class="number">count</th>' in shown
    assert table([]) == ""


def test_a_figure_has_its_caption_for_those_who_do_not_see_it():
    figure = joint("a").plot()
    shown = drawn(figure, "one", 'a "small" <figure>')
    assert 'aria-label="a &quot;small&quot; &lt;figure&gt;"' in shown
    assert 'a "small" <figure>' in Outline(shown).said
    assert 'id="one-' in shown


def test_trials_are_listed_from_the_best_and_what_all_share_is_said_once():
    model = KernelDensity(random_state=0).fit(frame(["a", "b"]))
    shown = "".join(trial_blocks(model.selection_))
    outline = Outline(shown)
    tried = len(model.selection_.losses)
    assert f"{tried} settings were tried" in outline.said
    losses = [float(value) for value in re.findall(r'<td class="number">([-\d.e]+)</td></tr>', shown)]
    np.testing.assert_allclose(losses, np.sort(model.selection_.losses), rtol=1e-3)
    assert f"{tried - 8} more" in outline.said
    assert trial_blocks(None) == []


def test_a_notebook_shows_the_verdict_once_there_is_one():
    model = joint("a", "b")
    assert "diagnose()" in model._repr_html_()
    assert "diagnose()" not in GaussianMixtureDensity()._repr_html_()
    diagnosis = model.diagnose()
    for shown in (model._repr_html_(), model._repr_mimebundle_()["text/html"], diagnosis._repr_html_()):
        assert f">{diagnosis.verdict.upper()}<" in shown
    assert "diagnose()" in model.fit(frame(["a", "b"]))._repr_html_()


@pytest.mark.parametrize("shift, level", [(0.0, "good"), (5.0, "poor")])
def test_the_verdict_on_held_out_rows_is_that_of_their_coverage(shift, level):
    """Rows of another population are not called good, and the page explains both halves of the verdict."""
    page = joint("a", "b").report(X=frame(["a", "b"], 200) + shift)
    said = Outline(page.html).said
    assert f'class="verdict {level}"' in page.html
    assert ("do not look like draws" in said) == (level == "poor")
    assert "Solved: good (did the solver converge" in said and f"Fits: {level} (do rows" in said


def test_a_report_on_many_columns_has_at_most_a_megabyte():
    page = joint(*(f"column {k}" for k in range(14))).report()
    assert len(page.html.encode()) <= 2**20
