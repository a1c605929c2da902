"""Property inference: shares are read from sketches that follow from them, and from others by chance alone."""

import numpy as np
import pytest

from atlas_fl.errors import ConfigError
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.privacy_attacks import properties
from atlas_fl.privacy_attacks.properties import common_token, holds
from atlas_fl.privacy_attacks.registry import run_attack
from tests.runs.finished import Make

MANY = {"tasks": ("movie",), "samples": 100, "fingerprint_batches": 4}


@pytest.mark.parametrize("shows", [True, False])
def test_a_share_that_the_sketch_shows_is_read_and_noise_is_guessed(
    config: Make, monkeypatch: pytest.MonkeyPatch, shows: bool
) -> None:
    """Shadow clients have the shares that they should; by hand, nine shares of .1 to .9 are .2222 from their mean."""
    seen: list[list[EncodedExamples]] = []
    draw = np.random.default_rng(0)

    def sketches(_, __, made, *, on_event):
        seen.append(made)
        truth = [np.mean(one.labels) for one in made]
        if len(seen) == 2:
            token = max({*np.concatenate([one.ids for one in made])}, key=lambda one: spread(made, one))
            truth = [holds(one, token).mean() for one in made]
        assert on_event is not None
        return np.stack([np.array(truth) * shows, *draw.normal(size=(3, len(made)))], axis=1)

    def spread(made: list[EncodedExamples], token: int) -> float:
        return float(np.ptp([holds(one, token).mean() for one in made]))

    monkeypatch.setattr(properties, "measure_sketches", sketches)
    rows = run_attack(config(**MANY), "properties", shadows=9)
    assert [row["property"].split()[0] for row in rows] == ["label", "word"]
    for row, made in zip(rows, seen, strict=True):
        assert row["error_chance"] == pytest.approx(0.2222, abs=1e-4)
        assert {len(one) for one in made} == {row["examples"]} and len(made) == 18
        if shows:
            assert row["correlation"] > 0.98 and row["error"] < 0.05
        else:
            assert abs(row["correlation"]) < 0.8 and row["error"] > 0.15


def test_the_word_is_in_half_of_the_texts() -> None:
    """Texts 1 2 2, 2 3 and 3: token 2 is in two of three, and so is 3; 1 in one of three, which is as near to half."""
    ids = np.array([1, 2, 2, 2, 3, 3], dtype=np.int64)
    pool = EncodedExamples(
        ids=ids, types=np.zeros_like(ids), offsets=np.array([0, 3, 5, 6]), labels=np.zeros(3, np.int64)
    )
    assert common_token(pool) == 1
    assert holds(pool, 2).tolist() == [True, True, False] and holds(pool, 7).tolist() == [False] * 3


@pytest.mark.slow
def test_the_fingerprint_of_a_client_tells_more_than_chance(config: Make) -> None:
    """Mean gradients at the head are linear in the shares of labels."""
    row, _ = run_attack(config(**MANY, fingerprint="gradient"), "properties", shadows=16)
    assert row["error"] < row["error_chance"]
    assert row["correlation"] > 0.3


def test_who_is_alone_or_has_too_few_examples_is_one_line(config: Make) -> None:
    with pytest.raises(ConfigError, match=r"is one of 1 clients of its task, .*; say --clients-per-task 2"):
        run_attack(config(**{**MANY, "clients_per_task": 1}), "properties")
    with pytest.raises(ConfigError, match=r"make clients of \d with any share of label 0; allowed: at least 8"):
        run_attack(config(**{**MANY, "samples": 10}), "properties")
    with pytest.raises(ConfigError, match=r"--shadows is 1; allowed: at least 4"):
        run_attack(config(**MANY), "properties", shadows=1)
