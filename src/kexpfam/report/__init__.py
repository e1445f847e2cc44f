"""What a person reads about a fitted model: one page with verdict, pictures and numbers, and models side by side."""

from typing import Any

from numpy.typing import ArrayLike

from kexpfam.plot.canvas import bare_arrays
from kexpfam.report.comparison import Comparison, compare
from kexpfam.report.page import Page
from kexpfam.report.sections import SECTIONS, title_of
from kexpfam.report.subject import Subject

__all__ = ["Comparison", "Page", "compare", "report"]


@bare_arrays()
def report(
    model: Any, X: ArrayLike | None = None, y: ArrayLike | None = None, *, random_state: int = 0
) -> Page:
    """Return the page of a fitted model, held against held-out rows if they are given and the training rows otherwise."""
    subject = Subject.against(model, X, y, random_state)
    parts = [part for part in (section(subject) for section in SECTIONS) if part]
    return Page(title_of(subject), "\n".join(parts))
