"""Training loops of one's own, such as a stock `transformers.Trainer`, in the place of ATLAS's (`--trainer`).

A plug-in registers a loop under a name. It is called for one client and one round with a `ClientTraining`, trains the
parameters of its model in place, and may return the mean training loss. Packs are for ATLAS's own loop: a plug-in's
clients train one after another, so that their bits do not follow the packs. Whatever it draws from the global
generators of Python, NumPy and PyTorch follows from the client's own seed, and their states are restored behind it.

Loss and logits are those of ATLAS's own forward pass (`client.batching.forward`): precision, label smoothing and prior
correction are the settings'. Clipping, the optimizer and the order of the examples are the loop's.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from atlas_fl.client.batching import forward as packed_forward
from atlas_fl.client.batching import make_row
from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Site, Update, log_prior, without_empty
from atlas_fl.client.local_training import example_loss, learning_rate, positions, train
from atlas_fl.client.options import OWN_TRAINER, TrainOptions
from atlas_fl.client.private_training import train_privately
from atlas_fl.errors import ConfigError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.methods.prior_correction import correct_logits
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import digest


class ClassifierOutput(NamedTuple):
    """Output of a client's model, named and ordered as that of a Hugging Face classifier."""

    loss: Tensor | None
    """The mean over the batch; None without labels."""
    logits: Tensor
    """(examples, labels) float32."""


class ClientModel(nn.Module):
    """One client's model on the frozen backbone, called as a Hugging Face classifier is.

    Its parameters are the client's adapters and head, or all its weights, by the names that ATLAS gives them. The
    backbone is no part of it: it is neither moved nor saved nor switched to training.
    """

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        """Losses of the batches with labels that were seen in training mode."""
        self._site, self._prior, self._smoothing = site, log_prior(job, site), job.options.label_smoothing
        for key, tensor in sorted(job.params.items()):
            *path, name = key.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            value = tensor.detach().to(site.backbone.device, copy=True)
            module.register_parameter(name, nn.Parameter(value, requires_grad=job.options.trains(key, round=job.round)))

    @property
    def params(self) -> dict[str, Tensor]:
        """The client's parameters by name."""
        return dict(self.named_parameters())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassifierOutput:
        """Loss and logits of a padded batch: all (examples, longest) int64 but the labels, (examples,)."""
        kept = attention_mask.bool()
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        batch = EncodedExamples(
            ids=input_ids[kept].cpu().numpy(),
            types=types[kept].cpu().numpy(),
            offsets=np.concatenate([[0], np.cumsum(kept.sum(dim=1).cpu().numpy())]),
            labels=np.zeros(len(input_ids), dtype=np.int64),
        )
        with packed_forward(make_row([batch], self._site), [self.params], self._site) as (raw_logits,):
            logits = correct_logits(raw_logits, self._prior)
        if labels is None:
            return ClassifierOutput(None, logits)
        loss = example_loss(logits, labels, smoothing=self._smoothing)
        if self.training:
            self.losses.append(loss.detach())
        return ClassifierOutput(loss, logits)


class ClientExamples(Dataset[dict[str, Tensor]]):
    """A client's training examples as a Hugging Face model takes them, tokenised and without padding."""

    def __init__(self, data: EncodedExamples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask`, `token_type_ids` (tokens,) and `labels` () of an example."""
        example = self._data.take(np.array([index]))
        ids = torch.from_numpy(example.ids)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.from_numpy(example.types),
            "labels": torch.tensor(example.labels[0]),
        }


def collate(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of these examples, padded on the right with zeros, which the attention mask leaves out."""
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    labels = torch.stack(columns.pop("labels"))
    padded = {key: pad_sequence(tensors, batch_first=True) for key, tensors in columns.items()}
    return {**padded, "labels": labels}


class ClientTraining(Frozen):
    """One client's training in one round, for a loop of a plug-in."""

    client: str
    round: int
    """From 1."""
    model: ClientModel
    """To be trained in place; on the device of the run."""
    examples: ClientExamples
    collate: Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]
    """Makes a batch of examples."""
    options: TrainOptions
    """Epochs, batch size, optimizer and further numbers of the run's settings."""
    lr: float
    """The learning rate of this round by `--schedule` and `--warmup`."""
    seed: int
    """31 bits, of this client and round alone; the global generators begin from it."""


Trainer: TypeAlias = Callable[[ClientTraining], float | None]
"""(training) -> the mean training loss, or None for the mean of the losses that the model has computed."""

TRAINERS: dict[str, Trainer | None] = {OWN_TRAINER: None}
"""Training loops by name; None stands for ATLAS's own (`client.local_training`)."""


def train_clients(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Every client's trained model by the loop that its options name, in the order of the jobs."""
    if jobs and jobs[0].options.dp == "example":
        return train_privately(jobs, site)
    if {job.options.trainer for job in jobs} <= {OWN_TRAINER}:
        return train(jobs, site)
    return [_train_by_plugin(job, site) for job in jobs]


def _train_by_plugin(job: Job, site: Site) -> Update:
    options: TrainOptions = job.options
    trainer = TRAINERS[options.trainer]
    assert trainer is not None, "a run has one loop for all clients"
    if trees := [*without_empty(job.sent), *without_empty(job.kept)]:
        raise ConfigError(
            f"--trainer {options.trainer} trains a client's model alone, and the strategy has a {trees[0]} beside it;"
            " leave --trainer out, or take another strategy"
        )
    began = time.perf_counter()
    secret = site.secrets.get(job.client)
    data = site.data[job.client].splits["train"]
    index = positions(len(data), job.client, options, secret=secret)
    draws = Draws(client=job.client, seed=options.seed, secret=secret)
    model = ClientModel(job, site).train()
    loaded = digest(model.params) if options.hash_loaded else None
    training = ClientTraining(
        client=job.client,
        round=job.round,
        model=model,
        examples=ClientExamples(data.take(index)),
        collate=collate,
        options=options,
        lr=learning_rate(options, step=max(job.round, 1) - 1, steps=options.rounds),
        seed=int(draws.generator("trainer", job.round, options.half, asked=(options.batch_size,)).integers(2**31)),
    )
    with seeded_globals(training.seed):
        loss = trainer(training)
    if loss is None:
        loss = float(torch.stack(model.losses).double().mean()) if model.losses else math.nan
    if not isinstance(loss, float):
        raise ConfigError(
            f"the trainer {options.trainer!r} returned {short_repr(loss)}; allowed: its mean training loss as a float,"
            " or None"
        )
    seconds = time.perf_counter() - began
    return Update(
        client=job.client,
        params=_trained_params(job, model),
        examples=len(index),
        metrics={"loss": loss, "seconds": seconds, "steps": float(len(model.losses))},
        loaded=loaded,
        keys=len(job.params),
    )


def _trained_params(job: Job, model: ClientModel) -> dict[str, Tensor]:
    """The parameters after training, on the CPU; raise ConfigError unless they are of the same names and kinds."""
    trained = {key: parameter.detach().cpu() for key, parameter in model.params.items()}
    kinds = [{key: (one.shape, one.dtype) for key, one in params.items()} for params in (job.params, trained)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"the trainer {job.options.trainer!r} changed the names, shapes or types of parameters of {job.client};"
            " train them in place, as float32"
        )
    return trained


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Let the global generators begin from this seed, and restore their states at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    with torch.random.fork_rng(devices):
        random.setstate(random.Random(seed).getstate())
        np.random.set_state(np.random.RandomState(seed).get_state())
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        for device in devices:
            torch.cuda.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
