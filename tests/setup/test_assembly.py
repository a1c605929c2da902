import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from atlas_fl.client.job import ClientTokens, Prompts
from atlas_fl.data.task import Task
from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.tokenization import TextEncoder
from atlas_fl.setup.assembly import max_sequence_length, pick_device, truncation_notes


def test_auto_takes_fp16_to_a_gpu_and_refuses_it_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", precision="bf16") == "cpu"
    with pytest.raises(ConfigError, match=r"--precision fp16 needs a GPU with CUDA.*bf16 or fp32"):
        pick_device("auto", precision="fp16")
    with pytest.raises(ConfigError, match="accelerator 'cuda' is not available"):
        pick_device("cuda", precision="fp16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto", precision="fp16") == "cuda"


def task_of(**values: object) -> Task:
    usual = {"name": "t", "num_labels": 2, "metric": "accuracy", "load": lambda _: pytest.fail("reads no data")}
    return Task(**{**usual, **values})


def test_a_note_says_how_many_texts_are_cut_by_how_much_and_what_helps(tiny_of) -> None:
    backbone = tiny_of("bert").backbone

    def tokens(longest: int, limit: int) -> ClientTokens:
        text = [" ".join(["w1"] * words) for words in (1, longest, longest)]
        rows = TextEncoder(tokenizer=backbone.tokenizer, max_length=limit).examples(text, None, np.zeros(3))
        return ClientTokens(task=task_of(), splits={"train": rows, "validation": rows, "test": rows})

    assert truncation_notes({"t-0": tokens(4, 8)}, backbone) == ()
    assert truncation_notes({"t-0": tokens(4, 8), "t-1": tokens(18, 8)}, backbone) == (
        "t: 6 of 18 texts are longer than 8 tokens and are cut; p95 is 20, the longest has 20, and the model reads up"
        " to 66 (--max-length)",
    )


def test_prompts_that_are_cut_are_counted(tiny_of) -> None:
    backbone = tiny_of("llama").backbone
    text, target = ["w1 w2 w3 w4 w5 w6"], ["w7 w8"]
    rows = TextEncoder(tokenizer=backbone.tokenizer, max_length=8).targets(text, target)
    prompts = Prompts(
        encoded=TextEncoder(tokenizer=backbone.tokenizer, max_length=5).prompts(text), references=tuple(target)
    )
    task = dataclasses.replace(task_of(), num_labels=0, metric="perplexity", label_names=())
    tokens = ClientTokens(task=task, splits={"train": rows}, prompts={"test": prompts})
    (note,) = truncation_notes({"t-0": tokens}, backbone)
    assert note.startswith("t: 2 of 2 texts and prompts are longer than 8 tokens and are cut; p95 is 10")
    assert note.endswith(" (--max-length), with --new-tokens of an answer")


def test_a_model_with_positions_for_no_text_is_refused(tiny_of, tmp_path) -> None:
    shutil.copytree(tiny_of("roberta").path, tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 43}))
    assert max_sequence_length(load_backbone(str(tmp_path / "copy"))) == 22
    model = load_backbone(str(tmp_path / "copy"))
    model.model.config.pad_token_id = 64
    with pytest.raises(ModelError, match="has positions for 1 tokens, and a text takes 4 or more"):
        max_sequence_length(model)
