"""Candidates are fitted to one task, each piece of work is done once, and a failed fit changes nothing."""

import numpy as np
import pytest

from kexpfam import ConditionalKernelExpFamily, Kernel, KernelExpFamily, Learned, Search
from kexpfam.data.scaling import Scaling
from kexpfam.estimators import model as estimator_model
from kexpfam.fit import kernel, mixture, select
from kexpfam.fit.candidates import CANDIDATES
from kexpfam.fit.problem import Status
from kexpfam.fit.stack import compare
from kexpfam.fit.task import Fitted, Splits

TINY = Learned(folds=2, repeats=1, width=8, epochs=3, steps=20, cells=64)
QUICK = Kernel(search=Search(folds=2, rounds=1, draws=256), n_centres=30)


def table(rows=150, columns=5, seed=0):
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0.0, 2.0 * np.pi, rows)
    ring = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.1 * rng.normal(size=(rows, 2))
    return np.concatenate([ring, rng.normal(size=(rows, columns - 2))], 1)


@pytest.fixture
def counted(monkeypatch):
    """Return a function that replaces ``owner.name`` by a counting wrapper, and returns the list of its
    calls."""

    def count(owner, name, *others):
        calls, inner = [], getattr(owner, name)

        def wrapper(*args, **kwargs):
            calls.append((args, kwargs))
            return inner(*args, **kwargs)

        replacement = staticmethod(wrapper) if isinstance(owner, type) else wrapper
        for one in (owner, *others):
            monkeypatch.setattr(one, name, replacement)
        return calls

    return count


class TestWorkIsDoneOnce:
    def test_many_columns(self, counted):
        shapes = counted(mixture, "best_shape")
        trees = counted(select, "relevant_dimensions")
        scalings = counted(Scaling, "standardising")
        splits = counted(Splits, "draw")
        model = KernelExpFamily(kernel=QUICK, learned=TINY, random_state=0).fit(table())
        assert {one.name for one in model.candidates_} == set(CANDIDATES)
        # One search of a mixture on all rows; the second is the optimism of that base on a part of them.
        assert sum(len(args[0]) == 150 for args, _ in shapes) == 1
        assert len(trees) == 1
        # Each of the five columns once, for all candidates.
        assert len(scalings) == 5
        assert len([1 for args, _ in splits if args[0] == 150]) == 1

    def test_conditions(self, counted):
        scalings = counted(Scaling, "standardising")
        rng = np.random.default_rng(0)
        x = rng.normal(size=(120, 2))
        model = ConditionalKernelExpFamily(kernel=QUICK, learned=TINY, random_state=0)
        model.fit(x, x[:, 0] + rng.normal(size=120))
        assert {one.name for one in model.candidates_} == {"kernel", "chain"}
        # Two inputs, the target, and the target with a power transformation.
        assert len(scalings) == 4

    def test_no_mixture_is_searched_if_nothing_draws_from_it(self, counted):
        searches = counted(kernel, "best_mixture")
        KernelExpFamily(model="kernel", kernel=QUICK, random_state=0).fit(table(columns=2))
        assert searches == []


def test_all_candidates_are_scored_on_the_same_rows(monkeypatch):
    seen = {}

    def spy(task, chosen):
        for one in chosen:
            found = one.fit(task, {})
            seen[one.name] = np.isfinite(found.held_out)
        return stacked(task, chosen)

    stacked = estimator_model.compete
    monkeypatch.setattr(estimator_model, "compete", spy)
    KernelExpFamily(kernel=QUICK, learned=TINY, random_state=0).fit(table())
    assert set(seen) == set(CANDIDATES)
    for name in seen:
        np.testing.assert_array_equal(seen[name], seen["mixture"], err_msg=name)


def test_held_out_parts_are_disjoint_and_complementary():
    for seed in range(3):
        splits = Splits.draw(101, parts=5, share=0.15, seed=seed)
        assert splits.held.shape == (5, 15)
        assert len(np.unique(splits.held)) == splits.held.size
        for held, kept, mask in zip(splits.held, splits.kept, splits.masks, strict=True):
            np.testing.assert_array_equal(np.sort(np.r_[held, kept]), np.arange(101))
            np.testing.assert_array_equal(np.flatnonzero(mask), np.sort(held))


def test_status_and_trace_of_every_candidate_are_kept():
    model = KernelExpFamily(kernel=QUICK, learned=TINY, random_state=0).fit(table())
    assert all(isinstance(one.status, Status) for one in model.fits_.values())
    assert len(model.fits_["chain"].trace["held_out"]) > 0
    assert model.fits_["mixture"].facts["components"] >= 1.0


class TestModel:
    @pytest.mark.parametrize("name", CANDIDATES)
    def test_a_model_that_is_named_is_the_only_candidate(self, name):
        settings = {"learned": TINY} if name == "chain" else {"kernel": QUICK} if name == "kernel" else {}
        model = KernelExpFamily(model=name, **settings, random_state=0).fit(table(rows=60, columns=2))
        assert [one.name for one in model.candidates_] == [name]
        assert model.candidates_[0].weight == 1.0

    EXCLUDED = {
        "solver of a chain": ({"model": "chain", "solver": "exact"}, "settings of the kernel model"),
        "kernel of a mixture": ({"model": "mixture", "kernel": "laplace"}, "settings of the kernel model"),
        "chain of a kernel model": ({"model": "kernel", "learned": TINY}, "setting of the chain"),
        "bounds of a mixture": ({"model": "mixture", "bounds": (-9.0, 9.0)}, "no bounds"),
        "base within bounds": (
            {"model": "kernel", "kernel": Kernel(base="gaussian"), "bounds": (-9.0, 9.0)},
            "base is a box",
        ),
        "unknown": ({"model": "forest"}, "unknown model 'forest'.*auto, mixture, kernel, chain"),
    }

    @pytest.mark.parametrize(("settings", "message"), EXCLUDED.values(), ids=EXCLUDED)
    def test_settings_that_exclude_one_another_are_refused(self, settings, message):
        with pytest.raises(ValueError, match=message):
            KernelExpFamily(**settings, random_state=0).fit(table(rows=60, columns=2))

    def test_missing_values_exclude_the_kernel_model(self):
        rows = table(rows=60, columns=2)
        rows[0, 0] = np.nan
        with pytest.raises(ValueError, match="without missing values"):
            KernelExpFamily(model="kernel", random_state=0).fit(rows)

    def test_changed_settings_of_a_candidate_make_it_compete(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(450, 1))
        y = x[:, 0] + rng.normal(size=450)
        model = ConditionalKernelExpFamily(kernel=QUICK, learned=TINY, random_state=0).fit(x, y)
        assert {one.name for one in model.candidates_} == {"kernel", "chain"}


class TestFailedFits:
    @pytest.fixture
    def model(self):
        settings = {"model": "kernel", "kernel": Kernel(lengthscale=1.0, rkhs_penalty=0.01, n_centres=20)}
        return KernelExpFamily(**settings, random_state=0)

    def test_a_refused_table_leaves_the_old_model(self, model):
        pandas = pytest.importorskip("pandas")
        rows = table(rows=60, columns=2)
        model.fit(pandas.DataFrame(rows, columns=["a", "b"]))
        before = model.score_samples(pandas.DataFrame(rows, columns=["a", "b"]))
        with pytest.raises(ValueError, match="constant"):
            model.fit(pandas.DataFrame({"c": np.ones(60), "d": rows[:, 0]}))
        assert model.column_names_ == ["a", "b"]
        np.testing.assert_array_equal(model.score_samples(pandas.DataFrame(rows, columns=["a", "b"])), before)

    def test_an_interrupt_leaves_the_old_model(self, model, monkeypatch):
        rows = table(rows=60, columns=2)
        before = model.fit(rows).score_samples(rows)

        def interrupted(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(estimator_model, "compete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(rows[:, ::-1] * 10.0)
        np.testing.assert_array_equal(model.score_samples(rows), before)

    def test_a_failed_first_fit_leaves_the_estimator_unfitted(self, model):
        with pytest.raises(ValueError, match="constant"):
            model.fit(np.ones((30, 2)))
        assert not hasattr(model, "density_")
        assert not hasattr(model, "n_features_in_")


def test_a_candidate_without_held_out_rows_gets_the_whole_weight():
    (only,) = compare({"kernel": Fitted(None, None, Status.CONVERGED, {}, {})})
    assert (only.name, only.weight) == ("kernel", 1.0)
