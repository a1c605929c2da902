"""Training loops of plug-ins: the model that they get is ATLAS's own, and so is a step of the example."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import example_loss, learning_rate, positions, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.reports import train_and_report
from atlas_fl.client.trainers import TRAINERS, ClientExamples, ClientModel, ClientTraining, collate
from atlas_fl.errors import ConfigError
from atlas_fl.methods.prior_correction import correct_logits, log_frequencies
from atlas_fl.params import Params
from atlas_fl.plugins import load_plugins
from tests.client.full.test_text import full_params

EXAMPLE = Path(__file__).parents[2] / "examples/plugins/hf_trainer.py"
OPTIONS = TrainOptions(seed=3, rounds=4, batch_size=5, lr=1e-2, epochs=2, trainer="mine", hash_loaded=True)


@pytest.fixture
def example() -> Iterator[None]:
    load_plugins((str(EXAMPLE),))
    yield
    load_plugins(())


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Put a loop into the registry under the name `mine`."""
    return lambda trainer: monkeypatch.setitem(TRAINERS, "mine", trainer)


def job_of(params: Params, **changes: object) -> Job:
    return Job(client="a-0", params=params, round=2, options=dataclasses.replace(OPTIONS, **changes))


def check_equals_the_packed_forward(site: Site, job: Job) -> None:
    """Loss, logits and gradients of a padded batch are those of the packed row of the same examples."""
    data = site.data["a-0"].splits["train"]
    model = ClientModel(job, site).train()
    examples = ClientExamples(data)
    batch = collate([examples[index] for index in range(len(examples))])
    output = model(**batch)
    output.loss.backward()

    leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in sorted(job.params.items())}
    with forward(collate_packed([data], device=torch.device("cpu")), [leaves], site) as (logits,):
        if job.options.prior_correction:
            counts = torch.bincount(torch.from_numpy(data.labels), minlength=site.data["a-0"].task.num_labels)
            logits = correct_logits(logits, log_frequencies(counts))
        loss = example_loss(logits, torch.from_numpy(data.labels), smoothing=job.options.label_smoothing)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    torch.testing.assert_close((output.logits, output.loss), (logits, loss), atol=1e-6, rtol=1e-6)
    assert list(model.params) == sorted(job.params)
    for (key, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-5, msg=key)
    assert output[0] is output.loss and output[1] is output.logits
    assert model.losses == [output.loss.detach()]


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
@pytest.mark.parametrize("labels", [3, 0], ids=["classes", "numbers"])
def test_the_models_logits_and_gradients_are_those_of_the_packed_forward(tiny, client_of, labels: int) -> None:
    site, params = client_of(tiny.name, labels=labels, pairs=True)
    more = {"label_smoothing": 0.2, "prior_correction": True}
    check_equals_the_packed_forward(site, job_of(params, **(more if labels and tiny.name == "bert" else {})))


def test_a_whole_model_is_one_too(tiny_of, client_of) -> None:
    site, _ = client_of(labels=3, trainable="full", targets=())
    check_equals_the_packed_forward(site, job_of(full_params(tiny_of("bert"), labels=3)))


def test_the_model_is_the_stock_classifier_with_the_adapters_merged_whichever_side_is_padded(
    tiny_of, client_of
) -> None:
    site, params = client_of(labels=3)
    model, stock = ClientModel(job_of(params), site).eval(), tiny_of("bert").merged(params, site.scale)
    examples = ClientExamples(site.data["a-0"].splits["train"])
    batch = collate([examples[index] for index in range(len(examples))])
    mine, theirs = model(**batch), stock(**batch)
    torch.testing.assert_close((mine.logits, mine.loss), (theirs.logits, theirs.loss), atol=1e-4, rtol=1e-4)
    left = {key: tensor.flip(1) if tensor.dim() == 2 else tensor for key, tensor in batch.items()}
    order = {key: left[key].clone() for key in ("input_ids", "attention_mask", "token_type_ids")}
    for row, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
        for key in order:
            order[key][row, -length:] = batch[key][row, :length]
    assert torch.equal(model(**order).logits, mine.logits)
    assert model(**order).loss is None and model.losses == []


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("changes", [{}, {"clip": 0.0, "weight_decay": 0.1, "momentum": 0.9}], ids=["clip", "decay"])
def test_a_step_of_sgd_of_the_example_is_ours(tiny_of, site_of, spec_of, changes: dict[str, float]) -> None:
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", labels=3)
    site, params = site_of(tiny, spec), tiny.params(spec)
    decays = changes.get("weight_decay", 0.0)
    one_step = {"batch_size": spec.examples, "epochs": 1, "lr": 0.05, "optimizer": "sgd", **changes}
    (ours,) = train_and_report([job_of(params, trainer="atlas", **one_step)], site)
    (theirs,) = train_and_report([job_of(params, trainer="hf_trainer", **one_step)], site)
    assert max(float((ours.params[key] - params[key]).abs().max()) for key in params) > 1e-3
    for key, tensor in ours.params.items():
        if not (decays and key.endswith("bias")):  # transformers leaves biases out of weight decay
            torch.testing.assert_close(theirs.params[key], tensor, atol=1e-6, rtol=0)
    assert theirs.loaded == ours.loaded
    assert (theirs.examples, theirs.keys, theirs.metrics["steps"]) == (ours.examples, ours.keys, 1.0)
    assert theirs.metrics["loss"] == pytest.approx(ours.metrics["loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("example")
def test_the_example_learns_what_ours_learns(client_of, capfd) -> None:
    site, params = client_of(labels=3, examples=24)
    capfd.readouterr()  # what loading said
    ours, theirs = (
        train_and_report([job_of(params, trainer=name, epochs=12)], site)[0] for name in ("atlas", "hf_trainer")
    )
    begun = train([job_of(params, max_steps=1, batch_size=24)], site)[0].metrics["loss"]
    assert theirs.metrics["loss"] < 0.85 * begun
    assert theirs.metrics["loss"] == pytest.approx(ours.metrics["loss"], rel=0.15)
    assert theirs.metrics["steps"] == ours.metrics["steps"] == 60
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("example")
def test_what_does_not_train_keeps_its_bits(client_of) -> None:
    site, params = client_of()
    (update,) = train_and_report([job_of(params, trainer="hf_trainer", trained_parts="B", weight_decay=0.5)], site)
    for key, tensor in params.items():
        assert torch.equal(update.params[key], tensor) is key.endswith(".lora_A"), key


def test_the_loop_gets_the_clients_own_examples_rate_and_seed(client_of, loop) -> None:
    site, params = client_of(examples=9)
    site = dataclasses.replace(site, data={**site.data, "b-0": site.data["a-0"]})
    told: list[ClientTraining] = []
    loop(told.append)
    changes: list[dict[str, object]] = [{}, {}, {"half": 1}, {"seed": 4}]
    jobs = [job_of(params, schedule="linear", **each) for each in changes]
    train_and_report([*jobs, dataclasses.replace(jobs[0], client="b-0"), dataclasses.replace(jobs[0], round=3)], site)
    seeds = [training.seed for training in told]
    assert seeds[0] == seeds[1]
    assert len({*seeds}) == 5 and all(0 <= seed < 2**31 for seed in seeds)
    assert [len(training.examples) for training in told] == [9, 9, 4, 9, 9, 9]
    own = site.data["a-0"].splits["train"].labels[positions(9, "a-0", told[2].options, secret=None)]
    assert [int(told[2].examples[k]["labels"]) for k in range(4)] == own.tolist()
    first = learning_rate(OPTIONS, step=0, steps=4)
    assert [training.lr for training in told] == [first * share for share in [0.75] * 5 + [0.5]]
    secret = dataclasses.replace(site, secrets={"a-0": b"s" * 32})
    train_and_report([jobs[0]], secret)
    assert told[-1].seed not in seeds


def test_a_loop_may_draw_from_the_global_generators_and_leaves_them_as_they_were(client_of, loop) -> None:
    site, params = client_of()
    drawn: list[tuple[float, float, float]] = []

    def draws(training: ClientTraining) -> float:
        del training
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        torch.manual_seed(1)
        return 0.5

    loop(draws)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    (update,) = train_and_report([job_of(params)], site)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    torch.rand(3)
    random.random()
    train_and_report([job_of(params)], site)
    assert drawn[0] == drawn[1]
    assert update.metrics["loss"] == 0.5
    assert update.metrics["steps"] == 0


def half(training: ClientTraining) -> None:
    training.model.half()


@pytest.mark.parametrize(
    ("trainer", "sent", "message"),
    [
        (lambda _: {"loss": 1.0}, (), r"'mine' returned \{'loss': 1.0\}; allowed: its mean training loss as a float"),
        (half, (), "'mine' changed the names, shapes or types of parameters of a-0; train them in place"),
        (lambda _: None, ("correction",), "mine trains a client's model alone, and the strategy has a correction"),
    ],
)
def test_what_a_loop_must_not_do_or_cannot_take_is_said_in_a_line(client_of, loop, trainer, sent, message: str) -> None:
    site, params = client_of()
    loop(trainer)
    with pytest.raises(ConfigError, match=message):
        train_and_report([dataclasses.replace(job_of(params), sent=dict.fromkeys(sent, params))], site)
