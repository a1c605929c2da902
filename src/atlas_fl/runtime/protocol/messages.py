"""Jobs and updates as messages, and the handshake: what a server and its clients must have in common.

The head says what is asked and answered, tensors travel beside it. A model that the other end holds already is named by
its digest instead of being sent again. Metrics travel as float64 tensors, because a loss may be NaN, which strict JSON
does not know.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from itertools import accumulate
from operator import gt
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import torch

from atlas_fl.client.job import Job, Trees, Update
from atlas_fl.client.options import OPTIONS
from atlas_fl.config.values import Form, convert_value, describe, unwrap_optional
from atlas_fl.errors import ProtocolError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.params import PRIVATE, REPORT, Params, flatten_by_client, unflatten_by_client
from atlas_fl.partial_sharing import hidden_ranks, private_digest, transmitted_params, with_placeholders
from atlas_fl.ranges import Range
from atlas_fl.runtime.transport.frames import Head, Message
from atlas_fl.split.channel import Cut
from atlas_fl.storage.jsonl import from_json, to_json
from atlas_fl.storage.ledger import Direction, Kind

_OTHER_MODEL = "give the server's model with --model"
REMEDIES: Mapping[str, str] = {
    "version": "install the same atlas-fl on both ends",
    "config": "ask who runs the server which settings hold, and change the file of --config or the server's",
    "run": "start the site again, which pays for this run then",
    "model": _OTHER_MODEL,
    "vocabulary": _OTHER_MODEL,
    "architecture": f"its config.json computes something else: {_OTHER_MODEL}",
    "tokenizer": f"its texts would be other tokens: {_OTHER_MODEL}",
    "plugins": "a site names the plug-ins of the federation with --plugin, and no others: ask who runs the server for"
    " their files, and read them",
}
NO_PLUGINS = "none"


class Identity(Frozen):
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
    run: str | None = None
    """Id of the run, by which sites pay for it once; None where the server draws no noise."""

    def check(self, name: str, said: Mapping[str, Any]) -> None:
        """Raise `ProtocolError` unless this client says the same, or leaves it open."""
        for key, value in vars(self).items():
            if value is not None and said.get(key) not in (None, value):
                raise ProtocolError(
                    f"client {name!r} has {key} {said[key]!s:.16}, the server {value:.16}; {REMEDIES[key]}"
                )


Sha256: TypeAlias = Annotated[str, Form(lambda text: re.fullmatch("[0-9a-f]{64}", text) is not None, "a SHA-256")]
Action: TypeAlias = Annotated[str, Form(OPTIONS.__contains__, ", ".join(OPTIONS))]
Count: TypeAlias = Annotated[int, Range(least=0, most=10**18)]
_METRICS, _PARAM = "metrics", "param/"
CUT = "cut/"
"""Prefix of the names of messages through a cut."""
SENT = "sent/"
"""Prefix of the names of a job's tensors beside its model (`Job.sent`)."""


class CutInfo(Frozen):
    """The facts that a client is told of its cut beside `Cut`."""

    places: tuple[int, ...]
    """Indices of its trained tensors among those of the whole model."""
    tokens: int
    """Most tokens of one message of an evaluation: the server's memory bounds them too."""
    part: str
    """Digest of the frozen tensors that it must hold."""


class PrivateRef(Frozen):
    """The name of the part of a client's model that stays at the client."""

    sha256: Sha256 | None
    """Digest of its values, which names a file; None for those that the client draws."""
    ranks: tuple[int, ...] = ()
    """Ranks of the modules of which nothing is sent, in the order of their names."""


def model_message(params: Params) -> Message:
    """(entries of the head, tensors) that send a model of the server to its client."""
    if PRIVATE not in params:
        return {}, params
    reference = PrivateRef(sha256=private_digest(params), ranks=hidden_ranks(params))
    return {"private": asdict(reference)}, transmitted_params(params)


def read_private(head: Head) -> PrivateRef | None:
    """The private part that the head of a message names; raises `ProtocolError` for anything else."""
    private: PrivateRef | None = read(PrivateRef | None, head.get("private"), "private")
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


def read_job(head: Head, params: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
    """(action, job, cut info) of a message; raises `ProtocolError` for an unknown action, options or cut."""
    action: str = read(Action, head.get("action"), "the server's job: action")
    options = read(OPTIONS[action], head.get("options"), f"the server's {action}")
    number = read(int, head.get("round"), "the server's job: round")
    cut = read(Cut | None, head.get("cut"), "the server's cut")
    cut_info = read(CutInfo | None, head.get("told"), "the server's job: told")
    return action, Job(client=client, params=params, round=number, options=options, cut=cut), cut_info


def write_trees(prefix: str, trees: Trees) -> dict[str, torch.Tensor]:
    """The tensors of these trees as they travel beside a model, under `PREFIX KIND / NAME`."""
    return {prefix + name: tensor for name, tensor in flatten_by_client(trees).items()}


def read_trees(prefix: str, tensors: Params) -> dict[str, dict[str, torch.Tensor]]:
    """The trees among the tensors of a message."""
    return unflatten_by_client(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    )


def read_sent(tensors: Params) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """(the tensors of the job's model, the trees that the job carries beside it) of a message."""
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(SENT)}, read_trees(SENT, tensors)


class AnswerHead(Frozen):
    """Head of an answer: all but its tensors and the number of its job."""

    examples: Count
    metrics: tuple[str, ...]
    """The names of the metrics, whose values are a tensor."""
    loaded: Sha256 | None
    keys: Count
    crossed: tuple[tuple[Kind, Direction, Count], ...]
    same: bool
    """The model is the job's own, and is not sent."""
    classes: Mapping[Literal["hits", "examples", "predicted"], tuple[Count, ...]] | None


def update_message(update: Update, job: Job, *, number: int) -> Message:
    """The message with this update for the server; a model that is the job's own is not sent."""
    head = AnswerHead(
        examples=update.examples,
        metrics=tuple(update.metrics),
        loaded=update.loaded,
        keys=update.keys,
        crossed=tuple((kind, direction, size) for (kind, direction), size in update.crossed.items()),
        same=update.params is job.params,
        classes=dict(update.classes) or None,  # type: ignore[arg-type]
    )
    values = torch.tensor(list(update.metrics.values()), dtype=torch.float64)
    sent = {} if head.same else {_PARAM + key: tensor for key, tensor in update.params.items()}
    tensors = {_METRICS: values, **sent, **write_trees(REPORT, update.reported)}
    return {"kind": "result", "number": number, **asdict(head)}, tensors


def read_update(head: Head, tensors: Params, *, job: Job) -> Update:
    """The update that a client's message holds; raises `ProtocolError` for one that is not of this form."""
    said: AnswerHead = read_fields(AnswerHead, head, "the answer is no update: ")
    values = tensors.get(_METRICS)
    if values is None or values.dtype is not torch.float64 or values.shape != (len(said.metrics),):
        raise ProtocolError("the answer is no update: its metrics have no values; install the same atlas-fl")
    classes: dict[str, list[int]] = {name: list(counts) for name, counts in (said.classes or {}).items()}
    if classes and (
        len({*map(len, classes.values())}) > 1
        or max([*classes["predicted"], *classes["examples"]], default=0) > said.examples
        or any(map(gt, classes["hits"], map(min, classes["examples"], classes["predicted"])))
    ):
        raise ProtocolError(f"the counts by class are {short_repr(classes)}; install the same atlas-fl on both ends")
    came = {key.removeprefix(_PARAM): tensor for key, tensor in tensors.items() if key.startswith(_PARAM)}
    withheld: tuple[str, ...] = read(tuple[str, ...], head.get("withheld", ()), "the answer: withheld")
    params: Params = {**{key: job.params[key] for key in withheld if key in job.params}, **came}
    if (private := read_private(head)) is not None:
        left = {key: tensor for key, tensor in job.params.items() if key not in params and key != PRIVATE}
        params = with_placeholders({**params, **left}, left.keys(), sha256=private.sha256)
    return Update(
        client=job.client,
        params=job.params if said.same else params,
        examples=said.examples,
        metrics=dict(zip(said.metrics, values.tolist())),
        loaded=said.loaded,
        keys=said.keys,
        crossed={(kind, direction): size for kind, direction, size in said.crossed},
        classes=classes,
        # of numbers that are summed nothing comes
        reported=read_trees(REPORT, {**dict.fromkeys(withheld, torch.zeros(())), **tensors}),
    )


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


def write_packed(payloads: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """These messages as one tensor: for a hundred peers, tensors of their own would cost more than all else."""
    sizes = to_json({name: len(message) for name, message in payloads.items()}).encode()
    return {CUT: as_tensor(b"".join([len(sizes).to_bytes(4, "big"), sizes, *payloads.values()]))}


def read_packed(tensors: Params) -> dict[str, bytes]:
    """The messages of `write_packed`; raises `ProtocolError` for anything else."""
    packed = as_bytes(tensors.get(CUT, torch.empty(0)))
    start = 4 + int.from_bytes(packed[:4], "big")
    try:
        sizes = from_json(packed[4:start])
    except ValueError:
        sizes = None
    is_whole = isinstance(sizes, dict) and all(type(size) is int and size >= 0 for size in sizes.values())
    if not is_whole or start + sum(sizes.values()) != len(packed):
        raise ProtocolError("messages have other sizes than they say; install the same atlas-fl on both ends")
    ends = accumulate(sizes.values(), initial=start)
    return {name: packed[begin : begin + size] for (name, size), begin in zip(sizes.items(), ends)}


def read_fields(kind: type[Any], head: Head, where: str) -> Any:
    """The dataclass whose fields are among the entries of this head; raises as `read` does."""
    return read(kind, {field.name: head[field.name] for field in fields(kind) if field.name in head}, where)


def read(kind: Any, value: Any, where: str) -> Any:
    """A value of this type from plain data; raises `ProtocolError` that names the place and what is allowed.

    Types are those of the fields of messages: scalars, literals, tuples, mappings and dataclasses, perhaps None, and
    `Annotated` with a `Range` or a `Form`. The text `none` is a text here, and never None.
    """
    if get_origin(kind) is Annotated:
        inner, check = get_args(kind)
        if check.fits(result := read(inner, value, where)):
            return result
        raise _misfit(where, value, check.allowed)
    if (inner := unwrap_optional(kind)) is not None:
        return None if value is None else read(inner, value, where)
    if is_dataclass(kind) or get_origin(kind) not in (None, Literal):
        return _read_entries(kind, value, where)
    try:
        return convert_value(value, kind)
    except ValueError:
        raise _misfit(where, value, describe(kind)) from None


def _read_entries(kind: Any, value: Any, where: str) -> Any:
    """A tuple, a mapping or a dataclass from plain data."""
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        size = len(value) if isinstance(value, list | tuple) else -1
        kinds = arguments[:1] * size if arguments[-1] is Ellipsis else arguments
        if size != len(kinds):
            raise _misfit(where, value, "a list" if arguments[-1] is Ellipsis else f"a list of {len(kinds)}")
        return tuple(read(kinds[index], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if is_dataclass(kind):
        kinds_by_name = get_type_hints(kind, include_extras=True)
    else:
        kinds_by_name = dict.fromkeys(get_args(arguments[0]), arguments[1])
    if not isinstance(value, dict) or value.keys() != kinds_by_name.keys():
        raise _misfit(where, value, f"entries {', '.join(kinds_by_name)}")
    inside = where if where.endswith(" ") else f"{where}."
    entries = {name: read(kinds_by_name[name], entry, f"{inside}{name}") for name, entry in value.items()}
    made: Any = kind if is_dataclass(kind) else dict
    return made(**entries)


def _misfit(where: str, value: Any, allowed: str) -> ProtocolError:
    return ProtocolError(f"{where} is {short_repr(value)}; allowed: {allowed}; install the same atlas-fl on both ends")
