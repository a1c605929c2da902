"""Every method under every condition: a run ends with finite losses, or it is refused in one line before it begins.

Conditions are what a head is (one layer, two, a score of the last token, none, one output), families, image models and
whole models, how many clients there are and whether one comes late, one task or two, and shares of participation under
which whole tasks take no part for rounds. `make test` takes every method, every pair of a kind with clients, tasks or
participation, and every kind with some methods; the slow tests take every method with every kind.
"""

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_fl.cli.main import main
from atlas_fl.methods.registry import METHODS, RULES
from tests.conftest import Tiny
from tests.models.tiny_vision import save_tiny
from tests.runs.conftest import saved_once
from tests.runs.reading import rows

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EVERY = (*RULES, *METHODS)
FACTORS = frozenset(
    {*(name for name, rule in RULES.items() if rule.in_factors), "fedavg_by_distance", "fedavg_of_others", "ifca"}
)
"""Rules that a user must ask for factors and one rank; their methods say so by themselves."""
TEXTS = {
    "classes": ("kind=text=text,label=label", "sort=text=text,label=label"),
    "numbers": ("rate=text=text,label=label,metric=pearson", "grade=text=text,label=label,metric=pearson"),
    "classes and numbers": ("kind=text=text,label=label", "rate=text=text,label=label,metric=pearson"),
    "several labels": ("tags=text=text,label=tags,multi=semicolon", "marks=text=text,label=marks,multi=pipe"),
    "texts": ("next=text=ask,target=answer", "tell=target=text"),
    "texts and classes": ("next=text=ask,target=answer", "kind=text=text,label=label"),
    "images": ("digits", "pictures"),
}
"""Of each kind of tasks two: a file and its columns, or tasks of images."""
ADAPTERS = ("--ranks", "4", "--candidates", "2", "4", "--fingerprint-steps", "2", "--fingerprint-batches", "2")
ADAPTERS = (*ADAPTERS, "--sketch-dim", "64")
WRITES = (*ADAPTERS, "--rouge-examples", "2", "--new-tokens", "2")
SEEN = ("--image-size", "16")


@dataclass(frozen=True)
class Kind:
    """What is trained."""

    tasks: str
    model: str
    words: Sequence[str] = ADAPTERS


KINDS: Mapping[str, Kind] = {
    "a head of one layer": Kind("classes", "bert"),
    "a head of two layers": Kind("classes", "distilbert"),
    "another head of two layers": Kind("classes", "roberta"),
    "a score of the last token": Kind("classes", "llama"),
    "a score of another decoder": Kind("classes and numbers", "gpt2"),
    "numbers": Kind("numbers", "bert"),
    "numbers by two layers": Kind("numbers", "roberta"),
    "classes and numbers by two layers": Kind("classes and numbers", "distilbert"),
    "several labels": Kind("several labels", "roberta"),
    "no head": Kind("texts", "gpt2", WRITES),
    "no head, and one": Kind("texts and classes", "llama", WRITES),
    "adapters on images": Kind("images", "vit", (*SEEN, "--tune", "lora", *ADAPTERS)),
    "whole image models": Kind("images", "vit", (*SEEN, "--tune", "whole", "--local-steps", "2")),
    "whole text models": Kind("classes", "bert", ("--trainable", "full")),
    "whole models with heads of two layers": Kind("classes", "distilbert", ("--trainable", "full")),
    "whole models of several labels": Kind("several labels", "bert", ("--trainable", "full")),
}


@dataclass(frozen=True)
class Condition:
    """Who trains what, and how many of them."""

    clients: str
    participation: float
    tasks: int


CLIENTS = {"one": 1, "two": 2, "four": 4, "late": 3}
"""Clients of a task; late: the second one comes before round two."""
CONDITIONS = tuple(Condition(*one) for one in itertools.product(CLIENTS, (0.25, 0.5), (1, 2)))
SOME = (0, 5, 10, 15, 3, 9, 12)
"""Places of conditions in which each of the clients, of the shares and of the numbers of tasks occurs."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of words with classes, numbers and texts, and pictures of two classes."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(3)
    texts = [[f"w{draw.randrange(40)}" for _ in range(draw.randrange(3, 8))] for _ in range(120)]
    numbers = [int(words[0][1:]) for words in texts]
    tables = {
        "kind": [{"text": " ".join(words), "label": "high" if n > 19 else "low"} for words, n in zip(texts, numbers)],
        "sort": [{"text": " ".join(words), "label": "abc"[n % 3]} for words, n in zip(texts, numbers)],
        "rate": [{"text": " ".join(words), "label": n / 7 + 0.01} for words, n in zip(texts, numbers)],
        "grade": [{"text": " ".join(words), "label": n / 5 + 0.013} for words, n in zip(texts, numbers)],
        "tags": [
            {"text": " ".join(words), "tags": ";".join(tag for k, tag in enumerate("abc") if n >> k & 1)}
            for words, n in zip(texts, numbers)
        ],
        "marks": [
            {"text": " ".join(words), "marks": "|".join(mark for k, mark in enumerate("xy") if n % (k + 2))}
            for words, n in zip(texts, numbers)
        ],
        "next": [{"ask": " ".join(words), "answer": f"{words[-1]} {words[0]}"} for words in texts],
        "tell": [{"text": " ".join(words)} for words in texts],
    }
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    pixels = np.random.default_rng(0).integers(0, 255, (2, 50, 8, 8, 3), dtype=np.uint8)
    for name, images in zip("ab", pixels):
        (folder / "pictures" / name).mkdir(parents=True)
        for index, image in enumerate(images):
            Image.fromarray(image).save(folder / "pictures" / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def model_of(
    tiny_of: Callable[[str], Tiny], writer_of: Callable[[str], Tiny], shared_folder: Path
) -> Callable[[Kind], Path]:
    """The folder of a kind's tiny model."""

    def folder(kind: Kind) -> Path:
        if kind.tasks == "images":
            return saved_once(shared_folder / "tiny-vit-of-three-blocks", save_tiny)
        return (writer_of if kind.tasks.startswith("texts") else tiny_of)(kind.model).path

    return folder


def command(method: str, kind: Kind, condition: Condition, *, model: Path, data: Path, runs: Path) -> list[str]:
    """The words of `atlas run`."""
    definitions = TEXTS[kind.tasks][: condition.tasks]
    names = [definition.partition("=")[0] for definition in definitions]
    words = ["run", "--strategy", method, "--model", str(model), "--runs-dir", str(runs), "--name", "run"]
    words += ["--rounds", "3", "--participation", str(condition.participation), "--eval-every", "2", "--lr", "0.01"]
    words += ["--clients-per-task", str(CLIENTS[condition.clients]), "--samples", "8", "--batch-size", "4"]
    words += ["--validation-samples", "4", "--test-samples", "4", "--tasks", *names]
    if kind.tasks == "images":
        words += ["--task", f"pictures={data / 'pictures'}"] if condition.tasks > 1 else []
    else:
        columns = [definition.partition("=")[2] for definition in definitions]
        for name, column in zip(names, columns, strict=True):
            words += ["--task", f"{name}={data / name}.csv,{column}"]
        words += ["--max-length", "16"]
    if method in FACTORS:
        words += ["--space", "factors", "--share", "A", "B", "head"]
    words += ["--proximal-mu", "0.1"] if method == "fedavg_dynamic" else []
    words += ["--arrive", f"{names[0]}-1=2"] if condition.clients == "late" else []
    of_kind = list(kind.words)
    if method == "hsplitlora" and "--ranks" in of_kind:  # it chooses ranks by a budget
        del of_kind[of_kind.index("--ranks") : of_kind.index("--ranks") + 2]
    return [*words, *of_kind]


def fault_of(words: Sequence[str], runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with this run; empty where it ends with finite losses or is refused in one line up front."""
    capsys.readouterr()  # what making the model said
    code, folder = main(words), runs / "run"
    error = capsys.readouterr().err
    has_rows = (folder / "metrics.jsonl").exists() and bool(rows(folder))
    if code == 2:
        is_line = error.startswith("atlas: ") and error.count("\n") == 1 and "--" in error
        return "" if is_line and not has_rows else f"refused by {error!r}, rows were written: {has_rows}"
    if code != 0:
        return f"ended with {code}: {error}"
    found = rows(folder)
    events = [row for row in found if row.get("event") in ("refused", "restored")]
    losses = [row for row in found if "split" in row]
    if events or not losses or not all(math.isfinite(float(str(row.get("loss", "nan")))) for row in losses):
        return json.dumps(events[:1] or losses[:1])
    return ""


Cases = Sequence[tuple[str, Condition]]


def faults_of(
    cases: Cases, kind: Kind, *, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The faults of these runs, each with its command."""
    faults = []
    for index, (method, condition) in enumerate(cases):
        runs = tmp_path / str(index)
        words = command(method, kind, condition, model=model, data=data, runs=runs)
        if fault := fault_of(words, runs, capsys):
            faults.append(f"atlas {' '.join(words)}: {fault}")
    return faults


def some_cases(kind: str) -> Cases:
    """Six methods of a kind, other ones of each kind, so that all occur, under as many conditions."""
    place = list(KINDS).index(kind)
    methods = [EVERY[(place + len(KINDS) * step) % len(EVERY)] for step in range(len(SOME))]
    return [(method, CONDITIONS[one ^ place]) for method, one in zip(methods, SOME, strict=True)]


def test_every_method_and_every_pair_of_conditions_is_among_the_quick_runs() -> None:
    runs = [(method, kind, condition) for kind in KINDS for method, condition in some_cases(kind)]
    assert {method for method, _, _ in runs} == set(EVERY)
    for kind in KINDS:
        own = [condition for _, other, condition in runs if other == kind]
        assert {one.clients for one in own} == set(CLIENTS)
        assert {one.participation for one in own} == {0.25, 0.5}
        assert {one.tasks for one in own} == {1, 2}
    assert {condition for _, _, condition in runs} == set(CONDITIONS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_method_ends_with_finite_losses_or_is_refused_up_front(
    kind: str, data: Path, model_of: Callable[[Kind], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = KINDS[kind]
    places = {"model": model_of(chosen), "data": data, "tmp_path": tmp_path, "capsys": capsys}
    assert faults_of(some_cases(kind), chosen, **places) == []


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
def test_so_does_a_run_of_every_method_with_every_kind(
    kind: str, data: Path, model_of: Callable[[Kind], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, shift = KINDS[kind], list(KINDS).index(kind)
    # Seven is prime to sixteen: neighbours in the table differ in all conditions.
    cases = [(method, CONDITIONS[(7 * place + shift) % len(CONDITIONS)]) for place, method in enumerate(EVERY)]
    places = {"model": model_of(chosen), "data": data, "tmp_path": tmp_path, "capsys": capsys}
    assert faults_of(cases, chosen, **places) == []


STATEFUL = ("scaffold", "feddyn", "fedpac", "pfedgraph", "cfl", "linear_probe", "fedrep")
"""Methods that fail where a task, or a head, is not there when they look for it; some did."""


@pytest.mark.slow
@pytest.mark.parametrize("method", STATEFUL)
def test_a_method_meets_a_task_without_a_head_or_a_control(
    method: str, data: Path, model_of: Callable[[Kind], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("a score of another decoder", "no head, and one"):
        chosen = KINDS[kind]
        cases = [(method, Condition("one", 0.5, 2)), (method, Condition("two", 0.25, 2))]
        places = {"model": model_of(chosen), "data": data, "tmp_path": tmp_path / kind, "capsys": capsys}
        assert faults_of(cases, chosen, **places) == []
