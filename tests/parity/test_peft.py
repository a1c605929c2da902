"""Ours against PEFT: the same folder gives the same logits, and a plain PEFT loop trains the same model."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.models.peft_io import export_adapter, import_adapter
from atlas_fl.models.tokenization import EncodedExamples
from tests.architectures import ARCHITECTURES
from tests.conftest import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's

SCALES: dict[str, Callable[[int], float]] = {
    "plain": lambda rank: 2.0,  # noqa: ARG005
    "alpha": lambda rank: 16 / rank,
    "rslora": lambda rank: 6 / math.sqrt(rank),
}


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """Every architecture in turn."""
    return tiny_of(request.param)


def inputs(tiny, data: EncodedExamples, index: np.ndarray) -> dict[str, Tensor]:
    """A padded batch as the stock classifiers take it."""
    part = data.take(index)
    shape = len(part), int(part.lengths.max())
    inside = torch.from_numpy(np.arange(shape[1]) < part.lengths[:, None])
    batch = {"input_ids": torch.full(shape, tiny.backbone.tokenizer.pad_token_id), "attention_mask": inside.long()}
    batch["input_ids"][inside] = torch.from_numpy(part.ids)
    if tiny.name in ("bert", "electra"):
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.int64)
        batch["token_type_ids"][inside] = torch.from_numpy(part.types)
    return batch


def ours(site, data: EncodedExamples, params: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad(), forward(collate_packed([data], device=torch.device("cpu")), [params], site) as logits:
        return logits[0]


@pytest.mark.parametrize("scale", sorted(SCALES))
def test_peft_loads_an_exported_folder_onto_the_stock_classifier_and_agrees(
    tiny, site_of, spec_of, tmp_path: Path, scale: str
) -> None:
    spec = spec_of(name="a-0", labels=3, ranks=(1, 4, 2), pairs=True)
    site, params = site_of(tiny, spec, scale=SCALES[scale]), tiny.params(spec)
    export_adapter(params, tmp_path, family=tiny.backbone.family, base=str(tiny.path), scale=SCALES[scale])
    base = tiny.stock(3)
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    data = site.data["a-0"].splits["test"]
    batch = inputs(tiny, data, np.arange(len(data)))
    with torch.no_grad():
        theirs, without = model(**batch).logits, tiny.stock(3)(**batch).logits
    torch.testing.assert_close(ours(site, data, params), theirs, atol=3e-5, rtol=3e-5)
    assert (theirs - without).abs().max() > 0.05


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
@pytest.mark.parametrize("scale", sorted(SCALES))
def test_importing_an_exported_folder_gives_the_same_bits_and_scales(tiny, spec_of, tmp_path: Path, scale: str) -> None:
    params = tiny.params(spec_of(name="a-0", ranks=(1, 4, 2)))
    export_adapter(params, tmp_path, family=tiny.backbone.family, base=str(tiny.path), scale=SCALES[scale])
    found, found_scale = import_adapter(tmp_path, family=tiny.backbone.family)
    assert found.keys() == params.keys()
    assert all(torch.equal(found[key], params[key]) for key in params)
    assert [found_scale(rank) for rank in (1, 2, 4)] == pytest.approx([SCALES[scale](rank) for rank in (1, 2, 4)])


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
@pytest.mark.parametrize("labels", [3, 0], ids=["classes", "regression"])
def test_training_equals_a_plain_peft_loop(tiny, site_of, spec_of, tmp_path: Path, labels: int) -> None:
    """Same batches, AdamW, clipping and rates, written out with stock parts only; 8 steps."""
    spec = spec_of(name="a-0", labels=labels, examples=16, ranks=(1, 4, 2))
    site, params = site_of(tiny, spec, scale=SCALES["alpha"]), tiny.params(spec)
    options = TrainOptions(
        seed=0, epochs=1, batch_size=2, lr=5e-3, schedule="linear", warmup=0.25, weight_decay=0.1, clip=0.3
    )
    # One example stands in every place of a batch's epoch, so the order of the batches is read off the data below.
    data = site.data["a-0"].splits["train"]
    order = _order_of(site, params, options)
    (update,) = train([Job(client="a-0", params=params, round=1, options=options)], site)

    export_adapter(params, tmp_path, family=tiny.backbone.family, base=str(tiny.path), scale=SCALES["alpha"])
    model = PeftModel.from_pretrained(tiny.stock(max(1, labels)), str(tmp_path), is_trainable=True).eval()
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=5e-3, weight_decay=0.1)
    rates = [5e-3 * factor for factor in (0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)]
    losses = []
    for step, rate in enumerate(rates):
        index = order[2 * step : 2 * step + 2]
        logits = model(**inputs(tiny, data, index)).logits
        target = torch.from_numpy(data.labels[index])
        loss = torch.nn.MSELoss()(logits[:, 0], target) if labels == 0 else torch.nn.CrossEntropyLoss()(logits, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.3)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(str(tmp_path / "after"))
    expected, _ = import_adapter(tmp_path / "after", family=tiny.backbone.family)
    assert update.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    for key, value in expected.items():
        torch.testing.assert_close(update.params[key], value, atol=1e-4, rtol=1e-4, msg=key)
        assert (value - params[key]).abs().max() > 1e-3, f"{key} did not train"


def _order_of(site, params: Mapping[str, Tensor], options: TrainOptions) -> np.ndarray:
    """Which example comes when: each is found again by its tokens."""
    from atlas_fl.client.local_training import batches

    data = site.data["a-0"].splits["train"]
    known = {data.take(np.array([i])).ids.tobytes(): i for i in range(len(data))}
    assert len(known) == len(data)
    job = Job(client="a-0", params=params, round=1, options=options)
    drawn = [batch.take(np.array([i])) for batch in batches(data, job, secret=None) for i in range(len(batch))]
    return np.array([known[one.ids.tobytes()] for one in drawn])


def test_the_exported_settings_are_what_peft_documents(tiny_of, spec_of, tmp_path: Path) -> None:
    tiny = tiny_of("bert")
    params = tiny.params(spec_of(name="a-0", ranks=(1, 4, 2)))
    export_adapter(params, tmp_path, family=tiny.backbone.family, base="some/base", scale=SCALES["plain"])
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "some/base"
    assert settings["task_type"] == "SEQ_CLS"
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert settings["rank_pattern"]["bert.encoder.layer.0.attention.self.query"] == 1
    assert settings["alpha_pattern"]["bert.encoder.layer.2.attention.self.value"] == 4
    assert settings["modules_to_save"] == ["classifier"]
