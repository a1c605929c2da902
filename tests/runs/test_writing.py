"""A federation that writes text on a tiny GPT-2, from files to exported adapters."""

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_fl.cli.main import main
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.planning.round_costs import heaviest_step
from atlas_fl.setup.assembly import assemble, pack_tokens
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows, same_tensors, state

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counting texts, questions for the next words, and texts to classify."""
    folder, draw = tmp_path_factory.mktemp("files"), random.Random(3)
    starts = [(draw.randrange(34), draw.randrange(3, 7), draw.randrange(40)) for _ in range(150)]
    counted = [" ".join([f"w{end}", *(f"w{start + i}" for i in range(size))]) for start, size, end in starts]
    tables = {
        "notes": ({"text": text} for text in counted),
        "next": ({"ask": f"w{i} w{j} w{k}", "answer": f"w{k} w{i}"} for i, j, k in starts),
        "kind": ({"text": text, "label": int(text.split()[1][1:]) > 15} for text in counted),
    }
    for name, table in tables.items():
        lines = list(table)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
    return folder


@pytest.fixture
def mixed(config: Make, files: Path, writer_of: Callable) -> Make:
    """The config of two clients each that write notes, that write answers, and that classify."""
    tasks = {"notes": "target=text", "next": "text=ask,target=answer", "kind": "text=text"}
    base = config(clusters="oracle", ranks="budget", rounds=2, max_length=16, rouge_examples=3, new_tokens=4)
    data = replace(
        base.data,
        tasks=(),
        task=tuple(f"{name}={files / name}.csv,{options}" for name, options in tasks.items()),
        samples=20,
        validation_samples=8,
        test_samples=8,
    )
    base = replace(base, data=data, model=replace(base.model, model=str(writer_of("gpt2").path)))
    return lambda **changes: replace(base, run=replace(base.run, **changes))


@pytest.mark.slow
def test_text_and_classes_share_a_run_that_passes_its_audit(mixed: Make, finished: FinishedRuns) -> None:
    result = finished(mixed())
    passing_audit(result.folder)
    found = [row for row in rows(result.folder) if "split" in row]
    for row in found:
        writes, held_out = row["task"] != "kind", row["split"] != "train"
        assert ("perplexity" in row) == (writes and held_out)
        assert ("rougeL" in row) == (row["task"] == "next" and row["split"] == "test" and row["round"] == 2)
        assert ("majority" in row) == (not writes)
        if "perplexity" in row:
            assert row["perplexity"] == pytest.approx(math.exp(float(str(row["loss"]))))
            assert row["primary"] == row["accuracy"]
    losses = {(row["client"], row["round"]): float(str(row["loss"])) for row in found if row["split"] == "train"}
    assert all(losses[client, 2] < losses[client, 1] for client, _ in losses if not client.startswith("kind"))
    tests = {task: group["final"]["test"] for task, group in result.summary["tasks"].items()}
    assert "rougeL" in tests["next"] and "perplexity" in tests["notes"] and "perplexity" not in tests["kind"]
    assert "perplexity" not in result.summary["overall"]["final"]["test"], "not every client has one"
    sent = rows(result.folder, "ledger")
    assert {str(row["client"])[:4] for row in sent if row["kind"] == "head"} == {"kind"}
    plan = json.loads((result.folder / "plan.json").read_text())
    assert "words" in plan["data"][0] and "labels" in plan["data"][-1]


def test_a_stopped_and_resumed_run_ends_in_the_same_bits(mixed: Make, finished: FinishedRuns) -> None:
    whole, parts = finished(mixed(name="whole")), run_config(mixed(name="parts", max_rounds=1))
    assert not parts.complete
    parts = resume_run(parts.folder)
    assert parts.complete
    assert same_tensors(state(whole.folder, round=2), state(parts.folder, round=2))
    assert rows(whole.folder) == rows(parts.folder)


def test_an_exported_adapter_gives_stock_transformers_the_recorded_perplexity(
    mixed: Make, finished: FinishedRuns, writer_of: Callable
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = mixed()
    result = finished(made)
    settings = json.loads((result.folder / "adapters/next-1/adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("CAUSAL_LM", None)
    site = assemble(made).site
    for client in ("notes-0", "next-1"):
        stock = AutoModelForCausalLM.from_pretrained(writer_of("gpt2").path)
        model = PeftModel.from_pretrained(stock, str(result.folder / "adapters" / client)).eval()
        data, nats = site.data[client].splits["test"], 0.0
        for i in range(len(data)):
            one = data.take(np.array([i]))
            labels = torch.from_numpy(np.where(one.target_mask, one.ids, -100))[None]
            with torch.no_grad():
                nats += float(model(input_ids=torch.from_numpy(one.ids)[None], labels=labels).loss) * one.num_targets[0]
        (row,) = (
            r for r in rows(result.folder) if (r.get("client"), r.get("split"), r["round"]) == (client, "test", 2)
        )
        assert row["perplexity"] == pytest.approx(math.exp(nats / data.num_targets.sum()), rel=1e-4)


def test_a_run_starts_from_an_exported_adapter_that_writes(mixed: Make, finished: FinishedRuns) -> None:
    first = finished(mixed(name="first"))
    made = mixed(name="second")
    folder = first.folder / "adapters/next-0"
    second = run_config(replace(made, model=replace(made.model, init_adapter=str(folder))))

    def loss(folder: Path, at: int) -> float:
        found = (r for r in rows(folder) if (r.get("client"), r.get("split"), r["round"]) == ("next-0", "train", at))
        return float(str(next(found)["loss"]))

    assert loss(second.folder, 1) < loss(first.folder, 2) < loss(first.folder, 1)


@pytest.mark.parametrize("kind", ["gradient", "fisher", "delta"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedavg_cluster"])
def test_every_fingerprint_and_average_takes_clients_without_heads(mixed: Make, kind: str, strategy: str) -> None:
    made = mixed()
    made = replace(made, clustering=replace(made.clustering, fingerprint=kind, clusters="2"))
    result = run_config(replace(made, mixing=replace(made.mixing, strategy=strategy)))
    assert result.complete
    passing_audit(result.folder)


def test_logits_are_counted_in_memory_and_packs(mixed: Make) -> None:
    made = mixed()
    assembly = assemble(made)
    size = len(assembly.site.backbone.vocabulary)
    assert assembly.shape.vocabulary == size == 41
    for client in assembly.clients:
        own = assembly.site.data[client.name].splits["train"].num_targets
        most = int(np.sort(own)[::-1][: made.training.batch_size].sum())
        assert heaviest_step(assembly, client, None).logits == most * size
    # 4 copies of 4 bytes for each of a vocabulary that is all that counts
    big = replace(assembly.shape, vocabulary=50_000_000)
    made = replace(made, training=replace(made.training, pack_memory_gb=4.0))
    assert pack_tokens(made, big, cuda=False) == int(4 * 2**30 / (16 * 50_000_000))


def test_prompts_are_for_as_many_examples_as_asked_and_short_enough(mixed: Make) -> None:
    made = mixed()
    found = assemble(made).site.data["next-0"].prompts
    assert set(found) == {"validation", "test"}
    assert [len(found[split].references) for split in ("validation", "test")] == [3, 3]
    assert assemble(made).site.data["notes-0"].prompts == {}
    none = replace(made, data=replace(made.data, rouge_examples=0))
    assert assemble(none).site.data["next-0"].prompts == {}
    tight = replace(made, data=replace(made.data, new_tokens=62))
    assert assemble(tight).site.data["next-0"].prompts["test"].encoded.lengths.max() == 2, "of GPT-2's 64 positions"


def words(model: Path, runs: Path, *more: str) -> list[str]:
    sizes = ["--clients-per-task", "1", "--samples", "8", "--validation-samples", "4", "--test-samples", "4"]
    return ["run", "--tasks", "--model", str(model), "--runs-dir", str(runs), *sizes, *more]


def test_a_model_that_cannot_write_is_one_line(files: Path, tiny_model: Path, tmp_path, capsys) -> None:
    assert main(words(tiny_model, tmp_path, "--task", f"notes={files}/notes.csv,target=text")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "architecture 'bert', which cannot write text" in line
    assert "choose a model of gemma2, gemma3_text, gpt2, llama," in line
    assert not list(tmp_path.iterdir())


def test_answers_longer_than_the_model_are_one_line(files: Path, writer_of: Callable, tmp_path, capsys) -> None:
    task = f"next={files}/next.csv,text=ask,target=answer"
    assert main(words(writer_of("gpt2").path, tmp_path, "--task", task, "--new-tokens", "64")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--new-tokens is 64 and" in line and "positions for 64 tokens" in line


def test_nobody_is_warned_of_padding_that_is_not_there(mixed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's texts end with the token that it pads with."""
    from transformers import modeling_utils

    def warned(text: str, *_: object) -> None:
        assert "attention_mask" not in text

    monkeypatch.setattr(modeling_utils.logger, "warning_once", warned)
    assert run_config(mixed(name="quiet")).complete
