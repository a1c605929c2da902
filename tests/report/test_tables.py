import copy
import io
import json

import pytest
from rich.console import Console

from atlas_fl.report.table import Table, text_of
from atlas_fl.report.tables import closing_table, plan_tables, site_tables


def printed(table: Table, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(table: Table, row: int) -> list[str]:
    return [text_of(cell) for cell in [*table.rows, *table.footer][row]]


def plan_of(run) -> dict:
    return json.loads((run / "plan.json").read_text())


def summary_of(run) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_a_plan_is_readable_in_eighty_columns(make_run) -> None:
    plan = plan_of(make_run(undecided=True))
    tables = plan_tables(plan)
    assert [table.title for table in tables] == [
        "Clusters (corrected)",
        "Numbers of clusters that were weighed",
        "LoRA ranks",
        "Predicted for each round",
        "Memory on the device",
    ]
    for table in tables:
        assert "…" not in printed(table)
    for table in tables[2:]:
        lines = printed(table).splitlines()
        assert {line.split()[0] for line in lines if line.strip()} >= {client["name"] for client in plan["clients"]}


def plan_with(clients: list[dict], **clustering) -> dict:
    filled = {"ranks": [4], "cut": None, "memory": {}, "predicted": {}}
    return {"clients": [filled | client for client in clients], "clustering": clustering}


def test_the_cluster_table_by_hand() -> None:
    names = [("a-0", "a", 0), ("b-0", "b", 0), ("a-1", "a", 0), ("c-0", "c", -1)]
    measured = {"cluster": 0, "purity": 2 / 3, "reliability": 0.6, "cohesion": 0.5, "difficulty": 0.875}
    table, *_ = plan_tables(
        plan_with(
            [{"name": name, "task": task, "cluster": label} for name, task, label in names],
            method="corrected",
            warnings=["client c-0 is undecided [c_kk 0.05]"],
            agreement={"purity": 2 / 3, "ari": 0.25},
            clusters=[measured, {"cluster": -1, "purity": 1.0, "reliability": 0.05}],
        )
    )
    assert cells(table, 0) == ["cluster 0", "3", "a x 2, b x 1", "0.67", "0.60", "0.50", "0.88", "a-0, b-0, a-1"]
    assert cells(table, 1) == ["no cluster", "1", "c x 1", "1.00", "0.05", "-", "-", "c-0"]
    text = printed(table)
    assert "Clusters (corrected)" in text
    assert "purity 0.67, ari 0.25" in text
    assert "undecided [c_kk 0.05]" in text


def test_the_verdict_of_no_structure_is_said_once() -> None:
    reason = "no client's halves agree to 0.1"
    clustering = {"structure": {"found": False, "reason": reason}, "warnings": [f"no structure: {reason}"]}
    plan = plan_with([{"name": "a-0", "task": "a", "cluster": -1}], **clustering)
    assert printed(plan_tables(plan)[0]).count(reason) == 1


def test_memory_without_activations_says_so() -> None:
    client = {"name": "a-0", "task": "a", "cluster": -1, "memory": {"weights": 4, "gradients": 4, "total": 8}}
    assert "activations are not predicted" in plan_tables(plan_with([client]))[-1].note
    client["memory"]["activations"] = 4
    assert plan_tables(plan_with([client]))[-1].note == ""


def test_the_chosen_number_of_clusters_is_marked(make_run) -> None:
    _, table, *_ = plan_tables(plan_of(make_run()))
    assert [row[1] for row in table.rows] == ["-", "-", "chosen", "-", "-"]
    assert cells(table, table.bold_row) == ["3", "chosen", "0.400", "1.500", "6.500", "0.450", "0"]
    assert cells(table, 0) == ["1", "-", "-", "-", "-", "-", "-"]


def test_ranks_cuts_and_predictions_are_those_of_the_plan(make_run) -> None:
    plan = plan_of(make_run())
    plan["clients"][3] |= {"ranks": [4, 4, 8, 16, 16, 16], "cut": 2, "split": {"reason": "as set"}}
    tables = {table.title: table for table in plan_tables(plan)}
    assert cells(tables["LoRA ranks"], 3) == ["trec-0", "gpu_16gb", "1", "4x2 8 16x3", "64", "2", "64", "8.0 MB"]
    assert cells(tables["LoRA ranks"], 0)[5] == "whole"
    shown = cells(tables["Predicted for each round"], 0)
    assert shown == ["movie-0", "cpu_2gb", "300 kB", "300 kB", "21.5 s", "553 MB", "27.6%"]
    memory = tables["Memory on the device"]
    assert cells(memory, 0) == ["movie-0", "91 MB", "60 MB", "400 MB", "1.9 MB", "1.9 MB", "3.8 MB"]
    assert memory.columns[1] == "frozen weights"
    assert cells(tables["Cuts"], 3) == ["trec-0", "gpu_16gb", "2 of 6", "as set"]


def test_the_closing_table_says_what_the_summary_says(make_run) -> None:
    summary = summary_of(make_run(refused=True))
    table = closing_table(summary)
    movie = summary["tasks"]["movie"]
    assert cells(table, 0) == [
        "movie",
        "3",
        "0.500",
        f"{movie['final']['test']['primary']:.3f}",
        f"{movie['final']['test']['accuracy'] - 0.5:+.3f}",
        f"{movie['best']['test']['primary']:.3f}",
        str(movie["rounds_to"]["90%"]),
        f"{movie['final']['spread']['std']:.3f}",
        f"{movie['final']['worst_client']['client']} {movie['final']['worst_client']['primary']:.3f}",
    ]
    assert cells(table, 3)[0] == "all"
    text = printed(table)
    assert {line.split()[0] for line in text.splitlines() if line.strip()} >= {"movie", "trec", "pairs", "all"}
    saved = summary["bytes"]["full_model"]["reduction"]
    assert f"{100 * saved:.1f}% less than the whole model in every round" in text
    assert "4.6 min, 1.2 GB of RSS at most" in text
    assert "1 update refused" in text


def test_a_run_that_sends_nothing_saves_nothing(make_run) -> None:
    summary = summary_of(make_run())
    summary["bytes"] |= {"up": 0, "down": 0, "total": 0, "full_model": {"total": 9, "reduction": 1.0}}
    text = printed(closing_table(summary))
    assert "0 B up, 0 B down" in text and "the whole model" not in text


def test_a_long_name_is_folded_and_more_bytes_are_called_more(make_run) -> None:
    summary = summary_of(make_run())
    worst = summary["tasks"]["movie"]["final"]["worst_client"]
    worst["client"] = "a_client_with_a_long_name-32"
    summary["bytes"]["full_model"]["reduction"] = -0.5
    text = printed(closing_table(summary))
    assert "movie" in text and "50.0% more than the whole model" in text
    assert cells(closing_table(summary), 0)[-1].startswith("a_client_with_a_long_name-32")


@pytest.mark.parametrize(("reduction", "told"), [(-0.837, ""), (0.0, ""), (0.8, ", 80.0% less than the whole model")])
def test_whole_models_are_not_compared_with_whole_models(make_run, reduction: float, told: str) -> None:
    summary = summary_of(make_run())
    summary["bytes"]["full_model"]["reduction"] = reduction
    summary["bytes"]["by_kind"] = {"weights": summary["bytes"]["total"]}
    text = printed(closing_table(summary))
    assert f" down{told}" in text
    assert ("the whole model" in text) is bool(told)


def test_the_closing_table_tells_perplexity_and_rouge_of_text(make_run) -> None:
    summary = summary_of(make_run())
    test = summary["tasks"]["movie"]["final"]["test"]
    test |= {"perplexity": 12.345, "rouge1": 0.5, "rouge2": 0.25, "rougeL": 0.4}
    text = printed(closing_table(summary))
    assert "movie writes: perplexity 12.35, ROUGE-1 0.500, ROUGE-2 0.250, ROUGE-L 0.400" in text
    assert text.count("writes:") == 1


def test_the_closing_table_names_metrics_and_the_class_of_f1(make_run) -> None:
    summary = summary_of(make_run())
    assert "scored:" not in printed(closing_table(summary))
    first, *others = summary["tasks"]
    summary["tasks"][first]["metric"] = "f1 of yes"
    assert f"scored: {first} by f1 of yes, others by accuracy" in printed(closing_table(summary))
    for task in others:
        summary["tasks"][task]["metric"] = "AUROC"
    assert "others" not in printed(closing_table(summary))


def test_the_closing_table_tells_where_a_run_stopped(make_run) -> None:
    summary = summary_of(make_run())
    assert "stopped" not in printed(closing_table(summary))
    summary |= {"stopped": {"round": 7}, "best": {"round": 4, "validation": 0.8125}}
    assert "stopped early after round 7; best in round 4: validation 0.812" in printed(closing_table(summary))


def test_the_table_of_sites_has_means_and_gains_by_hand() -> None:
    assert site_tables({"tasks": {}}) == []
    scored = {"final": {"test": {"primary": 0.6}}, "best": {"test": {"primary": 0.75}}}
    sites = {"Nord": {"names": ["a-Nord", "b-Nord"], **scored}, "South": {"names": ["a-South"], **scored}}
    (table,) = site_tables({"sites": sites, "alone": {"clients": {"a-Nord": {"gain": 0.2}, "b-Nord": {"gain": -0.1}}}})
    assert table.columns == ["site", "clients", "final", "best", "over alone"]
    assert cells(table, 0) == ["Nord", "a-Nord, b-Nord", "0.600", "0.750", "+0.050"]
    assert cells(table, 1)[-1] == "-"
    assert site_tables({"sites": sites})[0].columns == ["site", "clients", "final", "best"]


def test_builders_leave_their_arguments_alone(make_run) -> None:
    run = make_run()
    plan, summary = plan_of(run), summary_of(run)
    before = copy.deepcopy((plan, summary))
    plan_tables(plan)
    closing_table(summary)
    assert before == (plan, summary)
