"""Hash of a config, settings that may differ on resume, digests of the files that it names.

The content of a named file is part of a run's identity. So a run's settings hold its path with the first sixteen digits
of its SHA-256 (`union.safetensors#sha256=0123456789abcdef`).
"""

import json
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, get_origin

from atlas_fl.config.methods import with_method_settings
from atlas_fl.config.presets import federation_name
from atlas_fl.config.schema import Config, parse_mask_file
from atlas_fl.config.settings import settings, value_of
from atlas_fl.config.values import Mark, item_kind
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.plugins import pin_plugins, plugin_digests
from atlas_fl.storage.folder_access import memory_bytes, open_named_file
from atlas_fl.storage.run_folder import RunFolder, run_name


def identity_settings(config: Config) -> dict[str, Any]:
    """The settings that make a run what it is, by name: all but those with `Mark.SESSION`."""
    values = {
        name: _normalize_number(value_of(config, name), setting.kind)
        for name, setting in settings().items()
        if Mark.SESSION not in setting.marks
    }
    path, digest = parse_mask_file(config.sparse.mask_file)
    # their content, wherever they lie
    return {
        **values,
        "mask_file": path if digest is None else f"sha256={digest}",
        "plugin": plugin_digests(config.run.plugin),
        "knob": tuple(sorted(config.mixing.knob)),
    }


def config_hash(config: Config) -> str:
    """Sixteen hexadecimal digits that depend on every setting but those of the session.

    Equal configs have equal hashes on every machine. A setting at its default is no part of the hash, so that a setting
    that a new version adds changes none.
    """
    defaults = identity_settings(Config())
    changed = {name: value for name, value in identity_settings(config).items() if value != defaults[name]}
    return sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """The settings with different values, those of the session aside: both values by the setting's name.

    It is empty if and only if the hashes are equal, and says what to mend where they are not.
    """
    left = identity_settings(first)
    right = identity_settings(second)
    return {name: (value_of(first, name), value_of(second, name)) for name in left if left[name] != right[name]}


def run_folder(config: Config) -> RunFolder:
    """The folder of this config's run: under its `--name`, or under one made from its settings."""
    run = config.run
    name = run.name or run_name(
        preset=federation_name(config),
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


def pinned_config(config: Config) -> Config:
    """The settings as a server has them: with those of their method, and digests of mask and plug-ins.

    Raises:
        ConfigError: a plug-in is not here, or a setting contradicts the method.
        CheckpointError: the mask is not, and the settings do not say its digest.
    """
    pinned = replace(config.run, plugin=pin_plugins(config.run.plugin))
    return pin_mask_file(with_method_settings(replace(config, run=pinned)))


def check_mask_file(config: Config) -> None:
    """Raise where the `--mask-file` has another digest than the config says; a file that is gone has none.

    Raises:
        ConfigError: its content has changed.
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
