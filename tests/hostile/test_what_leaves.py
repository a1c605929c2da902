"""Every message of real sites, held against a list of what may be in it: a test fails where the server saw more.

The guide `docs/guides/sites.md` says what travels; these are its sentences.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_fl.config import Config, parse_config
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Images
from atlas_fl.models.tokenization import TextEncoder
from atlas_fl.runtime.transport.frames import Message, encode_frame
from atlas_fl.setup.assembly import own_client
from tests.hostile.servers import Recording

RESULT = frozenset({"kind", "number", "examples", "metrics", "loaded", "keys", "crossed", "same", "classes", "private"})
HEADS: Mapping[str, frozenset[str]] = {
    "register": frozenset(
        {
            *("kind", "version", "config", "model", "device", "images", "left_out", "multilabel"),
            *("vocabulary", "architecture", "tokenizer", "plugins", "run"),
            *("task", "num_labels", "metric", "positive", "label_names", "max_length", "examples", "labels", "lengths"),
        }
    ),
    "result": RESULT,
    "cut": frozenset({"kind", "number", "what", "done"}),
    "kept": frozenset({"kind", "sha256"}),
}
"""The fields of all that a site says."""
METRICS = frozenset(
    {
        *("loss", "seconds", "steps", "head_steps", "extra_steps", "agreement", "primary"),
        *("ece", "accuracy", "f1", "macro_f1", "precision", "recall", "mcc", "balanced_accuracy", "auroc"),
    }
)
ADAPTERS = r"param/.*\.lora_[AB]|param/head\..*"
PLAN = r"param/sketch\.(first|second)|param/importance"
HALVES = r"report/halves/(first|second)/(.*\.lora_[AB]|head\..*)"
CUT = r"cut/[01]/(activation|gradient|control|fingerprint)"

TENSORS: Mapping[str, str] = {
    "usual": rf"metrics|{ADAPTERS}|{PLAN}",
    "kept": rf"metrics|param/.*\.lora_A|{PLAN}",
    "cut": rf"metrics|{ADAPTERS}|{PLAN}|{CUT}|cut/0/label",
    "cut, head here": rf"metrics|{ADAPTERS}|{PLAN}|{CUT}",
    "halves": rf"metrics|{ADAPTERS}|{PLAN}|{HALVES}",
    "class features": rf"metrics|{ADAPTERS}|{PLAN}|report/class_features/(counts|means|variances)",
    "images": r"metrics|param/(gram|cross|losses|values)|param/embeddings\..*|param/.*layer.*|param/.*norm.*",
}
"""By federation, the names of all tensors that its sites send."""


def said(recording: Recording, site: str) -> list[Message]:
    return [message for message, _ in recording.spoken[site].turns]


def client_of(recording: Recording, site: str) -> tuple[Config, ClientData]:
    """The settings of a recording, and the data of this site under them."""
    config = parse_config(recording.spoken[site].welcome["settings"], origin="a test")
    task, _, part = site.partition("-")
    return config, own_client(config, site, task=task, part=int(part), secret=Path("never-read"))


def cut_sites(name: str) -> tuple[str, ...]:
    return ("movie-0",) if "cut" in name else ()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TENSORS))
def test_nothing_leaves_a_site_that_is_not_on_the_list(recorded: Callable[[str], Recording], name: str) -> None:
    recording, seen = recorded(name), set[str]()
    for site in recording.spoken:
        for head, tensors in said(recording, site):
            kind = head["kind"]
            assert head.keys() <= HEADS[kind], (kind, head.keys() - HEADS[kind])
            assert set(head.get("metrics", ())) <= METRICS, head["metrics"]
            seen.add(kind)
            allowed = TENSORS[name] if site in cut_sites(name) else re.sub(r"\|cut/.*", "", TENSORS[name])
            odd = [key for key in tensors if not re.fullmatch(allowed, key)]
            assert not odd, (site, kind, odd)
    assert seen >= {"register", "result", "kept"}
    assert ("cut" in seen) is (cut_sites(name) != ())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["usual", "cut, head here", "halves", "class features"])
def test_no_text_and_no_token_is_in_any_message(recorded: Callable[[str], Recording], name: str) -> None:
    recording = recorded(name)
    for site in recording.spoken:
        frames = [encode_frame(head, tensors) for head, tensors in said(recording, site)]
        texts = list(texts_of(recording, site))
        assert len(texts) > 40
        for frame in frames:
            for text, ids in texts:
                assert text.encode() not in frame
                assert not [kind for kind in (np.int64, np.int32, np.int16) if ids.astype(kind).tobytes() in frame]


def texts_of(recording: Recording, site: str) -> Iterator[tuple[str, np.ndarray]]:
    """The texts of a site with a few words, and their tokens without the special ones."""
    config, client = client_of(recording, site)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.model)
    for rows in (client.train, client.validation, client.test):
        encoded = TextEncoder(tokenizer=tokenizer, max_length=24).examples(rows.text, rows.pair, rows.label)
        for place, text in enumerate(rows.text):
            ids = encoded.ids[encoded.offsets[place] : encoded.offsets[place + 1]][1:-1]
            if len(ids) >= 4:
                yield text[:20], ids[:4]


def test_no_image_is_in_any_message(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("images")
    for site in recording.spoken:
        _, client = client_of(recording, site)
        assert isinstance(client.train, Images)
        frames = b"".join(encode_frame(head, tensors) for head, tensors in said(recording, site))
        for pixels in client.train.pixels:
            assert np.ascontiguousarray(pixels).tobytes() not in frames
            assert pixels.astype(np.float32).tobytes() not in frames


@pytest.mark.slow
@pytest.mark.parametrize("name", ["usual", "cut, head here", "class features"])
def test_labels_leave_as_counts_alone(recorded: Callable[[str], Recording], name: str) -> None:
    """Where the head is here, no message has the label of an example: counts are in the census, once."""
    recording = recorded(name)
    for site in recording.spoken:
        _, client = client_of(recording, site)
        (census,) = [head for head, _ in said(recording, site) if head["kind"] == "register"]
        counts = {split: list(map(int, np.bincount(getattr(client, split).label))) for split in census["labels"]}
        assert census["labels"] == counts
        labels = client.train.label
        for head, tensors in said(recording, site):
            assert not [key for key in tensors if "label" in key]
            frame = encode_frame(head, tensors)
            for kind in (np.int64, np.int32, np.int16, np.uint8, np.float32):
                assert labels.astype(kind).tobytes() not in frame
            assert str(labels.tolist())[1:-1].encode() not in frame


def test_with_the_head_at_the_server_the_labels_do_leave(recorded: Callable[[str], Recording]) -> None:
    """The control of the test before: the same look at a site that agreed to it finds them."""
    assert any("cut/0/label" in tensors for _, tensors in said(recorded("cut"), "movie-0"))


def test_a_whole_models_body_leaves_as_its_values_under_the_mask(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("images")
    actions = [answer[0].get("action") for _, answer in recording.spoken["digits-0"].turns]
    for action, (head, tensors) in zip(actions, said(recording, "digits-0")[1:], strict=False):
        if action == "train":
            assert set(tensors) == {"metrics", "param/values"}
        if action == "evaluate":
            assert set(tensors) == {"metrics"}, head


def test_halves_leave_once_and_class_features_with_every_update(recorded: Callable[[str], Recording]) -> None:
    for name, rounds in (("halves", [2]), ("class features", [1, 2])):
        recording = recorded(name)
        for site in recording.spoken:
            jobs = [answer[0] for _, answer in recording.spoken[site].turns]
            answers = said(recording, site)[1:]
            came = [
                job["round"]
                for job, (_, tensors) in zip(jobs, answers, strict=False)
                if any(key.startswith("report/") for key in tensors)
            ]
            assert came == rounds, (name, site)


SAYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "usual": (
        ("after each round the adapters and the head that", "two sketches of 64 numbers"),
        ("texts, tokens", "label of"),
    ),
    "kept": (("after each round the adapters' factors A that",), ("texts, tokens",)),
    "cut": (("activations of every example at block 1 of 3 and the label of each",), ("the files of its data",)),
    "cut, head here": (("at block 1 of 3 without their labels",), ("the files of its data, the label of an example",)),
    "halves": (("; once, two models trained on either half of its examples;",), ("texts, tokens, act",)),
    "class features": (
        ("; with each update class frequencies, means and variances of its features by class;",),
        ("texts, tokens, activations but as these means, the label of an example",),
    ),
    "images": (
        ("sums of its images' features", "a score of each weight", "weights under the mask"),
        ("images, activations",),
    ),
}


@pytest.mark.parametrize("name", list(SAYS))
def test_a_site_says_at_its_start_what_leaves_it_and_what_never_does(recorded, name: str) -> None:
    recording = recorded(name)
    told: list[str] = next(iter(recording.told.values())) if name == "images" else recording.told["movie-0"]
    leaves, never = SAYS[name]
    *sending, kept, may_show = told[1 : 3 + len([line for line in told if "leaves" in line])]
    sent = " ".join(sending)
    assert kept.startswith("is never sent:")
    data = "images" if name == "images" else "training texts"
    assert may_show.startswith("what a hostile server may still learn:")
    assert f"without noise and without secure sums; who chooses the models can learn {data} from them" in may_show
    assert all(words in sent for words in leaves), sent
    assert all(words in kept for words in never), kept
    agreed: Any = [line for line in told if "as agreed" in line]
    assert bool(agreed) is (cut_sites(name) != ())
