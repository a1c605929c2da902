"""Gated adapters in files: the stock model computes with one what a pack computes, and PEFT refuses the folder."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.evaluation import write
from atlas_fl.errors import ModelError
from atlas_fl.models.gated_adapter import SETTINGS, WEIGHTS, export_gated_adapter, is_gated, load_gated_adapter
from atlas_fl.models.peft_io import import_adapter
from tests.second_model import combine


def scale(rank: int) -> float:
    return 16 / rank


def gated_model(tiny, spec, *, weight: float = 0.3) -> dict[str, torch.Tensor]:
    """An own adapter on a frozen one, with a gate that is not zero."""
    own, rest = tiny.params(spec, seed=1), tiny.params(spec, seed=2)
    draw = torch.Generator().manual_seed(3)
    widths = {key.removesuffix("A") + "gate": value.shape[1] for key, value in own.items() if key.endswith("lora_A")}
    gate = {key: torch.randn(2, width, generator=draw) for key, width in widths.items()}
    return dict(combine(own, rest, "stacked", weight=weight, scale=scale, gate=gate))


def export(params: dict[str, torch.Tensor], folder: Path, tiny, **labels: tuple[str, ...]) -> None:
    export_gated_adapter(params, folder, family=tiny.backbone.family, base=str(tiny.path), scale=scale, **labels)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_the_stock_model_computes_with_an_exported_gate_what_a_pack_computes(
    tiny_of, site_of, spec_of, tmp_path: Path, architecture: str
) -> None:
    tiny, spec = tiny_of(architecture), spec_of(name="a-0", labels=3, examples=4)
    site, params = site_of(tiny, spec, scale=scale), gated_model(tiny, spec)
    assert is_gated(params) and not is_gated(tiny.params(spec))
    export(params, tmp_path / "gated", tiny, labels=("a", "b", "c"))
    data = site.data["a-0"].splits["test"]
    with torch.no_grad(), forward(collate_packed([data], device=torch.device("cpu")), [params], site) as logits:
        (ours,) = logits
    model, plain = load_gated_adapter(tiny.stock(3), tmp_path / "gated"), tiny.stock(3)
    for row, (start, stop) in enumerate(zip(data.offsets[:-1], data.offsets[1:], strict=True)):
        ids = torch.from_numpy(data.ids[start:stop])[None]
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits[0], ours[row], atol=1e-4, rtol=1e-4)
            assert (plain(input_ids=ids).logits[0] - ours[row]).abs().max() > 0.01
    assert json.loads((tmp_path / "gated/labels.json").read_text()) == ["a", "b", "c"]


def test_what_a_gated_model_writes_is_what_the_stock_model_generates(writer_of, site_of, spec_of, tmp_path) -> None:
    writer, spec = writer_of("gpt2"), spec_of(name="a-0")
    site = site_of(writer, spec, scale=scale)
    params = {key: value for key, value in gated_model(writer, spec).items() if not key.startswith("head.")}
    export(params, tmp_path / "gated", writer)
    prompts = site.data["a-0"].splits["test"]
    written = write(prompts, params, site, new_tokens=6)
    stock = AutoModelForCausalLM.from_pretrained(writer.path).eval()
    model, tokenizer = load_gated_adapter(stock, tmp_path / "gated"), writer.backbone.tokenizer
    generated, end = [], {"pad_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for start, stop in zip(prompts.offsets[:-1], prompts.offsets[1:], strict=True):
        ids = torch.from_numpy(prompts.ids[start:stop])[None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **end)
        generated.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    assert written == generated
    assert len(set(written)) > 1


def test_peft_and_a_start_from_an_adapter_refuse_the_folder(tiny_of, spec_of, tmp_path: Path) -> None:
    tiny, folder = tiny_of("bert"), tmp_path / "gated"
    export(gated_model(tiny, spec_of(name="a-0", labels=3)), folder, tiny)
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config.json'"):
        PeftModel.from_pretrained(tiny.stock(3), str(folder))
    with pytest.raises(ModelError, match="no PEFT adapter in"):
        import_adapter(folder, family=tiny.backbone.family)


def test_what_cannot_be_loaded_is_refused_in_one_line(tiny_of, spec_of, tmp_path: Path) -> None:
    tiny, other, spec = tiny_of("bert"), tiny_of("gpt2"), spec_of(name="a-0", labels=3)
    with pytest.raises(ModelError, match=rf"^no gated adapter in .*give a folder that holds {SETTINGS} and {WEIGHTS}$"):
        load_gated_adapter(tiny.stock(3), tmp_path)
    folder = tmp_path / "gated"
    export(gated_model(tiny, spec), folder, tiny)
    for wrong in (other.stock(3), tiny.stock(2)):
        with pytest.raises(
            ModelError, match=r"^the gated adapter in .* is not for this model.*; load its base( model)?$"
        ):
            load_gated_adapter(wrong, folder)
