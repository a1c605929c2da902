"""A site's store of the parameters that it does not share (`--share`): a file for every version still in use.

A server that is killed goes back to its last checkpoint and then names an older version, so none is removed before
the server can no longer go back to it. A version lies under the digest of its values before the server hears of it; so
a site that is killed goes on with whatever the server names next.

`vault.json` says whose the folder is, which version is the newest, which one the server named at the end, and the last
round in which each was made or named. A folder that no store has made is refused, and nothing is removed that a store
has not written. Its user alone can open the folder.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import CheckpointError, ConfigError, ModelError, ProtocolError, one_line
from atlas_fl.frozen import Frozen
from atlas_fl.models.lora import expand_rank
from atlas_fl.params import LORA_A, LORA_B, PRIVATE, SHARE, Params, digest, select
from atlas_fl.partial_sharing import digest_tensor, placeholder, unshared_keys
from atlas_fl.runtime.protocol.messages import PrivateRef
from atlas_fl.split.channel import Cut
from atlas_fl.storage import folder_access, jsonl, tensors

MARK = "vault.json"
NEWEST, LAST, ROUNDS = "newest", "last", "rounds"
_FILE = re.compile(rf"[0-9a-f]{{64}}\.safetensors|{re.escape(MARK)}")


class Owner(Frozen):
    """The client and the run whose private parts lie in a folder."""

    client: str
    config: str
    """Hash of the run's settings."""


def check_store(folder: Path, owner: Owner | None = None) -> None:
    """Raise `ConfigError` unless this folder is missing, empty, or a store: this owner's, or without one anybody's."""
    if not folder.exists():
        return
    fault = ""
    if not folder.is_dir():
        fault = "is a file"
    elif mark := _read_mark(folder):
        if owner is not None and asdict(owner) != {key: mark[key] for key in asdict(owner)}:
            fault = (
                f"holds what {mark['client']} does not share in the run with settings {mark['config']:.8}, and this is"
                f" {owner.client} in {owner.config:.8}"
            )
    elif strange := _strange(folder):
        fault = f"holds {strange[0]}, which `atlas join` has not written"
    if fault:
        raise ConfigError(f"{folder} {fault}; name a new or an empty folder with --private")


def clear_store(folder: Path, owner: Owner) -> str:
    """Remove what this owner's store has written, and the folder where nothing else is in it; what stays, in a line.

    Sub-folders, links and files of other names stay, and all of it where the server has named another version at the
    end than the newest, which would be lost. The mark goes last, so that what was begun can be done again.
    """
    mark = _read_mark(folder)
    if not folder.is_dir() or (mark and (mark["client"], mark["config"]) != (owner.client, owner.config)):
        return ""
    if NEWEST in mark and mark.get(LAST) != mark[NEWEST]:
        return (
            f"{folder} stays: the server's model at the end is without the newest of what this site does not share"
            f" ({one_line(mark[NEWEST], limit=16)}); ask who runs the server, or remove the folder"
        )
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MARK):
            if _is_own(path):
                path.unlink()
        if left := _strange(folder):
            return f"{folder} stays: it holds {left[0]}, which `atlas join` has not written"
        folder.rmdir()
    except OSError as error:
        return f"{error.filename or folder} cannot be removed ({error.strerror}); the run does not need it any more"
    return ""


def _read_mark(folder: Path) -> dict[str, Any]:
    """The content of the mark; empty where there is none."""
    path = folder / MARK
    return jsonl.read_sealed(path) if path.exists() else {}


def _is_own(path: Path) -> bool:
    """Return whether a store has written this: a file of its names, and no link."""
    draft = folder_access.DRAFT.fullmatch(path.name)
    name = path.name if draft is None else draft.group(1)
    return _FILE.fullmatch(name) is not None and folder_access.is_inner_file(path)


def _strange(folder: Path) -> list[str]:
    """Sorted names of the entries that no store has written."""
    return sorted(path.name for path in folder.iterdir() if not _is_own(path))


class PrivateParamStore(Frozen, eq=False):
    """The private parts of one client's model, by digest."""

    folder: Path
    owner: Owner
    share: Callable[[Job], tuple[str, ...]]
    """Parts of the model that leave the client after this job."""
    names: Callable[[Cut | None], frozenset[str]]
    """The trainable tensors that the client has with this cut."""
    draw: Callable[[Mapping[str, int]], Params]
    """The shared initialisation of these modules at these ranks, and of the head."""
    scale: Callable[[int], float]
    """LoRA's factor of a rank."""
    rounds: int
    """Most rounds that a server may go back."""

    def whole(self, sent: Params, reference: PrivateRef | None, *, cut: Cut | None, round: int) -> Params:
        """The model of what the server sent and of what it names of this client.

        Raises `ModelError` where that is not here.
        """
        if reference is None:
            return sent
        missing = self.names(cut).difference(sent)
        if reference.sha256 is None:
            return {**select(self.draw(_ranks(missing, sent, reference.ranks)), sorted(missing)), **sent}
        stored = self._read(reference.sha256)
        self._record([reference.sha256], round)
        ranks = _ranks(missing, sent, reference.ranks)
        if stored.keys() == missing and all(_rank(key, own) == ranks.get(_module(key)) for key, own in stored.items()):
            return {**stored, **sent}
        # planned at other ranks than it trains at, and of the rest nothing was trained yet
        fresh = self.draw(ranks)
        larger = ((_rank(key, own) or 0) > (_rank(key, fresh[key]) or 0) for key, own in stored.items())
        if not stored.keys() <= fresh.keys() or any(larger):
            raise _other_kind("a part of the model")
        expanded = expand_rank(fresh, stored, self.scale)
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
        share = self.share(job)
        unshared = unshared_keys(job.params, share)
        is_first = reference is None and not share  # of a model that the server has sent, and will not see again
        reference = PrivateRef(sha256=None) if is_first else reference
        if update.params is job.params or reference is None or not unshared or unshared[0] not in update.params:
            return update, None
        private_params = {**select(update.params, unshared), **update.kept.get("gate", {})}
        private = reference
        if any(tensor is not job.params.get(key) for key, tensor in private_params.items()):
            private = PrivateRef(sha256=self._keep(private_params, job.round))
        left = {key: tensor for key, tensor in update.params.items() if key not in private_params}
        if is_first:
            return replace(update, params=left), private
        update = replace(update, params=left, keys=update.keys + 1)
        if update.loaded is not None and update.loaded == digest(job.params):
            hidden = {key: placeholder(key, tensor) for key, tensor in job.params.items() if key not in sent}
            seen_by_server = {**sent, **hidden, PRIVATE: digest_tensor(reference.sha256)}
            update = replace(update, loaded=digest(seen_by_server))
        return update, private

    def own_model(self, sha256: str | None, shared: Params) -> Params:
        """The client's own model of this digest, or as it is drawn at the ranks of this shared one.

        Raises `ModelError` where it is not one beside this shared model.
        """
        names = self.names(None)
        known = {key: len(one) for key, one in shared.items() if key.endswith(LORA_A) and one.ndim}
        ranks = {_module(key): known.get(key, 1) for key in names if key.endswith(LORA_A)}
        own = self.draw(ranks) if sha256 is None else self._read(sha256)
        odd = [key for key, one in shared.items() if key != SHARE and (key not in own or own[key].shape != one.shape)]
        if own.keys() != names or odd:
            raise _other_kind("a model beside the shared one")
        return own

    def use(self, versions: Iterable[str], round: int) -> None:
        """Record that a job names these versions, all of them before one that it does not name may be removed."""
        if named := [sha256 for sha256 in versions if self._file(sha256).exists()]:
            self._record(named, round)

    def keep_tree(self, kind: str, params: Params, round: int) -> str:
        """Keep tensors that a client goes on from in its next round; the digest that names them, and their kind."""
        return self._keep({f"{kind}/{key}": tensor for key, tensor in params.items()}, round, is_newest=False)

    def tree(self, kind: str, sha256: str) -> dict[str, torch.Tensor]:
        """The tensors of this kind and name; raises `ModelError` where they are not here, or of another kind."""
        kept = self._read(sha256)
        if not all(key.startswith(f"{kind}/") for key in kept):
            raise _other_kind(kind)
        return {key.removeprefix(f"{kind}/"): tensor for key, tensor in kept.items()}

    def end(self, reference: PrivateRef | None) -> None:
        """Write down which version the server has named at the end."""
        if mark := _read_mark(self.folder):
            jsonl.write_sealed(self.folder / MARK, {**mark, LAST: None if reference is None else reference.sha256})

    def _keep(self, params: Params, round: int, *, is_newest: bool = True) -> str:
        sha256 = digest(params)
        if not (self.folder / MARK).exists():
            jsonl.write_sealed(self.folder / MARK, asdict(self.owner))
            self.folder.chmod(0o700)
        if not self._file(sha256).exists():
            tensors.write_tensors(self._file(sha256), params)
        self._record([sha256], round, **({NEWEST: sha256} if is_newest else {}))
        return sha256

    def _read(self, sha256: str) -> Params:
        path = self._file(sha256)
        try:
            params = tensors.read_tensors(path)
            if digest(params) != sha256:
                raise CheckpointError(f"damaged file {path}: it holds other values than its name says")
        except CheckpointError as error:
            raise ModelError(
                f"what this site has not shared, and the server cannot know, is not here ({error}); bring {path} back,"
                " or begin another run"
            ) from None
        return params

    def _record(self, versions: Collection[str], round: int, **newest: str) -> None:
        """Record that these were made or named now; remove what no checkpoint can name, but never the newest."""
        before = _read_mark(self.folder)
        mark = {**asdict(self.owner), **before, **newest}
        known = mark.get(ROUNDS, {})
        rounds = {**known, **{sha256: max(round, known.get(sha256, round)) for sha256 in versions}}
        kept = {
            name: last
            for name, last in rounds.items()
            if name in (*versions, mark.get(NEWEST)) or last >= round - self.rounds
        }
        # names come from the folder and not from the mark, so that none leads out of it
        for path in self.folder.glob("*.safetensors"):
            if path.stem in rounds.keys() - kept.keys() and _is_own(path):
                path.unlink()
        if (after := {**mark, ROUNDS: kept}) != before:
            jsonl.write_sealed(self.folder / MARK, after)

    def _file(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.safetensors"


def _other_kind(kind: str) -> ModelError:
    return ModelError(f"the server names as {kind} what is none; nothing was sent: ask who runs it")


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
