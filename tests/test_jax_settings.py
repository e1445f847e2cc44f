"""The library leaves the caller's JAX as it was."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kexpfam import jax_settings
from kexpfam.jax_settings import double_precision, single_precision

SOURCES = Path(jax_settings.__file__).parent
CACHE_DIR = "jax_compilation_cache_dir"
# Everything that changes a setting of JAX.
TOUCHES = re.compile(r"jax\.config|enable_x64|jax_default_|compilation_cache|set_cache_dir")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Remove the cache of the test run, as in a JAX without settings; return the folder of ours."""
    monkeypatch.setenv("KEXPFAM_CACHE", str(tmp_path / "programs"))
    monkeypatch.setattr(jax_settings, "CACHE_SECONDS", 0.0)
    kept = jax.config.values[CACHE_DIR]
    jax.config.update(CACHE_DIR, None)
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    jax.config.update(CACHE_DIR, kept)
    compilation_cache.reset_cache()


def compiled(value):
    """Compile a program that no test has compiled before."""
    return jax.jit(lambda x: x * value + np.pi)(jnp.ones(3))


def test_only_one_module_changes_settings_of_jax():
    touching = [path.name for path in SOURCES.rglob("*.py") if TOUCHES.search(path.read_text())]
    assert touching == ["jax_settings.py"]


def test_settings_are_restored(folder):
    before = dict(jax.config.values)
    with double_precision():
        assert jax.config.values[CACHE_DIR] == str(folder)
        assert jnp.ones(1).dtype == jnp.float64
        with single_precision(), double_precision():
            assert jnp.ones(1).dtype == jnp.float64
        assert jax.config.values[CACHE_DIR] == str(folder)
    assert dict(jax.config.values) == before
    with pytest.raises(KeyError), double_precision():
        raise KeyError
    assert dict(jax.config.values) == before


def test_only_programs_of_the_context_are_stored(folder):
    with double_precision():
        compiled(1.25)
    stored = set(folder.iterdir())
    assert stored
    compiled(2.25)
    with single_precision():
        compiled(3.25)
    assert {path.name for path in folder.iterdir() if path.suffix != ".lock"} == {
        path.name for path in stored if path.suffix != ".lock"
    }


def test_the_last_of_several_threads_restores_the_settings(folder):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with double_precision():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with double_precision():
        thread.start()
        assert inside.wait(60)
    assert jax.config.values[CACHE_DIR] == str(folder)
    leave.set()
    thread.join()
    assert jax.config.values[CACHE_DIR] is None


def test_a_cache_of_the_caller_is_kept(folder, tmp_path):
    jax.config.update(CACHE_DIR, str(tmp_path / "own"))
    before = dict(jax.config.values)
    with double_precision():
        assert jax.config.values["jax_compilation_cache_max_size"] == before["jax_compilation_cache_max_size"]
        assert jax.config.values[CACHE_DIR] == str(tmp_path / "own")
    assert dict(jax.config.values) == before and not folder.exists()


@pytest.mark.parametrize("name", ["off", "unwritable"])
def test_the_cache_can_be_disabled(folder, monkeypatch, tmp_path, name):
    (tmp_path / "unwritable").touch()
    monkeypatch.setenv("KEXPFAM_CACHE", "off" if name == "off" else str(tmp_path / "unwritable" / "programs"))
    with double_precision():
        assert jax.config.values[CACHE_DIR] is None


def test_an_empty_name_of_the_cache_is_no_name(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("KEXPFAM_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    with double_precision():
        assert jax.config.values[CACHE_DIR] == str(tmp_path / ".cache" / "kexpfam")


PROGRAM = """if True:
    import json, sys
    import jax
    import numpy as np
    before = dict(jax.config.values)
    import kexpfam
    rows = np.random.default_rng(0).normal(size=(30, 1))
    kernel = kexpfam.Kernel(lengthscale=1.0, rkhs_penalty=0.1, base="gaussian", n_centres=5)
    settings = {"kernel": kernel}
    model = kexpfam.KernelExpFamily(**settings, random_state=0).fit(rows)
    model.save(sys.argv[1])
    loaded = kexpfam.load(sys.argv[1])
    scores = loaded.score_samples(rows)
    assert scores.dtype == np.float64 and loaded.sample(3, random_state=0).shape == (3, 1)
    after = dict(jax.config.values)
    print(json.dumps({name: str(after[name]) for name in before if before[name] != after[name]}))
"""


def test_a_process_that_fits_loads_and_scores_keeps_its_jax(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"KEXPFAM_CACHE": str(tmp_path / "programs"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model.kexpfam")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
    assert list((tmp_path / "programs").iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_process_that_is_forked_after_use_is_refused_at_once():
    program = """
        import os, warnings
        from kexpfam.jax_settings import double_precision
        warnings.simplefilter("ignore")

        def child():
            if not os.fork():
                try:
                    with double_precision():
                        print("fine", flush=True)
                except RuntimeError as error:
                    print(error, flush=True)
                os._exit(0)
            os.wait()

        child()
        with double_precision():
            pass
        child()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert first == "fine"
    assert "start processes with multiprocessing.get_context('spawn')" in second
