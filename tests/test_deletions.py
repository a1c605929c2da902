"""Nothing is deleted or written over that was not made here: every place that could do so is named, with the reason."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import MODULES, called, nodes

CALLS = frozenset(
    {
        *("rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "truncate", "ftruncate", "symlink_to"),
        *("write_text", "write_bytes", "touch", "save_file", "save_model", "save_pretrained", "savefig", "imsave"),
        *("copy2", "copyfile", "copyfileobj", "copytree", "FileHandler", "create_study", "tofile"),
    }
)
"""Calls by their last name that delete, rename or write, whatever they are called on."""

ALLOWED: Mapping[str, tuple[dict[str, int], str]] = {
    "cli/main.py": ({"open": 1}, "opens the null device"),
    "runtime/protocol/private_params.py": (
        {"unlink": 2, "rmdir": 1},
        "files of a vault's names, no links, in a folder that bears its mark; the folder where it is empty then",
    ),
    "runtime/processes.py": ({"ftruncate": 1}, "a file without a name, made for the purpose"),
    "runtime/local.py": ({"truncate": 1}, "a file without a name, made for the purpose"),
    "storage/folder_access.py": (
        {"open": 5, "fdopen": 3, "truncate": 1, "replace": 1, "unlink": 2},
        "new drafts of random names, renamed onto what it is told; drafts of its own names; rows cut to a checkpoint",
    ),
    "storage/files.py": (
        {"replace": 1, "rename": 2, "rmtree": 2, "touch": 1},
        "a new folder of drafts, marked folders of drafts; renames onto what it is told",
    ),
    "runtime/transport/certificates.py": ({"rename": 1}, "a revoked site's folder is kept under `revoked/`"),
    "storage/checkpoint.py": (
        {"rename": 3, "unlink": 1, "rmdir": 1},
        "the files of a checkpoint and its folder where it is empty then; what else is in it is set aside",
    ),
    "storage/mapped.py": ({"unlink": 1}, "a draft of a random name that it has written"),
    "storage/onnx_vit.py": ({"write_bytes": 1}, "into the folder of a fetch"),
    "storage/gguf_smollm2.py": ({"write_bytes": 1, "write_text": 1}, "into the folder of a fetch"),
    "storage/downloads.py": (
        {"rename": 1, "write_bytes": 1},
        "the folder of this fetch; what lies in a part's place is set aside",
    ),
    "storage/run_folder.py": (
        {"unlink": 1, "rmdir": 1},
        "files of a run's names in a folder that was empty when the run began; the log is appended to",
    ),
    "models/peft_io.py": ({"save_pretrained": 3}, "into a folder of drafts"),
    "models/loading.py": ({"save_pretrained": 2}, "into a folder of drafts"),
    "experiment/recorder.py": ({"unlink": 2}, "later plans of a run that goes back behind them, by their names"),
    "experiment/run.py": ({"unlink": 1}, "rows and later plans of a run that begins again, by their names"),
}
"""By module: which calls, how often, and why nothing of a user's can go by them."""

WRITERS: Mapping[str, str] = {
    "cli/results.py": "--to, which is new, empty or of the command itself",
    "cli/run.py": "--to, which is new or a plan",
    "flower/messages.py": "certificates in a temporary folder of this process",
    "runtime/transport/certificates.py": "the list of clients, which it has read",
    "cli/sweep.py": "beside the runs, under a name that has a digest of them",
    "deployment/server.py": "in a run's folder",
    "deployment/receipt.py": "into a folder of drafts",
    "deployment/site.py": "a model with a gate, into a folder of drafts",
    "deployment/service.py": "in a run's folder",
    "deployment/privacy_record.py": "over a sealed record, which it has read",
    "runtime/remote.py": "in a run's folder, over a sealed file, which it has read",
    "runtime/protocol/private_params.py": "in a folder with the vault's mark, or an empty one",
    "storage/checkpoint.py": "into a draft",
    "storage/digests.py": "in a run's folder",
    "storage/mapped.py": "a draft in a run's folder",
    "storage/tensors.py": "in a run's folder; in a run's folder; where the caller says",
    "storage/onnx_vit.py": "into the folder of a fetch",
    "storage/gguf_smollm2.py": "into the folder of a fetch",
    "storage/jsonl.py": "where the caller says",
    "experiment/answers.py": "in a run's folder",
    "experiment/harness.py": "in a run's folder",
    "experiment/export.py": "a card, into a folder of drafts",
    "models/peft_io.py": "into a folder of drafts",
    "experiment/recorder.py": "in a run's folder",
    "report/drawing.py": "figures, in a run's folder or where another one was set aside",
    "report/figures.py": "the numbers of figures, beside them in a run's folder",
    "report/html/write.py": "a page, where what is none of ours was set aside",
    "experiment/run.py": "in a run's folder",
    "experiment/tuning.py": "in a run's folder",
    "setup/own_data.py": "under a name that has a digest of what is written",
}
"""Who replaces files by our own writers, and where."""

OWN_WRITERS = frozenset({"write_json", "write_sealed", "write_atomic", "write_pieces", "write_tensors"})


def names_of(module: Path) -> Iterator[str]:
    """The last names of the calls in a module that delete, rename, or open a file to write."""
    for node in nodes(module, ast.Call):
        name, whose = called(node), ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        # with two arguments it is of a text, with names of fields of a dataclass
        is_rename = name == "replace" and whose != "" and len(node.args) == 1 and not node.keywords
        is_removal = name in ("remove", "replace", "open", "removexattr") and whose == "os"
        if name in CALLS or is_rename or is_removal or (name in ("open", "fdopen") and _writes(node)):
            yield name


def _writes(call: ast.Call) -> bool:
    """Whether an `open` has a mode that writes; one that is worked out is taken for one."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in (None, "mode"))]
    modes = [own.value for own in given if isinstance(own, ast.Constant) and isinstance(own.value, str)]
    return any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes)


def test_every_place_that_deletes_or_writes_over_is_named_with_its_reason() -> None:
    found = {name: dict(Counter(names_of(path))) for name, path in MODULES.items()}
    assert {name: calls for name, calls in found.items() if calls} == {
        name: own for name, (own, _) in ALLOWED.items()
    }, "say in ALLOWED why what a user has put there cannot go by this call, or take storage.files.set_aside"


def test_everybody_who_replaces_files_is_named_with_the_place() -> None:
    writers = {
        name for name, path in MODULES.items() if any(called(call) in OWN_WRITERS for call in nodes(path, ast.Call))
    }
    found = writers - {"storage/files.py", "storage/folder_access.py"}
    assert found == set(WRITERS), "say in WRITERS where this writes, and why nothing of a user's lies there"


def test_a_new_deletion_is_found(tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text(
        "import os, shutil\n"
        "def go(path, other, text):\n"
        "    shutil.rmtree(path); os.remove(path); path.replace(other); path.open('w'); open(path, mode='r+')\n"
        "    text.replace('a', 'b'); path.open(); open(path, 'rb'); [].remove(path)\n"
    )
    assert sorted(names_of(module)) == ["open", "open", "remove", "replace", "rmtree"]
