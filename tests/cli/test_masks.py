"""`atlas masks` on runs that are only config, plan and mask."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from atlas_fl.config import to_toml, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.storage.jsonl import write_json
from atlas_fl.storage.tensors import read_tensors, write_tensors


def mask(bits: str) -> dict[str, Tensor]:
    """Two blocks of four weights each, and a head that stays."""
    kept = torch.tensor([bit == "1" for bit in bits])
    head = {"head.weight": torch.zeros(2, dtype=torch.bool)}
    return {"encoder.layer.0.w": kept[:4], "encoder.layer.1.w": kept[4:], **head}


@pytest.fixture
def runs(tmp_path) -> Path:
    """Three runs under masks, and one without."""
    masks = {"42": mask("11110000"), "123": mask("11000011"), "456": mask("00001111")}
    for seed, own in masks.items():
        leave(tmp_path / "runs" / f"run-{seed}", seed=seed, own=own)
    leave(tmp_path / "runs" / "dense", seed="42", own=None)
    return tmp_path / "runs"


def leave(folder: Path, *, seed: str, own: dict[str, Tensor] | None) -> None:
    folder.mkdir(parents=True)
    strategy = "none" if own is None else "random"
    config = with_values(find_preset("vision-quick"), {"seed": seed, "mask": strategy, "name": folder.name})
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    write_json(folder / "plan.json", {})
    if own is not None:
        write_tensors(folder / "mask.safetensors", own)


@pytest.mark.slow
def test_masks_are_compared_drawn_and_merged(atlas, runs, tmp_path) -> None:
    to = tmp_path / "both.safetensors"
    words = ["masks", "run-42", "run-123", "run-456", "--runs-dir", str(runs)]
    said = atlas(*words, "--merge", "union", "--to", str(to))
    assert (said.code, said.err) == (0, "")
    # two of six by hand; the first and the last share none
    rows = [line.split() for line in said.out.splitlines() if " seed " in line]
    assert [row[1:] for row in rows] == [
        ["seed", "42", "4", "50.0%", "1.000", "0.333", "0.000"],
        ["seed", "123", "4", "50.0%", "0.333", "1.000", "0.333"],
        ["seed", "456", "4", "50.0%", "0.000", "0.333", "1.000"],
    ]
    for name in ("masks-density.png", "masks-overlap.png"):
        with Image.open(runs / name) as image:
            assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert "union of 3: 8 of 8 weights may move (100.0%)" in said.out and f"--mask-file {to}" in said.out
    assert all(own.all() for own in read_tensors(to).values()) and "head.weight" not in read_tensors(to)


@pytest.mark.slow
def test_one_mask_is_drawn_into_its_run_and_a_merged_file_is_a_mask_again(atlas, runs, tmp_path) -> None:
    assert atlas("masks", str(runs / "run-42")).code == 0
    assert [path.name for path in (runs / "run-42/figures").iterdir()] == ["masks-density.png"]
    to = tmp_path / "both.safetensors"
    words = ["masks", str(runs / "run-42"), str(runs / "run-123"), "--runs-dir", str(tmp_path)]
    assert atlas(*words, "--merge", "intersection", "--to", str(to)).code == 0
    said = atlas("masks", str(to))
    assert (said.code, said.err) == (0, "") and "25.0%" in said.out
    # once more, over what the command has written itself, and never over anything else
    assert atlas(*words, "--merge", "union", "--to", str(to)).code == 0
    assert not list(tmp_path.glob("*.kept-1"))
    for path in (to, tmp_path / "masks-density.png"):
        path.write_bytes(b"years of work")
    said = atlas(*words, "--merge", "union", "--to", str(to))
    assert said.code == 2 and "what lies there was not written by this command" in said.err
    assert to.read_bytes() == b"years of work"
    assert atlas(*words).code == 0
    assert (tmp_path / "masks-density.png.kept-1").read_bytes() == b"years of work"
    assert (tmp_path / "masks-density.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing: RUN|FILE ...; see `atlas masks --help`"),
        (["nowhere"], "not a run folder: nowhere;"),
        (["dense"], "was trained without a mask; give runs with --mask or --mask-file"),
        (["run-42", "--merge", "union"], "--merge says how masks become one and --to which file gets it"),
        (["run-42", "--merge", "mean", "--to", "x"], "--merge: 'mean' is not one of none, union, intersection"),
        (["run-42", "--merge", "union", "--to", "no/such/folder/x"], "--to is no/such/folder/x; allowed: a file in a"),
        (["run-42", "run-456", "--merge", "intersection", "--to", "x.safetensors"], "the intersection of these 2"),
        (["run-42", "OTHER"], "are masks of different models: the mask has none for 'encoder.layer.0.w'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_no_mask(
    atlas, runs: Path, tmp_path, monkeypatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tensors(tmp_path / "OTHER", {"w": torch.ones(3, dtype=torch.bool)})
    said = atlas("masks", *words, "--runs-dir", str(runs))
    assert said.code == 2 and message in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "x.safetensors").exists()
