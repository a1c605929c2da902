"""Clipped sums of gradients of single examples are those of Opacus; noise and clipping follow the leaves that step."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from atlas_fl.client import private_training
from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.private_training import train_privately
from tests.parity.opacus_sums import CASES, CLIP, scale

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

RECORDED = json.loads((Path(__file__).parent / "opacus_sums.json").read_text())
OPTIONS = TrainOptions(
    seed=3, batch_size=12, max_steps=1, lr=1.0, clip=CLIP, optimizer="sgd", dp="example", epsilon=1.0, delta=1e-3
)


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The gradients of every step of one client, by the tensor that its optimizer holds, as they enter the step."""
    steps: list[dict[str, torch.Tensor]] = []
    step_all = private_training.step_all

    def step(members, done) -> None:
        (member,) = members
        held = {id(one) for group in member.optimizer.param_groups for one in group["params"]}
        assert held == {id(leaf) for leaf in member.leaves.values()}
        steps.append({key: leaf.grad.clone() for key, leaf in member.leaves.items()})
        step_all(members, done)

    monkeypatch.setattr(private_training, "step_all", step)
    return steps


@pytest.mark.parametrize("architecture", CASES)
def test_clipped_sums_are_those_of_opacus(
    tiny_of, site_of, architecture, stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step over all examples without noise, of an encoder and of a causal model: A, B and head."""
    monkeypatch.setattr(private_training, "noise_multiplier", lambda *_: 0.0)
    tiny, spec = tiny_of(architecture), CASES[architecture]
    job = Job(client=spec.name, params=tiny.params(spec), round=1, options=OPTIONS)
    train_privately([job], site_of(tiny, spec, scale=scale))
    (gradients,) = stepped
    assert gradients.keys() == RECORDED[architecture].keys()
    for key, recorded in RECORDED[architecture].items():
        total = gradients[key].double().flatten() * OPTIONS.batch_size
        expected = torch.tensor(recorded, dtype=torch.float64)
        assert float((total - expected).norm() / expected.norm()) < 1e-5, key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("architecture", CASES)
def test_what_is_recorded_is_what_opacus_computes(tiny_of, architecture) -> None:
    pytest.importorskip("opacus", reason="Opacus is no dependency")
    from tests.parity.opacus_sums import opacus_sums

    for key, total in opacus_sums(tiny_of(architecture), CASES[architecture]).items():
        recorded = torch.tensor(RECORDED[architecture][key], dtype=torch.float64)
        assert torch.allclose(total.flatten(), recorded, rtol=1e-6, atol=1e-9), key


def test_noise_and_clipping_follow_the_leaves_that_step(tiny_of, site_of, stepped) -> None:
    """DP-LoRA has been silently not private where parameters were replaced after hooks stood on the old ones.

    Here each round brings tensors of its own, in the second round views of larger ones as after a move. The gradient of
    every tensor that an optimizer holds is noise alone where examples are clipped to nearly nothing.
    """
    tiny, spec = tiny_of("bert"), CASES["bert"]
    site, options = site_of(tiny, spec), dataclasses.replace(OPTIONS, batch_size=4, max_steps=2, clip=1e-6)
    params = tiny.params(spec)
    for number in (1, 2):
        job = Job(client=spec.name, params=params, round=number, options=options)
        (update,) = train_privately([job], site)
        params = {key: torch.stack([value, value])[1] for key, value in update.params.items()}
    assert len(stepped) == 4
    deviation = private_training.noise_multiplier(spec.examples, options) * options.clip / options.batch_size
    for gradients in stepped:
        assert gradients.keys() == params.keys()
        for key, gradient in gradients.items():
            assert float(gradient.abs().min()) > 0, "a coordinate without noise"
            assert float(gradient.abs().max()) < 6 * deviation, "an example that was not clipped"
            if gradient.numel() > 50:
                assert float(gradient.std()) == pytest.approx(deviation, rel=0.4), key
        whole = torch.cat([gradient.flatten() for gradient in gradients.values()])
        assert float(whole.std()) == pytest.approx(deviation, rel=0.1)
