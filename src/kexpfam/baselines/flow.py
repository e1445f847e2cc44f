"""Neural spline flow, through the package flowjax."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from kexpfam.data.columns import check_columns
from kexpfam.data.sample import AnyArray, RandomKey
from kexpfam.data.scaling import Scaling
from kexpfam.estimators.base import Seed, key_from, whole
from kexpfam.estimators.density import DensityEstimator
from kexpfam.estimators.messages import check_share
from kexpfam.jax_settings import single_precision
from kexpfam.judge.diagnosis import Diagnosis, Judgement, Measurement
from kexpfam.model.ensemble import LawDensity
from kexpfam.model.measures import AbstractMeasure
from kexpfam.paper.duals import spline_flow
from kexpfam.progress import Listener


class FlowShape(NamedTuple):
    """Sizes of a flow, from which flowjax builds its structure."""

    dims: int
    layers: int
    width: int
    knots: int
    interval: float = 5.0


class FlowLosses(NamedTuple):
    """Losses after each epoch, in nats per row of the standardised data."""

    train: np.ndarray
    validation: np.ndarray
    finished: bool


class FlowLaw(AbstractMeasure):
    """The law of a flow in model units, stored as its shape and its arrays."""

    shape: FlowShape
    arrays: list[np.ndarray]

    @eqx.filter_jit
    def log_density(self, x: Float[AnyArray, "*n d"]) -> Float[AnyArray, "*n"]:
        return self.flow().log_prob(x)

    def sample(self, count: int, *, key: RandomKey) -> Float[Array, "count d"]:
        return self.flow().sample(key, (count,))

    def flow(self) -> Any:
        """Return the flow of flowjax; to be called inside a compiled program, since building it is slow."""
        arrays, rest = eqx.partition(spline_flow(*self.shape, invert=True, key=jr.key(0)), eqx.is_array)
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), self.arrays), rest)


@dataclass(kw_only=True, eq=False, repr=False)
class SplineFlow(DensityEstimator):
    r"""Neural spline flow: masked autoregressive rational-quadratic splines (Durkan et al. 2019).

    Maximum likelihood on the standardised data by Adam. Training stops when the validation loss has not
    fallen for ``patience`` epochs; the parameters of the best epoch are kept. Needs flowjax: ``pip install
    "kexpfam[flows]"``.

    Parameters
    ----------
    n_layers, n_knots, width : int
        Autoregressive layers, knots of each spline, and width of the hidden layer that places them.
    interval : float
        The splines are the identity beyond this many standard deviations.
    learning_rate : float
        Of Adam.
    batch_size : int
        Rows per step.
    max_epochs, patience : int
        Epochs at most, and epochs without a lower validation loss.
    validation_share : float
        Share of the rows that are held out to measure the validation loss.
    random_state : int, RandomState or None
        Same seed, same result.

    Attributes
    ----------
    density_ : LawDensity
    training_ : FlowLosses
        Losses after each epoch.
    n_features_in_ : int
    """

    _stored = ("density_", "_training", "training_")

    n_layers: int = 4
    n_knots: int = 12
    width: int = 32
    interval: float = 5.0
    learning_rate: float = 5e-3
    batch_size: int = 64
    max_epochs: int = 300
    patience: int = 30
    validation_share: float = 0.15
    random_state: Seed = None

    def _fit(self, X: np.ndarray, listener: Listener | None) -> Self:
        for name in ("n_layers", "n_knots", "width", "batch_size", "max_epochs", "patience"):
            whole(name, getattr(self, name), 1)
        for name in ("interval", "learning_rate"):
            if not 0.0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)!r}.")
        check_share("validation_share", self.validation_share)
        check_columns(X, self._names)
        scaling = Scaling.plain(X, weight=self._weight)
        shape = FlowShape(X.shape[1], self.n_layers, self.width, self.n_knots, float(self.interval))
        self._training = points = scaling.to_model(X)
        arrays, self.training_ = self._trained(shape, points, key_from(self.random_state))
        self.density_ = LawDensity(FlowLaw(shape, arrays), scaling)
        return self

    def _trained(
        self, shape: FlowShape, points: np.ndarray, key: RandomKey
    ) -> tuple[list[np.ndarray], FlowLosses]:
        """Return the arrays of the flow, trained in single precision, and the losses."""
        make_key, train_key = jr.split(key)
        data = [jnp.asarray(points, jnp.float32)]
        if self._weight is not None:
            data.append(jnp.asarray(self._weight / self._weight.mean(), jnp.float32))
        with single_precision():
            new = spline_flow(*shape, invert=True, key=make_key)
            from flowjax.train import fit_to_data  # slow to import

            flow, losses = fit_to_data(
                train_key,
                new,
                tuple(data),
                loss_fn=None if self._weight is None else _weighted_loss,
                learning_rate=self.learning_rate,
                max_epochs=self.max_epochs,
                max_patience=self.patience,
                batch_size=self.batch_size,
                val_prop=self.validation_share,
                show_progress=False,
            )
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(flow, eqx.is_array))]
        arrays = [leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf for leaf in leaves]
        finished = len(losses["val"]) < self.max_epochs
        return arrays, FlowLosses(np.asarray(losses["train"]), np.asarray(losses["val"]), finished)

    def _diagnosed(self, calibration: list[Measurement], settings: Judgement, key: RandomKey) -> Diagnosis:
        train, validation, finished = self.training_
        best = int(np.argmin(validation))
        loss, epoch = float(validation[best]), f"{best + 1} of {len(validation)}"
        text = f"{loss:.4f} nats, {loss - train[best]:+.4f} to training"
        level = "good" if finished else "fair"
        meaning = "The validation loss may still fall: raise max_epochs."
        kept = Measurement("kept_epoch", best + 1, label="kept epoch", text=epoch)
        held_out = Measurement("validation_loss", loss, label="validation loss", text=text)
        ended = Measurement("finished", finished, None, level, meaning)
        return Diagnosis([kept, held_out, ended, *calibration])


def _weighted_loss(
    params: Any,
    static: Any,
    x: Float[Array, "b d"],
    weight: Float[Array, " b"],
    key: RandomKey | None = None,
) -> Float[Array, ""]:
    """Return minus the weighted mean log density of a batch; the weights have mean one over all rows."""
    import paramax  # comes with flowjax

    return -jnp.mean(weight * paramax.unwrap(eqx.combine(params, static)).log_prob(x))
