"""Method: what goes down beside a model, what comes up, what a client keeps, what the server makes of it.

A method is a class of its own module with a row-stochastic matrix M as its `rule`, or a step of its own in
`aggregate`. `Part` has what a method may need besides: tensors that travel with the model, reports, a second model.
Several parts act in a run: the method itself, and those that settings such as `--control-variates` switch on.

    @register("method", "halfway")
    class Halfway(Method):
        \"""Everyone who took part moves halfway to the average of all.\"""

        def rule(self, step):
            return 0.5 * np.eye(len(step.present)) + 0.5 * weighted_average(self.options)(step)

Its docstring, `needs` and the other class attributes are what `atlas list strategies` and the checks of
settings read. A method holds its options and nothing else: all that changes is in the server state.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation import rules
from atlas_fl.aggregation.matrices import Federation, Rows, choose_rows, identity
from atlas_fl.aggregation.secure_mean import SumGroup, sum_groups
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, PRIVATE, ByClient, Params, ServerState, TreesByClient, shared_params, subtree, tensors

Losses: TypeAlias = Callable[[Mapping[int, ByClient]], Mapping[str, Mapping[int, float]]]
"""From candidate models by number and client to each client's finite validation losses by number; clients that did not
answer for all are left out."""


def tensors_of(state: ServerState, name: str) -> dict[str, Tensor]:
    """The tensors of the mapping of this name in a server state; empty where there is none."""
    return tensors(subtree(state, name))


class Wait(Frozen):
    """Condition for an asynchronous step across machines; clients still at work go on."""

    updates: int
    """So many updates, with which the step is made."""
    seconds: float = 0.0
    """With more than 0: at least so long, and the step is made with all updates that have arrived."""


class RoundStart(Frozen, eq=False):
    """The federation as a round begins."""

    round: int
    """Its number, from 1."""
    clients: tuple[str, ...]
    """Clients that train in it."""
    tasks: Mapping[str, str]
    """The task of every client of the run, in their order."""
    client_models: ByClient
    """The models that all clients hold."""
    server_models: ByClient
    """Models of the last aggregation."""
    server_state: ServerState
    """State of the method."""
    examples: Mapping[str, int] = field(default_factory=dict)
    """Training examples of every client of the run."""
    by_client: TreesByClient = field(default_factory=dict)
    """Tensors that clients have reported or kept in earlier rounds, by kind and client."""
    is_personal: bool = False
    """Every client trains for itself: the last aggregation is past."""
    aggregates: bool = True
    """The round ends in an aggregation."""
    device_seconds: float = 0.0
    """How long it takes on the devices' profiles."""
    wait: Wait | None = None
    """Condition for an asynchronous step across machines; None where all clients are waited for."""

    def of(self, kind: str) -> ByClient:
        """The tensors of this kind by client; empty where nobody has any."""
        return self.by_client.get(kind, {})


class Choice(Frozen, eq=False):
    """Other models for clients to begin a round with."""

    server_state: ServerState
    client_models: ByClient = field(default_factory=dict)
    """Models of the clients whose model changes."""
    sent: Mapping[str, Sequence[Params]] = field(default_factory=dict)
    """The candidates that each client was sent."""
    losses: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Losses that each client answered."""


class OwnTraining(Frozen, eq=False):
    """A second training of every client in the round, of a model of its own."""

    models: ByClient
    sent: TreesByClient
    """Tensors beside these models, by kind and client."""
    kept: TreesByClient
    options: Mapping[str, Any]
    """Options that differ from those of the first training, by name."""


class Report(Protocol):
    """Measurements of the clients that are asked for a report, all together."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients that are asked."""

    def model(self, client: str) -> Params:
        """The model that the client begins the round with."""

    def loss(self) -> Mapping[str, float]:
        """The mean loss of these models over all training examples, by client; NaN of a model without numbers."""

    def features(self, client: str) -> tuple[Tensor, np.ndarray, int]:
        """(inputs of the head's last layer (examples, width) float64, classes (examples,) int64, number of classes)."""

    def gradient(self, client: str) -> Params:
        """The sum of the gradients of the round's batches at every adapted layer's frozen weight, (d_out, d_in).

        No adapter is on the model, and the head is as the round begins.
        """

    def train_half(self, half: int) -> Mapping[str, Params]:
        """The models after the round's steps on the first (0) or second (1) half of the examples."""


class ReportTensor(Frozen):
    """Shape, dtype and range of one tensor of a report, by which the server checks it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    least: float = -1e30
    most: float = 1e30


class Part(Frozen):
    """Tensors that travel and stay beside the models of a run; none by default."""

    options: rules.StrategyOptions = field(default_factory=rules.StrategyOptions, kw_only=False)
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Options that it does not leave to the settings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", replace(self.options, **self.fixed))

    def send(self, round: RoundStart) -> TreesByClient:
        """Tensors that go down beside the models, by kind and client."""
        del round
        return {}

    def keep(self, round: RoundStart) -> TreesByClient:
        """Tensors that clients begin the round with from what they kept, by kind and client; they do not travel."""
        del round
        return {}

    def own_training(self, round: RoundStart) -> OwnTraining | None:
        """A second training of every client beside that of the shared model."""
        del round
        return None

    def predict(self, round: RoundStart) -> ByClient:
        """Models that clients predict with where these are not their own; `round` is the state that they do it in."""
        del round
        return {}


class StepInputs(Frozen, eq=False):
    """Inputs of one server step."""

    server_state: ServerState
    client_models: ByClient
    """The models of the last aggregation, of every client."""
    updates: ByClient
    """The models of those who took part, as they have trained them."""
    federation: Federation
    round: int
    """Its number, from 1."""
    answers: rules.Answers = field(default_factory=rules.Answers)
    shares: Mapping[str, float] | None = None
    """Where the updates are means by sums, the share of each client in that of the adapters, without sums that were
    lost."""

    @property
    def after(self) -> dict[str, Params]:
        """The model of every client after local training: its update, or its old one where it took no part."""
        return {client: self.updates.get(client, params) for client, params in self.client_models.items()}

    @property
    def present(self) -> list[bool]:
        """True for each client of the federation that took part, in their order."""
        return [client in self.updates for client in self.federation.clients]


@dataclass(frozen=True)
class Aggregated:
    """The result of one server step."""

    server_state: ServerState
    client_models: ByClient
    """The model of every client: what it starts the next round with."""
    discarded: Mapping[str, float] = field(default_factory=dict)
    """By client, the share of its mixed update's squared norm that its ranks could not hold (product space; else 0)."""
    rows: Mapping[str, np.ndarray | Rows] = field(default_factory=dict)
    """The mixing matrices that were applied, `adapters` and `head`; empty where there are others."""


class Method(Part):
    """A federated method: `rule` gives the mixing matrix, or `aggregate` the whole server step."""

    name: ClassVar[str] = ""
    """Its name in the registry."""
    differs: ClassVar[str] = ""
    """Differences from its paper, in clauses with semicolons between them, `nothing`, or empty where it has no paper.

    The clause `whole models` says that models train there as wholes.
    """
    needs: ClassVar[str] = ""
    """Needs of a federation, in words."""
    extra_passes: ClassVar[str] = ""
    """Computations of clients beside training, in words."""
    communicates: ClassVar[bool] = True
    """Anything leaves the clients."""
    takes_newcomers: ClassVar[bool] = True
    """Clients may join late; not where updates that they missed say who belongs together."""
    equal_ranks: ClassVar[bool] = False
    """Clients need one rank: a run with several is refused, so that tensors of one name have one shape."""
    steps_on: ClassVar[bool] = False
    """The server goes on from what was trained, so that a client alone does not keep it."""
    in_factors: ClassVar[bool] = False
    """It mixes the factors A and B alone; others mix in either space."""
    is_average: ClassVar[bool] = False
    """Tensors that are equal at all clients stay what they are, but for rounding."""
    not_a_sum: ClassVar[str] = "needs the models of single clients"
    """Why `--secure` refuses it; empty where sums over its groups of clients are all that the server needs."""
    across_machines: ClassVar[str] = ""
    """Why it works in simulations alone; empty where it works across machines."""
    moves_untrained: ClassVar[bool] = False
    """The server moves what does not train, so that it goes down and does not come up."""
    holds_frozen: ClassVar[bool] = False
    """Clients hold a frozen part beside their adapters (`frozen_part`)."""
    makes_frozen: ClassVar[bool] = False
    """Clients make that part themselves, so that nobody is sent any."""
    begins_again: ClassVar[bool] = False
    """Adapters are as they were drawn after every aggregation, so that nobody has to be sent any."""
    needs_classes: ClassVar[bool] = False
    """It reads features by class: tasks are classifications of texts."""
    head_is_last_layer: ClassVar[bool] = False
    """The last layer of the head alone trains first under `--trained-parts head_then_rest`."""
    reads_within: ClassVar[bool] = False
    """It acts inside clusters with `--within clusters`."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Settings, beside its fields, that only it has a use for."""
    report: ClassVar[str] = "none"
    """The kind of what it asks clients for beside their updates."""
    asks_once: ClassVar[bool] = False
    """A client reports once, and from then on it is known."""
    report_words: ClassVar[str] = "with each update a report"
    """Report that leaves a client, in words."""
    models_in_report: ClassVar[int] = 0
    """Number of models that a report is as large as."""

    @property
    def clustered(self) -> bool:
        """It needs clusters or a graph; of some methods only with `--within clusters`."""
        return self.reads_within and self.options.within == rules.CLUSTERS

    @property
    def granularity(self) -> str:
        """Which parameters have a matrix of their own (`all`, `layer`, `last layer`)."""
        return "all"

    def schedule(
        self, drawn: Sequence[str], *, round: int, rounds: int, seconds: Mapping[str, float]
    ) -> tuple[tuple[str, ...], float]:
        """(who trains in this round of the drawn clients, how long it takes); by default all, and the slowest.

        `seconds` are what the plan predicts for a round of each client, `rounds` how many the run has.
        """
        del round, rounds
        return tuple(drawn), max((seconds[name] for name in drawn), default=0.0)

    def wait(self, *, round: int, rounds: int, seconds: Mapping[str, float]) -> Wait | None:
        """Condition for this round's step across machines; None, the default, for all clients."""
        del round, rounds, seconds
        return None

    def began(self, round: RoundStart, client: str) -> int:
        """The round in which this client began to train what it sends in this one; by default this one."""
        del client
        return round.round

    # what the server makes of updates

    def begin(self, client_models: ByClient, federation: Federation) -> tuple[ByClient, ServerState]:
        """The models that clients begin round one with, from those that were drawn or warmed up; the server state."""
        del federation
        return client_models, self.init(client_models)

    def begin_in_weights(
        self, client_models: ByClient, federation: Federation, weights: Callable[[str], Tensor]
    ) -> tuple[ByClient, ServerState]:
        """The same for a method that reads frozen weights, (d_out, d_in) float32 of a module by its name."""
        del weights
        return self.begin(client_models, federation)

    def init(self, client_models: ByClient) -> ServerState:
        """The server state before round one, from the models that the clients start with."""
        del client_models
        return {}

    def extend_state(self, server_state: ServerState, newcomers: ByClient) -> ServerState:
        """The server state with an entry for each of these newcomers, from the models that they begin with."""
        del newcomers
        return server_state

    def check(self, models: ByClient, federation: Federation) -> None:
        """Raise ConfigError where it cannot aggregate models of these ranks and layers."""
        if self.equal_ranks:
            self._check_one_shape(models, federation.clients)
        if self.granularity == "layer":
            keys = {key for params in models.values() for key in shared_params(params, self.options.share)}
            for key in sorted(key for key in keys if not key.startswith(HEAD)):
                rules.layer_of(federation, key)

    def _check_one_shape(self, models: ByClient, clients: Sequence[str]) -> None:
        """Raise ConfigError unless a tensor that these clients share has one shape, but for heads."""
        first, *others = clients
        for other in others:
            for key, tensor in shared_params(models[first], self.options.share).items():
                if not key.startswith(HEAD) and models[other].get(key, tensor).shape != tensor.shape:
                    raise ConfigError(
                        f"--strategy {self.name} needs one rank, and {key} of {first} and {other} differ; take one rank"
                        " for all, such as --ranks 8"
                    )

    def warnings(self, federation: Federation) -> tuple[str, ...]:
        """Warnings before a run with these clients."""
        del federation
        return ()

    def rule(self, step: rules.MixingContext) -> np.ndarray | Rows:
        """M (n, n), row-stochastic, for one group of parameters."""
        del step
        raise ConfigError(
            f"method {self.name!r} has no rule; define it, or aggregate and arrival (rows of newcomers), or set"
            " takes_newcomers = False"
        )

    def arrival(self, step: rules.MixingContext) -> np.ndarray | Rows:
        """The rows by which newcomers begin, in which they are not present and the others are."""
        return self.rule(step)

    def eta(self, round: int) -> float:
        """The size of the step in this round (the first is 1); 0 where the rule has none."""
        return self.options.eta * self.options.eta_decay ** (round - 1) if "eta" in self.uses else 0.0

    def matrices(
        self, federation: Federation, present: Sequence[bool], *, round: int, models: rules.RoundModels | None = None
    ) -> rules.Matrices:
        """The matrix for each parameter's name, when these clients took part.

        A rule that depends on the updates needs `models`; without them it says who may mix with whom.
        """
        return rules.mixing_matrices(
            self.rule,
            federation,
            present,
            eta=self.eta(round),
            layer_weighting=self.options.layer_weighting if "layer_weighting" in self.uses else "none",
            granularity=self.granularity,
            models=models,
        )

    def sum_groups(self, federation: Federation, models: ByClient, *, round: int) -> tuple[SumGroup, ...]:
        """The groups of clients whose sums it needs; raises ConfigError where one is too small (`--secure`)."""
        everyone = [True] * len(federation.clients)
        matrices = self.matrices(federation, everyone, round=round)
        return sum_groups(matrices, federation, models, self.options.share)

    def aggregate(self, inputs: StepInputs) -> Aggregated:
        """One server step: a pure function of its inputs."""
        server_state, after, federation = self.next_state(inputs), inputs.after, inputs.federation
        models = rules.RoundModels(
            before=inputs.client_models, after=after, server_state=server_state, answers=inputs.answers
        )
        matrices = self.matrices(federation, inputs.present, round=inputs.round, models=models)
        mixed = rules.mix(after, matrices, federation.clients, self.options)
        done = Aggregated(server_state=server_state, client_models=mixed.by_client, discarded=mixed.discarded)
        if self.granularity == "all":
            keys = dict.fromkeys(key for params in after.values() for key in params if key != PRIVATE)
            parts = {"head" if key.startswith(HEAD) else "adapters": key for key in keys}
            done = replace(done, rows={part: matrices(key) for part, key in parts.items()})
        return self.complete(done, inputs)

    def next_state(self, inputs: StepInputs) -> ServerState:
        """The server state by which this round is mixed, where updates change it before."""
        return inputs.server_state

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The step after the mixing, where there is more to it."""
        del inputs
        return done

    def initial_models(
        self, server_state: ServerState, client_models: ByClient, fresh: ByClient, federation: Federation
    ) -> dict[str, Params]:
        """The newcomers' models, mixed from those that the others hold; `federation` is of all of them."""
        present = [client not in fresh for client in federation.clients]
        everyone = {**client_models, **fresh}
        models = rules.RoundModels(before=everyone, after=everyone, server_state=server_state)

        def rule(step: rules.MixingContext) -> np.ndarray | Rows:
            return choose_rows(step.present, identity(len(step.present)), self.arrival(step))

        rows = rules.mixing_matrices(rule, federation, present, eta=1.0, models=models)
        by_client = rules.mix(everyone, rows, federation.clients, self.options).by_client
        return {client: by_client[client] for client in fresh}

    def choose(self, round: RoundStart, losses: Losses) -> Choice | None:
        """Other models for clients to begin the round with, by their losses; None where they begin with their own."""
        del round, losses
        return None

    # reports

    def reports_in(self, round: int) -> bool:
        """Return whether clients may be asked for a report in this round, where it ends in an aggregation."""
        del round
        return self.report != "none"

    def ask(self, round: RoundStart) -> Collection[str]:
        """The clients of this round that are asked for a report."""
        return round.clients if round.aggregates and self.reports_in(round.round) else ()

    @classmethod
    def measure(cls, report: Report) -> Mapping[str, Params]:
        """The report of each client; it runs where the client's examples are."""
        del report
        raise ConfigError(f"method {cls.name!r} asks for {cls.report!r} and does not measure it; define measure")

    @classmethod
    def measure_trained(cls, measured: Params, before: Params, after: Params) -> Params:
        """The report of a client with what follows from its model before and after the round's training."""
        del before, after
        return measured

    @classmethod
    def report_tensors(cls, model: Params, *, classes: int) -> Mapping[str, ReportTensor]:
        """The tensors of a report of a client with this model, by name; by default any one number `value`."""
        del model, classes
        return {"value": ReportTensor(shape=())}

    @classmethod
    def report_fault(cls, report: Params, *, counts: Sequence[int]) -> str:
        """Fault of the values of a report of a client with these training examples by class; empty without one."""
        del report, counts
        return ""

    @classmethod
    def examples_behind(cls, labels: np.ndarray, *, most: int | None) -> Mapping[str, int]:
        """By words for a tensor of a report the fewest examples behind it.

        `labels` are of the training examples; `most` of them train in a round.
        """
        del most
        return {"a report": len(labels)}

    def sent_tensors(self, model: Params, *, classes: int, round: int) -> Mapping[str, Mapping[str, ReportTensor]]:
        """The tensors that may go down beside this model in this round, by kind and name, for sites to check."""
        del model, classes, round
        return {}

    def record_reports(self, server_state: ServerState, reports: ByClient) -> ServerState:
        """The server state with what these clients have reported."""
        del reports
        return server_state

    def measured(
        self, before: ServerState, after: ServerState, federation: Federation, matrices: rules.Matrices
    ) -> tuple[Any, ...]:
        """Rows on what the reports of this round have shown, for the record of the round."""
        del before, after, federation, matrices
        return ()

    # a part that clients hold frozen

    def frozen_part(self, server_state: ServerState, client: str = "") -> Params:
        """Part that this client holds frozen beside its adapter; of most methods everyone holds the same."""
        del server_state, client
        return {}

    def newest_part(self, server_state: ServerState, client: str = "") -> Params:
        """Addition of the newest round to it."""
        del server_state, client
        return {}


class PublishedMethod(Frozen):
    """A method of the literature that is a rule with settings."""

    summary: str
    """Effect and paper."""
    rule: str
    """The name of the method that aggregates."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings by name that make it this method, which no other value may contradict."""
    suggested: Mapping[str, Any] = field(default_factory=dict)
    """Values of its own knobs, in the place of the defaults that switch it off."""
    equal_ranks: bool = False
    """Every client must have the same rank in every layer, beyond what the rule says."""
    differs: str = ""
    """Differences from its paper, as of a `Method`."""

    def __post_init__(self) -> None:
        for name in ("settings", "suggested"):
            values = {key: tuple(one) if isinstance(one, list) else one for key, one in getattr(self, name).items()}
            object.__setattr__(self, name, values)


SECOND_TENSORS = "has a second set of tensors beside the model, which no message across machines holds yet"
"""Why a method works in simulations alone."""


WHOLE_MODELS = "whole models"
"""The clause of a method whose paper trains whole models, by plain SGD."""
