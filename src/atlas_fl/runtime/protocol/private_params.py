"""A site's store of the parameters that it does not share (`--share`): a file for every version still in use.

A server that is killed goes back to its last checkpoint and then names an older version, so none is removed before
the server can no longer go back to it. A version lies under the digest of its values before the server hears of it; so
a site that is killed goes on with whatever the server names next.

`vault.json` says whose the folder is. A folder that no store has made is refused, and nothing is removed that a store
has not written.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import CheckpointError, ConfigError, ModelError, ProtocolError, one_line
from atlas_fl.models.lora import expand_rank
from atlas_fl.params import LORA_A, LORA_B, PRIVATE, Params, digest, select
from atlas_fl.partial_sharing import digest_tensor, placeholder, unshared_keys
from atlas_fl.runtime.protocol.messages import CutInfo, PrivateRef, read_private
from atlas_fl.runtime.protocol.model_sync import AdapterReceiver
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.split.channel import Cut
from atlas_fl.storage.jsonl import read_json, write_json
from atlas_fl.storage.tensors import read_tensors, write_tensors

INDEX, MARK = "rounds.json", "vault.json"
NEWEST, LAST = "newest", "last"
"""In the mark: the version that was trained last, and the one that the server named at the end; vaults of before have
neither."""
_VERSION = re.compile("[0-9a-f]{64}")
_FILE = re.compile(rf"({_VERSION.pattern}\.safetensors|{re.escape(INDEX)}|{re.escape(MARK)})")
_DRAFT = re.compile(rf"\.{_FILE.pattern}\.([0-9a-f]{{16}}\.)?writing")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose private parts lie in a folder."""

    client: str
    config: str
    """Hash of the run's settings."""


def check_store(folder: Path, owner: Owner | None = None) -> None:
    """Nothing where private parts may be kept in this folder: it is not there, or empty, or a store of this owner's.

    Stores of earlier versions have no mark, and are known by their files. Without an owner any store will do.

    Raises:
        ConfigError: it holds what no store has written, or is another client's or another run's.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a new folder with --private")
    if not (folder / MARK).exists():
        if strange := _strange(folder):
            raise ConfigError(
                f"{folder} holds {strange[0]}, which `atlas join` has not written; name a new or an empty folder with"
                " --private"
            )
        return
    marked = _owner_of(folder)
    if owner is not None and marked.client != owner.client:
        raise ConfigError(
            f"{folder} holds what {marked.client} does not share, and this is {owner.client}; name another folder with"
            " --private"
        )
    if owner is not None and marked != owner:
        raise ConfigError(
            f"{folder} holds what {marked.client} did not share in another run (settings {marked.config:.8}, here"
            f" {owner.config:.8}); name another folder with --private, or remove it once that run is over"
        )


def clear_store(folder: Path, owner: Owner) -> str:
    """Remove what this owner's store has written, and the folder where nothing else is in it; what stays, in a line.

    Sub-folders, links and files of other names stay, and all of it where the server has named another version at the
    end than the newest, which would be lost. The mark goes last, so that what was begun can be done again.
    """
    if not folder.is_dir() or ((folder / MARK).exists() and _owner_of(folder) != owner):
        return ""
    mark = _mark_of(folder)
    if NEWEST in mark and mark.get(LAST) != mark[NEWEST]:
        return (
            f"{folder} stays: the server's model at the end is without the newest of what this site does not share"
            f" ({one_line(mark[NEWEST], limit=16)}); ask who runs the server, or remove the folder"
        )
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MARK):
            if _is_own(path):
                path.unlink()
        if folder.is_symlink():
            return f"{folder} is a link and stays; it is empty"
        if left := _strange(folder):
            return f"{folder} stays: it holds {left[0]}, which `atlas join` has not written"
        folder.rmdir()
    except OSError as error:
        return f"{error.filename or folder} cannot be removed ({error.strerror}); the run does not need it any more"
    return ""


def _owner_of(folder: Path) -> Owner:
    content = read_json(folder / MARK)
    try:
        return Owner(client=str(content["client"]), config=str(content["config"]))
    except (KeyError, TypeError):
        raise CheckpointError(f"damaged file {folder / MARK}; restore it, or name another folder") from None


def _mark_of(folder: Path) -> dict[str, Any]:
    """What the mark says; empty where there is none."""
    if not (folder / MARK).exists():
        return {}
    _owner_of(folder)
    return dict(read_json(folder / MARK))


def _is_own(path: Path) -> bool:
    """Whether a store has written this: a file of its names, and no link."""
    named = _FILE.fullmatch(path.name) or _DRAFT.fullmatch(path.name)
    return named is not None and path.is_file() and not path.is_symlink()


def _strange(folder: Path) -> list[str]:
    """What lies there that no store has written, sorted."""
    return sorted(path.name for path in folder.iterdir() if not _is_own(path))


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateParamStore:
    """The private parts of one client's model, by digest."""

    folder: Path
    owner: Owner
    share: tuple[str, ...]
    """What leaves the client."""
    names: Callable[[Cut | None], frozenset[str]]
    """The trainable tensors that the client has with this cut."""
    draw: Callable[[Mapping[str, int]], Params]
    """The shared initialisation of these modules at these ranks, and of the head."""
    scale: Callable[[int], float]
    """LoRA's factor of a rank."""
    rounds: int
    """How many rounds a server may go back."""
    _used: dict[str, int] = field(default_factory=dict)
    """By digest, the last round in which it was made or named."""

    def whole(self, sent: Params, reference: PrivateRef | None, *, cut: Cut | None, round: int) -> Params:
        """The model of what the server sent and of what it names of this client.

        Raises `ModelError` where that is not here.
        """
        if reference is None:
            return sent
        missing = self.names(cut).difference(sent)
        if reference.sha256 is None:
            return {**select(self._initial_params(missing, sent, reference.ranks), sorted(missing)), **sent}
        stored = self._read(reference.sha256)
        self._note(reference.sha256, round)
        ranks = _ranks(missing, sent, reference.ranks)
        if stored.keys() == missing and all(
            _rank(key, expanded) == ranks.get(_module(key)) for key, expanded in stored.items()
        ):
            return {**stored, **sent}
        # planned at other ranks than it trains at, and of the rest nothing was trained yet
        expanded = expand_rank(self._initial_params(missing, sent, reference.ranks), stored, self.scale)
        lost = sorted(key for key in missing if key not in stored and not key.endswith(LORA_A))
        if lost:
            raise ModelError(f"{lost[0]} is neither here nor sent; install the server's version of atlas-fl")
        return {**select(expanded, sorted(missing)), **sent}

    def split_private(
        self, update: Update, job: Job, sent: Params, reference: PrivateRef | None
    ) -> tuple[Update, PrivateRef | None]:
        """The update without what stays here, which is kept, and how the server is to name that.

        `sent` is what the server sent of the job's model. The digest of what was loaded is that of the model as the
        server has it, where this is what it sent and named.
        """
        unshared = unshared_keys(job.params, self.share)
        if update.params is job.params or reference is None or not unshared or unshared[0] not in update.params:
            return update, None
        private_params, private = select(update.params, unshared), reference
        if any(tensor is not job.params[key] for key, tensor in private_params.items()):
            private = PrivateRef(sha256=self._keep(private_params, job.round))
        left = {key: tensor for key, tensor in update.params.items() if key not in private_params}
        update = replace(update, params=left, keys=update.keys + 1)
        if update.loaded is not None and update.loaded == digest(job.params):
            update = replace(update, loaded=digest(_seen(job.params, sent, reference)))
        return update, private

    def end(self, reference: PrivateRef | None) -> None:
        """Write down which version the server has named at the end."""
        if mark := _mark_of(self.folder):
            write_json(self.folder / MARK, {**mark, LAST: None if reference is None else reference.sha256})

    def clear(self) -> str:
        """Remove all versions, as the run is complete; what stays in the folder, in a line."""
        return clear_store(self.folder, self.owner)

    def _keep(self, params: Params, round: int) -> str:
        sha256 = digest(params)
        if not (self.folder / MARK).exists():
            write_json(self.folder / MARK, asdict(self.owner))
        if not self._file(sha256).exists():
            write_tensors(self._file(sha256), params)
        if (mark := _mark_of(self.folder)).get(NEWEST) != sha256:
            write_json(self.folder / MARK, {**mark, NEWEST: sha256})
        self._note(sha256, round)
        return sha256

    def _read(self, sha256: str) -> Params:
        path = self._file(sha256)
        try:
            params = read_tensors(path)
            if digest(params) != sha256:
                raise CheckpointError(f"damaged file {path}: it holds other values than its name says")
        except CheckpointError as error:
            raise ModelError(
                f"what this site has not shared, and the server cannot know, is not here ({error}); bring {path} back,"
                " or begin another run"
            ) from None
        return params

    def _note(self, sha256: str, round: int) -> None:
        """This version was made or named now; those that no checkpoint can name any more go, but never the newest."""
        index = self.folder / INDEX
        used = self._used
        if not used and index.exists():
            used.update(_read_index(index))
        if used.get(sha256) == round:
            return
        used[sha256] = max(round, used.get(sha256, round))
        stay = {sha256, _mark_of(self.folder).get(NEWEST)}
        for old in [key for key, last in used.items() if key not in stay and last < round - self.rounds]:
            del used[old]
            if _is_own(self._file(old)):
                self._file(old).unlink()
        write_json(index, used)

    def _file(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.safetensors"

    def _initial_params(self, missing: frozenset[str], sent: Params, hidden: Sequence[int]) -> Params:
        return self.draw(_ranks(missing, sent, hidden))


def _read_index(path: Path) -> dict[str, int]:
    """The round of every version; its names become those of files, so nothing else may stand there."""
    versions = read_json(path)
    good = isinstance(versions, dict) and all(
        _VERSION.fullmatch(key) and type(at) is int for key, at in versions.items()
    )
    if not good:
        raise CheckpointError(f"damaged file {path}: it has other names than digests, or other rounds than numbers")
    return dict(versions)


@dataclass(kw_only=True, eq=False)
class PrivateReceiver:
    """`runtime.protocol.model_sync.Receiver` for a client that keeps a part of its model to itself."""

    store: PrivateParamStore
    plain: AdapterReceiver = field(default_factory=AdapterReceiver)
    """Keeps what is shared."""
    _opened: tuple[Params, PrivateRef | None] = ({}, None)
    """What came of the newest job's model, and what was named of it."""

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
        """(action, job with its whole model, what is told of its cut); raises `ModelError` where its part is lost."""
        action, job, cut_info = self.plain.job(head, tensors, client=client)
        sent, private = self._opened = job.params, read_private(head)
        return action, replace(job, params=self.store.whole(sent, private, cut=job.cut, round=job.round)), cut_info

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """What goes back: what is shared, and the name of what stays."""
        sent, private = self._opened
        update, reference = self.store.split_private(update, job, sent, private)
        head, tensors = self.plain.update(action, update, job, number=number)
        return {**head, **({} if reference is None else {"private": asdict(reference)})}, tensors

    def read_final_model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The whole model at the end of the run; empty where there is none."""
        sent = self.plain.read_final_model(head, tensors)
        if head.get("model") is not True:
            return sent
        private = read_private(head)
        model = self.store.whole(sent, private, cut=None, round=0)
        self.store.end(private)
        return model

    def forget(self) -> None:
        """Hold nothing that is shared any more; what is not stays."""
        self.plain.forget()


def _ranks(missing: frozenset[str], sent: Params, hidden: Sequence[int]) -> dict[str, int]:
    """The rank of every module with a tensor that is wanted, by its other factor or as it is told."""
    modules = sorted({_module(key) for key in missing if key.endswith((LORA_A, LORA_B))})
    half = {_module(key): _rank(key, tensor) for key, tensor in sent.items()}
    unranked = [module for module in modules if half.get(module) is None]
    if len(unranked) != len(hidden):
        raise ProtocolError(
            f"the server names ranks of {len(hidden)} modules, {len(unranked)} are here; install"
            " its version of atlas-fl"
        )
    ranks = dict(zip(unranked, hidden, strict=True))
    return {module: ranks.get(module) or int(half[module] or 0) for module in modules}


def _module(key: str) -> str:
    return key.removesuffix(LORA_A).removesuffix(LORA_B)


def _rank(key: str, tensor: torch.Tensor) -> int | None:
    """The rank of a factor; None for a head."""
    if key.endswith(LORA_A):
        return int(tensor.shape[0])
    return int(tensor.shape[1]) if key.endswith(LORA_B) else None


def _seen(params: Params, sent: Params, reference: PrivateRef | None) -> Params:
    """The job's model as the server has it."""
    if reference is None:
        return params
    left = {key: placeholder(key, tensor) for key, tensor in params.items() if key not in sent}
    return {**sent, **left, PRIVATE: digest_tensor(reference.sha256)}
