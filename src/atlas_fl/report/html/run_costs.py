"""Sections of a run's page about costs, privacy and mishaps: bytes, memory, time, absence, what cuts reveal."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atlas_fl.experiment.summary import MEASURED, STOPPED
from atlas_fl.report.figure_rows import leakage_rows, traffic_rows
from atlas_fl.report.format import EMPTY, isolate
from atlas_fl.report.html.charts import INK, category, chart, colours, line, quantity, rounds, row_height, tips
from atlas_fl.report.html.elements import Block, Chart, Fact, Facts, Row, Section
from atlas_fl.report.html.palette import colour, kind_colour
from atlas_fl.report.record import Record
from atlas_fl.report.table import Cell, Table, count, duration, share, size
from atlas_fl.report.tables import leakage_table
from atlas_fl.storage.ledger import KINDS

Summary = Mapping[str, Any]
BYTES_AXIS: dict[str, Any] = {"labelExpr": "format(abs(datum.value), '.2~s') + 'B'"}
"""Bytes as `1.2MB`, below the line too."""
MOST_ROUNDS_NAMED = 12
PRIVACY = Fact(
    name="privacy spent",
    value="no bound",
    note="nothing that was sent has noise of differential privacy, so that no epsilon bounds what it reveals",
)


def traffic(record: Record, summary: Summary | None) -> Section | None:
    """Bytes by kind and round; None where nothing was sent."""
    sums = record.totals
    if not sums.total:
        return None
    facts = [
        Fact(name="sent in all", value=size(sums.total), note=f"{size(sums.up).text} up, {size(sums.down).text} down"),
    ]
    full = ((summary or {}).get("bytes") or {}).get("full_model") or {}
    if "reduction" in full:
        note = f"{size(full['total']).text} for a model of {size(full['model_bytes']).text}"
        facts.append(Fact(name="less than the whole model in every round", value=share(full["reduction"]), note=note))
    facts.append(PRIVACY)
    for name, words in (("between_clients", "past the server"), ("relayed", "handed on by the server")):
        if getattr(sums, name):
            facts.append(Fact(name=f"between clients, {words}", value=size(getattr(sums, name))))
    kinds = [kind for kind in KINDS if kind in sums.by_kind]
    rows = [
        [
            kind,
            *(size(sums.by_kind[kind][way]) for way in ("up", "down")),
            size(sum(sums.by_kind[kind].values())),
            share(sum(sums.by_kind[kind].values()) / sums.total),
        ]
        for kind in kinds
    ]
    table = Table(
        title="By kind of message",
        columns=("kind", "up", "down", "both", "share"),
        rows=rows,
        footer=[["all", size(sums.up), size(sums.down), size(sums.total), share(1.0)]],
        note="lengths of the encoded payloads; round 0 is what planning sends",
    )
    return Section(
        name="bytes", title="What it cost: bytes", blocks=[Facts(facts=facts), _traffic_chart(record, kinds), table]
    )


def _traffic_chart(record: Record, kinds: Sequence[str]) -> Chart:
    rows = traffic_rows(record)
    for row in rows:
        row["signed"] = row["bytes"] if row["direction"] == "up" else -row["bytes"]
    known = tips(
        ("round", "round", "d"), ("kind", "kind", ""), ("direction", "direction", ""), ("bytes", "bytes", ",d")
    )
    at = list(range(min(row["round"] for row in rows), max(row["round"] for row in rows) + 1))
    encoding = {
        "x": category("round", "round", order=at, labelAngle=0, labelOverlap="greedy") | {"type": "ordinal"},
        "y": quantity("signed", "down | up", zero=True, **BYTES_AXIS) | {"stack": "zero"},
        "color": colours("kind", None, domain=kinds, values=[kind_colour(kind) for kind in kinds]),
        "tooltip": known,
    }
    layers = [
        {"mark": {"type": "bar"}, "encoding": encoding},
        {"mark": {"type": "rule", "color": INK}, "encoding": {"y": {"datum": 0}}},
    ]
    return Chart(
        name="bytes",
        title="Bytes of every round, by kind",
        note="above the line: up to the server; below: down to the clients",
        spec=chart({"data": {"name": "rows"}, "layer": layers}, height=280),
        data={"rows": rows},
    )


def memory(record: Record, summary: Summary | None) -> Section | None:
    """Memory of every device as predicted, part by part, and the measured peak; None where neither is known."""
    planned = [client for client in record.plan["clients"] if "total" in (client.get("memory") or {})]
    measured = (summary or {}).get("memory") or {}
    if not planned and not measured:
        return None
    facts: list[Fact] = [
        Fact(
            name=f"measured peak, {name.removesuffix('_bytes').upper()}",
            value=size(value),
            note="of the process that computed all clients here",
        )
        for name, value in measured.items()
    ]
    most = max(planned, key=lambda client: _memory_of(client) / client["memory"]["total"]) if planned else None
    if most is not None:
        note = f"{isolate(most['name'])} on {most.get('device', EMPTY)}"
        facts.append(
            Fact(name="fullest device, predicted", value=share(_memory_of(most) / most["memory"]["total"]), note=note)
        )
    blocks: list[Block] = [Facts(facts=facts)]
    if planned:
        blocks += [_memory_chart(planned), _memory_table(planned)]
    return Section(name="memory", title="What it cost: memory", blocks=blocks)


def _memory_of(client: Mapping[str, Any]) -> float:
    predicted = (client.get("predicted") or {}).get("memory_bytes")
    return float(sum(_parts(client).values()) if predicted is None else predicted)


def _parts(client: Mapping[str, Any]) -> dict[str, float]:
    return {part: held for part, held in client["memory"].items() if part != "total"}


def _memory_chart(planned: Sequence[Mapping[str, Any]]) -> Chart:
    rows: list[Row] = [
        {"client": client["name"], "device": client.get("device", ""), "part": part.replace("_", " "), "bytes": held}
        for client in planned
        for part, held in _parts(client).items()
    ]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    known = tips(("client", "client", ""), ("device", "device", ""), ("part", "part", ""), ("bytes", "bytes", ",d"))
    names = [client["name"] for client in planned]
    encoding = {
        "y": category("client", None, order=names, labelOverlap="greedy"),
        "x": quantity("bytes", "bytes", zero=True, **BYTES_AXIS) | {"stack": "zero"},
        "color": colours("part", None, domain=parts),
        "tooltip": known,
    }
    return Chart(
        name="memory",
        title="Predicted memory of training on each client's device",
        note="by part; what the device has stands in the table",
        spec=chart(
            {"data": {"name": "rows"}, "mark": {"type": "bar"}, "encoding": encoding}, height=row_height(len(names))
        ),
        data={"rows": rows},
    )


def _memory_table(planned: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[Cell]] = [
        [
            *(client["name"], client.get("device", EMPTY), size(client["memory"].get("total"))),
            *(size(_memory_of(client)), share(_memory_of(client) / client["memory"]["total"])),
            "whole" if client.get("cut") is None else f"cut after block {client['cut']}",
        ]
        for client in planned
    ]
    has_activations = any("activations" in client["memory"] for client in planned)
    note = "" if has_activations else "activations are not predicted and come on top"
    columns = ("client", "device", "device memory", "predicted", "of the device", "model")
    return Table(title="Predicted memory", columns=columns, rows=rows, note=note)


def time(record: Record, summary: Summary | None) -> Section | None:
    """Seconds by phase and round as measured here, and those predicted for the devices; None where none is known."""
    seconds = (summary or {}).get("seconds") or {}
    predicted = [client for client in record.plan["clients"] if "seconds" in (client.get("predicted") or {})]
    if not seconds and not predicted:
        return None
    facts = (
        [Fact(name="in all", value=duration(seconds["total"]), note="on this machine")] if "total" in seconds else []
    )
    if "round_mean" in seconds:
        facts.append(Fact(name="a round", value=duration(seconds["round_mean"]), note="mean, on this machine"))
    if predicted:
        slowest = max(predicted, key=lambda client: client["predicted"]["seconds"])
        value = duration(slowest["predicted"]["seconds"])
        facts.append(Fact(name="slowest device, a round, predicted", value=value, note=slowest["name"]))
    blocks: list[Block] = [Facts(facts=facts)]
    if phases := seconds.get("phases"):
        rows = [
            [name, duration(taken), share(taken / seconds["total"] if seconds["total"] else None)]
            for name, taken in phases.items()
        ]
        blocks.append(Table(title="By phase", columns=("phase", "time", "share"), rows=rows))
    if by_round := seconds.get("rounds"):
        blocks.append(_seconds_chart([{"round": int(at), "seconds": taken} for at, taken in by_round.items()]))
    if predicted:
        blocks.append(_devices_table(predicted, (summary or {}).get("clients") or {}))
    return Section(name="time", title="What it cost: time", blocks=blocks)


def _seconds_chart(rows: Sequence[Row]) -> Chart:
    encoding = {
        "x": rounds(),
        "y": quantity("seconds", "seconds", zero=True),
        "tooltip": tips(("round", "round", "d"), ("seconds", "seconds", ".3f")),
    }
    return Chart(
        name="seconds",
        title="Seconds of every round",
        note="measured on this machine",
        spec=chart({"data": {"name": "rows"}, "mark": line(colour(0)), "encoding": encoding}, height=200),
        data={"rows": rows},
        is_wide=False,
    )


def _devices_table(planned: Sequence[Mapping[str, Any]], clients: Mapping[str, Any]) -> Table:
    rows: list[list[Cell]] = []
    for client in planned:
        used = (clients.get(client["name"]) or {}).get("utilisation") or {}
        up, down = (client["predicted"].get(name) for name in ("up_bytes", "down_bytes"))
        rows.append(
            [
                *(client["name"], client.get("device", EMPTY), duration(client["predicted"]["seconds"])),
                *(size(up), size(down), share(used.get("busy")), share(used.get("measured"))),
            ]
        )
    note = (
        "busy: predicted seconds of training over those of the slowest client of each round; share of the time here:"
        " seconds that training it took on this machine over those of all rounds"
    )
    columns = ("client", "device", "a round, predicted", "sends", "receives", "busy", "share of the time here")
    return Table(title="Devices", columns=columns, rows=rows, note=note)


WORDS = {
    "refused": "update refused",
    "missing": "update missing",
    "clipped": "update clipped to the norm bound",
    "restored": "mixed model could not be used",
    "unmoved": "training moved no parameter",
    "kept own model": "kept its own model",
    "joined": "joined late",
    "hosted": "upper part computed by",
    STOPPED: "the run stopped early",
}
"""Names of the events of `metrics.jsonl`; those of every round (`mixed`, `sharing measured`) are none."""


def mishaps(record: Record) -> Section | None:
    """Section on clients that were refused, missing, late, cut or hosted; None if there is none."""
    events: dict[tuple[str, str, str], list[int]] = {}
    for row in record.metrics:
        if "event" in row and row["event"] not in ("mixed", MEASURED):
            words = WORDS.get(row["event"], row["event"])
            detail = str(row.get("reason") or row.get("host") or "")
            events.setdefault((row.get("client", "all"), words, detail), []).append(row["round"])
    rows: list[list[Cell]] = [
        [client, words, count(len(at)), _rounds_in_words(at), detail] for (client, words, detail), at in events.items()
    ]
    blocks: list[Block] = []
    if rows:
        columns = ("client", "what", "times", "rounds", "why, or by whom")
        blocks.append(Table(title="What happened to whom", columns=columns, rows=rows))
    blocks += _cuts(record)
    return (
        Section(name="events", title="Who was refused, missing, late, cut or hosted", blocks=blocks) if blocks else None
    )


def _rounds_in_words(at: Sequence[int]) -> str:
    more = len(at) - MOST_ROUNDS_NAMED
    return ", ".join(map(str, at[:MOST_ROUNDS_NAMED])) + (f" and {more} more" if more > 0 else "")


def _cuts(record: Record) -> list[Block]:
    cut = [client for client in record.plan["clients"] if client.get("cut") is not None]
    rows: list[list[Cell]] = []
    for client in cut:
        split = client.get("split") or {}
        host = split.get("host") or {}
        seconds = [duration(split.get(f"{side}_seconds")) for side in ("client", "server", "link")]
        named = host.get("name") or "the server"
        rows.append(
            [
                client["name"],
                client.get("device", EMPTY),
                count(client["cut"]),
                split.get("reason", EMPTY),
                named,
                *seconds,
            ]
        )
    columns = (
        "client",
        "device",
        "blocks on it",
        "why",
        "upper part at",
        "on the client",
        "on the server",
        "on the link",
    )
    return [Table(title="Models that are cut, as planned", columns=columns, rows=rows)] if rows else []


def leakage(record: Record) -> Section | None:
    """Section on what the cuts give away of texts; None if that was not measured."""
    rows = leakage_rows(record)
    if not rows:
        return None
    taken = {(client["task"], client.get("cut")) for client in record.plan["clients"]}
    blocks: list[Block] = [_leakage_chart(record, rows, taken=taken), leakage_table(rows, taken=taken)]
    return Section(name="privacy", title="What the cuts give away", blocks=blocks)


def _leakage_chart(record: Record, rows: Sequence[Row], *, taken: Collection[tuple[str, int | None]]) -> Chart:
    """Tokens that the probe reads over each cut: a line a task; rings are the cuts that were taken."""
    colour_of = {task: colour(index) for index, task in enumerate(record.tasks)}
    tasks = [task for task in record.tasks if any(row["task"] == task for row in rows)]
    known = tips(("task", "task", ""), ("blocks", "blocks on the client", "d"), ("read", "tokens read", ".1%"))
    read = quantity("read", "tokens read", form=".0%", domain=(0.0, 1.0))
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "point": {"size": 30}}, "encoding": {"y": read, "tooltip": known}},
        {
            "mark": {"type": "rule", "strokeDash": [4, 3]},
            "encoding": {"x": None, "y": {"aggregate": "max", "field": "commonest", "type": "quantitative"}},
        },
        {
            "data": {"name": "taken"},
            "mark": {"type": "point", "size": 180, "strokeWidth": 2},
            "encoding": {"y": read, "tooltip": known},
        },
    ]
    encoding = {
        "x": quantity("blocks", "blocks on the client", form="d", tickMinStep=1, grid=False),
        "color": colours("task", "task", domain=tasks, values=[colour_of[task] for task in tasks]),
    }
    return Chart(
        name="leakage",
        title="Tokens of unseen texts that a linear probe reads out of what crosses a cut",
        note="ring: a cut of this run; dashed: always the commonest token",
        spec=chart({"data": {"name": "rows"}, "encoding": encoding, "layer": layers}, height=280),
        data={"rows": rows, "taken": [row for row in rows if (row["task"], row["blocks"]) in taken]},
    )
