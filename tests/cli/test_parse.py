import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from atlas_fl.cli.arguments import ALIASES, hints, known_flags, parse, split
from atlas_fl.cli.main import COMMANDS
from atlas_fl.cli.options import RunOptions, SweepOptions
from atlas_fl.config import Config, settings, value_of, with_values
from atlas_fl.config.conflicts import TYPED, conflicts
from atlas_fl.config.methods import settings_read
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError
from atlas_fl.methods.registry import METHODS, RULES


def options_of(words: Sequence[str]) -> RunOptions:
    return parse(RunOptions, split(words), command="atlas run")


def config_of(*words: str) -> Config:
    return options_of(words).settings


def test_no_words_give_the_quick_preset() -> None:
    assert config_of() == Config()
    assert options_of([]) == RunOptions()


def test_every_setting_is_a_flag_that_reads_its_own_default() -> None:
    strategies = {name: with_values(Config(), {"strategy": name}) for name in [*METHODS, *RULES, "atlas_laplacian"]}
    readers = {setting: name for name, config in strategies.items() for setting in settings_read(config)}
    of_others = {row.values[0][0] for row in conflicts() if row.values[0][1] == TYPED}
    words: dict[str, list[str]] = {}
    for name, setting in settings().items():
        if name in of_others:
            continue
        strategy = readers.get(name, "atlas_laplacian")
        value = value_of(strategies[strategy], name)
        spelled = () if setting.kind is bool else to_words(value)
        flag = f"--no-{setting.flag[2:]}" if setting.kind is bool and not value else setting.flag
        words.setdefault(strategy, []).extend([flag, *spelled])
    for strategy, typed in words.items():
        assert config_of("--strategy", strategy, *typed) == strategies[strategy]


def test_flags_and_texts_of_a_sweep_say_the_same() -> None:
    words = ["--strategy", "atlas_laplacian", "--eta", "0.5", "--share", "A", "B", "--k-range", "3", "4"]
    words += ["--max-length", "64", "--tasks", "movie", "sms"]
    texts = {"strategy": "atlas_laplacian", "eta": "0.5", "share": "A+B", "k_range": "3+4"}
    texts |= {"max_length": "64", "tasks": "movie+sms"}
    assert config_of(*words) == with_values(Config(), texts)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--clients_per_task", "2"], "clients_per_task", 2),
        (["--clients-per-task=2"], "clients_per_task", 2),
        (["--audit"], "audit", True),
        (["--no-block-diagonal"], "block_diagonal", False),
        (["--ablation", "local_only"], "strategy", "local_only"),
        (["--alpha", "-1"], "alpha", -1.0),
        (["--alpha", "0.1", "--alpha", "0.2"], "alpha", 0.2),
        (["--ranks", "8"], "ranks", "8"),
        (["--max-rounds", "none"], "max_rounds", None),
        (["--targets", "none"], "targets", ()),
        (["--share", "A", "B", "head"], "share", ("A", "B", "head")),
        (["--task", "a=b", "--task=c=d,text=e"], "task", ("a=b", "c=d,text=e")),
        (["--mode", "full"], "rounds", 15),
        (["--mode", "full", "--rounds", "2"], "rounds", 2),
    ],
)
def test_flags_set_their_setting(words: list[str], name: str, value: object) -> None:
    assert value_of(config_of(*words), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--etta", "1"], r"unknown flag '--etta'; did you mean '--eta'\? see `atlas run --help`"),
        (["-e", "1"], r"unknown flag '-e'; see `atlas run --help`$"),
        (["--eta", "much"], r"^--eta: 'much' is not a number; see `atlas run --help`$"),
        (["--rounds", "1.5"], r"--rounds: '1.5' is not a whole number;"),
        (["--share", "A", "C"], r"--share: 'C' is not one of A, B, head;"),
        (["--k-range", "2", "x"], r"--k-range: 'x' is not a whole number;"),
        (["--max-length", "long"], r"--max-length: 'long' is not a whole number;"),
        (
            ["--graph", "similarty"],
            r"^--graph: 'similarty' is not one of similarity, uniform, adaptive; did you mean 'similarity'\? "
            r"see `atlas run --help`$",
        ),
        (["--tune", "eight"], r"^--tune: 'eight' is not one of whole, lora; see `atlas run --help`$"),
        (["--accelerator", "gpu"], r"^--accelerator: 'gpu' is not one of auto, cpu, cuda; see"),
        (["--num-clients", "3"], r"^unknown flag '--num-clients'; clients are counted by task: --clients-per-task N;"),
        (["--epochs", "3"], r"in a round are --local-epochs N, rounds of the whole run --rounds N; see"),
        (["--learning_rate=1"], r"^unknown flag '--learning-rate'; write --lr; see `atlas run --help`$"),
        (["--plugin", "own.py", "--q", "2"], r"^unknown flag '--q'; a setting of a plug-in's method is --knob q=VALUE"),
        (["--gpu"], r"^unknown flag '--gpu'; a GPU trains with --accelerator cuda; see"),
        (["--rounds"], r"^--rounds lacks a value; allowed: a whole number; see `atlas run --help`$"),
        (["--k-range", "2"], r"^--k-range lacks a value; allowed: 2 times a whole number; see"),
        (["--audit", "yes"], r"^unexpected words: yes; see"),
        (["stray"], r"^unexpected words: stray; see"),
        (["smoke"], r"^unexpected words: smoke; did you mean --preset smoke\? see `atlas run --help`$"),
        (["--audit", "smoke"], r"^unexpected words: smoke; did you mean --preset smoke\? see"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        options_of(words)
    assert not set("\n│╭╰─") & set(str(caught.value))
    assert capsys.readouterr() == ("", "")


def test_no_word_of_other_programs_is_a_flag_here_and_each_leads_to_one() -> None:
    known = {flag for command in COMMANDS.values() for flag in known_flags(command.options)}
    assert not known & {*ALIASES}
    assert not {*known_flags(RunOptions)} & {*hints()}
    assert {*ALIASES.values()} <= known
    for hint in hints().values():
        assert set(re.findall(r"--[a-z-]+", hint)) <= known


def test_known_flags_are_those_of_the_page() -> None:
    flags = known_flags(SweepOptions)
    assert flags[:2] == ["-h", "--help"]
    assert {"--over", "--seeds", "--config", "--eta", "--audit", "--no-audit", "--lambda-sweep"} <= set(flags)
    assert "--settings" not in flags
    assert "--no-eta" not in flags


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_line_does_not_depend_on_the_signs_of_the_terminal(encoding: str) -> None:
    command = [sys.executable, "-m", "atlas_fl", "run", "--eta", "much"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "atlas: --eta: 'much' is not a number; see `atlas run --help`\n"


@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_a_line_does_not_depend_on_the_terminal(columns: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    mask = "none, least_sensitive, most_sensitive, lowest_magnitude, highest_magnitude, random"
    with pytest.raises(ConfigError, match=f"^--mask: 'mots_sensitive' is not one of {mask}; did you mean 'most_sensi"):
        config_of("--mask", "mots_sensitive")
