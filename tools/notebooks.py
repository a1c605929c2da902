"""Execute the notebooks of `examples/notebooks` in empty folders, and store them with what they put out.

    .venv/bin/python -m tools.notebooks                     all of them: what `make notebooks` runs
    .venv/bin/python -m tools.notebooks first_federation    some of them

Stored are text, tables and pictures, and nothing that differs from run to run without a reason, such as times. Numbers
are those of one thread, as in the tests.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
LONGEST = 600
"""Seconds that a cell may take."""


def main() -> None:
    """Execute the notebooks that are named, or all, and write each where it was read."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if unknown := sorted(set(sys.argv[1:]) - set(names())):
        raise SystemExit(f"no notebook is called {', '.join(unknown)}; there are {', '.join(names())}")
    for name in sys.argv[1:] or names():
        notebook = read(name)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}.ipynb stored", flush=True)


def names() -> list[str]:
    """The names of all notebooks, without the suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    """A valid notebook; nbformat's error where it is not."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in this folder with the interpreter of this process, and keep what they put out."""
    place = {"metadata": {"path": str(folder)}}
    kept = {"record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, kernel_name="python3", timeout=LONGEST, resources=place, **kept).execute()
    notebook.metadata.pop("language_info", None)  # the version of the interpreter


if __name__ == "__main__":
    main()
