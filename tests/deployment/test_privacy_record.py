"""What a site pays of its differential privacy: before it trains, once for a question, never more than its budget."""

import copy
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.privacy import epsilon_of_sums
from atlas_fl.client.private_training import train_privately
from atlas_fl.config import Config, validate, with_values
from atlas_fl.data.clients import Sizes, site_client
from atlas_fl.data.registry import find_tasks
from atlas_fl.data.task import Source
from atlas_fl.deployment import privacy_record
from atlas_fl.deployment.consent import SiteChoices, check_consent
from atlas_fl.deployment.privacy_record import pay_job, pay_run
from atlas_fl.deployment.settings_policy import check_settings
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.storage.jsonl import read_json

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

OPTIONS = TrainOptions(seed=0, rounds=3, batch_size=4, dp="example", epsilon=1.0, delta=1e-3)
PRIVATE = {"dp": "example", "strategy": "fedavg", "alone": "none", "ranks": "4", "tasks": "movie+trec"}


@pytest.mark.core
def test_a_question_is_paid_for_once_and_the_budget_ends_with_the_rounds(tmp_path: Path) -> None:
    path = tmp_path / "a-privacy"
    for number in (1, 2, 2, 3):  # a record of each session of a site that is started again
        assert pay_job(f"{number}", 40, OPTIONS, 10, path=path, epsilon=None) == 10 * number
    paid = path.read_bytes()
    spent = r"epsilon 1\.\d+ at delta 0\.001 with this round by .*a-privacy; allowed: 1; bring"
    with pytest.raises(ConfigError, match=spent):
        pay_job("4", 40, OPTIONS, 10, path=path, epsilon=None)
    assert path.read_bytes() == paid, "nothing is recorded of what was refused"
    assert pay_job("3", 40, OPTIONS, 10, path=path, epsilon=None) == 30, "the same question is still answered"
    other = replace(OPTIONS, epsilon=0.5)  # another run on the same examples, whose rounds cost less
    with pytest.raises(ConfigError, match=r"allowed: 1\.04;"):
        pay_job("5", 40, other, 10, path=path, epsilon=1.04)
    assert pay_job("5", 40, other, 10, path=path, epsilon=1.5) == 10


def test_runs_with_client_privacy_add_up_and_one_that_was_paid_goes_on(tmp_path: Path) -> None:
    """Two runs of one noise and six sums each are one of twelve sums."""
    for unit in (0.0, 1e-6):
        account, whole = tmp_path / f"a-{unit}-runs", epsilon_of_sums([(2.0, unit, 12)], 1e-2)
        pay_run(account, "one", (2.0, unit, 6), delta=1e-2, most=whole)
        paid = account.read_bytes()
        spent = rf"epsilon {whole:.4g} at delta 0\.01 with this run by .*-runs; allowed: .*; leave"
        with pytest.raises(ConfigError, match=spent):
            pay_run(account, "two", (2.0, unit, 6), delta=1e-2, most=whole - 0.01)
        pay_run(account, "one", (2.0, unit, 6), delta=1e-2, most=0.1)
        assert account.read_bytes() == paid, "nothing is recorded of what was refused, and what was paid goes on"
        pay_run(account, "two", (2.0, unit, 6), delta=1e-2, most=whole + 1e-9)
        assert read_json(account)["runs"] == {name: [2.0, unit, 6] for name in ("one", "two")}
    # k Gaussian mechanisms are one whose noise is smaller by the root of k
    once = epsilon_of_sums([(12**-0.5 * 2, 0.0, 1)], 1e-2)
    assert epsilon_of_sums([(2.0, 0.0, 12)], 1e-2) == pytest.approx(once, abs=1e-3)


def test_no_later_delta_makes_what_was_paid_cheaper(tmp_path: Path) -> None:
    """By hand: two runs of one cost are one of twice the sums, at the smaller delta of both, whichever came first."""
    whole = epsilon_of_sums([(2.0, 0.0, 12)], 1e-2)
    for first, second in ((1e-2, 0.9), (0.9, 1e-2)):
        account = tmp_path / f"{first}-runs"
        pay_run(account, "one", (2.0, 0.0, 6), delta=first, most=whole)
        with pytest.raises(ConfigError, match=rf"epsilon {whole:.4g} at delta 0\.01 with this run"):
            pay_run(account, "two", (2.0, 0.0, 6), delta=second, most=whole - 0.01)
        pay_run(account, "two", (2.0, 0.0, 6), delta=second, most=whole + 1e-9)
        assert read_json(account)["delta"] == 1e-2
    account = tmp_path / "a-privacy"
    pay = partial(pay_job, path=account, epsilon=1.1)
    pay("1", 40, OPTIONS, 30)  # spends its epsilon of 1 at delta .001
    with pytest.raises(ConfigError, match=r"at delta 0\.001 with this round"):
        pay("2", 16, replace(OPTIONS, delta=None, epsilon=0.9), 12)  # 16 rows: .047


def test_two_federations_at_once_pay_for_all_that_they_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy_record, "epsilon_of_all", lambda *_: 0.0)
    account = tmp_path / "a-privacy"
    pay = partial(pay_job, path=account, epsilon=None)
    pay("first", 40, OPTIONS, 10)

    def pay_twenty(federation: str) -> None:
        for number in range(20):
            pay(f"{federation}{number}", 40, OPTIONS, 10)

    threads = [threading.Thread(target=pay_twenty, args=(federation,)) for federation in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_json(account)["paid"]) == 41


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "a-privacy"
    pay_job("1", 40, OPTIONS, 10, path=path, epsilon=None)
    for text in (path.read_text().replace("10", "1"), '{"mine": 1}'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="it is not what was written"):
            pay_job("2", 40, OPTIONS, 10, path=path, epsilon=None)
        assert path.read_text() == text


def test_noise_of_a_site_is_another_for_every_question_and_the_same_for_the_same_one(
    tiny_of, site_of, spec_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By equal noise under two models, scales or settings, or with and without an example, a difference shows them."""
    monkeypatch.setattr(privacy_record, "epsilon_of_all", lambda *_: 0.0)
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", labels=3, examples=12)
    account = tmp_path / "a-privacy"
    pay = partial(pay_job, path=account, epsilon=100.0)
    site = replace(site_of(tiny, spec), secrets={"a-0": b"s" * 32}, seed=None, pay=pay)
    options = replace(OPTIONS, optimizer="sgd", lr=1e4, clip=1e-6, batch_size=12, max_steps=1)
    start = tiny.params(spec)
    other = {key: tensor + 1e-3 * key.endswith("lora_B") for key, tensor in start.items()}
    first = Job(client="a-0", params=start, round=1, options=options)

    def noise(job: Job, at=site) -> float:
        (update,) = train_privately([job], at)
        key = next(key for key in job.params if key.endswith("lora_B"))
        return float((update.params[key] - job.params[key]).flatten()[0])

    drawn = noise(first)
    assert noise(first) == drawn
    assert noise(replace(first, options=replace(options, hash_loaded=True))) == drawn, "an audit changes no draw"
    assert len(read_json(account)["paid"]) == 1
    other_backbone = replace(site.backbone, model=copy.deepcopy(site.backbone.model))
    next(iter(other_backbone.parameters.values())).data.add_(1e-3)
    fewer = replace(site, data=site_of(tiny, replace(spec, examples=11)).data)
    shared = replace(site, secrets={"a-0": b"t" * 32})
    drawn_otherwise = [
        noise(replace(first, params=other)),
        noise(replace(first, round=2)),
        noise(replace(first, options=replace(options, clip=2e-6))),
        noise(first, fewer),
        noise(first, replace(site, scale=lambda rank: 2 * site.scale(rank))),
        noise(first, replace(site, settings="other settings")),
        noise(first, replace(site, bf16=True)),
        noise(first, replace(site, backbone=other_backbone)),
        noise(first, replace(shared, pay=None)),
    ]

    assert all(abs(value - drawn) > 1e-5 for value in drawn_otherwise)
    assert len({*drawn_otherwise}) == len(drawn_otherwise)
    assert len(read_json(account)["paid"]) == 9


def consent(**values: object) -> SiteChoices:
    return SiteChoices(task="movie", device="cpu_2gb", least_examples=1, max_rounds_per_example=9, **values)


def test_a_site_refuses_a_server_without_noise_or_with_a_larger_budget(tmp_path: Path) -> None:
    rows = [f"{'good' if n % 2 else 'bad'} film number {n},{'yes' if n % 2 else 'no'}" for n in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label", *rows]))
    (task,) = find_tasks((), (f"notes={tmp_path / 'own.csv'}",))
    sizes: Sizes = {"train": 20, "validation": 10, "test": 10}
    client = site_client(task, Source(cache_dir=None), sizes, name="notes-0", secret=b"s" * 32, shuffle_labels=False)
    private = validate(with_values(Config(), {**PRIVATE, "epsilon": "3"}))
    plain = validate(with_values(Config(), {"strategy": "fedavg", "tasks": "movie+trec"}))
    check_settings(private, consent(dp="example", epsilon=3.0), client=client, device="cpu_2gb")
    check_settings(private, consent(), client=client, device="cpu_2gb")
    summed = {"dp": "client", "delta": "0.01", "update_filter": "clip=0.5", "strategy": "fedit", "ranks": "4"}
    whole = validate(with_values(Config(), {**summed, "alone": "none", "epsilon": "3"}))
    check_settings(whole, consent(dp="client", epsilon=3.0, delta=0.01), client=client, device="cpu_2gb")
    no_delta = with_values(whole, {"delta": "none"})
    check_settings(no_delta, consent(), client=client, device="cpu_2gb")
    for config, choices, message in (
        (plain, {"dp": "example"}, "the server's --dp is none, and this site joins with --dp example"),
        (private, {"dp": "client"}, "the server's --dp is example, and this site joins with --dp client"),
        (private, {"dp": "example"}, "--dp needs --epsilon, the most to be spent here; the server's is 3"),
        (whole, {"dp": "client"}, "--dp needs --epsilon, the most to be spent here; the server's is 3"),
        (whole, {"dp": "client", "epsilon": 2.5}, r"the server's --epsilon: 3\.0; allowed: at most 2\.5"),
        (no_delta, {"dp": "client", "epsilon": 3.0}, r"--delta follows from its number of sites; ask for settings"),
        (whole, {"dp": "client", "epsilon": 3.0}, r"--delta: 0\.01; allowed: at most 0\.001; .*, or change --delta"),
        (
            with_values(whole, {"delta": "0.99"}),
            {"dp": "client", "epsilon": 3.0, "delta": 0.01},
            r"--delta: 0\.99; allowed: at most 0\.01",
        ),
        (private, {"dp": "example", "epsilon": 3.0, "delta": 0.03}, r"--delta: 0\.037\d*; allowed: at most 0\.03;"),
        (private, {"dp": "example", "epsilon": 2.5}, r"the server's --epsilon: 3\.0; allowed: at most 2\.5"),
        (
            with_values(private, {"delta": "0.1"}),
            {},
            r"--delta is 0\.1, and a client has 20 examples; allowed: below one",
        ),
        (with_values(private, {"delta": "0.04"}), {}, r"the server's --delta: 0\.04; allowed: at most 0\.037"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_settings(config, consent(**choices), client=client, device="cpu_2gb")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epsilon": 3.0}, "--epsilon and --delta are most of what --dp spends; say --dp example"),
        ({"dp": "example", "epsilon": 0.0}, r"--epsilon is 0\.0; allowed: above 0"),
        ({"delta": 0.01}, "--epsilon and --delta are most of what --dp spends; say --dp example or client"),
        ({"dp": "client", "epsilon": 3.0, "delta": 1.0}, r"--delta is 1\.0; allowed: above 0, below 1"),
    ],
)
def test_a_pin_that_says_nothing_is_one_line(values, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_consent(consent(**values))
