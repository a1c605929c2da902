"""A site of a deployment (`atlas join`): its own data, as much of the model as its jobs need, and the server's jobs."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from atlas_fl.client.job import Job, initial_params
from atlas_fl.client.job import Site as AdapterSite
from atlas_fl.client.local_training import client_side_indices
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.privacy import delta_of
from atlas_fl.config import Config, config_hash, differences, parse_config
from atlas_fl.config.schema import NONE
from atlas_fl.data.clients import ClientData, data_notes, label_statistics, majority
from atlas_fl.deployment import settings_policy
from atlas_fl.deployment.consent import SiteChoices, check_consent
from atlas_fl.deployment.job_policy import JobPolicy, Outline
from atlas_fl.deployment.privacy_record import pay_job, pay_run, pay_sums
from atlas_fl.deployment.receipt import OTHER_RUN, Receipt, occupied_error, read_receipt, write_model
from atlas_fl.deployment.service import plugins_said, request_limit
from atlas_fl.deployment.start_models import start_models_of
from atlas_fl.errors import ConfigError, ModelError, ProtocolError, first_of, one_line, short_repr
from atlas_fl.events import Note, OnEvent, PhaseStarted, ignore, tell_notes
from atlas_fl.experiment.export import export_model, is_gated
from atlas_fl.experiment.summary import versions
from atlas_fl.frozen import Frozen
from atlas_fl.methods.second_model import SecondModel
from atlas_fl.models.backbone import Backbone, target_modules
from atlas_fl.models.identity import model_identity, weights_digest
from atlas_fl.models.loading import build_first_blocks
from atlas_fl.params import LORA_GATE, Params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.planning.client_privacy import cost_of_run, noisy_settings
from atlas_fl.plugins import pin_plugins
from atlas_fl.runtime.coordinator.secure_sums import SumSite
from atlas_fl.runtime.coordinator.site_worker import SiteClient, confirm_saved
from atlas_fl.runtime.protocol.client_metadata import metadata_of, read_device, read_metadata
from atlas_fl.runtime.protocol.messages import REMEDIES, CutInfo, Sha256, read
from atlas_fl.runtime.protocol.private_params import Owner, PrivateParamStore, check_store, clear_store
from atlas_fl.runtime.transport.certificates import Certs, open_certs, private_key_of
from atlas_fl.runtime.transport.client import Link, UnreachableError
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Head
from atlas_fl.secure_sums import LEAST, Identity
from atlas_fl.setup.assembly import (
    assemble,
    client_side_runtime,
    first_adapted_block,
    model_receiver,
    own_client,
    targets_of,
    tokenise,
    trainable_of,
    trained_body,
    truncation_notes,
)
from atlas_fl.setup.options import keeps_models, scale_of, second_part, share_of
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import select_client_side
from atlas_fl.storage.files import load_or_create_secret, secret_file
from atlas_fl.storage.tensors import write_tensors

GATED_MODEL = "gated_model.safetensors"
"""The file of a site's own model whose adapters a gate weighs."""


def _share(config: Config, job: Job) -> tuple[str, ...]:
    """Parts of the model that leave the client after this job."""
    options = job.options
    return share_of(config, options, round=job.round) if isinstance(options, TrainOptions) else config.mixing.share


class SiteRuntime:
    """The model at a site: as much of it as the newest job needs, and only from then on.

    Where models are cut, nothing is loaded before the first job says how much of it is to be here; a tokenizer
    suffices to register.
    """

    def __init__(
        self,
        config: Config,
        client: ClientData,
        *,
        model: str,
        private: Path,
        secret: Path,
        run: str | None = None,
        epsilon: float | None = None,
    ) -> None:
        """The site of this client for a server whose model has this digest; `private` is for the parts that it keeps.

        `secret` is the file of its secret, from which it draws about its own examples (`client.draws`), and the noise
        on a cut; it is made where there is none. It outlives the run, so that a site which is started again draws the
        same, and the same rows get the same noise whenever they are sent.
        `run` is the hash of the server's settings, in which this site's own places are not; that of `config` without
        it. `epsilon` bounds what its examples spend in all runs (`deployment.privacy_record`).
        Raises `ConfigError` where something else lies at `private` or `secret`.
        """
        # nothing that it draws follows from what the server knows
        draws: dict[str, Any] = {"secrets": {client.name: load_or_create_secret(secret)}, "seed": None}
        draws["settings"] = run or config_hash(config)
        if config.training.dp == "example":
            draws["pay"] = partial(pay_job, path=secret.with_name(f"{client.name}-privacy"), epsilon=epsilon)
        owner = Owner(client=client.name, config=draws["settings"])
        self._config = config
        self._client = client
        self._server_weights = model
        self._draws = draws
        self._is_full = trainable_of(config, [client.task]) == "full"
        self._whole: Params = {}
        self._site: AdapterSite | None = None
        self._blocks: int | None = None
        store, part = None, second_part(config)
        keeps_parts = not self._is_full and (keeps_models(config) or not is_fully_shared(config.mixing.share))
        if keeps_parts or config.images.carry_momentum or config.training.error_feedback:
            check_store(private, owner)
            back = config.run.checkpoint_every * config.run.keep_checkpoints
            store = PrivateParamStore(
                folder=private,
                owner=owner,
                share=partial(_share, config),
                names=lambda cut: self._names(cut).union(self._own_weights),
                draw=lambda ranks: {**self._initial_params(ranks), **self._own_weights},
                scale=scale_of(config),
                rounds=back + config.mixing.aggregate_every + config.mixing.personal_rounds,
            )
        if self._is_full or config.split.split == NONE:
            assembly = assemble(config, clients=(client,))
            self._site = replace(assembly.site, **draws)
            self.known = self._site.backbone
            self.tokens = self._site.data[client.name]
            self._whole = assembly.full_models()[client.name] if self._is_full else {}
        else:
            with torch.device("meta"):
                self.known = build_first_blocks(config.model.model, blocks=0)
            self.tokens = tokenise(client, self.known, config.data)
        self.model = model_identity(self.known, has_weights=self._site is not None)
        self.receiver = model_receiver(self.known, config, is_full=self._is_full, store=store)
        if store is not None and part is not None and part.role == "companion":
            self.receiver.combine = partial(combine_models, part)

    def __call__(self, cut: Cut | None, cut_info: CutInfo | None) -> AdapterSite:
        """The site with the blocks below this cut, or with all (`runtime.coordinator.site_worker.SiteLoader`).

        Raises `ModelError` where they are not to be had, or are not the server's.
        """
        blocks = None if cut is None else cut.blocks
        if self._site is not None and self._blocks == blocks:
            return self._site
        self._site = None  # what is not needed any more goes before anything else comes
        tokens = {self._client.name: self.tokens}
        if blocks is None or cut_info is None:
            site = assemble(self._config, clients=(self._client,), tokens=tokens).site
            expected = self._server_weights
        else:
            site = client_side_runtime(self._config, tokens, blocks=blocks, max_tokens=cut_info.tokens)
            expected = cut_info.part
        if (digest := weights_digest(site.backbone)) != expected:
            part = "" if blocks is None else f" up to block {blocks}"
            raise ModelError(
                f"model {site.backbone.name!r}{part} is {digest:.16} here and {expected:.16} at the server; give the"
                " server's model with --model"
            )
        self._site = replace(site, **self._draws)
        self._blocks = blocks
        return self._site

    @cached_property
    def _outline(self) -> tuple[Backbone, dict[str, torch.nn.Module]]:
        """The whole model, of which names and sizes are known, and its adapted layers."""
        whole = self.known
        if self._is_full:
            return whole, {}
        if self._config.split.split != NONE:
            with torch.device("meta"):
                whole = build_first_blocks(self._config.model.model, blocks=None)
        first = first_adapted_block(self._config, whole)
        return whole, target_modules(whole, targets_of(self._config, whole), first_block=first)

    @property
    def answer_limit(self) -> int:
        """Most bytes that the server may send at once."""
        whole, _ = self._outline
        body = trained_body(whole, self._config) if self._is_full else None
        return request_limit(self._config, whole.model, body=body)

    @cached_property
    def outline(self) -> Outline:
        """Names and shapes of the model and its adapters, with none of its blocks loaded."""
        whole, modules = self._outline
        params = self._initial_params(dict.fromkeys(modules, 1))
        like = {key: torch.empty_like(tensor, device="meta") for key, tensor in params.items()}
        return Outline(
            like=like,
            names=self._names,
            initial=self._initial_params,
            places=lambda cut, options: tuple(client_side_indices(whole, like, options, cut)),
            blocks=0 if self._is_full else len(whole.blocks),
            images=self._is_full and self._client.task.images,
            whole=self._is_full,
        )

    @cached_property
    def _own_weights(self) -> Params:
        """Tensors that a model of the client's own has beside the others: a weight, or a gate."""
        part = second_part(self._config)
        if part is None:
            return {}
        _, modules = self._outline
        return {**part.initial({}), **part.initial_gate(self._initial_params(dict.fromkeys(modules, 1)))}

    def _names(self, cut: Cut | None) -> frozenset[str]:
        """The trainable tensors of this client with this cut."""
        whole, modules = self._outline
        params = self._initial_params(dict.fromkeys(modules, 0))
        if cut is None:
            return frozenset(params)
        return select_client_side(whole, params, blocks=cut.blocks, head=cut.head == "client")

    def _initial_params(self, ranks: Mapping[str, int]) -> Params:
        """The shared initialisation of these modules at these ranks, and of the head."""
        if self._is_full:
            return self._whole
        whole, modules = self._outline
        return initial_params(whole, modules, ranks=ranks, task=self._client.task, seed=self._config.run.seed)


def combine_models(part: SecondModel, own: Params, shared: Params) -> Params:
    """The model that a client predicts with, of its own, whose gate is among the tensors, and of the shared one."""
    gate = {key: tensor for key, tensor in own.items() if key.endswith(LORA_GATE)}
    model = {key: tensor for key, tensor in own.items() if key not in gate}
    return part.combine(model, part.companion(model, shared), gate)


def export_own_model(
    home: SiteRuntime, config: Config, client: ClientData, model: Params, to: Path, *, on_event: OnEvent
) -> None:
    """Write the client's own model: adapters in PEFT's format, a whole one as transformers loads it.

    PEFT has no adapter with a gate, so that of such a model are the tensors, named as in a run.
    """
    if is_gated(model):
        write_tensors(to / GATED_MODEL, model)
        on_event(Note(f"PEFT has no adapter with a gate: {GATED_MODEL} has this model's tensors"))
        return
    lines = export_model(
        model,
        to,
        family=home.known.family,
        base=home.known.source,
        config=config,
        statistics=label_statistics((client,))[0],
        backbone=home.known if home.outline.whole else None,
    )
    tell_notes(on_event, *lines)


class SiteOptions(SiteChoices):
    """Choices of a site, its certificates and files, and the address of its server."""

    address: str
    """`host:port` of the server."""
    certs: Path
    """The site's own folder of `atlas certs make`."""
    token: str | None = None
    """The token that the server gave out for this one session; None where it asks for certificates alone."""
    config: Config | None = None
    """Settings that the server's must equal; None accepts any."""
    first_seconds: float = 30.0
    """Seconds for which the server is tried at the very first."""


class SiteResult(Frozen):
    """Model and traffic of a site at the end of a run."""

    name: str
    adapter: Path | None
    """None where the run has no model for this client."""
    sent_bytes: int
    received_bytes: int


def join_federation(joining: SiteOptions, *, on_event: OnEvent = ignore) -> SiteResult:
    """Work for the server until its run is complete, and write the client's own model.

    A site that was killed when its model was written only tells the server so. Raises an `AtlasError` for whatever the
    user can mend; `ProtocolError` where the server refuses or stays away.
    """
    certs = open_certs(joining.certs)
    name = certs.name
    to = Path(joining.to or f"{name}-adapter")
    private = Path(joining.private or to.with_name(f"{name}-private"))
    read_device(joining.device)
    check_consent(joining)
    secret = Path(joining.secret or secret_file(to.parent, name))
    kept = [secret.with_name(f"{name}-{what}") for what in ("privacy", "runs", "sums")]
    if to in (private, secret, *kept):
        raise ConfigError(f"--to {to} is where this site keeps what is its own; take another, such as {name}-adapter")
    if joining.private is not None:
        check_store(private)
    receipt = read_receipt(to, client=name)
    if receipt is not None and joining.config is not None and config_hash(joining.config) != receipt.config:
        raise occupied_error(to, OTHER_RUN)
    plugins = plugins_said(pin_plugins(joining.plugin))
    said = {"version": versions()["atlas_fl"], "config": None, "plugins": plugins, "model": None}
    link = _link(joining, certs, said, on_event)
    try:
        with link:
            settings = _settings_of(link, joining, said)
            if receipt is not None:
                if is_of_run := config_hash(settings) == receipt.config:
                    on_event(Note(f"the model of {name} is in {to} already; telling {joining.address}"))
                if not (is_of_run and confirm_saved(link, receipt.model)):
                    raise occupied_error(to, OTHER_RUN)
                has_model = True
                left = clear_store(private, Owner(client=name, config=receipt.config))
            else:
                has_model, left = _work(
                    link, joining, said, settings=settings, name=name, to=to, private=private, on_event=on_event
                )
    except UnreachableError as error:
        if not to.exists():
            raise
        has_model = True
        stays = f"; {private} stays until the server knows so, or you remove it" if private.exists() else ""
        left = f"{str(error).partition(';')[0]}, and {to} is complete without it{stays}"
    tell_notes(on_event, left)
    return SiteResult(
        name=name, adapter=to if has_model else None, sent_bytes=link.sent_bytes, received_bytes=link.received_bytes
    )


def _sums(config: Config, joining: SiteOptions, *, secret: Path, examples: int) -> SumSite:
    """This site in the secure sums of a run."""
    certs = open_certs(joining.certs)
    identity = Identity(
        name=certs.name,
        book=settings_policy.key_book(config, ca=certs.ca),
        signer=private_key_of(certs),
        certificate=certs.cert,
        examples=examples,
    )
    return SumSite(
        identity=identity,
        settings=noisy_settings(config, (certs.name,)),
        least=max(LEAST, joining.secure),
        is_own=config.mixing.personal_models,
        secret=load_or_create_secret(secret),
        pay=partial(pay_sums, path=secret.with_name(f"{certs.name}-sums")),
    )


def _work(
    link: Link,
    joining: SiteOptions,
    said: dict[str, str | None],
    *,
    settings: Config,
    name: str,
    to: Path,
    private: Path,
    on_event: OnEvent,
) -> tuple[bool, str]:
    """(whether this client has got a model, what stays of its private part) after all jobs of the server."""
    on_event(Note(f"{name} is connected to {joining.address}"))
    on_event(PhaseStarted("loading"))
    task = settings_policy.with_classes_of(joining.task, link.welcome.get("classes"), client=name)
    joining = replace(joining, task=task)
    run = config_hash(settings)
    device = read_device(joining.device).name
    if joining.model is None:
        model = settings_policy.find_servers_model(settings.model.model, joining, is_pinned=joining.config is not None)
        joining = replace(joining, model=model)
    config = settings_policy.settings_here(settings, joining)
    secret = Path(joining.secret or secret_file(to.parent, name))
    client = own_client(config, name, task=joining.task, part=joining.part, secret=secret)
    settings_policy.check_settings(settings, joining, client=client, device=device)
    there = str(link.welcome.get("model"))
    home = SiteRuntime(config, client, model=there, private=private, secret=secret, run=run, epsilon=joining.epsilon)
    outline = home.outline
    identity = home.model
    said |= {"config": run, "model": identity.weights, "vocabulary": identity.vocabulary}
    said |= {"architecture": identity.architecture, "tokenizer": identity.tokenizer, "run": link.welcome.get("run")}
    check_same_model(link, said, name=settings.model.model)
    link.answer_limit = max(FRAME_LIMIT, home.answer_limit)
    sent = settings_policy.what_leaves(settings, client=client, device=device, blocks=outline.blocks)
    tell_notes(on_event, *sent, *data_notes((client,)), *truncation_notes({name: home.tokens}, home.known))
    registration = metadata_of(client, home.tokens)
    metadata = read_metadata(registration)  # what the server would refuse is refused before anything is said
    account = secret.with_name(f"{name}-{'runs' if joining.dp == 'client' else 'privacy'}")
    if settings.training.dp == "example" or joining.dp == "client":
        on_event(Note(f"{'the' if account.exists() else 'a new'} account of what this site spends is {account}"))
    if joining.dp == "client":
        delta = delta_of(1, settings.training.delta)
        # the server's noise is another in every run, and this site's follows from the settings and its secret
        of_server = "" if settings.mixing.secure else read(Sha256, link.welcome.get("run"), "the server's welcome: run")
        # a site with --dp has an --epsilon, or its settings were refused
        pay_run(account, f"{run} {of_server}", cost_of_run(settings), delta=delta, most=joining.epsilon or 0.0)
    examples = len(client.train)
    shares = {split: majority(rows) for split, rows in client.splits.items() if client.task.metric_name == "accuracy"}
    baselines = {f" on {split}": f" (majority class: {share:.3f})" for split, share in shares.items() if share}
    worker = SiteClient(
        name=name,
        load_site=home,
        link=link,
        registration={**said, **registration, "device": joining.device},
        on_event=on_event,
        receiver=home.receiver,
        on_final_model=lambda model, sha256: write_model(
            to,
            Receipt(client=name, config=run, model=sha256),
            lambda draft: export_own_model(home, config, client, model, draft, on_event=on_event),
        ),
        policy=JobPolicy(
            config=settings,
            client=name,
            metadata=metadata,
            device=device,
            outline=outline,
            starts=start_models_of(settings, outline.initial, examples=examples, images=outline.images),
            most_rounds=settings_policy.most_rounds(joining, examples=examples),
        ),
        baselines=baselines,
        sums=_sums(settings, joining, secret=secret, examples=examples) if settings.mixing.secure else None,
    )
    has_model = bool(worker.run())
    if not has_model or home.receiver.store is None:
        return has_model, ""
    return has_model, clear_store(private, Owner(client=name, config=run))


def check_same_model(link: Link, said: Mapping[str, str | None], *, name: str) -> None:
    """Raise `ModelError` where the model here is not the server's.

    The server is told the digests before that, and nothing else, so that its log says why this site does not come.
    """
    for key in ("model", "vocabulary", "architecture", "tokenizer"):
        here = said[key]
        there = link.welcome.get(key)
        if here is None or there is None or here == there:
            continue
        with suppress(ProtocolError):
            link.exchange({"kind": "register", **said})
        raise ModelError(
            f"the digest of the {key} of {short_repr(name)} is {here:.16} here and {one_line(there, limit=16)} at the"
            f" server; {REMEDIES[key]}"
        )


def _link(joining: SiteOptions, certs: Certs, said: Head, on_event: OnEvent) -> Link:
    """The link to the server; `said` is read at each handshake, so that later entries are said too."""
    token = {} if joining.token is None else {"token": joining.token}
    return Link(
        joining.address,
        certs,
        hello=lambda: {**said, **token},
        patience=joining.patience,
        first_patience=joining.first_seconds,
        on_event=on_event,
    )


def _settings_of(link: Link, joining: SiteOptions, said: Head) -> Config:
    """The server's settings, which are those that the site was given, where it was given any.

    The server is told the hash of others, so that its log says why this site does not come.
    """
    text = link.welcome.get("settings")
    if not isinstance(text, str):
        raise ProtocolError("the server sent no settings; install its version of atlas-fl")
    config = parse_config(text, origin=f"what {joining.address} sent")
    if config_hash(config) != link.welcome.get("config"):
        there = one_line(link.welcome.get("config"), limit=16)
        raise ProtocolError(
            f"the server's settings have hash {config_hash(config)} here and {there} there; install its version"
        )
    if joining.config is not None and (changed := differences(joining.config, config)):
        with suppress(ProtocolError):
            link.exchange({"kind": "register", **said, "config": config_hash(joining.config)})
        values = [f"{key} is {short_repr(here)} here, {short_repr(at)} there" for key, (here, at) in changed.items()]
        raise ProtocolError(
            f"the server's settings are not those of --config ({first_of(values)}), and this site works for no others;"
            " ask who runs the server which are right, and change this file or the server's"
        )
    return config
