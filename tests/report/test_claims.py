"""What a page says of claims is what its runs have, by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.report.claims import MEMORY, claim_sections
from atlas_fl.report.federation_results import federation_results
from atlas_fl.report.finished_runs import RunScores, find_finished_runs
from atlas_fl.report.method_comparison import MethodComparison, compare_scores
from atlas_fl.report.results_page import results_page

SEEDS = (1, 2, 3, 4, 5)


def comparison(**scores: tuple[float, float]) -> MethodComparison:
    """Two clients of one task that have these scores in every seed."""
    runs = {
        name: [
            RunScores(
                seed=seed,
                tasks={"a-0": "a", "a-1": "a"},
                scores={"a-0": first, "a-1": second},
                loss=None,
                calibration_error=None,
                memory_bytes=None,
                gain_over_majority=None,
                num_bytes=195_000_000 if name == "atlas" else 1,
                bytes_below_whole=0.9994 if name == "atlas" else None,
                seconds=None,
                reused_seconds=None,
            )
            for seed in SEEDS
        ]
        for name, (first, second) in scores.items()
    }
    return compare_scores(runs, control="fedavg")


def test_local_and_prior_correction_stand_beside_the_best() -> None:
    one = comparison(local=(0.5, 0.5), local_prior=(0.6, 0.6), fedavg=(0.7, 0.7), ditto=(0.9, 0.7))
    other = comparison(local=(0.5, 0.5), fedavg=(0.7, 0.7))
    lines = list(claim_sections({"null": one, "sizes": other}, control="fedavg"))
    assert "| federation | `local` | `local_prior` | `fedavg` | `fedavg_prior` | best |" in lines
    assert "| null | 0.500 | 0.600 | 0.700 | - | 0.800 `ditto` |" in lines
    assert "`local` beside `local_prior` in sizes: not measured here." in lines
    assert "`local` beside `local_prior`: not measured here." in list(
        claim_sections({"sizes": other}, control="fedavg")
    )


def test_what_is_nowhere_shown_to_be_better_does_not_replicate() -> None:
    """FedSA is worse in one and equal in the other, FedPer better in one; local training was published by nobody."""
    one = comparison(local=(0.5, 0.5), fedavg=(0.7, 0.7), fedsa=(0.5, 0.5), fedper=(0.9, 0.9), flexlora=(0.7, 0.7))
    other = comparison(local=(0.5, 0.5), fedavg=(0.7, 0.7), fedsa=(0.701, 0.701), fedper=(0.5, 0.5))
    lines = list(claim_sections({"null": one, "sizes": other}, control="fedavg"))
    start = lines.index("| method | federations | worse | equal | of these the very scores |")
    assert lines[start + 2 : start + 5] == ["| `fedsa` | 2 | 1 | 1 | 0 |", "| `flexlora` | 1 | 0 | 1 | 1 |", ""]
    none = list(claim_sections({"null": comparison(fedavg=(0.7, 0.7), fedper=(0.9, 0.9))}, control="fedavg"))
    assert "None of 1 methods." in none


def test_promises_stand_beside_what_was_measured_or_are_said_not_to_be() -> None:
    """The variance between .6 and .8 is .02, between .65 and .75 .005: a quarter."""
    measured = comparison(fedavg=(0.6, 0.8), atlas=(0.65, 0.75))
    lines = list(claim_sections({"null": measured}, control="fedavg"))
    assert "| 175 | scores .913, .882 and .845 | null: 0.700 (`atlas`) |" in lines
    assert "| 176 | half the variance between clients | null: -75% against `fedavg` (`atlas`) |" in lines
    assert "| 177 | 99.96% fewer bytes, 195 MB | null: 99.94% fewer, 195 MB (`atlas`) |" in lines
    assert f"| 178 | 40 to 60% less memory, devices of 2 GB | {MEMORY} |" in lines
    lines = list(claim_sections({"null": comparison(fedavg=(0.6, 0.8), local=(0.65, 0.75))}, control="fedavg"))
    assert sum(line.endswith("| not measured here |") for line in lines) == 3


def test_a_page_has_these_sections(make_federation: Callable[..., None], tmp_path: Path) -> None:
    make_federation(2, gains={"local": 0.0, "local_prior": 0.1, "fedavg": 0.05, "fedavg_prior": 0.2})
    page = results_page(find_finished_runs([tmp_path]), control="fedavg")
    for title in (
        "What local training and prior correction already give",
        "What does not replicate",
        "What was promise",
    ):
        assert f"\n## {title}" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| contradiction, dial 2 | "))
    assert row.endswith(" `fedavg_prior` |") and " - " not in row


def test_seeds_that_do_not_pair_are_said_and_other_federations_stay(
    make_federation: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_federation(2, gains={"local": 0.0}, seeds=(1, 2))
    make_federation(2, gains={"fedavg": 0.0}, seeds=(3,))
    file = tmp_path / "page.md"
    assert main(["results", str(tmp_path), "--to", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no method has the seeds of fedavg: contradiction, dial 2 has local 1, 2 and fedavg 3; run the" in line
    assert not file.exists()
    make_federation(3)
    assert main(["results", str(tmp_path), "--to", str(file)]) == 0
    said = "No comparison: no method has the seeds of the control. There are local 1, 2 and fedavg 3."
    assert said in file.read_text()
    results = federation_results(find_finished_runs([tmp_path]), control="fedavg")
    assert [result.comparison is None for result in results] == [True, False]
