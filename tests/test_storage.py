import collections
import json
import os
import subprocess
import sys
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
from kexpfam import kernels, storage
from kexpfam.density import Density
from kexpfam.measures import Box, Gaussian, JointMixture, Mixture
from kexpfam.nodes import Nodes
from kexpfam.partition import Estimate
from kexpfam.potentials import Constant, FeatureSpace, KernelSpan, Network, RandomFeatures, Tilt
from kexpfam.sample import Sample, Scaling
from kexpfam.solvers.doubly_dual import DoublyDual
from kexpfam.solvers.loop import Run, Status
from kexpfam.storage import StorageError, load_tree, save_tree
from kexpfam.transports import Free, Identity, Residual, Sampler

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


def rewritten(file, **changes):
    """Change entries of the header, as somebody else's program might."""
    with safe_open(file, framework="np") as content:
        header = content.metadata()
        names = content.keys()
        tensors = {name: content.get_tensor(name) for name in names}
    header = {key: value for key, value in (header | changes).items() if value is not None}
    safetensors.numpy.save_file(tensors, file, metadata=header)


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
    network = Network.draw(2, 2, width=8, depth=2, silent=False, key=jr.key(0))
    return Sampler(example_mixture(), Residual(network), Box(jnp.full(2, -3.0), jnp.full(2, 3.0)))


def example_scaling():
    return Scaling(jnp.zeros(2), jnp.ones(2), jnp.zeros(2), jnp.ones(2), jnp.array([0.5, 1.0]), (False, True))


def example_density() -> Density:
    space = example_space()
    tilt = Tilt(space, jnp.linspace(-1.0, 1.0, space.size), example_mixture())
    return Density(tilt, example_sampler(), example_scaling(), Estimate(np.float64(0.1), 0.0, float("inf")), None)


TREES = {
    "network": lambda: Network.draw(3, "scalar", width=8, depth=2, silent=False, key=jr.key(1)),
    "silent network": lambda: Network.draw(3, 2, width=8, depth=1, silent=True, key=jr.key(1)),
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
    "settings": DoublyDual,
    "named tuples": lambda: Run(Nodes(np.ones((2, 1)), np.zeros(2), None), Status.DIVERGED, {"gap": np.arange(4.0)}, {}),
    "density": example_density,
}


class Outsider(eqx.Module):
    value: int = 1


class OutsiderTuple(NamedTuple):
    value: int = 1


class TestRoundTrip:
    def test_plain_values(self, file):
        assert same(round_trip(file, PLAIN), PLAIN)

    @pytest.mark.parametrize("tree", [None, 3, "text", 2.5, (), [], {}, Status.CONVERGED, np.arange(3.0)], ids=repr)
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
            array = jnp.stack([jnp.asarray(v) for v in value]) if isinstance(value, list) else jnp.asarray(value)
        assert array.weak_type
        loaded = round_trip(file, array)
        assert same(loaded, array)
        assert (jnp.ones(2, jnp.float16) * loaded).dtype == jnp.float16

    @pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)], ids=repr)
    def test_numpy_scalars(self, file, value):
        assert same(round_trip(file, value), value)

    @pytest.mark.parametrize("view", [np.transpose, lambda a: a[:, ::-1], lambda a: a[::2], lambda a: a.astype(">f8")])
    def test_the_memory_layout_does_not_matter(self, file, view):
        array = view(np.arange(12.0).reshape(3, 4))
        loaded = round_trip(file, array)
        assert loaded.dtype == np.float64
        np.testing.assert_array_equal(loaded, array)

    def test_places_that_share_a_name_keep_their_own_arrays(self, file):
        tree = {"a.b": np.zeros(1), "a": {"b": np.ones(1), "b'": np.full(1, 2.0)}, "__metadata__": np.full(1, 3.0)}
        assert same(round_trip(file, tree), tree)

    @pytest.mark.parametrize("name", TREES)
    def test_library_objects(self, file, name, x64):
        tree = TREES[name]()
        loaded = round_trip(file, tree)
        assert same(loaded, tree)
        assert jax.tree.structure(loaded) == jax.tree.structure(tree)

    @pytest.mark.parametrize("make", [lambda: jnp.arange(3.0), lambda: jnp.asarray(0.1), lambda: np.arange(3.0)])
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
    def test_network(self, file, x64):
        network = TREES["network"]()
        points, condition = jr.normal(jr.key(5), (7, 2)), jr.normal(jr.key(6), (7, 1))
        assert same(round_trip(file, network)(points, condition), network(points, condition))

    def test_kernel_span(self, file, x64):
        span, points = example_span(), jr.normal(jr.key(5), (7, 2))
        loaded = round_trip(file, span)
        assert same(loaded.features(points), span.features(points))
        assert loaded.size == span.size

    def test_feature_space(self, file, x64):
        space = example_space()
        points, condition = jr.normal(jr.key(5), (7, 2)), jr.normal(jr.key(6), (7, 1))
        loaded = round_trip(file, space)
        assert same(loaded.features(points, condition), space.features(points, condition))
        assert loaded.size == space.size

    def test_mixture(self, file, x64):
        mixture = example_mixture()
        loaded = round_trip(file, mixture)
        assert same(loaded.draws(20, key=jr.key(5)), mixture.draws(20, key=jr.key(5)))
        assert same(loaded.log_densities(np.ones((4, 2))), mixture.log_densities(np.ones((4, 2))))

    def test_sampler(self, file, x64):
        sampler, empty = example_sampler(), jnp.zeros((20, 0))
        assert same(round_trip(file, sampler).draw(empty, key=jr.key(5)), sampler.draw(empty, key=jr.key(5)))

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
            "version": "1",
            "kind": "sampler",
        }
        assert header["kexpfam"] == kexpfam.__version__
        assert json.loads(header["metadata"]) == {"rows": 100}
        structure = json.loads(header["structure"])
        assert structure["$class"] == "kexpfam.transports:Sampler"
        assert structure["transport"]["network"]["$class"] == "kexpfam.potentials:Network"
        assert structure["transport"]["network"]["activation"] == {"$function": "silu"}
        assert structure["reference"]["means"] == {"$jax": "tree.reference.means"}
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

    @pytest.mark.parametrize("make", [lambda: jr.key(0), lambda: jnp.ones(2, jnp.bfloat16)], ids=["key", "bfloat16"])
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

    def test_keys_that_are_not_strings(self, file):
        with pytest.raises(TypeError, match=r"^tree\.a: cannot store the key 1"):
            save_tree(file, "test", {"a": {1: 2}}, {})

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

    @pytest.mark.parametrize("content", [b"PK\x03\x04" * 20, b"text, as it happens", bytes(range(256)), b"\0" * 100])
    def test_arbitrary_bytes(self, file, content):
        file.write_bytes(content)
        assert "not a kexpfam file" in refusal(file)

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
    def test_foreign_safetensors(self, file, metadata):
        safetensors.numpy.save_file({"weight": np.ones(3)}, file, metadata=metadata)
        assert "not one of kexpfam" in refusal(file)

    def test_newer_format(self, file):
        save_tree(file, "test", {}, {})
        rewritten(file, version="2", structure="of a kind yet unknown")
        assert "written by a newer kexpfam (format 2); upgrade kexpfam" in refusal(file)

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
            '{"$enum":"kexpfam.solvers.loop:Status","member":"ABSENT"}',
            '{"$class":"kexpfam.kernels:AbstractKernel"}',
            "[" * 100_000,
        ],
        ids=lambda structure: str(structure)[:20],
    )
    def test_damaged_structure(self, file, structure):
        save_tree(file, "test", {}, {})
        rewritten(file, structure=structure)
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
            "kexpfam.sample\n:Sample",
            "equinox.nn:Dropout",
            "equinox.nn._mlp:MLP",
            "kexpfam.storage:save_tree",
            "kexpfam.storage:StorageError",
            "kexpfam.storage:os.system",
            "kexpfam.storage:Path",
            "kexpfam.potentials:Sample",
            "kexpfam.potentials:eqx.nn.MLP",
            "kexpfam.kernels:KERNELS",
            "kexpfam.sample:Sample.rows",
            "Sample",
            "",
        ],
    )
    def test_classes_that_no_file_may_name(self, file, tag, name):
        save_tree(file, "test", {}, {})
        rewritten(file, structure=json.dumps({tag: name, "args": ["true"], "member": "A"}))
        assert "may hold; load only files that you trust" in refusal(file)

    def test_an_enumeration_is_no_record_and_the_other_way_round(self, file):
        save_tree(file, "test", {}, {})
        rewritten(file, structure='{"$class":"kexpfam.solvers.loop:Status"}')
        assert "may hold" in refusal(file)
        rewritten(file, structure='{"$enum":"kexpfam.sample:Sample","member":"target"}')
        assert "may hold" in refusal(file)

    def test_refusing_a_class_does_not_import_its_module(self, file):
        save_tree(file, "test", {}, {})
        rewritten(file, structure='{"$class":"this:Zen"}')
        refusal(file)
        assert "this" not in sys.modules

    @pytest.mark.parametrize("name", ["kexpfam.absent:Sample", "kexpfam.sample:Absent", "kexpfam.sample:"])
    def test_classes_of_another_version(self, file, name):
        save_tree(file, "test", {}, {})
        rewritten(file, structure=json.dumps({"$class": name}), kexpfam="9.9")
        message = refusal(file)
        assert "written by kexpfam 9.9" in message
        assert "is not in this kexpfam; load the file with the version that wrote it" in message

    @pytest.mark.parametrize("fields", [{"target": 1}, {"target": 1, "condition": 2, "weights": 3}])
    def test_fields_of_another_version(self, file, fields):
        save_tree(file, "test", {}, {})
        rewritten(file, structure=json.dumps({"$class": "kexpfam.sample:Sample"} | fields))
        assert "has other fields" in refusal(file)


@pytest.mark.slow
def test_a_fresh_process_restores_what_this_one_saved(file):
    save_tree(file, "test", example_sampler(), {})
    program = "import sys; from kexpfam.storage import load_tree; print(type(load_tree(sys.argv[1])[1].transport).__name__)"
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Residual"
