"""Three hospitals of one csv: simulated, served to sites, late, placed, exported, resumed."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_fl.cli.main import main
from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Rows, Source, load_task
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import run_config
from atlas_fl.planning.place_client import place_client
from atlas_fl.planning.plan import read_plan
from atlas_fl.storage.assets import embedded_dir
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.federation import Federation, adapters
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import Programs
from tests.runs.reading import passing_audit
from tests.runs.sessions import check_same_runs, in_sessions
from tests.runs.workers import check_same, run_in_threads

HOSPITALS = {"Mary": (0, 60), "north": (60, 160), "south": (160, 300)}
COLUMNS = "text=note,label=triage"
LABELS = "text=note,label=topics,multi=;"
"""Several labels a row: the class and the first word, or none."""


def topics_of(text: str, label: str) -> str:
    first = text.split()[0].lower()
    return "" if first == "name" else ";".join([label, *[word for word in ("what", "who") if word == first]])


def write_hospitals(folder: Path) -> None:
    """Questions of TREC as notes; Mary has none of the rarest class."""
    data = load_task(TASKS["trec"], Source(cache_dir=embedded_dir())).train
    assert isinstance(data, Rows)
    names = TASKS["trec"].label_names
    rows = [(text, names[label]) for text, label in zip(data.text, data.label.tolist(), strict=True)]
    by_hospital = {
        name: [row for row in rows[first:last] if (name, row[1]) != ("Mary", "ABBR")]
        for name, (first, last) in HOSPITALS.items()
    }
    by_hospital["south"] += [row for row in rows[300:] if row[1] == "ABBR"][:9]
    with (folder / "hospitals.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("note", "triage", "topics", "hospital"))
        table.writerows((*row, topics_of(*row), name) for name, own in by_hospital.items() for row in own)
    for name, own in {**by_hospital, "new": [row for row in rows[300:360] if row[1] != "ABBR"]}.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("note", "triage", "topics", "hospital"), *((*row, topics_of(*row), name) for row in own)]
            )


@pytest.fixture
def hospitals(config: Make, tmp_path: Path) -> Callable[..., Config]:
    write_hospitals(tmp_path)
    given = {
        "tasks": (),
        "devices": ("laptop_8gb",),
        "clients_per_task": 3,
        "rounds": 2,
        "pack_tokens": 1,
    }
    whole = {"samples": "none", "validation_samples": "none", "test_samples": "none"}
    own = "triage={}/hospitals.csv,{},client=hospital"
    return lambda columns=COLUMNS, **values: with_values(
        config(), {**given, **whole, "task": (own.format(tmp_path, columns),), **values}
    )


@pytest.fixture
def federation(
    hospitals: Callable[..., Config], tmp_path: Path, programs: Programs, finished: FinishedRuns
) -> Iterator[Callable[..., Federation]]:
    sites = dict.fromkeys(HOSPITALS, "laptop_8gb")
    yield lambda **values: Federation(hospitals(**values), tmp_path, sites, programs, finished)
    programs.kill_all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "server_task"),
    [
        ({"strategy": "fedavg"}, ""),
        pytest.param({"strategy": "atlas"}, "triage,labels=ABBR|DESC|ENTY|HUM|LOC|NUM", marks=pytest.mark.product),
        ({"strategy": "atlas", "columns": LABELS}, "triage,labels=ABBR|DESC|ENTY|HUM|LOC|NUM|what|who,multi=;"),
        pytest.param({"strategy": "fedavg", "columns": LABELS, "split": "north=1"}, "", marks=pytest.mark.product),
    ],
)
def test_three_sites_end_with_the_bits_of_one_csv(
    federation: Callable[..., Federation], values: dict[str, str], server_task: str, tmp_path: Path
) -> None:
    """Of a server with the file, and of one that names the classes alone; a site has its own rows, or takes them."""
    fed = federation(**values)
    columns = values.get("columns", COLUMNS)
    if server_task:
        (tmp_path / "fed.toml").write_text(to_toml(with_values(fed._config, {"task": (server_task,)})))
    server, port = fed.serve()
    whole = f"triage=hospitals.csv,{columns},client=hospital"
    tasks = {"Mary": whole, **{name: f"triage={name}.csv,{columns}" for name in ("north", "south")}}
    sites = [
        fed.programs.start(
            *("join", f"localhost:{port}", "--certs", f"certs/{name}", "--task", task, "--device", "laptop_8gb"),
            *("--least-examples", "2", "--allow", "cut", "labels", *fed.own_model),
            folder=tmp_path,
        )
        for name, task in tasks.items()
    ]
    assert all(f"the run is complete for {name}" in site.end() for name, site in zip(tasks, sites, strict=True))
    server.end()
    fed.is_as_simulated()
    assert set(adapters(fed.simulated)) == set(HOSPITALS)
    plans = [read_json(folder.plan) for folder in (RunFolder(fed.simulated), fed.served)]
    assert plans[0]["data"] == plans[1]["data"]
    assert [row["labels"]["ABBR"] == 0 for row in plans[0]["data"]] == [True, False, False]
    passing_audit(fed.served.path)


KINDS = {"triage": ("DESC", "HUM"), "topic": ("ENTY", "LOC", "NUM")}


@pytest.fixture
def two_tasks(hospitals: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """The questions of north and south, of two tasks by their classes; south's own rows lie in south-notes.csv too."""
    kind_of = {label: kind for kind, labels in KINDS.items() for label in labels}
    with (tmp_path / "hospitals.csv").open(newline="") as file:
        given = [[*row[:2], row[3]] for row in csv.reader(file) if row[1] in kind_of and row[3] != "Mary"]
    rows = [[*row, kind_of[row[1]]] for row in given]
    south = [row for row in rows if row[2] == "south"]
    new = [[f"Well {note}", *more] for note, *more in south]
    files = {"notes": rows, "south-notes": south, "new": new, "new-topic": [row for row in new if row[3] == "topic"]}
    for name, own in files.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("note", "triage", "hospital", "kind"), *own])
    task = f"notes={tmp_path}/notes.csv,{COLUMNS},client=hospital,task=kind"
    return lambda **values: hospitals(**{"task": (task,), "devices": ("laptop_8gb", "tablet_4gb"), **values})


@pytest.mark.slow
def test_two_sites_of_two_tasks_end_with_the_bits_of_one_csv(
    two_tasks: Callable[..., Config], tmp_path: Path, programs: Programs, finished: FinishedRuns
) -> None:
    """A site takes part once for each of its tasks; north takes its rows of the file, south has a file of its own."""
    devices = {"north": "laptop_8gb", "south": "tablet_4gb"}
    words = {
        "north": f"notes=notes.csv,{COLUMNS},client=hospital,task=kind",
        "south": f"notes=south-notes.csv,{COLUMNS},task=kind",
    }
    # the server has its clients in the order of their certificates
    sites = {f"notes-{kind}-{site}": site for kind in sorted(KINDS) for site in devices}
    clients = {name: devices[site] for name, site in sites.items()}
    fed = Federation(two_tasks(strategy="atlas"), tmp_path, clients, programs, finished)
    server, port = fed.serve()
    joined = [
        programs.start(
            *("join", f"localhost:{port}", "--certs", f"certs/{name}", "--task", words[site]),
            *("--device", devices[site], "--least-examples", "2", "--config", "fed.toml"),
            folder=tmp_path,
        )
        for name, site in sites.items()
    ]
    assert all(f"the run is complete for {name}" in site.end() for name, site in zip(sites, joined, strict=True))
    server.end()
    fed.is_as_simulated()
    simulated, served = (read_json(folder.plan) for folder in (RunFolder(fed.simulated), fed.served))
    assert {one["name"]: one["device"] for one in simulated["clients"]} == clients
    assert simulated["data"] == served["data"]
    summaries = [read_json(folder.summary)["sites"] for folder in (RunFolder(fed.simulated), fed.served)]
    assert summaries[0] == summaries[1]
    assert list(summaries[0]) == ["north", "south"]
    passing_audit(fed.served.path)


@pytest.mark.slow
def test_a_late_client_of_a_site_a_newcomer_and_an_export(
    two_tasks: Callable[..., Config], finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(two_tasks(arrive=("notes-topic-north=2",), alone="all")).folder
    passing_audit(run)
    assert main(["export", str(run), "--client", "notes-topic-north", "--to", str(tmp_path / "exported")]) == 0
    assert main(["report", str(run)]) == 0
    page, summary = (run / "report.html").read_text(), read_json(RunFolder(run).summary)
    assert "Test scores by site" in page
    north = [summary["clients"][f"notes-{kind}-north"]["final"]["test"]["primary"] for kind in KINDS]
    assert summary["sites"]["north"]["final"]["test"]["primary"] == pytest.approx(sum(north) / 2)
    for words in ("notes=new.csv,task=kind:topic", "notes-topic=new-topic.csv"):
        name, _, rest = words.partition("=")
        placed = place_client(run, task=f"{name}={tmp_path}/{rest},{COLUMNS}")
        assert placed.name == "notes-topic-1"  # beside the one that began
    for words in (f"notes={tmp_path}/new.csv,{COLUMNS},task=kind", "notes"):
        with pytest.raises(
            ConfigError, match=r"a newcomer has one task, .* name one, as in task=COLUMN:topic, or give"
        ):
            place_client(run, task=words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"strategy": "kriging"}, marks=pytest.mark.product),
        pytest.param({"split": "north=1,south=2", "head": "client"}, marks=pytest.mark.product),
        {"strategy": "fedavg"},
    ],
    ids=str,
)
def test_several_labels_end_with_the_same_bits_in_workers_and_in_sessions(
    hospitals: Callable[..., Config], finished: FinishedRuns, values: dict[str, str]
) -> None:
    run = finished(hospitals(LABELS, **values)).folder
    check_same(run, run_in_threads(hospitals(LABELS, name="workers", **values), 2).folder)
    check_same_runs(run, in_sessions(hospitals(LABELS, name="sessions", max_rounds=1, **values)).folder)
    (task,) = read_json(RunFolder(run).summary)["tasks"].values()
    assert task["metric"] == "micro f1"
    assert {"ABBR", "what", "who"} <= task["classes"].keys()


@pytest.mark.slow
def test_a_class_that_the_server_lacks_is_one_line(federation: Callable[..., Federation], tmp_path: Path) -> None:
    fed = federation()
    (tmp_path / "fed.toml").write_text(to_toml(with_values(fed._config, {"task": ("triage,labels=DESC|HUM",)})))
    server, port = fed.serve()
    words = ("--certs", "certs/south", "--task", f"triage=south.csv,{COLUMNS}", "--device", "laptop_8gb")
    words += fed.own_model
    said = fed.programs.start("join", f"localhost:{port}", *words, folder=tmp_path).end(code=2)
    assert "in column 'triage' (rows: 33), which is none of the classes that labels= declares (DESC, HUM)" in said
    server.kill()


@pytest.mark.slow
def test_a_late_hospital_a_newcomer_and_an_export(
    hospitals: Callable[..., Config], finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(hospitals(arrive=("Mary=2",), flipped_clients=0.34)).folder
    passing_audit(run)
    assert sorted(adapters(run)) == sorted(HOSPITALS)
    assert main(["export", str(run), "--client", "Mary", "--to", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported/adapter_model.safetensors").is_file()
    assert main(["report", str(run)]) == 0
    assert "triage" in (run / "report.html").read_text()
    placed = place_client(run, task=f"triage={tmp_path}/new.csv,{COLUMNS}")
    assert placed.name == "triage-2"
    named = place_client(run, task=f"triage={tmp_path}/new.csv,{COLUMNS},client=hospital")
    assert (named.examples, named.placement) == (placed.examples, placed.placement), "its file may name it"
    for task in ("triage", hospitals().data.task[0]):
        with pytest.raises(ConfigError, match=r"a newcomer is one client, and task 'triage' names 3 \(Mary, north"):
            place_client(run, task=task)


@pytest.mark.slow
def test_folders_of_images_train_as_clients_and_a_folder_is_placed(image_config: Make, tmp_path: Path) -> None:
    """North keeps its test images, south lacks a class, tiny has too few; a newcomer lacks a class, too."""
    draw = np.random.default_rng(0)
    counts = {"north/train": (12, 12), "north/test": (4, 4), "south": (30,), "west": (20, 20), "tiny": (1, 1)}
    for place, of_classes in {**counts, "../new": (20,)}.items():
        for number, count in enumerate(of_classes):
            folder = tmp_path / "sites" / place / "ab"[number]
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 90, (10 + number, 12), dtype=np.uint8) + np.uint8(90 * number)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    whole = {"samples": "none", "validation_samples": "none", "test_samples": "none", "nc": "iid"}
    given = {"tasks": (), "task": (f"xray={tmp_path}/sites,client=file,least=5,size=8",), "clients_per_task": 3}
    config = image_config(
        **whole, **given, participation=1.0, strategy="fedavg_cluster", trainable="lora", clusters="2"
    )
    run = run_config(config).folder
    passing_audit(run)
    assert sorted(adapters(run)) == ["north", "south", "west"]
    plan = read_plan(RunFolder(run), RunFolder(run).plan)
    assert [row["labels"]["b"] > 0 for row in plan.data] == [True, False, True]
    assert any("fewer than 5 examples: 1 of 4 clients, tiny (2)" in note for note in plan.notes)
    assert place_client(run, task=f"xray={tmp_path}/new,size=8").name == "xray-3"
