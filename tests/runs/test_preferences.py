"""Federations that learn preferences (DPO) on a tiny model: trained, audited, gone on with, and across processes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import with_values
from atlas_fl.experiment.answers import evaluate_run
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.planning.round_costs import heaviest_step
from atlas_fl.runtime.protocol.client_metadata import metadata_of, placeholder_client, read_metadata
from atlas_fl.setup.assembly import assemble
from tests.models.stock_folders import save_stock_folder
from tests.runs.conftest import CHAT_TEMPLATE
from tests.runs.federation import Federation
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import Programs
from tests.runs.reading import passing_audit, rows
from tests.runs.sessions import check_same_runs
from tests.runs.workers import in_threads

FORM, COLUMNS = "chat=preference", ("prompt", "chosen", "rejected")


@pytest.fixture
def preferences(config: Make, tmp_path: Path, writer_of: Callable) -> Make:
    """Makes the config of two clients that prefer one answer to others; their rows are in files, too."""
    (tmp_path / "own.jinja").write_text(CHAT_TEMPLATE)
    source = np.random.default_rng(4)
    lines = []
    for number in range(80):
        kind, answers = number // 2 % 2, ("ja", "si")
        asked = "".join(source.choice([*("abcd", "wxyz")[kind]], size=8))
        row = {"prompt": asked, "chosen": answers[kind], "rejected": answers[1 - kind]}
        lines.append(json.dumps(row | {"who": f"who{number % 2}"}) + "\n")
    for name, own in (("pairs", lines), ("wish-0", lines[::2]), ("wish-1", lines[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(own))
    task = f"wish={tmp_path}/pairs.jsonl,{FORM},client=who,template={tmp_path}/own.jinja"
    values = {"ranks": "4", "rounds": 3, "max_length": 32, "lr": 1e-3, "dpo_beta": 0.5, "rouge_examples": 0}
    base = config(strategy="fedavg", clusters="oracle", model=writer_of("qwen2").path, **values)
    base = replace(base, data=replace(base.data, tasks=(), task=(task,), clients_per_task=3, samples=28))
    return lambda **changes: with_values(base, {key: str(value) for key, value in changes.items()})


def preferred(folder: Path) -> list[float]:
    """The mean share of preferred answers of the test splits, by round."""
    found = [row for row in rows(folder) if row.get("split") == "test"]
    by_round = {number: [row["preferred"] for row in found if row["round"] == number] for number in (1, 2, 3)}
    return [float(np.mean(shares)) for shares in by_round.values()]  # type: ignore[arg-type]


@pytest.mark.core
@pytest.mark.parametrize("strategy", ["fedavg", "atlas"])
def test_preferences_are_learned_audited_and_gone_on_with(
    preferences: Make, finished: FinishedRuns, strategy: str
) -> None:
    whole = finished(preferences(strategy=strategy, name="whole"))
    passing_audit(whole.folder)
    assert ("halves" in {row["kind"] for row in rows(whole.folder, "ledger")}) == (strategy == "atlas")
    shares = preferred(whole.folder)
    assert 0.5 < shares[0] < shares[-1] == 1
    parts = run_config(preferences(strategy=strategy, name="parts", max_rounds=1))
    assert not parts.complete
    assert resume_run(parts.folder).complete
    check_same_runs(whole.folder, parts.folder)
    if strategy == "fedavg":
        scores = evaluate_run(whole.folder).scores["who0"]
        assert scores["base"]["preferred"] == 0 < scores["federated"]["preferred"]
        assert scores["federated"]["preferred"] == whole.summary["clients"]["who0"]["final"]["test"]["preferred"]


@pytest.mark.slow
def test_workers_and_a_frozen_prefix_make_the_same_run(preferences: Make, finished: FinishedRuns) -> None:
    how = {"pack_tokens": 300, "adapted_blocks": 1, "rounds": 2}
    whole = finished(preferences(name="whole", **how))
    found = run_config(preferences(name="workers", **how), backend=in_threads(2))
    check_same_runs(whole.folder, found.folder)
    without = run_config(preferences(name="without", prefix_cache_gb=0, **how))
    check_same_runs(whole.folder, without.folder)


@pytest.mark.slow
def test_models_without_packs_learn_preferences(preferences: Make, tmp_path: Path) -> None:
    folder = save_stock_folder(tmp_path / "falcon", "falcon", writes=True)
    file = tmp_path / "pairs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:  # its tokenizer knows words
        words = {name: " ".join(f"w{ord(letter) % 30}" for letter in line[name]) for name in COLUMNS}
        line |= {name: f" {text} " for name, text in words.items()}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run_config(preferences(model=folder, lr=1e-2))
    passing_audit(result.folder)
    assert preferred(result.folder)[-1] > 0.8


@pytest.mark.slow
def test_sites_learn_the_preferences_of_their_own_rows(preferences: Make, tmp_path: Path, programs: Programs) -> None:
    plain = preferences(name="served", pack_tokens=1)
    (task,) = plain.data.task
    config = replace(plain, data=replace(plain.data, task=(task.replace(",client=who", ""),)))
    fed = Federation(config, tmp_path, {"wish-0": "cpu_2gb", "wish-1": "tablet_4gb"}, programs, None)
    server, port = fed.serve()
    started = [server]
    for name, device in fed.sites.items():
        task = f"wish={name}.jsonl,{FORM},template=own.jinja"
        words = ("--certs", f"certs/{name}", "--task", task, "--device", device, "--max-rounds-per-example", "2")
        words += ("--least-examples", "2", *fed.own_model)
        started.append(programs.start("join", f"localhost:{port}", *words, folder=tmp_path))
    for program in started:
        program.end()
    passing_audit(fed.served.path)
    assert preferred(fed.served.path)[-1] > 0.8


def test_answers_before_the_last_are_part_of_the_prompt(preferences: Make, tmp_path: Path) -> None:
    def targets() -> list[list[int]]:
        assembly = assemble(preferences())
        splits = [assembly.site.data[client.name].splits["train"] for client in assembly.clients]
        return [part.num_targets.tolist() for split in splits for part in (split, split.rejected) if part is not None]

    short, file = targets(), tmp_path / "pairs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        asked = [{"role": "user", "content": line["prompt"]}]
        line["prompt"] = [*asked, {"role": "assistant", "content": "why"}, {"role": "user", "content": "so"}]
        line |= {name: [{"role": "assistant", "content": line[name]}] for name in ("chosen", "rejected")}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(short) == 4 and targets() == short


def test_a_step_is_planned_with_the_rejected_answers(preferences: Make) -> None:
    steps = {}
    for beta in ("none", "0.1"):
        assembly = assemble(preferences(dpo_beta=beta))
        steps[beta] = heaviest_step(assembly, assembly.clients[0], None)
        name = assembly.clients[0].name
        _, placed = placeholder_client("a-0", read_metadata(metadata_of(assembly.clients[0], assembly.site.data[name])))
        lengths = [tokens.splits["train"].step_lengths for tokens in (placed, assembly.site.data[name])]
        assert sorted(lengths[0]) == sorted(lengths[1])
    # all answers have two letters
    assert steps["0.1"].tokens == 2 * steps["none"].tokens
    assert steps["0.1"].logits == 2 * steps["none"].logits


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("chat=completion:prompt:chosen", ("--dpo-beta", "0.1"), "task 'wish' has no rejected answers, and --dpo-beta"),
        ("text=prompt,label=chosen", ("--dpo-beta", "0.1"), "task 'wish' has no rejected answers, and --dpo-beta"),
        ("chat=completion:prompt:chosen", ("--orpo-lambda", "0.1"), "answers, and --orpo-lambda learns from them"),
        (FORM, ("--orpo-lambda", "0.1", "--dpo-beta", "0.1"), "--orpo-lambda 0.1 and --dpo-beta 0.1 are two losses"),
        (FORM, ("--orpo-lambda", "0.1", "--label-smoothing", "0.1"), "--orpo-lambda 0.1 takes no pair the wrong way"),
        (FORM, ("--dpo-beta", "0"), "--dpo-beta is 0"),
        (FORM, ("--dpo-beta", "-1"), "--dpo-beta is -1"),
        (FORM, ("--dpo-beta", "0.1", "--split", "1"), "--dpo-beta 0.1 needs log probabilities"),
    ],
)
def test_what_preferences_need_is_said_in_one_line(
    preferences: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, words: Sequence[str], message: str
) -> None:
    config = preferences()
    model = config.model.model
    own = f"wish={tmp_path}/pairs.jsonl,{task}"
    own += f",template={tmp_path}/own.jinja" * task.startswith("chat")
    run = ("run", "--tasks", "wish", "--task", own, "--model", model, "--runs-dir", str(tmp_path / "runs"), *words)
    assert main(run) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said, said
