"""Compiled code kept on disk between runs of the command line."""

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import jax

from jaxlayers.weights.hub import cache_folder

OFF_VARIABLE = "JAXLAYERS_NO_COMPILE_CACHE"
LARGEST = 2 << 30  # bytes; the entries used longest ago go first
SHORTEST = 0.5  # seconds of compilation that are worth a file


def keep_compiled() -> Path | None:
    """Has jax keep compiled code in the package's cache folder, and returns where.

    Returns None, and changes nothing, where $JAXLAYERS_NO_COMPILE_CACHE is set to anything but 0, where the
    user has pointed jax to a cache already, or where the folder cannot be written.
    """
    if os.environ.get(OFF_VARIABLE, "0") not in ("", "0") or jax.config.jax_compilation_cache_dir:
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
