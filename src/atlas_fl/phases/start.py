"""What round one starts from: the warmed-up model at each client's own ranks, or an imported adapter."""

from collections.abc import Callable, Sequence
from pathlib import Path

from atlas_fl.assemble import Assembly
from atlas_fl.errors import ModelError
from atlas_fl.lora.adapters import grown
from atlas_fl.lora.peft_io import import_adapter
from atlas_fl.mixing.mix import realign
from atlas_fl.phases.identify import Identified
from atlas_fl.tree import LORA_A, LORA_B, lora_modules
from atlas_fl.types import Params


def warm_start(assembly: Assembly, found: Identified, ranks: Sequence[Sequence[int]]) -> dict[str, Params]:
    """Every client's model before round one, at its ranks per layer, in the clients' order."""
    folder = assembly.config.model.init_adapter
    if folder is not None:
        return _imported(assembly, Path(folder), ranks)
    start: dict[str, Params] = {}
    for client, own in zip(assembly.clients, ranks, strict=True):
        fresh = assembly.start(client, tuple(own))
        start[client.name] = grown(fresh, found.warmed[client.name], assembly.site.scale)
    return start


def _imported(assembly: Assembly, folder: Path, ranks: Sequence[Sequence[int]]) -> dict[str, Params]:
    """The adapter in this folder for every client, at its own ranks; its head where the labels are as many."""
    params, old_scale = import_adapter(folder, family=assembly.site.backbone.family)
    missing = [module for module in assembly.site.modules if module + LORA_A not in params]
    if missing:
        layers = sorted({name.rsplit(".", 1)[-1] for name in lora_modules(params)})
        remedy = f"it adapts {', '.join(layers)}: set --targets to these" if layers else "it is of another model"
        raise ModelError(f"the adapter in {folder} lacks {missing[0]} and {len(missing) - 1} more; {remedy}")
    scaled = _rescaled(params, old_scale=old_scale, assembly=assembly)
    start: dict[str, Params] = {}
    for client, own in zip(assembly.clients, ranks, strict=True):
        fresh = assembly.start(client, tuple(own))
        by_module = {module: own[assembly.layer_of[module]] for module in assembly.site.modules}
        adapted = realign(scaled, by_module, assembly.site.scale)
        # A head of other labels than the imported one's begins fresh.
        fits = {key for key in fresh if key in adapted and adapted[key].shape == fresh[key].shape}
        start[client.name] = {key: adapted[key] if key in fits else fresh[key] for key in fresh}
    return start


def _rescaled(params: Params, *, old_scale: Callable[[int], float], assembly: Assembly) -> Params:
    """The same function under this run's scale of a rank."""
    scaled = dict(params)
    for module in assembly.site.modules:
        rank = params[module + LORA_A].shape[0]
        ratio = old_scale(rank) / assembly.site.scale(rank)
        scaled[module + LORA_B] = params[module + LORA_B] * ratio
    return scaled
