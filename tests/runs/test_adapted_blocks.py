"""Runs whose uppermost blocks alone have adapters."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job
from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from atlas_fl.models.prefix_cache import PrefixCache
from atlas_fl.planning.planner import make_plan
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import train_options
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.workers import check_same, in_threads


@pytest.fixture(scope="module")
def upper(shared_config: Make) -> RunResult:
    """A run of a model of three blocks with adapters in the last one."""
    return run_config(shared_config(name="upper", adapted_blocks=1, graph="adaptive", layer_weighting="importance"))


def test_adapters_are_in_the_uppermost_blocks_alone(upper: RunResult) -> None:
    names = {name.split("/")[-1] for name in state(upper.folder)}
    assert {name for name in names if "lora" in name} == {
        f"encoder.layer.2.attention.self.{module}.lora_{part}" for module in ("query", "value") for part in "AB"
    }
    plan = json.loads((upper.folder / "plan.json").read_text())
    assert set(plan["layer_of"].values()) == {2}
    for client, importance in zip(plan["clients"], plan["importance"], strict=True):
        assert client["ranks"][:2] == [0, 0] and client["ranks"][2] > 0
        assert importance == [0.0, 0.0, 1.0]


def test_the_audit_of_such_a_run_finds_nothing(upper: RunResult) -> None:
    passing_audit(upper.folder)
    exported = load_file(next(upper.folder.glob("adapters/movie-0/adapter_model.safetensors")))
    assert all(".layer.2." in name for name in exported if "lora" in name)


def test_it_goes_on_in_sessions_to_the_same_bits(shared_config: Make, upper: RunResult) -> None:
    words = {"adapted_blocks": 1, "graph": "adaptive", "layer_weighting": "importance"}
    parts = run_config(shared_config(name="parts", max_rounds=1, **words))
    parts = resume_run(parts.folder)
    assert same_tensors(state(upper.folder), state(parts.folder))
    assert rows(upper.folder) == rows(parts.folder)


def test_nothing_below_the_first_adapted_block_has_a_gradient(config: Make) -> None:
    assembly = assemble(config(adapted_blocks=2))
    site, client = assembly.site, assembly.clients[0]
    leaves = {key: value.requires_grad_() for key, value in assembly.initial_params(client, (0, 2, 4)).items()}
    row = collate_packed([site.data[client.name].splits["train"]], device=site.backbone.device)
    entered = dict[int, bool]()
    handles = [
        block.register_forward_pre_hook(lambda _, args, at=at: entered.update({at: args[0].requires_grad}))
        for at, block in enumerate(site.backbone.blocks)
    ]
    with forward(row, [leaves], site) as (logits,):
        logits.square().sum().backward()
    for handle in handles:
        handle.remove()
    assert entered.get(2) is True and entered.get(1, False) is False and entered.get(0, False) is False
    assert all(parameter.grad is None for parameter in site.backbone.model.parameters())
    assert all(leaf.grad is not None for leaf in leaves.values())


@pytest.mark.slow
def test_all_blocks_are_what_the_default_adapts(config: Make) -> None:
    every, default = (run_config(config(name=f"run-{n}", rounds=1, adapted_blocks=n)) for n in (3, None))
    assert same_tensors(state(every.folder, round=1), state(default.folder, round=1))


def test_the_plan_expects_less_of_a_device_whose_upper_blocks_train(config: Make) -> None:
    upper, every = (make_plan(config(adapted_blocks=n, ranks=4)) for n in (1, None))
    for one, other in zip(upper.clients, every.clients, strict=True):
        assert one.predicted["memory_bytes"] < other.predicted["memory_bytes"]
        assert one.predicted["up_bytes"] < other.predicted["up_bytes"]


@pytest.mark.parametrize("cuts", ["auto", "movie=1"])
def test_models_with_blocks_below_the_adapters_are_not_cut_and_the_remedy_works(config: Make, cuts: str) -> None:
    message = f"--adapted-blocks 2 leaves 1 of 3 blocks without adapters, and --split {cuts} leaves clients these"
    with pytest.raises(ConfigError, match=f"{message} blocks to train; set --adapted-blocks none, which adapts all"):
        assemble(config(adapted_blocks=2, split=cuts))
    for count in (None, 3):
        assert assemble(config(adapted_blocks=count, split=cuts)).shape.first_adapted == 0


def test_an_imported_adapter_of_more_blocks_is_refused(config: Make) -> None:
    first = run_config(config(ranks=4, strategy="local", name="first", rounds=1))
    adapter = first.folder / "adapters" / "movie-0"
    with pytest.raises(
        ModelError, match=r"adapts encoder\.layer\.0\..* and 3 more that this run leaves frozen"
    ) as error:
        run_config(config(ranks=4, adapted_blocks=1, name="second", init_adapter=adapter))
    assert "\n" not in str(error.value)


CACHED = {"adapted_blocks": 2, "dropout": 0.1, "pack_tokens": 200, "recluster_every": 1}


@pytest.fixture(scope="module")
def uncached(shared_config: Make) -> RunResult:
    """A run that computes its lowest block in every pass."""
    return run_config(shared_config(name="uncached", prefix_cache_gb=0, **CACHED))


@pytest.mark.slow
@pytest.mark.parametrize("budget_gb", [2e-4, 1.0])
def test_the_cache_changes_no_bit_of_a_run(config: Make, uncached: RunResult, budget_gb: float) -> None:
    """With the smaller budget only a part is kept."""
    found = run_config(config(name="cached", prefix_cache_gb=budget_gb, **CACHED))
    check_same(uncached.folder, found.folder)


@pytest.mark.slow
def test_workers_with_caches_of_their_own_make_the_same_run(config: Make, uncached: RunResult) -> None:
    found = run_config(config(name="workers", **CACHED), backend=in_threads(2))
    check_same(uncached.folder, found.folder)


def test_the_cached_states_are_used_in_every_round(config: Make) -> None:
    assembly = assemble(config(strategy="fedavg", **CACHED))
    # its own, because runs of a process share one, and an earlier one may have filled it
    engine = LocalEngine(site=replace(assembly.site, prefix_cache=PrefixCache(budget_bytes=10**9)))
    rounds = 2
    options = train_options(assembly.config, with_images=False)
    passes = list[int]()
    handle = assembly.site.backbone.blocks[0].register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    for number in range(1, rounds + 1):
        engine.run(
            "train",
            [
                Job(client=one.name, params=assembly.initial_params(one, (0, 2, 2)), round=number, options=options)
                for one in assembly.clients
            ],
        )
    handle.remove()
    assert sum(passes) == sum(int(own.splits["train"].lengths.sum()) for own in assembly.site.data.values())
