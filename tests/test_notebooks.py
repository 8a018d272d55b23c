"""Every notebook runs, with fewer rounds."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, capsys):
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace = {}
    for source in sources:
        exec(compile(source.replace("ROUNDS = 10", "ROUNDS = 2"), str(path), "exec"), namespace)
    assert "test accuracy" in capsys.readouterr().out
