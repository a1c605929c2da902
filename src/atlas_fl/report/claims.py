"""Sections of the page of results that set what was claimed beside what these runs have: computed, nothing else.

What local training and prior correction already give; which published methods do not replicate; and the numbers that
were promised of ATLAS. What the runs do not hold is "not measured here".
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from atlas_fl.config.methods import METHODS
from atlas_fl.report.comparison_tables import shown
from atlas_fl.report.format import human_bytes, number
from atlas_fl.report.method_comparison import AVERAGE, MethodComparison
from atlas_fl.report.score_table import BASELINE

Comparisons = Mapping[str, MethodComparison]
"""By the title of the federation."""

ATLAS = ("atlas", "atlas_laplacian")
"""What ATLAS does by default, and as it was first described."""
SIMPLE = (BASELINE, "local_prior", AVERAGE, "fedavg_prior")
"""What a personal method must beat: nothing shared, one model, and either with the client's class frequencies."""
REFERENCES = frozenset(
    {"centralized", "multitask", "linear_probe", "fedavg_oracle", "local_prior", "atlas_pad", "atlas_truncate"}
)
"""Of `METHODS` those that are no method of the literature, or ATLAS's own."""
NOT_MEASURED = "not measured here"
MEMORY = "not in these rows, since one process computes all clients: `python benchmarks/split.py` measures one client"


def claim_sections(comparisons: Comparisons, *, control: str) -> Iterator[str]:
    """The lines of all sections."""
    yield from ("", "## What local training and prior correction already give", "", *_simple_lines(comparisons))
    yield from ("", "## What does not replicate", "", *_replication_lines(comparisons, control=control))
    yield from ("", "## What was promised", "", *_promise_lines(comparisons))


def _simple_lines(comparisons: Comparisons) -> Iterator[str]:
    measured = {title: one for title, one in comparisons.items() if {BASELINE, "local_prior"} <= one.rows.keys()}
    yield (
        "`local_prior` is local training with the client's own class frequencies in its logits: no byte is sent. The"
        " *best* method is that of the highest mean, which among many methods is in part luck."
    )
    if not measured:
        yield from ("", f"`{BASELINE}` beside `local_prior`: {NOT_MEASURED}.")
        return
    yield from ("", f"| federation | {' | '.join(f'`{name}`' for name in SIMPLE)} | best |")
    yield f"|{'---|' * (len(SIMPLE) + 2)}"
    for title, comparison in measured.items():
        means = {name: row.statistics.mean for name, row in comparison.rows.items()}
        best = max(means, key=lambda name: means[name])
        cells = [number(means.get(name), 3) for name in SIMPLE]
        yield f"| {title} | {' | '.join(cells)} | {means[best]:.3f} `{best}` |"
    if missing := [title for title in comparisons if title not in measured]:
        yield from ("", f"`{BASELINE}` beside `local_prior` in {'; '.join(missing)}: {NOT_MEASURED}.")


def _replication_lines(comparisons: Comparisons, *, control: str) -> Iterator[str]:
    yield (
        f"Published methods that are shown to be worse than `{control}` or equal to it in every federation here in"
        " which they ran; in a federation of another kind they may be better."
    )
    verdicts: dict[str, list[str]] = {}
    same: Counter[str] = Counter()
    for comparison in comparisons.values():
        for name, pair in comparison.pairs.items():
            if _is_published(name):
                verdicts.setdefault(name, []).append(shown(pair))
                same[name] += not any(pair.differences)
    failed = {name: words for name, words in verdicts.items() if set(words) <= {"worse", "equal"}}
    if not failed:
        yield from ("", f"None of {len(verdicts)} methods.")
        return
    yield from ("", "| method | federations | worse | equal | of these the very scores |", "|---|---|---|---|---|")
    for name, words in sorted(failed.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"| `{name}` | {len(words)} | {words.count('worse')} | {words.count('equal')} | {same[name]} |"


def _is_published(label: str) -> bool:
    """Whether a row is one of a method of the literature, whatever its settings."""
    method = label.split()[0]
    return method in METHODS and method not in REFERENCES


def _promise_lines(comparisons: Comparisons) -> Iterator[str]:
    yield "The first description of ATLAS promised numbers. Beside them is what its rows have in these runs."
    yield from ("", "| promise | its words | measured here |", "|---|---|---|")
    rows = {
        "175": ("scores .913, .882 and .845", _scores_of_atlas(comparisons)),
        "176": ("half the variance between clients", _variances(comparisons)),
        "177": ("99.96% fewer bytes, 195 MB", _bytes_saved(comparisons)),
        "178": ("40 to 60% less memory, devices of 2 GB", MEMORY),
    }
    for number_of_promise, (words, measured) in rows.items():
        yield f"| {number_of_promise} | {words} | {measured or NOT_MEASURED} |"
    if rows["175"][1]:
        yield from ("", "What .913, .882 and .845 were measured on is not known here, so that they do not compare.")


def _atlas_rows(comparison: MethodComparison) -> Sequence[str]:
    return [name for name in comparison.rows if name.split()[0] in ATLAS]


def _scores_of_atlas(comparisons: Comparisons) -> str:
    return "; ".join(
        f"{title}: {comparison.rows[name].statistics.mean:.3f} (`{name}`)"
        for title, comparison in comparisons.items()
        for name in _atlas_rows(comparison)
    )


def _variances(comparisons: Comparisons) -> str:
    """The variance between the clients of a task under ATLAS relative to that under FedAvg."""
    parts = []
    for title, comparison in comparisons.items():
        average = comparison.rows[AVERAGE].variance_in_tasks if AVERAGE in comparison.rows else None
        for name in _atlas_rows(comparison) if average else ():
            own = comparison.rows[name].variance_in_tasks
            if own is not None and average:
                parts.append(f"{title}: {100 * (own / average - 1):+.0f}% against `{AVERAGE}` (`{name}`)")
    return "; ".join(parts)


def _bytes_saved(comparisons: Comparisons) -> str:
    """Bytes of a run of ATLAS, and how far below those of whole models in every round."""
    return "; ".join(
        f"{title}: {100 * row.bytes_below_whole:.2f}% fewer, {human_bytes(row.num_bytes)} (`{name}`)"
        for title, comparison in comparisons.items()
        for name in _atlas_rows(comparison)
        if (row := comparison.rows[name]).bytes_below_whole is not None
    )
