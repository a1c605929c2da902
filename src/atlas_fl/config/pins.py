"""A file that a setting names, known by its content: `union.safetensors#sha256=0123456789abcdef`, as pip pins a wheel.

What is read from a file makes a run what it is, and a path does not say what lies there. So a run's settings hold both:
where the file is, and the first sixteen digits of its SHA-256.
"""

from dataclasses import replace
from hashlib import file_digest
from pathlib import Path

from atlas_fl.config.groups import Config
from atlas_fl.config.images import mask_source
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.io.regular import check_regular


def pinned(config: Config) -> Config:
    """The same config with the digest of what lies in its `--mask-file`, if it has one.

    Raises:
        CheckpointError: the file is not there or cannot be read.
        ConfigError: it has another digest than the config says.
    """
    check_pins(config)
    path, digest = mask_source(config.sparse.mask_file)
    if path is None or digest is not None:
        return config
    return replace(config, sparse=replace(config.sparse, mask_file=f"{path}#sha256={_digest_of(path)}"))


def check_pins(config: Config) -> None:
    """Nothing where the file has the content that the config says, is gone, or its content is not said.

    Raises:
        ConfigError: it has another.
        CheckpointError: it cannot be read.
    """
    path, digest = mask_source(config.sparse.mask_file)
    if path is None or digest is None or not Path(path).exists():
        return
    if (found := _digest_of(path)) != digest:
        raise ConfigError(
            f"--mask-file {path} was altered: its SHA-256 begins with {found}, and the run's mask with {digest};"
            " restore the file, or begin another run with it"
        )


def _digest_of(path: str) -> str:
    try:
        check_regular(Path(path))
        with Path(path).open("rb") as file:
            return file_digest(file, "sha256").hexdigest()[:16]
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}; give --mask-file a mask.safetensors that is there") from None
    except OSError as error:
        raise CheckpointError(f"--mask-file {path} cannot be read ({error.strerror}); give another") from None
