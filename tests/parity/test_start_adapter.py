"""`--init-adapter` against PEFT: what is carried gives PEFT's own logits at the start, the rest is refused by name."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.errors import ModelError
from atlas_fl.models.peft_io import LABELS, SETTINGS, WEIGHTS
from atlas_fl.planning.planner import make_plan
from atlas_fl.planning.start_adapter import load_start_adapter, start_model, start_notes
from atlas_fl.setup.assembly import Assembly, assemble
from tests.architectures import ARCHITECTURES

# PEFT still asks for it under its old name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),  # PEFT takes its own biases of B for factors
]

NAMES = ("high", "low", "mid")
ALPHA = r"the alpha of \S+ in .*adapter_config\.json cannot be read"
MERGE = r"merge it into its base .*merge_and_unload.* and give that as --model DIR"
Adapter = Callable[..., Path]
Started = Callable[..., tuple[Assembly, Tensor, tuple[str, ...]]]


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    """Write an adapter of random factors and a random head with PEFT; the folder."""

    def write(tiny: Any, *, auto: Any = AutoModelForSequenceClassification, labels: int = 3, **settings: Any) -> Path:
        usual = {"task_type": "SEQ_CLS", "r": 4, "lora_alpha": 6, "target_modules": list(tiny.targets)}
        chosen = {**usual, "init_lora_weights": False, "fan_in_fan_out": tiny.name == "gpt2", **settings}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            base = auto.from_pretrained(tiny.path, **({"num_labels": labels} if "Sequence" in auto.__name__ else {}))
            model = get_peft_model(base, LoraConfig(**chosen))
            for name, parameter in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
                    parameter.data.normal_(0, 0.2)
        model.save_pretrained(str(tmp_path / "adapter"))
        return tmp_path / "adapter"

    return write


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The folder of a task of three classes."""
    lines = [f"w{i} w{(3 * i) % 40} w{(7 * i) % 11},{NAMES[i % 3]}" for i in range(40)]
    (tmp_path / "kind.csv").write_text("\n".join(["text,label", *lines, ""]))
    return tmp_path


@pytest.fixture
def started(examples: Path) -> Started:
    """The assembly of a run that starts from this adapter, its logits on test examples, and the notes."""

    def start(tiny: Any, folder: Path, *, rank: int = 4, **values: Any) -> tuple[Assembly, Tensor, tuple[str, ...]]:
        assembly = assemble(run_config_of(examples, tiny, folder, **values))
        found = load_start_adapter(assembly)
        assert found is not None
        ranks = [(rank,) * len(assembly.shape.layers)] * len(assembly.clients)
        client = assembly.clients[0]
        model = start_model(found, assembly, client.task, assembly.initial_params(client, ranks[0]), ranks[0])
        row = collate_packed([assembly.site.data[client.name].splits["test"]], device=torch.device("cpu"))
        with torch.no_grad(), forward(row, [model], assembly.site) as logits:
            return assembly, logits[0], start_notes(found, assembly, ranks)

    return start


def run_config_of(examples: Path, tiny: Any, folder: Path, **values: Any) -> Config:
    usual = {
        **{"model": str(tiny.path), "init_adapter": str(folder), "clients_per_task": 1, "samples": 12, "ranks": "4"},
        **{"validation_samples": 4, "test_samples": 8, "runs_dir": str(examples / "runs"), "name": "run"},
    }
    config = with_values(find_preset("smoke"), {**usual, **values})
    return replace(config, data=replace(config.data, tasks=(), task=(f"kind={examples / 'kind.csv'},text=text",)))


def logits_in_peft(tiny: Any, folder: Path, assembly: Assembly, *, labels: int = 3) -> Tensor:
    """The logits that PEFT gives with this folder on the same test examples, text by text."""
    with torch.random.fork_rng():
        stock = AutoModelForSequenceClassification.from_pretrained(tiny.path, num_labels=labels)
    model = PeftModel.from_pretrained(stock, str(folder)).eval()
    data = assembly.site.data[assembly.names[0]].splits["test"]
    with torch.no_grad():
        pieces = [torch.from_numpy(data.ids[a:b])[None] for a, b in zip(data.offsets[:-1], data.offsets[1:])]
        return torch.cat([model(input_ids=ids).logits for ids in pieces])


def assert_as_in_peft(tiny: Any, folder: Path, found: tuple[Assembly, Tensor, tuple[str, ...]]) -> None:
    assembly, logits, _ = found
    torch.testing.assert_close(logits, logits_in_peft(tiny, folder, assembly), atol=1e-5, rtol=1e-5)


CARRIED: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "a Gaussian start": {"init_lora_weights": "gaussian"},
    "an orthogonal start": {"init_lora_weights": "orthogonal"},
    "some blocks": {"layers_to_transform": [0, 2]},
    "dropout in training": {"lora_dropout": 0.3},
}


@pytest.mark.parametrize(
    ("tiny", "what"),
    [*(("bert", what) for what in CARRIED), *((name, "plain") for name in ARCHITECTURES if name != "bert")],
    indirect=["tiny"],
)
def test_what_is_carried_starts_with_the_logits_of_peft(tiny, adapter: Adapter, started: Started, what: str) -> None:
    folder = adapter(tiny, **CARRIED[what])
    assembly, logits, notes = started(tiny, folder)
    torch.testing.assert_close(logits, logits_in_peft(tiny, folder, assembly), atol=1e-5, rtol=1e-5)
    assert logits.std() > 0.05
    assert not notes


@pytest.mark.parametrize("tiny", ["bert", "gpt2"], indirect=True)
def test_ranks_and_alphas_by_module_are_carried(tiny, adapter: Adapter, started: Started) -> None:
    """Also where modules of one rank have different alphas, and where the run's scale is another one."""
    first = tiny.targets[0]
    patterns = {"rank_pattern": {r".*\.1\..*": 2}, "alpha_pattern": {rf".*\.0\..*{first}": 11, r".*\.2\..*": 3}}
    folder = adapter(tiny, **patterns)
    for values in ({}, {"lora_alpha": 5}, {"rslora": True}):
        assembly, logits, notes = started(tiny, folder, **values)
        torch.testing.assert_close(logits, logits_in_peft(tiny, folder, assembly), atol=1e-5, rtol=1e-5)
        assert not notes


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"target_modules": "all-linear"}, {"targets": "all-linear"}),
        ({"target_modules": r"model\.layers\.(0|1)\.self_attn\.(q_proj|v_proj)"}, {}),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]}, {}),
    ],
    ids=["all-linear", "regex", "exclude"],
)
def test_targets_in_other_words_are_carried(tiny_of, adapter: Adapter, started: Started, settings, values) -> None:
    folder = adapter(tiny_of("llama"), **settings)
    assert_as_in_peft(tiny_of("llama"), folder, started(tiny_of("llama"), folder, **values))


@pytest.mark.parametrize("tiny", ["bert", "gpt2"], indirect=True)
def test_an_adapter_of_the_model_without_a_head_is_carried(tiny, adapter: Adapter, started: Started) -> None:
    bare = adapter(tiny, auto=AutoModel, task_type="FEATURE_EXTRACTION")
    prefix = f"base_model.model.{tiny.backbone.family.prefix}."
    assert not any(name.startswith(prefix) for name in load_file(bare / WEIGHTS))
    assembly, _, notes = started(tiny, bare)
    found = load_start_adapter(assembly)
    assert found is not None and len(found.params) == 2 * len(assembly.site.modules)
    assert notes == (f"the adapter in {bare} has no head; that of kind begins fresh",)
    for name, tensor in load_file(bare / WEIGHTS).items():
        if name.endswith("lora_A.weight"):
            key = name.removeprefix("base_model.model.").removesuffix(".weight")
            assert torch.equal(found.params[key], tensor)


def rewrite(folder: Path, **settings: Any) -> None:
    """Change settings of an adapter; None removes one."""
    found = {**json.loads((folder / SETTINGS).read_text()), **settings}
    (folder / SETTINGS).write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


CHANGED: Mapping[str, Callable[[Path], None]] = {
    "no lora_alpha, for which PEFT has a default": lambda folder: rewrite(folder, lora_alpha=None),
    "an alpha of zero": lambda folder: rewrite(folder, alpha_pattern={r".*\.0\..*": 0}),
    "half precision": lambda folder: spoil(
        folder, lambda own: {name: tensor.to(torch.bfloat16) for name, tensor in own.items()}
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_folder_leaves_out_or_says_otherwise_is_carried(
    tiny_of, adapter: Adapter, started: Started, what: str
) -> None:
    tiny = tiny_of("bert")
    folder = adapter(tiny)
    CHANGED[what](folder)
    assert_as_in_peft(tiny, folder, started(tiny, folder))


def test_a_head_follows_the_names_of_its_classes(tiny_of, adapter: Adapter, started: Started) -> None:
    tiny = tiny_of("roberta")
    folder = adapter(tiny)
    (folder / LABELS).write_text(json.dumps(["mid", "high", "low"]))
    assembly, logits, notes = started(tiny, folder)
    assert assembly.clients[0].task.label_names == NAMES and not notes
    expected = logits_in_peft(tiny, folder, assembly)[:, [1, 2, 0]]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    (folder / LABELS).write_text(json.dumps(["a", "b", "c"]))
    assembly, logits, notes = started(tiny, folder)
    torch.testing.assert_close(logits, logits_in_peft(tiny, folder, assembly), atol=1e-5, rtol=1e-5)
    assert notes == (f"the adapter in {folder} has a head for a, b, c, from which kind with high, low, mid starts",)


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_head_of_other_labels_begins_fresh_and_a_note_says_so(tiny, adapter: Adapter, started: Started) -> None:
    folder = adapter(tiny, labels=5)
    _, logits, notes = started(tiny, folder)
    assert logits.shape[1] == 3
    assert notes == (
        f"the adapter in {folder} has a head of 5 outputs, which does not fit the 3 of kind: its head begins fresh",
    )


def test_a_cut_of_ranks_is_said(tiny_of, adapter: Adapter, started: Started) -> None:
    tiny = tiny_of("bert")
    folder = adapter(tiny, r=16)
    _, _, (note,) = started(tiny, folder, rank=4)
    assert note == (
        f"the adapter in {folder} has ranks of up to 16, and those of kind-0 are lower: they start from its nearest"
        " approximation; --ranks 16 keeps all of it"
    )
    assembly, logits, notes = started(tiny, folder, rank=16)
    torch.testing.assert_close(logits, logits_in_peft(tiny, folder, assembly), atol=1e-5, rtol=1e-5)
    assert not notes


def test_another_base_is_said(tiny_of, adapter: Adapter, started: Started) -> None:
    tiny = tiny_of("bert")
    folder = adapter(tiny)
    rewrite(folder, base_model_name_or_path="some/other")
    _, _, (note,) = started(tiny, folder)
    assert note == (
        f"the adapter in {folder} names the base model some/other, and this run's is {tiny.path}: its start is the"
        " adapter's own only if both have the same weights"
    )


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "has use_dora=True, which plain LoRA has not"),
    "biases of B": ({"lora_bias": True}, "has lora_bias=True, which plain LoRA has not"),
    "biases of adapted layers": ({"bias": "lora_only"}, "has bias='lora_only', which plain LoRA has not"),
    "all biases": ({"bias": "all"}, "has bias='all', which plain LoRA has not"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', which plain LoRA has not"),
    "OLoRA": ({"init_lora_weights": "olora"}, "has init_lora_weights='olora', which plain LoRA has not"),
    "another module": (
        {"modules_to_save": ["embeddings"]},
        r"holds base_model\.model\.bert\.embeddings\.\S+, which is neither a LoRA factor of a block nor of the head",
    ),
    "tokens": ({"trainable_token_indices": [1, 2]}, r"has trainable_token_indices=\[1, 2\], which plain LoRA has not"),
    "layers of the pooler": (
        {"target_modules": ["query", "pooler.dense"]},
        r"holds base_model\.model\.bert\.pooler\.dense\.lora_A\.weight, which is neither a LoRA factor of a block",
    ),
    "embeddings": (
        {"target_modules": ["query", "word_embeddings"]},
        r"holds \S+word_embeddings\.lora_embedding_A, which is neither a LoRA factor of a block nor of the head",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(tiny_of, adapter: Adapter, started: Started, what: str) -> None:
    settings, message = REFUSED[what]
    folder = adapter(tiny_of("bert"), **settings)
    with pytest.raises(ModelError, match=rf"the adapter in {folder} {message}.*; .*{MERGE}") as error:
        started(tiny_of("bert"), folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["DoRA", "all biases", "embeddings"])
def test_the_remedy_for_a_refused_adapter_works(tiny_of, adapter: Adapter, tmp_path: Path, what: str) -> None:
    """The merged folder is a model of which PEFT's logits are those of the adapter on its base."""
    tiny = tiny_of("bert")
    folder = adapter(tiny, **REFUSED[what][0])
    with torch.random.fork_rng():
        stock = AutoModelForSequenceClassification.from_pretrained(tiny.path, num_labels=3)
        model = PeftModel.from_pretrained(stock, str(folder)).eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_every_setting_of_peft_is_carried_or_refused(tiny_of, adapter: Adapter, started: Started) -> None:
    """Also one that only a later PEFT has."""
    tiny = tiny_of("bert")
    folder = adapter(tiny)
    known = json.loads((folder / SETTINGS).read_text())
    for name in ("layer_replication", "use_qalora", "target_parameters", "alora_invocation_tokens", "of_tomorrow"):
        rewrite(folder, **{**known, name: [1]})
        with pytest.raises(ModelError, match=rf"has {name}=\[1\], which plain LoRA has not"):
            started(tiny, folder)


def test_an_adapter_of_the_output_embedding_is_refused(writer_of, adapter: Adapter, started: Started) -> None:
    tiny = writer_of("llama")
    folder = adapter(tiny, auto=AutoModelForCausalLM, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    with pytest.raises(ModelError, match=r"holds base_model\.model\.lm_head\.\S+, which is neither"):
        started(tiny, folder)


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    save_file(dict(change(load_file(folder / WEIGHTS))), folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_before_anything_is_measured(
    tiny_of, adapter: Adapter, examples: Path, value: float
) -> None:
    tiny = tiny_of("bert")
    folder = adapter(tiny)
    spoil(
        folder,
        lambda own: {name: tensor.fill_(value) if "1.attention" in name else tensor for name, tensor in own.items()},
    )
    events: list[str] = []
    with pytest.raises(ModelError, match=r"layer\.1\..* holds NaN or infinite values; give an adapter that has finite"):
        make_plan(run_config_of(examples, tiny, folder), on_event=lambda event: events.append(str(event)))
    assert not any("fingerprints" in event for event in events)


def test_an_adapter_of_other_layers_is_refused_with_the_targets_to_set(
    tiny_of, adapter: Adapter, started: Started
) -> None:
    tiny = tiny_of("bert")
    folder = adapter(tiny, target_modules=["key"])
    with pytest.raises(
        ModelError, match=r"adapts none of the 6 layers that this run does; it adapts key: set --targets"
    ):
        started(tiny, folder)
    assert_as_in_peft(tiny, folder, started(tiny, folder, targets="key"))


UNREADABLE: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "half of a factor": (
        lambda folder: spoil(
            folder, lambda own: {k: t for k, t in own.items() if "0.attention.self.query.lora_B" not in k}
        ),
        r"no A and B of one rank for encoder\.layer\.0\.attention\.self\.query; give",
    ),
    "another width": (
        lambda folder: spoil(
            folder, lambda own: {k: t[:, :16].clone() if "lora_A" in k else t for k, t in own.items()}
        ),
        r"is for layers of 16 to 32 values, and \S+ of .* is of 32 to 32; give its own",
    ),
    "pickled weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        r"no PEFT adapter in .*; give a folder that holds",
    ),
    "an alpha in words": (lambda folder: rewrite(folder, lora_alpha="much"), ALPHA),
    "a pattern that is none": (lambda folder: rewrite(folder, alpha_pattern={"(": 3}), ALPHA),
    "patterns in a list": (lambda folder: rewrite(folder, alpha_pattern=[3]), ALPHA),
    "an infinite alpha": (
        lambda folder: rewrite(folder, lora_alpha=float("inf")),
        r"no PEFT adapter in .*: Infinity is no JSON number; give a folder",
    ),
    "a list": (lambda folder: (folder / SETTINGS).write_text("[]"), "no PEFT adapter in"),
    "half a file": (lambda folder: (folder / SETTINGS).write_text("{"), "no PEFT adapter in"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_folder_that_cannot_be_read_or_does_not_fit_is_one_line(
    tiny_of, adapter: Adapter, started: Started, what: str
) -> None:
    change, message = UNREADABLE[what]
    folder = adapter(tiny_of("bert"))
    change(folder)
    with pytest.raises(ModelError, match=message) as error:
        started(tiny_of("bert"), folder)
    assert "\n" not in str(error.value)


def notes_in_plan(notes: Sequence[str], folder: Path) -> list[str]:
    return [note for note in notes if str(folder) in note]


def test_the_plan_has_the_notes(tiny_of, adapter: Adapter, examples: Path) -> None:
    tiny = tiny_of("bert")
    folder = adapter(tiny, labels=2, r=16)
    plan = make_plan(run_config_of(examples, tiny, folder))
    assert [note.split(" has ")[1][:8] for note in notes_in_plan(plan.notes, folder)] == ["ranks of", "a head o"]
