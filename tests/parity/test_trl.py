"""Ours against TRL: one client, one epoch of the same rows, the same losses and the same adapters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from atlas_fl.client.job import ClientTokens, Job, Site, Update
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.data.task import Task
from atlas_fl.models.chat_template import ChatTemplate
from atlas_fl.models.peft_io import export_adapter, import_adapter
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder
from tests.conftest import Spec, Tiny
from tests.parity.test_peft import SCALES, _order_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.slow,
]

# The tiny model has positions for 66 bytes.
MARKED = (
    "{% for m in messages %}{{ m.role[0] + ':' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# TRL's ORPO puts an end of text behind one that does not end with it.
CLOSED = UNMARKED.replace("{{ '\n' }}{% endfor %}", "{{ '\n' if m.role == 'user' or not loop.last }}{% endfor %}")


def chats(count: int, *, turns: int) -> list[list[dict[str, str]]]:
    """Conversations of different lengths."""
    source = np.random.default_rng(3)

    def words() -> str:
        return "".join(source.choice([*"abcdef "], size=int(source.integers(2, 8))))

    return [
        [{"role": role, "content": words()} for _ in range(turns) for role in ("user", "assistant")]
        for _ in range(count)
    ]


FORMS: dict[str, tuple[str, int, bool]] = {
    "chat": (MARKED, 1, False),
    "several-turns": (MARKED, 3, False),
    "completion": (UNMARKED, 1, False),
    "without-padding": (MARKED, 1, True),
}
"""By name (template, turns of a conversation, whether TRL puts the rows of a batch one after another)."""


class InOrder:
    """A trainer that takes the rows as they come."""

    train_dataset: Dataset

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class SupervisedInOrder(InOrder, SFTTrainer):  # type: ignore[misc]
    """Supervised learning of the rows as they come."""


class PreferredInOrder(InOrder, DPOTrainer):  # type: ignore[misc]
    """DPO of the rows as they come."""


class OddsInOrder(InOrder, ORPOTrainer):  # type: ignore[misc]
    """ORPO of the rows as they come, whose first term is of answers alone."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """TRL's results, with the mean loss of the chosen answers' tokens in the place of that of prompts too."""
        chosen, rejected, logits, other_logits, _ = super().concatenated_forward(model, batch)
        targets = batch["chosen_labels"][:, 1:]
        places = targets != -100
        supervised = torch.nn.functional.cross_entropy(logits[:, : targets.shape[1]][places], targets[places])
        return chosen, rejected, logits, other_logits, supervised


OPTIONS = TrainOptions(seed=0, epochs=1, batch_size=4, lr=5e-3, schedule="constant", warmup=0.0, clip=1.0)
STOCK: dict[str, Any] = {
    "per_device_train_batch_size": OPTIONS.batch_size,
    "num_train_epochs": 1,
    "learning_rate": OPTIONS.lr,
    "lr_scheduler_type": "constant",
    "weight_decay": OPTIONS.weight_decay,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
}
"""The same for TRL."""


def site_and_params(tiny: Tiny, data: EncodedExamples, spec: Spec) -> tuple[Site, dict[str, Tensor]]:
    """The site of one client with these examples, and its adapters."""
    params = {key: one for key, one in tiny.params(spec).items() if "lora" in key}
    task = Task(name="a", num_labels=0, chat=True, load=lambda _: pytest.fail("nobody reads it"))
    client = ClientTokens(task=task, splits=dict.fromkeys(("train", "validation", "test"), data))
    how: dict[str, Any] = {"targets": tiny.targets, "scale": SCALES["alpha"], "max_tokens": 4096, "seed": 0}
    return Site(backbone=tiny.backbone, data={"a-0": client}, **how), params


def peft_model(tiny: Tiny, params: dict[str, Tensor], folder: Path) -> PeftModel:
    """The stock model with these adapters."""
    export_adapter(params, folder, family=tiny.backbone.family, base=str(tiny.path), scale=SCALES["alpha"])
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny.path), str(folder), is_trainable=True)


def check_equal(update: Update, trainer: Any, model: PeftModel, params: dict[str, Tensor], tiny: Tiny, folder: Path):
    """Train TRL's way; its losses are ours, and its adapters."""
    losses = [row["loss"] for row in (trainer.train(), trainer.state.log_history)[1] if "loss" in row]
    model.save_pretrained(str(folder), selected_adapters=["default"])
    expected, _ = import_adapter(folder, family=tiny.backbone.family)
    assert len(losses) == 4
    assert update.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert expected.keys() == update.params.keys()
    for key, value in expected.items():
        torch.testing.assert_close(update.params[key], value, atol=1e-4, rtol=1e-4, msg=key)
        assert (value - params[key]).abs().max() > 1e-3, f"{key} did not train"


@pytest.mark.parametrize(("template", "turns", "without_padding"), FORMS.values(), ids=FORMS)
def test_losses_and_adapters_equal_trls(
    writer_of, spec_of, tmp_path: Path, template: str, turns: int, without_padding: bool
) -> None:
    tiny, rows = writer_of("qwen2"), chats(16, turns=turns)
    tokenizer = type(tiny.backbone.tokenizer).from_pretrained(tiny.path, chat_template=template)
    texts = [json.dumps(row) for row in rows]
    data = TextEncoder(tokenizer=tokenizer, max_length=66).chats(texts, template=ChatTemplate(tokenizer, None))
    assert data.full_lengths is None, "nothing is cut"
    site, params = site_and_params(tiny, data, spec_of(name="a-0", ranks=(1, 4, 2)))
    order = _order_of(site, params, OPTIONS)
    (update,) = train([Job(client="a-0", params=params, round=1, options=OPTIONS)], site)

    model = peft_model(tiny, params, tmp_path / "before")
    prompted = [{"prompt": row[:-1], "completion": row[-1:]} for row in rows]
    examples = prompted if template == UNMARKED else [{"messages": row} for row in rows]
    trainer = SupervisedInOrder(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([examples[index] for index in order]),
        args=SFTConfig(
            **STOCK,
            output_dir=str(tmp_path / "trl"),
            max_length=None if without_padding else 66,
            assistant_only_loss=template == MARKED,
            padding_free=without_padding,
        ),
    )
    check_equal(update, trainer, model, params, tiny, tmp_path / "after")


def test_rows_that_trl_packs_are_learned_as_trl_learns_them(writer_of, spec_of, tmp_path: Path) -> None:
    """TRL makes one row of all conversations, as long as all of them; so does a batch of all."""
    tiny, rows = writer_of("qwen2"), chats(16, turns=2)
    tokenizer = type(tiny.backbone.tokenizer).from_pretrained(tiny.path, chat_template=MARKED)
    texts = [json.dumps(row) for row in rows]
    data = TextEncoder(tokenizer=tokenizer, max_length=66).chats(texts, template=ChatTemplate(tokenizer, None))
    site, params = site_and_params(tiny, data, spec_of(name="a-0", ranks=(1, 4, 2)))
    options = replace(OPTIONS, batch_size=16, epochs=4)
    (update,) = train([Job(client="a-0", params=params, round=1, options=options)], site)

    model = peft_model(tiny, params, tmp_path / "before")
    packed = {"packing": True, "max_length": len(data.ids), "assistant_only_loss": True}
    stock = STOCK | {"per_device_train_batch_size": 1, "num_train_epochs": 4}
    trainer = SupervisedInOrder(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"messages": row} for row in rows]),
        args=SFTConfig(**stock, **packed, output_dir=str(tmp_path / "trl")),
    )
    assert len(trainer.train_dataset) == 1
    check_equal(update, trainer, model, params, tiny, tmp_path / "after")


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("kind", ["DPO", "ORPO"])
def test_preferences_are_learned_as_trl_learns_them(writer_of, spec_of, tmp_path: Path, kind: str, turns: int) -> None:
    """TRL begins with the adapters as its reference, which are the frozen model where B is zero."""
    tiny, rows = writer_of("qwen2"), chats(16, turns=turns)
    others = [[*row[:-1], other[-1]] for row, other in zip(rows, reversed(rows), strict=True)]
    tokenizer = type(tiny.backbone.tokenizer).from_pretrained(tiny.path, chat_template=CLOSED)
    encoder, template = TextEncoder(tokenizer=tokenizer, max_length=66), ChatTemplate(tokenizer, None)
    chosen, rejected = (
        encoder.chats([json.dumps(row) for row in side], template, last=True) for side in (rows, others)
    )
    site, drawn = site_and_params(tiny, replace(chosen, rejected=rejected), spec_of(name="a-0", ranks=(1, 4, 2)))
    params = {key: torch.zeros_like(one) if key.endswith("lora_B") else one for key, one in drawn.items()}
    options = replace(OPTIONS, **{"dpo_beta" if kind == "DPO" else "orpo_lambda": 0.5})
    order = _order_of(site, params, OPTIONS)
    (update,) = train([Job(client="a-0", params=params, round=1, options=options)], site)

    model = peft_model(tiny, params, tmp_path / "before")
    examples = [
        {"prompt": row[:-1], "chosen": row[-1:], "rejected": other[-1:]}
        for row, other in zip(rows, others, strict=True)
    ]
    trainer_of, settings_of = (PreferredInOrder, DPOConfig) if kind == "DPO" else (OddsInOrder, ORPOConfig)
    trainer = trainer_of(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([examples[index] for index in order]),
        args=settings_of(**STOCK, output_dir=str(tmp_path / "trl"), max_length=66, beta=0.5),
    )
    check_equal(update, trainer, model, params, tiny, tmp_path / "after")
