"""What a client computes with from its own model and the shared one: against dense products and gradients by hand."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.apfl import WEIGHT, Apfl
from atlas_fl.methods.feddpa import FedDpa
from atlas_fl.methods.second_model import initial_gate
from atlas_fl.models.lora import packed_linear
from atlas_fl.params import SHARE, Params
from tests.second_model import combine


def twice(_rank: int) -> float:
    return 2.0


def model(rank: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "q.lora_A": torch.randn(rank, 6, generator=draw),
        "q.lora_B": torch.randn(5, rank, generator=draw),
        "head.weight": torch.randn(3, 6, generator=draw),
    }


@pytest.mark.parametrize("scale", [twice, lambda rank: 16 / rank, lambda rank: 16 / rank**0.5])
@pytest.mark.parametrize("ranks", [(4, 4), (2, 6)])
def test_a_stack_computes_the_weighted_sum_of_both_updates(scale, ranks) -> None:
    own, shared = (model(rank, seed) for seed, rank in enumerate(ranks))
    both = combine(own, shared, "stacked", weight=0.3, scale=scale)

    def update(params):
        return scale(len(params["q.lora_A"])) * params["q.lora_B"].double() @ params["q.lora_A"].double()

    torch.testing.assert_close(update(both), 0.3 * update(own) + 0.7 * update(shared), rtol=1e-5, atol=1e-5)
    assert both["head.weight"] is own["head.weight"]


def test_an_interpolated_model_by_hand() -> None:
    """With a = .25: .25 * 8 + .75 * 4 = 5."""
    own, shared = {"w": torch.tensor([8.0]), WEIGHT: torch.tensor(0.25)}, {"w": torch.tensor([4.0])}
    made = combine(own, shared, "interpolated", weight=0.0, scale=twice)
    assert {key: value.tolist() for key, value in made.items()} == {"w": [5.0]}


def test_gradients_of_an_interpolated_model_are_those_of_the_paper() -> None:
    """a times the gradient at the mixture for v, and its product with v - w for a (APFL, equations 4 and 10)."""
    own = {"w": torch.tensor([1.0, -2.0, 0.5], requires_grad=True), WEIGHT: torch.tensor(0.3, requires_grad=True)}
    shared = {"w": torch.tensor([0.2, 1.0, -1.0])}
    mixture = combine(own, shared, "interpolated", weight=0.0, scale=twice)["w"]
    mixture.pow(3).sum().backward()
    at_mixture = 3 * mixture.detach() ** 2
    torch.testing.assert_close(own["w"].grad, 0.3 * at_mixture)
    torch.testing.assert_close(own[WEIGHT].grad, (at_mixture * (own["w"].detach() - shared["w"])).sum())


def test_the_shared_model_gets_no_gradient_and_a_proximal_one_is_alone() -> None:
    own, shared = model(2, 0), model(2, 1)
    assert combine(own, shared, "proximal", weight=0.5, scale=twice) is own


def test_a_trained_weight_stays_between_zero_and_one() -> None:
    leaves = {WEIGHT: torch.tensor(1.2, requires_grad=True), "w": torch.tensor([7.0])}
    Apfl().after_step(leaves)
    assert (float(leaves[WEIGHT].detach()), float(leaves["w"])) == (1.0, 7.0)


def test_only_an_interpolated_model_holds_a_weight() -> None:
    start = model(2, 0)
    assert float(Apfl(second_weight=0.25).initial(start)[WEIGHT]) == 0.25
    assert FedDpa().initial(start) is start


def test_a_gate_of_zeros_is_the_fixed_weight() -> None:
    own, shared = model(2, 0), model(2, 1)
    gated = combine(own, shared, "stacked", weight=0.3, scale=twice, gate=initial_gate(own))
    fixed = combine(own, shared, "stacked", weight=0.3, scale=twice)
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(2))
    layer = {"weight": torch.zeros(6, 5), "bias": None, "segments": (range(0, 7),), "scales": (2.0,)}
    outputs = [
        packed_linear(x, factors=(own["q.lora_A"], own["q.lora_B"]), gates=(own.get("q.lora_gate"),), **layer)
        for own in (gated, fixed)
    ]
    torch.testing.assert_close(*outputs)


OPTIONS = TrainOptions(
    seed=4, rounds=2, epochs=2, batch_size=4, lr=1e-2, clip=0.5, dropout=0.25, second_model="stacked", second_weight=0.4
)


def gated_job(tiny, spec, *, seed: int, options: TrainOptions = OPTIONS) -> Job:
    own, rest = tiny.params(spec, seed=seed), tiny.params(spec, seed=seed + 10)
    gate = {key: tensor + 0.1 * seed for key, tensor in initial_gate(own).items()}
    return Job(client=spec.name, params=own, round=1, options=options, sent={"companion": rest}, kept={"gate": gate})


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_client_trains_beside_what_others_have_in_the_mean(tiny_of, site_of, spec_of, share: float) -> None:
    """(mean - s own) / (1 - s), of the model that the job begins with and not of what training makes of it."""
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", examples=9)
    site = site_of(tiny, spec)
    job = gated_job(tiny, spec, seed=0)
    mean = {key: one for key, one in job.sent["companion"].items() if not key.startswith("head.")}
    others = {
        key: job.params[key] if share == 1 else ((one.double() - share * job.params[key]) / (1 - share)).float()
        for key, one in mean.items()
    }
    sent = [{**mean, SHARE: torch.tensor(share)}, others, mean]
    updates = [train([dataclasses.replace(job, sent={"companion": one})], site)[0].params for one in sent]
    assert all(torch.equal(tensor, updates[1][key]) for key, tensor in updates[0].items())
    moved = [key for key, tensor in updates[0].items() if not torch.allclose(tensor, updates[2][key], atol=1e-4)]
    assert bool(moved) is (share > 0)


def in_float64(job: Job) -> Job:
    def double(params: Params) -> Params:
        return {key: value.double() for key, value in params.items()}

    sent, kept = ({kind: double(params) for kind, params in trees.items()} for trees in (job.sent, job.kept))
    return dataclasses.replace(job, params=double(job.params), sent=sent, kept=kept)


def test_a_gate_trains_in_a_pack_as_alone(tiny_of, site_of, spec_of) -> None:
    """Beside a client of another rank with a gate, one with a fixed weight and one with one adapter."""
    tiny = tiny_of("bert")
    exact = dataclasses.replace(tiny.backbone, model=copy.deepcopy(tiny.backbone.model).double())
    specs = [spec_of(name=f"{name}-0", examples=7 + 2 * k) for k, name in enumerate("abcd")]
    specs[1] = dataclasses.replace(specs[1], ranks=(1, 1, 2))
    site = site_of(tiny, *specs, backbone=exact)
    jobs = [gated_job(tiny, spec, seed=k) for k, spec in enumerate(specs)]
    jobs[2] = dataclasses.replace(jobs[2], kept={})
    jobs[3] = dataclasses.replace(jobs[3], kept={}, sent={}, options=dataclasses.replace(OPTIONS, dropout=0.0))
    jobs = [in_float64(job) for job in jobs]
    for job, update in zip(jobs, train(jobs, site), strict=True):
        (alone,) = train([job], site)
        gate, alone_gate, gate_before = (one.kept.get("gate", {}) for one in (update, alone, job))
        assert gate.keys() == gate_before.keys()
        for mine, other, start in ((update.params, alone.params, job.params), (gate, alone_gate, gate_before)):
            for key, value in other.items():
                torch.testing.assert_close(mine[key], value, atol=1e-10, rtol=1e-9)
                assert not torch.equal(value, start[key]), f"{key} did not train"


def test_a_step_is_that_of_the_stock_model_with_the_gate_written_out(tiny_of, site_of, spec_of) -> None:
    """One step of SGD against hooks on the stock classifier, from the formula of FedALT."""
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", examples=5)
    options = dataclasses.replace(
        OPTIONS, optimizer="sgd", lr=0.1, epochs=1, batch_size=5, clip=0.0, dropout=0.0, second_weight=0.5
    )
    site, job = site_of(tiny, spec), gated_job(tiny, spec, seed=1, options=options)
    (update,) = train([job], site)

    leaves = {key: value.clone().requires_grad_() for key, value in {**job.params, **job.kept["gate"]}.items()}
    stock = tiny.stock(2)
    inner = getattr(stock, stock.base_model_prefix)
    for name in (key.removesuffix(".lora_A") for key in job.params if key.endswith(".lora_A")):

        def add(_module, inputs, output, name=name):
            (x,), scale = inputs, site.scale(len(leaves[name + ".lora_A"]))
            share = (x @ leaves[name + ".lora_gate"].T).softmax(-1)
            own = scale * x @ leaves[name + ".lora_A"].T @ leaves[name + ".lora_B"].T
            rest = scale * x @ job.sent["companion"][name + ".lora_A"].T @ job.sent["companion"][name + ".lora_B"].T
            return output + share[..., :1] * own + share[..., 1:] * rest

        inner.get_submodule(name).register_forward_hook(add)
    heads = {key.removeprefix("head."): leaf for key, leaf in leaves.items() if key.startswith("head.")}
    data = site.data["a-0"].splits["train"]
    texts = [torch.from_numpy(ids)[None] for ids in np.split(data.ids, data.offsets[1:-1])]
    rows = [torch.func.functional_call(stock, heads, kwargs={"input_ids": ids}).logits for ids in texts]
    torch.nn.functional.cross_entropy(torch.cat(rows), torch.from_numpy(data.labels)).backward()
    for key, leaf in leaves.items():
        trained = {**update.params, **update.kept["gate"]}[key]
        torch.testing.assert_close(trained, leaf.detach() - 0.1 * leaf.grad, atol=1e-5, rtol=1e-4, msg=key)
        assert leaf.grad.abs().max() > 0, f"{key} gets no gradient"
