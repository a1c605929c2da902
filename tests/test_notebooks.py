"""The notebooks of `examples/notebooks`: executed in an empty folder, and stored with the outputs that they print."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import FOLDER, execute, names, read

LARGEST = 200_000
"""Bytes of a file: figures are kept small, and all eight are read in a browser."""
PLACES = re.compile(r"/(tmp|root|home|Users|private|var|work)/")
"""Folders of one machine."""


def kinds(notebook: Any) -> list[list[str]]:
    """What each cell puts out: text, a table, a picture."""
    return [
        [name for output in cell.outputs for name in sorted(output.get("data") or {output.get("name", "error")})]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_all_eight_are_here() -> None:
    assert len(names()) == 8


@pytest.mark.parametrize("name", names())
def test_a_stored_notebook_was_executed_from_top_to_bottom_and_names_no_machine(name: str) -> None:
    notebook, path = read(name), FOLDER / f"{name}.ipynb"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in kind for kind in kinds(notebook)), "somebody looks at it"
    for output in outputs:
        output.get("data", {}).pop("image/png", None)  # letters by chance
    assert not PLACES.search(json.dumps([outputs, [cell.source for cell in notebook.cells]]))
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("name", names())
def test_a_notebook_ends_with_an_exercise(name: str) -> None:
    prose = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    assert re.findall(r"^## (.+)$", prose, re.MULTILINE)[-1] == "Exercise"


QUICKEST = "own_data_and_model"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == QUICKEST else pytest.param(name, marks=pytest.mark.product) for name in names()]
)
def test_a_notebook_runs_in_an_empty_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    executed, folder = read(name), tmp_path / "work"
    folder.mkdir()
    execute(executed, folder)
    assert kinds(executed) == kinds(read(name)), "stored are the outputs of other cells: make notebooks"
