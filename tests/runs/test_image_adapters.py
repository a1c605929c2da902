"""Runs of adapters on images: all phases, records, resume, audit and export are those of texts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageClassification

from atlas_fl.audit.check import audit_run
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.deployment.server import check_served
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.models.vision import preprocess
from atlas_fl.planning.plan import Plan
from atlas_fl.planning.planner import make_plan, measure_leakage
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import train_options
from atlas_fl.storage.jsonl import read_json
from tests.models.tiny_vision import save_tiny
from tests.runs.finished import Make
from tests.runs.reading import rows, same_tensors, state
from tests.runs.sessions import check_same_runs, in_sessions
from tests.runs.workers import in_threads

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Two clients of the digits and two of a folder of stripes; keywords set single settings by their flat names."""
    folder = tmp_path_factory.mktemp("images")
    model, stripes = save_tiny(folder / "tiny-dinov2", "dinov2"), _stripes(folder / "stripes")
    base = with_values(
        find_preset("vision-lora"),
        {
            **{"model": str(model), "image_size": 16, "tasks": "digits", "task": f"stripes={stripes}"},
            **{"clients_per_task": 2, "samples": 24, "validation_samples": 8, "test_samples": 10, "rounds": 3},
            **{"batch_size": 8, "lr": 5e-3, "clusters": "oracle", "fingerprint_steps": 2, "sketch_dim": 64},
            **{
                "candidates": "2+4+8",
                "audit": True,
                "alone": "none",
                "runs_dir": str(folder / "runs"),
                "crop": 1,
                "flip": True,
            },
        },
    )
    return lambda **values: with_values(base, values)


def _stripes(folder: Path, *, each: int = 160) -> Path:
    """Three classes of coloured stripes, 12 pixels wide: lying, standing, and both."""
    source = np.random.default_rng(0)
    for label in range(3):
        (folder / f"class-{label}").mkdir(parents=True)
        for number in range(each):
            wave = np.sin(np.arange(12) * source.uniform(1, 2) + source.uniform(0, 6))
            lying, standing = np.tile(wave[:, None], (1, 12)), np.tile(wave, (12, 1))
            image = 127 + 60 * (lying, standing, lying + standing)[label] + source.normal(0, 4, (12, 12))
            coloured = (image.clip(0, 255)[..., None] * source.uniform(0.5, 1, 3)).astype(np.uint8)
            Image.fromarray(coloured).save(folder / f"class-{label}" / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def whole(make: Make) -> RunResult:
    return run_config(make(name="whole"))


@pytest.mark.slow
def test_clusters_ranks_graph_and_adapters_of_images_go_through_the_audit(whole: RunResult) -> None:
    assert whole.complete and audit_run(whole.folder).ok
    assert {row["kind"] for row in rows(whole.folder, "ledger")} == {
        "control",
        "fingerprint",
        "adapter",
        "importance",
        "head",
        "halves",
    }
    trained = state(whole.folder)
    names = {name.split("/")[-1] for name in trained}
    assert {
        f"encoder.layer.{block}.attention.{module}.lora_A" for block in range(3) for module in ("q_proj", "v_proj")
    } < names
    assert {"head.classifier.weight", "head.classifier.bias"} < names
    assert not any("projection" in name or "layer_scale" in name for name in names), "the model itself is frozen"
    scored = [row for row in rows(whole.folder) if row["round"] == 3 and row.get("split") == "test"]
    assert {row["client"] for row in scored} == {"digits-0", "digits-1", "stripes-0", "stripes-1"}


@pytest.mark.slow
def test_a_run_in_sessions_ends_in_the_same_bits(make: Make, whole: RunResult) -> None:
    parts = in_sessions(make(name="parts", max_rounds=1))
    check_same_runs(whole.folder, parts.folder)


@pytest.mark.slow
def test_accuracy_by_class_adds_up_to_the_accuracy(whole: RunResult) -> None:
    for task in ("digits", "stripes"):
        scores = whole.summary["tasks"][task]
        classes, test = scores["classes"], scores["final"]["test"]
        assert sum(own["examples"] for own in classes.values()) == 2 * 10
        hits = sum(own["examples"] * own.get("accuracy", 0.0) for own in classes.values())
        assert hits / 20 == pytest.approx(test["accuracy"]), "both clients have as many test images"
    counted = {row.get("split") for row in rows(whole.folder) if "classes" in row}
    assert counted == {"test"}


@pytest.mark.slow
def test_workers_that_share_the_weights_make_the_same_run(make: Make, whole: RunResult) -> None:
    found = run_config(make(name="workers"), backend=in_threads(2))
    assert same_tensors(state(whole.folder), state(found.folder))
    assert rows(whole.folder) == rows(found.folder)


@pytest.mark.slow
def test_the_adapters_load_onto_the_stock_classifier_and_score_as_the_run_says(
    make: Make, whole: RunResult, tmp_path: Path
) -> None:
    config = make(name="whole")
    assembly = assemble(config)
    vision, client = assembly.site.backbone.vision, assembly.clients[2]
    assert vision is not None and client.name == "stripes-0"
    for folder in (
        whole.folder / "adapters/stripes-0",
        export_client(whole.folder, client="stripes-0", to=tmp_path / "own"),
    ):
        stock = AutoModelForImageClassification.from_pretrained(
            config.model.model, num_labels=3, ignore_mismatched_sizes=True
        )
        model = PeftModel.from_pretrained(stock, str(folder)).eval()
        with torch.no_grad():
            said = model(preprocess(vision, client.test.pixels)).logits.argmax(-1).numpy()
        (row,) = [
            row
            for row in rows(whole.folder)
            if (row.get("client"), row["round"], row.get("split")) == ("stripes-0", 3, "test")
        ]
        assert float((said == client.test.label).mean()) == pytest.approx(row["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("fingerprint", ["fisher", "delta"])
def test_fingerprints_tell_two_image_tasks_apart(make: Make, fingerprint: str) -> None:
    settings = {"samples": 100, "lr": 1e-2, "fingerprint_steps": 60, "sketch_dim": 1024, "similarity_threshold": 0.5}
    plan = make_plan(make(clusters="auto", fingerprint=fingerprint, **settings))
    assert [client.cluster for client in plan.clients] == [0, 0, 1, 1]
    assert plan.adjacency[0, 1] > 0 == plan.adjacency[0, 2]


@pytest.mark.slow
def test_a_round_has_as_many_steps_as_asked_for_and_the_plan_counts_them(make: Make, whole: RunResult) -> None:
    """24 images in batches of 8 are three steps a pass: seven are two passes and one step more, 56 images of 24."""
    options = train_options(make(local_steps=7), with_images=True)
    assert (options.max_steps, options.epochs) == (7, 7)
    result = run_config(make(name="steps", local_steps=7, rounds=1, audit=False))
    assert {row["steps"] for row in rows(result.folder) if row.get("split") == "train"} == {7.0}
    one, more = (
        Plan.from_json(read_json(folder / "plan.json")).clients[0].predicted["seconds"]
        for folder in (whole.folder, result.folder)
    )
    assert more > one


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"split": "1"}, "--split cuts models of texts, and these tasks have images"),
        ({"momentum": 0.5}, "--momentum is for SGD, and these clients train by AdamW"),
        ({"frozen_blocks": 1}, "--frozen-blocks is for whole models"),
        ({"mask": "random"}, "--mask is for whole models"),
        ({"tune": "whole", "strategy": "fedavg"}, "--candidates is for adapters.*--trainable lora"),
        ({"trainable": "full"}, "--tune lora and --trainable full contradict each other"),
        ({"tasks": "movie", "task": "none", "model": "minilm"}, "--tune is for image tasks"),
        ({"tasks": "movie"}, "images .stripes. and texts .movie."),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(make: Make, values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        run_config(make(name="bad", **values))
    assert "\n" not in str(caught.value)


def test_adapters_on_images_are_served_and_not_measured_for_leakage(make: Make, tmp_path: Path) -> None:
    check_served(make(share="A+head", space="factors"), ServerOptions(certs=tmp_path))
    with pytest.raises(ConfigError, match=r"--share A head keeps parts .* whole models travel whole; share A B head"):
        check_served(
            with_values(find_preset("vision-quick"), {"share": "A+head", "space": "factors"}),
            ServerOptions(certs=tmp_path),
        )
    with pytest.raises(ConfigError, match="digits, stripes has images, whose models are not cut"):
        measure_leakage(make())
