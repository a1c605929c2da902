"""What leaves a site under the settings that it has accepted, in words for the person who runs it."""

from atlas_fl.config import Config
from atlas_fl.config.splitting import AUTO, cut_word
from atlas_fl.deployed.settings_policy import asks_sensitivity, needed, takes_fingerprints
from atlas_fl.lines import IMAGES, line_of
from atlas_fl.tasks.spec import Task


def what_leaves(config: Config, *, client: str, task: Task, device: str, blocks: int) -> tuple[str, ...]:
    """What leaves this site under settings that it has accepted, and what never does, a line each."""
    words = needed(config, client=client, task=task.name, device=device)
    whole = line_of([task], tune=config.images.tune) is IMAGES
    sent = _sent_whole(config) if whole else _sent_adapters(config)
    counts = "token lengths, " if not whole and not task.images else ""
    known = "labels' names and counts" if task.has_classes else "mean and spread of its labels"
    usual = f"how many examples each split has, test too, their {counts}{known}; scores, losses, seconds"
    kept = "images" if task.images else "texts, tokens"
    if "cut" not in words:
        return (
            f"leaves this site: {sent}; {usual}",
            f"never leaves it: {kept}, activations, the label of an example",
        )
    where = cut_word(config.split.split, client=client, task=task.name, device=device)
    at = "one of the model's blocks, if this device cannot hold all," if where == AUTO else f"block {where} of {blocks}"
    given = "and the label of each" if "labels" in words else "without their labels"
    return (
        f"leaves this site: {sent}; {usual}",
        f"leaves it too, as agreed: the activations of every example at {at} {given}: nearly all of the text can be"
        " read in them" + (", also by other sites" if "hosting" in words else ""),
        "never leaves it: the files of its data" + ("" if "labels" in words else ", the label of an example"),
    )


def _sent_adapters(config: Config) -> str:
    names = {"A": "the adapters' factors A", "B": "the adapters' factors B", "head": "the head"}
    trained = ", ".join(names[part] for part in config.mixing.share)
    if {"A", "B"} <= set(config.mixing.share):
        trained = "the adapters and the head" if "head" in config.mixing.share else "the adapters"
    sketches = f"two sketches of {config.clustering.sketch_dim:,} numbers, " if takes_fingerprints(config) else ""
    warm = f"{trained} after a warm-up, " if sketches and config.clustering.fingerprint == "delta" else ""
    return f"after each round {trained} that it trained; for the plan {sketches}{warm}the importance of each block"


def _sent_whole(config: Config) -> str:
    heads = "sums of its images' features by class, " if config.images.head_first == "ridge" else ""
    scores = "a score of each weight, " if asks_sensitivity(config) else ""
    trained = "the weights under the mask" if config.sparse.masked else "the weights"
    return f"before round one {heads}{scores}after each round {trained} that it trained"
