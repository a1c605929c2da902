"""What is exported scores, in plain transformers and PEFT, what was evaluated: every method, family and task."""

import csv
import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModelForSequenceClassification
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import AutoImageProcessor, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from atlas_fl.cli.main import main
from atlas_fl.config import Config, validate, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Images, Rows
from atlas_fl.experiment.export import LACKS_PRIOR, export_client
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.models.stock import NOTE
from atlas_fl.setup.assembly import load_clients
from tests.architectures import ARCHITECTURES, QUICK_ARCHITECTURES
from tests.models.stock_folders import SIZES, save_stock_folder
from tests.models.tiny_vision import save_tiny
from tests.runs.conftest import saved_once
from tests.runs.covering import with_marks
from tests.runs.finished import Make
from tests.runs.reading import rows, same_tensors, state

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MAX_LENGTH = 60
CAUSAL = ("gpt2", "qwen2", "llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3_text")
TASKS: Mapping[str, str] = {
    "kind": "text=text",
    "same": "text=text,pair=other,label=label",
    "grade": "text=text,label=score,metric=pearson",
    "next": "text=ask,target=answer",
}
"""Classes, pairs, a regression and texts to be written, each with what is said of its file."""
MULTILABEL: Mapping[str, str] = {"tags": "text=text,label=tags,multi=;"}
"""Apart, since class frequencies do not go with it."""
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "fedavg_dynamic": {"proximal_mu": 0.1, "space": "factors"},
    **{name: {"space": "factors"} for name in ("fedavg_stacked", "fedavg_with_residual", "fedavg_by_rank_one")},
    "kriging": {"measure_round": 1},
    "ravan": {"ravan_heads": 2},
    "hsplitlora": {"ranks": "budget"},
    **{name: {"personal_rounds": 1, "rounds": 2} for name in ("fedbabu", "fedavg_ft", "fedavg_cluster_ft")},
    "hilora": {"personal_rounds": 1, "rounds": 3},
}
"""What a method needs beside its name."""
EVERY_METHOD = sorted({*METHODS, *RULES} - {row.rule for row in METHODS.values()} - {"fedalt", "fedlease_router"})
"""Methods, and the rules that no method has: what a method exports is what its rule has left. PEFT has no gate."""
ALL_FAMILIES = with_marks(ARCHITECTURES, (*QUICK_ARCHITECTURES, "phi3", "qwen3", "gemma3_text", "xlm-roberta"))
QUICK = (
    *("atlas_pad", "centralized", "fedalt_fixed", "fedbabu", "fedex", "fedpac", "ffa", "flora", "hsplitlora"),
    *("kriging", "local_prior", "mr_mtl_cluster"),
)
"""Methods that leave models of other kinds behind; the others differ in how a server mixes."""
OF_CLASSES = ("fedpac", "classifier_collaboration")
"""Methods that compare features by classes of texts."""
OF_HEADS = ("fedrep", "linear_probe")
"""Methods that train heads in a phase of its own, or heads alone."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each task, of words that the tiny tokenizers know; classes are of unequal frequencies."""
    folder, draw = tmp_path_factory.mktemp("files"), random.Random(5)
    texts = [" ".join(f"w{draw.randrange(40)}" for _ in range(draw.randrange(2, 7))) for _ in range(160)]
    numbers = [int(text.split()[0][1:]) for text in texts]
    tables: Mapping[str, Sequence[Mapping[str, object]]] = {
        "kind": [{"text": t, "label": ("low", "low", "high", "mid")[n % 4]} for t, n in zip(texts, numbers)],
        "same": [
            {"text": t, "other": o, "label": "yes" if n % 5 else "no"}
            for t, o, n in zip(texts, reversed(texts), numbers)
        ],
        "grade": [{"text": t, "score": n / 40 + 0.01 * i / 160} for i, (t, n) in enumerate(zip(texts, numbers))],
        "tags": [
            {"text": t, "tags": ";".join(name for k, name in enumerate(("old", "new", "big")) if n >> k & 1)}
            for t, n in zip(texts, numbers)
        ],
        "next": [{"ask": t, "answer": f"w{n} w{(n + 1) % 40}"} for t, n in zip(texts, numbers)],
    }
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    return folder


@pytest.fixture
def small(
    config: Make, files: Path, tiny_of: Callable, writer_of: Callable, shared_folder: Path, tmp_path: Path
) -> Make:
    """Two clients of each of these tasks for one round on a tiny model of a family."""

    def make(family: str, tasks: Sequence[str], **values: object) -> Config:
        usual: dict[str, object] = {
            **{
                **{"rounds": 1, "audit": False, "ranks": "2", "max_length": MAX_LENGTH, "new_tokens": 1},
                **{"rouge_examples": 1},
            },
            **{"samples": 12, "validation_samples": 6, "test_samples": 8, "lr": 0.02, "clusters": "oracle"},
        }
        base = config(**{**usual, **values})
        columns = {**TASKS, **MULTILABEL}
        sources = tuple(f"{name}={files / name}.csv,{columns[name]}" for name in tasks)
        data = replace(base.data, tasks=(), task=sources)
        writes = "next" in tasks
        if family in SIZES:
            folder = shared_folder / f"stock-{family}-{writes}"
            path = saved_once(folder, lambda to: save_stock_folder(to, family, writes=writes))
        else:
            path = (writer_of if writes else tiny_of)(family).path
        if family == "bert":
            path = with_types(path, tmp_path / "bert")
        return replace(base, data=data, model=replace(base.model, model=str(path)))

    return make


def with_types(model: Path, to: Path) -> Path:
    """The model with a tokenizer that gives the types of a pair's texts without being asked, as BERT's own does."""
    shutil.copytree(model, to, dirs_exist_ok=True)
    settings = json.loads((to / "tokenizer_config.json").read_text())
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    (to / "tokenizer_config.json").write_text(json.dumps(settings | {"model_input_names": inputs}))
    return to


def load_by_card(folder: Path, text: str = "a new text") -> tuple[nn.Module, Tensor | float]:
    """The model that the code in a folder's README leaves, and what it says is to be added to the logits."""
    card = (folder / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace('folder = "."', f"folder = {str(folder)!r}").replace('"a new text"', repr(text)), names)
    missing = names.get("log_frequencies")
    assert ("Missing: " in card) == (missing is not None)
    return names["model"], 0.0 if missing is None else torch.tensor(missing)


def plain_loss(model: nn.Module, added: Tensor | float, client: ClientData, base: str) -> float:
    """The mean loss over a client's test examples, text by text, by stock parts alone."""
    tokenizer, test = AutoTokenizer.from_pretrained(base), client.test
    assert isinstance(test, Rows)
    losses, weights = [], []
    for i, text in enumerate(test.text):
        pair = None if test.pair is None else test.pair[i]
        with torch.no_grad():
            if client.task.writes:
                prompt, answer = tokenizer(text + "\n")["input_ids"], tokenizer(pair, add_special_tokens=False)
                written = [*answer["input_ids"], tokenizer.eos_token_id]
                if model.config.is_encoder_decoder:
                    output = model(input_ids=torch.tensor([prompt]), labels=torch.tensor([written]))
                    losses.append(float(output.loss))
                    weights.append(len(written))
                    continue
                logits = model(input_ids=torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
                losses.append(float(cross_entropy(logits, torch.tensor(written))))
                weights.append(len(written))
                continue
            inputs = tokenizer(text, pair, return_tensors="pt", truncation=True, max_length=MAX_LENGTH)
            logits = model(**inputs).logits + added
        label = torch.tensor(test.label[i : i + 1])
        if client.task.multilabel:
            assert model.config.problem_type == "multi_label_classification"
            with torch.no_grad():  # transformers' own loss of that type
                losses.append(float(model(**inputs, labels=label).loss))
            weights.append(1)
            continue
        loss = mse_loss(logits[:, 0], label) if client.task.is_regression else cross_entropy(logits, label)
        losses.append(float(loss))
        weights.append(1)
    return sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)


def image_loss(model: nn.Module, added: Tensor | float, client: ClientData, base: str) -> float:
    """The mean loss over a client's test images, by stock parts alone."""
    test = client.test
    assert isinstance(test, Images)
    pictures = [Image.fromarray(pixels.squeeze()).convert("RGB") for pixels in test.pixels]
    inputs = AutoImageProcessor.from_pretrained(base)(pictures, return_tensors="pt")
    with torch.no_grad():
        return float(cross_entropy(model(**inputs).logits + added, torch.from_numpy(test.label)))


def evaluated_losses(result: RunResult) -> dict[str, float]:
    """The test loss of every client that the run has recorded last."""
    return {
        str(row["client"]): float(str(row["loss"]))
        for row in rows(result.folder)
        if row.get("split") == "test" and "loss" in row
    }


def adapter_of(result: RunResult, client: str) -> Path:
    """The file of the adapter of this client that the run has left."""
    return result.folder / "adapters" / client / "adapter_model.safetensors"


def check(config: Config) -> RunResult:
    """The run of this config; raises AssertionError where an exported folder scores other than the run."""
    result = run_config(config)
    losses = evaluated_losses(result)
    clients = {client.name: client for client in load_clients(validate(config))}
    assert losses and losses.keys() == clients.keys()
    parts = [path for path in (result.folder / "adapters", result.folder / "models") if path.exists()]
    for name, loss in losses.items():
        (folder,) = (path / name for path in parts)
        model, added = load_by_card(folder)
        client = clients[name]
        score = image_loss if client.task.images else plain_loss
        assert score(model, added, client, config.model.model) == pytest.approx(loss, abs=1e-5, rel=1e-5), name
        if client.task.num_labels > 1:
            assert tuple(model.config.id2label.values()) == client.task.label_names
    return result


GLOBAL = ("fedavg", "flora", "fedavgm", "scaffold")


@pytest.mark.parametrize("method", with_marks(GLOBAL, ("fedavg", "flora")))
def test_the_global_model_scores_for_every_client_what_its_own_was_scored(
    small: Make, tmp_path: Path, method: str
) -> None:
    config = small("bert", ("kind",), strategy=method, rounds=2)
    result, to = run_config(config), tmp_path / "global"
    assert main(["export", str(result.folder), "--global", "--to", str(to)]) == 0
    model, added = load_by_card(to)
    clients = {client.name: client for client in load_clients(validate(config))}
    for name, loss in evaluated_losses(result).items():
        assert same_tensors(load_file(to / "adapter_model.safetensors"), load_file(adapter_of(result, name)))
        assert plain_loss(model, added, clients[name], config.model.model) == pytest.approx(loss, abs=1e-5)


NO_GLOBAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "local": ("nothing is sent under its method", {}),
    "fedavg_prior": ("each client's scores have its own class frequencies (--prior-correction)", {}),
    "fedavg_ft": ("its 2 clients end with 2 different models", {"personal_rounds": 1, "rounds": 2}),
}


def test_of_very_many_clients_models_are_written_when_they_are_asked_for(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = run_config(small("bert", ("kind",), strategy="fedavg", rounds=1))
    monkeypatch.setattr("atlas_fl.experiment.export.MOST_EXPORTED", 1)
    notes: list[str] = []
    config = small("bert", ("kind",), strategy="fedavg", rounds=1, name="many")
    many = run_config(config, on_event=lambda event: notes.append(getattr(event, "text", "")))
    said = f"2 models are not written one by one; `atlas export {many.folder} --client NAME --to FOLDER` writes one"
    assert said in notes and not (many.folder / "adapters").exists()
    written = export_client(many.folder, client="kind-0", to=tmp_path / "one")
    name = "adapter_model.safetensors"
    assert (written / name).read_bytes() == (few.folder / "adapters/kind-0" / name).read_bytes()


@pytest.mark.parametrize("method", NO_GLOBAL)
def test_who_has_no_global_model_says_why(
    small: Make, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reason, values = NO_GLOBAL[method]
    folder = run_config(small("bert", ("kind",), strategy=method, **values)).folder
    assert main(["export", str(folder), "--global", "--to", str(tmp_path / "to")]) == 2
    said = capsys.readouterr().err
    assert f"--strategy {method} has left no global model: {reason}" in said
    assert said.endswith("export one with --client kind-0\n")
    assert main(["export", str(folder), "--to", str(tmp_path / "to")]) == 2
    assert "was given neither of --client NAME and --global" in capsys.readouterr().err


@pytest.mark.parametrize("method", with_marks(EVERY_METHOD, QUICK))
def test_every_method_exports_what_it_has_evaluated(small: Make, method: str) -> None:
    """On a family in turn."""
    turn = EVERY_METHOD.index(method) % len(ARCHITECTURES)
    family = "bert" if method in OF_CLASSES else ARCHITECTURES[turn]
    check(small(family, ("kind",), strategy=method, **NEEDED.get(method, {})))


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_and_task_exports_what_it_has_evaluated(small: Make, family: str) -> None:
    """Under class frequencies of each client's own, which some heads can hold and others cannot."""
    tasks = tuple(TASKS) if family in CAUSAL else tuple(TASKS)[:-1]
    check(small(family, tasks, strategy="fedavg_prior"))
    check(small(family, tuple(MULTILABEL), name="tags"))


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_on_every_family_and_task_exports_what_it_has_evaluated(
    small: Make, method: str, family: str
) -> None:
    tasks = tuple(TASKS) if family in CAUSAL and method not in OF_HEADS else tuple(TASKS)[:-1]
    tasks = ("kind", "same") if method in OF_CLASSES else tasks
    check(small(family, tasks, strategy=method, **NEEDED.get(method, {})))


STOCK: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, Any]]] = {
    "pairs and numbers": ("modernbert", ("kind", "same", "grade"), {"strategy": "fedavg_prior"}),
    "measured": ("deberta-v3", ("kind",), {"strategy": "kriging", "measure_round": 1, "ranks": "budget"}),
    "stacks": ("deberta-v2", ("kind",), {"strategy": "fedalt_fixed", "ranks": "4"}),
    "several labels": ("modernbert", ("tags", "kind"), {"strategy": "atlas"}),
    "features by class": ("albert", ("kind", "same"), {"strategy": "fedpac", "fingerprint_blocks": 1}),
    "in one place": ("falcon", ("kind", "grade"), {"strategy": "centralized"}),
    "an encoder's and a decoder's classes": ("t5", ("kind",), {"fingerprint": "delta", "dropout": 0.1}),
    "writes on": ("falcon", ("next",), {"adapted_blocks": 1}),
    "writes from what it read": ("t5", ("next",), {"ranks": "budget", "new_tokens": 3}),
}
"""Architectures without packs, each with other features of a run."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", STOCK)
def test_the_stock_path_exports_what_it_has_evaluated(small: Make, kind: str) -> None:
    family, tasks, values = STOCK[kind]
    result = check(small(family, tasks, **values))
    assert NOTE in (result.folder / "log.txt").read_text()
    first, *_ = sorted((result.folder / "adapters").iterdir())
    again = export_client(result.folder, client=first.name, to=result.folder.parent / "again")
    for path in first.iterdir():
        if path.suffix == ".safetensors":
            assert same_tensors(load_file(path), load_file(again / path.name))
        else:
            told = (again / path.name).read_text().partition("\n## Where it comes from")[0]
            assert sorted(path.read_text()) == sorted(told)


WHOLE: Mapping[str, Any] = {
    **{"trainable": "full", "lr": 1e-3, "candidates": "4+8+16+32+64", "adapter_bytes": "none", "ranks": "budget"},
    **{"fingerprint": "fisher", "fingerprint_steps": 4, "fingerprint_batches": 2},
}
"""Settings of whole text models."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_whole_text_models_export_what_they_have_evaluated(small: Make, family: str) -> None:
    check(small(family, ("kind", "same", "grade"), strategy="fedavg_cluster_prior", **WHOLE))
    of_two_rounds = NEEDED["fedavg_cluster_ft"]
    check(small(family, ("tags",), strategy="fedavg_cluster_ft", name="tags", **WHOLE, **of_two_rounds))


_WHOLE_IMAGES = {"strategy": "fedavg_cluster_prior", "local_steps": 2, "lr": 0.02, "momentum": 0}
IMAGE_RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adapters": ("vision-lora", {"strategy": "fedavg_prior", "fingerprint_steps": 2}),
    "adapters through the stock path": (
        "vision-lora",
        {"model": "swin", "fingerprint_steps": 2, "targets": "all-linear"},
    ),
    "stacked adapters": ("vision-lora", {"strategy": "fedalt_fixed", "ranks": "4", "fingerprint_steps": 2}),
    "whole models": ("vision-quick", _WHOLE_IMAGES),
    "whole models of convolutions": ("vision-quick", {**_WHOLE_IMAGES, "model": "resnet"}),
    "whole models under a mask": ("vision-quick", {**_WHOLE_IMAGES, "mask": "least_sensitive"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", IMAGE_RUNS)
def test_image_models_export_what_they_have_evaluated(kind: str, shared_folder: Path, tmp_path: Path) -> None:
    preset, values = IMAGE_RUNS[kind]
    architecture = values.get("model", "vit")
    model = saved_once(shared_folder / f"exported-{architecture}", lambda folder: save_tiny(folder, architecture))
    values = {**values, "model": str(model)}
    usual = {
        **{"image_size": 16, "tasks": "digits", "clients_per_task": 2, "participation": 1},
        **{"samples": 24, "validation_samples": 8, "test_samples": 10, "rounds": 1, "clusters": "oracle"},
        **{"runs_dir": str(tmp_path / "runs"), "name": "run", "audit": False},
    }
    check(with_values(find_preset(preset), {**usual, **values}))


def shown(model: Any, text: str, **parts: Any) -> dict[str, float]:
    """The score of each class by its name, as a pipeline shows it."""
    (classes,) = pipeline("text-classification", model=model, top_k=None, **parts)([text])
    return {one["label"]: one["score"] for one in classes}


@pytest.mark.parametrize(
    ("family", "task", "words"),
    [
        ("bert", "kind", {}),
        ("llama", "kind", {"strategy": "fedavg_prior"}),  # whose frequencies no bias holds
        ("bert", "tags", {}),
        ("bert", "grade", {}),
    ],
)
def test_the_lines_of_a_card_print_what_was_predicted_for_each_test_text(
    small: Make, capsys: pytest.CaptureFixture[str], family: str, task: str, words: Mapping[str, Any]
) -> None:
    config = small(family, (task,), **words)
    result = run_config(config)
    client, test = next((own, own.test) for own in load_clients(config) if own.name == f"{task}-1")
    assert isinstance(test, Rows)
    printed: list[str] = []
    for text in test.text:
        capsys.readouterr()
        load_by_card(result.folder / f"adapters/{task}-1", text)
        printed.append(capsys.readouterr().out.strip())
    names = client.task.label_names
    if task == "grade":
        score = float(np.corrcoef([float(line) for line in printed], test.label)[0, 1])
    elif task == "tags":
        taken = np.array([[name in line for name in names] for line in printed])
        score = 2 * (taken * test.label).sum() / (taken.sum() + test.label.sum())  # F1 over all labels
    else:
        score = np.mean([line == names[label] for line, label in zip(printed, test.label, strict=True)])
        assert set(printed) <= {*names}
    assert score == pytest.approx(result.summary["clients"][client.name]["final"]["test"]["primary"], abs=1e-5)


@pytest.mark.slow
def test_a_pipeline_shows_the_names_of_classes(small: Make) -> None:
    """By PEFT's model of the card, by the folder's name alone in transformers, and by a whole model's folder."""
    base = small("bert", ("kind",))
    result = run_config(base)
    whole = run_config(small("bert", ("kind",), strategy="fedavg_cluster", name="whole", **WHOLE))
    folder, text = result.folder / "adapters/kind-0", "w3 w7 w1"
    model, _ = load_by_card(folder)
    tokenizer = AutoTokenizer.from_pretrained(base.model.model)
    with torch.no_grad():
        chances = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
    expected = {name: float(chances[index]) for index, name in enumerate(("high", "low", "mid"))}
    labels = json.loads((folder / "labels.json").read_text())
    head = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    stock = AutoModelForSequenceClassification.from_pretrained(folder, **head)
    for own in (model, stock):
        assert shown(own, text, tokenizer=tokenizer) == pytest.approx(expected, abs=1e-5)
    for whole_folder in (whole.folder / "models").iterdir():
        assert shown(str(whole_folder), text).keys() == expected.keys()


def test_a_pipeline_shows_the_value_of_a_regression(small: Make) -> None:
    """The sigmoid of it, without the problem's type."""
    for words in ({}, {"name": "whole", "strategy": "fedavg_cluster", **WHOLE}):
        config = small("bert", ("grade",), **words)
        folder = run_config(config).folder
        (exported,) = (path for path in folder.glob("*/grade-0") if path.parent.name in ("adapters", "models"))
        model, _ = load_by_card(exported)
        tokenizer = AutoTokenizer.from_pretrained(config.model.model)
        with torch.no_grad():
            value = float(model(**tokenizer("w3 w7", return_tensors="pt")).logits[0, 0])
        (score,) = shown(model, "w3 w7", tokenizer=tokenizer).values()
        assert score == pytest.approx(value, abs=1e-6)


def test_peft_s_auto_class_takes_six_classes(config: Make) -> None:
    folder = run_config(config(rounds=1, audit=False)).folder / "adapters/trec-0"
    model, _ = load_by_card(folder)
    assert isinstance(model, PeftModelForSequenceClassification)
    assert model.config.num_labels == 6
    assert model.config.id2label == dict(enumerate(json.loads((folder / "labels.json").read_text())))
    assert model.config.label2id["ABBR"] == 0


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_head_without_a_bias_is_said_to_lack_class_frequencies(small: Make, family: str, tmp_path, capsys) -> None:
    notes: list[str] = []
    config = small(family, ("kind",), strategy="fedavg_prior")
    result = run_config(config, on_event=lambda event: notes.append(str(event)))
    said = f"exported models are not whole: {LACKS_PRIOR}, which each README.md lists"
    assert (said in notes) == (family == "llama")
    capsys.readouterr()
    assert main(["export", str(result.folder), "--client", "kind-1", "--to", str(tmp_path / "own")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (said in shown) == (family == "llama")
    for folder in (tmp_path / "own", result.folder / "adapters/kind-1"):
        card = (folder / "README.md").read_text()
        assert (f"Missing: {LACKS_PRIOR}." in card) == (family == "llama")
        assert same_tensors(
            load_file(folder / "adapter_model.safetensors"),
            load_file(result.folder / "adapters/kind-1/adapter_model.safetensors"),
        )


def test_class_frequencies_in_a_bias_by_hand(small: Make) -> None:
    """log((n + 1) / (N + C)) is what the exported bias has beside the model's own."""
    config = small("bert", ("kind",), strategy="fedavg_prior")
    folder, clients = run_config(config).folder, load_clients(validate(config))
    models = state(folder, round=1)
    for client in clients:
        counts = [int((client.train.label == k).sum()) for k in range(3)]
        prior = torch.tensor([math.log((count + 1) / (sum(counts) + 3)) for count in counts])
        exported = load_file(folder / "adapters" / client.name / "adapter_model.safetensors")
        own = next(models[key] for key in models if key.endswith("head.classifier.bias"))
        torch.testing.assert_close(exported["base_model.model.classifier.bias"] - own, prior, atol=1e-6, rtol=1e-5)
        assert len(set(counts)) > 1


def test_an_adapter_on_a_folder_of_the_hubs_cache_names_the_model_of_the_hub(
    config: Make, tiny_model: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub/models--acme--tiny-bert/snapshots/c0ffee"
    shutil.copytree(tiny_model, snapshot)
    made = run_config(config(tasks="movie", rounds=1, model=str(snapshot), alone="none"))
    (adapter, *_) = sorted((made.folder / "adapters").iterdir())
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "acme/tiny-bert"
    assert str(tmp_path) not in (adapter / "README.md").read_text()
