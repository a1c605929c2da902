"""Where the clients of a config wait, and what they must have in common with their server."""

from typing import Any

from atlas_fl.assemble_images import body_of, vision_of
from atlas_fl.config import Config, config_hash, to_toml
from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.messages.identity import Identity
from atlas_fl.engines.messages.whole_common import check_frames
from atlas_fl.engines.stream.loops import Desk
from atlas_fl.io.machine import versions
from atlas_fl.lines import IMAGES, line_for, whole_sender
from atlas_fl.models.loading import load_backbone
from atlas_fl.sparse.choose import Mask
from atlas_fl.sparse.masks import BY_SENSITIVITY
from atlas_fl.tasks import find_tasks
from atlas_fl.tree import digest


def hall_of(config: Config, listed: tuple[str, ...], desk: Desk, *, late: bool, mask: Mask | None = None) -> Hall:
    """Where the clients wait; raises `ConfigError` where their models are too large for a message.

    `mask` is that of a run which has one before its first job here.
    """
    how: dict[str, Any] = {"settings": to_toml(config), "on_note": desk.note, "late": late}
    if not with_images(config):
        model = load_backbone(config.model.model).model
        return Hall(listed, identity_of(digest(dict(model.named_parameters())), config), **how)
    vision = vision_of(config)
    if line_for(config) is IMAGES:
        sparse = config.sparse.masked and config.sparse.mask not in BY_SENSITIVITY
        check_frames(body_of(vision, config), sparse=sparse)
        how["new_sender"] = whole_sender(vision, config, keeps=True, mask=mask)
    identity = identity_of(digest(dict(vision.backbone.named_parameters())), config)
    return Hall(listed, identity, images=True, **how)


def identity_of(model: str, config: Config) -> Identity:
    """What clients of this config must have in common with their server; `model` is the digest of its weights."""
    return Identity(version=versions()["atlas_fl"], config=config_hash(config), model=model)


def with_images(config: Config) -> bool:
    """Whether this config's tasks are of images."""
    return any(task.images for task in find_tasks(config.data.tasks, config.data.task))
