"""Runs with plug-ins: the same bits with workers and after a kill, at sites, and never with another file."""

import mmap
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.audit.check import audit_run
from atlas_fl.cli.main import main
from atlas_fl.client.optimizer import TERMS, fedprox
from atlas_fl.config import run_folder, to_toml, validate
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.experiment.backends import init_worker, share_weights, worker_init_messages
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.experiment.sweep import grid, run_all
from atlas_fl.plugins import load_plugins
from atlas_fl.report.html.write import write_report
from atlas_fl.runtime.worker_pool import WorkerLoop, init_workers
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors, write_tensors
from tests.runs.federation import Federations
from tests.runs.finished import Make
from tests.runs.processes import Programs
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.workers import check_same, check_workers, into

EXAMPLES = Path(__file__).parents[2] / "examples/plugins"
INVERSE_LOSS = EXAMPLES / "inverse_loss.py"
TERM = """
from atlas_fl.plugins import register

@register("term", "pull_to_zero")
def pull_to_zero(options, start):
    return lambda name, value: 0.5 * value
"""
METRIC = """
import numpy as np

from atlas_fl.plugins import register

@register("metric", "margin")
def margin(task, labels, logits):
    if task.name != "movie":
        return None
    ordered = np.sort(logits.astype(np.float64), axis=1)
    return float(np.mean(ordered[:, -1] - ordered[:, -2]))
"""
FINGERPRINT = """
import torch

from atlas_fl.clustering.fingerprints import GradientFingerprint
from atlas_fl.plugins import register

register("fingerprint", "signs")(GradientFingerprint(each=torch.sign))
"""
FILTER = """
import torch

from atlas_fl.plugins import register

@register("update_filter", "share")
def share(number):
    def act(change, draws):
        kept = torch.rand(1, generator=draws)
        return {name: tensor * kept for name, tensor in change.items()}
    return act
"""
PAGE = (Path(__file__).parents[2] / "docs/guides/client-reports.md").read_text(encoding="utf-8")
REPORTING = PAGE.split("```python\n")[1].split("```")[0]
"""The method of the page, as it stands there."""
WRITTEN = {"term": TERM, "metric": METRIC, "fingerprint": FINGERPRINT, "filter": FILTER, "reporting": REPORTING}
CHOSEN: Mapping[str, Any] = {"partition": "staircase", "fingerprint": "signs"}
"""The settings that name what the plug-ins register; terms and metrics act without one."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "inverse_loss": {"strategy": "inverse_loss", "update_filter": ("share", "noise=0.0001")},
    "q_fedavg": {"strategy": "q_fedavg"},
}
"""No filter goes with a method that asks for reports."""
KINDS = """
from dataclasses import replace

from atlas_fl.methods.averages import FedAvg
from atlas_fl.data.registry import TASKS
from atlas_fl.plugins import register
from atlas_fl.ranks.allocation import ALLOCATORS

register("task", "films")(replace(TASKS["movie"], name="films"))
register("method")(type("Own", (FedAvg,), {"name": "own_average", "__doc__": "FedAvg.", "__module__": __name__}))
register("allocator", "own_ranks")(ALLOCATORS["uniform"])
"""


@pytest.fixture(autouse=True)
def _no_plugins() -> Iterator[None]:
    yield
    load_plugins(())


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example's partition, which a test may change."""
    return Path(shutil.copy(EXAMPLES / "partition.py", tmp_path / "partition.py"))


@pytest.fixture
def plugins(example: Path, tmp_path: Path) -> dict[str, str]:
    """The path of a plug-in of each kind that clients or the server of a run need."""
    for name, code in WRITTEN.items():
        (tmp_path / f"{name}.py").write_text(code)
    written = {name: str(tmp_path / f"{name}.py") for name in WRITTEN}
    return {"partition": str(example), "method": str(INVERSE_LOSS), **written}


@pytest.fixture
def term(plugins: dict[str, str]) -> str:
    return plugins["term"]


@pytest.mark.core
@pytest.mark.parametrize("method", METHODS)
def test_plugins_of_all_kinds_give_the_same_bits_with_workers_and_after_a_resume(
    config: Make, plugins: dict[str, str], tmp_path: Path, method: str
) -> None:
    settings = {**CHOSEN, **METHODS[method], "plugin": tuple(plugins.values()), "pack_tokens": 200}
    whole = check_workers(config, **settings)
    stopped = run_config(config(name="stopped", max_rounds=1, **settings))
    load_plugins(())  # what resumes it knows nothing but the folder
    check_same(whole, resume_run(stopped.folder).folder)
    assert f'"{plugins["partition"]}#sha256=' in (whole / "config.toml").read_text()
    labels = {row["client"]: row["labels"] for row in read_json(run_folder(config(name="workers")).plan)["data"]}
    assert labels["movie-0"]["negative"] > labels["movie-1"]["negative"]
    sent = [row for row in rows(whole, "ledger") if row["kind"] == "report"]
    rounds = (1, 2) if method == "q_fedavg" else ()
    assert {(row["direction"], row["round"]) for row in sent} == {("up", round) for round in rounds}
    scored: dict[Any, Any] = {
        row["client"]: row["margin"] for row in rows(whole) if row.get("split") == "test" and "margin" in row
    }
    assert set(scored) == {"movie-0", "movie-1"}
    tasks = read_json(RunFolder(whole).summary)["tasks"]
    assert tasks["movie"]["final"]["test"]["margin"] == pytest.approx(sum(scored.values()) / 2)
    assert "margin" not in tasks["trec"]["final"]["test"]
    load_plugins(())
    passing_audit(whole)
    load_plugins(())
    export_client(whole, client="movie-0", to=tmp_path / "exported")
    assert "margin" in write_report([whole]).read_text(), "a report loads no plug-in"


@pytest.mark.slow
def test_each_of_the_plugins_changes_what_it_is_for(config: Make, plugins: dict[str, str]) -> None:
    settings = {**CHOSEN, **METHODS["inverse_loss"], "rounds": 1, "tasks": "movie"}

    def folder(name: str, *left_out: str, **other: object) -> Path:
        paths = tuple(path for kind, path in plugins.items() if kind not in left_out)
        return run_config(config(name=name, plugin=paths, **{**settings, **other})).folder

    whole = folder("whole")
    others = {
        "term": folder("term", "term"),
        "filter": folder("filter", update_filter="none"),
        "method": folder("method", strategy="fedavg"),
        "partition": folder("partition", partition="iid"),
    }
    for kind, other in others.items():
        assert not same_tensors(state(whole), state(other)), kind
    kinds = [folder(f"of-{kind}", strategy="fedavg_cluster", fingerprint=kind) for kind in ("signs", "gradient")]
    sketches = [read_tensors(RunFolder(one).sketches) for one in kinds]
    assert not same_tensors(*sketches)
    with pytest.raises(ConfigError, match="unknown name in --fingerprint 'signs'; known: "):
        run_config(config(fingerprint="signs"))


@pytest.mark.slow
def test_a_method_of_ones_own_gives_the_same_bits_in_two_processes_and_after_a_kill(
    config: Make, plugins: dict[str, str], programs: Programs, tmp_path: Path
) -> None:
    settings = {**CHOSEN, **METHODS["inverse_loss"], "plugin": tuple(plugins.values()), "pack_tokens": 200}
    whole = run_config(config(name="alone", **settings)).folder
    check_same(whole, run_config(config(name="workers", workers=2, **settings)).folder)
    (tmp_path / "killed.toml").write_text(to_toml(config(name="killed", **settings)))
    fault = "dies before the checkpoint of round two"
    programs.start("run", "--config", "killed.toml", folder=tmp_path, fault=fault).end(-signal.SIGKILL)
    load_plugins(())
    check_same(whole, resume_run(tmp_path / "runs/killed").folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sites_that_name_the_plugins_train_as_in_the_simulation(
    federation: Federations, plugins: dict[str, str], method: str
) -> None:
    fed = federation(plugin=tuple(plugins.values()), **CHOSEN, **METHODS[method], rounds=2)
    # other places, and another order: the digests are what counts
    names = [Path(path).name for path in reversed(plugins.values())]
    shutil.copy(INVERSE_LOSS, fed.folder)
    _, sites = fed.complete("--plugin", *names)
    assert ("filtered by --update-filter share noise=0.0001" in "".join(sites)) == (method == "inverse_loss")
    fed.is_as_simulated()
    assert any("margin" in row for row in rows(fed.served.path))


@pytest.mark.slow
def test_a_site_that_does_not_name_the_plugins_is_told_so_at_the_handshake_and_loads_nothing(
    federation: Federations, term: str, tmp_path: Path
) -> None:
    marker = tmp_path / "loaded"
    Path(term).write_text(TERM + f"open({str(marker)!r}, 'a').write('x')\n")
    fed = federation(plugin=(term,))
    server, port = fed.serve()
    loads = marker.read_text()
    other = tmp_path / "other.py"
    other.write_text(TERM + "# another version\n")
    said = fed.join("movie-0", port).end(2).splitlines()[-1]
    assert "client 'movie-0' has plugins none, the server " in said
    assert "a site names the plug-ins of the federation with --plugin" in said
    said = fed.join("movie-1", port, "--plugin", str(other)).end(2).splitlines()[-1]
    assert "client 'movie-1' has plugins " in said
    assert marker.read_text() == loads, "a site loads nothing that its owner does not name"
    assert server.wait_for("movie-0.* has plugins none")
    server.kill()


@pytest.mark.slow
def test_a_site_names_no_plugin_that_the_federation_lacks(federation: Federations, term: str) -> None:
    fed = federation()
    server, port = fed.serve()
    said = fed.join("movie-0", port, "--plugin", term).end(2).splitlines()[-1]
    assert "the server none; a site names the plug-ins of the federation with --plugin, and no others" in said
    server.kill()


@pytest.mark.slow
def test_a_run_goes_on_with_no_other_plugin(config: Make, example: Path, capsys, tmp_path) -> None:
    settings = {"plugin": (str(example),), "partition": "staircase", "rounds": 2}
    stopped = run_config(config(max_rounds=1, **settings))
    elsewhere = Path(shutil.copy(example, tmp_path / "elsewhere.py"))
    example.write_text(example.read_text().replace("alpha)", "alpha / 2)"))
    assert main(["resume", str(stopped.folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"atlas: the plug-in {example} was altered: its SHA-256 begins with ")
    with pytest.raises(CheckpointError, match=rf"was begun with plugin = \('{example}#sha256="):
        run_config(config(**settings), resume=True)
    text = (stopped.folder / "config.toml").read_text()
    example.unlink()
    with pytest.raises(ConfigError, match=r"partition\.py cannot be read"):
        resume_run(stopped.folder)
    (stopped.folder / "config.toml").write_text(text.replace(str(example), str(elsewhere)))
    assert resume_run(stopped.folder).complete, "the same file at another place is the same plug-in"


TRACKER = """
from pathlib import Path

from atlas_fl.plugins import register
from atlas_fl.report.trackers import Tracker

@register("tracker", "lines")
class Lines(Tracker):
    title = "lines"

    def __init__(self, place):
        self.place = Path(place)

    def check(self):
        self.place.touch()

    def begin(self, run):
        self.write(f"begin {run.first_round}")

    def log(self, numbers, *, round):
        self.write(f"round {round} {numbers['loss'] > 0}")

    def log_summary(self, summary):
        self.write("summary")

    def finish(self, *, is_failed):
        self.write(f"failed {is_failed}")

    def write(self, line):
        self.place.write_text(self.place.read_text() + line + "\\n")
"""


@pytest.mark.slow
def test_a_tracker_of_a_plugin_is_told_of_a_run_and_of_its_resumption(config: Make, tmp_path, capsys) -> None:
    plugin, log = tmp_path / "tracker.py", tmp_path / "log.txt"
    plugin.write_text(TRACKER)
    written = validate(config(name="logged", plugin=(str(plugin),), rounds=2, max_rounds=1))
    settings = tmp_path / "run.toml"
    settings.write_text(to_toml(written))
    load_plugins(())
    assert main(["run", "--config", str(settings), "--tracker", f"lines={log}"]) == 0
    assert log.read_text().splitlines() == ["begin 1", "round 1 True", "failed False"]
    load_plugins(())
    assert main(["resume", str(run_folder(written).path), "--tracker", f"lines={log}"]) == 0
    assert log.read_text().splitlines()[3:] == ["begin 2", "round 2 True", "summary", "failed False"]
    capsys.readouterr()
    assert main(["run", "--config", str(settings), "--tracker", "line=x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("atlas: --tracker is line=x; allowed: NAME=PLACE of a plug-in, lines; add --plugin FILE")


FIGURE = """
from atlas_fl.plugins import register
from atlas_fl.report.html.charts import Chart

@register("figure", "seconds")
def seconds(record):
    rows = [{"client": row["client"], "took": row["seconds"]} for row in record.metrics if row.get("split") == "train"]
    axes = {"x": {"field": "client", "type": "nominal"}, "y": {"field": "took", "type": "quantitative"}}
    spec = {"mark": "bar", "encoding": axes}
    return Chart(name="seconds", title="Seconds of training", note="by client", spec=spec, rows=rows)
"""


@pytest.mark.slow
def test_a_figure_of_a_plugin_stands_in_the_report_and_among_the_files_where_the_command_names_it(
    config: Make, tmp_path: Path
) -> None:
    plugin = tmp_path / "figure.py"
    plugin.write_text(FIGURE)
    run = run_config(config(rounds=1)).folder
    assert main(["report", str(run), "--plugin", str(plugin)]) == 0
    assert "Seconds of training" in (run / "report.html").read_text()
    assert (run / "figures/seconds.png").is_file()
    assert (run / "figures/seconds.csv").read_text().splitlines()[0] == "client,took"
    assert main(["report", str(run), "--page-only"]) == 0
    assert "Seconds of training" not in (run / "report.html").read_text()


START, TRAINED, SECOND = (
    Path(f"audit/{file}.safetensors") for file in ("round-0000/start", "round-0001/trained", "round-0001/second")
)


@pytest.mark.slow
def test_clients_send_what_a_filter_leaves_of_their_change_and_keep_a_second_model_as_it_is(config: Make) -> None:
    settings = {"rounds": 1, "audit": True, "strategy": "ditto", "ranks": "4"}
    free = run_config(config(name="free", **settings)).folder
    held = run_config(config(name="held", update_filter=("clip=0.0005",), **settings)).folder
    passing_audit(held)
    sent = read_tensors(held / TRAINED)
    changes = [
        (sent[name] - one).norm() for name, one in read_tensors(held / START).items() if name.startswith("movie-0")
    ]
    assert float(torch.stack(changes).norm()) == pytest.approx(0.0005, rel=1e-3)
    assert same_tensors(read_tensors(held / SECOND), read_tensors(free / SECOND))


@pytest.mark.slow
def test_a_client_term_that_a_script_put_into_the_registry_is_not_dropped_in_silence_by_workers(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = list[mmap.mmap]()
    assembly, places = share_weights(assemble(config()), into(memory))
    with monkeypatch.context() as patch:
        patch.setitem(TERMS, "pull_to_zero", fedprox)
        heads = worker_init_messages(assembly, places, devices=["cpu"], cpus=torch.get_num_threads())
    worker = WorkerLoop(init_worker, lambda: memory[0])
    message = "the term 'pull_to_zero' was put into a registry by hand .* --plugin FILE"
    with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigError, match=message):
        init_workers([worker], heads, threads)


@pytest.mark.product
def test_runs_at_once_have_the_plugin_and_results_with_another_are_not_reused(config: Make, term: str) -> None:
    without = config(name="none", rounds=1, samples=8)
    with_term = config(name="none", rounds=1, samples=8, plugin=(term,))
    points = grid(with_term, over={"strategy": ("fedavg",)}, seeds=(1,))
    (alone,) = run_all(points)
    others = grid(without, over={"strategy": ("fedavg",)}, seeds=(1,))
    (plain,) = run_all(others)
    assert not same_tensors(state(alone, round=1), state(plain, round=1))
    kept = state(alone, round=1)
    shutil.rmtree(alone)
    (at_once,) = run_all(grid(with_term, over={"strategy": ("fedavg",)}, seeds=(1,)), jobs=1)
    assert same_tensors(kept, state(at_once, round=1))


@pytest.mark.slow
def test_tasks_strategies_and_allocators_of_a_plugin_make_a_run(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "kinds.py"
    path.write_text(KINDS)
    settings = {"tasks": ("films", "trec"), "strategy": "own_average", "ranks": "own_ranks", "rounds": 1}
    run = run_config(config(plugin=(str(path),), **settings))
    assert run.complete
    same = run_config(
        config(name="ours", tasks=("films", "trec"), plugin=(str(path),), strategy="fedavg", ranks="uniform", rounds=1)
    )
    assert same_tensors(state(run.folder, round=1), state(same.folder, round=1))
    load_plugins(())
    found = audit_run(run.folder)
    assert found.ok and {"rows", "mixed", "moved", "loaded", "names", "record"} <= {row.check for row in found.rows}
    (line,) = found.unchecked
    assert "own_average is a plug-in's, for which there is no second formula" in line


def test_a_tampered_matrix_or_model_of_a_plugins_method_fails_the_audit(config: Make) -> None:
    run = run_config(config(plugin=(str(INVERSE_LOSS),), strategy="inverse_loss", rounds=1)).folder
    round_one = run / "audit/round-0001"
    rows = read_tensors(round_one / "mixing.safetensors")
    assert rows["adapters"].sum(dim=1).allclose(torch.ones(4, dtype=torch.float64))
    assert not rows["head"][0, 2:].any(), "heads of another task"
    write_tensors(round_one / "mixing.safetensors", {**rows, "adapters": rows["adapters"].roll(1, 1)})
    failed = {row.check for row in audit_run(run).failures}
    assert {"files", "mixed"} <= failed
    write_tensors(round_one / "mixing.safetensors", {**rows, "adapters": 2 * rows["adapters"]})
    assert "rows" in {row.check for row in audit_run(run).failures}
