"""Every notebook runs from top to bottom at tiny size, and is committed without outputs."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_committed(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch, tmp_path):
    reason = "needs the extra colab"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    monkeypatch.setenv("JAXLAYERS_TINY", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    streams = [
        out for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == "stream"
    ]
    printed = "".join(out.text for out in streams if out.name == "stdout")
    counts = {line for line in printed.splitlines() if line.startswith("compilations:")}
    assert counts <= {"compilations: 1"}
    shown = [out.data for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]
    assert all("image/png" in data for data in shown if data["text/plain"].startswith("<Figure"))
    warnings = "".join(out.text for out in streams if out.name == "stderr")
    assert warnings == ""
