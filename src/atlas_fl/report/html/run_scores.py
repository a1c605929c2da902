"""Sections of a run's page about scores: what came out, and how it came to that, round by round."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atlas_fl.experiment.summary import client_scores, further_scores, group_scores
from atlas_fl.report.figure_rows import EVERY_CLIENT, class_rows, convergence_rows, member_rows, score_rows
from atlas_fl.report.format import EMPTY, cluster_name, isolate
from atlas_fl.report.html.charts import (
    FAINT,
    INK,
    Spec,
    category,
    chart,
    class_axis,
    colours,
    heat_map,
    line,
    of_clients,
    picker,
    quantity,
    rounds,
    row_height,
    rule_at,
    tips,
)
from atlas_fl.report.html.elements import Block, Chart, Fact, Facts, Row, Section
from atlas_fl.report.html.palette import colour
from atlas_fl.report.record import Record
from atlas_fl.report.table import Cell, Table, count, plain, size
from atlas_fl.report.tables import GROUP_COLUMNS, group_cells

Summary = Mapping[str, Any]
ALL = "(all clients)"
"""In the column of clients: all test examples of a task."""
FRAME = {"filled": False, "stroke": "var(--warning)", "strokeWidth": 2}
"""Round the cell of an update that was refused."""

OTHER_SCORES = {"perplexity": 2, "rouge1": 3, "rouge2": 3, "rougeL": 3, "f1": 3, "mcc": 3}
"""Further test scores that a task may have, and their decimals."""


def outcome(record: Record, summary: Summary | None) -> Section | None:
    """Section on the final scores, against the majority class, with the best and the worst; None before any score."""
    clients = _clients(record, summary)
    scored = {name: entry for name, entry in clients.items() if "primary" in entry.get("final", {}).get("test", {})}
    if not scored:
        return None
    groups = (summary or {}).get("tasks") or {
        task: group_scores(members) for task, members in record.by_task.items() if members
    }
    overall = (summary or {}).get("overall") or group_scores(list(record.histories.values()))
    blocks: list[Block] = [
        _outcome_facts(overall, scored),
        _outcome_chart(record, scored),
        _task_table(groups, overall, scored),
        _client_table(record, clients),
    ]
    lead = (
        "Final: the test score of the model that a client ends with. Best: that of its best round, which its validation"
        " examples chose. Majority: the accuracy of always guessing the commonest class."
    )
    return Section(name="outcome", title="What came out", lead=lead, blocks=blocks)


def _clients(record: Record, summary: Summary | None) -> Mapping[str, Any]:
    """Scores by client as `summary.json` holds them, or of a run without one from its rows."""
    if summary is not None:
        entries: Mapping[str, Any] = summary["clients"]
        return entries
    return {name: client_scores(history) for name, history in record.histories.items()}


def _test(entry: Mapping[str, Any], when: str = "final") -> Mapping[str, Any]:
    scores: Mapping[str, Any] = entry.get(when, {}).get("test") or {}
    return scores


def _outcome_facts(overall: Mapping[str, Any], scored: Mapping[str, Any]) -> Facts:
    test = _test(overall)
    order = sorted(scored, key=lambda name: _test(scored[name])["primary"])
    gain = test.get("gain_over_majority")
    facts = [
        Fact(name="mean test score", value=plain(test.get("primary")), note=f"of {len(scored)} clients, at the end"),
        Fact(
            name="over the majority class",
            value=plain(gain, sign=True),
            note="" if gain is None else f"majority class: {plain(test.get('majority')).text}",
        ),
        Fact(name="best client", value=plain(_test(scored[order[-1]])["primary"]), note=order[-1]),
        Fact(name="worst client", value=plain(_test(scored[order[0]])["primary"]), note=order[0]),
    ]
    below = [name for name in scored if _test(scored[name]).get("gain_over_majority", 0.0) < 0]
    if gain is not None:
        note = f"of {len(scored)} clients" if len(below) != 1 else below[0]
        facts.append(Fact(name="below their majority class", value=count(len(below)), note=note))
    return Facts(facts=facts)


def _outcome_chart(record: Record, scored: Mapping[str, Any]) -> Chart:
    order = [name for task in record.tasks for name in _by_score(record, scored, task)]
    rows: list[Row] = [
        {
            "client": name,
            "task": record.task_of[name],
            "final": _test(scored[name])["primary"],
            "best": _test(scored[name], "best").get("primary"),
            "majority": _test(scored[name]).get("majority"),
        }
        for name in order
    ]
    return Chart(
        name="outcome",
        title="Test score of every client",
        note="dot: final; hollow: best round by validation; bar: majority class",
        spec=chart(_outcome_layers(order, record.tasks), height=row_height(len(order))),
        data={"rows": rows},
    )


def _outcome_layers(order: Sequence[str], tasks: Sequence[str]) -> Spec:
    """From the majority class to the final score of each client, with the best one between them."""
    y = category("client", None, order=order, labelOverlap="greedy")
    known = tips(("client", "client", ""), ("task", "task", ""), ("final", "final", ".4f"), ("best", "best", ".4f"))
    known += tips(("majority", "majority class", ".4f"))
    field = colours("task", None, domain=tasks)
    low = quantity("majority", "test score")
    layers: list[Spec] = [
        {
            "mark": {"type": "rule", "color": FAINT, "strokeWidth": 1.5},
            "encoding": {"x": low, "x2": {"field": "final"}},
        },
        {
            "mark": {"type": "tick", "color": INK, "thickness": 2, "size": 12},
            "encoding": {"x": low, "tooltip": known},
        },
        {
            "mark": {"type": "point", "shape": "diamond", "size": 50, "strokeWidth": 1.5},
            "encoding": {"x": quantity("best", "test score"), "color": field, "tooltip": known},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"x": quantity("final", "test score"), "color": field, "tooltip": known},
        },
    ]
    return {"data": {"name": "rows"}, "encoding": {"y": y}, "layer": layers}


def _by_score(record: Record, scored: Mapping[str, Any], task: str) -> list[str]:
    members = [name for name in scored if record.task_of.get(name) == task]
    return sorted(members, key=lambda name: -_test(scored[name])["primary"])


def _task_table(groups: Mapping[str, Any], overall: Mapping[str, Any], scored: Mapping[str, Any]) -> Table:
    found = {name: score for group in groups.values() for name, score in _test(group).items()}
    further = [name for name in OTHER_SCORES if name in found]
    further += further_scores(found)
    best = {task: _best_client(scored, task) for task in groups}
    return Table(
        title="By task",
        columns=(
            *("task", *GROUP_COLUMNS, "90% in round", "spread"),
            *("worst client", "its score", "best client", "its score"),
            *further,
        ),
        rows=[[task, *_group_cells(group, best[task], further)] for task, group in groups.items()],
        footer=[["all", *_group_cells(overall, _best_client(scored), further)]] if len(groups) > 1 else (),
        note="90% in round: the first with 90% of the last validation score; spread: standard deviation over clients",
    )


def _best_client(scored: Mapping[str, Any], task: str | None = None) -> tuple[str, float | None]:
    """The client with the highest final test score, and that score."""
    scores = {name: _test(entry)["primary"] for name, entry in scored.items() if task in (None, entry.get("task"))}
    return max(scores.items(), key=lambda item: item[1], default=(EMPTY, None))


def _group_cells(group: Mapping[str, Any], best: tuple[str, float | None], further: Sequence[str]) -> list[Cell]:
    worst = (group.get("final") or {}).get("worst_client") or {}
    return [
        *group_cells(group),
        worst.get("client", EMPTY),
        plain(worst.get("primary")),
        best[0],
        plain(best[1]),
        *(plain(_test(group).get(name), OTHER_SCORES.get(name, 3)) for name in further),
    ]


def _client_table(record: Record, clients: Mapping[str, Any]) -> Table:
    planned = {client["name"]: client for client in record.plan["clients"]}
    rows: list[list[Cell]] = []
    for name, entry in clients.items():
        test, sent = _test(entry), record.totals.by_client.get(name, {"up": 0, "down": 0})
        plan = planned.get(name, {})
        rows.append(
            [
                name,
                entry.get("task", EMPTY),
                cluster_name(plan.get("cluster", -1)),
                plan.get("device", EMPTY),
                count(test.get("examples")),
                plain(test.get("majority")),
                plain(test.get("primary")),
                plain(test.get("gain_over_majority"), sign=True),
                plain(_test(entry, "best").get("primary")),
                count(entry.get("best", {}).get("round")),
                size(sent["up"]),
                size(sent["down"]),
            ]
        )
    return Table(
        title="By client",
        columns=(
            *("client", "task", "cluster", "device", "test examples", "majority", "final", "over majority"),
            *("best", "in round", "sent", "received"),
        ),
        rows=rows,
    )


def convergence(record: Record) -> Section | None:
    """Scores and losses by round, by task and client; None where no round has been evaluated."""
    scores = score_rows(record)
    if not scores:
        return None
    rows = convergence_rows(record)
    blocks: list[Block] = []
    for index, task in enumerate(record.tasks):
        of_task = [row for row in rows if row["task"] == task]
        if of_task:
            blocks += [_score_chart(of_task, index=index, task=task), _loss_chart(of_task, index=index, task=task)]
    blocks += [_round_map(record, scores), *_class_maps(record)]
    return Section(name="convergence", title="How it converged", blocks=blocks)


def _score_chart(rows: Sequence[Row], *, index: int, task: str) -> Chart:
    scores = _series(rows, "validation score")
    mean, majority, accuracy = (
        _series(rows, name).get(EVERY_CLIENT, [])
        for name in ("validation score", "majority class", "validation accuracy")
    )
    clients = [row for name, members in scores.items() if name != EVERY_CLIENT for row in members]
    names = list(dict.fromkeys(row["client"] for row in clients))
    y = quantity("value", "validation score")
    known = tips(("client", "client", ""), ("round", "round", "d"), ("value", "score", ".4f"))
    faded = {
        "condition": {"param": "picked", "value": max(0.2, min(0.75, 6 / len(names))), "empty": True},
        "value": 0.08,
    }
    layers: list[Spec] = [
        {
            "params": [picker("client", names, everyone="all clients", label="client")],
            "mark": line(colour(index), width=1, points=14),
            "encoding": {"detail": {"field": "client"}, "opacity": faded, "tooltip": known},
        },
        {
            "data": {"name": "mean"},
            "mark": line(colour(index), width=3, points=40),
            "encoding": {"tooltip": known},
        },
        {
            "data": {"name": "last"},
            "mark": {"type": "text", "align": "left", "dx": 6, "color": colour(index)},
            "encoding": {"text": {"field": "value", "type": "quantitative", "format": ".3f"}},
        },
    ]
    note = "thin: one client; bold: their mean"
    data = {"rows": clients, "mean": mean, "last": mean[-1:]}
    if majority:
        note += "; dashed: majority class"
        data["majority"] = majority[-1:]
        layers.append(rule_at("value", data="majority"))
    if accuracy and [row["value"] for row in accuracy] != [row["value"] for row in mean]:
        note += "; dotted: accuracy, which is not the score"
        data["accuracy"] = accuracy
        mark = {"type": "line", "color": colour(index), "strokeWidth": 1.5, "strokeDash": [1, 3]}
        layers.append({"data": {"name": "accuracy"}, "mark": mark, "encoding": {"tooltip": known}})
    spec = chart({"data": {"name": "rows"}, "encoding": {"x": rounds(), "y": y}, "layer": layers})
    return Chart(
        name=f"score-{index}",
        title=f"{isolate(task)}: validation score",
        note=note,
        spec=spec,
        data=data,
        is_wide=False,
    )


def _series(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    """The rows of one series by client."""
    by_client: dict[str, list[Row]] = {}
    for row in rows:
        if row["series"] == name:
            by_client.setdefault(row["client"], []).append(row)
    return by_client


def _loss_chart(rows: Sequence[Row], *, index: int, task: str) -> Chart:
    losses = [row for row in rows if row["client"] == EVERY_CLIENT and row["series"].endswith("loss")]
    known = tips(("series", "of", ""), ("round", "round", "d"), ("value", "loss", ".4f"))
    names = ["training loss", "validation loss"]
    encoding = {
        "x": rounds(),
        "y": quantity("value", "mean loss"),
        "strokeDash": {
            "field": "series",
            "type": "nominal",
            "title": None,
            "scale": {"domain": names, "range": [[4, 3], [1, 0]]},
            "legend": {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 2},
        },
        "tooltip": known,
    }
    return Chart(
        name=f"loss-{index}",
        title=f"{isolate(task)}: loss",
        note="means over the clients that have one",
        spec=chart({"data": {"name": "rows"}, "mark": line(colour(index)), "encoding": encoding}),
        data={"rows": losses},
        is_wide=False,
    )


def _round_map(record: Record, rows: Sequence[Row]) -> Chart:
    has_gain = all(row["gain"] is not None for row in rows)
    value, title = ("gain", "over the majority class") if has_gain else ("score", "score")
    values = [row[value] for row in rows]
    members = member_rows(record)
    at = sorted({row["round"] for row in rows})
    known = tips(("client", "client", ""), ("task", "task", ""), ("round", "round", "d"), ("score", "score", ".4f"))
    known += tips(("gain", "over majority", "+.4f")) if has_gain else []
    heat = heat_map(
        x=category("round", "round", order=at, labelAngle=0, labelOverlap="greedy"),
        y=category("client", None, order=_distinct(members, "client"), labelOverlap="greedy"),
        value=value,
        title=title,
        form=".2f",
        tooltip=known,
        domain=(min(values), max(values)),
        text=("score", ".2f"),
    )
    spec, beside = of_clients(heat, members, record.tasks)
    refused = [row for row in record.metrics if row.get("event") == "refused" and row["round"] in at]
    if refused:
        spec["layer"].append({"data": {"name": "refused"}, "mark": {"type": "rect", **FRAME}})
        beside["refused"] = [{name: row[name] for name in ("client", "round")} for row in refused]
    return Chart(
        name="scores",
        title="Validation score of every client, round by round",
        note=f"colour: {title}; number: score; lines between clusters"
        + ("; framed: update refused" if refused else ""),
        spec=spec,
        data={"rows": rows, **beside},
    )


def _class_maps(record: Record) -> list[Block]:
    """Accuracy by class and client of every task whose test images were counted by class, above it of all clients."""
    counted = [row for row in class_rows(record) if row["examples"]]
    sums: dict[tuple[str, str, str], Counter[str]] = {}
    for row in counted:
        for client in (ALL, row["client"]):
            counts = sums.setdefault((row["task"], client, row["class"]), Counter())
            counts.update(hits=row["hits"], examples=row["examples"])
    rows = [
        {"task": task, "client": client, "class": name, **counts, "accuracy": counts["hits"] / counts["examples"]}
        for (task, client, name), counts in sums.items()
    ]
    return [
        Chart(
            name=f"by-class-{index}",
            title=f"{isolate(task)}: test accuracy by class",
            note=f"of all classes: {_overall(of_task):.3f}; empty: no test example of that class",
            spec=heat_map(
                x=class_axis(_distinct(of_task, "class")),
                y=category("client", None, order=_distinct(of_task, "client"), labelOverlap="greedy"),
                value="accuracy",
                title="accuracy",
                form=".2f",
                tooltip=tips(
                    *(("client", "client", ""), ("class", "class", ""), ("accuracy", "accuracy", ".4f")),
                    *(("hits", "recognised", "d"), ("examples", "examples", "d")),
                ),
                domain=(0.0, 1.0),
            ),
            data={"rows": of_task},
        )
        for index, task in enumerate(record.tasks)
        if (of_task := [row for row in rows if row["task"] == task])
    ]


def _overall(rows: Iterable[Row]) -> float:
    """Accuracy over all test examples of a task."""
    of_all = [row for row in rows if row["client"] == ALL]
    return float(sum(row["hits"] for row in of_all) / sum(row["examples"] for row in of_all))


def _distinct(rows: Iterable[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))
