"""Bytes of every strategy and method as `atlas list strategies` and the plan say them, held to the ledger of a run."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.config import Config
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.storage.jsonl import read_json
from tests.runs.covering import covering_methods
from tests.runs.finished import FinishedRuns
from tests.runs.reading import rows
from tests.runs.test_run import NEEDED

CLIENTS, CLUSTERS = 4, 3
ROUND = 2
"""Everybody has taken part before, and nobody trains for itself yet."""
HEADERS, STACKED_HEADERS = 0.02, 0.12
"""Names and shapes of tensors are bytes too: a sixth of a message here. A factor of all clients has one of them."""
IN_ONE_PLACE = frozenset({"centralized", "multitask"})
"""They have one client a task, and their rule is `local`."""
NAMES = [name for name in (*RULES, *METHODS) if name in {*RULES, *covering_methods()} - IN_ONE_PLACE]
"""All rules, and the methods that add something to theirs."""
AS_LARGE_AS_MODELS = frozenset({"correction", "control"})
"""Heads are left out of the column, and these hold them."""
IN_NUMBERS = {"(1+n)/2": (1 + CLIENTS) / 2, "(1+k)/2": (1 + CLUSTERS) / 2, "1+": 1.0}


def words_of(name: str) -> dict[str, object]:
    rule, method = (METHODS[name].rule, METHODS[name]) if name in METHODS else (name, None)
    ranks = "4" if method is None else method.settings.get("ranks", "4")
    needed = {key: value for key, value in NEEDED.get(rule, {}).items() if method is None and key != "ranks"}
    own = {"ifca_clusters": CLUSTERS} if rule == "ifca" else {}
    fine_tunes = method is not None and "personal_rounds" in method.suggested
    return {"strategy": name, "ranks": ranks, "rounds": 4 if fine_tunes else 2, "audit": False, **needed, **own}


def same_adapters_averaged(name: str) -> dict[str, object]:
    chosen = METHODS[name].settings if name in METHODS else {}
    return {**words_of("fedavg"), **{key: chosen[key] for key in ("ranks", "importance") if key in chosen}}


def bytes_by_kind(folder: Path) -> Counter[str]:
    found = Counter[str]()
    for row in rows(folder, "ledger"):
        if row["round"] == ROUND:
            found[str(row["kind"])] += int(str(row["bytes"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bytes_relative_to_fedavg_are_those_of_the_ledger(
    config: Callable[..., Config], finished: FinishedRuns, name: str
) -> None:
    whole = bytes_by_kind(finished(config(**same_adapters_averaged(name), name="fedavg")).folder)
    sent = bytes_by_kind(finished(config(**words_of(name))).folder)
    rule = RULES[METHODS[name].rule if name in METHODS else name].relative_bytes
    column = f"{METHODS[name].relative_bytes:g}" if rule == "1" and name in METHODS else rule
    beside = {"features"} if AS_LARGE_AS_MODELS & sent.keys() else {"features", "head"}
    total, reference = (sum(size for kind, size in found.items() if kind not in beside) for found in (sent, whole))
    tolerance = STACKED_HEADERS if "frozen" in sent else HEADERS
    expected = IN_NUMBERS[column] if column in IN_NUMBERS else float(column)
    assert total / reference == pytest.approx(expected, rel=tolerance)
    assert (sent["features"] > 0) == (column == "1+")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_plan_are_those_of_the_ledger(
    config: Callable[..., Config], finished: FinishedRuns, name: str
) -> None:
    folder = finished(config(**words_of(name))).folder
    for client in read_json(folder / "plan.json")["clients"]:
        for direction in ("up", "down"):
            sent = sum(
                int(str(row["bytes"]))
                for row in rows(folder, "ledger")
                if (row["round"], row["client"], row["direction"]) == (ROUND, client["name"], direction)
            )
            expected = client["predicted"][f"{direction}_bytes"]
            assert expected == pytest.approx(sent, rel=HEADERS)
