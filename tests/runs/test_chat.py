"""A federation of conversations on a tiny model: trained, audited, evaluated, asked, exported, and cut."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from atlas_fl.cli.main import main
from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.data.metrics import rouge
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.answers import KINDS, evaluate_run, generate, read_evaluation
from atlas_fl.experiment.choices import find_choices, log_likelihoods
from atlas_fl.experiment.export import export_client, load_models
from atlas_fl.experiment.run import run_config
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.assets import embedded_dir
from atlas_fl.storage.jsonl import read_rows
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.federation import Federation
from tests.runs.finished import FinishedRuns
from tests.runs.processes import Programs
from tests.runs.reading import passing_audit, same_tensors, state
from tests.runs.test_exports import load_by_card


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
    assert main([*ask, "--kind", "base", "--new-tokens", "4", "--system", "b"]) == 0
    assert capsys.readouterr().out.strip() != first.answers["base"]
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
def test_a_tiny_llama_learns_conversations(chats: Config, finished: FinishedRuns, writer_of: Callable) -> None:
    model = replace(chats.model, model=str(writer_of("llama").path))
    folder = finished(replace(chats, model=model)).folder
    passing_audit(folder)
    for kinds in evaluate_run(folder).scores.values():
        assert kinds["base"]["perplexity"] > 1.2 * kinds["federated"]["perplexity"]
        assert kinds["federated"]["accuracy"] > kinds["base"]["accuracy"]


def test_an_answer_ends_with_its_turn_where_the_end_of_text_is_another_token(
    chats: Config, finished: FinishedRuns, tmp_path: Path
) -> None:
    """So it is with Gemma, Phi-3, and Qwen's models that are not tuned to chat."""
    template = (tmp_path / "own.jinja").read_text().replace("eos_token", "'<|endoftext|>'")
    (tmp_path / "own.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(chats.model.model)
    assert tokenizer.eos_token == "<|im_end|>"
    config = with_values(chats, {"strategy": "local", "alone": "none", "new_tokens": 6})
    found = evaluate_run(finished(config).folder)
    assert {answer.answers["federated"] for answer in found.answers} == {"ja", "si"}
    assert found.mean("federated", "exact_match") == 1


@pytest.mark.filterwarnings("ignore")
def test_the_lines_of_a_card_ask_what_the_federation_learned(
    chats: Config, finished: FinishedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the task's own template, which no tokenizer of the base has."""
    folder = finished(chats).folder
    answer = generate(folder, "abcdab", client="ja", new_tokens=16)
    merged = export_client(folder, client="ja", to=tmp_path / "merged", form="merged")
    capsys.readouterr()
    for exported in (folder / "adapters" / "ja", merged):
        load_by_card(exported, "abcdab")
        assert capsys.readouterr().out.strip() == answer
        assert (exported / "chat_template.jinja").read_text() == (tmp_path / "own.jinja").read_text()
    assert AutoTokenizer.from_pretrained(merged).chat_template


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
    folder = finished(replace(config, training=replace(config.training, rounds=20))).folder
    found = evaluate_run(folder)
    assert found.mean("federated", "acc") > 0.9 > found.mean("base", "acc")
    again = evaluate_run(folder, choices=["answers"])
    assert [again.mean(kind, "acc") for kind in KINDS] == [found.mean(kind, "acc") for kind in KINDS]
    assert not found.answers


def test_a_client_that_is_cut_ends_with_the_adapters_of_one_that_is_whole(chats: Config) -> None:
    short = with_values(chats, {"rounds": 2, "alone": "none"})
    whole = run_config(with_values(short, {"name": "whole"}))
    for head in ("server", "client"):
        cut = run_config(with_values(short, {"name": f"cut-{head}", "split": "si=1", "head": head}))
        passing_audit(cut.folder)
        assert same_tensors(state(whole.folder), state(cut.folder))
        crossed = {row["client"] for row in read_rows(RunFolder(cut.folder).ledger) if row.get("kind") == "activation"}
        assert crossed == {"si"}


@pytest.mark.slow
@pytest.mark.parametrize("held", ["fp32", "bf16"])
def test_sites_end_with_the_bits_of_one_file_of_conversations(
    chats: Config, held: str, tmp_path: Path, programs: Programs, finished: FinishedRuns
) -> None:
    values = {"rounds": 2, "alone": "none", "pack_tokens": 1, "base_weights": held, "devices": ("laptop_8gb",)}
    config = with_values(chats, {**values, "split": "si=1"})
    fed = Federation(config, tmp_path, {"ja": "laptop_8gb", "si": "laptop_8gb"}, programs, finished)
    server, port = fed.serve()
    rows = "help=chats.jsonl,chat=messages,client=land,template=own.jinja"
    started = [
        programs.start(
            *("join", f"localhost:{port}", "--certs", f"certs/{name}", "--task", rows, "--device", device),
            *("--least-examples", "2", "--max-rounds-per-example", "2", "--allow", "cut", "labels"),
            *fed.own_model,
            folder=tmp_path,
        )
        for name, device in fed.sites.items()
    ]
    for program in (*started, server):
        program.end()
    fed.is_as_simulated()
    passing_audit(fed.served.path)


@pytest.mark.slow
@pytest.mark.skipif(not (embedded_dir() / "smollm2-135m").is_dir(), reason="`atlas fetch llm` brings SmolLM2")
def test_smollm2_learns_two_tones_and_is_audited_and_asked(tmp_path: Path) -> None:
    few = {"clients_per_task": 2, "samples": 8, "validation_samples": 2, "test_samples": 2, "rouge_examples": 1}
    quick = {"tasks": ("types_english", "types_json"), "rounds": 4, "clusters": "oracle", "strategy": "fedavg_cluster"}
    quick |= {"batch_size": 4, "eval_every": 4, "fingerprint_samples": 4}
    places = {"runs_dir": str(tmp_path), "name": "chat", "new_tokens": 4, "alone": "none", "audit": True}
    result = run_config(with_values(find_preset("chat"), {**few, **quick, **places}))
    passing_audit(result.folder)
    found = evaluate_run(result.folder)
    for client, kinds in found.scores.items():
        assert kinds["federated"]["perplexity"] < kinds["base"]["perplexity"] / 4, client
    written = [answer.answers[kind] for answer in found.answers for kind in ("base", "federated")]
    assert len(written) == 8 and all(written)
