"""Job, Update and Site: what a client is asked, what it answers, and what it computes with; the initial parameters.

An action is `(jobs, site) -> updates`. In a simulation the engine hands over a pack of jobs and the site holds
many clients' data; deployed, a site holds the data of one client and gets one job. The function is the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Images, Task
from atlas_fl.frozen import Frozen
from atlas_fl.methods.prior_correction import log_frequencies
from atlas_fl.models.backbone import Backbone, module_dims, target_modules
from atlas_fl.models.identity import model_identity
from atlas_fl.models.lora import init_adapters, init_head
from atlas_fl.models.prefix_cache import PrefixCache
from atlas_fl.models.registry import head_shapes
from atlas_fl.models.tokenization import EncodedExamples, encode_images
from atlas_fl.models.vision import Vision
from atlas_fl.params import PARTS, ByClient, Params, Split
from atlas_fl.sparse.masks import Mask
from atlas_fl.split.channel import NO_CUTS, Cut, CutTraffic

Trainable: TypeAlias = Literal["lora", "full"]
"""Trained part: adapters and a head on the frozen model, or all weights."""


class Prompts(Frozen):
    """Examples that a model writes something after, and what a person wrote there."""

    encoded: EncodedExamples
    references: tuple[str, ...]


class ClientTokens(Frozen):
    """A client's own data, tokenised; it never leaves the site."""

    task: Task
    splits: Mapping[Split, EncodedExamples]
    prompts: Mapping[Split, Prompts] = field(default_factory=dict)
    """For ROUGE, some of the held-out examples of a task with prompts."""

    @property
    def examples(self) -> int:
        """Training examples."""
        return len(self.splits["train"])


class Site(Frozen):
    """A place where clients compute: one frozen backbone and the data of those who are here."""

    backbone: Backbone
    data: Mapping[str, ClientTokens]
    targets: tuple[str, ...]
    scale: Callable[[int], float]
    """LoRA's factor of a rank."""
    max_tokens: int
    """Tokens that may train together, from the memory budget; an image of a whole model counts as one."""
    trainable: Trainable = "lora"
    first_adapted: int = 0
    """The lowest block that carries adapters."""
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    """Cached inputs of that block, of examples here."""
    bf16: bool = False
    fp16: bool = False
    """Like bf16, with losses scaled so that small gradients do not vanish."""
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    """The secrets of clients by name: what they draw about their own examples from (`client.draws`), and the noise on
    their cuts. Empty in a simulation without, and at a server."""
    seed: int | None = None
    """The run's, from which a simulation draws the noise of clients without a secret; None at a site."""
    pay: Callable[[str, int, Any, int], int] | None = None
    """(question, examples, options, steps) -> the steps paid for under these options, where a site keeps account of its
    differential privacy; raises ConfigError where they are more than its budget."""
    settings: str = ""
    """Hash of the run's settings."""
    references: dict[str, np.ndarray] = field(default_factory=dict)
    """Log probabilities under the frozen model by the digest of the split (`client.preferences`)."""

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The frozen layers that carry adapters, by name."""
        return target_modules(self.backbone, self.targets, first_block=self.first_adapted)

    @cached_property
    def arithmetic(self) -> tuple[object, ...]:
        """All that an answer follows from beside job, data and settings: digests of the frozen model, types, device."""
        backbone = self.backbone
        return model_identity(backbone), backbone.held, backbone.device.type, self.bf16, self.fp16

    @property
    def vision(self) -> Vision:
        """Image side of the model; only of a site whose tasks are of images."""
        assert self.backbone.vision is not None, "a site of texts sees no images"
        return self.backbone.vision

    def autocast(self, *, scaled: bool = True) -> torch.autocast:
        """The arithmetic of the backbone's forward pass; without fp16 where nobody scales the loss (`scaled=False`)."""
        dtype = torch.float16 if self.fp16 else torch.bfloat16
        return torch.autocast(self.backbone.device.type, dtype=dtype, enabled=self.bf16 or (self.fp16 and scaled))


Trees: TypeAlias = Mapping[str, Params]
"""Named trees of tensors: by kind, tensors by name."""


def without_empty(trees: Trees) -> dict[str, Params]:
    """The trees that hold a tensor."""
    return {kind: params for kind, params in trees.items() if params}


class Job(Frozen):
    """A request to one client: the model to start from and how to work."""

    client: str
    params: Params
    round: int
    options: Any
    """The action's own frozen options."""
    cut: Cut | None = None
    """Where this client's model is cut for training and evaluation; None: it holds the whole model."""
    mask: Mask | None = None
    """Which weights may move; None for all."""
    sent: Trees = field(default_factory=dict)
    """Tensors that the server sends beside the model, by kind: `anchor`, the point that the proximal term pulls to in
    the place of `params`; `companion`, the shared model that a client's second one is combined with, and
    under FedALT the client's share in it; `correction`, added to every gradient; `centroids`, the means of classes that
    features are pulled to."""
    kept: Trees = field(default_factory=dict)
    """Tensors that the client kept from the rounds before, by kind; they never travel: `momentum` of its optimizer,
    the `gate` that weighs the job's model against its companion by the input, and the `residual` of its filters."""


class Update(Frozen):
    """A client's answer."""

    client: str
    params: Params
    examples: int
    metrics: Mapping[str, float]
    loaded: str | None = None
    """SHA-256 of the tensors that the client really computed with at its start, when asked for."""
    keys: int = 0
    """Number of these tensors."""
    crossed: CutTraffic = field(default_factory=dict)
    """Bytes of all messages through the client's cut, by kind and direction."""
    travelled: bool = False
    """It came over a network, and so its model did, also in a round that mixes none."""
    classes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Counts by class of a scored test with classes (`data.metrics.by_class`)."""
    reported: Trees = field(default_factory=dict)
    """Tensors for the server beside the model, by kind, where they were asked for: `control`, the mean gradient of the
    round's steps, float32; `class_features` and `halves` (`TrainOptions.report`)."""
    kept: Trees = field(default_factory=dict)
    """Tensors that the client keeps for its next round, by kind: `momentum`, `gate`, `residual`."""

    def beside_model(self) -> dict[str, Tensor]:
        """Tensors that it carries beside the model, by their kind and name."""
        trees = {**self.reported, **self.kept}
        return {f"{kind} {key}": tensor for kind, params in trees.items() for key, tensor in params.items()}


def make_jobs(
    models: ByClient,
    options: Any,
    *,
    round: int,
    cuts: Mapping[str, Cut] = NO_CUTS,
    clients: Iterable[str] | None = None,
) -> list[Job]:
    """A job with these options for each of these clients, by default all that have a model."""
    names = models if clients is None else clients
    return [Job(client=name, params=models[name], round=round, options=options, cut=cuts.get(name)) for name in names]


Action: TypeAlias = Callable[[Sequence[Job], Site], list[Update]]


def log_prior(job: Job, site: Site) -> Tensor | None:
    """log pi_k, (classes,) float32; None where the job asks for none, or the client's task has no classes."""
    data = site.data[job.client]
    if not job.options.prior_correction or not data.task.has_classes:
        return None
    counts = torch.bincount(torch.from_numpy(data.splits["train"].labels), minlength=data.task.num_labels)
    return log_frequencies(counts).to(site.backbone.device)


def image_tokens(client: ClientData, *, length: int) -> ClientTokens:
    """The client's images, `length` tokens each."""
    splits = {}
    for split, rows in client.splits.items():
        assert isinstance(rows, Images), "a run on images has image tasks alone"
        splits[split] = encode_images(rows.pixels, rows.label, length=length)
    return ClientTokens(task=client.task, splits=splits)


def initial_params(
    backbone: Backbone, modules: Mapping[str, nn.Module], *, ranks: Mapping[str, int], task: Task, seed: int
) -> Params:
    """The shared initialisation of these modules at these ranks, and the head of the task: the same for its clients.

    Every tensor is drawn from a stream of its own, so that whoever draws some of them has those of the whole.
    """
    dims = {name: module_dims(modules[name]) for name in ranks}
    shapes = head_shapes(backbone.family, hidden=backbone.width, num_labels=task.num_labels)
    head = init_head(shapes, seed=seed, group=task.name)
    head |= {PARTS + name: tensor for name, tensor in backbone.head_start.items() if PARTS + name in head}
    return {**init_adapters(dims, ranks, seed=seed), **head}
