import pytest

from atlas_fl.experiment.summary import (
    best_round,
    client_scores,
    group_scores,
    histories,
    mean_series,
    rounds_to,
    sampled_series,
)


def row(client: str, round: int, split: str, primary: float) -> dict[str, object]:
    scores = {"primary": primary, "accuracy": primary, "majority": 0.5, "loss": 1 - primary, "examples": 100}
    return {"round": round, "client": client, "task": client.split("-")[0], "split": split} | scores


VALIDATION = {"a-0": [0.50, 0.80, 0.90, 0.85], "a-1": [0.40, 0.60, 0.60, 0.60]}
TEST = {"a-0": [0.55, 0.70, 0.75, 0.95], "a-1": [0.45, 0.65, 0.99, 0.50]}
ROWS = [
    row(client, at, split, score)
    for client in ("a-0", "a-1")
    for split, scores in (("validation", VALIDATION), ("test", TEST))
    for at, score in enumerate(scores[client])
]


def test_the_best_round_is_chosen_on_validation_and_reported_on_test() -> None:
    found = client_scores(histories(ROWS)["a-0"])
    assert found["best"]["round"] == 2
    assert found["best"]["test"]["primary"] == 0.75  # not the .95 that test alone would choose
    assert found["final"]["test"]["primary"] == 0.95
    assert found["final"]["test"]["gain_over_majority"] == pytest.approx(0.45)


def test_of_equal_rounds_the_earliest_is_best() -> None:
    assert best_round(histories(ROWS)["a-1"]) == 1


def test_only_a_round_with_a_test_row_can_be_chosen() -> None:
    rows = [entry for entry in ROWS if entry["split"] == "validation" or entry["round"] in (0, 3)]
    assert best_round(histories(rows)["a-0"]) == 3
    rows = [entry for entry in ROWS if entry["split"] == "validation"]
    assert best_round(histories(rows)["a-0"]) == 2
    assert best_round(histories([row("a-0", 1, "test", 0.5)])["a-0"]) is None


def test_rounds_to_a_share_by_hand() -> None:
    scores = {0: 0.10, 1: 0.70, 2: 0.76, 3: 0.80}  # 90% of .80 is .72, 95% is .76
    assert rounds_to(scores, 0.90) == 2
    assert rounds_to(scores, 0.95) == 2
    assert rounds_to(scores, 0.50) == 1
    assert rounds_to({1: -0.1, 2: 0.0}, 0.9) is None
    assert rounds_to({}, 0.9) is None


def test_a_group_by_hand() -> None:
    found = group_scores(list(histories(ROWS).values()))
    assert found["clients"] == 2
    assert found["final"]["test"]["primary"] == pytest.approx((0.95 + 0.50) / 2)
    assert found["final"]["worst_client"]["client"] == "a-1"
    assert found["final"]["worst_client"]["primary"] == 0.50
    assert found["final"]["spread"] == pytest.approx({"std": 0.225, "range": 0.45})
    assert found["best"]["test"]["primary"] == pytest.approx((0.75 + 0.65) / 2)  # each client's own best round
    # mean validation .45 .70 .75 .725: 90% of the last is .6525, 95% is .68875
    assert found["rounds_to"] == {"90%": 1, "95%": 1}


def test_the_mean_is_over_rounds_that_all_clients_have() -> None:
    rows = [entry for entry in ROWS if not (entry["client"] == "a-1" and entry["round"] == 2)]
    found = mean_series(list(histories(rows).values()), "validation")
    assert found == pytest.approx({0: 0.45, 1: 0.70, 3: 0.725})


def test_the_mean_counts_a_client_from_its_first_round_on() -> None:
    late = [row("a-2", at, "validation", 0.95) for at in (2, 3)]
    found = mean_series(list(histories([*ROWS, *late]).values()), "validation")
    assert found == pytest.approx({0: 0.45, 1: 0.70, 2: (0.90 + 0.60 + 0.95) / 3, 3: (0.85 + 0.60 + 0.95) / 3})


def test_the_mean_of_training_is_over_those_that_a_round_drew() -> None:
    drawn = [("a-0", 1, 0.9), ("a-1", 1, 0.5), ("a-1", 2, 0.4), ("a-2", 3, 0.2), ("a-0", 3, 0.6)]
    rows = [{**row(client, at, "train", 0.5), "loss": loss} for client, at, loss in drawn]
    found = list(histories(rows).values())
    assert sampled_series(found, "train", "loss") == pytest.approx({1: 0.7, 2: 0.4, 3: 0.4})
    assert sampled_series([], "train", "loss") == {}
    assert mean_series(found, "train", "loss") == pytest.approx({1: 0.7}), "not all of them in any other round"


def test_what_is_undefined_is_absent() -> None:
    regression = {"round": 1, "client": "sts-0", "task": "sts", "split": "test", "loss": 0.3, "primary": 0.8}
    found = client_scores(histories([regression])["sts-0"])
    assert found["final"]["test"] == {"round": 1, "loss": 0.3, "primary": 0.8}
    assert "best" not in found
    mixed = group_scores(list(histories([regression, row("a-0", 1, "test", 0.6)]).values()))
    assert mixed["final"]["test"] == pytest.approx({"loss": 0.35, "primary": 0.7})
    assert group_scores([]) == {"clients": 0, "final": {}, "best": {}, "rounds_to": {}}


def test_rows_in_any_order_and_events_between_them_change_nothing() -> None:
    event = {"round": 1, "client": "a-0", "event": "refused", "reason": "NaN"}
    shuffled = histories([event, *reversed(ROWS)])
    assert client_scores(shuffled["a-0"]) == client_scores(histories(ROWS)["a-0"])


def test_perplexity_has_means_but_accuracy_decides() -> None:
    """Where the accuracy is highest the perplexity is too here, so that choosing by the wrong end would show."""
    rows = [
        {"round": at, "client": client, "task": "notes", "split": split, "loss": 1.0, "examples": 9}
        | {"primary": score, "accuracy": score, "perplexity": 100 * score, "rougeL": 0.5}
        for client, scores in (("notes-0", (0.2, 0.6, 0.5)), ("notes-1", (0.1, 0.3, 0.4)))
        for at, score in enumerate(scores)
        for split in ("validation", "test")
    ]
    members = list(histories(rows).values())
    assert [best_round(member) for member in members] == [1, 2]
    found = group_scores(members)
    assert found["final"]["test"]["perplexity"] == pytest.approx(45)
    assert found["final"]["test"]["rougeL"] == 0.5
    assert found["final"]["worst_client"]["client"] == "notes-1"
    assert found["final"]["worst_client"]["perplexity"] == pytest.approx(40)
    assert found["best"]["test"]["perplexity"] == pytest.approx(50)
    assert found["rounds_to"] == {"90%": 1, "95%": 1}
