"""lm-evaluation-harness on a run's language models: its own tasks and code, on the base and on exported adapters.

What a client's model has forgotten, or learned beside its own rows, is the difference from the base.
"""

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from atlas_fl.errors import CheckpointError, ConfigError, check_known, one_line
from atlas_fl.experiment.export import TEMPLATE, export_client, load_models
from atlas_fl.models.loading import find_family
from atlas_fl.params import head_keys
from atlas_fl.setup.assembly import pick_device, recorded_config
from atlas_fl.storage import extras, jsonl
from atlas_fl.storage.run_folder import RunFolder, find_run

BATCH = 8
BASE = "base"
Scores: TypeAlias = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By model (`base`, or a client's), task and metric."""


def harness_run(
    run: str | Path,
    tasks: Sequence[str],
    *,
    clients: Sequence[str],
    tasks_dir: str | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> Scores:
    """Scores of the base and of these clients' adapters on tasks of the harness; written into the run's folder.

    Args:
        run: its folder.
        tasks: names of the harness's tasks and groups.
        clients: whose models are scored.
        tasks_dir: a folder with further tasks (YAML, whose `!function` entries run as code).
        limit: most examples of a task.
        chat: ask in the chat template of each client's task, the base in that of the first.

    Raises:
        ConfigError: the harness is not installed, a task or client is unknown, a task's data cannot be read, or there
            is no chat template.
        CheckpointError: a client's model is no PEFT adapter that writes text.
    """
    extras.import_extra("lm_eval", extra="lm-eval", asked="--harness needs")
    from lm_eval import simple_evaluate  # ten seconds
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = find_run(run)
    config, models = recorded_config(folder), load_models(folder)
    if not clients:
        raise ConfigError("--harness scores the models of clients that are named; add --client NAME")
    manager = TaskManager(include_path=tasks_dir)
    check_known("task of lm-evaluation-harness", *tasks, among=manager.all_tasks)
    source, _ = find_family(config.model.model, writes=True)
    found: dict[str, dict[str, dict[str, float]]] = {}
    with TemporaryDirectory() as temporary:
        adapters: dict[str, str | None] = {BASE: None}
        for name in clients:
            adapters[name] = str(export_client(folder.path, client=name, to=Path(temporary) / name))
            if head_keys(models[name]):
                raise CheckpointError(f"the model of {name} is no PEFT adapter that writes text, as the harness loads")
        try:
            manager.load(list(tasks))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the harness cannot read the data of {', '.join(tasks)}: {one_line(error)}; tasks with local data are"
                " taken from --harness-tasks DIR"
            ) from None
        options = {"limit": limit, "apply_chat_template": chat, "log_samples": False}
        device = pick_device(config.run.accelerator)
        for name, adapter in adapters.items():
            model = HFLM(pretrained=source, peft=adapter, device=device, dtype="float32", batch_size=BATCH)
            template = Path(adapter or str(adapters[clients[0]]), TEMPLATE)
            if template.is_file():
                model.tokenizer.chat_template = template.read_text(encoding="utf-8")
            if chat and model.tokenizer.chat_template is None:
                raise ConfigError(
                    f"{config.model.model} has no chat template, which --harness-chat needs; leave it out"
                )
            scores = simple_evaluate(model, tasks=list(tasks), task_manager=manager, **options)
            found[name] = {task: _metrics(own) for task, own in scores["results"].items()}
    content = {"lm_eval": metadata.version("lm-eval"), "limit": limit, "chat": chat, "models": found}
    jsonl.write_json(folder.harness, content, within=folder.path)
    return found


def read_harness(folder: RunFolder) -> Scores:
    """The scores that `harness_run` wrote into a run's folder; none where it did not."""
    return jsonl.read_json(folder.harness, within=folder.path)["models"] if folder.harness.is_file() else {}


def _metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a task, without the name of the filter where it is none."""
    numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
    return {name.removesuffix(",none"): float(value) for name, value in jsonl.drop_undefined(numbers).items()}
