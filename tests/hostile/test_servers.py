"""A server that asks for more than a site agreed to: the site ends with one line, and sends nothing of it."""

import dataclasses
import itertools
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from atlas_fl.config import config_hash, parse_config, to_toml, with_values
from atlas_fl.deployment.job_policy import MOST_MEASURED
from atlas_fl.deployment.site import SiteRuntime
from atlas_fl.errors import AtlasError, ConfigError, ModelError
from atlas_fl.models.lora import init_adapters, init_head
from atlas_fl.params import LORA_A, LORA_B, Params, digest, head_keys, lora_modules, ranks
from atlas_fl.runtime.coordinator.site_worker import MAX_REGISTRATIONS
from atlas_fl.runtime.protocol.model_sync import DigestCache, model_name
from atlas_fl.runtime.transport.certificates import make_certs, open_certs
from atlas_fl.split.channel import NORMS
from atlas_fl.storage import hub
from atlas_fl.storage.tensors import encode_tensors, read_tensors
from tests.hostile.servers import Ended, Lie, Recording, branch, lie_to, welcomed

NAME = "movie-0"
CODES = "\x1b[2J\x1b]0;mine\x07\nsecond\u202eline"


@pytest.fixture
def usual(recorded: Callable[[str], Recording]) -> Recording:
    return recorded("usual")


@pytest.fixture
def lied(tmp_path: Path) -> Callable[..., Ended]:
    """How a site, by default the first of a recording, ends that begins anew and whose server tells it this lie."""

    def ends(recording: Recording, lie: Lie, *, name: str = "", **words: Any) -> Ended:
        site = name or min(recording.spoken)
        certs = recording.folder / "certs" / site
        found = lie_to(recording.spoken[site], lie, tmp_path, site, certs=certs, **{**recording.words, **words})
        assert "\n" not in found.error
        return found

    return ends


def branches(recording: Recording, lie: Lie, *, name: str = "") -> Ended:
    """How the site of a recording, by default the first one, ends whose server begins to tell it this lie."""
    found = branch(recording.spoken[name or min(recording.spoken)], lie)
    assert "\n" not in found.error
    return found


def in_job(asked: str, **changes: Any) -> Lie:
    """The jobs of this action with these changes of their heads; a mapping changes what is in it."""

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        if head.get("kind") != "job" or head["action"] != asked:
            return None
        return altered(head, changes), tensors

    return lie


def says(head: dict[str, Any]) -> Lie:
    """This, in the place of whatever it would say."""
    return lambda *_: (head, {})


def altered(value: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(value)
    for key, own in changes.items():
        found[key] = altered(found[key], own) if isinstance(own, dict) and isinstance(found.get(key), dict) else own
    return found


def named(model: Params) -> str:
    return model_name(DigestCache().digests(model))


def in_model(action: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Lie:
    """The first job of this action that brings a model, with this other one and its digest."""

    whole: dict[str, dict[str, Any]] = {}  # by digest, of those that came in part with what they stand on

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        if "model" not in head or not tensors:
            return None
        whole[head["model"]] = {**whole.get(head.get("base"), {}), **tensors}
        if head.get("action") != action:
            return None
        model = change(whole[head["model"]])
        return {key: value for key, value in head.items() if key != "base"} | {"model": named(model)}, model

    return lie


def at_the_end(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Lie:
    """Another model at the end."""

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        if head["kind"] != "done":
            return None
        model = change(tensors)
        return {**head, "model": named(model)}, model

    return lie


def initial_model(model: Params) -> dict[str, torch.Tensor]:
    """The model of round one of these federations, with the names, ranks and shapes of this one."""
    dims = {name: (model[name + LORA_A].shape[1], len(model[name + LORA_B])) for name in lora_modules(model)}
    shapes = {key: tuple(model[key].shape) for key in head_keys(model)}
    return {**init_adapters(dims, ranks(model), seed=42), **init_head(shapes, seed=42, group="movie")}


def first(tensors: Mapping[str, Any], end: str = "lora_B") -> str:
    return min(key for key in tensors if key.endswith(end))


def with_first(**others: torch.Tensor | float | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A model whose first tensor of each of these ends is another: filled with a number, or left out with None."""

    def change(model: dict[str, Any]) -> dict[str, Any]:
        found = dict(model)
        for end, own in others.items():
            name = end if end == "x" else first(model, end)
            found[name] = torch.full_like(model[name], own) if isinstance(own, float) else own
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    return change


CUT = {"blocks": 1, "wire": "fp32", "noise": 0.0, "head": "server"}
TOLD = {"places": [], "tokens": 4096, "part": "0" * 64}


def test_an_honest_server_is_worked_for_to_the_end(usual: Recording, lied: Callable[..., Ended]) -> None:
    """The positive control: run, recording and repetition end with one model."""
    found = lied(usual, lambda *_: None)
    assert (found.error, found.link.lied) == ("", None)
    here = [
        digest(read_tensors(place / "adapter_model.safetensors"))
        for place in (usual.found.folder / "adapters" / NAME, usual.folder / f"{NAME}-adapter", found.joined.adapter)
    ]
    assert len(set(here)) == 1
    kinds = [head["kind"] for head, _ in found.link.sent]
    assert kinds == ["register", *["result"] * 8, "kept"]


def with_report(report: str, *, since: int) -> Lie:
    """The training jobs from this round on, each with this report."""
    lie = in_job("train", options={"report": report})
    return lambda head, tensors: lie(head, tensors) if head.get("round", 0) >= since else None


def with_means(*, action: str = "train", since: int = 2, **others: torch.Tensor) -> Lie:
    """The first jobs of this action from this round on with class means to pull features to, these among them."""
    means = {"means": torch.zeros(2, 32), "seen": torch.ones(2, dtype=torch.bool), **others}
    sent = {f"sent/centroids/{name}": tensor for name, tensor in means.items()}
    return lambda head, tensors: (
        (head, {**tensors, **sent}) if head.get("action") == action and head["round"] >= since else None
    )


ASKS: Mapping[str, Mapping[str, tuple[Lie, str]]] = {
    "usual": {
        "a cut in a run without": (in_job("evaluate", cut=CUT, told=TOLD), "a cut at block 1, and .* the whole model"),
        "a cut before round one": (in_job("fingerprint", cut=CUT, told=TOLD), "a cut at block 1"),
        "scores of the training split": (
            in_job("evaluate", options={"split": "train"}),
            "split train.* say validation",
        ),
        "another learning rate": (in_job("train", options={"lr": 0.5}), "train with lr 0.5, and .* 0.005"),
        "no clipping": (in_job("train", options={"clip": 0.0}), "train with clip 0.0, and .* 1.0"),
        "one step": (in_job("train", options={"max_steps": 1}), "train with max_steps 1, and .* None"),
        "another seed": (in_job("train", options={"seed": 7}), "train with seed 7, and .* 42"),
        "a fingerprint of two": (
            in_job("fingerprint", options={"samples": 2}),
            "fingerprint with samples 2, and .* None",
        ),
        "another fingerprint": (in_job("fingerprint", options={"kind": "gradient"}), "kind gradient, and .* fisher"),
        "a fingerprint again in round two": (in_job("fingerprint", round=2), "fingerprint in round 2"),
        "importance again": (in_job("importance", round=1), "importance in round 1"),
        "rounds beyond the settings": (in_job("train", round=3), "train in round 3, and .* --rounds 2"),
        "no round": (in_job("train", round=None), "job: round is None"),
        "an action of other models": (in_job("train", action="ridge"), "server's ridge is "),
        "an action that there is not": (in_job("train", action="shell"), "action is .shell.; allowed: "),
        "options that there are not": (in_job("train", options={"upload": True}), "server's train is "),
        "half of a cut": (in_job("train", told=TOLD), "no number, or half of a cut"),
        "ranks that fill the memory": (
            in_job("train", private={"sha256": None, "ranks": [10**9]}),
            "rank 10{9}, .* 1 to 8",
        ),
        "a file outside": (in_job("train", private={"sha256": "../../x", "ranks": []}), "private.sha256 is"),
        "work for others": (says({"kind": "host", "live": []}), "the server says 'host'"),
        "a kind that there is not": (says({"kind": "shell"}), "the server says 'shell'"),
        "an end in terminal codes": (
            says({"kind": "ended", "reason": CODES}),
            r"ended: \?\[2J\?\]0;mine\?\?second\?line$",
        ),
        "a model of another digest": (in_job("train", model="0" * 64), "a model|digest"),
        "one tensor more": (in_model("train", with_first(x=torch.zeros(2))), "the model of train has 'x'"),
        "a tensor less": (in_model("train", with_first(lora_B=None)), "the model of train lacks '.*lora_B'"),
        "a model of no numbers": (in_model("train", with_first(lora_B=torch.nan)), "lora_B' holds values from nan"),
        "a model of huge numbers": (
            in_model("train", with_first(lora_B=-1001.0)),
            "lora_B' holds .*; allowed: -1000 to 1000",
        ),
        "no A beside a chosen B": (
            in_model("train", with_first(lora_A=0.0)),
            "lora_A' is not the initialisation of --seed 42",
        ),
        "ranks beyond the settings": (
            in_model("train", with_first(lora_B=torch.zeros(32, 9), lora_A=torch.zeros(9, 32))),
            r"is \((32, 9|9, 32)\) torch.float32; allowed: \((32, 8|8, 32)\)",
        ),
        "another type": (
            in_model("train", lambda model: {**model, first(model): model[first(model)].double()}),
            "torch.float64; allowed: .* torch.float32",
        ),
        "a head of other labels": (in_model("train", with_first(bias=torch.zeros(9))), "'head.*bias' is .*; allowed: "),
        "no numbers at the end": (at_the_end(with_first(lora_B=torch.inf)), "the model at the end: .* values from inf"),
        "a path for a name at the end": (
            at_the_end(lambda model: {**model, "../../x": torch.zeros(1)}),
            r"the model at the end has '\.\./\.\./x'",
        ),
        "halves where nobody needs any": (with_report("halves", since=1), "train with report halves, and .* none"),
        "a pull where features are not aligned": (
            with_means(),
            "train in round 2 with .'centroids'. beside the model, .* none then",
        ),
    },
    "cut": {
        "more blocks": (in_job("train", cut={"blocks": 2}), "a cut at block 2, and .* a cut at block 1"),
        "fewer numbers on the wire": (in_job("train", cut={"wire": "int8"}), "a cut with wire int8, and .* fp32"),
        "the head elsewhere": (in_job("train", cut={"head": "client"}), "a cut with head client, and .* server"),
        "the whole model": (in_job("train", cut=None, told=None), "the whole model, and .* a cut at block 1"),
        "other tensors": (in_job("train", told={"places": [0, 10**9]}), "other tensors below the cut"),
        "messages that fill the memory": (
            in_job("evaluate", told={"tokens": 10**12}),
            "messages of 1000000000000 tokens",
        ),
        "another part of the model": (
            in_job("fingerprint", told={"part": "0" * 64}),
            "is .* here and 0000000000000000 at",
        ),
    },
    "halves": {
        "halves before their round": (with_report("halves", since=1), "train with report halves, and .* none"),
        "features in the place of halves": (
            with_report("class_features", since=2),
            "report class_features, and .* halves",
        ),
        "a report that there is not": (with_report("texts", since=1), "train with report texts, .* say none"),
    },
    "class features": {
        "halves in the place of features": (with_report("halves", since=1), "report halves, and .* class_features"),
        "an update without its features": (with_report("none", since=1), "report none, and .* class_features"),
        "a pull before anybody has reported": (with_means(since=1), "train in round 1 with"),
        "a pull of scores": (with_means(action="evaluate"), "evaluate in round 2 with .'centroids'. beside the model"),
        "means of more classes": (with_means(means=torch.zeros(3, 32)), r"'means' is \(3, 32\) .* allowed: \(2, 32\)"),
        "huge means": (with_means(means=torch.full((2, 32), 1e7)), r"'means' holds values from 1e\+07"),
        "more than means": (
            with_means(x=torch.ones(1)),
            "asks for centroids of .'means', 'seen', 'x'., .* of .'means', 'seen'.;",
        ),
    },
    "images": {
        "sums of another model": (in_job("ridge", base="0" * 64), "names a model that is not here"),
        "sums again": (in_job("ridge", round=1), "ridge in round 1"),
        "scores by true labels": (in_job("sensitivity", options={"labels": "true"}), "labels true, and .* sampled"),
        "scores of one weight": (in_job("sensitivity", options={"names": ["x"]}), "scores of other weights"),
        "no mask": (in_job("train", masked=False), "training without a mask"),
        "losses of no image": (in_job("scale", options={"examples": 0}), "scale with examples 0"),
        "a mask of noise": (
            lambda head, tensors: (
                (head, {**tensors, "mask": torch.zeros(64, dtype=torch.uint8)})
                if head.get("masked") and "mask" in tensors
                else None
            ),
            "a sparse message is damaged",
        ),
        "another head at the end": (
            at_the_end(lambda model: {**model, "head.x": torch.ones(1)}),
            "a model came with another digest than the server named",
        ),
    },
}
"""By recording, what its server asks for in the place of one of its messages, and what the site says to that."""


@pytest.mark.parametrize(("name", "ask"), [(name, ask) for name, asks in ASKS.items() for ask in asks])
def test_a_server_that_asks_for_anything_else_gets_nothing(recorded, lied, name: str, ask: str) -> None:
    lie, message = ASKS[name][ask]
    loads = "part of the model" in ask  # which a site that has its part does not look at again
    found = lied(recorded(name), lie) if loads else branches(recorded(name), lie)
    assert re.search(message, found.error), found.error
    # where its model is not the server's it says so and leaves
    failed = [("failed", [])] if loads else []
    assert [(head["kind"], list(tensors)) for head, tensors in found.said_after] == failed


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("job", 40), ("register", MAX_REGISTRATIONS)])
def test_jobs_do_not_come_for_ever(usual: Recording, kind: str, most: int) -> None:
    """As often as faults explain, and not without an end."""
    job = next(answer for _, answer in usual.spoken[NAME].turns if answer[0].get("action") == "evaluate")

    def lie(head: dict[str, Any], _: dict[str, Any]) -> Any:
        if kind == "register":
            return {"kind": "register"}, {}
        return job if head.get("action") == "evaluate" else None

    found = branches(usual, lie)
    assert re.search(r"\d+ times", found.error), found.error
    assert len(found.said_after) <= most
    if kind == "register":
        assert {head["kind"] for head, _ in found.said_after} == {"register"}


def test_a_site_trains_in_no_more_rounds_than_it_agreed_to(usual: Recording, lied: Callable[..., Ended]) -> None:
    """Whoever takes part by chance in the settings' words: the server chooses, and the site counts."""
    found = lied(usual, lambda *_: None, max_rounds_per_example=1 / 24)
    assert "--rounds may train this site on its 24 examples: 2; allowed: at most 1" in found.error
    assert found.link.sent == []


SETTINGS: Mapping[str, tuple[dict[str, object], str]] = {
    "a cut": ({"split": "movie-0=1"}, r"'movie-0=1'\) ask more .*\(cut: .*; labels: .*--allow cut labels"),
    "a cut that the device decides": ({"split": "auto"}, "agree with --allow cut labels"),
    "a cut with the head here": ({"split": "1", "head": "client"}, "agree with --allow cut, or"),
    "a sketch as long as the model": (
        {"sketch_dim": 10**5},
        "--sketch-dim: 100,000; allowed: at most 4,096, .*change --most-sketch",
    ),
    "a fingerprint of two examples": (
        {"fingerprint_samples": 2},
        "training examples behind a fingerprint: 2; allowed: at least 16",
    ),
    "one step of one": (
        {"local_steps": 1, "batch_size": 1, "tune": "lora", "tasks": ("digits",)},
        "training examples behind an update: 1;",
    ),
    "halves of few examples": (
        {"strategy": "kriging", "measure_round": 1},
        "training examples behind a model of half: 12;",
    ),
    "means of few examples": ({"strategy": "fedpac"}, "training examples behind the mean features of a class: 12;"),
    "steps that are sums of gradients": (
        {"optimizer": "sgd"},
        r"settings \(--optimizer sgd\) ask more .*linear-steps: an update of SGD is a sum of gradients.*--allow linear",
    ),
    "training without the head": (
        {"trained_parts": "without_head", "personal_rounds": 1},
        r"settings \(--trained-parts without_head\) ask more .*partial-training: .*--allow partial-training, or ask",
    ),
    "B alone, of SGD": (
        {"trained_parts": "B", "space": "factors", "share": "B", "optimizer": "sgd", "ranks": "4"},
        r"\(--optimizer sgd, --trained-parts B\) .*--allow linear-steps partial-training",
    ),
    "as many rounds as examples": (
        {"rounds": 24},
        r"--rounds may train this site on its 24 examples: 24; allowed: at most 12, .* --max-rounds-per-example",
    ),
    "a fingerprint of all but a few": (
        {"fingerprint_samples": 20},
        "training examples behind .* and not a fingerprint: 4; allowed: at least 16, because what leaves",
    ),
    "one validation example": (
        {"validation_samples": 1},
        "examples of this site's validation split: 1; allowed: at least 5, because",
    ),
    "few examples": ({"samples": 8}, "training examples behind the census: 8;"),
    "batches that fill the memory": ({"batch_size": 10**9}, "--batch-size: 1,000,000,000; allowed: at most 4,096"),
    "ranks that fill the memory": ({"candidates": (2, 10**6)}, "--candidates: 1,000,000; allowed: at most 1,024"),
    "rounds without an end": ({"rounds": 10**9}, "--rounds: 1,000,000,000; allowed: at most 100,000"),
    "a model of the hub": ({"model": "evil/model"}, "'evil/model', which is not here, .*--model .*--allow hub-model"),
    "a model of the list": ({"model": "mistral-7b"}, "'mistral-7b', which is not here, .*--model .*--allow hub-model"),
    "a model outside": ({"model": "../../../../x/.ssh"}, "a path of the server means nothing here"),
    "a folder that the owner did not name": ({"model": "/etc"}, "'/etc', and a path .*give --model PATH .*--config"),
    "a folder here": ({"model": "src"}, "'src', and a path of the server means nothing here"),
    "a model's name without an end": ({"model": "x" * 5000}, "'x+.*; a site takes names of at most 255 bytes"),
    "a decay that forgets the model": (
        {"lr": 0.01, "weight_decay": 100.0},
        "--lr times --weight-decay: 1.0; allowed: at most 0.1",
    ),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_settings_that_ask_for_more_end_the_site_before_it_says_anything(usual: Recording, tmp_path, name: str) -> None:
    values, message = SETTINGS[name]
    texts = {key: "+".join(map(str, v)) if isinstance(v, tuple) else str(v) for key, v in values.items()}
    texts.pop("tasks", None)
    spoken = welcomed(usual.spoken[NAME], lambda config: to_toml(with_values(config, texts)))
    own = {"task": "digits"} if "tasks" in values else {}
    own |= {"model": None} if "model" in values else {}
    found = lie_to(spoken, lambda *_: None, tmp_path, NAME, certs=usual.folder / "certs" / NAME, **own)
    assert re.search(message, found.error), found.error
    assert "\n" not in found.error
    assert found.link.sent == []
    assert not list(tmp_path.iterdir())


ODD: Mapping[str, tuple[str, str, str]] = {
    "no candidates": ("candidates = [2, 4, 8]", "candidates = []", "--candidates"),
    "no batch": ("batch_size = 8", "batch_size = 0", "--batch-size is 0"),
    "no number": ("lr = 0.005", "lr = nan", "--lr"),
    "codes in a text": ('split = "none"', 'split = "\\u001b[2J"', "--split"),
    "an unknown rule": ('strategy = "atlas_laplacian"', 'strategy = "evil"', "unknown strategy 'evil'"),
    "an unknown setting": ("[training]", "[training]\nevil = 1", "evil"),
    "no TOML": ("[training]", "[[training", "sent"),
}


@pytest.mark.parametrize("name", list(ODD))
def test_odd_settings_with_their_own_hash_are_one_line(usual: Recording, tmp_path: Path, name: str) -> None:
    old, new, message = ODD[name]
    honest = usual.spoken[NAME].welcome["settings"]
    assert old in honest
    spoken = welcomed(usual.spoken[NAME], lambda _: honest.replace(old, new))
    found = lie_to(spoken, lambda *_: None, tmp_path, NAME, certs=usual.folder / "certs" / NAME)
    assert message in found.error, found.error
    assert found.error.isprintable()
    assert found.link.sent == []


def test_a_site_works_for_the_settings_that_it_was_given_and_no_others(usual: Recording, tmp_path: Path) -> None:
    """By its own hash of them, whatever the server says of hashes."""
    certs, spoken = usual.folder / "certs" / NAME, usual.spoken[NAME]
    honest = parse_config(spoken.welcome["settings"], origin="a test")
    same = lie_to(spoken, lambda *_: None, tmp_path, NAME, certs=certs, config=honest)
    assert same.error == ""
    others = welcomed(spoken, lambda config: to_toml(with_values(config, {"lr": 0.1})))
    differs = with_values(honest, {"lr": "0.1"})
    for config, told, values in ((differs, spoken, "0.1 here, 0.005 there"), (honest, others, "0.005 here, 0.1 there")):
        found = lie_to(told, lambda *_: None, tmp_path / "x", NAME, certs=certs, config=config)
        assert re.search(rf"are not those of --config \(lr is {values}\), .*; ask who runs the server", found.error)
        ((head, tensors),) = found.link.sent  # the server's log says why this site does not come
        assert head == {**head, "kind": "register", "config": config_hash(config), "model": None}
        assert head.keys() == {"kind", "version", "config", "model", "plugins"}
        assert tensors == {}
    wrong = dataclasses.replace(spoken, welcome={**spoken.welcome, "config": CODES})
    found = lie_to(wrong, lambda *_: None, tmp_path / "x", NAME, certs=certs)
    assert re.search(r"have hash [0-9a-f]{16} here and \?\[2J\?", found.error), found.error
    silent = dataclasses.replace(spoken, welcome={})
    assert "the server sent no settings" in lie_to(silent, lambda *_: None, tmp_path / "x", NAME, certs=certs).error


@pytest.mark.parametrize("part", ["model", "architecture", "tokenizer"])
def test_a_server_with_another_model_is_told_the_digests_and_nothing_of_the_data(usual, tmp_path, part: str) -> None:
    spoken = usual.spoken[NAME]
    wrong = dataclasses.replace(spoken, welcome={**spoken.welcome, part: "f" * 64})
    found = lie_to(wrong, lambda *_: None, tmp_path, NAME, certs=usual.folder / "certs" / NAME)
    assert re.search("here and ffffffffffffffff at the server; .*give the server's model with --model", found.error)
    ((head, tensors),) = found.link.sent
    digests = {"config", "model", "vocabulary", "architecture", "tokenizer", "plugins", "run"}
    assert head.keys() == {"kind", "version", *digests}
    assert tensors == {}


def test_who_gives_the_model_or_allows_it_loads_what_the_server_names(usual, tiny_model: Path, tmp_path) -> None:
    """A hub name of the server is fetched where the person there says so, and else only asked for a --model."""
    spoken = welcomed(usual.spoken[NAME], lambda config: to_toml(with_values(config, {"model": "evil/model"})))
    how = {"certs": usual.folder / "certs" / NAME, "model": str(tiny_model)}
    assert lie_to(spoken, lambda *_: None, tmp_path, NAME, **how).error == ""


@pytest.mark.parametrize("kind", [ModelError, ConfigError])
def test_a_site_that_cannot_do_a_job_says_why_on_its_own_screen_alone(
    usual: Recording, lied: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, kind: type[AtlasError]
) -> None:
    """The line has paths of its disk, and what its examples have spent in other federations."""
    why = "the training examples here would spend epsilon 3.14 with this round by /home/north/north-privacy"

    def fails(*_: Any) -> None:
        raise kind(why)

    monkeypatch.setattr(SiteRuntime, "__call__", fails)
    found = lied(usual, lambda head, tensors: (head, tensors) if head["kind"] == "job" else None)
    assert found.said_after
    for head, tensors in found.said_after:
        assert (head["kind"], head["reason"], tensors) == ("failed", "it cannot do this; its own screen says why", {})
        assert not re.search("home|3.14", str(head))
    assert why in (found.error if kind is ModelError else " ".join(found.told))


def test_a_model_of_the_list_that_is_in_the_cache_is_worked_with_and_the_hub_is_not_asked(
    usual: Recording, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        pytest.fail("a site without --allow hub-model asked the hub")

    cache = tmp_path / "hub" / "models--bert-base-uncased"
    shutil.copytree(tiny_model, cache / "snapshots" / "c0ffee")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "urlopen", fails)
    monkeypatch.setattr(socket.socket, "connect", fails)
    spoken = welcomed(usual.spoken[NAME], lambda config: to_toml(with_values(config, {"model": "bert"})))
    how = {"certs": usual.folder / "certs" / NAME, "model": None}
    assert lie_to(spoken, lambda *_: None, tmp_path, NAME, **how).error == ""


@pytest.mark.slow
def test_a_cut_that_the_server_chooses_stays_where_the_site_was_first_trained(recorded, lied) -> None:
    """Several blocks of one text are several looks at it, each with noise of its own."""
    cut = recorded("cut")
    spoken = welcomed(cut.spoken[NAME], lambda config: to_toml(with_values(config, {"split": "auto"})))
    chosen = dataclasses.replace(cut, spoken={**cut.spoken, NAME: spoken})
    for changes in ({"cut": {"blocks": 2}}, {"cut": None, "told": None}):

        def lie(head: dict[str, Any], tensors: dict[str, Any], changes: dict[str, Any] = changes) -> Any:
            moved = head.get("action") == "evaluate" and head["round"] == 1
            return (altered(head, changes), tensors) if moved else None

        found = lied(chosen, lie)
        assert re.search("block 2|the whole model, .* say a cut at block 1, where this site was first", found.error)
        assert found.said_after == []


@pytest.mark.slow
def test_a_farewell_without_the_newest_private_part_does_not_remove_it(recorded, lied, tmp_path) -> None:
    """The site is told that its run is over, with a part that is drawn anew in the place of the trained one."""
    gone: list[str] = []

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        if head["kind"] != "done":
            return None
        if gone:
            return {"kind": "over"}, {}
        gone.append(head["private"]["sha256"])
        return altered(head, {"private": {"sha256": None}}), tensors

    found = lied(recorded("kept"), lie)
    assert found.error == ""
    assert [line for line in found.told if f"{NAME}-private stays: the server's model at the end is without" in line]
    assert [path.stem for path in (tmp_path / f"{NAME}-private").glob("*.safetensors")] == gone


ANSWERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "nothing": lambda _: {},
    "no gradient": lambda tensors: {key: own for key, own in tensors.items() if "gradient" not in key},
    "no norms": lambda tensors: {key: own for key, own in tensors.items() if "control" not in key},
    "no bytes": lambda tensors: dict.fromkeys(tensors, torch.zeros(3)),
    "no message": lambda tensors: dict.fromkeys(tensors, torch.zeros(3, dtype=torch.uint8)),
    "other rows": lambda tensors: {**tensors, "cut/0/gradient": as_bytes({"rows": torch.zeros(2, 3)})},
    "no rows": lambda tensors: {**tensors, "cut/0/gradient": as_bytes({"x": torch.zeros(2, 3)})},
    "norms of text": lambda tensors: {**tensors, "cut/0/control": as_bytes({NORMS: torch.zeros(4, 4)})},
    "norms without a name": lambda tensors: {**tensors, "cut/0/control": as_bytes({"x": torch.zeros(4)})},
}


def as_bytes(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode_tensors(tensors)), dtype=torch.uint8)


@pytest.mark.parametrize("answer", list(ANSWERS))
def test_an_answer_through_the_cut_that_fits_nothing_is_one_line(recorded, answer: str) -> None:
    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        trains = head["kind"] == "cut" and any("control" in key for key in tensors)
        return (head, ANSWERS[answer](tensors)) if trains else None

    found = branches(recorded("cut"), lie)
    assert re.search("install|cannot be read", found.error), found.error
    assert found.said_after == []


@pytest.mark.slow
def test_what_is_not_shared_does_not_leave_where_the_server_sends_it_itself(
    recorded: Callable[[str], Recording], lied: Callable[..., Ended], tmp_path: Path
) -> None:
    """A model that comes whole names nothing that stays; what is trained of it stays all the same."""
    kept = recorded("kept")
    whole = initial_model(kept.whole[NAME])

    def lie(head: dict[str, Any], _: dict[str, Any]) -> Any:
        if head.get("action") != "train":
            return None
        rest = {name: own for name, own in head.items() if name != "private"}
        return {**{k: v for k, v in rest.items() if k != "base"}, "model": named(whole)}, whole

    found = lied(kept, lie, to=tmp_path / "other")
    assert re.search("lora_B' with its answer to train, and .* what the settings share", found.error), found.error
    assert found.said_after == []
    for _, tensors in found.link.sent:
        assert not [key for key in tensors if key.endswith(".lora_B") or key.startswith("param/head")]


def test_who_was_late_is_measured_again_and_not_for_ever(recorded: Callable[[str], Recording]) -> None:
    """Halves in rounds 2, 3 and 4, which a late answer explains; in round 5 they are refused."""
    rounds = itertools.count(2)

    def lie(head: dict[str, Any], tensors: dict[str, Any]) -> Any:
        asks = head.get("action") == "train" and head["options"]["report"] == "halves"
        return ({**head, "round": next(rounds)}, tensors) if asks else None

    found = branches(recorded("halves"), lie)
    assert "its halves in a 4th round, and the settings that this site accepted say once" in found.error
    sent = [tensors for _, tensors in found.said_after if any(key.startswith("report/") for key in tensors)]
    assert len(sent) == MOST_MEASURED


def test_a_certificate_with_a_path_for_a_name_is_no_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who signs can make one; what a site writes is named after it where `--to` says nothing."""
    monkeypatch.setattr("atlas_fl.runtime.transport.certificates._check_names", lambda *_: None)
    make_certs(tmp_path / "certs", servers=["localhost"], clients=["../evil"])
    with pytest.raises(ConfigError, match=r"is of '\.\./evil', no name of a site"):
        open_certs(tmp_path / "evil")
