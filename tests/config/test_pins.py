from hashlib import sha256
from pathlib import Path

import pytest

from atlas_fl.config import (
    Config,
    check_mask_file,
    config_hash,
    differences,
    identity_settings,
    parse_config,
    pin_mask_file,
    to_toml,
    with_values,
)
from atlas_fl.errors import CheckpointError, ConfigError


def masked(path: Path | str) -> Config:
    return with_values(Config(), {"mask_file": str(path)})


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "mask.safetensors").write_bytes(b"abc")
    return tmp_path / "mask.safetensors"


def test_the_pin_by_hand(file) -> None:
    # SHA-256 of "abc" (FIPS 180-2, B.1) begins so
    wanted = f"{file}#sha256=ba7816bf8f01cfea"
    assert pin_mask_file(masked(file)).sparse.mask_file == wanted
    assert identity_settings(pin_mask_file(masked(file)))["mask_file"] == "sha256=ba7816bf8f01cfea"
    assert pin_mask_file(pin_mask_file(masked(file))) == pin_mask_file(masked(file))
    assert parse_config(to_toml(pin_mask_file(masked(file))), origin="text") == pin_mask_file(masked(file))


def test_a_run_is_known_by_the_content_of_its_mask_and_not_by_its_path(file) -> None:
    begun = pin_mask_file(masked(file))
    elsewhere = file.with_name("copy.safetensors")
    elsewhere.write_bytes(b"abc")
    assert config_hash(pin_mask_file(masked(elsewhere))) == config_hash(begun)
    assert differences(pin_mask_file(masked(elsewhere)), begun) == {}
    file.write_bytes(b"abd")
    altered = pin_mask_file(masked(file))
    assert config_hash(altered) != config_hash(begun)
    told = [f"{file}#sha256={sha256(content).hexdigest()[:16]}" for content in (b"abc", b"abd")]
    assert differences(begun, altered) == {"mask_file": tuple(told)}


def test_an_altered_mask_is_refused_in_one_line(file) -> None:
    begun = pin_mask_file(masked(file))
    file.write_bytes(b"abd")
    for refuses in (check_mask_file, pin_mask_file):
        told = r"mask.safetensors was altered: .* a52d159f262b2c6d, .* ba7816bf8f01cfea; restore"
        with pytest.raises(ConfigError, match=told) as caught:
            refuses(begun)
        assert "\n" not in str(caught.value)


def test_the_identity_of_a_pinned_run_needs_no_file(file) -> None:
    begun = pin_mask_file(masked(file))
    hashed = config_hash(begun)
    file.unlink()
    assert (config_hash(begun), pin_mask_file(begun)) == (hashed, begun)
    with pytest.raises(CheckpointError, match=r"no file .*mask.safetensors; give --mask-file"):
        pin_mask_file(masked(file))
    with pytest.raises(CheckpointError, match="cannot be read"):
        pin_mask_file(masked(file.parent))


def test_settings_of_before_keep_their_identity(file) -> None:
    """The path alone is what the config.toml of older runs says: these go on under their own mask."""
    assert identity_settings(masked(file))["mask_file"] == str(file)
    file.unlink()
    check_mask_file(masked(file))
    assert pin_mask_file(Config()) == Config()
