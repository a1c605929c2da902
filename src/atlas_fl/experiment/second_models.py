"""The round of the clients' second models and gates: who trains what, and what is scored and exported in the end."""

from dataclasses import replace

from atlas_fl.aggregation.exact_average import frozen_part
from atlas_fl.client.job import Job, without_empty
from atlas_fl.client.second_model import combine, initial_gate, initial_second
from atlas_fl.config import Config
from atlas_fl.config.methods import has_frozen_part
from atlas_fl.experiment.state import FederationState
from atlas_fl.params import ByClient, Params, ServerState, TreesByClient
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import scale_of


def train_second_models(config: Config, engine: Engine, jobs: list[Job], state: FederationState) -> FederationState:
    """The state with the second models and their gates after a round whose shared models train by these jobs.

    They are trained on the same examples in the same order, beside the shared model as it was sent.
    """
    kind, weight = config.mixing.second_model, config.mixing.second_weight
    if kind == "none" or config.mixing.personal_models:
        return state
    is_proximal = kind == "proximal"
    second_jobs = [
        replace(
            job,
            params=state.of("second").get(job.client) or initial_second(job.params, kind, weight),
            sent={"anchor" if is_proximal else "companion": job.params},
            kept=without_empty({"gate": gate_of(config, state.of("gate"), job.client, job.params)}),
            options=replace(
                job.options,
                second_model=kind,
                second_weight=weight,
                proximal_mu=weight if is_proximal else 0.0,
                control_variates=False,
            ),
        )
        for job in jobs
    ]
    updates = {update.client: update for update in engine.run("train", second_jobs)}
    models = {**state.of("second"), **{name: update.params for name, update in updates.items()}}
    return replace(state, by_client={**state.with_newest(updates), "second": models})


def predicts_as_sent(config: Config) -> bool:
    """Whether clients predict with the very models that the server has sent, or that they keep in their place."""
    return config.mixing.second_model == "none" and not has_frozen_part(config)


def gate_of(config: Config, gates: ByClient, client: str, model: Params) -> Params:
    """The client's gate, that before its first round where it has none yet; empty without `--second-gate`.

    `model` says which layers are adapted.
    """
    if config.mixing.second_gate == "none":
        return {}
    return gates.get(client) or initial_gate(model)


def predicting_models(
    config: Config,
    by_client: TreesByClient,
    server_state: ServerState,
    *,
    client_models: ByClient,
    server_models: ByClient,
) -> dict[str, Params]:
    """What each client predicts with: its second model beside the newest shared one, or the latter without a second.

    With `--personal-models` its own model may stand on what the server mixed. What a gate weighs has it among its
    tensors. Under a strategy with a frozen part, what everyone holds frozen is stacked on every model.
    """
    kind, weight, scale = config.mixing.second_model, config.mixing.second_weight, scale_of(config)
    if has_frozen_part(config) and (frozen := frozen_part(server_state)):
        return {
            name: combine(params, frozen, "frozen", weight=1.0, scale=scale) for name, params in client_models.items()
        }
    gates = by_client.get("gate", {})
    second = by_client.get("second", {})
    own, shared = (client_models, server_models) if config.mixing.personal_models else (second, client_models)
    return {
        name: combine(
            own[name],
            shared[name],
            kind,
            weight=weight,
            scale=scale,
            gate=gate_of(config, gates, name, own[name]),
        )
        if name in own
        else params
        for name, params in client_models.items()
    }
