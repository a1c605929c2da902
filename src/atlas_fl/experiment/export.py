"""Export of client models: an adapter as a PEFT folder, a whole model as a transformers folder.

`atlas export` writes an adapter also merged into its base, or as a file of llama.cpp, with a card that says where the
model comes from, and publishes the folder where it is asked to.

What is exported scores as what was evaluated. Log frequencies of a client's classes (`methods.prior_correction`) are
added to the bias of its head; where the head has none, the folder's README.md and a note say so.

PEFT loads a base model by the path in `adapter_config.json` and has no place for the number of labels or their names,
so that `AutoPeftModelForSequenceClassification` takes them as arguments, which the README.md of a folder reads from
`labels.json`.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import torch
from jinja2 import Environment, StrictUndefined, Template

from atlas_fl.config import Config
from atlas_fl.config.values import invalid_value, parse_integer
from atlas_fl.data.clients import label_statistics
from atlas_fl.data.task import Task
from atlas_fl.errors import CheckpointError, ConfigError, check_known, one_line
from atlas_fl.events import Note, OnEvent, ignore, tell_notes
from atlas_fl.experiment.state import FederationState, deduplicate_models
from atlas_fl.experiment.summary import best_rounds
from atlas_fl.methods.prior_correction import fold_prior, log_frequencies
from atlas_fl.models import gguf_adapter, loading, peft_io, registry
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.chat_template import TEMPLATES
from atlas_fl.models.files import hub_name, is_local
from atlas_fl.models.stock import auto_class
from atlas_fl.models.vision_loading import as_whole, load_vision, save_vision
from atlas_fl.packaged import packaged_text
from atlas_fl.params import HEAD, LORA_GATE, PRIVATE, ByClient, Params, digest, head_keys
from atlas_fl.planning.plan import Plan, read_plan
from atlas_fl.setup.assembly import Assembly, recorded_config
from atlas_fl.setup.options import scale_of, strategy_of
from atlas_fl.storage import checkpoint, digests, folder_access
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.run_folder import RunFolder, find_run

CARD = "README.md"
TEMPLATE = "chat_template.jinja"
"""The chat template of a task that has one of its own, where transformers looks for it."""
Form: TypeAlias = Literal["adapter", "merged", "gguf"]
"""An adapter beside its base, in its base, or beside its base in llama.cpp."""
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
}
"""The hub's name of what a model of each stock class does."""
SENT = (
    "no differential privacy was used. The server has seen this client's updates, from which a hostile one may learn"
    " training text."
)
LACKS_PRIOR = (
    "scores have the log frequencies of a client's classes (--prior-correction), and a head without a bias cannot hold"
    " them; add `log_frequencies` to the logits"
)
"""The one line of an export whose head has no bias."""
GATED = (
    "PEFT has no adapter with a gate (--second-gate input, or fedlease_router), so no model of this run is exported;"
    " `atlas evaluate` and `atlas generate` read them in the run, and one with --second-gate none (fedalt_fixed) or of"
    " fedlease is exported"
)
"""The one line of a run whose models have a gate."""

MOST_EXPORTED = 1000
"""Most models that a run writes at its end, a folder each."""


def export_clients(assembly: Assembly, models: ByClient, folder: RunFolder, *, on_event: OnEvent = ignore) -> None:
    """Write every client's adapters under the run's `adapters/`, or every different whole model under its `models/`.

    Of more than `MOST_EXPORTED` none: `export_client` writes any of them from the checkpoint. Those with a gate are not
    written either.
    """
    config, site = assembly.config, assembly.site
    exported = models
    if assembly.is_full and not config.training.prior_correction:
        # equal models of clients with priors of their own do not score alike
        exported = {name: models[name] for name in dict.fromkeys(deduplicate_models(models).values())}
    if any(map(is_gated, models.values())):
        on_event(Note(GATED))
        return
    if len(exported) > MOST_EXPORTED:
        remedy = f"`atlas export {folder.path} --client NAME --to FOLDER` writes one"
        on_event(Note(f"{len(exported):,} models are not written one by one; {remedy}"))
        return
    notes: dict[str, None] = {}
    rows = {row["client"]: row for row in label_statistics(assembly.clients)}
    for client, params in exported.items():
        if PRIVATE in params:
            continue  # the rest of it is at the client, which writes the whole
        lines = export_model(
            params,
            folder.models / client if assembly.is_full else folder.adapter(client),
            family=site.backbone.family,
            base=site.backbone.source,
            config=config,
            statistics=rows[client],
            backbone=site.backbone if assembly.is_full else None,
            within=folder.path,
        )
        notes |= dict.fromkeys(lines)
    tell_notes(on_event, *notes)


def export_client(
    run: str | Path,
    *,
    client: str | None,
    to: str | Path,
    round: str | None = None,
    form: Form = "adapter",
    on_event: OnEvent = ignore,
) -> Path:
    """Write the model that a client has after a round: an adapter in this form, a whole model as transformers' own.

    `client` is a name such as `movie-0`, or the client's number in the run's order; None is the one model of all
    (`global_client`). `round` is a number, or `best` for
    the best mean validation score; the last complete round without it. A `Note` says what the files lack.
    Raises `CheckpointError` without a good checkpoint of that round and `ConfigError` for an unknown client, or a model
    with a gate.
    """
    folder = find_run(run)
    config = recorded_config(folder)
    plan, models, number = _load_models(folder, config, round)
    names = list(models)
    if client is None:
        name = global_client(config, models)
    else:
        name = names[int(client)] if client.isdecimal() and int(client) < len(names) else client
    check_known("client", name, among=names)
    params = models[name]
    check_whole({name: params})
    source, family = loading.find_family(config.model.model, writes=not head_keys(params))
    backbone = None
    if not any(client.ranks for client in plan.clients):
        # a whole image model is recognised by the name of its head
        is_vision = HEAD + "weight" in params
        model, image_size = config.model.model, config.images.image_size
        backbone = as_whole(load_vision(model, image_size=image_size)) if is_vision else loading.load_backbone(model)
    statistics = next(row for row in plan.data if row["client"] == name)
    lines = export_model(
        params,
        Path(to),
        family=family,
        base=source,
        config=config,
        statistics=statistics,
        backbone=backbone,
        form=form,
        origin=_origin(folder, config, statistics, round=number, clients=len(names)),
    )
    tell_notes(on_event, *lines)
    return Path(to)


def check_whole(models: ByClient) -> None:
    """Raise CheckpointError where one of these models, or a part of it, is at its site alone."""
    if private := [name for name, params in models.items() if PRIVATE in params]:
        raise CheckpointError(
            f"the model of {private[0]}, or a part of it, is at its site alone, where `atlas join` has written the"
            " whole"
        )


def publish(folder: Path, repository: str, *, public: bool = False) -> str:
    """Upload an exported folder as a model of the hub, made if it isn't there; its address.

    The token is that of `hf auth login`, or HF_TOKEN.

    Raises:
        ConfigError: the hub refuses it or is out of reach; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # what the hub's errors are of: a name that it does not take, the transport, the machine
    refused: Any = (ValueError, *HfHubHTTPError.__bases__)
    try:
        api = HfApi()
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Exported by ATLAS")
    except refused as error:
        raise ConfigError(
            f"{folder} is written, and --push-to {repository} failed: {one_line(error)}; log in with `hf auth login`,"
            " name OWNER/NAME, and upload the folder with `hf upload`"
        ) from error
    return str(address)


def load_models(folder: RunFolder) -> ByClient:
    """The models that a run's clients predict with after its last complete round."""
    return _load_models(folder, recorded_config(folder), None)[1]


def _origin(
    folder: RunFolder, config: Config, statistics: Mapping[str, Any], *, round: int, clients: int
) -> dict[str, Any]:
    """Facts of a run for the card of a client's model; scores where the summary has those of this round."""
    client, scores = statistics["client"], {}
    summary = digests.read_checked(folder, folder.summary, "clients") if folder.summary.is_file() else {"clients": {}}
    test = summary["clients"].get(client, {}).get("final", {}).get("test", {})
    if test.get("round") == round:
        scores[f"test {statistics['metric']}"] = test["primary"]
        alone = (summary.get("alone") or {}).get("clients", {}).get(client)
        scores |= {"the same, trained alone": alone["alone"]} if alone else {}
    return {
        "client": client,
        "round": round,
        "clients": clients,
        "version": version("atlas-fl"),
        "method": config.mixing.strategy,
        "model": config.model.model,
        "examples": statistics["examples"]["train"],
        "seed": config.run.seed,
        "scores": scores,
        "privacy": SENT if strategy_of(config).communicates else "nothing of this client was sent to anybody.",
    }


def _load_models(folder: RunFolder, config: Config, round: str | None) -> tuple[Plan, ByClient, int]:
    saved = _load_checkpoint(folder, round)
    plan = read_plan(folder, folder.path / saved.state["plan"])
    state = FederationState.from_checkpoint(saved, [client.name for client in plan.clients])
    return plan, state.predicting_models(config), saved.round


def global_client(config: Config, models: ByClient) -> str:
    """A client whose model is the one that all predict with; a `ConfigError` says why a run has none."""
    first, *_ = models
    different = len({digest(params) for params in models.values()})
    reason = ""
    if not strategy_of(config).communicates:
        reason = "nothing is sent under its method"
    elif config.training.prior_correction:
        reason = "each client's scores have its own class frequencies (--prior-correction)"
    elif different > 1:
        ranks = {tuple(sorted(tensor.shape for tensor in params.values())) for params in models.values()}
        reasons = "a personal part, or one trained alone in the last round"
        if len(ranks) > 1:
            reasons = "ranks of their own, or heads of several tasks; a run with --ranks 8 gives all one rank"
        reason = f"its {len(models)} clients end with {different} different models ({reasons})"
    if reason:
        strategy = config.mixing.strategy
        raise ConfigError(f"--strategy {strategy} has left no global model: {reason}; export one with --client {first}")
    return first


def export_model(
    params: Params,
    to: Path,
    *,
    family: registry.Family,
    base: str,
    config: Config,
    statistics: Mapping[str, Any],
    backbone: Backbone | None = None,
    form: Form = "adapter",
    origin: Mapping[str, Any] | None = None,
    within: Path | None = None,
) -> tuple[str, ...]:
    """Write a model with its prior in its head, and its card; a line on what the files lack.

    `origin` is what the card says of the run.

    `statistics` are those of the client's labels (`data.clients.label_statistics`): its classes in the order of the
    logits, and where `--prior-correction` adds them their log frequencies.

    A whole model, which is one with a `backbone`, is a folder of stock transformers, an adapter one of PEFT. No part of
    the path below `within` is a link. Raises `ConfigError` for a model with a gate, and for a form that it has not.
    """
    if is_gated(params):
        raise ConfigError(GATED)
    # a regression has other statistics in the place of counts
    multilabel = "cardinality" in statistics
    counts = statistics["labels"] if "majority" in statistics or multilabel else {}
    labels, missing = list(counts), None
    if counts and config.training.prior_correction:
        prior = log_frequencies(torch.tensor(list(counts.values())))
        folded = fold_prior(params, prior, family=family)
        missing = prior.tolist() if folded is None else None
        params = folded or params
    writes = not head_keys(params)
    kind = "whole model" if backbone is not None else "adapter"
    _check_form(form, kind, writes=writes and not family.seq2seq)
    if form != "adapter":
        kind = "whole model" if form == "merged" else "GGUF adapter"
    stock = loading.read_config(config.model.model, base)
    auto = auto_class(stock, writes=writes)
    template = statistics.get("template")
    named = hub_name(base)  # a folder of this machine's cache means nothing on another one
    card = _card().render(
        kind=kind,
        auto=auto.__name__,
        pipeline=PIPELINES[auto.__name__],
        library={"adapter": "peft", "GGUF adapter": "gguf"}.get(kind, "transformers"),
        base=json.dumps(named),
        hub_base=named if named != base or not is_local(base) else None,  # a cached one is asked for nowhere
        images=family.images,
        writes=writes,
        chat=statistics.get("chat", False),
        template=template,
        labels=labels,
        max_length=config.data.max_length or Task.max_length,
        multilabel=multilabel,
        missing_prior=missing,
        lacks_prior=LACKS_PRIOR,
        origin=origin,
    )
    options: dict[str, Any] = {"family": family, "base": named, "scale": scale_of(config), "labels": labels}
    with atomic_folder(to, within=within) as draft:
        if form == "gguf":
            gguf_adapter.export_gguf_adapter(params, draft, family=family, config=stock, scale=scale_of(config))
        elif form == "merged":
            with TemporaryDirectory() as scratch:
                peft_io.export_adapter(params, Path(scratch, "adapter"), **options)
                peft_io.export_merged(Path(scratch, "adapter"), draft, base=base, auto=auto, multilabel=multilabel)
        elif backbone is None:
            peft_io.export_adapter(params, draft, **options)
        elif backbone.vision is not None:
            save_vision(backbone.vision, params, draft, labels=labels)
        else:
            loading.save_classifier(backbone, params, draft, labels=labels, multilabel=multilabel)
        folder_access.write_atomic(draft / CARD, card.encode())
        if template is not None:
            folder_access.write_atomic(draft / TEMPLATE, TEMPLATES.get(template, template).encode())
    return () if missing is None else (f"exported models are not whole: {LACKS_PRIOR}, which each {CARD} lists",)


def is_gated(params: Params) -> bool:
    """Return whether a gate weighs what is stacked in this model."""
    return any(key.endswith(LORA_GATE) for key in params)


def _check_form(form: Form, kind: str, *, writes: bool) -> None:
    """Raise ConfigError where a model of this kind has no such form."""
    if form != "adapter" and kind != "adapter":
        raise ConfigError(f"--form {form} is for adapters, and this model is a {kind}; leave --form out")
    if form == "gguf" and not writes:
        raise ConfigError("--form gguf has no place for a head of classes; allowed: adapter, merged")


@cache
def _card() -> Template:
    template = packaged_text(__package__, "model_card.md.jinja")
    return Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True).from_string(template)


def _load_checkpoint(folder: RunFolder, round: str | None) -> checkpoint.Checkpoint:
    """The newest checkpoint, that of the best round (`best`), or that of the round with this number."""
    if round is None or round == "best":
        newest = checkpoint.load_newest(folder.checkpoints)
        if newest is None:
            raise CheckpointError(f"run {folder.path} has no checkpoint to export from; resume it")
        if round is None:
            return newest
        scores = {int(number): score for number, score in newest.state["history"].items()}
        if not scores:
            raise CheckpointError(f"run {folder.path} has no evaluated round, so none is the best; give a number")
        number: int | None = best_rounds(scores, 1)[0]
    else:
        number = parse_integer(round)
    if number is None:
        raise invalid_value("--round", round, "best, or the number of a round")
    paths = checkpoint.paths_by_round(folder.checkpoints)
    if number not in paths:
        raise CheckpointError(
            f"run {folder.path} has no checkpoint of round {number}; have: {', '.join(map(str, paths))}; a run with"
            " --keep-best K keeps those of its K best rounds"
        )
    return checkpoint.load(paths[number])
