"""The table of contradictions: every row is of settings that there are, and says in one line what to do."""

import pytest

from atlas_fl.config import Config, settings
from atlas_fl.config.conflicts import FACTS, NAMED, Conflict, check_conflicts, conflicts
from atlas_fl.config.settings import group_classes
from atlas_fl.config.values import Mark


@pytest.mark.parametrize("conflict", conflicts(), ids=lambda row: "-".join(name for name, _ in row.values))
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
