"""Data sets of the hub: from a directory, the cache of `datasets`, or the hub itself, in this order."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from atlas_fl.data.tables import Table, from_datasets, read_folder
from atlas_fl.data.task import Source
from atlas_fl.errors import DataError

REACH_SECONDS = 5
FILES = "{train,validation,test}.parquet (or .csv, .jsonl, or a save_to_disk folder)"
"""Files that a data set's folder in a directory of the user's may hold."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set as the hub knows it."""

    title: str
    """Name in messages."""
    repository: str
    config: str
    """Name of the data set within the repository."""
    folder: str
    """Its folder in a directory of the user's."""

    def folder_in(self, source: Source) -> Path | None:
        """The folder in which a directory of the user's would hold it; None where no directory was given."""
        return None if source.data_dir is None else source.data_dir / self.folder


def find_tables(published: Published, source: Source) -> dict[str, Table]:
    """The tables of a data set by split; a `DataError` names what is missing and the three ways to supply it."""
    tables = _find_tables(published, source)
    if "train" not in tables:
        raise DataError(f"{published.title} has no train split; it has {', '.join(tables) or 'nothing'}")
    return tables


def _find_tables(published: Published, source: Source) -> dict[str, Table]:
    folder = published.folder_in(source)
    if folder is not None and folder.is_dir():
        return read_folder(folder)
    tables = _read_cache(published)
    if tables is not None:
        return tables
    reason = _unreachable()
    if reason is not None:
        raise _missing(published, folder, reason)
    import datasets

    try:
        data = datasets.load_dataset(published.repository, published.config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _missing(published, folder, " ".join(str(error).split())[:200]) from error
    return from_datasets(data)


def source_files(published: Published, source: Source) -> tuple[Path, ...]:
    """The folders that `find_tables` would read, whether or not they are there yet."""
    folder = published.folder_in(source)
    if folder is not None and folder.is_dir():
        return (folder,)
    import datasets  # two seconds that other commands need not pay

    cached = Path(datasets.config.HF_DATASETS_CACHE, published.repository.replace("/", "___"), published.config)
    return (cached,) if folder is None else (folder, cached)


def _read_cache(published: Published) -> dict[str, Table] | None:
    from datasets.packaged_modules.cache.cache import Cache

    # Asked before the hub: load_dataset would retry for half a minute before it looks here.
    repository = published.repository
    name = repository.partition("/")[2]
    try:
        builder = Cache(
            repo_id=repository, dataset_name=name, config_name=published.config, version="auto", hash="auto"
        )
        return from_datasets(builder.as_dataset())
    except (ValueError, OSError):
        return None


def _unreachable() -> str | None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with urlopen(constants.ENDPOINT, timeout=REACH_SECONDS):
            return None
    except HTTPError:
        return None  # an answer, whatever it says
    except OSError as error:
        return str(getattr(error, "reason", error))


def _missing(published: Published, folder: Path | None, reason: str) -> DataError:
    import datasets

    looked = f"there is no folder {folder}" if folder is not None else "no --data-dir was given"
    return DataError(
        f"{published.title} is not here: {looked}, the cache {datasets.config.HF_DATASETS_CACHE} does not hold it and "
        f"the hub does not give it ({reason}); either connect to the hub, or fill that cache with "
        f"datasets.load_dataset({published.repository!r}, {published.config!r}) where there is a network and copy it, "
        f"or give --data-dir DIR with DIR{os.sep}{published.folder}{os.sep}{FILES}"
    )
