"""The model that a server names, at a site whose owner named none."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from atlas_fl.deployment.consent import SiteChoices
from atlas_fl.deployment.settings_policy import find_servers_model
from atlas_fl.errors import ConfigError
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.registry import MODELS, RegisteredModel
from atlas_fl.storage import hub

FROM_HUB = sorted({name for alias, model in MODELS.items() if model.path != "embedded" for name in (alias, model.path)})
EMBEDDED = sorted(alias for alias, model in MODELS.items() if model.path == "embedded")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub on a machine with a network, which no test may use."""

    def fails(*_: Any, **__: Any) -> None:
        pytest.fail("a site without --allow hub-model went to the network")

    monkeypatch.setattr(socket.socket, "connect", fails)
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    monkeypatch.setattr(hub, "urlopen", fails)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put_model(cache: Path, name: str, files: Path, *, only: str = "*") -> Path:
    """The folder of a hub model, as huggingface_hub keeps it."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for path in files.glob(only):
        shutil.copy(path, snapshot)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("c0ffee")
    return snapshot


def found(name: str, *allow: Any, is_pinned: bool = False) -> str:
    return find_servers_model(name, SiteChoices(task="movie", device="cpu_2gb", allow=allow), is_pinned=is_pinned)


@pytest.mark.core
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", FROM_HUB)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_model_of_the_list_that_is_not_here_is_refused_before_the_hub_is_asked(name: str, is_pinned: bool) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}', which is not here, .*--model .*--allow hub-model") as refusal:
        found(name, is_pinned=is_pinned)
    assert "\n" not in str(refusal.value)
    assert found(name, "hub-model") == name


def test_a_model_of_the_list_is_read_out_of_the_cache_and_the_hub_is_not_asked(
    cache: Path, tiny_of: Callable[[str], Any]
) -> None:
    files = tiny_of("bert").path
    part = put_model(cache, "bert-large-uncased", files, only="config.json")
    with pytest.raises(ConfigError, match="not here"):
        found("bert-large")  # its weights would be fetched
    shutil.copy(files / "model.safetensors", part / "model-00001-of-00001.safetensors")
    (part / "model.safetensors.index.json").write_text("{}")
    assert found("bert-large") == str(part)
    snapshot = put_model(cache, "bert-base-uncased", files)
    assert found("bert") == found("bert-base-uncased") == str(snapshot)
    assert load_backbone(found("bert")).family.model_type == "bert"
    # what else is in the cache is the owner's own affair
    put_model(cache, "north/unpublished", files)
    with pytest.raises(ConfigError, match="'north/unpublished', which is not here"):
        found("north/unpublished")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["/home/x/unpublished", "./own", "../own", "own", "own/inner", "bert-base-uncased"])
def test_a_folder_counts_where_the_owners_own_settings_name_it_alone(tmp_path: Path, name: str) -> None:
    for folder in ("own/inner", "bert-base-uncased"):
        (tmp_path / folder).mkdir(parents=True)
    for allow in ((), ("hub-model",)):
        with pytest.raises(ConfigError, match=f"'{name}', and a path of the server means nothing .*--model PATH"):
            found(name, *allow)
    assert found(name, is_pinned=True) == name


@pytest.mark.usefixtures("cache")
def test_what_the_owner_fetched_or_named_needs_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded models, also beside a folder of their name, and a folder that a plug-in of the site lists."""
    for alias in (*EMBEDDED, "embedded"):
        (tmp_path / alias).mkdir()
    assert [found(alias) for alias in EMBEDDED] == EMBEDDED
    monkeypatch.setitem(MODELS, "plugged", RegisteredModel("plugged", str(tmp_path), "1M", 1e-3))
    assert found("plugged") == "plugged"
    with pytest.raises(ConfigError, match="'embedded', and a path"):
        found("embedded")
