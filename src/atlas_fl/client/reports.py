"""Training with a report beside the update: what a method asks clients to measure (`methods.method.Method.measure`).

Reports are measured before the training, by the model that a client begins the round with.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import body_of, features_of_row, in_order, rows_in_order
from atlas_fl.client.draws import Draws
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.job import Action, Job, Site, Update
from atlas_fl.client.local_training import begin_training
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.client.trainers import train_clients
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.methods.method import Method
from atlas_fl.methods.registry import reporting
from atlas_fl.methods.update_filters import apply_filter
from atlas_fl.models.lora import Adapters, attach_adapters
from atlas_fl.models.registry import apply_layers
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, digest, lora_modules
from atlas_fl.storage.ledger import Direction, Kind

PLAIN_SGD = ("momentum", "weight_decay", "clip", "dropout", "warmup", "proximal_mu", "feature_alignment")
"""Options of training that a step of plain SGD has none of."""


class PackReport(Frozen):
    """Measurements of the clients of these jobs; each by itself, so that the bits do not follow the packs."""

    jobs: Sequence[Job]
    site: Site
    train: Action = train_clients
    evaluate: Action = evaluate
    crossed: dict[str, Counter[tuple[Kind, Direction]]] = field(default_factory=dict)
    """By client, bytes that went through its cut for the report."""
    steps: Counter[str] = field(default_factory=Counter)
    """By client, optimizer steps for the report."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients that are asked."""
        return tuple(job.client for job in self.jobs)

    @cached_property
    def _by_client(self) -> Mapping[str, Job]:
        return {job.client: job for job in self.jobs}

    def model(self, client: str) -> Params:
        """The model that the client begins the round with."""
        return begin_training(self._by_client[client], self.site)[0]

    def loss(self) -> Mapping[str, float]:
        """The mean loss over all training examples, by client."""
        jobs = []
        for job in self.jobs:
            options = EvaluateOptions(split="train", prior_correction=job.options.prior_correction)
            jobs.append(replace(job, params=self.model(job.client), options=options, sent={}, kept={}))
        updates = self.evaluate(jobs, self.site)
        for update in updates:
            self.crossed.setdefault(update.client, Counter()).update(update.crossed)
        return {update.client: update.metrics["loss"] for update in updates}

    @torch.inference_mode()
    def features(self, client: str) -> tuple[Tensor, np.ndarray, int]:
        """(inputs of the head's last layer (examples, width) float64, classes (examples,) int64, number of classes).

        One forward pass over all training examples, without dropout.
        """
        site, local_data = self.site, self.site.data[client]
        data = local_data.splits["train"]
        params = {key: one.to(site.backbone.device) for key, one in self.model(client).items()}
        parts: list[Tensor] = []
        for _, _, row in rows_in_order(data, site):
            adapters = Adapters(clients=[params], segments=row.segments, sequences=row.pooled, scale=site.scale)
            with attach_adapters(site.modules, adapters), site.autocast(scaled=False):
                features = features_of_row(row, site.backbone, body_of([params], site))
                parts.append(apply_layers(site.backbone.family.head[:-1], params, features).double().cpu())
        return torch.cat(parts), data.labels[in_order(data.lengths)], local_data.task.num_labels

    def gradient(self, client: str) -> Params:
        """The sum of the gradients of the round's batches at every adapted layer's frozen weight, (d_out, d_in).

        With A = I the gradient at B is s times that at the weight. Steps of SGD of a rate under which nothing moves
        that float32 could tell add them up, from B = 0.
        """
        job, rate = self._by_client[client], 1e-8
        train: TrainOptions = job.options
        params = {key: tensor for key, tensor in job.params.items() if key.startswith(HEAD)}
        for module in lora_modules(job.params):
            a, b = job.params[module + LORA_A], job.params[module + LORA_B]
            params |= {module + LORA_A: torch.eye(a.shape[1]), module + LORA_B: torch.zeros(len(b), a.shape[1])}
        plain: dict[str, Any] = {**dict.fromkeys(PLAIN_SGD, 0.0), "optimizer": "sgd", "schedule": "constant"}
        options = replace(train, **plain, trained_parts="B", lr=rate, nesterov=False, report="none", hash_loaded=False)
        (update,) = train_clients([Job(client=client, params=params, round=job.round, options=options)], self.site)
        self.steps[client] += int(update.metrics["steps"])
        scales = {module: rate * self.site.scale(len(params[module + LORA_A])) for module in lora_modules(params)}
        return {module: -update.params[module + LORA_B] / scale for module, scale in scales.items()}

    def train_half(self, half: int) -> Mapping[str, Params]:
        """The models after the round's steps on one half of the examples, of which nothing but the model is told."""
        own = {"half": half, "report": "none", "hash_loaded": False}
        jobs = [replace(job, options=replace(job.options, **own)) for job in self.jobs]
        updates = _train_and_filter(jobs, self.site, self.train)
        for update in updates:
            self.crossed.setdefault(update.client, Counter()).update(update.crossed)
            self.steps[update.client] += int(update.metrics["steps"])
        return {update.client: update.params for update in updates}


def train_and_report(
    jobs: Sequence[Job], site: Site, *, train: Action = train_clients, evaluate: Action = evaluate
) -> list[Update]:
    """Every client's trained model with the report that its job asks for, in the order of the jobs.

    `train` and `evaluate` are the two actions as they are carried out here.
    """
    measured: dict[str, tuple[type[Method], Params, Params]] = {}
    crossed: dict[str, Counter[tuple[Kind, Direction]]] = {}
    extra: Counter[str] = Counter()
    for kind in sorted({job.options.report for job in jobs} - {"none"}):
        asked = [job for job in jobs if job.options.report == kind]
        pack, method = PackReport(jobs=asked, site=site, train=train, evaluate=evaluate), reporting(kind)
        for client, report in method.measure(pack).items():
            start = pack.model(client)
            _check_measured(method, site, start, client, report)
            measured[client] = method, start, report
        crossed |= pack.crossed
        extra |= pack.steps
    updates = []
    for update in _train_and_filter(jobs, site, train):
        reported = dict(update.reported)
        if update.client in measured:
            method, start, report = measured[update.client]
            reported[method.report] = method.measure_trained(report, start, update.params)
        through = Counter(update.crossed) + crossed.get(update.client, Counter())
        metrics = with_extra_steps(update.metrics, extra[update.client])
        updates.append(replace(update, reported=reported, crossed=through, metrics=metrics))
    return updates


def with_extra_steps(metrics: Mapping[str, float], steps: float) -> dict[str, float]:
    """The metrics of a client's training with so many more optimizer steps than those of its model."""
    return {**metrics, "extra_steps": metrics.get("extra_steps", 0.0) + steps} if steps else dict(metrics)


def _train_and_filter(jobs: Sequence[Job], site: Site, train: Action) -> list[Update]:
    """Every client's trained model as its filters let it leave, in the order of the jobs."""
    return [_filter(update, job, site) for job, update in zip(jobs, train(jobs, site), strict=True)]


def _filter(update: Update, job: Job, site: Site) -> Update:
    options: TrainOptions = job.options
    if not options.update_filter or options.is_personal(job.round):
        return update
    start = {name: job.params[name].cpu() for name in sorted(update.params) if options.trains(name, round=job.round)}
    change: Params = {name: (update.params[name] - tensor).float() for name, tensor in start.items()}
    owed = job.kept.get("residual", {})
    change = whole = {name: tensor + owed[name] if name in owed else tensor for name, tensor in change.items()}
    draws = Draws(client=job.client, seed=options.seed, secret=site.secrets.get(job.client))
    # Two different answers with the same noise would tell their difference.
    asked = (job.round, digest(job.params), replace(options, hash_loaded=False))
    for place, word in enumerate(options.update_filter):
        change = apply_filter(word, change, draws.torch_generator("update", place, *asked))
    sent = {name: (tensor + change[name]).to(tensor.dtype) for name, tensor in start.items()}
    if job.mask is not None:
        sent = {name: torch.where(job.mask[name].cpu(), tensor, start[name]) for name, tensor in sent.items()}
    lost = {"residual": {name: tensor - change[name] for name, tensor in whole.items()}}
    kept = {**update.kept, **lost} if options.error_feedback else update.kept
    return replace(update, params={**update.params, **sent}, kept=kept)


def _check_measured(method: type[Method], site: Site, model: Params, client: str, report: Params) -> None:
    """Raise ConfigError unless a client measured the tensors that its method declares."""
    declared = method.report_tensors(model, classes=site.data[client].task.num_labels)
    for name in sorted(declared.keys() | report.keys()):
        schema, value = declared.get(name), report.get(name)
        wanted = "none of this name" if schema is None else f"a tensor {schema.shape} {schema.dtype}"
        got = f"a tensor {tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        if got != wanted:
            raise ConfigError(
                f"the report {method.report!r} of --strategy {method.name} has {name}: {got}, and report_tensors"
                f" declares {wanted}; make both agree"
            )
