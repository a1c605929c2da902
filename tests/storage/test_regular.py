"""A device is refused before anybody reads it; the null device stands for those without an end."""

import os
from pathlib import Path

import pytest

from atlas_fl.config import Config, load_config, pin_mask_file, with_values
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import CheckpointError, ConfigError, DataError
from atlas_fl.storage.folder_access import check_regular


def test_files_folders_and_what_is_not_there_pass(tmp_path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "none"):
        check_regular(path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OSError, match="no regular file"):
            check_regular(path)


def test_whoever_reads_what_a_user_names_says_so_in_a_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"^cannot read {os.devnull} \(no regular file\); give the path of a"):
        load_config(os.devnull)
    with pytest.raises(CheckpointError, match=rf"^--mask-file {os.devnull} cannot be read \(no regular file\); give"):
        pin_mask_file(with_values(Config(), {"mask_file": os.devnull}))
    (tmp_path / "own.csv").symlink_to(os.devnull)
    with pytest.raises(DataError, match=r"^cannot read .*no regular file"):
        parse_tasks(f"own={tmp_path / 'own.csv'}")
