"""Runs all cells of extras/launch/two_t4.ipynb on CPUs. This test needs `pip install nbclient
ipykernel`.
"""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = ("True", "all of them are here", "GPUs", "10/10", "image/png", "ring: 0 of 7 points")


@pytest.mark.exhaustive
def test_every_cell_of_the_notebook_runs(tmp_path):
    """Two ranks train in fp16, the picture of the losses is shown, and a new folder of lab 2 is
    judged.
    """
    nbformat, nbclient, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    for name in ("common", "extras", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("step0*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    launch = tmp_path / "extras" / "launch"
    notebook = nbformat.read(launch / "two_t4.ipynb", as_version=4)
    place = {"metadata": {"path": str(launch)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    outputs = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    for output, shown in zip(outputs, SHOWN, strict=True):
        assert shown in output
