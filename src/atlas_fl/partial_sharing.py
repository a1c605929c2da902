"""What of a client's model is not shared and stays where the client is (`--share`), and its placeholder elsewhere.

    model at the server = what is shared + a stand-in for every other tensor + `PRIVATE`

A stand-in has the tensor's rank and no values. `PRIVATE` names the values of all of them together by their SHA-256, 32
bytes; zeros name those that a client draws by itself, from the run's seed and its ranks. So the server's rules, states,
checkpoints and audits go on saying whose private part goes with which shared one, and hold nothing of it.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from atlas_fl.params import LORA_A, LORA_B, PRIVATE, Params, lora_modules, shared_part


def is_stand_in(tensor: Tensor) -> bool:
    """Whether this stands for a tensor that is elsewhere."""
    return tensor.numel() == 0


def stand_in(key: str, tensor: Tensor) -> Tensor:
    """What stands for this tensor; of a factor it keeps the rank."""
    if key.endswith(LORA_A):
        return tensor.new_empty(tensor.shape[0], 0)
    return tensor.new_empty(0, tensor.shape[1]) if key.endswith(LORA_B) else tensor.new_empty(0)


def name_of(sha256: str | None) -> Tensor:
    """`PRIVATE` for values of this digest, or for those that are drawn."""
    return torch.frombuffer(bytearray(bytes.fromhex(sha256) if sha256 else bytes(32)), dtype=torch.uint8)


def named(params: Params) -> str | None:
    """The digest of what stays at this model's client; None where it is drawn there."""
    return bytes(params[PRIVATE].tolist()).hex() if PRIVATE in params and bool(params[PRIVATE].any()) else None


def shares_all(share: Sequence[str]) -> bool:
    """Whether nothing stays at the clients."""
    return {"A", "B", "head"} <= set(share)


def unshared(params: Params, share: Sequence[str]) -> list[str]:
    """The names of a whole model's tensors that this share leaves where they are."""
    shared = shared_part(params, share)
    return [key for key in params if key not in shared]


def at_server(params: Params, keys: Collection[str], *, sha256: str | None) -> Params:
    """The model as the server has it that these tensors, of this digest, do not reach; itself where there are none."""
    if not keys:
        return params
    seen = {key: stand_in(key, tensor) if key in keys else tensor for key, tensor in params.items()}
    return {**seen, PRIVATE: name_of(sha256)}


def travelling(params: Params) -> Params:
    """What of a model at the server goes to its client: all that has values."""
    if PRIVATE not in params:
        return params
    return {key: tensor for key, tensor in params.items() if key != PRIVATE and not is_stand_in(tensor)}


def hides_factors(params: Params) -> bool:
    """Whether something of the adapters is at the client alone."""
    return any(is_stand_in(tensor) for key, tensor in params.items() if key.endswith((LORA_A, LORA_B)))


def hidden_ranks(params: Params) -> tuple[int, ...]:
    """The ranks of the modules neither of whose factors travels, in the order of their names."""
    return tuple(
        params[module + LORA_A].shape[0]
        for module in sorted(lora_modules(params))
        if is_stand_in(params[module + LORA_A]) and is_stand_in(params[module + LORA_B])
    )


def as_kept(sent: Params, update: Params, share: Sequence[str]) -> Params:
    """What was sent, with stand-ins where the client keeps from now on what it does not share."""
    if PRIVATE not in update:
        return sent
    own = set(unshared(sent, share))
    return {
        key: stand_in(key, tensor) if key in own and key in update and is_stand_in(update[key]) else tensor
        for key, tensor in sent.items()
    }
