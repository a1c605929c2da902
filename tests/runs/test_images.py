"""Runs on images: whole weights and masks through the same rounds, records, resume and audit as adapters on text."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

from atlas_fl.audit.check import audit_run
from atlas_fl.audit.run_files import read_audited
from atlas_fl.client.job import Job, image_tokens
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config, parse_config, to_toml, with_values
from atlas_fl.data.clients import ClientData
from atlas_fl.data.tables import SPLITS
from atlas_fl.data.task import Images
from atlas_fl.errors import BudgetError, CheckpointError, ConfigError, ModelError
from atlas_fl.events import Note, PhaseStarted
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.rounds import round_participants
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.models.vision import image_logits, preprocess
from atlas_fl.params import unflatten_by_client
from atlas_fl.planning.masks import fit_heads_and_mask
from atlas_fl.planning.planner import make_plan
from atlas_fl.report.figures import draw_all
from atlas_fl.report.tables import plan_tables
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import train_options
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import encoded_size
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import alter_tensors, passing_audit, rows, same_tensors, state
from tests.runs.resealing import with_new_digests
from tests.runs.sessions import check_same_runs, in_sessions

MASKS = ("least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random")


@pytest.fixture
def config(image_config: Make) -> Make:
    """Eight clients of the digits, half of them a round; keywords set single settings by their flat names."""
    return image_config


def starts(folder: Path, round: int) -> dict[str, dict[str, torch.Tensor]]:
    return unflatten_by_client(read_audited(folder / f"audit/round-{round:04d}/start.safetensors"))


def test_whole_models_go_through_the_same_rounds(config: Make) -> None:
    chosen = config()
    result = run_config(chosen)
    assert result.complete and audit_run(result.folder).ok
    names = list(starts(result.folder, 0))
    for number in (1, 2):
        sampled = {
            row["client"] for row in rows(result.folder) if row["round"] == number and row.get("split") == "train"
        }
        assert sampled == set(round_participants(chosen, names, round=number)) and len(sampled) == 4
        before, after = starts(result.folder, number - 1), starts(result.folder, number)
        assert len({tuple(t.double().sum().item() for t in params.values()) for params in after.values()}) == 1, (
            "one model"
        )
        assert not any(torch.equal(before[names[0]][key], after[names[0]][key]) for key in before[names[0]])


@pytest.mark.parametrize("place", ["central", "iid", "by class"])
def test_a_mask_holds_in_one_place_and_over_clients_alike(place: str, config: Make) -> None:
    chosen = {"central": {"clients_per_task": 1, "participation": 1, "momentum": 0.9, "weight_decay": 1e-4}}
    chosen["by class"] = {"nc": "2", "samples": 20}
    own = chosen.get(place, {})
    result = run_config(config(**own, rounds=2, local_steps=2, mask="random", sparsity=0.9))
    passing_audit(result.folder)
    mask = load_file(RunFolder(result.folder).mask)
    first, last = starts(result.folder, 0), starts(result.folder, 2)
    moved = set[str]()
    for name, model in last.items():
        moved |= {key for key in model if not torch.equal(model[key], first[name][key])}
        for key in mask.keys() & model.keys():
            assert torch.equal(model[key][~mask[key]], first[name][key][~mask[key]])
    kept = sum(int(own.sum()) for own in mask.values())
    assert moved and 0 < kept < 0.11 * sum(own.numel() for own in mask.values())


def test_a_device_that_holds_no_model_is_refused_before_anything_is_fitted(config: Make) -> None:
    tiny = "tiny=memory_gb=0.0001,gflops=50,up_mbps=5,down_mbps=20,latency_ms=60,max_rank=8"
    told = list[object]()
    with pytest.raises(BudgetError, match=r"tiny has 0\.1 MB of memory; weights, gradients and momentum of digits-1"):
        make_plan(config(devices=("laptop_8gb", "tiny"), device=(tiny,)), on_event=told.append)
    assert [event.name for event in told if isinstance(event, PhaseStarted)] == ["loading"]


@pytest.mark.slow
def test_accuracy_by_class_adds_up_to_the_accuracy_and_is_drawn(config: Make) -> None:
    result = run_config(config(rounds=1, audit=False))
    classes, test = result.summary["tasks"]["digits"]["classes"], result.summary["overall"]["final"]["test"]
    assert list(classes) == [str(digit) for digit in range(10)]
    assert sum(own["examples"] for own in classes.values()) == 8 * 20
    hits = sum(own["examples"] * own.get("accuracy", 0.0) for own in classes.values())
    assert hits / 160 == pytest.approx(test["accuracy"]), "every client has as many test images"
    chosen = config(rounds=1, audit=False)
    assembly = assemble(chosen)
    stored = unflatten_by_client({key.removeprefix("strategy/"): t for key, t in state(result.folder, round=1).items()})
    held = stored["digits-0"]
    for digit in (0, 7):
        pixels = np.concatenate([own.test.pixels[own.test.label == digit] for own in assembly.clients])
        logits = image_logits(assembly.site.vision, held, preprocess(assembly.site.vision, pixels))
        share = float((logits.argmax(1) == digit).float().mean())
        found = classes[str(digit)]
        assert (found["examples"], found["accuracy"]) == (len(pixels), pytest.approx(share))
        assert found["recall"] == found["accuracy"]
    assert result.folder / "figures/by-class.png" in draw_all(result.folder)


def test_the_federation_is_stored_once_where_all_hold_one_model(config: Make) -> None:
    result = run_config(config(audit=False, rounds=1))
    stored = unflatten_by_client({key.removeprefix("strategy/"): t for key, t in state(result.folder, round=1).items()})
    assert list(stored) == ["digits-0"]
    assert [path.name for path in (result.folder / "models").iterdir()] == ["digits-0"]


@pytest.mark.slow
def test_updates_that_lie_in_files_make_the_same_run(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    held = run_config(config(name="held"))
    monkeypatch.setattr("atlas_fl.runtime.local.MAX_BYTES_IN_MEMORY", 0)
    spilled = run_config(config(name="spilled"))
    assert same_tensors(state(held.folder), state(spilled.folder))
    assert rows(held.folder) == rows(spilled.folder)


def test_the_audit_keeps_one_model_once_and_finds_it_altered(config: Make) -> None:
    """Eight clients that hold one model leave the bytes of one, and are eight to whoever reads it."""
    result = run_config(config(rounds=1))
    file = result.folder / "audit/round-0001/start.safetensors"
    held = starts(result.folder, 1)
    assert len(held) == 8 and all(same_tensors(held["digits-0"], one) for one in held.values())
    one = encoded_size(held["digits-0"])
    assert one < file.stat().st_size < 1.1 * one
    alter_tensors(file, lambda kept: kept["digits-0/head.bias"][3].add_(0.01))
    found = {(row.check, row.client) for row in audit_run(result.folder).failures}
    assert found == {("files", "")} | {("mixed", name) for name in held}


def test_a_central_run_stops_where_it_is_no_better_and_its_best_round_can_be_exported(config: Make, tmp_path) -> None:
    chosen = config(
        **{"clients_per_task": 1, "samples": 200, "strategy": "local", "participation": 1, "eval_every": 1},
        **{"rounds": 12, "lr": 0.3, "clip": 0, "patience": 2, "keep_best": 1, "keep_checkpoints": 1},
    )
    result = run_config(chosen)
    best, last = result.summary["best"]["round"], result.summary["stopped"]["round"]
    assert best == last - 2 < 12
    held = sorted(path.name for path in (result.folder / "checkpoints").glob("round-*"))
    assert held == [f"round-{best:04d}", f"round-{last:04d}"]
    assembly = assemble(chosen)
    pixels = preprocess(assembly.site.vision, assembly.clients[0].test.pixels)
    for round, number in ((None, last), ("best", best), (str(best), best)):
        folder = export_client(result.folder, client="0", to=tmp_path / f"model-{round}", round=round)
        stock = AutoModelForImageClassification.from_pretrained(folder).eval()
        wanted = image_logits(assembly.site.vision, starts(result.folder, number)["digits-0"], pixels)
        with torch.no_grad():
            torch.testing.assert_close(stock(pixels).logits, wanted, rtol=1e-4, atol=1e-4)
    passing_audit(result.folder)


def test_the_plan_shows_the_mask_and_no_ranks(config: Make) -> None:
    tables = plan_tables(make_plan(config(mask="lowest_magnitude", mask_scope="layer")).to_json())
    titles = [str(table.title) for table in tables]
    assert any(title.startswith("Mask (lowest_magnitude, sparsity 0.9)") for title in titles)
    assert not any("LoRA ranks" in title or "Clusters" in title for title in titles)


def test_the_plan_counts_the_parameters(config: Make) -> None:
    # a block of width 32: attention 4 (32^2 + 32), two layers 2 * 32 * 64 + 64 + 32, two norms 4 * 32
    block = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    embeddings = 32 + 5 * 32 + 32 * 3 * 8 * 8 + 32  # token, positions, patches
    total, head = embeddings + 2 * block + 2 * 32, 10 * 33
    notes = make_plan(config(frozen_blocks=1)).notes
    said = notes[-1]
    assert said == f"digits: {total + head:,} parameters, {head:,} of them in the head; {block + 64 + head:,} train"
    masked = make_plan(config(mask="random")).notes
    assert [note for note in masked if note.endswith(" train where no mask holds them")]


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"share": "head"}, {"share": "A+B"}, {"mask": "random"}])
def test_the_plan_has_the_bytes_of_a_round(config: Make, values: dict[str, str]) -> None:
    folder = run_config(config(rounds=2, participation=1.0, **values)).folder
    plan = make_plan(config(participation=1.0, **values))
    predicted = {client.name: client.predicted["up_bytes"] for client in plan.clients}
    sent = Counter[str]()
    for row in rows(folder, "ledger"):
        if row["round"] == 2 and row["direction"] == "up" and row["kind"] in ("weights", "head"):
            sent[row["client"]] += row["bytes"]
    assert sent == predicted


def test_what_the_plan_notes_is_told_and_logged_and_says_who_has_what(config: Make) -> None:
    told = list[object]()
    result = run_config(config(nc="2", samples=20, sparsity=0.5, rounds=1, audit=False), on_event=told.append)
    wanted = (
        "digits: 160 training examples over 8 clients, 20 each (",
        "without --mask there is no mask, and --sparsity 0.5 does nothing",
    )
    notes = [event.text for event in told if isinstance(event, Note)]
    log = (result.folder / "log.txt").read_text()
    for line in wanted:
        assert any(note.startswith(line) for note in notes) and line in log


@pytest.mark.slow
def test_a_run_on_whole_models_has_no_figure_of_adapters(config: Make) -> None:
    drawn = {path.stem for path in draw_all(run_config(config(rounds=1, mask="random", audit=False)).folder)}
    assert drawn == {"convergence", "scores", "bytes", "classes", "by-class", "mask"}


def test_a_mask_of_another_model_is_refused_before_a_head_is_fitted_and_leaves_nothing(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mask.safetensors"
    save_file({"w": torch.ones(3, dtype=torch.bool)}, file)
    monkeypatch.setattr("atlas_fl.planning.masks.fit_heads", lambda *_: pytest.fail("a pass over all images"))
    message = r"--mask-file .*mask.safetensors fits another model: the mask has none for"
    with pytest.raises(ModelError, match=message) as caught:
        run_config(config(mask_file=str(file)))
    assert "\n" not in str(caught.value) and not (tmp_path / "runs/run").exists()
    with pytest.raises(CheckpointError, match=r"no file .*nowhere.safetensors"):
        run_config(config(mask_file=str(tmp_path / "nowhere.safetensors")))
    with pytest.raises(ConfigError, match=r"sparsity 0.999999 lets none of [\d,]+ weights move; give a smaller one"):
        make_plan(config(mask="lowest_magnitude", sparsity=0.999999))


def test_an_exported_model_gives_the_same_logits_in_stock_transformers(config: Make) -> None:
    chosen = config(rounds=1, frozen_blocks=1)
    folder = run_config(chosen).folder
    assembly = assemble(chosen)
    pixels = preprocess(assembly.site.vision, assembly.clients[0].test.pixels)
    wanted = image_logits(assembly.site.vision, starts(folder, 1)["digits-0"], pixels)
    stock = AutoModelForImageClassification.from_pretrained(folder / "models/digits-0").eval()
    with torch.no_grad():
        torch.testing.assert_close(stock(pixels).logits, wanted, rtol=1e-4, atol=1e-5)
    assert stock.config.id2label[3] == "3"


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["none", "least_sensitive"])
def test_a_run_in_sessions_ends_in_the_same_bits(config: Make, mask: str) -> None:
    settings = {"mask": mask, "dropout": 0.2, "schedule": "cosine", "label_smoothing": 0.1}
    whole = run_config(config(name="whole", **settings))
    parts = in_sessions(config(name="parts", max_rounds=1, **settings))
    check_same_runs(whole.folder, parts.folder)
    passing_audit(parts.folder)
    for kept in ("start", "trained"):
        name = f"audit/round-0002/{kept}.safetensors"
        assert (whole.folder / name).read_bytes() == (parts.folder / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_frozen_weights_keep_every_bit_and_only_kept_ones_travel(config: Make, mask: str) -> None:
    result = run_config(config(mask=mask, weight_decay=0.01, nesterov=True))
    masks = load_file(result.folder / "mask.safetensors")
    first, last = starts(result.folder, 0)["digits-0"], starts(result.folder, 2)["digits-0"]
    body = {key: own for key, own in masks.items() if not key.startswith("head.")}
    total, kept = sum(own.numel() for own in body.values()), sum(int(own.sum()) for own in body.values())
    assert kept == round(0.1 * total)
    for key, own in masks.items():
        assert torch.equal(first[key][~own], last[key][~own]), key
    assert any(not torch.equal(first[key], last[key]) for key in masks)
    dense = encoded_size({key: t for key, t in first.items() if not key.startswith("head.")})
    sent = [row for row in rows(result.folder, "ledger") if row["round"] > 1]
    assert {row["kind"] for row in sent} == {"weights"}
    assert max(row["bytes"] for row in sent) <= 0.105 * dense
    ways = [(row["kind"], row["direction"]) for row in rows(result.folder, "ledger")]
    assert ways.count(("mask", "down")) == 8
    report = audit_run(result.folder)
    assert report.ok and "frozen" in {row.check for row in report.rows}


@pytest.mark.slow
def test_a_mask_out_of_a_file_trains_what_the_run_that_made_it_trained(config: Make) -> None:
    made = run_config(config(mask="lowest_magnitude", name="made", rounds=1))
    file = made.folder / "mask.safetensors"
    given = run_config(config(mask_file=str(file), name="given", rounds=1))
    assert same_tensors(state(made.folder, round=1), state(given.folder, round=1))
    assert same_tensors(load_file(file), load_file(given.folder / "mask.safetensors"))
    assert rows(made.folder, "ledger") == rows(given.folder, "ledger")
    passing_audit(given.folder)
    sparse = make_plan(config(mask_file=str(file))).to_json()["sparse"]
    assert sparse["mask"] == "from a file" and sparse["sparsity"] == pytest.approx(0.9, abs=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_the_mask_it_was_begun_with_or_not_at_all(config: Make, tmp_path: Path) -> None:
    made = run_config(config(mask="lowest_magnitude", name="made", rounds=1, audit=False))
    file = tmp_path / "mask.safetensors"
    file.write_bytes(good := (made.folder / "mask.safetensors").read_bytes())
    chosen = config(mask_file=str(file), name=None, rounds=2, audit=False)
    begun = run_config(with_values(chosen, {"max_rounds": 1}))
    masks = load_file(file)
    masks["embeddings.cls_token"] = ~masks["embeddings.cls_token"]
    save_file(masks, file)
    with pytest.raises(ConfigError, match=r"mask.safetensors was altered: .*restore the file, or begin another run"):
        resume_run(begun.folder)
    other = run_config(with_values(chosen, {"max_rounds": 1}), resume=True)
    assert other.folder != begun.folder, "an altered file makes another run"
    with pytest.raises(CheckpointError, match=rf"begun with mask_file = '{file}#sha256=\w+', not '{file}#sha256="):
        run_config(with_values(chosen, {"name": begun.folder.name}), resume=True)
    file.write_bytes(good)
    assert resume_run(begun.folder).complete
    file.unlink()
    assert resume_run(other.folder).complete, "a run has a copy of its own"


def test_the_audit_finds_a_frozen_weight_that_moved(config: Make, finished: FinishedRuns) -> None:
    result = finished(config(mask="random", rounds=1))
    file = result.folder / "mask.safetensors"
    masks = load_file(file)
    save_file({key: ~own for key, own in masks.items()}, file)
    assert [row.detail[:28] for row in audit_run(result.folder).failures if row.check == "files"] == [
        "mask.safetensors is damaged:"
    ]
    failures = audit_run(with_new_digests(result.folder)).failures
    assert {row.check for row in failures} == {"frozen"} and "frozen weights of" in failures[0].detail


def test_a_masked_run_without_its_mask_passes_no_audit(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(mask="random", rounds=1)).folder
    passing_audit(folder)
    (folder / "mask.safetensors").unlink()
    assert {row.check for row in audit_run(folder).failures} == {"files"}
    with pytest.raises(CheckpointError, match=r"mask.safetensors is missing; restore it"):
        audit_run(with_new_digests(folder))


def test_one_step_of_all_on_all_their_images_is_a_step_on_all_images_in_one_place(config: Make) -> None:
    """FedSGD: the weighted mean of the clients' steps is the step of the mean gradient (McMahan et al. 2017)."""
    assembly = assemble(config(partition="quantity"))
    sizes = [len(client.train) for client in assembly.clients]
    assert len(set(sizes)) > 1
    start = assembly.full_models()["digits-0"]
    steps = [
        train([Job(client=c.name, params=start, round=1, options=_one_step(len(c.train)))], assembly.site)[0]
        for c in assembly.clients
    ]
    mean = {key: sum(n * s.params[key].double() for n, s in zip(sizes, steps)) / sum(sizes) for key in start}
    central = _pooled(assembly.clients)
    site = replace(assembly.site, data={"all": image_tokens(central, length=1)})
    (wanted,) = train([Job(client="all", params=start, round=1, options=_one_step(len(central.train)))], site)
    for key in start:
        torch.testing.assert_close(mean[key].float(), wanted.params[key], rtol=1e-4, atol=1e-6)
        assert not torch.equal(start[key], wanted.params[key])


def test_the_head_does_not_know_how_many_clients_hold_the_images(config: Make) -> None:
    """A client with all images looks at all its validation images, not at a few, for the size of the head."""
    assembly = assemble(config(validation_samples=5))
    central = _pooled(assembly.clients)
    site = replace(assembly.site, data={"all": image_tokens(central, length=1)})
    alone = replace(assembly, clients=(central,), devices=assembly.devices[:1], site=site)
    both = (assembly, alone)
    dealt, pooled = (fit_heads_and_mask(one, LocalEngine(site=one.site), one.full_models())[0] for one in both)
    for key in ("head.weight", "head.bias"):
        torch.testing.assert_close(dealt[assembly.names[0]][key], pooled["all"][key], rtol=1e-4, atol=1e-5)


def _one_step(examples: int) -> TrainOptions:
    return TrainOptions(seed=0, max_steps=1, batch_size=examples, lr=0.1, optimizer="sgd", clip=0.0)


def _pooled(clients: tuple[ClientData, ...]) -> ClientData:
    first = clients[0]
    splits = {
        split: Images(
            pixels=np.concatenate([getattr(client, split).pixels for client in clients]),
            label=np.concatenate([getattr(client, split).label for client in clients]),
        )
        for split in SPLITS
    }
    return ClientData(name="all", task=first.task, **splits)


def test_every_client_has_as_many_classes_as_asked_for(config: Make) -> None:
    assembly = assemble(config(nc="2"))
    assert all(len(np.unique(client.train.label)) == 2 for client in assembly.clients)
    held = {int(label) for client in assembly.clients for label in client.train.label}
    assert held == set(range(10)), "eight clients of two classes hold all ten"


@pytest.mark.parametrize("nc", ["iid", "3"])
def test_a_data_set_is_dealt_out_whole_where_no_number_is_given(config: Make, nc: str) -> None:
    every = dict.fromkeys(("samples", "validation_samples", "test_samples"))
    chosen = config(nc=nc, clients_per_task=10, **every)
    clients = assemble(chosen).clients
    for split, count in (("train", 837), ("validation", 417), ("test", 543)):
        rows = np.concatenate([getattr(client, split).pixels.reshape(-1, 64) for client in clients])
        assert len(np.unique(rows, axis=0)) == len(rows) == count, "all of them, each once"
    sizes = [len(client.train) for client in clients]
    assert max(sizes) - min(sizes) <= 1
    assert parse_config(to_toml(chosen), origin="config.toml").data.samples is None


def test_the_share_of_validation_is_a_setting(config: Make) -> None:
    # 1,797 digits without duplicates, of which 130 of 430 are the test and a hundredth of the rest is validation
    rest = 1797 - 1797 * 130 // 430
    few = config(validation_share=0.01, validation_samples=rest // 100, clients_per_task=1)
    (client,) = assemble(few).clients
    assert len(client.validation) == rest // 100 == 12
    (client,) = assemble(config(validation_share=0.01, validation_samples=13, clients_per_task=1)).clients
    assert "a client gets 12 validation examples and not 13 (--validation-samples)" in client.notes[-1]


@pytest.mark.parametrize("setting", [{"crop": 1}, {"flip": True}, {"dropout": 0.3}, {"label_smoothing": 0.2}])
def test_what_is_drawn_for_a_step_is_that_of_the_client_and_the_step(config: Make, setting: dict[str, object]) -> None:
    plain, changed = config(), config(**setting)
    assembly = assemble(plain)
    name, start = "digits-0", assembly.full_models()["digits-0"]

    def trained(chosen: Config, round: int) -> torch.Tensor:
        job = Job(client=name, params=start, round=round, options=train_options(chosen, with_images=True))
        return train([job], assembly.site)[0].params["head.weight"]

    assert torch.equal(trained(changed, 1), trained(changed, 1))
    assert not torch.equal(trained(changed, 1), trained(plain, 1))
