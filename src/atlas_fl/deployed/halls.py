"""Where the clients of a config wait, and what they must have in common with their server."""

from dataclasses import replace
from typing import Any

from torch import nn

from atlas_fl.assemble_images import body_of, vision_of
from atlas_fl.config import Config, RunConfig, config_hash, to_toml
from atlas_fl.config.splitting import NONE
from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.messages.identity import Identity
from atlas_fl.engines.messages.whole_common import check_frames
from atlas_fl.engines.stream.frames import FRAME_LIMIT
from atlas_fl.engines.stream.loops import Desk
from atlas_fl.io.machine import versions
from atlas_fl.io.tensors import encoded_size
from atlas_fl.lines import IMAGES, line_for, whole_sender
from atlas_fl.models.loading import load_backbone
from atlas_fl.options import warmup_rank
from atlas_fl.sparse.choose import Mask
from atlas_fl.sparse.masks import BY_SENSITIVITY
from atlas_fl.tasks import find_tasks
from atlas_fl.tree import digest

REST_BYTES = 16 * 2**20
"""Of a request beside a model: a census, sketches, heads, importance."""


def hall_of(config: Config, listed: tuple[str, ...], desk: Desk, *, late: bool, mask: Mask | None = None) -> Hall:
    """Where the clients wait; raises `ConfigError` where their models are too large for a message.

    `mask` is that of a run which has one before its first job here.
    """
    how: dict[str, Any] = {"settings": to_toml(without_places(config)), "on_note": desk.note, "late": late}
    if not with_images(config):
        model = load_backbone(config.model.model).model
        hall = Hall(listed, identity_of(digest(dict(model.named_parameters())), config), **how)
        hall.most_bytes = request_limit(config, model)
        return hall
    vision = vision_of(config)
    if line_for(config) is IMAGES:
        sparse = config.sparse.masked and config.sparse.mask not in BY_SENSITIVITY
        body = body_of(vision, config)
        check_frames(body, sparse=sparse)
        how["new_sender"] = whole_sender(vision, config, keeps=True, mask=mask)
        limit = min(FRAME_LIMIT, REST_BYTES + 2 * encoded_size(body))
    else:
        limit = request_limit(config, vision.backbone)
    identity = identity_of(digest(dict(vision.backbone.named_parameters())), config)
    hall = Hall(listed, identity, images=True, **how)
    hall.most_bytes = limit
    return hall


def without_places(config: Config) -> Config:
    """The settings as a site needs them: where the server keeps its runs, and what it calls this one, is its own.

    Both are settings of the session, so that the hash is the same.
    """
    return replace(config, run=replace(config.run, runs_dir=RunConfig().runs_dir, name=None))


def request_limit(config: Config, model: nn.Module) -> int:
    """Most bytes that a client may send at once: twice its adapters at the highest rank, and some for all the rest.

    What crosses a cut depends on batches and lengths, so there it is what a frame may have.
    """
    if config.split.split != NONE:
        return FRAME_LIMIT
    ranks = [*config.ranks.candidates, warmup_rank(config)]
    ranks += [int(config.ranks.ranks)] if config.ranks.ranks.isdecimal() else []
    widths = sum(sum(weight.shape) for weight in model.parameters() if weight.ndim == 2)
    return min(FRAME_LIMIT, REST_BYTES + 2 * 4 * max(ranks) * widths)


def identity_of(model: str, config: Config) -> Identity:
    """What clients of this config must have in common with their server; `model` is the digest of its weights."""
    return Identity(version=versions()["atlas_fl"], config=config_hash(config), model=model)


def with_images(config: Config) -> bool:
    """Whether this config's tasks are of images."""
    return any(task.images for task in find_tasks(config.data.tasks, config.data.task))
