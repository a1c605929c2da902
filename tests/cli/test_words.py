import pytest

from atlas_fl.cli.arguments import Words, check_flags, is_flag, last_value, split
from atlas_fl.errors import ConfigError


def test_words_are_split_by_flag() -> None:
    assert split(["a", "--eta", "-1", "--tasks", "x", "y", "--audit", "--lr=-inf"]) == (
        Words("", ("a",)),
        Words("--eta", ("-1",)),
        Words("--tasks", ("x", "y")),
        Words("--audit", ()),
        Words("--lr", ("-inf",)),
    )


def test_underscores_are_hyphens_in_flags_alone() -> None:
    assert split(["--clients_per_task", "a_b"])[1] == Words("--clients-per-task", ("a_b",))
    assert split(["--task=a_b=c"])[1] == Words("--task", ("a_b=c",))


def test_old_flags_have_their_names_of_today() -> None:
    assert [group.flag for group in split(["--ablation", "local_only", "--mode=full"])] == [
        "",
        "--strategy",
        "--preset",
    ]


def test_the_last_value_counts() -> None:
    groups = split(["--preset", "full", "--preset=quick", "--config"])
    assert last_value(groups, "--preset") == "quick"
    assert last_value(groups, "--config") is None
    assert last_value(groups, "--eta") is None


def test_numbers_are_no_flags() -> None:
    words = ("--eta", "-h", "--", "-1", "-.5", "-inf", "-", "x")
    assert [word for word in words if is_flag(word)] == ["--eta", "-h", "--"]


def test_an_unknown_flag_has_its_nearest() -> None:
    known = ["--eta", "--lr", "--clients-per-task"]
    check_flags(split(["--eta", "1", "stray"]), flags=known, command="atlas run")
    message = r"unknown flag '--client-per-task'; did you mean '--clients-per-task'\? see `atlas run --help`"
    with pytest.raises(ConfigError, match=message):
        check_flags(split(["--client_per_task", "1"]), flags=known, command="atlas run")
