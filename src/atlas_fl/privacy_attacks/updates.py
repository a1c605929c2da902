"""Tokens of training texts out of a client's updates: the span attack on the adapters of the first block.

After Petrov et al. 2024, "DAGER: exact gradient inversion for large language models", arXiv:2405.15586: the gradient of
a linear layer's weight has its rows in the span of the layer's inputs, and those of the first block are embeddings,
which everybody can compute for every token and place. Of an adapter, with the inputs X as rows,

    G_A = s B^T dY^T X          r rows in the span of X

A round is several steps of AdamW, whose division by element leaves this span, and B is 0 at first. With V the r
directions of all updates that were seen, from the largest down, the share of an embedding x that lies in V,

    share = |V^T x|^2 / |x|^2

tells which token stands at a place, and its mean over places orders the whole vocabulary. As many tokens are read as V
has directions. Out of whole models, whose embeddings train, a token is read by how far its own row
has moved (Gupta et al. 2022, "Recovering private text in federated learning of language models", arXiv:2205.08514).

An honest server sends the client the models that it trained itself, as if it were alone. A hostile one sends models
that the site's own checks let through (`deployment.start_models`): in round one the initialisation, and then A and B of
a thousandth of their usual size, the least that sites let through, B with other orthonormal columns in every round, and
the head a little further. Many gradients at A are then below AdamW's epsilon, so that its steps are nearly linear and
updates stay near the span. It asks for half as
many rounds as there are examples, the most that a site allows. Order and dropout come from a secret that it lacks.

With `--secure` the server sees the mean of half of the task's clients, and their tokens are read together.

The level of guessing is as many other clients of the same task: the same order of tokens, held against their texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.job import Job, make_jobs
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.data.clients import ClientData
from atlas_fl.deployment import consent, settings_policy, start_models
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.events import OnEvent
from atlas_fl.models.attention import make_layout
from atlas_fl.models.backbone import block_index, embed_tokens
from atlas_fl.models.tokenization import EncodedExamples, concatenate
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, ranks
from atlas_fl.planning.planner import local_engine
from atlas_fl.privacy_attacks.membership import initial_model
from atlas_fl.rng import torch_generator
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import train_options
from atlas_fl.split.codec import simulated_secret

TINY = 1e-3
"""Size of the hostile server's factors, times that of the initialisation."""
HEAD_DRIFT = 0.02
"""Share of the head's own movement by which it moves on in every round: a start that stands still is refused."""
TOKENS_AT_ONCE = 1 << 15


def read_tokens(
    assembly: Assembly,
    clients: Sequence[ClientData],
    others: Sequence[ClientData],
    *,
    hostile: bool,
    on_event: OnEvent,
) -> dict[str, Any]:
    """Train the clients under this server, and read out of their mean; `others` give the level of guessing.

    The row has the number of `updates` and of different tokens that are `read`, the share of right ones among them, the
    share of the client's tokens that are `found`, the share of right ones among tokens read at a place (`placed`; of
    whole models none), the texts of which every word is read at its place (`sentences`), and a site's `refusal`.
    """
    client, data = clients[0], assembly.site.data
    _check(assembly, client)
    train, strangers = (concatenate([data[one.name].splits["train"] for one in who]) for who in (clients, others))
    starts, trained, epsilon, refusal = _updates(assembly, clients, hostile=hostile, on_event=on_event)
    longest = int(max(train.lengths.max(), strangers.lengths.max()))
    directions = None if assembly.is_full else _directions(assembly, starts, trained)
    if directions is None:
        shares = _moved_rows(assembly, starts, trained)[:, None]
    else:
        shares = _shares_in_span(assembly, directions, longest=longest)
    marks = assembly.site.backbone.tokenizer.all_special_ids
    shares[marks] = 0.0  # marks stand around every text
    read = int((shares > 0).sum()) if directions is None else directions.shape[1]
    first = shares.mean(1).argsort(descending=True, stable=True)[:read].numpy()
    truth, guesses = (np.setdiff1d(one.ids, marks) for one in (train, strangers))
    hits, lucky = (int(np.isin(first, one).sum()) for one in (truth, guesses))
    found = None if directions is None else [(_placed(shares, one), one) for one in (train, strangers)]
    placed = (
        [None, None]
        if found is None
        else [len(pairs & _pairs(one, marks)) / max(1, len(pairs)) for pairs, one in found]
    )
    words = [[(place, token) for place, token in text if token not in marks] for text in _texts(train)]
    return {
        "client": "+".join(one.name for one in clients),
        "server": "hostile" if hostile else "honest",
        "epsilon": epsilon,
        "score": None if hostile else _test_score(assembly, client, trained[-1], on_event),
        "updates": len(trained),
        "read": read,
        **{"right": hits / max(1, read), "right_chance": lucky / max(1, read)},
        **{"found": hits / len(truth), "found_chance": lucky / len(guesses)},
        **{"placed": placed[0], "placed_chance": placed[1]},
        "sentences": 0 if found is None else sum(set(text) <= found[0][0] for text in words),
        "texts": len(train),
        "refusal": refusal,
    }


def _check(assembly: Assembly, client: ClientData) -> None:
    backbone = assembly.site.backbone
    if client.task.images or backbone.family.stem[0] != "embeddings":
        raise ConfigError(
            f"{assembly.config.model.model!r} ({backbone.family.model_type}) has no block that reads embeddings of"
            " tokens as they are; take an encoder of texts, such as --model minilm"
        )
    if assembly.site.first_adapted and not assembly.is_full:
        raise ConfigError(
            f"--adapted-blocks is {assembly.config.model.adapted_blocks}, and the attack reads updates of the first"
            " block; leave --adapted-blocks out"
        )
    if assembly.config.training.dp == "client":
        raise ConfigError(
            "--dp client adds noise to sums of many clients, and the attack reads one client, or a sum of three with"
            " --secure; leave it out, or take --dp example"
        )


def _updates(
    assembly: Assembly, clients: Sequence[ClientData], *, hostile: bool, on_event: OnEvent
) -> tuple[list[Params], list[Params], float | None, str]:
    """(start models, means of trained models, epsilon spent, the line of a refusal) of rounds that tell something."""
    config, (client, *_) = assembly.config, clients
    names = [one.name for one in clients]
    site = replace(assembly.site, secrets={name: simulated_secret(config.run.seed, name) for name in names})
    engine = local_engine(replace(assembly, site=site), on_event)
    options = train_options(config, with_images=False)
    count = min(site.data[name].examples for name in names)
    first = initial_model(assembly, client)
    checks = partial(start_models.start_models_of, config, lambda _: first, examples=count, images=False)
    known = {name: checks() for name in names}
    allowed = settings_policy.most_rounds(consent.SiteChoices(task=client.task.name, device=""), examples=count)
    starts: list[Params] = []
    trained: list[Params] = []
    epsilon: float | None = None
    for number in range(1, options.rounds + 1):
        if hostile and number > allowed:
            break
        own = trained[0 if hostile else -1] if trained else first
        start = _chosen(assembly, first, own, round=number) if hostile and number > 1 else own
        jobs = [Job(client=name, params=start, round=number, options=options) for name in names]
        try:
            for job in jobs:
                known[job.client].check("train", job)
        except ProtocolError as error:
            return starts[1:] or starts, trained[1:] or trained, epsilon, str(error)
        updates = engine.run("train", jobs)
        for job, update in zip(jobs, updates, strict=True):
            known[job.client].remember(job, update.params)
        starts.append(start)
        trained.append({key: torch.stack([one.params[key] for one in updates]).mean(0) for key in start})
        epsilon = updates[0].metrics.get("epsilon")
    skipped = 1 if hostile and len(trained) > 1 else 0  # round one is that of an honest server
    return starts[skipped:], trained[skipped:], epsilon, ""


def _chosen(assembly: Assembly, first: Params, own: Params, *, round: int) -> Params:
    """The hostile server's start of a round."""
    size = TINY * (1 + 0.1 * round)
    start: dict[str, Tensor] = {}
    for key, tensor in first.items():
        if key.startswith(HEAD):
            start[key] = own[key] + HEAD_DRIFT * round * (own[key] - tensor)
        elif key.endswith(LORA_A):
            start[key] = size * tensor
        elif key.endswith(LORA_B) and block_index(assembly.site.backbone, key.removesuffix(LORA_B)) == 0:
            draw = torch_generator(assembly.config.run.seed, "attack", round, key)
            start[key] = size * torch.linalg.qr(torch.randn(tensor.shape, generator=draw))[0]
        else:
            start[key] = torch.zeros_like(tensor) if key.endswith(LORA_B) else tensor
    return start


def _directions(assembly: Assembly, starts: list[Params], trained: list[Params]) -> Tensor:
    """(hidden, directions) float32, orthonormal: the rows of all updates of A in the first block, largest first.

    At most half as many as a row has numbers: in all of them lies every embedding.
    """
    modules = [name for name in ranks(starts[0]) if block_index(assembly.site.backbone, name) == 0]
    rows = []
    for start, end in zip(starts, trained, strict=True):
        change = torch.cat([end[name + LORA_A].double() - start[name + LORA_A].double() for name in modules])
        rows.append(change / change.norm().clamp(min=1e-300))
    _, sizes, vectors = torch.linalg.svd(torch.cat(rows), full_matrices=False)
    most = vectors.shape[1] // 2
    directions: Tensor = vectors[:most][sizes[:most] > 1e-6 * sizes[0]].float().T
    return directions


def _shares_in_span(assembly: Assembly, directions: Tensor, *, longest: int) -> Tensor:
    """(vocabulary, places): the share of each token's embedding at each place that lies in these directions."""
    backbone = assembly.site.backbone
    shares = []
    vocabulary = backbone.model.get_input_embeddings().weight.shape[0]
    for ids in torch.split(torch.arange(vocabulary), max(1, TOKENS_AT_ONCE // longest)):
        tokens = ids.repeat_interleave(longest).to(backbone.device)
        layout = make_layout([longest] * len(ids), device=backbone.device)
        with torch.inference_mode():
            embedded = embed_tokens(backbone, tokens, torch.zeros_like(tokens), layout).float().cpu()
        share = (embedded @ directions).square().sum(1) / embedded.square().sum(1)
        shares.append(share.view(len(ids), longest).clone())
    return torch.cat(shares)


def _moved_rows(assembly: Assembly, starts: list[Params], trained: list[Params]) -> Tensor:
    """(vocabulary,): how far each token's row of a whole model's embeddings has moved."""
    table = assembly.site.backbone.model.get_input_embeddings().weight
    (name,) = [name for name, one in assembly.site.backbone.model.named_parameters() if one is table]
    if name not in starts[0]:
        raise ConfigError("the embeddings are frozen (--frozen-blocks), out of which tokens are read; leave it out")
    return torch.stack([(end[name] - start[name]).norm(dim=1) for start, end in zip(starts, trained)]).sum(0)


def _texts(examples: EncodedExamples) -> Iterator[list[tuple[int, int]]]:
    """(place, token) of every text."""
    for begin, end in zip(examples.offsets[:-1], examples.offsets[1:], strict=True):
        yield list(enumerate(examples.ids[begin:end].tolist()))


def _pairs(examples: EncodedExamples, marks: list[int]) -> set[tuple[int, int]]:
    return {(place, token) for text in _texts(examples) for place, token in text if token not in marks}


def _placed(shares: Tensor, lengths_of: EncodedExamples) -> set[tuple[int, int]]:
    """The tokens read at each place, as many as texts have a word there: a server is told the lengths of texts."""
    read = set()
    for place in range(1, int(lengths_of.lengths.max()) - 1):
        count = int((lengths_of.lengths > place + 1).sum())
        read |= {(place, token) for token in shares[:, place].topk(count).indices.tolist()}
    return read


def _test_score(assembly: Assembly, client: ClientData, params: Params, on_event: OnEvent) -> float:
    engine, options = local_engine(assembly, on_event), EvaluateOptions(split="test")
    (update,) = engine.run("evaluate", make_jobs({client.name: params}, options, round=0))
    return update.metrics["primary"]
