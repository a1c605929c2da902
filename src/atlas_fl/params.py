"""Parameters of models: `Params` and `ByClient`, and pure functions of them.

The words that every package shares.

Functions of `Params`: values in, values out.
"""

from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from typing import Literal, TypeAlias, get_args

import torch

Params: TypeAlias = Mapping[str, torch.Tensor]
"""A client's trainable tensors by name, read-only: `<module>.lora_A`, `<module>.lora_B`, `head.<name>`.

`lora_A` is (rank, d_in), `lora_B` is (d_out, rank); the update of the module is `scale * lora_B @ lora_A`. Where two
adapters are stacked, `<module>.lora_gate` may weigh them by the input (`models.lora`).
"""

ByClient: TypeAlias = Mapping[str, Params]
"""Params of every client by the client's name: the only road from server to client."""
TreesByClient: TypeAlias = Mapping[str, ByClient]
"""Tensors beside models: by kind, then by client."""

ServerState: TypeAlias = Mapping[str, "torch.Tensor | ServerState"]
"""State of a method between rounds: nested mappings whose leaves are tensors, read-only; empty of most.

Names hold no slash: a leaf's path through the mappings, joined by slashes, is its name in a checkpoint.
"""


def subtree(state: ServerState, name: str) -> ServerState:
    """The mapping of this name in a server state; empty where there is none."""
    entry = state.get(name, {})
    assert not isinstance(entry, torch.Tensor), f"{name} is a mapping"
    return entry


def tensors(state: ServerState) -> dict[str, torch.Tensor]:
    """The tensors of a mapping of a server state by name."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def params_by_client(state: ServerState, name: str) -> dict[str, Params]:
    """The mapping of this name in a server state, whose entries are tensors by client and name."""
    entry = subtree(state, name)
    return {client: tensors(subtree(entry, client)) for client in entry}


Truncation: TypeAlias = Literal["tail", "head", "middle"]
"""The part that a text longer than `--max-length` loses."""
TRUNCATIONS: tuple[Truncation, ...] = get_args(Truncation)
Split: TypeAlias = Literal["train", "validation", "test"]


LORA_A, LORA_B, HEAD = ".lora_A", ".lora_B", "head."
LORA_GATE = ".lora_gate"
LORA_CORE, LORA_SCALE = ".lora_core", ".lora_scale"
"""Square blocks between frozen B and A, (heads, rank / heads, rank / heads), and the heads' factors, (heads,), of
methods that train these alone (`methods.core`)."""
LORA_PARTS = (LORA_A, LORA_B, LORA_GATE, LORA_CORE, LORA_SCALE)
PARTS = "head.parts."
"""Beginning of the names of a head's tensors that the stock model itself computes with (`models.stock`)."""
BELOW_LAST_LAYER = ("head.classifier.dense.", "head.pre_classifier.", "head.bert.pooler.dense.", PARTS)
"""First layers of heads of two layers by their stock names: RoBERTa, DistilBERT, a BERT whose files lack the pooler."""
REPORT = "report/"
"""Beginning of the names of a report's tensors in messages and in sums: `report/`, its kind, `/` and a name."""
PRIVATE = "private"
"""The name under which a server's model says what of it is at its client alone (`private`)."""
SHARE = "others.share"
"""The name of a client's share in a mean, a number beside that, and in a server state of the shares of all."""


def lora_modules(params: Params) -> list[str]:
    """The names of the adapted modules, in the order of the parameters."""
    return [key.removesuffix(LORA_A) for key in params if key.endswith(LORA_A)]


def head_keys(params: Params) -> list[str]:
    """The names of the head's tensors."""
    return [key for key in params if key.startswith(HEAD)]


def split_body_and_head(params: Params) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(body, head) of a model."""
    body = {key: tensor for key, tensor in params.items() if not key.startswith(HEAD)}
    return body, {key: tensor for key, tensor in params.items() if key.startswith(HEAD)}


def stock_key(key: str) -> str:
    """The stock name of a tensor of a head.

    >>> stock_key("head.classifier.bias"), stock_key("head.parts.head.norm.weight")
    ('classifier.bias', 'head.norm.weight')
    """
    return key.removeprefix(PARTS if key.startswith(PARTS) else HEAD)


def is_last_layer(key: str) -> bool:
    """Return whether this is a tensor of the layer of a head that gives the logits."""
    return key.startswith(HEAD) and not key.startswith(BELOW_LAST_LAYER)


def ranks(params: Params) -> dict[str, int]:
    """The rank of every adapted module."""
    return {module: params[module + LORA_A].shape[0] for module in lora_modules(params)}


def is_full_model(params: Params) -> bool:
    """Return whether these are whole weights: some are neither of an adapter nor of a head."""
    return any(not key.startswith(HEAD) and not key.endswith(LORA_PARTS) and key != PRIVATE for key in params)


def select(params: Params, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names."""
    return {key: params[key] for key in keys}


def shared_params(params: Params, share: Iterable[str]) -> dict[str, torch.Tensor]:
    """Part of a client's model that travels when `A`, `B` and `head`, or some of them, are shared.

    Whole weights, which are neither, go with the adapters.
    """
    parts = set(share)
    return {key: tensor for key, tensor in params.items() if key != PRIVATE and _share_name(key, parts) in parts}


def _share_name(key: str, parts: Collection[str]) -> str:
    """Which word of a share a tensor falls under."""
    if key.startswith(HEAD):
        return "head"
    if key.endswith((LORA_A, LORA_B)):
        return key[-1]
    return "A" if "A" in parts else "B"


def num_values(params: Params) -> int:
    """Number of values of the tensors."""
    return sum(tensor.numel() for tensor in params.values())


def num_bytes(params: Params) -> int:
    """The memory of the tensors in bytes, without any encoding."""
    return sum(tensor.numel() * tensor.element_size() for tensor in plain_tensors(params).values())


def plain_tensors(params: Params) -> dict[str, torch.Tensor]:
    """The tensors in memory by name: those of a quantised one are its integers and its scales, behind its name."""
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in params.items():
        if hasattr(tensor, "__tensor_flatten__"):
            inner, _ = tensor.__tensor_flatten__()
            plain |= plain_tensors({f"{name}.{part}": getattr(tensor, part) for part in inner})
        else:
            plain[name] = tensor
    return plain


def add(left: Params, right: Params, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """`left + scale * right`, key by key; both hold the same keys."""
    return {key: left[key] + scale * right[key] for key in left}


def flatten_by_client(by_client: Mapping[str, Params]) -> dict[str, torch.Tensor]:
    """One flat mapping with keys `<client>/<parameter>`, as checkpoints and audits hold it."""
    return {f"{client}/{key}": tensor for client, params in by_client.items() for key, tensor in params.items()}


def unflatten_by_client(flat: Params) -> dict[str, dict[str, torch.Tensor]]:
    """The inverse of `flatten_by_client`; client names hold no slash."""
    by_client: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in flat.items():
        client, _, key = name.partition("/")
        by_client.setdefault(client, {})[key] = tensor
    return by_client


def flatten_state(state: ServerState) -> dict[str, torch.Tensor]:
    """The tensors of a server state by their paths, such as `moments/all/q.lora_A`.

    A mapping without tensors leaves no trace.
    """
    flat: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        assert "/" not in name, f"{name} of a server state holds a slash"
        if isinstance(value, Mapping):
            flat |= {f"{name}/{path}": tensor for path, tensor in flatten_state(value).items()}
        else:
            flat[name] = value
    return flat


def unflatten_state(flat: Params) -> ServerState:
    """The inverse of `flatten_state`."""
    own = {path: tensor for path, tensor in flat.items() if "/" not in path}
    nested = unflatten_by_client({path: tensor for path, tensor in flat.items() if path not in own})
    return {**own, **{name: unflatten_state(part) for name, part in nested.items()}}


def with_frozen(params: Params, frozen: Params) -> dict[str, torch.Tensor]:
    """A model with what it stands on, under names of its own: what one digest is of."""
    return {**params, **{f"frozen.{key}": tensor for key, tensor in frozen.items()}}


def digest(params: Params) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    state, plain = sha256(), plain_tensors(params)
    for key in sorted(plain):
        tensor = plain[key].detach().cpu().contiguous()
        state.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        # a tensor of one value may keep a stride that no view of its bytes takes
        state.update(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)
    return state.hexdigest()
