import os
import stat

import pytest

from atlas_fl.errors import ConfigError
from atlas_fl.storage.files import load_or_create_secret


def test_a_secret_is_drawn_once_and_its_user_alone_can_read_it(tmp_path) -> None:
    path, before = tmp_path / "new" / "a-0-secret", os.umask(0)
    try:
        secret = load_or_create_secret(path)
    finally:
        os.umask(before)
    assert len(secret) == 32
    assert load_or_create_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    assert load_or_create_secret(tmp_path / "other") != secret


def test_a_draft_that_a_killed_process_left_is_not_in_the_way(tmp_path) -> None:
    (tmp_path / ".secret.writing").write_text("ab")
    assert len(load_or_create_secret(tmp_path / "secret")) == 32


@pytest.mark.parametrize("content", ["", "ab", "zz" * 32, "é" * 64, "ab" * 33])
def test_what_is_no_secret_is_refused_and_left_as_it_is(tmp_path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="is no secret of 64 hexadecimal digits; put back"):
        load_or_create_secret(path)
    assert path.read_text(encoding="utf-8") == content


def test_a_folder_in_its_place_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is no secret"):
        load_or_create_secret(tmp_path)
