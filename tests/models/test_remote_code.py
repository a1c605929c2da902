"""Files of a model are data: code among them is never run, and nobody is asked whether it may be."""

import ast
from pathlib import Path

import pytest
import torch

from atlas_fl.errors import ModelError
from atlas_fl.models.loading import load_backbone, loading_options
from atlas_fl.models.vision_loading import load_vision
from tests.models.folders import change_json
from tests.sources import MODULES, called, nodes

LOADS = frozenset({"from_pretrained", "from_config", "load_dataset"})


def refuses_code(call: ast.Call) -> bool:
    """Whether a call says that no code is to be run, by itself or with what `loading_options` gives."""
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return said.get("trust_remote_code") == "False" or "loading_options" in said.get(None, "")


@pytest.mark.slow
def test_every_call_that_loads_a_model_or_data_refuses_code() -> None:
    calls = [(path, call) for path in MODULES.values() for call in nodes(path, ast.Call) if called(call) in LOADS]
    assert len(calls) > 10
    assert [f"{path.name}:{call.lineno}" for path, call in calls if not refuses_code(call)] == []
    assert loading_options("x")["trust_remote_code"] is False
    assert not refuses_code(ast.parse("AutoModel.from_pretrained('x', local_files_only=True)", mode="eval").body)


@pytest.fixture
def folder(copy_of) -> Path:
    """A model of ours, of which a test replaces a file."""
    return copy_of("bert")


def test_code_beside_a_model_is_not_run_and_nobody_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = folder.parent / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').write('ran')\nclass EvilConfig: pass\n")
    classes = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"}
    change_json(folder / "config.json", model_type="evil", auto_map=classes)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError) as caught:
        load_backbone(str(folder))
    assert "\n" not in str(caught.value)
    assert not ran.exists()


class Evil:
    def __reduce__(self):
        return (open, (str(Path("evil-ran").absolute()), "w"))


@pytest.mark.parametrize("load", [load_backbone, load_vision])
def test_a_file_of_pickles_that_would_run_code_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, load) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Evil()}, folder / "pytorch_model.bin")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)
    assert not Path("evil-ran").exists()
