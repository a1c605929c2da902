"""What cannot be kept across machines is said before anybody is waited for."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atlas_fl.config import Config, validate, with_values
from atlas_fl.deployment.server import check_served, check_sites, reason_for_sites
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.methods.registry import METHODS
from atlas_fl.runtime.coordinator.client_registry import ClientProxy

SERVICE = ServerOptions(certs=Path("certs/server"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "local"}, "--strategy local sends nothing"),
        (
            {"strategy": "feddyn", "ranks": "8"},
            "--strategy feddyn has a second set of tensors beside the model, which no message across machines",
        ),
        ({"split": "2"}, r"--strategy atlas asks for reports .* no message through a cut \(--split 2\) holds"),
        ({"share": ("A",), "space": "factors", "rerank": True}, "--share A keeps parts of .* and --rerank makes whole"),
        ({"centralized": True}, "--centralized deals out rows that are here"),
        (
            {"split": "2", "topology": "paired"},
            "--topology paired lets clients compute for each other, which no site does; take --topology server",
        ),
        ({"arrive": ("movie-1=2",)}, "--arrive says who is late in a simulation"),
        ({"workers": 2}, "--workers 2 is for simulations"),
        ({"engine": "ray"}, "--engine ray is for simulations"),
        ({"strategy": "fedbuff", "split": "2"}, "--strategy fedbuff trains over several rounds, in which no server"),
        ({"strategy": "fedbuff", "patience": 2}, "and --patience 2 compares scores of all; leave --patience 2 out"),
        (
            {"strategy": "fedbuff", "checkpoint_every": 2},
            "--checkpoint-every 2 would make steps again of other arrivals",
        ),
        ({"strategy": "fedbuff", "recluster_every": 2}, "--recluster-every 2 would measure all at once"),
    ],
)
def test_what_would_mean_something_else_is_refused(values: dict[str, object], message: str) -> None:
    check_served(Config(), SERVICE)
    with pytest.raises(ConfigError, match=message) as error:
        check_served(with_values(Config(), values), SERVICE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", ["ditto", "apfl", "feddpa", "mr_mtl", "fedamp"])
def test_models_of_ones_own_are_of_those_who_are_there_at_first(strategy: str) -> None:
    config = validate(with_values(Config(), {"strategy": strategy, "ranks": "4"}))
    with pytest.raises(ConfigError, match="has clients train models of their own, and late ones may join; say --no-"):
        check_served(config, SERVICE)
    check_served(config, replace(SERVICE, late=False))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"share": ("A", "B")},
            "--second-model proximal stands beside a whole shared model, and --share A B keeps parts",
        ),
        ({"strategy": "fedbuff"}, "trains over several rounds, and --second-model proximal is trained in each"),
    ],
)
def test_a_second_model_stands_beside_a_whole_one_of_the_same_round(values: dict[str, object], message: str) -> None:
    given = {"strategy": "fedavg", "second_model": "proximal", "ranks": "4", "space": "factors"}
    check_served(validate(with_values(Config(), given)), replace(SERVICE, late=False))
    with pytest.raises(ConfigError, match=message):
        check_served(validate(with_values(Config(), {**given, **values})), replace(SERVICE, late=False))


def test_own_models_in_secure_sums_begin_with_what_every_site_can_draw() -> None:
    given = {"strategy": "mr_mtl", "ranks": "4", "secure": True, "init_adapter": "somewhere"}
    with pytest.raises(ConfigError, match="an initialisation that they draw themselves, and --init-adapter somewhere"):
        check_served(validate(with_values(Config(), given)), replace(SERVICE, late=False))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"strategy": "fedalt_fixed"},
            "--personal-models and --second-model stacked each site scores a model of",
        ),
        ({"strategy": "fedalt"}, "without secure sums the server has it; set --secure, or use `atlas run`"),
        (
            {"strategy": "feddpa", "second_gate": "input"},
            "--second-gate input has a second set of tensors beside the model, which no message across machines holds",
        ),
        (
            {"strategy": "feddpa", "space": "factors", "secure": True, "personal_rounds": 2, "rounds": 4},
            "predicts with the shared model, which each site keeps to itself after --personal-rounds 2 in secure sums",
        ),
        (
            {"strategy": "ditto", "space": "factors", "secure": True, "personal_rounds": 2, "rounds": 4},
            "pulled to the shared model, which each site keeps to itself after the first of --personal-rounds 2 in sec",
        ),
    ],
)
def test_a_second_model_stands_beside_the_shared_one_where_the_server_has_that(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_served(validate(with_values(Config(), {"ranks": "4", **values})), replace(SERVICE, late=False))


@pytest.mark.parametrize("strategy", ["fedalt", "fedalt_fixed", "shrinkage"])
def test_a_model_beside_the_mean_of_others_is_served_in_secure_sums(strategy: str) -> None:
    given = {"strategy": strategy, "ranks": "4", "secure": True}
    check_served(validate(with_values(Config(), given)), replace(SERVICE, late=False))


@pytest.mark.parametrize("strategy", ["kriging", "atlas", "mta", "stb", "fedpac", "classifier_collaboration"])
def test_what_has_a_message_is_served_and_has_workers(strategy: str) -> None:
    check_served(with_values(Config(), {"strategy": strategy}), SERVICE)
    for values in ({"workers": 2}, {"engine": "ray"}):
        validate(with_values(Config(), {"strategy": strategy, **values}))


def test_a_gpu_that_is_not_there_is_told_before_anybody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="accelerator 'cuda' is not available on this machine"):
        check_served(with_values(Config(), {"accelerator": "cuda"}), SERVICE)


def test_the_clients_of_a_served_run_are_those_who_come() -> None:
    """Names and numbers are not held against the tasks of the settings, which are not used."""
    config = with_values(Config(), {"split": "site-2=2,mine=1", "clusters": "50", "min_cluster_size": 50})
    validate(config, at_sites=True)
    with pytest.raises(ConfigError, match="allowed: auto, oracle, or a number from 1 to"):
        validate(config)
    with pytest.raises(ConfigError, match="unknown name in --split 'mine'"):
        validate(with_values(config, {"clusters": "auto", "min_cluster_size": 1}))


def test_a_cut_may_name_who_comes_late_and_nobody_else() -> None:
    config, seats = with_values(Config(), {"split": "site-1=2,site-9=2"}), [ClientProxy(name="site-1")]
    note = check_sites(config, seats, listed=("site-1",), late=True)
    assert note.startswith("--split names site-9, and nobody here is called so")
    assert check_sites(config, seats, listed=("site-1", "site-9"), late=False) == ""
    with pytest.raises(ConfigError, match="unknown name in --split 'site-9'; did you mean 'site-1'"):
        check_sites(config, seats, listed=("site-1",), late=False)


def test_sites_are_told_what_is_wrong_with_the_settings_and_nothing_of_each_other() -> None:
    cut = reason_for_sites(ConfigError("unknown name in --split 'site-9'; did you mean 'site-1'"))
    assert cut == "unknown name in --split 'site-9'; ask who runs the server"
    assert "site-1" not in reason_for_sites(BudgetError("phone fits no cut of bert; site-1 has 3 MB"))


def test_the_guide_names_every_method_that_is_refused() -> None:
    page = Path(__file__).parents[2] / "docs/guides/stays-at-a-site.md"
    (line,) = re.findall(r"^- Refused so far: .*?(?=^- |\Z)", page.read_text(), re.M | re.S)
    refused = set()
    for name in METHODS:
        ranks = "budget" if name == "hsplitlora" else "4"
        config = with_values(Config(), {"strategy": name, "ranks": ranks})
        try:
            check_served(validate(config), replace(SERVICE, late=False))
        except ConfigError:
            refused.add(name)
    of_one_client = {"local", "local_only", "local_prior", "linear_probe", "centralized"}
    assert refused - of_one_client == (set(re.findall(r"`(\w+)`", line)) & set(METHODS)) - {"fedlease"}
