"""The table that closes a run, as a rich table; whoever prints it is the command line.

`summary` is the content of `summary.json`. What it does not hold is a dash.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from atlas_fl.io.shapes import WRITTEN
from atlas_fl.report.words import EMPTY, add_columns, human_bytes, new_table, number, percent, seconds

LEGEND = (
    "best: test score of each client's best round by validation; 90% at: first round with 90% of the last validation "
    "score; spread: standard deviation over clients"
)


def closing_table(summary: Mapping[str, Any]) -> Table:
    """What a finished run shows: per task the test scores, the majority class, the worst client; bytes and time below.

    `final` is what the clients end with; `best` is each client's best round by validation, reported on test.
    """
    run = summary.get("run") or {}
    title = ", ".join(str(run[key]) for key in ("strategy", "model") if key in run)
    table = new_table(f"Test scores of {title}" if title else "Test scores")
    add_columns(table, ["task"], ["clients", "majority", "final", "over\nmajority", "best", "90%\nat", "spread"])
    table.add_column("worst client", overflow="fold")
    for task, group in (summary.get("tasks") or {}).items():
        table.add_row(escape(task), *_closing_cells(group))
    table.add_section()
    table.add_row("all", *_closing_cells(summary.get("overall") or {}), style="bold")
    table.caption = _closing_caption(summary)
    return table


def _closing_cells(group: Mapping[str, Any]) -> list[str]:
    final, best = group.get("final") or {}, group.get("best") or {}
    test, worst = final.get("test") or {}, final.get("worst_client") or {}
    reached = (group.get("rounds_to") or {}).get("90%")
    return [
        str(group.get("clients", EMPTY)),
        number(test.get("majority"), 3),
        number(test.get("primary"), 3),
        number(test.get("gain_over_majority"), 3, sign=True),
        number((best.get("test") or {}).get("primary"), 3),
        EMPTY if reached is None else str(reached),
        number((final.get("spread") or {}).get("std"), 3),
        f"{escape(worst['client'])} {number(worst.get('primary'), 3)}" if worst else EMPTY,
    ]


def _closing_caption(summary: Mapping[str, Any]) -> str:
    """What the columns mean; then bytes with the reduction, time, peak memory, devices, refused updates."""
    sent, memory = summary.get("bytes") or {}, summary.get("memory") or {}
    lines = [LEGEND, *_stopped(summary)]
    lines += [_written(task, group) for task, group in (summary.get("tasks") or {}).items() if _has_written(group)]
    if "total" in sent:
        lines.append(f"{human_bytes(sent['up'])} up, {human_bytes(sent['down'])} down{_than_whole(sent)}")
        if "between_clients" in sent:
            lines.append(f"{human_bytes(sent['between_clients'])} of it between clients, past the server")
        if "relayed" in sent:
            lines.append(f"{human_bytes(sent['relayed'])} of it between clients, handed on by the server")
    times = [f"{seconds((summary.get('seconds') or {})['total'])}"] if "total" in (summary.get("seconds") or {}) else []
    peaks = [f"{human_bytes(size)} of {name.removesuffix('_bytes').upper()} at most" for name, size in memory.items()]
    if times or peaks:
        lines.append(", ".join([*times, *peaks]))
    clients = (summary.get("clients") or {}).values()
    used, parts = [client.get("utilisation") or {} for client in clients], [client.get("memory") for client in clients]
    beside = ", activations not counted" if any(own and "activations" not in own for own in parts) else ""
    words = {"busy": "of a round busy", "memory": f"of the memory used{beside}"}
    shares = [f"{_range([one[name] for one in used if name in one])} {text}" for name, text in words.items()
              if any(name in one for one in used)]  # fmt: skip
    lines.extend([f"devices: {', '.join(shares)}"] if shares else [])
    refused = ((summary.get("events") or {}).get("count") or {}).get("refused", 0)
    lines.extend([f"{refused} update{'' if refused == 1 else 's'} refused"] if refused else [])
    return "\n".join(lines)


def _than_whole(sent: Mapping[str, Any]) -> str:
    """How much less or more than the whole model; nothing where whole models were sent and no mask saved any."""
    saved = (sent.get("full_model") or {}).get("reduction")
    if saved is None or (saved <= 0 and "weights" in (sent.get("by_kind") or {})):
        return ""
    return f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than the whole model in every round"


def _stopped(summary: Mapping[str, Any]) -> list[str]:
    """When a run stopped early, and after which round its mean validation score was best."""
    if "stopped" not in summary:
        return []
    after, best = summary["stopped"]["round"], summary["best"]
    return [f"stopped early after round {after}; best in round {best['round']}: validation {best['validation']:.3f}"]


def _range(shares: Sequence[float]) -> str:
    """The least and the largest share, or the one that all have.

    >>> _range([0.25, 1.0, 0.5])
    '25.0% to 100.0%'
    """
    least, most = percent(min(shares)), percent(max(shares))
    return least if least == most else f"{least} to {most}"


def _test_scores(group: Mapping[str, Any]) -> Mapping[str, Any]:
    scores: Mapping[str, Any] = (group.get("final") or {}).get("test") or {}
    return scores


def _has_written(group: Mapping[str, Any]) -> bool:
    return "perplexity" in _test_scores(group)


def _written(task: str, group: Mapping[str, Any]) -> str:
    """Final test perplexity of a task that writes text and, where it has prompts, ROUGE; `final` is its accuracy."""
    test = _test_scores(group)
    found = [f"{kind.replace('rouge', 'ROUGE-')} {number(test[kind], 3)}" for kind in WRITTEN[1:] if kind in test]
    return ", ".join([f"{escape(task)} writes: perplexity {number(test['perplexity'], 2)}", *found])
