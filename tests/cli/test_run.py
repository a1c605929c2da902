"""The commands that train, with a stand-in for the training; `test_real.py` has the real one."""

import csv
import json
import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from atlas_fl.config import Config, config_hash, load_config, run_folder, to_toml, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.events import Note, PhaseStarted
from atlas_fl.experiment.run import RunResult
from atlas_fl.report.finished_runs import find_finished_runs
from atlas_fl.report.html.write import is_page
from atlas_fl.storage.jsonl import write_json


def summary_of(config: Config) -> dict[str, Any]:
    score = {"local": 0.5}.get(config.mixing.strategy, 0.75) + config.mixing.eta / 10
    test = {"primary": score, "accuracy": score, "majority": 0.5, "gain_over_majority": score - 0.5}
    final = {"test": test, "validation": {"primary": score, "loss": 1.0}, "spread": {"std": 0.0}}
    final["worst_client"] = {"client": "movie-0"} | test
    group = {"clients": 1, "final": final, "best": final}
    ranks = [4, 8] if config.mixing.strategy == "ditto" else [8, 8]
    return {
        "run": {"seed": config.run.seed, "strategy": config.mixing.strategy, "rounds": 1},
        "overall": group,
        "tasks": {"movie": group},
        "clients": {"movie-0": {"task": "movie", "final": {"test": test}, "best": {"test": test}, "ranks": ranks}},
        "bytes": {"up": 1000, "down": 2000, "total": 3000},
        "seconds": {"total": 1.0, "phases": {}},
    }


@pytest.fixture
def ran(monkeypatch) -> list[Config]:
    """The configs that the commands handed over."""
    found: list[Config] = []

    def run(config: Config, *, on_event: Any, resume: bool = False) -> RunResult:
        found.append(config)
        folder = run_folder(config)
        folder.path.mkdir(parents=True, exist_ok=resume)
        folder.config.write_text(to_toml(config), encoding="utf-8")
        on_event(PhaseStarted("loading"))
        on_event(Note("as you wish"))
        complete = config.run.max_rounds is None
        write_json(folder.plan, {})
        if complete:
            write_json(folder.summary, summary_of(config))
        return RunResult(folder=folder.path, rounds=1, complete=complete, summary=summary_of(config))

    # in this order: a module that is first imported while another is patched keeps what it found there
    monkeypatch.setattr("atlas_fl.cli.run.run_config", run)
    monkeypatch.setattr("atlas_fl.experiment.run.run_config", run)
    return found


def test_run_hands_over_what_the_flags_say(atlas, ran, tmp_path) -> None:
    words = ["--alpha", "0.25", "--tasks", "movie", "sms", "--no-block-diagonal"]
    said = atlas("run", "--runs-dir", str(tmp_path), *words)
    assert (said.code, said.err) == (0, "")
    values = {"alpha": 0.25, "tasks": ["movie", "sms"], "block_diagonal": False, "runs_dir": str(tmp_path)}
    assert ran == [with_values(find_preset("quick"), values)]
    lines = said.out.splitlines()
    assert lines[:2] == ["loading ...", "note: as you wish"]
    assert lines[-1] == f"run folder: {run_folder(ran[0]).path}"


def test_the_config_of_a_run_repeats_it(atlas, ran, tmp_path) -> None:
    atlas("run", "--preset", "smoke", "--runs-dir", str(tmp_path), "--alpha", "0.5", "--max-length", "none")
    said = atlas("run", "--config", str(run_folder(ran[0]).config), "--resume")
    assert said.code == 0
    assert ran[0] == ran[1] == load_config(run_folder(ran[0]).config)


def test_a_run_that_is_not_complete_says_how_to_go_on(atlas, ran, tmp_path) -> None:
    said = atlas("run", "--runs-dir", str(tmp_path), "--max-rounds", "1")
    assert said.out.splitlines()[-1] == f"not complete yet; go on with: atlas resume {run_folder(ran[0]).path}"


@pytest.mark.parametrize("command", ["run", "plan", "sweep", "compare"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rounds 0", "atlas: --rounds is 0; allowed: at least 1; set it to that, or leave it out\n"),
        ("--tasks movei", "atlas: unknown task 'movei'; did you mean 'movie'?"),
        ("--strateg x", "atlas: unknown flag '--strateg'; did you mean '--strateg"),
        ("--preset quik", "atlas: unknown preset 'quik'; did you mean 'quick'?"),
        ("--config none.toml", "atlas: cannot read none.toml (No such file or directory)"),
        ("--ranks 5", "atlas: --ranks is 5, a rank that is no candidate; the candidates are 4, 8, 16, 32, 64;"),
    ],
)
def test_nothing_is_run_with_a_mistake(command: str, line: str, message: str, atlas, ran) -> None:
    over = ["--over", "dropout=0"] if command == "sweep" else []
    said = atlas(command, *over, *line.split())
    assert said.code == 2
    assert said.err.startswith(message)
    assert ran == []


@pytest.mark.slow
def test_sweep_runs_every_point_and_ends_in_a_table_and_a_csv(atlas, ran, tmp_path) -> None:
    words = ["sweep", "--strategy", "atlas_laplacian", "--over", "eta=0,0.5", "--seeds", "2"]
    words += ["--runs-dir", str(tmp_path)]
    said = atlas(*words)
    assert (said.code, said.err) == (0, "")
    assert [(config.mixing.eta, config.run.seed) for config in ran] == [(0, 42), (0.5, 42), (0, 123), (0.5, 123)]
    assert "run 3 of 4: eta=0 seed=123 starts (about " in said.out
    rows = [line.split() for line in said.out.splitlines() if line.strip().startswith("eta=")]
    assert [row[:2] for row in rows[:2]] == [["eta=0", "0.750"], ["eta=0.5", "0.800"]]
    assert rows[-2:] == [["eta=0", "0.750"], ["eta=0.5", "0.800"]], "by task"
    (file,) = tmp_path.glob("comparison-quick-eta-????????.csv")
    assert f"the runs: {file}" in said.out and f"and as a figure: {file.with_suffix('.png')}" in said.out
    assert {config_hash(run.config) for run in find_finished_runs([file])} == {config_hash(config) for config in ran}
    methods = list(csv.DictReader(file.with_suffix(".methods.csv").read_text(encoding="utf-8").splitlines()))
    by_hand = [("eta=0", "0.75", "2"), ("eta=0.5", "0.8", "2")]
    assert [(row["method"], row["mean"], row["seeds"]) for row in methods] == by_hand
    latex = file.with_suffix(".statistics.tex").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("eta=0.5 & 0.800 & 0.000") for line in latex) == 1
    with Image.open(file.with_suffix(".png")) as image:
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    again = atlas(*words)
    assert len(ran) == 4
    assert "run 3 of 4: eta=0 seed=123 is finished ..." in again.out


def test_a_sweep_over_local_steps_scales_the_rounds_and_says_so(atlas, ran, tmp_path) -> None:
    words = ["sweep", "--preset", "vision-quick", "--model", "minilm", "--tasks", "digits"]
    words += ["--over", "local-steps=4,12"]
    said = atlas(*words, "--runs-dir", str(tmp_path / "scaled"))
    assert (said.code, said.err) == (0, "")
    assert [(config.images.local_steps, config.training.rounds) for config in ran] == [(4, 6), (12, 2)]
    assert "24 gradient steps in every run: 6 rounds of 4, 2 rounds of 12; --over rounds=6 keeps" in said.out
    ran.clear()
    said = atlas(*words, "rounds=6", "--runs-dir", str(tmp_path / "same"))
    assert [config.training.rounds for config in ran] == [6, 6]
    assert "gradient steps" not in said.out


def test_the_lambda_sweep_is_a_sweep_over_eta(atlas, ran, tmp_path) -> None:
    assert atlas("sweep", "--lambda-sweep", "--runs-dir", str(tmp_path)).code == 0
    assert [config.mixing.eta for config in ran] == [0, 0.01, 0.1, 0.5, 1]
    assert {config.run.seed for config in ran} == {42}
    assert {config.mixing.strategy for config in ran} == {"atlas_laplacian"}


@pytest.mark.slow
def test_compare_knows_old_names_and_says_the_same_in_every_format(atlas, ran, tmp_path) -> None:
    words = ["--ablation", "local_only", "atlas", "--seeds", "1", "--runs-dir", str(tmp_path)]
    said = atlas("compare", *words)
    assert (said.code, said.err) == (0, "")
    assert [config.mixing.strategy for config in ran] == ["local", "atlas"]
    (page,) = tmp_path.glob("comparison-quick-strategy-????????.html")
    for suffix in (".methods.csv", ".statistics.tex", ".md"):
        assert "0.8" in page.with_suffix(suffix).read_text()
    assert not page.with_suffix(".pairs.csv").exists() and page.with_suffix(".pdf").exists()
    words = ["results", str(page.with_suffix(".csv")), "--all", "--control", "local", "--to", str(tmp_path / "page.md")]
    assert atlas(*words).code == 0
    assert (tmp_path / "page.md").read_text() == page.with_suffix(".md").read_text()
    assert said.out.splitlines()[-1] == f"as a page to look at: {page}"
    assert is_page(page) and "2 methods compared" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        "compare --preset null --strategies local fedavg --over partition=iid,dirichlet --dirichlet-alpha 0.3",
        "compare --preset label-skew --dial 3 --strategies local fedavg --partition iid --seeds 1",
        "sweep --preset label-skew --dial 3 --strategy fedavg --partition iid --over lr=0.01,0.02",
        "sweep --strategy fedavg --over partition=iid,dirichlet --dirichlet-alpha 0.3",
    ],
)
def test_what_has_an_effect_in_some_runs_or_was_not_typed_is_taken(line: str, atlas, ran, tmp_path) -> None:
    said = atlas(*line.split(), "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    assert {config.data.partition for config in ran} <= {"iid", "dirichlet"} and ran


@pytest.mark.slow
def test_compare_leaves_runs_in_one_place_out_of_statistics_by_client(atlas, ran, tmp_path) -> None:
    words = ["--preset", "null", "--seeds", "2", "--ranks", "8", "--runs-dir", str(tmp_path), "--strategies"]
    said = atlas("compare", *words, "local", "fedavg", "centralized")
    assert (said.code, said.err) == (0, "")
    assert {config.mixing.strategy for config in ran} == {"local", "fedavg", "centralized"}
    rows = [line.split() for line in said.out.splitlines() if line.strip()]
    assert {"local", "fedavg"} <= {row[0] for row in rows} and "centralized" not in {row[0] for row in rows}
    assert "All examples of a task in one place (centralized): 0." in said.out
    said = atlas("compare", *words, "local", "centralized", "--control", "centralized")
    assert said.code == 2
    assert "--control is centralized, which has one client a task; allowed: a strategy of" in said.err


@pytest.mark.slow
def test_compare_over_a_setting_compares_for_each_value_and_ranks_over_all(atlas, ran, tmp_path) -> None:
    words = ["--preset", "contradiction", "--strategies", "local", "fedavg", "--over", "dial=1,3", "--seeds", "2"]
    said = atlas("compare", *words, "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    assert sorted((config.mixing.strategy, config.run.dial, config.run.seed) for config in ran) == [
        (name, dial, seed) for name in ("fedavg", "local") for dial in (1, 3) for seed in (42, 123)
    ]
    titles = [f"contradiction, dial {dial}" for dial in (1, 3)]
    assert said.out.index(titles[0]) < said.out.index(titles[1]) < said.out.index("Ranks over all federations")
    sentences = [line for line in said.out.splitlines() if line.startswith("contradiction, dial") and ": " in line]
    assert len(sentences) == 2 and all("local is " in line and "of 1 clients, p 0.5" in line for line in sentences)
    assert said.out.index(sentences[0]) < said.out.index(f"\n{titles[0]}\n")
    assert said.out.count("Against fedavg") == 2 and "Tests against fedavg" not in said.out
    (file,) = tmp_path.glob("comparison-*.pairs.csv")
    pairs = csv.DictReader(file.read_text().splitlines())
    told = [(row["federation"], row["method"], row["control"]) for row in pairs]
    assert told == [(title, "local", "fedavg") for title in titles]


@pytest.mark.slow
@pytest.mark.parametrize("control", [[], ["--control", "local"]])
def test_compare_over_a_setting_of_methods_ends_in_a_page_with_a_row_for_each_value(
    control: list[str], atlas, ran, tmp_path
) -> None:
    words = ["--preset", "null", "--strategies", "local", "fedavg", "--over", "lr=0.001,0.01", "--seeds", "2", *control]
    said = atlas("compare", *words, "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    assert len(ran) == 8
    (page,) = tmp_path.glob("comparison-null-strategy-lr-????????.html")
    text = page.read_text(encoding="utf-8")
    assert all(f"{name} lr={rate}" in text for name in ("local", "fedavg") for rate in ("0.001", "0.01"))


def test_a_comparison_says_that_ranks_differ_how_long_it_takes_and_a_note_once(atlas, ran, tmp_path) -> None:
    words = ["--strategies", "local", "fedavg", "ditto", "--seeds", "2", "--runs-dir", str(tmp_path), "--ranks", "8"]
    said = atlas("compare", *words, "--second-weight", "0.5")
    assert "note: clients have other ranks under some methods, in 2 of 2 comparisons by seed; --ranks 8" in said.out
    assert said.out.count("note: as you wish") == 1
    lines = [line for line in said.out.splitlines() if line.startswith("run ")]
    assert len(lines) == len(ran) == 6
    assert ["left in all" in line for line in lines] == [False] + [True] * 5
    other = atlas("compare", *words[:3], *words[4:], "--runs-dir", str(tmp_path / "two"))
    assert "other ranks" not in other.out


def test_a_comparison_names_the_methods_that_were_still_learning(atlas, ran, tmp_path) -> None:
    words = ["--strategies", "local", "fedavg", "--seeds", "1", "--rounds", "4", "--runs-dir", str(tmp_path)]
    assert "still rises" not in atlas("compare", *words).out, "nothing is known of these runs"
    for config in ran:
        rise = 0.2 if config.mixing.strategy == "fedavg" else 0.005
        rows = [{"round": at, "client": "a", "task": "t", "split": "validation", "loss": 1.0} for at in (1, 3, 4)]
        scores = [0.1, 0.5, 0.5 + rise]
        run_folder(config).metrics.write_text(
            "".join(json.dumps({**row, "primary": score}) + "\n" for row, score in zip(rows, scores, strict=True))
        )
    said = atlas("compare", *words)
    assert (
        "note: validation still rises in the last quarter of the rounds, fedavg by 0.200; compare with --rounds 8"
        in said.out
    )


def test_seeds_by_name_are_compared_also_where_they_are_those_of_tuning(atlas, ran, tmp_path) -> None:
    words = ["--strategies", "local", "fedavg", "--runs-dir", str(tmp_path), "--seeds", "9001", "9002"]
    said = atlas("compare", *words)
    assert (said.code, said.err) == (0, "")
    assert {config.run.seed for config in ran} == {9001, 9002}
    (page,) = tmp_path.glob("comparison-*.html")
    assert "9001, 9002" in page.read_text(encoding="utf-8")
    said = atlas("compare", *words, "--trials", "2")
    assert said.code == 2 and "--seeds has 9001, on which --trials chooses settings; compare on other seeds" in said.err


@pytest.mark.slow
def test_compare_with_trials_leaves_a_record_beside_the_runs_that_a_page_reads(atlas, ran, tmp_path) -> None:
    words = ["--preset", "null", "--strategies", "local", "ditto", "--seeds", "2", "--trials", "3", "--ranks", "8"]
    assert atlas("compare", *words, "--runs-dir", str(tmp_path)).code == 0
    confirmed = [config for config in ran if config.run.seed in (42, 123)]
    assert [run_folder(config).tuning.is_file() for config in ran] == [config in confirmed for config in ran]
    said = atlas("results", str(tmp_path), "--control", "local")
    assert "\n3 settings tried on seeds 9001, 9002, lr 0.005..0.02.\n" in said.out
    assert re.search(r"\| `local` \| 3 \| lr 0.01 \| 0\.\d+ \|", said.out)
    assert re.search(r"\| `ditto` \| 3 \| lr [0-9.]+, second_weight [0-9.]+ of 0\.03\.\.0\.5 \| 0\.\d+ \|", said.out)


def test_compare_over_presets_takes_the_settings_of_each_and_the_flags(atlas, ran, tmp_path) -> None:
    words = ["--strategies", "local", "fedavg", "--over", "preset=null,label-skew", "dial=1,3", "--seeds", "1"]
    said = atlas("compare", *words, "--rounds", "3", "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    seen = {(config.run.preset, config.run.dial, config.data.tasks, config.data.samples) for config in ran}
    null, skew = ("movie", "trec", "pairs"), ("trec",)
    assert seen == {("null", 1, null, 50), ("null", 3, null, 200)} | {
        ("label-skew", dial, skew, 120) for dial in (1, 3)
    }
    assert (len(ran), {config.training.rounds for config in ran}) == (8, {3})
    assert "1 is the best of 4 federations" in " ".join(said.out.split())
    assert said.out.index("label-skew, dial 3") < said.out.index("null, dial 1")


COMMANDS_WITH_MISTAKES = {
    "compare --over strategy=local": "--over sweeps strategy; name the strategies with --strategies",
    "sweep": "--over is missing; allowed: a setting and its values;",
    "sweep --over etta=1": "unknown setting 'etta'; did you mean 'eta'?",
    "sweep --over eta=0 --max-rounds 1": "--max-rounds is 1; here every run goes to its end;",
    "compare --seeds 0": "--seeds is 0; allowed: 1 to 1000, how many;",
    "compare --control median": "--control is median; allowed: one of --strategies, local, fedavg_cluster,",
    "compare --trials -1": "--trials is -1; allowed: at least 0, at most 20;",
    "compare --over preset=nul": "unknown preset 'nul'; did you mean 'null'?",
    "compare --preset null --over preset=null": "--preset is given beside --over preset=...;",
    "sweep --over preset=null": "--over sweeps preset, which changes no number of a run;",
    "compare --trials 8193": "--trials is 8193; allowed: at least 0, at most 20;",
    "compare --seeds 2026111": "--seeds is 2026111; allowed: 1 to 1000, how many;",
    "compare --seeds -1 5": "--seeds is [-1, 5]; allowed: how many, or two seeds and more, each once, from 0 to",
    "compare --strategies fedavg standard_fl": "--strategies has fedavg twice; name each",
    "compare --strategies fedavg --over rounds=2,02": "--over rounds has 2 and 02, which are the same; give each",
    "compare --over preset=null,label-skew --dial 9": "--dial is 9; allowed: 0 to 4;",
    "compare --jobs 0": "--jobs is 0; allowed: at least 1",
    "compare local atlas": "unexpected words: local atlas; name what is compared with --strategies local",
    "compare --strategies": "--strategies is empty; name at least one;",
    "run --epsilon 8": "--epsilon 8 is the budget of --dp, which is none; set --dp example or --dp client, or leave",
    "run --dirichlet-alpha 0.3": "--dirichlet-alpha 0.3 is of --partition dirichlet and quantity, and there is",
    "run --split-objective time": "--split-objective time is of cut models, and there is --split none; set --split",
    "run --norm-bound off --max-norm-ratio 3": "--max-norm-ratio 3 is of --norm-bound, which is off;",
    "run --budget memory --alpha-act 0.1": "--alpha-act 0.1 is of --budget fractions, and there is --budget memory;",
    "run --eta 0.2": "--eta does nothing with --strategy atlas; leave it out (`atlas list strategies atlas` shows",
    "run --strategy fedavg --second-weight 0.2": "--second-weight does nothing with --strategy fedavg; leave it out",
    "plan --strategy median --within all --max-share 1 --stb-c 1": "--stb-c does nothing with --strategy median;",
    "sweep --over strategy=fedavg,median --over stb_c=0,1": "--stb-c does nothing with --strategy fedavg, median;",
    "sweep --over eta=0,0.5": "--eta does nothing with --strategy atlas;",
    "compare --strategies atlas --over eta=0,1": "--eta does nothing with --strategy atlas;",
    "compare --strategies stb local --eta 0.2 --trials 2": "--eta does nothing with --strategy stb, local;",
    "compare --strategies local fedavg --stb-c 0.2": "--stb-c does nothing with --strategy local, fedavg; leave it out",
    "compare --strategies atals": "unknown strategy 'atals'; did you mean 'atlas'?",
    "resume nothing": "not a run folder: nothing;",
    "resume nothing --max-rounds 0": "--max-rounds is 0; allowed: at least 1;",
    "audit nothing": "not a run folder: nothing;",
    "export nothing --client 0 --to x": "not a run folder: nothing;",
    "export nothing --client 0": "missing: --to TEXT; see `atlas export --help`",
    "report nothing": "not a run folder: nothing;",
    "report nothing --control fedavg": "--control is fedavg, and one run is compared with nothing;",
    "results nothing": "there is no folder or file 'nothing';",
    "results nothing --to a --csv ./a": "--to and --csv are both a; name a file for each",
    "report": "missing: RUN ...; see `atlas report --help`",
    "sweep --over eta=0 --seed 7": "--seed 7 is for one run, and these are several; how many seeds",
    "compare --strategy fedavg": "--strategy fedavg is for one run, and these are several; name all",
    "sweep --over seed=1,2": "--over is 'seed=1,2'; seeds are not swept; a sweep has --seeds",
    "list taks": "WHAT: 'taks' is not one of tasks, models, strategies, devices, presets, conflicts;",
    "list tasks models": "unexpected words: models; a strategy alone can be named; see `atlas list --help`",
    "list tasks movie trec": "unexpected words: trec; see `atlas list --help`",
    "list strategies fedproxx": "unknown strategy 'fedproxx'; did you mean 'fedprox'?",
    "demo --preset publication": "--preset: 'publication' is not one of quick, smoke;",
    "export run": "missing: --to TEXT; see `atlas export --help`",
    "resume": "missing: RUN; see `atlas resume --help`",
}
"""What is said of each, in one line."""


@pytest.mark.parametrize(("line", "message"), COMMANDS_WITH_MISTAKES.items())
def test_a_command_without_what_it_needs_is_one_line(
    line: str, message: str, atlas, ran, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = atlas(*shlex.split(line))
    assert said.code == 2
    assert said.err.startswith(f"atlas: {message}")
    assert said.err.count("\n") == 1
    assert ran == []


def test_a_plan_says_what_stands_below_its_clusters_once(monkeypatch, atlas) -> None:
    clustering = {"warnings": ["2 undecided"]}
    client = {"name": "a-0", "task": "a", "cluster": -1, "ranks": [4], "cut": None, "memory": {}, "predicted": {}}
    found = {"clients": [client], "clustering": clustering, "notes": ["2 undecided", "something else"]}
    monkeypatch.setattr("atlas_fl.cli.run.make_plan", lambda *_, **__: SimpleNamespace(to_json=lambda: found))
    said = atlas("plan", "--preset", "smoke").out
    assert said.count("2 undecided") == 1 and "note: something else" in said
