"""Ours against TRL: one client, one epoch of the same rows, the same losses and the same adapters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from atlas_fl.client.job import ClientTokens, Job, Site
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.data.task import Task
from atlas_fl.models.chat_template import ChatTemplate
from atlas_fl.models.peft_io import export_adapter, import_adapter
from atlas_fl.models.tokenization import encode_chats
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


class InOrder(SFTTrainer):  # type: ignore[misc]
    """A trainer that takes the rows as they come."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize(("template", "turns", "without_padding"), FORMS.values(), ids=FORMS)
def test_losses_and_adapters_equal_trls(
    writer_of, spec_of, tmp_path: Path, template: str, turns: int, without_padding: bool
) -> None:
    tiny, rows = writer_of("qwen2"), chats(16, turns=turns)
    tokenizer = type(tiny.backbone.tokenizer).from_pretrained(tiny.path, chat_template=template)
    texts = [json.dumps(row) for row in rows]
    data = encode_chats(texts, tokenizer=tokenizer, template=ChatTemplate(tokenizer, None), max_length=66)
    assert data.full_lengths is None, "nothing is cut"
    params = {key: one for key, one in tiny.params(spec_of(name="a-0", ranks=(1, 4, 2))).items() if "lora" in key}
    task = Task(name="a", num_labels=0, chat=True, load=lambda _: pytest.fail("nobody reads it"))
    client = ClientTokens(task=task, splits=dict.fromkeys(("train", "validation", "test"), data))
    scale = SCALES["alpha"]
    site = Site(
        backbone=tiny.backbone, data={"a-0": client}, targets=tiny.targets, scale=scale, max_tokens=4096, seed=0
    )
    options = TrainOptions(seed=0, epochs=1, batch_size=4, lr=5e-3, schedule="constant", warmup=0.0, clip=1.0)
    order = _order_of(site, params, options)
    (update,) = train([Job(client="a-0", params=params, round=1, options=options)], site)

    export_adapter(params, tmp_path / "before", family=tiny.backbone.family, base=str(tiny.path), scale=scale)
    base = AutoModelForCausalLM.from_pretrained(tiny.path)
    model = PeftModel.from_pretrained(base, str(tmp_path / "before"), is_trainable=True)
    prompted = [{"prompt": row[:-1], "completion": row[-1:]} for row in rows]
    examples = prompted if template == UNMARKED else [{"messages": row} for row in rows]
    trainer = InOrder(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([examples[index] for index in order]),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            weight_decay=options.weight_decay,
            max_length=None if without_padding else 66,
            assistant_only_loss=template == MARKED,
            padding_free=without_padding,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
    )
    losses = [row["loss"] for row in (trainer.train(), trainer.state.log_history)[1] if "loss" in row]
    model.save_pretrained(str(tmp_path / "after"))
    expected, _ = import_adapter(tmp_path / "after", family=tiny.backbone.family)
    assert len(losses) == 4
    assert update.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert expected.keys() == update.params.keys()
    for key, value in expected.items():
        torch.testing.assert_close(update.params[key], value, atol=1e-4, rtol=1e-4, msg=key)
        assert (value - params[key]).abs().max() > 1e-3, f"{key} did not train"
