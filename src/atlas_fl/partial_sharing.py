"""Partial sharing (`--share`): tensors that stay at their client, and the placeholders for them at the server.

    model at the server = what is shared + a placeholder for every other tensor + `PRIVATE`

A placeholder has the tensor's rank and no values. `PRIVATE` names the values of all of them together by their SHA-256,
32 bytes; zeros name those that a client draws by itself, from the run's seed and its ranks. So the server's rules,
states, checkpoints and audits keep track of whose private part belongs to which shared one, and hold nothing of it.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from atlas_fl.params import LORA_A, LORA_B, PRIVATE, Params, lora_modules, shared_params


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether this stands for a tensor that is elsewhere."""
    return tensor.numel() == 0


def placeholder(key: str, tensor: Tensor) -> Tensor:
    """Placeholder of this tensor; of a factor it keeps the rank."""
    if key.endswith(LORA_A):
        return tensor.new_empty(tensor.shape[0], 0)
    return tensor.new_empty(0, tensor.shape[1]) if key.endswith(LORA_B) else tensor.new_empty(0)


def digest_tensor(sha256: str | None) -> Tensor:
    """`PRIVATE` for values of this digest, or for those that are drawn."""
    return torch.frombuffer(bytearray(bytes.fromhex(sha256) if sha256 else bytes(32)), dtype=torch.uint8)


def private_digest(params: Params) -> str | None:
    """The digest of what stays at this model's client; None where it is drawn there."""
    return bytes(params[PRIVATE].tolist()).hex() if PRIVATE in params and bool(params[PRIVATE].any()) else None


def is_fully_shared(share: Sequence[str]) -> bool:
    """Return whether nothing stays at the clients."""
    return {"A", "B", "head"} <= set(share)


def unshared_keys(params: Params, share: Sequence[str]) -> list[str]:
    """The names of a whole model's tensors that this share leaves where they are."""
    shared = shared_params(params, share)
    return [key for key in params if key not in shared]


def with_placeholders(params: Params, keys: Collection[str], *, sha256: str | None) -> Params:
    """The model as the server has it that these tensors, of this digest, do not reach; itself where there are none."""
    if not keys:
        return params
    visible = {key: placeholder(key, tensor) if key in keys else tensor for key, tensor in params.items()}
    return {**visible, PRIVATE: digest_tensor(sha256)}


def transmitted_params(params: Params) -> Params:
    """Part of a model at the server that goes to its client: all that has values."""
    if PRIVATE not in params:
        return params
    return {key: tensor for key, tensor in params.items() if key != PRIVATE and not is_placeholder(tensor)}


def has_hidden_factors(params: Params) -> bool:
    """Return whether something of the adapters is at the client alone: a factor, or a model beside this whole one."""
    is_beside = PRIVATE in params and not any(map(is_placeholder, params.values()))
    return is_beside or any(is_placeholder(tensor) for key, tensor in params.items() if key.endswith((LORA_A, LORA_B)))


def hidden_ranks(params: Params) -> tuple[int, ...]:
    """The ranks of the modules neither of whose factors travels, in the order of their names."""
    return tuple(
        params[module + LORA_A].shape[0]
        for module in sorted(lora_modules(params))
        if is_placeholder(params[module + LORA_A]) and is_placeholder(params[module + LORA_B])
    )


def expected_update(sent_params: Params, update: Params, share: Sequence[str]) -> Params:
    """Model as it was sent, with placeholders where the client keeps from now on what it does not share.

    With nothing in `share` that is all of it.
    """
    if PRIVATE not in update:
        return sent_params
    private_keys = set(unshared_keys(sent_params, share))
    named = {PRIVATE: update[PRIVATE]} if not share else {}  # the server names it so from now on
    return named | {
        key: placeholder(key, tensor)
        if key in private_keys and key in update and is_placeholder(update[key])
        else tensor
        for key, tensor in sent_params.items()
    }
