"""How a command starts jax: compiled code kept on disk between runs, no notices about absent hardware."""

import contextlib
import glob
import hashlib
import io
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxlayers.weights.hub import cache_folder

OFF_VARIABLE = "JAXLAYERS_NO_COMPILE_CACHE"
LARGEST = 2 << 30  # bytes; the entries used longest ago go first
SHORTEST = 0.5  # seconds of compilation that are worth a file


def start() -> None:
    """Starts jax's backends, with compiled code kept on disk."""
    keep_compiled()
    absent = lambda record: "may be present on this machine" not in record.getMessage()
    logging.getLogger("jax._src.xla_bridge").addFilter(absent)  # about a missing jaxlib, not about a failure
    for name in ("jax._src.compilation_cache", "jax._src.lru_cache"):  # a cache may fail, the command goes on
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.nullcontext() if _has_tpu() else _native_stderr_aside():
        jax.devices()


def _has_tpu() -> bool:
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))


@contextlib.contextmanager
def _native_stderr_aside() -> Iterator[None]:
    """Shows what C++ code writes to stderr only when the block fails.

    An installed libtpu reports on any other host that it finds no TPU, whatever the log level.
    """
    try:
        saved = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with tempfile.TemporaryFile() as aside, os.fdopen(saved, "wb") as terminal:
        # Python's own messages, of jax's loggers for one, go on being shown.
        with contextlib.redirect_stderr(io.TextIOWrapper(terminal, write_through=True)):
            os.dup2(aside.fileno(), 2)
            try:
                yield
            except BaseException:
                aside.seek(0)
                shutil.copyfileobj(aside, terminal)
                raise
            finally:
                os.dup2(saved, 2)


def keep_compiled() -> Path | None:
    """Has jax keep compiled code in the package's cache folder, and returns where.

    Returns None, and changes nothing, where $JAXLAYERS_NO_COMPILE_CACHE is set to anything but 0, where the
    user has pointed jax to a cache already, or where the folder cannot be written.
    """
    if os.environ.get(OFF_VARIABLE, "0") not in ("", "0") or jax.config.values["jax_compilation_cache_dir"]:
        return None
    folder = cache_folder() / "compiled" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    return folder


def _processor() -> str:
    """Returns a name for the kind of CPU: a home folder may be shared by hosts that do not run alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))} or set(lines[:1])
    digest = hashlib.sha256("\n".join(sorted(kinds)).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"
