"""What a site brings to a federation across machines: as much of the model as its jobs need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from atlas_fl.assemble import assemble, scale_of, site_below, targets_of, tokenise
from atlas_fl.assemble_images import assemble_images, body_of
from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import ClientTokens, Job, Update
from atlas_fl.clients.base import Site as AdapterSite
from atlas_fl.clients.fresh import fresh
from atlas_fl.clients.images.whole import ImageSite
from atlas_fl.clients.member import trained_below
from atlas_fl.clients.patches import patches
from atlas_fl.config import Config, config_hash
from atlas_fl.config.splitting import NONE
from atlas_fl.deployed.job_policy import Outline, outlined
from atlas_fl.engines.messages.ends import AdapterReceiver, Receiver
from atlas_fl.engines.messages.vault import Owner, PrivateReceiver, Vault, check_vault
from atlas_fl.engines.messages.whole_ends import WholeReceiver
from atlas_fl.engines.messages.wire import Told
from atlas_fl.engines.whole import WHOLE_ACTIONS
from atlas_fl.errors import ModelError, ProtocolError
from atlas_fl.io.secret import kept_secret
from atlas_fl.lines import IMAGES, line_of
from atlas_fl.lora.peft_io import export_adapter
from atlas_fl.models.backbone import Backbone, target_modules
from atlas_fl.models.parts import bottom_of
from atlas_fl.models.vision_export import save_vision
from atlas_fl.private import shares_all
from atlas_fl.split.model import on_client
from atlas_fl.split.step import Cut
from atlas_fl.tasks.clients import ClientData
from atlas_fl.tree import digest
from atlas_fl.types import Params


class Site(Protocol):
    """What a site brings to the work: its model, how it reads jobs, and where its own model goes."""

    fingerprint: str | None
    """Digest of the weights; None where none is loaded yet."""
    tokens: ClientTokens
    """The client's examples, of which the server is told how many there are."""
    receiver: Receiver
    actions: Mapping[str, Callable[[Sequence[Job], Any], list[Update]]]

    @property
    def outline(self) -> Outline:
        """What is known of the model before it is loaded, which jobs are held against."""
        ...

    def __call__(self, cut: Cut | None, told: Told | None) -> Any:
        """The site with as much of the model as this job needs (`engines.hall.worker.Home`)."""
        ...

    def export(self, model: Params, to: Path) -> None:
        """Write the client's own model."""
        ...

    def leave(self) -> str:
        """Remove what was kept for the run, which is complete; what stays of it, in a line."""
        ...


def home_of(
    config: Config,
    client: ClientData,
    *,
    model: str,
    private: Path,
    noise_secret: Path,
    run: str | None = None,
) -> Site:
    """The site of this client for a server whose model has this digest; `private` is for what it does not share.

    `noise_secret` is the file of what its noise is drawn from, made where the settings ask for noise. It outlives the
    run, so that the same rows get the same noise whenever they are sent.
    `run` is the hash of the server's settings, in which this site's own places are not; that of `config` without it.
    Raises `ConfigError` where something else lies at `private` or `noise_secret`.
    """
    if line_of([client.task], tune=config.images.tune) is IMAGES:
        return WholeHome(config, client)
    owner = Owner(client=client.name, config=run or config_hash(config))
    return Home(config, client, model=model, private=private, noise_secret=noise_secret, owner=owner)


class WholeHome:
    """A site whose client trains the whole model of its images."""

    def __init__(self, config: Config, client: ClientData) -> None:
        self._client = client
        assembly = assemble_images(config, clients=(client,))
        self._site = assembly.site
        vision = self._site.vision
        self.fingerprint: str | None = digest(dict(vision.backbone.named_parameters()))
        self.tokens = patches(client, length=1)
        body, like = body_of(vision, config), outlined(assembly.start()[client.name])
        self.receiver: Receiver = WholeReceiver(home=body)
        self.actions: Mapping[str, Any] = WHOLE_ACTIONS
        self.outline = Outline(
            like=like, names=lambda _: frozenset(like), places=lambda *_: (), blocks=0, whole=True, body=digest(body)
        )

    def __call__(self, cut: Cut | None, told: Told | None) -> ImageSite:
        """The site; raises `ProtocolError` where the server would cut the model."""
        if cut is not None or told is not None:
            raise ProtocolError("the server cuts a model of images; install its version of atlas-fl")
        return self._site

    def export(self, model: Params, to: Path) -> None:
        """Write the client's own model as transformers loads it."""
        save_vision(self._site.vision, model, to, labels=self._client.task.label_names)

    def leave(self) -> str:
        """Nothing is kept, and nothing stays."""
        return ""


class Home:
    """The model at a site: as much of it as the newest job needs, and only from then on.

    Where models are cut, nothing is loaded before the first job says how much of it is to be here; a tokenizer
    suffices to register.
    """

    def __init__(
        self, config: Config, client: ClientData, *, model: str, private: Path, noise_secret: Path, owner: Owner
    ) -> None:
        self._config, self._client, self._model = config, client, model
        self._vault = None if shares_all(config.mixing.share) else self._vault_in(private, owner)
        is_noisy = config.split.split != NONE and config.split.wire_noise > 0
        self._noise_secret = kept_secret(noise_secret) if is_noisy else None
        self.receiver: Receiver = AdapterReceiver() if self._vault is None else PrivateReceiver(vault=self._vault)
        self.actions: Mapping[str, Any] = ACTIONS
        self._site: AdapterSite | None = None
        self._blocks: int | None = None
        if config.split.split == NONE:
            self._site = assemble(config, clients=(client,)).site
            self.known, self.tokens = self._site.backbone, self._site.data[client.name]
            self.fingerprint: str | None = _fingerprint(self.known)
        else:
            with torch.device("meta"):
                self.known = bottom_of(config.model.model, blocks=0)
            self.tokens = tokenise(client, self.known, config.data)
            self.fingerprint = None

    def export(self, model: Params, to: Path) -> None:
        """Write the client's own model in PEFT's format."""
        labels, scale = self._client.task.label_names, scale_of(self._config)
        export_adapter(model, to, family=self.known.family, base=self.known.source.path, scale=scale, labels=labels)

    def __call__(self, cut: Cut | None, told: Told | None) -> AdapterSite:
        """The site with the blocks below this cut, or with all (`engines.hall.worker.Home`).

        Raises `ModelError` where they are not to be had, or are not the server's; `ProtocolError` for a cut with other
        noise than the settings have.
        """
        blocks = None if cut is None else cut.blocks
        if cut is not None and cut.noise != (noise := self._config.split.wire_noise):
            raise ProtocolError(
                f"the server asks for noise of {cut.noise:g} at a cut, and its settings say {noise:g}; nothing was"
                " sent: ask who runs it"
            )
        if self._site is not None and self._blocks == blocks:
            return self._site
        self._site = None  # what is not needed any more goes before anything else comes
        tokens = {self._client.name: self.tokens}
        if blocks is None or told is None:
            site, wanted = assemble(self._config, clients=(self._client,), tokens=tokens).site, self._model
        else:
            site, wanted = site_below(self._config, tokens, blocks=blocks, max_tokens=told.tokens), told.part
        if (found := _fingerprint(site.backbone)) != wanted:
            part = "" if blocks is None else f" up to block {blocks}"
            raise ModelError(
                f"model {site.backbone.name!r}{part} is {found:.16} here and {wanted:.16} at the server; give the"
                " server's model with --model"
            )
        self._site, self._blocks = replace(site, noise_secret=self._secret_of()), blocks
        return self._site

    def _secret_of(self) -> Callable[[str], bytes] | None:
        """What this site's noise is drawn from: never what a simulation draws from, which the server knows."""
        secret = self._noise_secret
        return None if secret is None else lambda _: secret

    def leave(self) -> str:
        """Remove what was not shared: it is in the client's own model now; what stays of it, in a line."""
        return "" if self._vault is None else self._vault.clear()

    def _vault_in(self, folder: Path, owner: Owner) -> Vault:
        share, run = self._config.mixing.share, self._config.run
        check_vault(folder, owner)
        back = run.checkpoint_every * run.keep_checkpoints + self._config.mixing.aggregate_every
        scale = scale_of(self._config)
        return Vault(
            folder=folder, owner=owner, share=share, names=self._names, draw=self._drawn, scale=scale, rounds=back
        )

    @cached_property
    def _outline(self) -> tuple[Backbone, dict[str, nn.Module]]:
        """The whole model, of which names and sizes are known, and its adapted layers."""
        whole = self.known
        if self._config.split.split != NONE:
            with torch.device("meta"):
                whole = bottom_of(self._config.model.model, blocks=None)
        return whole, target_modules(whole, targets_of(self._config, whole))

    @cached_property
    def outline(self) -> Outline:
        """What is known of the model and its adapters, with none of its blocks loaded."""
        whole, modules = self._outline
        like = outlined(self._drawn(dict.fromkeys(modules, 1)))
        return Outline(
            like=like,
            names=self._names,
            places=lambda cut, options: tuple(trained_below(whole, like, options, cut)),
            blocks=len(whole.blocks),
        )

    def _names(self, cut: Cut | None) -> frozenset[str]:
        """The trainable tensors of this client with this cut."""
        whole, modules = self._outline
        found = self._drawn(dict.fromkeys(modules, 0))
        if cut is None:
            return frozenset(found)
        return on_client(whole, found, blocks=cut.blocks, head=cut.head == "client")

    def _drawn(self, ranks: Mapping[str, int]) -> Params:
        """The shared initialisation of these modules at these ranks, and of the head."""
        whole, modules = self._outline
        return fresh(whole, modules, ranks=ranks, task=self._client.task, seed=self._config.run.seed)


def _fingerprint(backbone: Backbone) -> str:
    return digest(dict(backbone.model.named_parameters()))
