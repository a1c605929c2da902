"""What `atlas join` tells the server of its settings."""

from pathlib import Path

import pytest

from atlas_fl.cli.arguments import base_config, split
from atlas_fl.cli.options import ServeOptions
from atlas_fl.config import config_hash, pin_mask_file
from atlas_fl.deployment.site import SiteOptions, SiteResult


@pytest.fixture
def file(tmp_path) -> Path:
    """Settings whose mask is not pinned, with the mask that they name beside them."""
    (tmp_path / "mask.safetensors").write_bytes(b"a mask")
    file = tmp_path / "fed.toml"
    file.write_text(f'[run]\npreset = "vision-sparse"\n[sparse]\nmask_file = "{tmp_path / "mask.safetensors"}"\n')
    return file


@pytest.fixture
def joined(monkeypatch) -> list[SiteOptions]:
    """What the command joins with; nothing is connected to."""
    found: list[SiteOptions] = []

    def join(joining: SiteOptions, **_: object) -> SiteResult:
        found.append(joining)
        return SiteResult(name="site", adapter=None, sent_bytes=0, received_bytes=0)

    monkeypatch.setattr("atlas_fl.cli.deploy.join_federation", join)
    return found


def words(file: Path) -> list[str]:
    own = {"--certs": "certs", "--task": "x=y.csv", "--device": "cpu_2gb", "--to": "out", "--config": str(file)}
    return ["join", "host:1", *(word for pair in own.items() for word in pair)]


def test_a_site_has_the_hash_of_the_server_which_pins_the_mask(atlas, file, joined) -> None:
    assert atlas(*words(file)).code == 0
    config = base_config(split(["--config", str(file)]), implied=ServeOptions.implied)  # as `atlas serve` reads it
    assert (
        [joining.config and config_hash(joining.config) for joining in joined]
        == [config_hash(pin_mask_file(config))]
        != [config_hash(config)]
    )


def test_a_mask_that_only_the_server_has_is_told_in_a_line(atlas, file, joined) -> None:
    (file.parent / "mask.safetensors").unlink()
    said = atlas(*words(file))
    assert said.code == 2 and not joined
    assert said.err.startswith(f"atlas: no file {file.parent / 'mask.safetensors'}; give --mask-file a mask")
    assert said.err.count("\n") == 1


def test_a_site_agrees_to_what_is_said_and_to_nothing_by_default(atlas, file, joined) -> None:
    assert atlas(*words(file)).code == 0
    more = ["--allow", "cut", "labels", "--least-examples", "4", "--most-sketch", "64"]
    assert atlas(*words(file), *more).code == 0
    assert atlas(*words(file), "--allow", "cut", "--allow", "hub-model").code == 0
    assert [(own.allow, own.least_examples, own.most_sketch) for own in joined] == [
        ((), 16, 4096),
        (("cut", "labels"), 4, 64),
        (("cut", "hub-model"), 16, 4096),
    ]
    said = atlas(*words(file), "--allow", "everything")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "cut, labels, hub-model" in said.err
