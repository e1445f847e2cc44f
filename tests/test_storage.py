import collections
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

import kexpfam
from kexpfam import DDE, Convex, Features, Integration, Judgement, Kernel, KernelExpFamily, Search, storage
from kexpfam.data.sample import Sample
from kexpfam.data.scaling import Scaling
from kexpfam.estimators import KernelDensity
from kexpfam.fit.distil import Distillation
from kexpfam.fit.loop import Run
from kexpfam.fit.problem import Problem, Solution, Solver, Status
from kexpfam.fit.saddle import DoublyDual
from kexpfam.fit.select import KernelSettings, Selection, Trial
from kexpfam.model import kernels
from kexpfam.model.density import Estimate, Inputs, Sampler, Tilt, TiltedDensity
from kexpfam.model.measures import Box, Gaussian, JointMixture, Mixture, Nodes
from kexpfam.model.networks import Free, Identity, Network, Residual
from kexpfam.model.spaces import Constant, FeatureSpace, KernelSpan, RandomFeatures
from kexpfam.storage import Checkpoint, CheckpointWarning, StorageError, load_tree, save_tree
from tools.trust.mutations import forge, mutated, rewrite

PLAIN = {
    "none": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**80],
    "floats": [1.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf")],
    "strings": ["", "a.b", "Nyström \u2207", "$tuple", 'quote " and \\'],
    "tuples": (1, (2.0, ()), [3, ("x",)]),
    "empty": {"list": [], "dict": {}},
    "dollar": {"$tuple": 1, "other": {"$class": "os:system"}},
}
ARRAYS = {
    "float64": np.array([[0.1, np.nan], [np.inf, -0.0]]),
    "float32": np.array([1.5, -2.5], np.float32),
    "float16": np.array([0.5], np.float16),
    "int64": np.array([2**62, -1]),
    "int32": np.array([1, 2], np.int32),
    "uint8": np.array([255], np.uint8),
    "bool": np.array([True, False]),
    "scalar": np.array(0.1),
    "width zero": np.zeros((5, 0)),
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "object.kexpfam"


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


def round_trip(file, tree):
    save_tree(file, "test", tree, {})
    return load_tree(file)[1]


def same(first, second) -> bool:
    """Return whether two trees agree in types, dtypes, weak types and every bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray | np.generic | jax.Array):
        weak = getattr(first, "weak_type", None) == getattr(second, "weak_type", None)
        bits = np.asarray(first).tobytes() == np.asarray(second).tobytes()
        return first.dtype == second.dtype and first.shape == second.shape and weak and bits
    if isinstance(first, eqx.Module):
        return same(dict(sorted(vars(first).items())), dict(sorted(vars(second).items())))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first is second or repr(first) == repr(second)


def refusal(file) -> str:
    """Return the one-line message with which a file is refused."""
    with pytest.raises(StorageError) as caught:
        load_tree(file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def example_span() -> KernelSpan:
    return KernelSpan.build(kernels.Gaussian(0.7), np.random.default_rng(0).normal(size=(12, 2)))


def example_space() -> FeatureSpace:
    rng = np.random.default_rng(0)
    centres = Sample(jnp.asarray(rng.normal(size=(12, 2))), jnp.asarray(rng.normal(size=(12, 1))))
    return FeatureSpace.of_kernels(kernels.Gaussian(0.7), kernels.Matern52(np.array([1.3])), centres)


def example_mixture() -> Mixture:
    rng = np.random.default_rng(1)
    factors = np.tril(rng.normal(size=(3, 2, 2))) + 2.0 * np.eye(2)
    return Mixture.of(np.log([0.2, 0.3, 0.5]), rng.normal(size=(3, 2)), factors)


def example_sampler() -> Sampler:
    network = Network.draw(2, 2, width=8, depth=2, zero_initialised=False, key=jr.key(0))
    return Sampler(example_mixture(), Residual(network), Box(jnp.full(2, -3.0), jnp.full(2, 3.0)))


def example_scaling():
    return Scaling(np.zeros(2), np.ones(2), np.zeros(2), np.ones(2), np.array([0.5, 1.0]), (False, True))


def example_density() -> TiltedDensity:
    space, scaling = example_space(), example_scaling()
    tilt = Tilt(space, np.linspace(-1.0, 1.0, space.size), example_mixture())
    inputs = Inputs(Scaling.plain(np.arange(4.0)[:, None]), np.array([-1.0]), np.array([1.0]))
    nodes = Nodes(np.ones((3, 2)), np.zeros(3), ())
    return TiltedDensity(tilt, example_sampler(), scaling, inputs, None, nodes, None, None)


def example_problem() -> Problem:
    rng = np.random.default_rng(0)
    sample = Sample(rng.normal(size=(12, 2)), rng.normal(size=(12, 1)))
    return Problem(sample, example_mixture(), example_space(), 0.01, example_mixture(), Integration(draws=64))


def example_selection() -> Selection:
    settings = KernelSettings("gaussian", (0, 1), False, np.zeros(0), np.array([0.5, 0.5]), 1.0, 1e-3)
    trial = Trial(settings, -1.25, 0.01)
    return Selection(settings, example_mixture(), trial, [trial, Trial(settings, -1.5, 0.02)])


TREES = {
    "network": lambda: Network.draw(3, "scalar", width=8, depth=2, zero_initialised=False, key=jr.key(1)),
    "zero-initialised network": lambda: Network.draw(
        3, 2, width=8, depth=1, zero_initialised=True, key=jr.key(1)
    ),
    "linear": lambda: eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(2)),
    "relu network": lambda: eqx.nn.MLP(2, 3, 4, 1, key=jr.key(2)),
    "kernel span": example_span,
    "random features": lambda: RandomFeatures(jnp.ones((4, 2))),
    "feature space": example_space,
    "space without a condition": lambda: FeatureSpace(Constant(), RandomFeatures(jnp.ones((4, 2)))),
    "mixture": example_mixture,
    "joint mixture": lambda: JointMixture(example_mixture(), 1),
    "gaussian": lambda: Gaussian(jnp.zeros(2), jnp.eye(2)),
    "scaling": example_scaling,
    "sampler": example_sampler,
    "plain sampler": lambda: Sampler(example_mixture(), Identity(), example_mixture()),
    "free transport": lambda: Free.draw(3, 2, 0, width=4, depth=1, key=jr.key(3)),
    "named tuples": lambda: Run(
        Nodes(np.ones((2, 1)), np.zeros(2), ()), Status.DIVERGED, {"gap": np.arange(4.0)}, {}
    ),
    "grid": lambda: Nodes(np.ones((2, 1)), np.zeros(2), (np.arange(3.0),)),
    "estimate": lambda: Estimate(np.float64(0.1), 0.0, float("inf")),
    "density": example_density,
    "problem": example_problem,
    "selection": example_selection,
}
# Records of settings as they come, and with every kind of value that a user may put into them.
SETTINGS = {
    "search": Search,
    "other search": lambda: Search(folds=3, features=Features(centres=50), penalties=(0.1, 0.01), weight=0.0),
    "features": Features,
    "other features": lambda: Features(rank=20, condition_rank=(5, 9)),
    "integration": Integration,
    "other integration": lambda: Integration(
        cells=(100,), tail_cells=(4,), conditional_cells=(50,), finer=2.0
    ),
    "distillation": Distillation,
    "other distillation": lambda: Distillation(components=4, draws=500),
    "judgement": Judgement,
    "other judgement": lambda: Judgement(draws=100, poor=2.0),
    "convex": Convex,
    "other convex": lambda: Convex(integral="grid", distillation=Distillation(components=4)),
    "saddle": DoublyDual,
    "dde": DDE,
    "other dde": lambda: DDE(
        steps=3, saddle=DoublyDual(width=4), warm_start=True, polish=True, snapshots=True
    ),
}


class Outsider(eqx.Module):
    value: int = 1


class OutsiderTuple(NamedTuple):
    value: int = 1


class TestRoundTrip:
    def test_plain_values(self, file):
        assert same(round_trip(file, PLAIN), PLAIN)

    @pytest.mark.parametrize(
        "tree", [None, 3, "text", 2.5, (), [], {}, Status.CONVERGED, np.arange(3.0)], ids=repr
    )
    def test_a_tree_can_be_a_single_value(self, file, tree):
        assert same(round_trip(file, tree), tree)

    def test_nan(self, file):
        assert np.isnan(round_trip(file, [float("nan")])[0])

    @pytest.mark.parametrize("name", ARRAYS)
    def test_numpy_arrays(self, file, name):
        loaded = round_trip(file, {"array": ARRAYS[name]})["array"]
        assert same(loaded, ARRAYS[name])
        assert loaded.flags.writeable

    @pytest.mark.parametrize("name", ARRAYS)
    def test_jax_arrays_of_any_precision_in_any_mode(self, file, name, x64):
        with jax.enable_x64(True):
            array = jnp.asarray(ARRAYS[name])
        loaded = round_trip(file, [array])[0]
        assert same(loaded, array)
        assert jax.config.jax_enable_x64 == x64

    @pytest.mark.parametrize("value", [0.1, 7, [0.1, 0.2]])
    @pytest.mark.parametrize("made_in_x64", [False, True])
    def test_weak_types(self, file, value, made_in_x64, x64):
        with jax.enable_x64(made_in_x64):
            array = (
                jnp.stack([jnp.asarray(v) for v in value]) if isinstance(value, list) else jnp.asarray(value)
            )
        assert array.weak_type
        loaded = round_trip(file, array)
        assert same(loaded, array)
        assert (jnp.ones(2, jnp.float16) * loaded).dtype == jnp.float16

    @pytest.mark.parametrize(
        "value", [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)], ids=repr
    )
    def test_numpy_scalars(self, file, value):
        assert same(round_trip(file, value), value)

    @pytest.mark.parametrize(
        "view", [np.transpose, lambda a: a[:, ::-1], lambda a: a[::2], lambda a: a.astype(">f8")]
    )
    def test_the_memory_layout_does_not_matter(self, file, view):
        array = view(np.arange(12.0).reshape(3, 4))
        loaded = round_trip(file, array)
        assert loaded.dtype == np.float64
        np.testing.assert_array_equal(loaded, array)

    def test_places_that_share_a_name_keep_their_own_arrays(self, file):
        tree = {
            "a.b": np.zeros(1),
            "a": {"b": np.ones(1), "b'": np.full(1, 2.0)},
            "__metadata__": np.full(1, 3.0),
        }
        assert same(round_trip(file, tree), tree)

    @pytest.mark.parametrize("name", TREES)
    def test_library_objects(self, file, name, x64):
        tree = TREES[name]()
        loaded = round_trip(file, tree)
        assert same(loaded, tree)
        assert jax.tree.structure(loaded) == jax.tree.structure(tree)

    @pytest.mark.parametrize("name", SETTINGS)
    def test_records_of_settings(self, file, name):
        record = SETTINGS[name]()
        loaded = round_trip(file, record)
        assert same(loaded, record)
        assert eqx.tree_equal(loaded, record)
        assert jax.tree.structure(loaded) == jax.tree.structure(record)

    @pytest.mark.parametrize("name", ["mixture", "scaling", "density", "problem", "selection"])
    def test_numpy_arrays_in_modules_come_back_as_numpy(self, file, name, x64):
        on_host = lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf
        tree = jax.tree.map(on_host, TREES[name]())
        loaded = round_trip(file, tree)
        assert same(loaded, tree)
        arrays = [leaf for leaf in jax.tree.leaves(loaded) if eqx.is_array(leaf)]
        assert arrays
        assert all(type(leaf) is np.ndarray for leaf in arrays)
        with safe_open(file, framework="np") as content:
            structure = content.metadata()["structure"]
        assert '"$numpy"' in structure
        assert '"$jax"' not in structure

    @pytest.mark.parametrize(
        "make", [lambda: jnp.arange(3.0), lambda: jnp.asarray(0.1), lambda: np.arange(3.0)]
    )
    def test_an_array_in_two_places_is_stored_once(self, file, make):
        array, twin = make(), make()
        loaded = round_trip(file, {"a": array, "b": [array], "c": twin})
        assert loaded["a"] is loaded["b"][0]
        assert loaded["a"] is not loaded["c"]
        with safe_open(file, framework="np") as content:
            assert set(content.keys()) == {"tree.a", "tree.c"}

    def test_kind_and_metadata(self, file):
        metadata = {"note": "two moons", "score": float("-inf"), "shape": (3, 2), "units": np.arange(2.0)}
        save_tree(str(file), "density", None, metadata)
        kind, tree, loaded = load_tree(str(file))
        assert (kind, tree) == ("density", None)
        assert same(loaded, metadata)


class TestOutputsAreBitIdentical:
    points, condition = (
        np.random.default_rng(5).normal(size=(7, 2)),
        np.random.default_rng(6).normal(size=(7, 1)),
    )

    def test_network(self, file, x64):
        network = TREES["network"]()
        points, condition = jnp.asarray(self.points), jnp.asarray(self.condition)
        assert same(round_trip(file, network)(points, condition), network(points, condition))

    def test_kernel_span(self, file, x64):
        span = example_span()
        loaded = round_trip(file, span)
        assert same(loaded.matrix(self.points), span.matrix(self.points))
        assert loaded.size == span.size

    def test_tilt(self, file, x64):
        tilt = example_density().tilt
        loaded = round_trip(file, tilt)
        assert same(loaded.values(self.points, self.condition), tilt.values(self.points, self.condition))
        assert loaded.space.size == tilt.space.size

    def test_mixture(self, file, x64):
        mixture = example_mixture()
        loaded = round_trip(file, mixture)
        assert same(loaded.draws(20, key=jr.key(5)), mixture.draws(20, key=jr.key(5)))
        assert same(loaded.log_densities(np.ones((4, 2))), mixture.log_densities(np.ones((4, 2))))

    def test_sampler(self, file, x64):
        sampler = example_sampler()
        assert same(round_trip(file, sampler).draws(20, key=jr.key(5)), sampler.draws(20, key=jr.key(5)))

    def test_density(self, file, x64):
        density = example_density()
        loaded = round_trip(file, density)
        assert same(
            loaded.log_density(self.points, self.condition), density.log_density(self.points, self.condition)
        )

    def test_a_float64_fit_serves_a_session_in_single_precision(self, file):
        with jax.enable_x64(True):
            mixture = example_mixture()
            expected = mixture.log_densities(np.ones((4, 2)))
            save_tree(file, "test", mixture, {})
        with jax.enable_x64(False):
            loaded = load_tree(file)[1]
        with jax.enable_x64(True):
            assert same(loaded.log_densities(np.ones((4, 2))), expected)


class TestFile:
    def test_the_header_can_be_read_without_kexpfam(self, file):
        save_tree(file, "sampler", example_sampler(), {"rows": 100})
        with safe_open(file, framework="np") as content:
            header, names = content.metadata(), set(content.keys())
            weight = content.get_tensor("tree.transport.network.layers.0.weight")
        assert {key: header[key] for key in ("format", "version", "kind")} == {
            "format": "kexpfam",
            "version": str(storage.FORMAT),
            "kind": "sampler",
        }
        assert header["kexpfam"] == kexpfam.__version__
        assert json.loads(header["metadata"]) == {"rows": 100}
        structure = json.loads(header["structure"])
        assert structure["$class"] == "kexpfam.model.density:Sampler"
        assert structure["transport"]["network"]["$class"] == "kexpfam.model.networks:Network"
        assert structure["transport"]["network"]["activation"] == {"$function": "silu"}
        assert structure["reference"]["means"] == {"$numpy": "tree.reference.means"}
        assert "tree.reference.means" in names
        assert weight.shape == (2, 8)

    def test_equal_trees_make_equal_files(self, tmp_path):
        paths = [tmp_path / str(number) for number in range(4)]
        for path in paths:
            save_tree(path, "sampler", example_sampler(), {"rows": 100})
        assert len({path.read_bytes() for path in paths}) == 1

    def test_a_file_is_as_readable_to_others_as_any_new_file(self, file, tmp_path):
        save_tree(file, "test", {}, {})
        (tmp_path / "plain").touch()
        assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_a_failing_write_leaves_the_old_file(self, file, monkeypatch, step, error):
        def fail(*_):
            raise error

        save_tree(file, "old", {"x": np.arange(3.0)}, {})
        before = file.read_bytes()
        monkeypatch.setattr(storage.os, step, fail)
        with pytest.raises(type(error)):
            save_tree(file, "new", {"x": np.zeros(3)}, {})
        assert file.read_bytes() == before
        assert os.listdir(file.parent) == [file.name]

    def test_what_cannot_be_stored_leaves_the_old_file(self, file):
        save_tree(file, "old", {}, {})
        with pytest.raises(TypeError):
            save_tree(file, "new", {"x": object()}, {})
        assert load_tree(file)[0] == "old"
        assert os.listdir(file.parent) == [file.name]

    def test_a_newer_file_replaces_an_older_one(self, file):
        save_tree(file, "old", {}, {})
        save_tree(file, "new", {}, {})
        assert load_tree(file)[0] == "new"


class TestUnstorableValuesAreNamed:
    @pytest.mark.parametrize(
        "value",
        [
            object(),
            {1, 2},
            b"bytes",
            1j,
            np.array(["text"]),
            np.array([None]),
            np.array([1j]),
            np.ma.masked_array([1.0], [True]),
            collections.OrderedDict(a=1),
            Outsider(),
            OutsiderTuple(),
            collections.namedtuple("Local", "a")(1),
            slice(None),
            Sample,
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_foreign_values(self, file, value):
        with pytest.raises(TypeError, match=r"^tree\.outer\.0: cannot store"):
            save_tree(file, "test", {"outer": [value]}, {})
        assert not file.exists()

    @pytest.mark.parametrize(
        "make", [lambda: jr.key(0), lambda: jnp.ones(2, jnp.bfloat16)], ids=["key", "bfloat16"]
    )
    def test_jax_arrays_without_a_stored_form(self, file, make):
        with pytest.raises(TypeError, match=r"^tree\.x: cannot store an array of"):
            save_tree(file, "test", {"x": make()}, {})

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x,
            jax.nn.celu,
            jax.grad(jax.nn.silu),
            jax.jit(jax.nn.silu),
            np.tanh,
            print,
            eqx.filter_jit(jnp.sin),
        ],
    )
    def test_functions_that_are_not_registered(self, file, function):
        network = Network(TREES["network"]().layers, function, scalar=True)
        with pytest.raises(TypeError, match=r"^tree\.activation: cannot store"):
            save_tree(file, "test", network, {})

    def test_keys_that_are_neither_strings_nor_integers(self, file):
        with pytest.raises(TypeError, match=r"^tree\.a: cannot store the key 1.5"):
            save_tree(file, "test", {"a": {1.5: 2}}, {})

    def test_integer_keys_are_kept(self, file):
        tree = {"a": {1: "x", "1": {0: np.arange(3)}}}
        save_tree(file, "test", tree, {})
        _, found, _ = load_tree(file)
        assert list(found["a"]) == [1, "1"] and found["a"][1] == "x"
        np.testing.assert_array_equal(found["a"]["1"][0], np.arange(3))

    def test_metadata(self, file):
        with pytest.raises(TypeError, match=r"^metadata\.when: cannot store"):
            save_tree(file, "test", {}, {"when": object()})

    @pytest.mark.parametrize("name", storage.FUNCTIONS)
    def test_every_registered_function_comes_back(self, file, name):
        assert round_trip(file, storage.FUNCTIONS[name]) is storage.FUNCTIONS[name]


class TestRefusals:
    def test_missing_file(self, tmp_path):
        assert "check the path" in refusal(tmp_path / "absent")

    def test_folder_instead_of_file(self, tmp_path):
        assert "check the path" in refusal(tmp_path)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(StorageError, match="create it first"):
            save_tree(tmp_path / "absent" / "file", "test", {}, {})

    def test_every_truncation(self, file):
        save_tree(file, "test", {"x": np.arange(3.0), "y": np.array([True])}, {})
        content = file.read_bytes()
        for length in range(len(content)):
            file.write_bytes(content[:length])
            assert "cut short" in refusal(file), length

    def test_a_tail_that_does_not_belong(self, file):
        save_tree(file, "test", {"x": np.arange(3.0)}, {})
        file.write_bytes(file.read_bytes() + b"more")
        assert "damaged" in refusal(file)

    @pytest.mark.parametrize(
        "content", [b"PK\x03\x04" * 20, b"text, as it happens", bytes(range(256)), b"\0" * 100]
    )
    def test_arbitrary_bytes(self, file, content):
        file.write_bytes(content)
        assert "not a kexpfam file" in refusal(file)

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
    def test_foreign_safetensors(self, file, metadata):
        safetensors.numpy.save_file({"weight": np.ones(3)}, file, metadata=metadata)
        assert "not one of kexpfam" in refusal(file)

    def test_newer_format(self, file):
        save_tree(file, "test", {}, {})
        newer = storage.FORMAT + 1
        rewrite(file, version=str(newer), structure="not known yet", kexpfam="9.9")
        assert f"has format {newer}, of kexpfam 9.9, which is newer; upgrade kexpfam" in refusal(file)

    def test_older_format(self, file):
        save_tree(file, "test", {}, {})
        rewrite(file, version="1", structure="not known any more", kexpfam="0.0")
        message = refusal(file)
        assert (
            "has format 1, of kexpfam 0.0; load the file with the version that wrote it, or fit the model"
            in message
        )
        assert "newer" not in message

    @pytest.mark.parametrize("version", [None, "", "two", "-1", "1.5", "\u00b2"])
    def test_no_format_at_all(self, file, version):
        save_tree(file, "test", {}, {})
        rewrite(file, version=version)
        message = refusal(file)
        assert "has no valid format number" in message
        assert "newer" not in message

    @pytest.mark.parametrize(
        "structure",
        [
            None,
            "",
            "{",
            '{"$unknown":1}',
            '{"$tuple":1}',
            '{"$jax":"absent"}',
            '{"$jax":["x"]}',
            '{"$class":1}',
            '{"$class":[]}',
            '{"$function":"system"}',
            '{"$float":"text"}',
            '{"$enum":"kexpfam.fit.problem:Status","member":"ABSENT"}',
            '{"$class":"kexpfam.model.kernels:AbstractKernel"}',
            "[" * 100_000,
        ],
        ids=lambda structure: str(structure)[:20],
    )
    def test_damaged_structure(self, file, structure):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=structure)
        assert "damaged" in refusal(file)

    @pytest.mark.parametrize("tag", ["$class", "$enum"])
    @pytest.mark.parametrize(
        "name",
        [
            "os:system",
            "subprocess:Popen",
            "builtins:eval",
            "kexpfamily:Sample",
            "kexpfam_extra:Sample",
            ".kexpfam:Sample",
            "kexpfam.__main__:main",
            "kexpfam.data.sample\n:Sample",
            "equinox.nn:Dropout",
            "equinox.nn._mlp:MLP",
            "kexpfam.storage:save_tree",
            "kexpfam.storage:StorageError",
            "kexpfam.storage:os.system",
            "kexpfam.storage:Path",
            "kexpfam.model.networks:eqx.nn.MLP",
            "kexpfam.model.kernels:KERNELS",
            "kexpfam.data.sample:Sample.rows",
            "Sample",
            "",
        ],
    )
    def test_classes_that_no_file_may_name(self, file, tag, name):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({tag: name, "args": ["true"], "member": "A"}))
        assert "is not a class that this kexpfam can restore" in refusal(file)

    def test_an_enumeration_is_no_record_and_the_other_way_round(self, file):
        save_tree(file, "test", {}, {})
        rewrite(file, structure='{"$class":"kexpfam.fit.problem:Status"}')
        assert "is not a class that" in refusal(file)
        rewrite(file, structure='{"$enum":"kexpfam.data.sample:Sample","member":"target"}')
        assert "is not a class that" in refusal(file)

    def test_refusing_a_class_does_not_import_its_module(self, file):
        save_tree(file, "test", {}, {})
        rewrite(file, structure='{"$class":"this:Zen"}')
        refusal(file)
        assert "this" not in sys.modules

    @pytest.mark.parametrize(
        "name", ["kexpfam.absent:Absent", "kexpfam.data.sample:Absent", "kexpfam.data.sample:"]
    )
    def test_classes_of_another_version(self, file, name):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({"$class": name}), kexpfam="9.9")
        message = refusal(file)
        assert "written by kexpfam 9.9" in message
        assert "this kexpfam can restore; load the file with the version that wrote it" in message

    @pytest.mark.parametrize("fields", [{"target": 1}, {"target": 1, "condition": 2, "weights": 3}])
    def test_fields_that_are_required_or_unknown(self, file, fields):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({"$class": "kexpfam.data.sample:Sample"} | fields))
        missing = "needs a field 'condition' that the file lacks"
        assert (missing if len(fields) == 1 else "has no field weights in this kexpfam") in refusal(file)

    def test_a_file_that_may_not_be_read(self, file, monkeypatch):
        save_tree(file, "test", {}, {})
        monkeypatch.setattr(
            storage, "safe_open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied"))
        )
        assert "cannot be read: denied" in refusal(file)


class TestFilesOfOlderVersions:
    """Classes change: fields are added, renamed and removed, classes are moved and renamed."""

    def test_a_field_that_is_not_in_the_file_takes_its_default(self, file):
        save_tree(file, "test", {}, {})
        record = {"$class": "kexpfam.fit.select:Search", "folds": 3}
        rewrite(file, structure=json.dumps(record))
        assert same(load_tree(file)[1], Search(folds=3))

    def test_defaults_pass_through_the_converter_of_the_field(self, file):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({"$class": "kexpfam.fit.saddle:DoublyDual"}))
        assert same(load_tree(file)[1], DoublyDual())

    def test_a_named_tuple_takes_its_defaults(self, file):
        full = Solution(None, None, Status.CONVERGED, {}, {})
        save_tree(file, "test", full, {})
        with safe_open(file, framework="np") as content:
            structure = json.loads(content.metadata()["structure"])
        del structure["snapshots"]
        rewrite(file, structure=json.dumps(structure))
        assert same(load_tree(file)[1], full)

    @pytest.mark.parametrize("module", ["kexpfam.fit.absent", "kexpfam.storage", "kexpfam.fit"])
    def test_a_class_that_has_moved_is_found_by_its_name(self, file, module):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({"$class": f"{module}:Distillation", "components": 4}))
        assert same(load_tree(file)[1], Distillation(components=4))

    def test_a_class_and_its_fields_can_be_renamed(self, file, monkeypatch):
        names = {"Exploration": "Search", "Search.parts": "folds", "Search.removed": None}
        monkeypatch.setattr(storage, "RENAMED", names)
        save_tree(file, "test", {}, {})
        record = {"$class": "kexpfam.fit.explore:Exploration", "parts": 3, "removed": 1}
        rewrite(file, structure=json.dumps(record))
        assert same(load_tree(file)[1], Search(folds=3))

    def test_a_moved_class_whose_name_is_not_unique_is_in_the_table(self, file, monkeypatch):
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({"$class": "kexpfam.absent:Gaussian", "mean": 1, "cholesky": 2}))
        assert "is not a class that this kexpfam can restore" in refusal(file)
        moved = {"kexpfam.absent:Gaussian": "kexpfam.model.measures:Gaussian"}
        monkeypatch.setattr(storage, "RENAMED", moved)
        assert type(load_tree(file)[1]) is Gaussian

    def test_a_name_with_two_definitions_is_refused(self, file, monkeypatch):
        monkeypatch.setattr(
            storage, "_modules_defining", lambda name: ["kexpfam.fit.select", "kexpfam.fit.distil"]
        )
        save_tree(file, "test", {}, {})
        rewrite(file, structure=json.dumps({"$class": "kexpfam.absent:Search"}))
        assert "is not a class that this kexpfam can restore" in refusal(file)

    def test_an_estimator_and_its_parameters_can_be_renamed(self, file, monkeypatch):
        model = KernelDensity().fit(np.random.default_rng(0).normal(size=(20, 1)))
        model.save(file)
        with safe_open(file, framework="np") as content:
            structure = json.loads(content.metadata()["structure"])
        structure["params"]["former"] = 1
        del structure["weight"]
        rewrite(file, kind="ParzenWindow", structure=json.dumps(structure))
        with pytest.raises(StorageError, match="contains a 'ParzenWindow', which is not an estimator"):
            kexpfam.load(file)
        monkeypatch.setattr(storage, "RENAMED", {"ParzenWindow": "KernelDensity"})
        with pytest.raises(StorageError, match="KernelDensity has no field former"):
            kexpfam.load(file)
        monkeypatch.setitem(storage.RENAMED, "KernelDensity.former", None)
        rows = np.linspace(-2, 2, 5)[:, None]
        np.testing.assert_array_equal(kexpfam.load(file).score_samples(rows), model.score_samples(rows))

    @pytest.mark.parametrize("damage", [{"density": None}, {"params": 3}, {"params": {"bandwidth": 3}}, None])
    def test_a_file_without_a_fitted_model(self, file, damage):
        save_tree(file, "KernelDensity", damage, {})
        with pytest.raises(StorageError):
            kexpfam.load(file)


class TestMutations:
    """A damaged file raises StorageError or loads to the same object."""

    def saved(self, file):
        trees = {
            "density": example_density(),
            "settings": Search(),
            "plain": PLAIN,
            "selection": example_selection(),
        }
        save_tree(file, "test", trees, {"rows": 3, "layout": (1, None)})
        return file.read_bytes(), load_tree(file)

    def check(self, file, seeds):
        content, expected = self.saved(file)
        refused = 0
        for seed in seeds:
            damaged = mutated(content, np.random.default_rng(seed))
            file.write_bytes(damaged)
            try:
                loaded = load_tree(file)
            except StorageError:
                refused += 1
                continue
            assert same(loaded, expected), seed
        assert refused > 0.8 * len(seeds)

    def test_mutations_of_the_file(self, file):
        self.check(file, range(3_000))

    @pytest.mark.slow
    def test_many_mutations_of_the_file(self, file):
        self.check(file, range(100_000, 250_000))

    def test_mutations_with_a_matching_checksum_raise_nothing_else(self, file):
        content, _ = self.saved(file)
        refused = 0
        for seed in range(500):
            file.write_bytes(content)
            forge(file, np.random.default_rng(seed))
            try:
                load_tree(file)
            except StorageError:
                refused += 1
        assert refused > 50

    def test_every_bit_of_a_small_file_matters(self, file):
        save_tree(file, "test", {"x": np.arange(2.0)}, {})
        content, expected = file.read_bytes(), load_tree(file)
        for position in range(8 * len(content)):
            damaged = bytearray(content)
            damaged[position // 8] ^= 1 << position % 8
            file.write_bytes(damaged)
            try:
                assert same(load_tree(file), expected), position
            except StorageError:
                continue
            assert content[position // 8 :][:1].isspace(), position

    def test_memory_is_bounded_by_the_size_of_the_file(self, file):
        save_tree(file, "test", {"x": np.arange(2.0)}, {})
        content = file.read_bytes()
        for shape, end in ([2**31], 2**34), ([2**20, 2**20], 2**43), ([2**62], 2**65 - 8):
            length = int.from_bytes(content[:8], "little")
            entries = json.loads(content[8 : 8 + length])
            entries["tree.x"] |= {"shape": shape, "data_offsets": [0, end]}
            text = json.dumps(entries).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            tracemalloc.start()
            refusal(file)
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
            tracemalloc.stop()


class OwnSolver(Solver):
    """A solver that is not the library's."""

    steps: int
    rule: Callable = min

    def solve(self, problem, *, key, report=None, checkpoint=None):
        return Convex().solve(problem, key=key)


class OtherSolver(OwnSolver):
    """Another one with the same settings."""


class TestCheckpoint:
    """A checkpoint resumes the run that wrote it, and no other."""

    task = staticmethod(lambda: (example_problem(), DDE(steps=3)))
    state = {"name": "kept as it is", "step": jnp.asarray(2), "weights": jnp.arange(3.0)}

    def test_without_a_file_the_template_is_the_state(self, file):
        assert Checkpoint(file, self.task()).read(self.state) == (self.state, {})

    def test_the_state_comes_back_to_the_same_task(self, file):
        Checkpoint(file, self.task()).write(self.state)
        template = {"name": "kept as it is", "step": jnp.asarray(0), "weights": jnp.zeros(3)}
        assert same(Checkpoint(file, self.task()).read(template)[0], self.state)

    def test_equal_records_are_one_task(self, file):
        Checkpoint(file, self.task()).write(self.state)
        copied = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, self.task())
        assert same(Checkpoint(file, copied).read(self.state)[0], self.state)

    OTHERS = {
        "row": lambda problem, solver: (
            eqx.tree_at(lambda p: p.sample.target, problem, problem.sample.target + 1.0),
            solver,
        ),
        "condition": lambda problem, solver: (
            eqx.tree_at(lambda p: p.sample.condition, problem, problem.sample.condition[::-1].copy()),
            solver,
        ),
        "penalty": lambda problem, solver: (eqx.tree_at(lambda p: p.rkhs_penalty, problem, 0.1), solver),
        "space": lambda problem, solver: (problem.within(FeatureSpace(Constant(), example_span())), solver),
        "integration": lambda problem, solver: (
            eqx.tree_at(lambda p: p.integration.draws, problem, 65),
            solver,
        ),
        "shape": lambda problem, solver: (
            eqx.tree_at(lambda p: p.sample.target, problem, problem.sample.target.reshape(2, 12)),
            solver,
        ),
        "solver's setting": lambda problem, solver: (problem, DDE(steps=4)),
        "solver's flag": lambda problem, solver: (problem, DDE(steps=3, polish=True)),
        "solver's part": lambda problem, solver: (problem, DDE(steps=3, saddle=DoublyDual(f_rate=0.5))),
        "solver": lambda problem, solver: (problem, Convex()),
    }

    @pytest.mark.parametrize("name", OTHERS)
    def test_another_task_is_refused(self, file, name):
        Checkpoint(file, self.task()).write(self.state)
        with pytest.raises(
            StorageError, match="belongs to a fit of other data, settings or solver; remove it"
        ):
            Checkpoint(file, self.OTHERS[name](*self.task())).read(self.state)

    def test_a_state_of_another_shape_is_refused(self, file):
        Checkpoint(file, self.task()).write(self.state)
        with pytest.raises(StorageError, match="belongs to a fit of other"):
            Checkpoint(file, self.task()).read(self.state | {"weights": jnp.zeros(4)})

    def test_classes_and_functions_of_the_users_own_are_part_of_a_task(self, file):
        Checkpoint(file, (example_problem(), OwnSolver(3))).write(self.state)
        assert same(Checkpoint(file, (example_problem(), OwnSolver(3))).read(self.state)[0], self.state)
        for other in (OwnSolver(4), OwnSolver(3, rule=max), OtherSolver(3)):
            with pytest.raises(StorageError, match="belongs to a fit of other data, settings or solver"):
                Checkpoint(file, (example_problem(), other)).read(self.state)

    def test_a_function_without_a_name_of_its_own_is_refused(self, file):
        with pytest.raises(TypeError, match=r"task.1.rule: cannot store the function"):
            Checkpoint(file, (example_problem(), OwnSolver(3, rule=lambda values: values[0])))

    def test_a_full_disk_keeps_the_old_state_and_does_not_end_the_run(self, file):
        checkpoint = Checkpoint(file, self.task())
        checkpoint.write(self.state)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # the system refuses more bytes
        try:
            with pytest.warns(CheckpointWarning, match=rf"{file} is not written: File too large\."):
                checkpoint.write(self.state | {"weights": jnp.ones(3)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert same(checkpoint.read(self.state)[0], self.state)

    def test_a_model_is_no_checkpoint(self, file):
        save_tree(file, "KernelExpFamily", [], {})
        with pytest.raises(StorageError, match="belongs to a fit of other"):
            Checkpoint(file, self.task()).read(self.state)


@pytest.mark.slow
class TestCheckpointOfAFit:
    rows = np.random.default_rng(0).normal(size=(40, 2))
    saddle = DoublyDual(
        width=4, transport_depth=1, nu_depth=1, batch_size=16, transport_updates=1, nu_updates=1
    )

    def fitted(self, file, rows=None, *, steps=30, progress=False, saddle=None, **changes):
        kernel = Kernel(**{"lengthscale": 1.0, "rkhs_penalty": 0.01, "n_centres": 10} | changes)
        options = {"model": "kernel", "kernel": kernel, "checkpoint": file, "random_state": 0}
        solver = DDE(steps=steps, saddle=saddle or self.saddle)
        model = KernelExpFamily(solver=solver, progress=progress, **options)
        return model.fit(self.rows if rows is None else rows)

    def test_a_solver_of_the_users_own_has_one_too(self, file):
        settings = {
            "model": "kernel",
            "kernel": Kernel(lengthscale=1.0, rkhs_penalty=0.01, n_centres=10),
            "random_state": 0,
        }
        model = KernelExpFamily(solver=OwnSolver(3), checkpoint=file, **settings).fit(self.rows)
        assert model.solution_.status is Status.CONVERGED

    def test_it_resumes_where_it_stopped_and_belongs_to_no_other_fit(self, file):
        def stop(report):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.fitted(file, progress=stop)
        for name, other in {
            "another row": {"rows": np.vstack([self.rows[1:], [[0.5, 0.5]]])},
            "another penalty": {"rkhs_penalty": 0.02},
            "another length scale": {"lengthscale": 2.0},
            "another number of steps": {"steps": 31},
            "another rate": {"saddle": eqx.tree_at(lambda s: s.f_rate, self.saddle, 0.25)},
        }.items():
            with pytest.raises(StorageError, match="belongs to a fit of other data, settings or solver"):
                self.fitted(file, **other)
                pytest.fail(name)
        seen = []
        resumed = self.fitted(file, progress=seen.append)
        assert [report.step for report in seen] == [30]
        whole = self.fitted(file.with_name("fresh"))
        np.testing.assert_allclose(
            resumed.score_samples(self.rows), whole.score_samples(self.rows), rtol=1e-6
        )
        assert len(resumed.solution_.trace["value"]) == len(whole.solution_.trace["value"])


def test_a_resumed_chain_is_stored_as_an_uninterrupted_one(tmp_path):
    rows = np.random.default_rng(0).normal(size=(150, 3))
    options = {"model": "chain", "effort": "fast", "random_state": 0}
    whole = KernelExpFamily(**options).fit(rows)
    whole.save(tmp_path / "whole")
    reports = int(whole.fits_["chain"].trace["held_out"].size) // 5
    for stop in (1, reports - 1):
        seen = []

        def interrupt(report, seen=seen, stop=stop):
            seen.append(report)
            if len(seen) == stop:
                raise KeyboardInterrupt

        file = tmp_path / f"state{stop}"
        with pytest.raises(KeyboardInterrupt):
            KernelExpFamily(**options, progress=interrupt, checkpoint=file).fit(rows)
        resumed = KernelExpFamily(**options, checkpoint=file).fit(rows).set_params(checkpoint=None)
        resumed.save(tmp_path / "resumed")
        assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.slow
def test_a_fresh_process_restores_what_this_one_saved(file):
    save_tree(file, "test", example_sampler(), {})
    program = """if True:
        import sys
        from kexpfam.storage import load_tree
        print(type(load_tree(sys.argv[1])[1].transport).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "Residual"
