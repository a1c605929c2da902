"""lm-evaluation-harness on a tiny run: its own code on the base and on the exported adapter."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import Config
from atlas_fl.experiment.answers import evaluate_run
from atlas_fl.experiment.harness import harness_run, read_harness
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.run_folder import RunFolder
from tests.report.html.reading import table_of
from tests.report.html.test_answers import page_of
from tests.runs.finished import FinishedRuns

NEEDS = pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra lm-eval is not installed")
TASK = """\
task: own_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "u:{{{{asked}}}}\\na:"
doc_to_choice: [ja, si, si si]
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@NEEDS
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_harness_finds_what_choices_by_log_likelihood_find(
    chats: Config, finished: FinishedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(finished(chats).folder)
    found = evaluate_run(folder.path, choices=["ja", "si", "si si"])
    (client,) = (one for one in assemble(chats).clients if one.name == "ja")
    with (tmp_path / "words.jsonl").open("w") as file:
        for text in client.test.text:
            asked, answer = (turn["content"] for turn in json.loads(text))
            file.write(json.dumps({"asked": asked, "answer": ["ja", "si"].index(answer)}) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(TASK.format(data=tmp_path / "words.jsonl"))
    lost = TASK.format(data=tmp_path / "lost.jsonl").replace("own_words", "lost")
    (tmp_path / "tasks" / "lost.yaml").write_text(lost)
    words = ["evaluate", str(folder.path), "--harness", "own_words", "--harness-tasks", f"{tmp_path}/tasks"]
    assert main([*words, "--client", "ja", "--client", "si"]) == 0
    assert "own_words" in capsys.readouterr().out
    scores = {model: tasks["own_words"] for model, tasks in read_harness(folder).items()}
    assert list(scores) == ["base", "ja", "si"]
    assert scores["si"] == scores["ja"] != scores["base"], "FedAvg leaves one model"
    own = found.scores["ja"]
    for name in ("acc", "acc_norm"):
        assert (scores["base"][name], scores["ja"][name]) == (own["base"][name], own["federated"][name])
    assert {row["task"] for row in table_of(page_of(folder.path), "lm-evaluation-harness")} == {"own_words"}
    # in the task's template, which no tokenizer of the base has
    plain = TASK.format(data=tmp_path / "words.jsonl").replace('"u:{{asked}}\\na:"', '"{{asked}}"')
    assert "u:" not in plain
    (tmp_path / "tasks" / "own.yaml").write_text(plain)
    assert main([*words, "--client", "ja", "--harness-chat"]) == 0
    for model, kind in (("base", "base"), ("ja", "federated")):
        assert read_harness(folder)[model]["own_words"]["acc"] == own[kind]["acc"]
    for options, message in (
        (["--client", "nobody"], "unknown client 'nobody'"),
        ([], "add --client NAME"),
        (["--client", "ja", "--harness", "own_word"], "unknown task of lm-evaluation-harness 'own_word'; did you mean"),
        (["--client", "ja", "--harness", "lost"], "the harness cannot read the data of lost: "),
    ):
        assert main([*words, *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="the extra lm-eval is installed")
def test_without_the_extra_a_line_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="--harness needs lm_eval, which is not installed; pip install "):
        harness_run(tmp_path, ["arc_easy"], clients=["a"])
