"""Every attack by its name, and the function behind `atlas attack`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from atlas_fl.config import Config
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import ConfigError, check_known
from atlas_fl.events import OnEvent, PhaseStarted, ignore
from atlas_fl.planning.planner import measure_leakage
from atlas_fl.privacy_attacks.membership import audit_epsilon, infer_membership, others_of
from atlas_fl.privacy_attacks.properties import infer_properties
from atlas_fl.privacy_attacks.updates import read_tokens
from atlas_fl.secure_sums import LEAST
from atlas_fl.setup.assembly import Assembly, assemble

SHADOWS = 16
"""Shadow clients by default."""
Row: TypeAlias = Mapping[str, Any]
PrivacyAttack: TypeAlias = Callable[..., Sequence[Row]]
"""(assembly, the client that is attacked, *, shadows, on_event) -> rows; `shadows` is how many shadow clients."""


def _tokens(assembly: Assembly, client: ClientData, *, on_event: OnEvent, **_: int) -> Sequence[Row]:
    is_secure = assembly.config.mixing.secure
    clients = [client, *others_of(assembly, client, least=2 * LEAST - 1 if is_secure else 1)]
    size = len(clients) // 2 if is_secure else 1
    servers = (False,) if assembly.is_full else (False, True)
    return [
        read_tokens(assembly, clients[:size], clients[size : 2 * size], hostile=hostile, on_event=on_event)
        for hostile in servers
    ]


PRIVACY_ATTACKS: Mapping[str, PrivacyAttack] = {
    "membership": lambda assembly, client, **how: [infer_membership(assembly, client, **how)],
    "tokens": _tokens,
    "canaries": lambda assembly, client, **how: [audit_epsilon(assembly, client, **how)],
    "properties": infer_properties,
}
CUTS = "cuts"
"""The attack on activations, which trains nothing (`planning.leakage`)."""


def run_attack(
    config: Config,
    attack: str,
    *,
    client: str | None = None,
    shadows: int = SHADOWS,
    cuts: Sequence[int] | None = None,
    on_event: OnEvent = ignore,
) -> tuple[Row, ...]:
    """Rows of an attack on what one client sends, by default the first; of `cuts` one for each task and cut.

    Raises `ConfigError` for a client that there is not, and for settings that the attack has nothing to say of.
    """
    if attack == CUTS:
        return tuple(asdict(row) for row in measure_leakage(config, cuts=cuts, on_event=on_event))
    check_known("attack", attack, among=[CUTS, *PRIVACY_ATTACKS])
    on_event(PhaseStarted("loading"))
    assembly = assemble(config)
    by_name = {one.name: one for one in assembly.clients}
    name = assembly.names[0] if client is None else client
    check_known("client", name, among=by_name)
    if (family := assembly.site.backbone.family).stock:
        raise ConfigError(
            f"{config.model.model!r} ({family.model_type}) runs through the stock path, one client at a time; take a"
            " model of packs, such as --model minilm"
        )
    on_event(PhaseStarted(attack))
    return tuple(PRIVACY_ATTACKS[attack](assembly, by_name[name], shadows=shadows, on_event=on_event))
