"""Sections of a run's page about clients: their data, who is like whom, ranks, and how personal their models are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from atlas_fl.report.figure_rows import (
    adjacency_rows,
    component_rows,
    group_order,
    label_rows,
    mask_rows,
    member_rows,
    principal_components,
    rank_rows,
    sharing_rows,
    similarity_rows,
    sketch_rows,
)
from atlas_fl.report.format import EMPTY, cluster_name, isolate
from atlas_fl.report.html.charts import (
    INK,
    MOST_NUMBERED_ROWS,
    category,
    chart,
    class_axis,
    colours,
    heat_map,
    of_clients,
    picker,
    quantity,
    tips,
)
from atlas_fl.report.html.elements import Block, Chart, Fact, Facts, Folded, Row, Section, Text
from atlas_fl.report.mask_charts import density_chart
from atlas_fl.report.record import Record
from atlas_fl.report.table import Cell, Table, count, plain, share, size
from atlas_fl.report.tables import cluster_table, k_table, sharing_of_groups

LEAST_EMBEDDED = 6
"""Clients from which t-SNE shows more than the two principal components."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")


def data_of_clients(record: Record) -> Section:
    """Section on the clients and the differences of their data."""
    data = {row["client"]: row for row in record.plan.get("data") or ()}
    columns = ("client", "task", "device", "training", "validation", "test", "majority class", "labels from the task's")
    rows: list[list[Cell]] = []
    for client in record.plan["clients"]:
        row = data.get(client["name"], {})
        examples, majority = row.get("examples") or {}, row.get("majority") or {}
        rows.append(
            [
                *(client["name"], client["task"], client.get("device", EMPTY)),
                count(examples.get("train", client.get("examples"))),
                *(count(examples.get(split)) for split in ("validation", "test")),
                share(majority.get("train")),
                plain(row.get("distance"), 2),
            ]
        )
    note = "labels from the task's: half the L1 distance between a client's mix of labels and its task's, 0 to 1"
    devices = Counter(str(client["device"]) for client in record.plan["clients"] if "device" in client)
    facts = [
        Fact(name="clients", value=count(len(record.clients)), note=f"tasks: {len(record.tasks)}"),
        Fact(name="training examples", value=count(_total_examples(record))),
        Fact(
            name="kinds of devices",
            value=count(len(devices)),
            note=", ".join(f"{number} x {name}" for name, number in devices.items()),
        ),
    ]
    blocks: list[Block] = [Facts(facts=facts), *_label_maps(record)]
    blocks.append(Table(title="Examples of every client", columns=columns, rows=rows, note=note))
    if notes := record.plan.get("notes"):
        blocks.append(Folded(title="What the plan noted", blocks=[Text(lines=notes, is_list=True)]))
    return Section(name="clients", title="Who the clients are", blocks=blocks)


def _total_examples(record: Record) -> int | None:
    held = [client.get("examples") for client in record.plan["clients"]]
    return None if None in held else sum(held)


def _label_maps(record: Record) -> list[Block]:
    rows = [row for row in label_rows(record) if row["examples"]]
    charts: list[Block] = []
    for index, task in enumerate(record.tasks):
        of_task = [row for row in rows if row["task"] == task]
        if not of_task:
            continue
        known = tips(("client", "client", ""), ("class", "class", ""), ("examples", "examples", "d"))
        data = [row for row in record.plan["data"] if row["task"] == task]
        classes, apart = list(data[0]["labels"]), fmean(row["distance"] for row in data)
        charts.append(
            Chart(
                name=f"classes-{index}",
                title=f"{isolate(task)}: training examples by class",
                note="number: examples; colour: share of the client's; empty: none;"
                f" mean distance of their mix to the task's: {apart:.2f} of 1",
                spec=heat_map(
                    x=class_axis(classes),
                    y=category("client", None, order=_members(record, task), labelOverlap="greedy"),
                    value="share",
                    title="share",
                    form=".0%",
                    tooltip=known + tips(("share", "share", ".1%")),
                    scheme="blues",
                    domain=(0.0, max(row["share"] for row in of_task)),
                    text=("examples", "d"),
                ),
                data={"rows": of_task},
                is_wide=len(classes) > 8,
            )
        )
    return charts


def _members(record: Record, task: str) -> list[str]:
    return [name for name in record.clients if record.task_of[name] == task]


def likeness(record: Record) -> Section | None:
    """Section on clusters and graph; None if nothing was clustered and there is no graph."""
    clustering = record.plan.get("clustering") or {}
    edges = adjacency_rows(record)
    if clustering.get("method", "none") == "none" and not edges:
        return None
    structure, agreement = clustering.get("structure") or {}, clustering.get("agreement") or {}
    labels = [label for label in record.cluster_of.values() if label >= 0]
    facts = [
        Fact(name="clusters", value=count(len(set(labels))), note=f"method: {clustering.get('method', 'none')}"),
        Fact(
            name="undecided",
            value=count(sum(label < 0 for label in record.cluster_of.values())),
            note="clients in no cluster",
        ),
    ]
    names = {"purity": "purity", "ari": "adjusted Rand index", "nmi": "mutual information"}
    facts += [
        Fact(name=title, value=plain(agreement[name], 2), note="against the true tasks")
        for name, title in names.items()
        if name in agreement
    ]
    words = [f"Is there structure? {structure['reason']}."] if structure.get("reason") else []
    lines = [*words, *(f"Warning: {warning}" for warning in clustering.get("warnings") or ())]
    blocks: list[Block] = [Facts(facts=facts), *([Text(lines=lines)] if lines else []), *_scatters(record)]
    blocks += [cluster_table(record.plan), *([k_table(clustering)] if clustering.get("k_table") else [])]
    blocks += _pair_map(record, similarity_rows(record), name="similarity", title="Similarity of the sketches")
    blocks += _pair_map(record, edges, name="weight", title="Client graph, by which atlas_laplacian mixes")
    return Section(name="likeness", title="Who was found alike, and why", blocks=blocks)


def _scatters(record: Record) -> list[Block]:
    """Principal components of the sketches with their noise, and t-SNE where there are enough clients."""
    if record.sketches is None:
        return []
    shares = principal_components(*record.sketches)[2]
    structure = (record.plan.get("clustering") or {}).get("structure") or {}
    verdict = [structure["reason"]] if structure.get("reason") else []
    known = tips(("client", "client", ""), ("task", "task", ""), ("cluster", "cluster", ""))
    rows = [row | {"cluster": cluster_name(row["cluster"])} for row in sketch_rows(record)]
    titles = [f"{name} component, {part:.0%} of the variance" for name, part in zip(("first", "second"), shares)]
    noise = {
        "mark": {"type": "rule", "strokeWidth": 1, "opacity": 0.6},
        "encoding": {
            **{axis: _place(f"{axis}1", title) for axis, title in zip("xy", titles)},
            **{f"{axis}2": {"field": f"{axis}2"} for axis in "xy"},
        },
    }
    charts: list[Block] = [
        Chart(
            name="clusters",
            title="Principal components of the sketches",
            note="; ".join([*verdict, "a line ends at the two halves of a client: its length is the noise"]),
            spec=_scatter(record, rows, titles=titles, tooltip=known, below=[noise]),
            data={"rows": rows},
            is_wide=False,
        )
    ]
    if len(record.clients) >= LEAST_EMBEDDED:
        places = component_rows(record, embed(record.sketches))
        rows = [row | {"cluster": cluster_name(row["cluster"])} for row in places]
        charts.append(
            Chart(
                name="tsne",
                title="t-SNE of the sketches",
                note="near: alike; distances between groups mean nothing",
                spec=_scatter(record, rows, titles=["first", "second"], tooltip=known),
                data={"rows": rows},
                is_wide=False,
            )
        )
    return charts


def embed(sketches: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """t-SNE (van der Maaten and Hinton, 2008) of the means of two halves, (clients, dim) each: (clients, 2)."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    mean = (sketches[0].astype(np.float64) + sketches[1].astype(np.float64)) / 2
    perplexity = min(30.0, (len(mean) - 1) / 3)
    with threadpool_limits(1):  # its threads wait for each other: seconds in the place of milliseconds on busy cores
        places: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(mean)
    return places.astype(np.float64)


def _place(field: str, title: str) -> dict[str, Any]:
    return quantity(field, title, labels=False, ticks=False)


def _scatter(
    record: Record,
    rows: Sequence[Row],
    *,
    titles: Sequence[str],
    tooltip: Sequence[Mapping[str, Any]],
    below: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    clusters = list(dict.fromkeys(row["cluster"] for row in sorted(rows, key=lambda row: row["cluster"])))
    shapes = {"domain": clusters, "range": [SHAPES[index % len(SHAPES)] for index in range(len(clusters))]}
    few = len(clusters) <= len(SHAPES)
    encoding = {
        "color": colours("task", "task", domain=record.tasks),
        "opacity": {"condition": {"param": "picked", "value": 1, "empty": True}, "value": 0.12},
    }
    points = {
        "params": [picker("client", record.clients, everyone="all clients", label="client")],
        "mark": {"type": "point", "filled": True, "size": 90, "stroke": "var(--ground)", "strokeWidth": 0.5},
        "encoding": {
            "x": _place("x", titles[0]),
            "y": _place("y", titles[1]),
            "shape": {
                "field": "cluster",
                "type": "nominal",
                "scale": shapes,
                "title": "cluster",
                "legend": {} if few else None,
            },
            "tooltip": list(tooltip),
        },
    }
    return chart({"data": {"name": "rows"}, "encoding": encoding, "layer": [*below, points]}, height=340)


def _pair_map(record: Record, rows: Sequence[Row], *, name: str, title: str) -> list[Block]:
    """Clients by clients, those of a cluster side by side."""
    if not rows or len(record.clients) < 2:
        return []
    members = member_rows(record)
    order = [row["client"] for row in members]
    values = [row[name] for row in rows if row["client"] != row["other"]]
    known = tips(("client", "client", ""), ("other", "and", ""), (name, name, ".4f"))
    heat = heat_map(
        x=category("other", None, order=order, labelOverlap="greedy", labelAngle=-60),
        y=category("client", None, order=order, labelOverlap="greedy"),
        value=name,
        title=name,
        form=".2f",
        tooltip=known,
        domain=(min(0.0, *values), max(values)),
    )
    is_graph = name == "weight"
    spec, beside = of_clients(heat, members, record.tasks) if is_graph else (heat, {})
    if "starts" in beside:
        x = {name: value for name, value in heat["encoding"]["x"].items() if name != "scale"}
        x |= {"field": "client", "bandPosition": 0}
        encoding = {"x": x, "y": {"value": 0}, "y2": {"value": "height"}}
        spec["layer"].append({"data": {"name": "starts"}, "mark": {"type": "rule", "color": INK}, "encoding": encoding})
    return [
        Chart(
            name=name,
            title=title,
            note=f"lines between clusters; {_edges(rows, order)}"
            if is_graph
            else "clients by cluster, on both axes alike",
            spec=spec,
            data={"rows": [row for row in rows if row["client"] != row["other"]], **beside},
            is_wide=len(order) > 12,
        )
    ]


def _edges(rows: Sequence[Row], clients: Sequence[str]) -> str:
    """Number of edges of a graph, and of clients without any."""
    pairs = {frozenset((row["client"], row["other"])) for row in rows if row["client"] != row["other"]}
    alone = len(clients) - len(frozenset[str]().union(*pairs))
    lone = f", {alone} of {len(clients)} clients without any" if alone else ""
    return f"{len(pairs)} edges{lone}; empty: no edge"


def ranks(record: Record) -> Section | None:
    """Ranks by layer and client with the budget of each device; None where no adapters were trained."""
    rows = rank_rows(record)
    held = [row for row in rows if row["rank"]]
    if not held:
        return None
    members = member_rows(record)
    layers = sorted({row["layer"] for row in rows})
    levels = sorted({row["rank"] for row in held})
    known = tips(("client", "client", ""), ("device", "device", ""), ("layer", "layer", "d"), ("rank", "rank", "d"))
    heat = heat_map(
        x=category("layer", "layer", order=layers, labelAngle=0),
        y=category("client", None, order=[row["client"] for row in members], labelOverlap="greedy"),
        value="rank",
        title="rank",
        form="d",
        tooltip=known,
        scheme="yellowgreenblue",
        domain=(levels[0], levels[-1]),
        levels=levels,
    )
    spec, beside = of_clients(heat, members, record.tasks)
    if len(members) <= MOST_NUMBERED_ROWS:
        devices = {row["client"]: row["device"] for row in rows}
        beside["devices"] = [{"client": name, "device": device} for name, device in devices.items()]
        mark = {"type": "text", "align": "left", "dx": 6, "fontSize": 10}
        encoding = {"x": {"value": "width"}, "text": {"field": "device"}}
        spec["layer"].append({"data": {"name": "devices"}, "mark": mark, "encoding": encoding})
    ranks_chart = Chart(
        name="ranks",
        title="LoRA rank of every layer and client",
        note="lines between clusters; empty: no adapter",
        spec=spec,
        data={"rows": held, **beside},
    )
    columns = ("client", "device", "cluster", "sum of ranks", "largest rank that fits", "budget", "device memory")
    return Section(
        name="ranks",
        title="Ranks by layer and device",
        lead="More rank is more room to learn, more bytes and more memory; the budget of a client's device bounds it.",
        blocks=[
            ranks_chart,
            Table(title="Budgets", columns=columns, rows=[_budget(row) for row in record.plan["clients"]]),
        ],
    )


def _budget(client: Mapping[str, Any]) -> list[Cell]:
    return [
        *(client["name"], client.get("device", EMPTY), cluster_name(client.get("cluster", -1))),
        *(count(sum(client.get("ranks", ()))), count(client.get("largest_rank"))),
        *(size(client.get("budget_bytes")), size((client.get("memory") or {}).get("total"))),
    ]


def sharing(record: Record) -> Section | None:
    """Section on the share of its own that each client keeps, by group of parameters; None if it was not measured."""
    rows = sharing_rows(record)
    if not rows:
        return None
    groups = sorted({row["parameters"] for row in rows}, key=group_order)
    members = member_rows(record)
    known = tips(
        *(("client", "client", ""), ("parameters", "parameters", ""), ("own_share", "of its own", ".1%")),
        *(("effective_clients", "as if averaged over", ".2f"), ("variance_over_noise", "variance over noise", ".3f")),
    )
    heat = heat_map(
        x=category("parameters", None, order=groups, labelAngle=0),
        y=category("client", None, order=[row["client"] for row in members], labelOverlap="greedy"),
        value="own_share",
        title="of its own",
        form=".0%",
        tooltip=known,
        scheme="blues",
        domain=(0.0, 1.0),
    )
    spec, beside = of_clients(heat, members, record.tasks)
    kept = Chart(
        name="sharing",
        title="Share of its own model that each client keeps",
        note="the rest are other clients' models; lines between clusters",
        spec=spec,
        data={"rows": rows, **beside},
    )
    return Section(name="sharing", title="How personal each model is", blocks=[kept, sharing_of_groups(rows)])


def moving_weights(record: Record) -> Section | None:
    """The share of the weights of each layer that a mask lets move; None where no mask is part of the plan."""
    rows = mask_rows(record)
    if not rows:
        return None
    sparse = record.plan["sparse"]
    shares = {str(sparse["mask"]).replace("_", " "): {row["tensor"]: row["moving"] for row in rows}}
    chart_of_layers = density_chart(shares, share=1 - sparse["sparsity"])
    return Section(name="mask", title="Which weights may move", blocks=[chart_of_layers])
