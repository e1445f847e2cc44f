"""Reports for people: one page on a fitted model, and a comparison of several models."""

from typing import Any

from numpy.typing import ArrayLike

from kexpfam.plot.canvas import bare_arrays
from kexpfam.report.comparison import Comparison, compare
from kexpfam.report.page import Page
from kexpfam.report.sections import SECTIONS, lead, title_of
from kexpfam.report.subject import Subject

__all__ = ["Comparison", "Page", "compare", "report"]


@bare_arrays()
def report(
    model: Any, X: ArrayLike | None = None, y: ArrayLike | None = None, *, random_state: int = 0, **sizes: int
) -> Page:
    """Return the page of a fitted model, on held-out rows or, without X, on the training rows.

    ``sizes`` are ``most_rows``, ``ranking_draws`` and ``plot_draws`` of an ``Evaluation``.
    """
    subject = Subject.of(model, X, y, random_state, **sizes)
    return Page(title_of(subject), lead(subject), [section(subject) for section in SECTIONS])
