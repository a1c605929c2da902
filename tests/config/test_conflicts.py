"""The table of contradictions: every row is of settings that there are, and says in one line what to do."""

import pytest

from atlas_fl.config import Config, settings, with_values
from atlas_fl.config.conflicts import FACTS, NAMED, Conflict, check_conflicts, conflicts
from atlas_fl.config.settings import group_classes
from atlas_fl.config.values import Mark
from atlas_fl.errors import ConfigError


@pytest.mark.parametrize("conflict", conflicts(), ids=lambda row: f"{row.setting}-{row.other}")
def test_a_row_is_of_settings_that_there_are_and_can_be_looked_for(conflict: Conflict) -> None:
    of_several = {f"@{name}" for name in (*group_classes(), *Mark.__members__)}
    assert {name for name, _ in conflict.values} <= {*settings(), *FACTS, *of_several}
    assert conflict.applies(Config()) in (True, False)
    assert "{" not in conflict.message(Config())


def test_no_row_stands_twice_and_no_name_of_values_is_idle() -> None:
    rows = [tuple(row.values) for row in conflicts()]
    assert len({*rows}) == len(rows)
    served = [tuple(row.values) for row in conflicts("unserved.tsv")]
    assert {*NAMED} <= {words for row in [*rows, *served] for _, words in row}


def test_the_default_config_has_no_conflict() -> None:
    check_conflicts(Config())
    check_conflicts(Config(), of_halves=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"patience": 3, "personal_rounds": 2},
            "^--patience 3 ends a run before .*, which --personal-rounds 2 are; leave",
        ),
        (
            {"second_model": "stacked", "second_weight": 1.5},
            "^--second-weight 1.5 is a share with --second-model stacked",
        ),
        ({"carry_momentum": True, "participation": 0.5}, "^--carry-momentum keeps .* with --participation 0.5 that is"),
        ({"carry_momentum": True, "workers": 2}, "^--carry-momentum keeps what clients did in one process"),
        (
            {"share": ("head",), "mask_file": "x"},
            "^a mask freezes the head, and --share head shares nothing else; share A",
        ),
        ({"attack": "noise"}, "^--attack noise needs --attackers: clients by name, or how many; set it"),
    ],
)
def test_each_form_of_values_is_found(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_conflicts(with_values(Config(), values))
