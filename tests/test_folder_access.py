"""Files are opened by `storage.folder_access`: every other place that opens one, or reads JSON, is named with why."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import MODULES, called, nodes

HOME = "storage/folder_access.py"

OPENS = frozenset(
    {
        *("open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes", "touch", "mkdir", "mkstemp"),
        *("safe_open", "load_file", "save_file", "read_parquet", "fromfile", "tofile", "loadtxt", "memmap"),
        *("FileHandler", "NamedTemporaryFile"),
    }
)
"""Calls by their last name that open a file or make a folder, whatever they are called on."""
READS = frozenset({"json.load", "json.loads", "tomllib.load", "tomllib.loads", "np.load", "np.save"})

ALLOWED: Mapping[str, tuple[dict[str, int], str]] = {
    "__init__.py": ({"read_text": 1}, "this package"),
    "cli/main.py": ({"open": 1}, "the null device"),
    "methods/knobs.py": ({"read_text": 1}, "the sources of this package"),
    "packaged.py": ({"read_text": 1, "tomllib.loads": 1}, "a resource of this package"),
    "config/files.py": ({"tomllib.loads": 1}, "the one reader of TOML, after its bounds"),
    "data/embedded.py": ({"open": 2, "read_text": 1}, "data that `atlas fetch` has checked by their digests"),
    "data/federations.py": ({"open": 1}, "data that `atlas fetch` has checked by their digests"),
    "data/image_sets.py": ({"open": 1, "read_bytes": 1}, "data that a user names"),
    "data/formats.py": ({"open": 1, "json.loads": 2}, "data that a user names"),
    "data/tables.py": ({"open": 1}, "data that a user names"),
    "data/user_files.py": ({"open": 1, "read_text": 1}, "data and templates that a user names"),
    "data/chat.py": ({"json.loads": 3}, "cells of data that a user names"),
    "models/chat_template.py": ({"json.loads": 3}, "rows of data that have been read"),
    "experiment/harness.py": ({"read_text": 1}, "an adapter that this process has exported into a temporary folder"),
    "experiment/judge.py": ({"open": 1, "json.loads": 1}, "an address, and at most so many bytes of its answer"),
    "experiment/sweep.py": ({"json.loads": 1}, "between this process and its own workers"),
    "flower/server_app.py": ({"read_bytes": 1}, "certificates in a temporary folder of this process"),
    "storage/mapped.py": ({"load_file": 1}, "a draft that this process has written under a name that nobody can guess"),
    "models/files.py": (
        {"read_bytes": 2, "safe_open": 1},
        "the folder of a model that a user names, whose files it has found regular",
    ),
    "plugins.py": ({"read_bytes": 1}, "code that a user names"),
    "runtime/transport/certificates.py": (
        {"mkdir": 1},
        "the folder of certificates; its files are drafts that are renamed, a key for its owner alone",
    ),
    "split/model.py": ({"safe_open": 1}, "the folder of a model that a user names"),
    "storage/downloads.py": (
        {"mkdir": 2, "open": 2, "write_bytes": 1},
        "the user's own cache, in a folder of this fetch",
    ),
    "storage/files.py": (
        {"mkdir": 3, "touch": 1},
        "in a new folder of drafts; the folder of a run as the user names it",
    ),
    "setup/own_data.py": ({"mkdir": 1}, "a folder of the user's own as the user names it"),
    "storage/gguf_smollm2.py": (
        {"json.loads": 1, "mkdir": 1, "read_bytes": 1, "read_text": 1, "write_bytes": 1, "write_text": 1},
        "the user's own cache, in a folder of this fetch, and files of the package that is read",
    ),
    "storage/onnx_vit.py": (
        {"mkdir": 1, "write_bytes": 1, "read_bytes": 1},
        "the user's own cache, in a folder of this fetch",
    ),
    "storage/run_folder.py": ({"mkdir": 1}, "the folder of a run as the user names it"),
}
"""By module: which calls, how often, and why no folder of somebody else is opened by them."""


def opens_of(module: Path) -> Iterator[str]:
    """The calls in a module that open a file or read JSON or TOML."""
    for node in nodes(module, ast.Call):
        written = ast.unparse(node.func)
        if written in READS:
            yield written
        elif called(node) in OPENS:
            yield called(node)


def test_every_place_that_opens_a_file_by_itself_is_named_with_its_reason() -> None:
    found = {name: dict(Counter(opens_of(path))) for name, path in MODULES.items() if name != HOME}
    assert {name: calls for name, calls in found.items() if calls} == {
        name: calls for name, (calls, _) in ALLOWED.items()
    }, f"open it by {HOME}, or say in ALLOWED why nobody else can have put a link or a pipe there"


def test_csv_is_written_in_one_place() -> None:
    writers = [
        module
        for module, path in MODULES.items()
        for call in nodes(path, ast.Call)
        if ast.unparse(call.func) in ("csv.writer", "csv.DictWriter")
    ]
    assert writers == ["report/csv_text.py"], "write CSV by report.csv_text.format_csv, which escapes formulas"


def test_a_new_opening_is_found(tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text("import json\ndef go(path):\n    path.read_text(); open(path); json.load(path); path.exists()\n")
    assert sorted(opens_of(module)) == ["json.load", "open", "read_text"]
