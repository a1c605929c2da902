"""What cuts give away, through the public function, the command and a run that was asked to tell it."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from transformers import AutoModel

from atlas_fl.cli.main import main
from atlas_fl.config import to_toml
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.planning.leakage import leakage_of, most_looks
from atlas_fl.planning.planner import measure_leakage
from atlas_fl.setup.assembly import Assembly, assemble
from tests.runs.finished import Make

MARKS = (101, 102)  # [CLS] and [SEP] of the embedded tokenizer


def texts(assembly: Assembly, task: str, split: str) -> list[list[int]]:
    found: list[list[int]] = []
    for client in assembly.clients:
        if client.task.name == task:
            own: EncodedExamples = assembly.site.data[client.name].splits[split]  # type: ignore[index]
            found += [part.tolist() for part in np.split(own.ids, own.offsets[1:-1])]
    return found


def rows_of(assembly: Assembly, ids: list[list[int]], blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The stock model's hidden states after these blocks, one text at a time, and the tokens; the marks left out."""
    model = AutoModel.from_pretrained(assembly.config.model.model, local_files_only=True).eval()
    rows, tokens = [], []
    for text in ids:
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[blocks][0]
        kept = [place for place, token in enumerate(text) if token not in MARKS]
        rows.append(states[kept].numpy())
        tokens += [text[place] for place in kept]
    return np.concatenate(rows), np.array(tokens)


@pytest.mark.slow
def test_the_shares_are_those_of_scikit_learn_on_the_stock_models_states(config: Make) -> None:
    assembly = assemble(config())
    for found in leakage_of(assembly, {"movie": [0, 2]}):
        known, tokens = rows_of(assembly, texts(assembly, "movie", "train"), found.blocks)
        unseen, wanted = rows_of(assembly, texts(assembly, "movie", "test"), found.blocks)
        assert (found.known, found.unseen) == (len(tokens), len(wanted))
        table = assembly.site.backbone.model.get_input_embeddings().weight.detach().numpy()
        alpha = 1e-3 * np.square(known - known.mean(0)).mean() * len(known)
        probe = Ridge(alpha=alpha, fit_intercept=False)
        probe.fit(known - known.mean(0), table[tokens] - table.mean(0))
        directions = table - table.mean(0)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        guessed = ((unseen - known.mean(0)) @ probe.coef_.T @ directions.T).argmax(1)
        assert found.read == pytest.approx((guessed == wanted).mean(), abs=2 / len(wanted))
        commonest = Counter(sorted(tokens.tolist())).most_common(1)[0][0]
        assert found.commonest == pytest.approx((wanted == commonest).mean())


def test_noise_hides_tokens(config: Make) -> None:
    plain, noisy = (measure_leakage(config(wire_noise=noise), cuts=[0, 2]) for noise in (0.0, 4.0))
    for before, after in zip(plain, noisy, strict=True):
        assert after.read < before.read - 0.2


def test_noise_is_measured_after_as_many_looks_as_a_site_lets_a_server_take(config: Make) -> None:
    """Two rounds of one pass, two passes of a fingerprint and one for importance, with two models each."""
    quiet, noisy = (measure_leakage(config(wire_noise=noise), cuts=[1])[0] for noise in (0.0, 4.0))
    assert (quiet.looks, quiet.read_averaged) == (1, quiet.read)
    assert noisy.looks == 2 * (2 + 2 + 1)
    assert noisy.read + 0.05 < noisy.read_averaged <= quiet.read


def test_looks_are_counted_over_rounds_splits_and_models(config: Make) -> None:
    looks = most_looks(config(rounds=12, fingerprint_batches=12, batch_size=16), examples=200)
    assert looks == {"train": 2 * (12 + 2 + 1), "validation": 2 * 13, "test": 2 * 13}
    fewer = most_looks(config(rounds=12, eval_every=5), examples=200)
    assert (fewer["validation"], fewer["test"]) == (2 * 4, 2 * 4)


def test_every_task_has_every_cut_and_nothing_depends_on_how_texts_are_packed(config: Make) -> None:
    assembly = assemble(config(wire="int8"))
    wanted = {"movie": range(3), "trec": range(3)}
    found = leakage_of(assembly, wanted)
    assert [(row.task, row.blocks) for row in found] == [(task, cut) for task in wanted for cut in range(3)]
    small = dataclasses.replace(assembly, site=dataclasses.replace(assembly.site, max_tokens=100))
    for first, second in zip(found, leakage_of(small, wanted), strict=True):
        assert dataclasses.asdict(second) == pytest.approx(dataclasses.asdict(first), abs=0.02)


def test_a_task_of_marks_alone_is_refused(config: Make) -> None:
    assembly = assemble(config())
    data = dict(assembly.site.data)
    for name, own in data.items():
        marks = {split: np.full_like(part.ids, MARKS[0]) for split, part in own.splits.items()}
        splits = {split: dataclasses.replace(part, ids=marks[split]) for split, part in own.splits.items()}
        data[name] = dataclasses.replace(own, splits=splits)
    empty = dataclasses.replace(assembly, site=dataclasses.replace(assembly.site, data=data))
    with pytest.raises(DataError, match="the train texts of task 'movie' hold no token to be read"):
        leakage_of(empty, {"movie": [0]})


@pytest.mark.parametrize("cut", [-1, 3])
def test_a_cut_that_the_model_does_not_have_is_told_in_a_line(config: Make, cut: int) -> None:
    with pytest.raises(ConfigError, match=f"--cuts has {cut}, and .* has 3 blocks .* allowed: 0 to 2$"):
        measure_leakage(config(), cuts=[cut])


def test_the_command_prints_and_writes_what_the_function_returns(config: Make, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "own.toml").write_text(to_toml(config()))
    words = [
        "attack",
        "cuts",
        "--config",
        str(tmp_path / "own.toml"),
        "--cuts",
        "1",
        "--to",
        str(tmp_path / "leakage.json"),
    ]
    assert main(words) == 0
    expected = [dataclasses.asdict(row) for row in measure_leakage(config(), cuts=[1])]
    assert json.loads((tmp_path / "leakage.json").read_text()) == expected
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.split()[1:2] == ["1"]] == ["movie", "trec"]
