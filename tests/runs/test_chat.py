"""A federation of conversations on a tiny model: trained, audited, evaluated, asked, exported, and cut."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import Config
from atlas_fl.data.metrics import rouge
from atlas_fl.experiment.answers import evaluate_run, generate
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


@pytest.fixture
def chats(config: Make, tmp_path: Path, writer_of: Callable) -> Config:
    """The config of two clients that answer the same with other words."""
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    source = np.random.default_rng(4)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(80):
            asked, client = "".join(source.choice([*"abcd"], size=6)), ("ja", "si")[number % 2]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": client}]
            file.write(json.dumps({"messages": turns, "land": client}) + "\n")
    task = f"help={tmp_path}/chats.jsonl,chat=messages,client=land,template={tmp_path}/own.jinja"
    base = config(strategy="fedavg", clusters="oracle", ranks="8", rounds=10, max_length=32, lr=3e-2, alone="all")
    data = replace(base.data, tasks=(), task=(task,), clients_per_task=3, samples=40, rouge_examples=4, new_tokens=4)
    return replace(base, data=data, model=replace(base.model, model=str(writer_of("qwen2").path)))


@pytest.mark.core
def test_a_federation_of_conversations_is_evaluated_and_asked(
    chats: Config, finished: FinishedRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    result = finished(chats)
    passing_audit(result.folder)
    found = evaluate_run(result.folder)
    assert found.scores.keys() == {"ja", "si"}
    for client, kinds in found.scores.items():
        assert list(kinds) == ["base", "alone", "federated"]
        final = result.summary["clients"][client]["final"]["test"]
        assert kinds["federated"] == pytest.approx({key: final[key] for key in kinds["federated"]})
        assert kinds["base"]["perplexity"] > 2 * kinds["federated"]["perplexity"]
        assert kinds["alone"]["exact_match"] >= 0.75, "a client alone knows its word"
        own = [answer for answer in found.answers if answer.client == client]
        assert len(own) == 4
        for kind, scores in kinds.items():
            rates = rouge([answer.reference for answer in own], [answer.answers[kind] for answer in own])
            assert rates == {key: scores[key] for key in rates}
        assert all(answer.prompt.startswith("u:") and answer.prompt.endswith("\na:") for answer in own)
    folder = RunFolder(result.folder)
    assert json.loads(folder.evaluation.read_text())["clients"] == found.scores
    assert len(folder.answers.read_text().splitlines()) == 8
    first = found.answers[0]
    asked, client = first.prompt.removeprefix("u:").removesuffix("\na:"), first.client
    assert generate(result.folder, asked, client=client, kind="base", new_tokens=4) == first.answers["base"]
    ask = ["generate", str(result.folder), asked, "--client", client]
    assert main([*ask, "--kind", "alone", "--new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip() == first.answers["alone"]
    assert main(["evaluate", str(result.folder), "--client", client]) == 0
    shown = capsys.readouterr().out
    assert "exact match" in shown and "federated" in shown and "reference: " in shown
    for words, message in (
        (["evaluate", str(result.folder), "--client", "nobody"], "unknown client 'nobody'"),
        (["generate", str(result.folder), "a", "--client", "nobody"], "unknown client 'nobody'"),
        ([*ask, "--new-tokens", "60"], "does not fit into"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
