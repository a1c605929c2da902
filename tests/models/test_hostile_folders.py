"""Folders of models from anybody: one line of `ModelError`, soon and in little memory, or a model that computes."""

import json
import os
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.client.batching import collate_packed
from atlas_fl.errors import AtlasError
from atlas_fl.models.backbone import backbone_features
from atlas_fl.models.loading import build_first_blocks, load_backbone
from atlas_fl.models.tokenization import TextEncoder
from atlas_fl.models.vision_loading import load_vision
from atlas_fl.setup.assembly import max_sequence_length
from atlas_fl.split.model import load_client_part
from tests.architectures import ARCHITECTURES
from tests.models.folders import change_json
from tests.models.tiny_vision import save_tiny

MOST_SECONDS, MOST_BYTES = 20.0, 600 * 2**20
"""Of one folder; a folder takes a tenth of a second."""
IMAGES = ("vit", "dinov2")


@pytest.fixture
def folder_of(copy_of, tmp_path: Path) -> Callable[[str], Path]:
    """A folder of a tiny model of this architecture, to change."""

    def get(architecture: str) -> Path:
        folder = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        return save_tiny(folder, architecture) if architecture in IMAGES else copy_of(architecture)

    return get


def load_and_read(folder: Path) -> None:
    """Load a folder as a run does, and let the model read; whatever but an `AtlasError` goes through."""
    if folder.name.startswith(IMAGES):
        vision = load_vision(str(folder))
        vision.model(torch.zeros(1, 3, vision.image_size, vision.image_size))
        return
    backbone = load_backbone(str(folder))
    text = ["w1 w2 w3", "12", "w1"]
    limit = min(8, max_sequence_length(backbone))
    examples = TextEncoder(tokenizer=backbone.tokenizer, max_length=limit).examples(text, None, np.zeros(3))
    if all(examples.lengths):
        row = collate_packed([examples], device=torch.device("cpu"))
        with torch.no_grad():
            backbone_features(backbone, row.ids, row.types, row.layout)


def outcome(folder: Path, load: Callable[[Path], object] = load_and_read) -> str:
    """What a folder ends in: nothing where it computes, or the line; checked for time and memory."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load(folder)
        line = ""
    except AtlasError as error:
        line = str(error)
        assert "\n" not in line
        assert line.isprintable()
        assert len(line) < 1500
    assert time.monotonic() - began < MOST_SECONDS
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MOST_BYTES
    return line


HUGE: dict[str, dict[str, Any]] = {
    "width": {"hidden_size": 10**9},
    "words": {"vocab_size": 10**12},
    "no heads": {"num_attention_heads": 0},
    "heads that do not divide": {"num_attention_heads": 5},
    "a width in words": {"hidden_size": "32"},
    "layers": {"num_hidden_layers": 10**5},
    "more layers": {"num_hidden_layers": 10**12},
    "one layer more": {"num_hidden_layers": 4},
    "no layer": {"num_hidden_layers": 0},
    "classes": {"num_labels": 10**12},
    "middle": {"intermediate_size": 10**9},
    "a little wider": {"intermediate_size": 49},
    "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    "no activation": {"hidden_act": "nonesuch"},
    "infinite": {"layer_norm_eps": float("inf"), "rms_norm_eps": float("inf")},
}
OTHER_NAMES = {
    "distilbert": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    | {"intermediate_size": "hidden_dim", "hidden_act": "activation"},
    "gpt2": {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    | {"intermediate_size": "n_inner", "hidden_act": "activation_function"},
    "dinov2": {"intermediate_size": "mlp_ratio"},
    **{name: {"hidden_act": "hidden_activation"} for name in ("gemma2", "gemma3_text")},
}


@pytest.mark.parametrize("case", HUGE)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *IMAGES])
def test_a_config_that_is_not_that_of_the_files_is_refused_before_anything_is_built(
    folder_of, architecture: str, case: str
) -> None:
    if case == "words" and architecture in IMAGES:
        pytest.skip("a model of images has no words")
    folder = folder_of(architecture)
    names = OTHER_NAMES.get(architecture, {})
    change_json(folder / "config.json", **{names.get(key, key): value for key, value in HUGE[case].items()})
    assert outcome(folder)
    if architecture not in IMAGES:
        # a client's part may lack blocks, and reads no more of a matrix than it needs
        is_enough = case in ("a little wider", "one layer more")
        assert outcome(folder, lambda path: load_client_part(str(path), blocks=1)) or is_enough


@pytest.fixture
def bert(folder_of) -> Path:
    return folder_of("bert")


@pytest.mark.parametrize("load", [load_backbone, load_vision, lambda name: build_first_blocks(name, blocks=1)])
def test_a_config_100000_deep_is_one_line(bert: Path, load) -> None:
    (bert / "config.json").write_text('{"model_type": "bert", "x": ' + "[" * 10**5 + "]" * 10**5 + "}")
    message = "config.json is no JSON (its lists are nested more than 64 deep); give the model's own file"
    assert message in outcome(bert, lambda path: load(str(path)))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizers_file_100000_deep_is_one_line(bert: Path, file: str) -> None:
    (bert / file).write_text('{"x": ' + "[" * 10**5 + "]" * 10**5 + "}")
    assert outcome(bert)


FILES = ("config.json", "tokenizer.json", "model.safetensors", "vocab.txt", "chat_template.jinja")
NO_INDEX = ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', "{", '{"weight_map": {}}')


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("architecture", ["bert", "vit"])
def test_a_pipe_or_a_device_in_the_folder_is_one_line_and_nothing_waits(folder_of, architecture: str, file) -> None:
    folder = folder_of(architecture)
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / file).unlink(missing_ok=True)
        put(folder / file)
        assert f"{file} is no regular file; remove it, or give another folder" in outcome(folder)


def test_a_large_file_that_is_no_weights_is_not_read(bert: Path) -> None:
    with (bert / "tokenizer.json").open("ab") as file:
        file.truncate(2**40)  # a hole, which takes no room
    assert "tokenizer.json has 1,099,511,627,776 bytes, and at most 67,108,864 are read" in outcome(bert)


def test_a_folder_of_an_adapter_says_what_it_is(bert: Path) -> None:
    (bert / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere", "peft_type": "LORA"}')
    assert "holds adapter_config.json and so is an adapter; give its base model with --model and" in outcome(bert)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", "", "a/b.safetensors"])
def test_an_index_that_names_files_elsewhere_is_refused(bert: Path, shard: str) -> None:
    names = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").rename(bert.parent / "elsewhere.safetensors")
    (bert / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    assert "which is no file beside it; give the model's own files" in outcome(bert)


@pytest.mark.parametrize("content", NO_INDEX)
def test_an_index_that_is_none_is_refused(bert: Path, content: str) -> None:
    (bert / "model.safetensors").unlink()
    (bert / "model.safetensors.index.json").write_text(content)
    assert outcome(bert)


@pytest.mark.parametrize("head", [b"", b"\x01", bytes(8), (2**62).to_bytes(8, "little"), (2**27).to_bytes(8, "little")])
def test_a_header_that_lies_about_its_length_is_one_line(bert: Path, head: bytes) -> None:
    content = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(head + content[8:] if head else b"")
    assert outcome(bert)


def test_a_compressed_file_of_torch_is_refused(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    with zipfile.ZipFile(bert / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    assert "pytorch_model.bin is compressed; save it again with save_pretrained" in outcome(bert)


@pytest.mark.parametrize("size", [{"height": 10**9, "width": 10**9}, {"shortest_edge": 10**6}, {"height": "x"}, {}])
def test_a_processor_of_no_image_size_is_refused(folder_of, size: dict[str, object]) -> None:
    folder = folder_of("vit")
    change_json(folder / "preprocessor_config.json", size=size)
    assert outcome(folder)


# --- mutations ------------------------------------------------------------------------------------------------------

NASTY: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2, 3, 7, 33, 10**5, 10**9, 10**12, 2**63, 10**400, 0.5, -1e308, 1e-320, "", "x", "\x1b[2J\n",
    "x" * 5000, [], [0], [1] * 1000, [None], {}, {"x": 1}, {"rope_type": "nonesuch"}, {"rope_type": "dynamic"},
    [["deep"]], "gelu", "relu", "sliding_attention", ["sliding_attention"] * 3, {"0": "a"},
)  # fmt: skip


def mutate_json(path: Path, source: random.Random) -> None:
    """One to three places of a file of settings, at any depth, get another value, go, or come."""
    value = json.loads(path.read_text())
    for _ in range(source.randint(1, 3)):
        places = [(value, key) for key in value]
        inner = [item for item in value.values() if isinstance(item, dict | list) and item]
        while inner:
            item = inner.pop(source.randrange(len(inner)))
            keys = list(item) if isinstance(item, dict) else list(range(min(len(item), 8)))
            places += [(item, key) for key in keys]
            inner += [item[key] for key in keys if isinstance(item[key], dict | list) and item[key]]
        parent, key = source.choice(places)
        if source.random() < 0.2 and isinstance(parent, dict):
            del parent[key]
        else:
            parent[key] = source.choice(NASTY)
    path.write_text(json.dumps(value))


def flip_bytes(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(source.choice([1, 3, 30])):
        content[source.randrange(min(len(content), 4000))] = source.randrange(256)
    path.write_bytes(content)


def truncate(path: Path, source: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: source.randrange(len(content))])


def change_tensors(path: Path, source: random.Random) -> None:
    """A tensor goes, gets another shape, name or kind, or comes."""
    tensors = load_file(path)
    key = source.choice(sorted(tensors))
    tensor = tensors.pop(key)
    how = source.randrange(6)
    if how == 1:
        tensors[key] = torch.zeros(source.choice([(), (0,), (3,), (33, 32), (32, 33), (1, 1, 1)]))
    elif how == 2:
        tensors["x" + key] = tensor
    elif how == 3:
        tensors[key] = tensor.to(source.choice([torch.int64, torch.bool, torch.float16, torch.float64, torch.uint8]))
    elif how == 4:
        tensors |= {key: tensor, source.choice(["", "h.99999999999999.x", "x" * 3000, "bert.pooler."]): torch.zeros(2)}
    elif how == 5:
        tensors[key] = tensor.flatten()
    save_file(tensors, path, metadata=source.choice([None, {"format": "pt"}, {"format": "tf"}, {"x": "y"}]))


def mutate(folder: Path, source: random.Random) -> None:
    """A few changes to the files of a model's folder."""
    for _ in range(source.randint(1, 2)):
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
        path = source.choice(files)
        how = [flip_bytes, truncate]
        if path.suffix == ".json":
            how += [mutate_json] * 6
        elif path.suffix == ".safetensors":
            how += [change_tensors] * 4
        try:
            source.choice(how)(path, source)
        except (ValueError, OSError, AttributeError, TypeError, RecursionError):
            continue  # a second change of what is damaged already
        except Exception as error:
            if "safetensors" not in type(error).__module__:
                raise


def end_of(seed: int, base: Callable[[str], Path]) -> str:
    source = random.Random(seed)
    folder = base(source.choice([*ARCHITECTURES, *IMAGES]))
    mutate(folder, source)
    try:
        return outcome(folder)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 230), marks=pytest.mark.slow)], ids=len)
def test_mutated_folders_end_in_one_line_or_compute(folder_of, seeds: range) -> None:
    lines = [end_of(seed, folder_of) for seed in seeds]
    assert sum(map(bool, lines)) > len(seeds) / 3
