"""The laws that `atlas check-method` holds methods to: all of ours and of the examples obey, and each law can fail."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from atlas_fl.cli.main import main
from atlas_fl.errors import ConfigError
from atlas_fl.methods.averages import FedAvg
from atlas_fl.methods.laws import LAWS, Trial, check_method
from atlas_fl.methods.method import Aggregated, Method
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.plugins import load_plugins, registrations

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/plugins").glob("*.py"))


@pytest.mark.parametrize("name", RULES)
def test_every_method_obeys_all_laws(name: str) -> None:
    assert check_method(RULES[name]) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_methods_of_the_examples_obey_all_laws(example: Path) -> None:
    (pinned,) = load_plugins((str(example),))
    faults = [fault for method in registrations(pinned, "method").values() for fault in check_method(method)]
    load_plugins(())
    assert faults == []


NO_PAPER = {
    *("local", "local_prior", "linear_probe", "centralized", "fedavg_oracle"),
    *("fedavg_cluster", "fedavg_cluster_ft", "fedavg_cluster_prior", "mr_mtl_cluster"),
    *("kriging", "atlas", "atlas_laplacian", "atlas_no_laplacian", "atlas_pad", "atlas_truncate"),
    *(method.rule for name, method in METHODS.items() if method.rule.startswith("fedavg_") and name != method.rule),
    "classifier_collaboration",
}
"""References, variants and methods of this project, and rules that are a part of a published method."""


def test_every_published_method_says_what_differs_from_its_paper() -> None:
    told = {name: method.differs for name, method in [*RULES.items(), *METHODS.items()]}
    assert {name for name, differs in told.items() if not differs} == NO_PAPER
    for name, differs in told.items():
        assert differs == differs.strip(" ;.") and "nothing" not in differs.split("; ")[1:], name


class Unnormalised(FedAvg):
    """Rows that sum to two."""

    def rule(self, step):
        return 2 * super().rule(step)


class AcrossTasks(FedAvg):
    """Heads of all tasks mix."""

    def rule(self, step):
        return np.full((len(step.present),) * 2, 1 / len(step.present))


class InPlace(FedAvg):
    """It writes into the models that it is given."""

    def aggregate(self, inputs):
        for params in inputs.updates.values():
            params["head.weight"].add_(1)
        return super().aggregate(inputs)


class Drawn(FedAvg):
    """A draw without a seed."""

    def rule(self, step):
        rows = super().rule(step) + torch.rand(1).item() * step.present
        return rows / rows.sum(axis=1, keepdims=True) if not step.parameters.is_head else super().rule(step)


class FirstOnly(FedAvg):
    """Everyone gets the model of the first client that took part."""

    def rule(self, step):
        rows = np.eye(len(step.present))
        for group in set(step.groups.tolist()):
            inside = np.flatnonzero((step.groups == group) & step.present)
            if len(inside):
                rows[step.groups == group] = np.eye(len(rows))[inside[0]]
        return rows


class Forgets(FedAvg):
    """A client that it has no model of is left out."""

    def aggregate(self, inputs):
        done = super().aggregate(inputs)
        return Aggregated(server_state={}, client_models={name: done.client_models[name] for name in inputs.updates})


class OwnMemory(FedAvg):
    """It counts its steps beside the server state."""

    steps: ClassVar[list[int]] = []

    def rule(self, step):
        self.steps.append(1)
        weight = 1 / len(self.steps)
        return weight * np.eye(len(step.present)) + (1 - weight) * super().rule(step)


class Keeps(FedAvg):
    """A client alone gets half of what it trained."""

    def aggregate(self, inputs):
        done = super().aggregate(inputs)
        halved = {name: {key: one / 2 for key, one in params.items()} for name, params in done.client_models.items()}
        return Aggregated(server_state={}, client_models=halved)


class Lists(FedAvg):
    """A state that no checkpoint can hold."""

    def aggregate(self, inputs):
        done = super().aggregate(inputs)
        return Aggregated(server_state={"seen": list(inputs.updates)}, client_models=done.client_models)


class KnowsAll(FedAvg):
    """It looks up every client that trained in what it remembers of the last round."""

    def aggregate(self, inputs):
        done = super().aggregate(inputs)
        updates = inputs.updates
        last = inputs.server_state.get("last", updates)
        state = {"last": {name: {"w": last[name].get("w", params["head.weight"])} for name, params in updates.items()}}
        return Aggregated(server_state=state, client_models=done.client_models)


BROKEN: dict[type[Method], str] = {
    Unnormalised: "rows",
    AcrossTasks: "rows",
    InPlace: "inputs",
    Drawn: "determinism",
    FirstOnly: "order",
    Forgets: "shapes",
    OwnMemory: "determinism",
    Keeps: "one client",
    Lists: "state",
    KnowsAll: "clients without a state",
    Method: "shapes",
}


@pytest.mark.parametrize("method", BROKEN)
def test_a_method_that_breaks_a_law_is_told_so_in_words(method: type[Method]) -> None:
    faults = check_method(method)
    assert any(fault.startswith(f"{BROKEN[method]}: ") for fault in faults), faults


class StepsOn(Keeps):
    """It says that its server goes on from what was trained."""

    steps_on = True


class OneRank(FedAvg):
    """It sums factors of one rank."""

    name = "one_rank"
    equal_ranks = True
    takes_newcomers = False

    def aggregate(self, inputs):
        updates = inputs.updates
        present = [client for client in inputs.federation.clients if client in updates]
        models = {name: dict(params) for name, params in inputs.client_models.items()}
        for key in ("layer.0.q.lora_A", "layer.0.q.lora_B", "layer.1.q.lora_A", "layer.1.q.lora_B"):
            mean = torch.stack([updates[client][key] for client in present]).mean(0)
            for params in models.values():
                params[key] = mean
        for client in present:
            models[client]["head.weight"] = updates[client]["head.weight"]
        return Aggregated(server_state={}, client_models=models)


def test_a_method_may_say_what_it_does_otherwise() -> None:
    assert "one client" in "".join(check_method(Keeps))
    assert not [fault for fault in check_method(StepsOn) if fault.startswith("one client")]
    assert check_method(OneRank) == []


def test_a_method_of_one_rank_is_refused_with_several() -> None:
    federation = Trial(OneRank()).federation
    models = {name: {"q.lora_A": torch.zeros(2 + (name == "b"), 3)} for name in federation.clients}
    with pytest.raises(ConfigError, match=r"--strategy one_rank needs one rank, and q\.lora_A of a and b differ"):
        OneRank().check(models, federation)


def test_every_law_can_fail() -> None:
    failed = {fault.partition(":")[0] for method in BROKEN for fault in check_method(method)}
    assert failed == set(LAWS), set(LAWS) - failed


def test_the_command_names_the_laws_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-method", str(EXAMPLES[0].with_name("inverse_loss.py"))]) == 0
    assert "inverse_loss: all 9 laws hold" in " ".join(capsys.readouterr().out.split())
    assert main(["check-method", str(EXAMPLES[0].with_name("partition.py"))]) == 2
    assert "registers no method" in capsys.readouterr().err
    load_plugins(())


def test_the_command_says_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(
        "from atlas_fl.methods.averages import FedAvg\nfrom atlas_fl.plugins import register\n\n\n"
        "@register('method')\nclass Twice(FedAvg):\n    name = 'twice'\n\n"
        "    def rule(self, step):\n        return 2 * super().rule(step)\n"
    )
    assert main(["check-method", str(plugin)]) == 1
    assert "twice: rows: the rows for layer.0.q.lora_A sum to" in " ".join(capsys.readouterr().out.split())
    load_plugins(())
