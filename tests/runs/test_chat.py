"""A federation of conversations on a tiny model: trained, audited, evaluated, asked, exported, and cut."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from atlas_fl.cli.main import main
from atlas_fl.config import Config
from atlas_fl.data.metrics import rouge
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.answers import KINDS, evaluate_run, generate, read_evaluation
from atlas_fl.experiment.choices import find_choices, log_likelihoods
from atlas_fl.experiment.export import export_client, load_models
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import FinishedRuns
from tests.runs.reading import passing_audit


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
    assert "ROUGE-L" in shown and "federated" in shown and "reference: " in shown
    for words, message in (
        (["evaluate", str(result.folder), "--client", "nobody"], "unknown client 'nobody'"),
        (["generate", str(result.folder), "a", "--client", "nobody"], "unknown client 'nobody'"),
        ([*ask, "--new-tokens", "60"], "does not fit into"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.core
def test_choices_are_as_likely_as_stock_transformers_and_peft_find_them(
    chats: Config, finished: FinishedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished(chats).folder
    assembly = assemble(chats)
    (client,) = (one for one in assembly.clients if one.name == "ja")
    offered = find_choices(client, "test", given=("ja", "si", "si si"), site=assembly.site, config=chats.data)
    assert offered is not None and offered.left_out == 0
    found = log_likelihoods(offered, load_models(RunFolder(folder))["ja"], client="ja", site=assembly.site)
    tokenizer = AutoTokenizer.from_pretrained(chats.model.model)
    base = AutoModelForCausalLM.from_pretrained(chats.model.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, export_client(folder, client="ja", to=tmp_path / "ja")).eval()
    for text, likely in zip(client.test.text, found, strict=True):
        prompt = f"u:{json.loads(text)[0]['content']}\na:"
        before = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        for choice, value in zip(("ja", "si", "si si"), likely, strict=True):
            ids = torch.tensor([tokenizer(prompt + choice, add_special_tokens=False)["input_ids"]])
            with torch.no_grad():
                logs = model(ids).logits.log_softmax(-1)[0, before - 1 : -1]
            assert value == pytest.approx(logs.gather(1, ids[0, before:, None]).sum().item(), abs=1e-4)
    assert main(["evaluate", str(folder), "--choices", "ja", "no"]) == 0
    assert "choice" in capsys.readouterr().out
    evaluation = read_evaluation(RunFolder(folder))
    assert evaluation is not None and evaluation.scores["ja"]["federated"]["acc"] == 1.0
    assert "acc" not in evaluation.scores["si"]["federated"]
    for words in (["oui", "non"], ["ja"], ["ja,si"], ["answers"]):  # a client's rows have one answer
        with pytest.raises(
            ConfigError, match=f"no test row is answered by one of --choices {' '.join(words)}; name two"
        ):
            evaluate_run(folder, choices=words)


def test_rows_with_choices_of_their_own_are_scored_without_being_told(
    chats: Config, finished: FinishedRuns, tmp_path: Path
) -> None:
    with (tmp_path / "quiz.jsonl").open("w") as file:
        for number in range(60):
            right = "abab"[number % 2 :][:1]
            row = {"question": f"{right}{number}", "choices": ["ja", "si"], "answer": "ab".index(right)}
            file.write(json.dumps(row) + "\n")
    task = f"quiz={tmp_path}/quiz.jsonl,chat=choices,template={tmp_path}/own.jinja"
    config = replace(chats, data=replace(chats.data, task=(task,), clients_per_task=2, rouge_examples=0))
    folder = finished(replace(config, training=replace(config.training, rounds=12))).folder
    found = evaluate_run(folder)
    assert found.mean("federated", "acc") == 1.0 > found.mean("base", "acc")
    again = evaluate_run(folder, choices=["answers"])
    assert [again.mean(kind, "acc") for kind in KINDS] == [found.mean(kind, "acc") for kind in KINDS]
    assert not found.answers
