"""The cluster of a run that a new client belongs to, by its fingerprint (`atlas place`)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.clustering.result import Clustering, Placement, assign_client
from atlas_fl.config import Config
from atlas_fl.data import cleaning, heterogeneity, own_clients, registry, user_files
from atlas_fl.data.clients import ClientData, make_clients
from atlas_fl.data.task import Examples, Source, Task, TaskData, load_task
from atlas_fl.errors import ConfigError, DataError, first_of
from atlas_fl.events import OnEvent, PhaseStarted, ignore
from atlas_fl.frozen import Frozen
from atlas_fl.planning.plan import Plan, read_plan
from atlas_fl.planning.planner import local_engine
from atlas_fl.planning.task_discovery import collect_fingerprints
from atlas_fl.setup.assembly import assemble, load_clients, recorded_config, source_of
from atlas_fl.setup.options import fingerprint_options
from atlas_fl.storage.run_folder import find_run


class ClientPlacement(Frozen):
    """The cluster of a run that a new client belongs to."""

    name: str
    examples: int
    """Training examples that its fingerprint was taken from."""
    placement: Placement
    members: Mapping[int, tuple[str, ...]]
    """The clients of every cluster of the run, by label."""


def place_client(
    run: str | Path, *, task: str, samples: int | None = None, on_event: OnEvent = ignore
) -> ClientPlacement:
    """Assign a client with this data to a cluster of the run, by its similarity to each.

    `task` is a name, or `name=path` with the options of `--task`; of a task of the run no row that a client of the run
    trains on is used. `samples` rows (as many as a client of the run has by default) are drawn from it. Model, warm-up,
    shared initialisation and sketch are those of the run's first plan.

    Raises `ConfigError` where the run has no clusters.
    """
    folder = find_run(run)
    config, plan = recorded_config(folder), read_plan(folder, folder.plan)
    if "similarity" not in plan.clustering:
        raise ConfigError(
            f"run {folder.path} has no clusters: strategy {config.mixing.strategy!r} uses none, and a newcomer takes"
            " the model that all have; name a run of another strategy, such as atlas"
        )
    clustering = Clustering.from_json(plan.clustering)
    on_event(PhaseStarted("loading"))
    client = _make_client(config, plan, task, samples)
    assembly = assemble(config, clients=(client,))
    engine = local_engine(assembly, on_event)
    on_event(PhaseStarted("fingerprints"))
    (update,) = collect_fingerprints(assembly, engine, fingerprint_options(config))
    placement = assign_client(clustering, update.params[FIRST].numpy(), update.params[SECOND].numpy())
    names = [client_plan.name for client_plan in plan.clients]
    return ClientPlacement(
        name=client.name,
        examples=len(client.train),
        placement=placement,
        members={
            label: tuple(name for name, cluster in zip(names, clustering.labels, strict=True) if cluster == label)
            for label in sorted(set(clustering.labels) - {UNDECIDED})
        },
    )


def _make_client(config: Config, plan: Plan, description: str, samples: int | None) -> ClientData:
    """One client of this task, numbered after those of the run, whose concepts it goes on with in turn."""
    if config.data.one_task:
        raise ConfigError(
            "the run has sources of one task, and a newcomer's rows would be of one alone; name a run without"
            " --one-task"
        )
    run_tasks = config.data.task
    name = user_files.described_task(description)
    if "=" in description:
        known = registry.find_tasks(config.data.tasks, run_tasks)
        classes = next((task.label_names for task in known if task.name == name), ())
        tasks = registry.find_tasks((), (user_files.with_labels(description, classes),))
    else:
        tasks = registry.find_tasks((description,), run_tasks)
    task = tasks[0]
    if task.name != name:
        word = task.name.removeprefix(f"{name}-")
        raise ConfigError(
            f"a newcomer has one task, and the rows of {name!r} have a column of them; name one, as in"
            f" task=COLUMN:{word}, or give a file of its rows alone: --task {task.name}=new.csv"
        )
    matching = tuple(text for text in run_tasks if task.name in [one.name for one in user_files.parse_tasks(text)])
    if len(task.clients) > 1:
        given = user_files.split_description(matching[0] if matching else description)[2].items()
        columns = "".join(f",{option}={value}" for option, value in given if option not in own_clients.OPTIONS)
        raise ConfigError(
            f"a newcomer is one client, and task {task.name!r} names {len(task.clients)} ({first_of(task.clients)});"
            f" give a file of its rows alone: --task {task.name}=new.csv{columns}"
        )
    if task.clients:
        (own,) = load_task(task, source_of(config)).clients
        task = replace(task, clients=(), load=lambda _: own)
    names = tuple(name for name in config.data.tasks if name == task.name)
    if names or matching:
        clients = load_clients(replace(config, data=replace(config.data, tasks=names, task=matching)))
        task = _without_rows(task, {client.name: client.train for client in clients if client.task.name == name})
    (client,) = make_clients(
        (task,),
        source_of(config),
        clients_per_task=1,
        samples=config.data.samples if samples is None else samples,
        # Its fingerprint needs the training rows alone.
        validation_samples=1,
        test_samples=1,
        partition="iid",
        dirichlet_alpha=config.data.dirichlet_alpha,
        seed=config.run.seed,
        shuffle_labels=False,
    )
    number = sum(planned.task == task.name for planned in plan.clients)
    client = replace(client, name=f"{task.name}-{number}", number=number)
    cuts = config.data.rating_cuts if task.is_regression else ()
    return heterogeneity.shift_concepts((client,), cuts)[0] if cuts else client


def _without_rows(task: Task, used: Mapping[str, Examples]) -> Task:
    """The task without the training rows of these clients; loading it raises `DataError` where no two are left."""

    def load(source: Source) -> TaskData:
        data = load_task(task, source)
        train = cleaning.without(data.train, *used.values())
        if len(train) < 2:
            holder = min(used, key=lambda name: len(cleaning.without(data.train, used[name])))
            count = f"{len(data.train) - len(train)} of the {len(data.train)} training rows of task {task.name!r}"
            raise DataError(
                f"{count} are in the run already, most of them with {holder}, so nobody new is there to place; give"
                " rows that no client of the run trains on"
            )
        return replace(data, train=train)

    return replace(task, load=load, files=None)
