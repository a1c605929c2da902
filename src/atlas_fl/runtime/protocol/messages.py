"""Jobs and updates as messages, and the handshake: what a server and its clients must have in common.

The head says what is asked and answered, tensors travel beside it. A model that the other end holds already is named by
its digest instead of being sent again. Metrics travel as float64 tensors, because a loss may be NaN, which strict JSON
does not know.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from operator import gt
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from atlas_fl.client.job import Job, Trees, Update
from atlas_fl.client.options import (
    EvaluateOptions,
    FingerprintOptions,
    ImportanceOptions,
    RidgeOptions,
    ScaleOptions,
    SensitivityOptions,
    TrainOptions,
)
from atlas_fl.errors import ProtocolError, short_repr
from atlas_fl.params import PRIVATE, Params, digest
from atlas_fl.partial_sharing import hidden_ranks, private_digest, transmitted_params, with_placeholders
from atlas_fl.runtime.protocol import shapes
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.split.channel import Cut
from atlas_fl.storage.ledger import DIRECTIONS, KINDS

_OTHER_MODEL = "give the server's model with --model"
REMEDIES: Mapping[str, str] = {
    "version": "install the same atlas-fl on both ends",
    "config": "join with the settings of this server, or leave --config out",
    "model": _OTHER_MODEL,
    "vocabulary": _OTHER_MODEL,
    "architecture": f"its config.json computes something else: {_OTHER_MODEL}",
    "tokenizer": f"its texts would be other tokens: {_OTHER_MODEL}",
    "plugins": "a site names the plug-ins of the federation with --plugin, and no others: ask who runs the server for"
    " their files, and read them",
}
NO_PLUGINS = "none"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The properties that both ends must have in common."""

    version: str
    """Version of this package."""
    config: str
    """Hash of the config."""
    model: str
    """Digest of the backbone's weights."""
    architecture: str
    """Digest of the backbone's architecture (`models.identity`)."""
    tokenizer: str
    """Digest of its tokenizer, or of its image processing."""
    plugins: str = NO_PLUGINS
    """Digests of the plug-ins of the config, sorted, with blanks between."""
    vocabulary: str | None = None
    """Digest of an output embedding of its own; None where it writes no text."""

    def check(self, name: str, said: Mapping[str, Any]) -> None:
        """Raise `ProtocolError` unless this client says the same, or leaves it open."""
        for key, value in vars(self).items():
            if value is not None and said.get(key) not in (None, value):
                raise ProtocolError(
                    f"client {name!r} has {key} {said[key]!s:.16}, the server {value:.16}; {REMEDIES[key]}"
                )


OPTIONS: Mapping[str, type[Any]] = {
    "fingerprint": FingerprintOptions,
    "importance": ImportanceOptions,
    "train": TrainOptions,
    "evaluate": EvaluateOptions,
    "ridge": RidgeOptions,
    "scale": ScaleOptions,
    "sensitivity": SensitivityOptions,
}
"""The options of every action of `client.registry.ACTIONS`."""

COUNTS = ("hits", "examples")
"""The counts by class, as `data.metrics.by_class` names them."""

_SHA256 = re.compile("[0-9a-f]{64}")
_METRICS, _PARAM = "metrics", "param/"
CUT = "cut/"
"""Prefix of the names of messages through a cut."""
SENT = "sent/"
"""Prefix of the names of a job's tensors beside its model (`Job.sent`)."""
REPORT = "report/"
"""Prefix of the names of an answer's tensors beside its model (`Update.reported`)."""


@dataclass(frozen=True, kw_only=True)
class CutInfo:
    """The facts that a client is told of its cut beside `Cut`."""

    places: tuple[int, ...]
    """Indices of its trained tensors among those of the whole model."""
    tokens: int
    """Most tokens of one message of an evaluation: the server's memory bounds them too."""
    part: str
    """Digest of the frozen tensors that it must hold."""


@dataclass(frozen=True, kw_only=True)
class PrivateRef:
    """The name of the part of a client's model that stays at the client."""

    sha256: str | None
    """Digest of its values; None for those that the client draws."""
    ranks: tuple[int, ...] = ()
    """Ranks of the modules of which nothing is sent, in the order of their names."""


def model_message(params: Params) -> tuple[Head, Params]:
    """(entries of the head, tensors) that send a model of the server to its client."""
    if PRIVATE not in params:
        return {}, params
    reference = PrivateRef(sha256=private_digest(params), ranks=hidden_ranks(params))
    return {"private": asdict(reference)}, transmitted_params(params)


def read_private(head: Mapping[str, Any]) -> PrivateRef | None:
    """The private part that the head of a message names; raises `ProtocolError` for anything else."""
    private: PrivateRef | None = _read(PrivateRef | None, head.get("private"), where="private")
    # it names a file
    if private is not None and private.sha256 is not None and not _SHA256.fullmatch(private.sha256):
        raise ProtocolError(f"a private part is named {private.sha256!r:.40}; install the same atlas-fl on both ends")
    return private


def job_head(action: str, job: Job, *, number: int, cut_info: CutInfo | None) -> dict[str, Any]:
    """The head of a job, without its model; of a client with a cut, its own side with `cut_info` on the other side."""
    return {
        "kind": "job",
        "number": number,
        "action": action,
        "round": job.round,
        "options": asdict(job.options),
        "cut": None if job.cut is None else asdict(job.cut),
        "told": None if cut_info is None else asdict(cut_info),
    }


def job_message(
    action: str, job: Job, *, number: int, sent_digests: Collection[str], cut_info: CutInfo | None = None
) -> tuple[Head, Params]:
    """The job for the client, and its model unless the digest is among `sent_digests`."""
    assert not job.kept, "it stays with the client; other configs are refused"
    private, params = model_message(job.params)
    model = digest(params)
    head = job_head(action, job, number=number, cut_info=cut_info)
    return {**head, "model": model, **private}, {} if model in sent_digests else params


def read_job(head: Mapping[str, Any], params: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
    """(action, job, cut info) of a message; raises `ProtocolError` for an unknown action, options or cut."""
    action = head.get("action")
    if action not in OPTIONS:
        raise ProtocolError(f"the server asks for {action!r:.40}; known: {', '.join(OPTIONS)}; install its version")
    assert isinstance(action, str)
    if type(head.get("round")) is not int:
        raise ProtocolError("the server's job names no round; install its version")
    options = _read(OPTIONS[action], head.get("options"), where=action)
    cut = _read(Cut | None, head.get("cut"), where="cut")
    cut_info = _read(CutInfo | None, head.get("told"), where="told")
    return action, Job(client=client, params=params, round=head["round"], options=options, cut=cut), cut_info


def write_trees(prefix: str, trees: Trees) -> dict[str, torch.Tensor]:
    """The tensors of these trees as they travel beside a model, under `PREFIX KIND / NAME`."""
    return {f"{prefix}{kind}/{key}": tensor for kind, params in trees.items() for key, tensor in params.items()}


def read_trees(prefix: str, tensors: Params) -> dict[str, dict[str, torch.Tensor]]:
    """The trees among the tensors of a message."""
    trees: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            kind, _, key = name.removeprefix(prefix).partition("/")
            trees.setdefault(kind, {})[key] = tensor
    return trees


def read_sent(tensors: Params) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """(the tensors of the job's model, the trees that the job carries beside it) of a message."""
    model = {key: tensor for key, tensor in tensors.items() if not key.startswith(SENT)}
    return model, read_trees(SENT, tensors)


def update_message(update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
    """The message with this update for the server; a model that is the job's own is not sent."""
    same = update.params is job.params
    head = {
        "kind": "result",
        "number": number,
        "examples": update.examples,
        "metrics": list(update.metrics),
        "loaded": update.loaded,
        "keys": update.keys,
        "crossed": [[*way, size] for way, size in update.crossed.items()],
        "same": same,
        **({"classes": dict(update.classes)} if update.classes else {}),
    }
    values = torch.tensor(list(update.metrics.values()), dtype=torch.float64)
    sent = {} if same else {_PARAM + key: tensor for key, tensor in update.params.items()}
    return head, {_METRICS: values, **sent, **write_trees(REPORT, update.reported)}


def _crossing(row: Any, location: str) -> str:
    """The fault of a row of `crossed`: kind, direction and bytes of messages through the cut."""
    is_row = isinstance(row, list) and len(row) == 3 and row[0] in KINDS and row[1] in DIRECTIONS
    return shapes.count(row[2], location) if is_row else f"{location} is {short_repr(row)}"


_UPDATE = shapes.fields(
    {
        "examples": shapes.count,
        "metrics": shapes.list_of(shapes.text),
        "loaded": shapes.optional(shapes.text),
        "keys": shapes.integer,
        "crossed": shapes.list_of(_crossing),
    },
    classes=shapes.fields(dict.fromkeys(COUNTS, shapes.list_of(shapes.count))),
)


def read_update(head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
    """The update that a client's message holds; raises `ProtocolError` for one that is not of this form."""
    if fault := _UPDATE(dict(head), ""):
        raise ProtocolError(f"the answer is no update: {fault.lstrip('.')}; install the same atlas-fl on both ends")
    names = head["metrics"]
    values = tensors.get(_METRICS)
    if values is None or values.dtype is not torch.float64 or values.shape != (len(names),):
        raise ProtocolError("the answer is no update: its metrics have no values; install the same atlas-fl")
    params: Params = {key.removeprefix(_PARAM): tensor for key, tensor in tensors.items() if key.startswith(_PARAM)}
    if (private := read_private(head)) is not None:
        left = {key: tensor for key, tensor in job.params.items() if key not in params and key != PRIVATE}
        params = with_placeholders({**params, **left}, left.keys(), sha256=private.sha256)
    return Update(
        client=job.client,
        params=job.params if head.get("same") is True else params,
        examples=head["examples"],
        metrics=dict(zip(names, values.tolist())),
        loaded=head["loaded"],
        keys=head["keys"],
        crossed={(kind, direction): size for kind, direction, size in head["crossed"]},
        classes=_classes(head),
        reported=read_trees(REPORT, tensors),
    )


def _classes(head: Mapping[str, Any]) -> dict[str, list[int]]:
    """Examples and hits by class, where there are any; raises `ProtocolError` where they do not hold together."""
    if "classes" not in head:
        return {}
    hits, examples = (head["classes"][name] for name in COUNTS)
    if len(hits) != len(examples) or sum(examples) != head["examples"] or any(map(gt, hits, examples)):
        raise ProtocolError(f"the counts by class are {head['classes']!r:.60}; install the same atlas-fl on both ends")
    return {"hits": hits, "examples": examples}


def as_tensor(message: bytes) -> torch.Tensor:
    """The message as it lies in a frame, (bytes,) uint8."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The message that `as_tensor` was given; raises `ProtocolError` for what is no row of bytes."""
    if tensor.dtype is not torch.uint8 or tensor.ndim != 1:
        raise ProtocolError(
            f"a message is {tuple(tensor.shape)} {tensor.dtype}, no row of bytes; install the same atlas-fl on both"
            " ends"
        )
    return tensor.numpy().tobytes()


def write_payloads(payloads: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Messages through a cut as tensors of bytes, so that the bytes that a ledger counts travel as they are."""
    return {CUT + name: as_tensor(message) for name, message in payloads.items()}


def read_payloads(tensors: Params) -> dict[str, bytes]:
    """The messages through a cut among these tensors; raises `ProtocolError` for one that is no row of bytes."""
    return {name.removeprefix(CUT): as_bytes(tensor) for name, tensor in tensors.items() if name.startswith(CUT)}


def _read(kind: Any, value: Any, *, where: str) -> Any:
    """A value of this type from plain data; raises `ProtocolError` for anything else."""
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if value.keys() == {option.name for option in fields(kind)}:
            made: Any = kind
            return made(**{name: _read(hints[name], item, where=f"{where}.{name}") for name, item in value.items()})
    elif get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        (inner,) = (member for member in get_args(kind) if member is not NoneType)
        return _read(inner, value, where=where)
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_read(get_args(kind)[0], item, where=where) for item in value)
    elif type(value) is kind:
        return value
    elif kind is float and type(value) is int:
        return float(value)
    raise ProtocolError(f"the server's {where} is {value!r:.40}; install its version of atlas-fl")
