"""A neural spline flow, through flowjax: the density model that a user of neural networks would reach for."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key
from sklearn.utils.validation import check_is_fitted

from kexpfam.data.columns import check_columns
from kexpfam.data.sample import AnyArray
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import DensityEstimator, Seed, key_from, whole
from kexpfam.estimators.showing import remembered
from kexpfam.judge.diagnosis import AbstractDiagnosis
from kexpfam.model.precision import double_precision
from kexpfam.progress import Listener

__all__ = ["FlowDensity", "FlowDiagnosis", "FlowShape", "SplineFlow", "Training"]

# Splines bend the line within this many standard deviations and leave it as it is beyond.
SPLINE_INTERVAL = 5.0
VALIDATION_SHARE = 0.15
BATCH_SIZE = 64
MISSING = 'SplineFlow needs the package flowjax: pip install "kexpfam[flows]".'


class FlowShape(NamedTuple):
    """What the arrays of a flow belong to: from it flowjax builds the rest."""

    dims: int
    layers: int
    width: int
    knots: int


class Training(NamedTuple):
    """The losses (nats per row, standardised units) after each epoch."""

    train: np.ndarray
    validation: np.ndarray
    finished: bool


class FlowDensity(eqx.Module):
    """A flow by its shape and its arrays, so that it can be stored; draws are exact."""

    shape: FlowShape
    arrays: list[np.ndarray]
    scaling: Scaling

    def log_density(self, targets: np.ndarray, X: None = None) -> np.ndarray:
        """Return the log density of each row, in the data's own units."""
        with double_precision():
            log_density = np.asarray(_log_prob(self._flow(), self.scaling.to_model(targets)))
        return log_density + self.scaling.log_jacobian(targets)

    def sample(self, count: int, X: None = None, *, key: Key[Array, ""]) -> np.ndarray:
        """Return draws."""
        with double_precision():
            draws = np.asarray(_draw(self._flow(), count, key))
        return self.scaling.to_data(draws)

    def _flow(self) -> Any:
        structure, rest = _skeleton(self.shape)
        return eqx.combine(jax.tree.unflatten(structure, [jnp.asarray(array) for array in self.arrays]), rest)


@dataclass(frozen=True)
class FlowDiagnosis(AbstractDiagnosis):
    """What can be known about a trained flow."""

    verdict: str
    training: Training
    advice: tuple[str, ...]

    def lines(self) -> list[tuple[str, str]]:
        best = int(np.argmin(self.training.validation))
        gap = self.training.validation[best] - self.training.train[best]
        return [
            ("kept epoch", f"{best + 1} of {len(self.training.validation)}"),
            ("validation loss", f"{self.training.validation[best]:.4f} nats, {gap:+.4f} to training"),
        ]


class SplineFlow(DensityEstimator):
    r"""Neural spline flow: a standard normal through masked autoregressive rational-quadratic splines (Durkan et al. 2019).

    Maximum likelihood on the standardised data by Adam, stopped when the likelihood of an inner validation part has not risen
    for ``patience`` epochs; the parameters of its best epoch are kept. Needs flowjax: ``pip install "kexpfam[flows]"``.

    Parameters
    ----------
    n_layers, n_knots, width : int
        Autoregressive layers, knots of each spline, and width of the hidden layer that places them.
    learning_rate : float
        Of Adam.
    max_epochs, patience : int
        Epochs at most, and without progress.
    random_state : int, RandomState or None
        Same seed, same result.

    Attributes
    ----------
    density_ : FlowDensity
    training_ : Training
        The losses after each epoch.
    n_features_in_ : int
    """

    _stored = ("density_", "_training", "training_")

    def __init__(
        self,
        *,
        n_layers: int = 4,
        n_knots: int = 12,
        width: int = 32,
        learning_rate: float = 5e-3,
        max_epochs: int = 300,
        patience: int = 30,
        random_state: Seed = None,
    ) -> None:
        self.n_layers = n_layers
        self.n_knots = n_knots
        self.width = width
        self.learning_rate = learning_rate
        self.max_epochs = max_epochs
        self.patience = patience
        self.random_state = random_state

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        for name in ("n_layers", "n_knots", "width", "max_epochs", "patience"):
            whole(name, getattr(self, name), 1)
        if not 0.0 < self.learning_rate < np.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate!r}.")
        check_columns(X, self._names)
        scaling, shape = (
            Scaling.plain(X, weight=self._weight),
            FlowShape(X.shape[1], self.n_layers, self.width, self.n_knots),
        )
        self._training = points = scaling.to_model(X)
        arrays, self.training_ = self._trained(shape, points, key_from(self.random_state))
        self.density_ = FlowDensity(shape, arrays, scaling)
        return self

    def _trained(
        self, shape: FlowShape, points: np.ndarray, key: Key[Array, ""]
    ) -> tuple[list[np.ndarray], Training]:
        """Return the arrays of the trained flow, and the losses; single precision is enough to train."""
        make_key, train_key = jr.split(key)
        counts = (
            () if self._weight is None else (jnp.asarray(self._weight / self._weight.mean(), jnp.float32),)
        )
        data = (jnp.asarray(points, jnp.float32), *counts)
        with jax.enable_x64(False):
            flow, losses = _flowjax().train.fit_to_data(
                train_key,
                _new_flow(shape, make_key),
                data,
                loss_fn=None if self._weight is None else _weighted_loss,
                learning_rate=self.learning_rate,
                max_epochs=self.max_epochs,
                max_patience=self.patience,
                batch_size=BATCH_SIZE,
                val_prop=VALIDATION_SHARE,
                show_progress=False,
            )
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(flow, eqx.is_array))]
        arrays = [leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf for leaf in leaves]
        finished = len(losses["val"]) < self.max_epochs
        return arrays, Training(np.asarray(losses["train"]), np.asarray(losses["val"]), finished)

    @remembered
    def diagnose(self, random_state: Seed = 0) -> FlowDiagnosis:
        """Return how the training ended; it prints as a short report with a verdict."""
        check_is_fitted(self, "density_")
        if self.training_.finished:
            return FlowDiagnosis("good", self.training_, ())
        return FlowDiagnosis(
            "fair", self.training_, ("The validation loss may still fall: raise max_epochs.",)
        )


def _flowjax() -> Any:
    """Return flowjax, with the parts that are used; it is slow to import, and not everyone's."""
    try:
        import flowjax
        import flowjax.bijections
        import flowjax.distributions
        import flowjax.flows
        import flowjax.train
    except ImportError:
        raise ImportError(MISSING) from None
    return flowjax


def _new_flow(shape: FlowShape, key: Key[Array, ""]) -> Any:
    library = _flowjax()
    return library.flows.masked_autoregressive_flow(
        key,
        base_dist=library.distributions.Normal(jnp.zeros(shape.dims)),
        transformer=library.bijections.RationalQuadraticSpline(knots=shape.knots, interval=SPLINE_INTERVAL),
        flow_layers=shape.layers,
        nn_width=shape.width,
    )


def _weighted_loss(
    params: Any,
    static: Any,
    x: Float[Array, "b d"],
    weight: Float[Array, " b"],
    key: Key[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Return minus the mean log density of a batch, by the rows' weights, which have mean one over all rows."""
    import paramax  # comes with flowjax

    return -jnp.mean(weight * paramax.unwrap(eqx.combine(params, static)).log_prob(x))


@functools.lru_cache(maxsize=8)
def _skeleton(shape: FlowShape) -> tuple[Any, Any]:
    """Return the structure of a flow's arrays, and everything in it that is not an array."""
    arrays, rest = eqx.partition(_new_flow(shape, jr.key(0)), eqx.is_array)
    return jax.tree.structure(arrays), rest


@eqx.filter_jit
def _log_prob(flow: Any, points: Float[AnyArray, "n d"]) -> Float[Array, " n"]:
    return flow.log_prob(points)


@eqx.filter_jit
def _draw(flow: Any, count: int, key: Key[Array, ""]) -> Float[Array, "n d"]:
    return flow.sample(key, (count,))
