"""Task arithmetic on finished runs: task vectors merged, scaled and scored.

Ilharco et al. 2023, "Editing Models with Task Arithmetic". Heads are not merged: a task keeps the head of its run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch

from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.job import make_jobs
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.data.registry import find_tasks
from atlas_fl.errors import CheckpointError, ConfigError, ModelError
from atlas_fl.experiment.state import FederationState
from atlas_fl.frozen import Frozen
from atlas_fl.models.vision import backbone_weights
from atlas_fl.models.vision_loading import load_vision, save_vision
from atlas_fl.params import ByClient, Params, Split, split_body_and_head
from atlas_fl.setup.assembly import Assembly, assemble, recorded_config, trainable_of
from atlas_fl.sparse.task_vectors import apply_vector, task_vector
from atlas_fl.storage import checkpoint
from atlas_fl.storage.run_folder import RunFolder


class TrainedRun(Frozen, eq=False):
    """A finished run of whole models that ended in one backbone for all of its clients."""

    folder: Path
    assembly: Assembly
    body: Params
    """Every tensor of the backbone as the run left it."""
    heads: ByClient


class ScaleRow(Frozen):
    """The accuracy of one scale of a task vector on every run's images, by the runs' names."""

    scale: float
    validation: Mapping[str, float]
    test: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Over runs, on test images."""
        return fmean(self.test.values())


def load_trained_run(folder: RunFolder) -> TrainedRun:
    """The models, images and heads of a finished run.

    Raises:
        ConfigError: it trained adapters, or its clients ended with backbones of their own.
        CheckpointError: it is not complete.
    """
    config = recorded_config(folder)
    tasks = find_tasks(config.data.tasks, config.data.task)
    if trainable_of(config, tasks) == "lora" or not any(task.images for task in tasks):
        raise ConfigError(
            f"run {folder.path} trained adapters, or texts, and task vectors are of whole models; give runs on images"
        )
    saved = checkpoint.load_newest(folder.checkpoints)
    if not folder.summary.is_file() or saved is None:
        raise CheckpointError(f"run {folder.path} is not complete; go on with: atlas resume {folder.path}")
    assembly = assemble(config)
    models = FederationState.from_checkpoint(saved, assembly.names).client_models
    parts = {name: split_body_and_head(params) for name, params in models.items()}
    bodies = {name: body for name, (body, _) in parts.items()}
    first, *others = bodies
    for name in others:
        if any(not torch.equal(tensor, bodies[name][key]) for key, tensor in bodies[first].items()):
            raise ConfigError(
                f"run {folder.path} ended with models of their own for {first} and {name}; a task vector needs one, as"
                " --strategy fedavg ends with"
            )
    body = {**{key: tensor.cpu() for key, tensor in backbone_weights(assembly.site.vision).items()}, **bodies[first]}
    heads = {name: head for name, (_, head) in parts.items()}
    return TrainedRun(folder=folder.path, assembly=assembly, body=body, heads=heads)


def base_weights(runs: Sequence[TrainedRun], *, model: str | None = None) -> Params:
    """The weights that task vectors are differences to: those of this model, or those that all runs began with.

    Raises:
        ConfigError: the runs began with different models, and none is named.
        ModelError: the model is not to be had.
    """
    first = runs[0]
    if model is not None:
        return backbone_weights(load_vision(model, image_size=first.assembly.site.vision.image_size))
    names = dict.fromkeys(run.assembly.config.model.model for run in runs)
    if len(names) > 1:
        raise ConfigError(
            f"the runs began with different models ({', '.join(names)}); say with --base what to subtract from all"
        )
    return {key: tensor.cpu() for key, tensor in backbone_weights(first.assembly.site.vision).items()}


def task_vectors(runs: Mapping[str, TrainedRun], base: Params) -> list[dict[str, torch.Tensor]]:
    """Every run's task vector, by the runs' names in their order.

    Raises:
        ModelError: a run is of another architecture than the base; the message names it.
    """
    vectors = []
    for name, run in runs.items():
        try:
            vectors.append(task_vector(run.body, base))
        except ModelError as error:
            raise ModelError(f"{name} and the base: {error}") from error
    return vectors


def score_scales(
    runs: Mapping[str, TrainedRun], base: Params, vector: Params, *, scales: Sequence[float]
) -> tuple[ScaleRow, ...]:
    """The accuracy of base + scale x vector on every run's validation and test images, each with its run's heads."""
    rows = []
    for scale in scales:
        body = apply_vector(base, vector, scale=scale)
        validation = {name: accuracy(run, body, "validation") for name, run in runs.items()}
        test = {name: accuracy(run, body, "test") for name, run in runs.items()}
        rows.append(ScaleRow(scale=scale, validation=validation, test=test))
    return tuple(rows)


def accuracy(run: TrainedRun, body: Params, split: Split) -> float:
    """The share of all clients' images of this split that the backbone with the run's heads recognises."""
    models = {name: {**body, **head} for name, head in run.heads.items()}
    updates = evaluate(make_jobs(models, EvaluateOptions(split=split), round=0), run.assembly.site)
    total = sum(update.examples for update in updates)
    return sum(update.metrics["accuracy"] * update.examples for update in updates) / total


def best_scale(rows: Sequence[ScaleRow]) -> ScaleRow:
    """The scale with the best mean accuracy on validation images, the first of equals."""
    return max(rows, key=lambda row: fmean(row.validation.values()))


def save_merged(runs: Sequence[TrainedRun], body: Params, to: Path) -> list[Path]:
    """Write the backbone with the head of every run's task under `to`, as stock transformers load it; the folders."""
    folders = []
    for run in runs:
        clients = {client.task.name: client for client in run.assembly.clients}
        for task, client in clients.items():
            folder = to / (run.folder.name if len(clients) == 1 else f"{run.folder.name}-{task}")
            head = run.heads[client.name]
            save_vision(run.assembly.site.vision, {**body, **head}, folder, labels=client.task.label_names)
            folders.append(folder)
    return folders
