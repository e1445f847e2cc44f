"""Settings records: values, checks, and the parameter interface of scikit-learn."""

import copy
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import GridSearchCV

from kexpfam import DDE, KernelExpFamily
from kexpfam.data.blocks import Rows
from kexpfam.fit.distil import Distillation
from kexpfam.fit.features import Features
from kexpfam.fit.learned import Learned
from kexpfam.fit.problem import SOLVERS, solver_from
from kexpfam.fit.select import Search
from kexpfam.integrate.nodes import Integration
from kexpfam.judge.diagnosis import Judgement
from kexpfam.settings import SettingsRecord, at_least, check_at_least, copy_changed_records

RECORDS = [Search, Learned, Integration, Features, Judgement, Distillation, Rows]


class Inner(SettingsRecord):
    folds: int = 5
    scales: tuple[float, ...] = (1.0, 2.0)

    def __check_init__(self):
        check_at_least(self, 2, "folds")


class Outer(SettingsRecord):
    name: str
    lengthscale: float | list | np.ndarray | None = None
    inner: Inner = Inner(folds=7)
    tags: list = eqx.field(default_factory=list)


class Model(BaseEstimator):
    """Score = -(folds - 4)^2 - lengthscale, so that the best settings are known."""

    def __init__(self, kernel=Outer("gaussian", 1.0)):  # noqa: B008
        self.kernel = kernel

    def set_params(self, **params):
        copy_changed_records(self, params)
        return super().set_params(**params)

    def fit(self, X, y=None):
        self.fitted_ = True
        return self

    def score(self, X, y=None):
        return -((self.kernel.inner.folds - 4) ** 2) - self.kernel.lengthscale


@pytest.mark.parametrize("record", RECORDS, ids=lambda cls: cls.__name__)
def test_every_record_clones_to_an_equal_one(record):
    first = record()
    second = clone(first)
    assert second == first and second is not first and hash(second) == hash(first)
    assert repr(first) == f"{record.__name__}()"
    assert record(**first.get_params(deep=False)) == first


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_are_records(name):
    solver = solver_from(name, conditional=False)
    assert clone(solver) == solver
    changed = "integral='grid'" if name == "exact" else ""
    assert repr(solver) == f"{type(solver).__name__}({changed})"


def test_a_grid_search_reaches_the_steps_of_a_solver():
    model = KernelExpFamily(model="kernel", solver=DDE(steps=7))
    changed = clone(model).set_params(solver__steps=5)
    assert (changed.solver.steps, model.solver.steps) == (5, 7)


class Bounded(SettingsRecord):
    count: int = at_least(1, 4, whole=True)
    rate: float = at_least(0, 0.5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"count": 0}, "whole number of at least 1"), ({"rate": -1.0}, "rate must be at least 0")],
)
def test_a_field_has_its_own_bound(wrong, message):
    with pytest.raises(ValueError, match=message):
        Bounded(**wrong)
    record = Bounded(count=2)
    with pytest.raises(ValueError, match=message):
        record.set_params(**wrong)
    assert record == Bounded(count=2)


def test_a_grid_search_reaches_nested_fields():
    grid = {"kernel__inner__folds": [3, 4, 5], "kernel__lengthscale": [0.5, 2.0]}
    search = GridSearchCV(Model(), grid, cv=2).fit(np.zeros((6, 1)))
    assert search.best_params_ == {"kernel__inner__folds": 4, "kernel__lengthscale": 0.5}
    assert search.best_estimator_.kernel == Outer("gaussian", 0.5, inner=Inner(folds=4))
    assert Model().kernel == Outer("gaussian", 1.0)


def test_parameters_of_nested_records_have_the_name_of_the_record_before_them():
    params = Outer("laplace").get_params()
    assert params["inner__folds"] == 7 and params["inner"] == Inner(folds=7)
    assert "inner__folds" not in Outer("laplace").get_params(deep=False)


def test_changed_parameters_leave_shared_records_as_they_were():
    record = Outer("gaussian")
    shared = record.inner
    assert record.set_params(inner__folds=3, name="laplace") is record
    assert (record.inner.folds, record.name) == (3, "laplace")
    assert shared.folds == 7 and Outer("gaussian").inner.folds == 7
    model = Model()
    model.set_params(kernel__lengthscale=9.0)
    assert model.kernel.lengthscale == 9.0 and Model().kernel.lengthscale == 1.0


def test_a_nested_record_can_be_replaced_and_changed_in_one_call():
    record = Outer("gaussian").set_params(inner__folds=3, inner=Inner(scales=(4.0,)))
    assert record.inner == Inner(folds=3, scales=(4.0,))


def test_a_refused_value_changes_nothing():
    record = Outer("gaussian")
    with pytest.raises(ValueError, match="folds must be at least 2, got 1"):
        record.set_params(name="laplace", inner__folds=1)
    assert record == Outer("gaussian")


def test_unknown_parameters_are_refused_with_the_valid_names():
    with pytest.raises(ValueError, match=r"'fold' for Inner. Valid parameters are: \['folds', 'scales'\]"):
        Inner().set_params(fold=3)
    with pytest.raises(ValueError, match="folds of Inner is 5, which has no parameters"):
        Inner().set_params(folds__steps=3)


def test_a_record_is_frozen_and_copies_to_an_equal_one():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().folds = 3
    assert copy.deepcopy(Outer("gaussian", [1.0])) == Outer("gaussian", [1.0])


def test_the_repr_shows_what_differs_from_the_defaults():
    assert repr(Outer("gaussian")) == "Outer(name='gaussian')"
    assert (
        repr(Outer("gaussian", inner=Inner(scales=(1.0,))))
        == "Outer(name='gaussian', inner=Inner(scales=(1.0,)))"
    )
    assert repr(Outer("gaussian", tags=["a"])) == "Outer(name='gaussian', tags=['a'])"


@pytest.mark.parametrize("make", [np.array, jnp.array, list], ids=["numpy", "jax", "list"])
def test_records_of_arrays_are_compared_and_hashed_by_value(make):
    first, second, other = (Outer("gaussian", make([1.0, last])) for last in (2.0, 2.0, 3.0))
    assert first == second and hash(first) == hash(second)
    assert first != other and first != Inner()
    assert len({first, second, other}) == 2


def test_equal_records_share_one_compiled_program():
    compilations = []

    @eqx.filter_jit
    def scaled(values, record):
        compilations.append(record)
        return values * record.folds

    static = jax.jit(
        lambda values, record: compilations.append(record) or values * record.folds, static_argnums=1
    )
    for function in (scaled, static):
        compilations.clear()
        for folds in (3, 3, 4):
            assert function(jnp.ones(2), Inner(folds=folds))[0] == folds
        assert len(compilations) == 2
