"""What an estimator shows of itself: a picture, a page, and in a notebook the verdict on its fit."""

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from kexpfam.judge.diagnosis import Diagnosis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kexpfam.report import Page

__all__ = ["Shown", "remembered"]

Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(diagnose: Method) -> Method:
    """Return ``diagnose`` of an estimator, which keeps its result for a notebook to show: it takes too long to be repeated."""

    @functools.wraps(diagnose)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._diagnosis = diagnose(self, *args, **kwargs)
        return self._diagnosis

    return cast(Method, keeping)


class Shown(BaseEstimator):
    """The faces of an estimator that are made for eyes."""

    _diagnosis: Diagnosis | None = None

    def plot(self, *args: Any, **kwargs: Any) -> "Figure":
        """Return a figure of the fit; arguments are those of ``kexpfam.plot.plot_density``, or ``plot_conditional``."""
        from kexpfam import plot  # matplotlib is slow to import

        check_is_fitted(self, "density_")
        return plot.plot_model(self, *args, **kwargs)

    def report(
        self,
        path: str | os.PathLike | None = None,
        X: ArrayLike | None = None,
        y: ArrayLike | None = None,
        *,
        random_state: int = 0,
    ) -> "Page":
        """Return a page on the fit: verdict, columns, pictures, calibration; one HTML file, which is written to ``path``.

        The model is held against the rows X (and y, if it is conditional), which the fit should not have seen, or against the
        training rows if there are none.
        """
        from kexpfam.report import report  # matplotlib is slow to import

        check_is_fitted(self, "density_")
        page = report(self, X, y, random_state=random_state)
        if path is not None:
            page.save(path)
        return page

    def _html_repr(self) -> str:
        """Return scikit-learn's diagram, and below it the verdict of the last ``diagnose()``."""
        diagram = super()._html_repr()
        if not hasattr(self, "density_"):
            return diagram
        hint = "<p>Fitted. <code>diagnose()</code> gives a verdict, <code>report()</code> a page.</p>"
        return diagram + (hint if self._diagnosis is None else self._diagnosis._repr_html_())
