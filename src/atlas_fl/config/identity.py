"""The hash of a config, what may differ on resume, settings added later, digests of the files that it names.

What is read from a file is part of a run's identity, and a path does not say what lies there. So a run's settings hold
both: where the file is, and the first sixteen digits of its SHA-256 (`union.safetensors#sha256=0123456789abcdef`).
"""

import json
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, get_origin

from atlas_fl.config.schema import Config, parse_mask_file
from atlas_fl.config.settings import settings, value_of
from atlas_fl.config.values import item_kind
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.plugins import pin_plugins, plugin_digests
from atlas_fl.storage.folder_access import memory_bytes, open_named_file
from atlas_fl.storage.run_folder import RunFolder, run_name

SESSION = frozenset(
    {
        *("runs_dir", "name", "max_rounds", "keep_checkpoints", "keep_best", "checkpoint_every"),
        *("audit", "leakage", "engine", "workers", "prefix_cache_gb", "prefix_disk_gb", "secrets"),
    }
)
"""Settings that change no number of a run: where it lies, how long it goes on today, what is kept and told of it,
how many processes train it, what these remember, and where the secrets of its clients lie. Secrets do change numbers: a
run that is resumed holds them against digests of its own (`experiment.recorder.check_provenance`)."""

ADDED_LATER = frozenset(
    {
        "topology",
        "arrive",
        "patience",
        "min_delta",
        "server_adapters",
        "trainable",
        "optimizer",
        "proximal_mu",
        "feature_alignment",
        "measure_round",
        "trained_parts",
        "personal_rounds",
        "personal_models",
        "control_variates",
        "second_model",
        "second_weight",
        "second_gate",
        "adapted_blocks",
        "prior_correction",
        *("client_sizes", "test_mix", "rating_cuts", "flipped_clients", "one_task", "own_share", "dial", "centralized"),
        "multitask",
        "merge_similarity",
        "plugin",
    }
)
GROUPS_ADDED_LATER = frozenset({"images", "sparse", "robust", "server", "attack"})
"""Settings that are younger than runs: at their default they are no part of the identity, and older runs stay the same
runs."""

FORMERLY_INTEGERS = frozenset({"samples", "validation_samples", "test_samples"})
"""Settings that were whole numbers before they could be none: the hash takes them as such, and older runs stay the same
runs."""


def identity_settings(config: Config) -> dict[str, Any]:
    """The settings that make a run what it is, by name: all but `SESSION`, and of `ADDED_LATER` what was set."""
    defaults = _hashed_values(Config())
    values = _hashed_values(config)
    return {name: value for name, value in values.items() if not _is_added_later(name) or value != defaults[name]}


def _is_added_later(name: str) -> bool:
    return name in ADDED_LATER or settings()[name].group in GROUPS_ADDED_LATER


def _hashed_values(config: Config) -> dict[str, Any]:
    kinds = {
        name: int if name in FORMERLY_INTEGERS else settings()[name].kind for name in settings() if name not in SESSION
    }
    values = {name: _normalize_number(value_of(config, name), kind) for name, kind in kinds.items()}
    path, digest = parse_mask_file(config.sparse.mask_file)
    # their content, wherever they lie
    mask_file = path if digest is None else f"sha256={digest}"
    return {**values, "mask_file": mask_file, "plugin": plugin_digests(config.run.plugin)}


def config_hash(config: Config) -> str:
    """Sixteen hexadecimal digits that depend on every setting but those of the session.

    Equal configs have equal hashes on every machine; a setting that a new version adds changes all of them, but for
    those of `ADDED_LATER`.
    """
    text = json.dumps(identity_settings(config), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """The settings with different values, those of the session aside: both values by the setting's name.

    It is empty if and only if the hashes are equal, and says what to mend where they are not.
    """
    left, right = _hashed_values(first), _hashed_values(second)
    return {name: (value_of(first, name), value_of(second, name)) for name in left if left[name] != right[name]}


def run_folder(config: Config) -> RunFolder:
    """Where the run of this config lies: under its own name, or under one made of what it is."""
    run = config.run
    name = run.name or run_name(
        preset=run.preset,
        strategy=config.mixing.strategy,
        model=config.model.model,
        seed=run.seed,
        config_hash=config_hash(config),
    )
    return RunFolder(Path(run.runs_dir) / name)


def _normalize_number(value: Any, kind: Any) -> Any:
    # 1 and 1.0, and the two zeros, are equal but are written differently.
    if isinstance(value, tuple) and get_origin(kind) is tuple:
        return tuple(_normalize_number(part, item_kind(kind)[0]) for part in value)
    is_number = type(value) in (int, float) and kind is not int
    return float(value) + 0.0 if is_number else value


def pin_mask_file(config: Config) -> Config:
    """The same config with the digest of what lies in its `--mask-file`, if it has one.

    Raises:
        CheckpointError: the file is not there or cannot be read.
        ConfigError: it has another digest than the config says.
    """
    check_mask_file(config)
    path, digest = parse_mask_file(config.sparse.mask_file)
    if path is None or digest is not None:
        return config
    return replace(config, sparse=replace(config.sparse, mask_file=f"{path}#sha256={_mask_file_digest(path)}"))


def pinned_hash(config: Config, *, origin: str) -> str:
    """The hash that a server has of the same settings: with the digests of their mask file and their plug-ins.

    Raises:
        ConfigError: a plug-in is not here; or the mask is not, and the settings, which `origin` names, do not say its
            digest.
    """
    path, digest = parse_mask_file(config.sparse.mask_file)
    if path is not None and digest is None and not Path(path).exists():
        raise ConfigError(
            f"{origin} names the mask {path}, which is not here to be compared with the server's; copy it here, give"
            " the config.toml of the server's run, which has the mask's digest, or leave --config out"
        )
    pinned = replace(config.run, plugin=pin_plugins(config.run.plugin))
    return config_hash(pin_mask_file(replace(config, run=pinned)))


def check_mask_file(config: Config) -> None:
    """Nothing where the file has the content that the config says, is gone, or its content is not said.

    Raises:
        ConfigError: it has another.
        CheckpointError: it cannot be read.
    """
    path, digest = parse_mask_file(config.sparse.mask_file)
    if path is None or digest is None or not Path(path).exists():
        return
    if (actual := _mask_file_digest(path)) != digest:
        raise ConfigError(
            f"--mask-file {path} was altered: its SHA-256 begins with {actual}, and the run's mask with {digest};"
            " restore the file, or begin another run with it"
        )


def _mask_file_digest(path: str) -> str:
    try:
        with open_named_file(Path(path), max_bytes=memory_bytes()) as file:
            return file_digest(file, "sha256").hexdigest()[:16]
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}; give --mask-file a mask.safetensors that is there") from None
    except OSError as error:
        raise CheckpointError(f"--mask-file {path} cannot be read ({error.strerror}); give another") from None
