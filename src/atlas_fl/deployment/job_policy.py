"""The jobs that a site carries out: those that the settings it has accepted ask for, and no others.

A server names in every job the action, its options, the round and the cut. All of these follow from the settings, so
the site works them out by itself and refuses a job that says anything else, before a part of the model is loaded and
before anything is computed. What may differ between two jobs of one kind is the round, the start model (its tensors
have the names, shapes and ranks of the settings, are finite, and are what honest rounds can produce:
`deployment.start_models`) and the split that is scored, never the training one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from atlas_fl.client.calibration import SCALED_BY
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, RidgeOptions, ScaleOptions, TrainOptions
from atlas_fl.client.split_planning import blocks_below
from atlas_fl.config import Config
from atlas_fl.config.schema import AUTO, NONE, cut_setting
from atlas_fl.deployment.settings_policy import asks_sensitivity
from atlas_fl.deployment.start_models import Initial, StartModels
from atlas_fl.errors import ProtocolError, one_line, short_repr
from atlas_fl.experiment.rounds import is_aggregation_round
from atlas_fl.frozen import Frozen
from atlas_fl.methods.method import ReportTensor
from atlas_fl.methods.registry import reporting
from atlas_fl.methods.second_model import SecondModel
from atlas_fl.params import HEAD, LORA_A, LORA_B, REPORT, SHARE, Params, select, shared_params
from atlas_fl.planning.leakage import MODELS_A_ROUND
from atlas_fl.runtime.protocol import answer_schema, client_metadata, messages
from atlas_fl.setup.options import (
    cut_of,
    fingerprint_options,
    importance_options,
    is_reclustered,
    second_part,
    sensitivity_options,
    share_of,
    strategy_of,
    train_options,
)
from atlas_fl.sparse.compression import decompress
from atlas_fl.split.channel import Cut

MOST_REPEATS = 32
"""Most times that one job may come: again after a fault of server or host, or with several models of a round."""
MOST_TOKENS = 2**20
"""Most tokens of one message of a cut client's evaluation."""
MOST_VALUE = 1e3
"""Largest absolute value of a start model: larger ones can silence the gradients of all examples but a few."""
MOST_SHARE = 1 - 2**-24
"""Largest share of a site in a mean that is of others, too: the largest number of float32 below 1."""
MOST_MEASURED = 3
"""Most rounds in which a site reports what is asked for once: where its answer was late or refused, it is not told."""


class Expected(Frozen):
    """The jobs of one action that settings ask for."""

    options: Callable[[Config, Job, "Outline"], Any]
    """(settings, a job of this action, the model's outline) -> its options; free options are the job's own."""
    rounds: Callable[[Config, int], bool] = lambda _, number: number == 0
    """(settings, round) -> whether such a job belongs to this round; by default before round one."""
    asked: Callable[[Config, "Outline"], bool] = lambda *_: True
    """(settings, the model's outline) -> whether they ask for it at all."""


def _is_training_round(config: Config, number: int) -> bool:
    return 1 <= number <= config.training.rounds


def _is_scored_round(config: Config, number: int) -> bool:
    """Return whether a site's model is scored after this round; before round one it may be, for the graph."""
    last = config.training.rounds
    every = 1 if config.mixing.graph == "adaptive" else config.training.eval_every
    return number in (0, last) or (0 < number < last and number % every == 0)


def _is_clustering_round(config: Config, number: int) -> bool:
    return number == 0 or (_is_training_round(config, number) and is_reclustered(config, number))


def _fingerprint(config: Config, job: Job, outline: "Outline") -> FingerprintOptions:
    options = fingerprint_options(config, round=job.round)
    if job.cut is None:
        return options
    return replace(options, blocks=blocks_below(options, job.cut, total=outline.blocks))


def _is_own(config: Config, job: Job) -> bool:
    """Return whether this job is to train a model of the client's own, beside an anchor or a companion."""
    mixing = config.mixing
    return mixing.personal_models or job.options.second_model == mixing.second_model != "none"


def _training(config: Config, job: Job, outline: "Outline") -> TrainOptions:
    options = train_options(config, with_images=outline.images)
    part = second_part(config)
    if part is not None and _is_own(config, job) and not config.mixing.personal_models:
        return replace(options, **part.own_options)
    method = strategy_of(config)
    if not is_aggregation_round(config, job.round) or not method.reports_in(job.round):
        return options
    if method.asks_once and job.options.report == "none":
        return options  # who has reported is not asked again
    return replace(options, report=method.report)


def _evaluation(config: Config, job: Job, _: "Outline") -> EvaluateOptions:
    options: EvaluateOptions = job.options
    return EvaluateOptions(
        split="test" if options.split == "test" else "validation",
        new_tokens=config.data.new_tokens if options.new_tokens else 0,
        # a plan's first scores, for the graph, are of models that were not corrected
        prior_correction=config.training.prior_correction and options.prior_correction,
    )


def _fits_heads(config: Config, outline: "Outline") -> bool:
    return outline.whole and config.images.head_first == "ridge"


JOBS: Mapping[str, Expected] = {
    "fingerprint": Expected(
        options=_fingerprint,
        rounds=_is_clustering_round,
        asked=lambda config, outline: (
            strategy_of(config).clustered or (config.clustering.fingerprint == "delta" and not outline.whole)
        ),
    ),
    "importance": Expected(
        options=lambda config, *_: importance_options(config),
        rounds=lambda config, number: number == 0 or (config.ranks.rerank and _is_clustering_round(config, number)),
        asked=lambda config, outline: not outline.whole and config.measures_importance,
    ),
    "ridge": Expected(options=lambda *_: RidgeOptions(), asked=_fits_heads),
    "scale": Expected(
        options=lambda _, job, __: ScaleOptions(examples=min(max(1, job.options.examples), SCALED_BY)),
        asked=_fits_heads,
    ),
    "sensitivity": Expected(
        # names are held against the model's in `JobPolicy`
        options=lambda config, job, _: sensitivity_options(config, job.options.names),
        asked=lambda config, outline: outline.whole and asks_sensitivity(config),
    ),
    "train": Expected(options=_training, rounds=_is_training_round),
    "evaluate": Expected(options=_evaluation, rounds=_is_scored_round),
}
"""By action."""


class Outline(Frozen):
    """Names and shapes of the model that a site is to train, before any of it is loaded."""

    like: Mapping[str, Tensor]
    """The trainable tensors of the whole model by name, adapters at rank one."""
    names: Callable[[Cut | None], frozenset[str]]
    """Names of those that are at the site with this cut."""
    initial: Initial
    """The tensors of round one."""
    places: Callable[[Cut, TrainOptions], tuple[int, ...]]
    """Indices of the trained ones of a cut client among all that these options train."""
    blocks: int
    """Blocks of the model."""
    images: bool = False
    """The model sees images."""
    whole: bool = False
    """All weights train, and no adapters."""


@dataclass(kw_only=True, eq=False)
class JobPolicy:
    """`runtime.coordinator.site_worker.Policy` of a site that has accepted these settings."""

    config: Config
    """The settings as the server sent them: its own name for the model says the learning rate."""
    client: str
    metadata: client_metadata.ClientMetadata
    """The site's own, as it registers with it."""
    device: str
    outline: Outline
    starts: StartModels
    """The site's knowledge of the models that come."""
    most_rounds: int
    """Most rounds in which this site trains."""
    _trained: set[int] = field(default_factory=set)
    """The rounds in which it was asked to train."""
    _seen: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    _named: dict[tuple[Any, ...], set[messages.PrivateRef | None]] = field(default_factory=dict)
    """By action, round, split and kind of the training, what was named of this site's own."""
    _measured: set[int] = field(default_factory=set)
    """The rounds in which what is reported once was asked for."""
    _trained_cut: int | None = None
    """Blocks below the cut that this site was first trained with, 0 of a whole model; `auto` moves no cut after it."""

    def check_job(self, head: Mapping[str, Any]) -> None:
        """Raise `ProtocolError` unless the settings ask for this job.

        The head of its message suffices: no tensor is looked at, and nothing is loaded.
        """
        action, job, cut_info = messages.read_job(head, {}, client=self.client)
        cut = job.cut
        if cut is not None:
            if not 1 <= cut.blocks < self.outline.blocks:
                raise _refusal(f"a cut at block {cut.blocks}", f"1 to {self.outline.blocks - 1} blocks at the site")
            _check_same("a cut", cut, cut_of(self.config, cut.blocks))
        blocks = 0 if cut is None else cut.blocks
        agreed = self._trained_cut if self._word == AUTO else 0 if self._word == NONE else int(self._word)
        if agreed not in (None, blocks):
            since = ", where this site was first trained" if self._word == AUTO else ""
            raise _refusal(_cut_words(blocks), _cut_words(agreed) + since)
        self._check_action(action, job)
        if cut is not None and cut_info is not None:
            self._check_cut_info(action, job, cut_info, cut)
        private = self.check_private(head)
        if self.outline.whole:
            self._check_whole(action, job, head)
        if action == "train":
            self._check_rounds(job)
        self._check_repeats(action, job, private)

    def check_private(self, head: Mapping[str, Any]) -> messages.PrivateRef | None:
        """The part of the model that a message names; raises `ProtocolError` for ranks that the settings have not."""
        private = messages.read_private(head)
        for rank in () if private is None else private.ranks:
            if not 1 <= rank <= self._most_rank:  # it costs memory here
                raise _refusal(f"rank {rank}", f"1 to {self._most_rank}")
        return private

    def check_model(self, action: str, job: Job, *, is_own: bool, own: Params) -> None:
        """Raise `ProtocolError` unless a job's model has the tensors of this site, finite and of the settings' shapes.

        Class means to pull features to come with it only where the settings align features, an anchor or a companion
        only where a model of one's own trains, which begins with the weights of the settings. A model that no server
        has made is its client's own. In sums of such models sites hold the anchor against each other's (`SumSite`), so
        a start is one's own or the initialisation. To score, the `own` model stands beside the job's.
        """
        mixing, others = self.config.mixing, dict(job.sent)
        part = second_part(self.config) if own or (action == "train" and _is_own(self.config, job)) else None
        if part is not None and not own and (first := part.initial({})):
            weights = {key: ReportTensor(shape=(), least=float(one), most=float(one)) for key, one in first.items()}
            if not is_own:
                answer_schema.check_tensors(select(job.params, job.params.keys() & first.keys()), weights)
            job = replace(job, params={key: tensor for key, tensor in job.params.items() if key not in first})
        if not own:
            self._check_tensors(job.params, job.cut, what=f"the model of {action}")
            is_first = action == "train" and mixing.secure and mixing.personal_models
            if not is_own:
                self.starts.check(action, job, is_initial=is_first)
        if part is not None:
            shared = job.params if own else others.pop(part.role, {})
            what = f"the model of {action}" if own else f"the {part.role}"
            rest = self._check_shared(part, own or job.params, shared, what=what)
            self.starts.check(action, replace(job, params=rest), is_anchor=not part.begins_there)
        if others:
            method = strategy_of(self.config)
            allowed = method.sent_tensors(self.outline.like, classes=self.metadata.num_labels, round=job.round)
            if action != "train" or not others.keys() <= allowed.keys():
                raise _refusal(
                    f"{action} in round {job.round} with {short_repr(sorted(others))} beside the model", "none then"
                )
            for kind, tensors in others.items():
                if tensors.keys() != allowed[kind].keys():
                    raise _refusal(f"{kind} of {short_repr(sorted(tensors))}", f"{kind} of {sorted(allowed[kind])}")
                answer_schema.check_tensors(tensors, allowed[kind])

    def check_answer(self, action: str, job: Job, tensors: Params) -> None:
        """Raise `ProtocolError` where an answer holds more than this action brings back.

        The last check before sending: whatever a job was, nothing that is not shared goes out.
        """
        share: tuple[str, ...] = self.config.mixing.share
        if action == "train":
            share = share_of(self.config, job.options, round=job.round)
        shared = job.params if self.outline.whole else shared_params(job.params, share)
        request = answer_schema.AnsweredRequest(
            action=action,
            job=replace(job, params=shared),
            metadata=self.metadata,
            num_layers=None if self.outline.whole else self.outline.blocks,
        )
        expected = answer_schema.SCHEMAS[action](request)
        names: Iterable[str] = () if expected.keeps_model else shared
        if expected.tensors is not None:
            names = expected.tensors
        allowed = {f"param/{key}" for key in names} | {"metrics", "param/values"}
        report = job.options.report if action == "train" else "none"
        if report != "none":
            schemas = reporting(report).report_tensors(shared, classes=self.metadata.num_labels)
            allowed |= {f"{REPORT}{report}/{name}" for name in schemas}
        cut = self._word != NONE
        for key in tensors:
            if key not in allowed and not (cut and key.startswith("cut/")):
                raise _refusal(f"{short_repr(key)} with its answer to {action}", "what the settings share")
        if action == "train" and share:
            own = {key.removeprefix("param/"): tensor for key, tensor in tensors.items() if key.startswith("param/")}
            self.starts.remember(job, decompress(own, job.params))

    def check_final_model(self, params: Params, *, own: Params) -> None:
        """Raise `ProtocolError` unless this can be the client's own model at the end, or stand beside the `own` one."""
        part, what = second_part(self.config), "the model at the end"
        if own and part is not None:
            self._check_shared(part, own, params, what=what)
        else:
            self._check_tensors(params, None, what=what)

    def _check_shared(self, part: SecondModel, own: Params, shared: Params, *, what: str) -> Params:
        """The model that a client's own one is combined with: the shared one, or what others have in it.

        Raises `ProtocolError` where either has not the tensors of this site that the settings share, finite and of the
        shapes of the client's own, and for a share that no mean of several has.
        """
        share = {key: tensor for key, tensor in shared.items() if key == SHARE and part.tells_share}
        if share:
            answer_schema.check_tensors(share, {SHARE: ReportTensor(shape=(), least=0.0, most=MOST_SHARE)})
        mean = {key: tensor for key, tensor in shared.items() if key not in share}
        self._check_tensors(mean, None, what=what, is_shared=True)
        if odd := [key for key, tensor in mean.items() if tensor.shape != own[key].shape]:
            raise _refusal(f"{what} with {odd[0]} {tuple(mean[odd[0]].shape)}", "the model's own shape")
        rest = part.companion(own, shared)
        self._check_tensors(rest, None, what=f"{what} without this site", is_shared=True)
        return rest

    def _check_repeats(self, action: str, job: Job, private: messages.PrivateRef | None) -> None:
        kind = (action, job.round, getattr(job.options, "split", ""), getattr(job.options, "second_model", ""))
        named = self._named.setdefault(kind, set())
        named.add(private)
        if len(named) > MODELS_A_ROUND:
            what = f"{action} of round {job.round} with {len(named)} models of this site's own"
            raise _refusal(what, f"{MODELS_A_ROUND} at most")
        seen = kind[:-1]
        self._seen[seen] += 1
        if self._seen[seen] > MOST_REPEATS:
            raise _refusal(f"{action} of round {job.round} {MOST_REPEATS + 1} times", "a few times at most")

    def _check_rounds(self, job: Job) -> None:
        if self._trained_cut is None:
            self._trained_cut = 0 if job.cut is None else job.cut.blocks
        self._trained.add(job.round)
        if len(self._trained) > self.most_rounds:
            allowed = f"{self.most_rounds} for so many examples as it has (--max-rounds-per-example)"
            raise _refusal(f"training in a {len(self._trained)}th round", allowed)
        if job.options.report != "none" and strategy_of(self.config).asks_once:
            self._measured.add(job.round)
        if len(self._measured) > MOST_MEASURED:
            raise _refusal(f"its {job.options.report} in a {len(self._measured)}th round", "once, and again if late")

    def _check_action(self, action: str, job: Job) -> None:
        asked = [name for name, known in JOBS.items() if known.asked(self.config, self.outline)]
        if action not in asked:
            raise _refusal(action, ", ".join(asked))
        expected = JOBS[action]
        if not expected.rounds(self.config, job.round):
            raise _refusal(f"{action} in round {job.round}", f"--rounds {self.config.training.rounds}")
        _check_same(action, job.options, expected.options(self.config, job, self.outline))

    @property
    def _word(self) -> str:
        return cut_setting(self.config.split.split, client=self.client, task=self.metadata.task, device=self.device)

    def _check_cut_info(self, action: str, job: Job, cut_info: messages.CutInfo, cut: Cut) -> None:
        if not 1 <= cut_info.tokens <= MOST_TOKENS:
            raise _refusal(f"messages of {cut_info.tokens} tokens", f"1 to {MOST_TOKENS}")
        options: TrainOptions | None = job.options if action == "train" else None
        if cut_info.places != (() if options is None else self.outline.places(cut, options)):
            raise _refusal("other tensors below the cut", "those of the model")

    def _check_whole(self, action: str, job: Job, head: Mapping[str, Any]) -> None:
        body = {key for key in self.outline.like if not key.startswith(HEAD)}
        if action == "sensitivity" and set(job.options.names) != body:
            raise _refusal("scores of other weights", "one for every weight of the body")
        masked = head.get("masked") is True
        if masked and not self.config.sparse.has_mask:
            raise _refusal("training under a mask", "no mask")
        if action == "train" and self.config.sparse.has_mask and not masked:
            raise _refusal("training without a mask", "a mask")

    @property
    def _most_rank(self) -> int:
        return max(self.config.ranks.candidates)

    def _check_tensors(self, params: Params, cut: Cut | None, *, what: str, is_shared: bool = False) -> None:
        """Raise `ProtocolError` unless these are this site's tensors with this cut, at ranks of the settings.

        Of a model that `is_shared` those that the settings share.
        """
        share = self.config.mixing.share if is_shared else ("A", "B", "head")
        names = self.outline.names(cut) & shared_params(self.outline.like, share).keys()
        if odd := sorted(params.keys() ^ names):
            kind = "has" if odd[0] in params else "lacks"
            raise ProtocolError(
                f"{what} {kind} {short_repr(odd[0])}; install the server's version of atlas-fl, or ask who runs it"
            )
        schemas = {}
        for name in sorted(names):
            like = self.outline.like[name]
            shape = tuple(like.shape)
            if name.endswith((LORA_A, LORA_B)):
                factor = params[name[: -len(LORA_A)] + LORA_A]
                rank = min(max(factor.shape[0] if factor.ndim else 0, 1), self._most_rank)
                shape = (rank, shape[1]) if name.endswith(LORA_A) else (shape[0], rank)
            schemas[name] = ReportTensor(shape=shape, dtype=like.dtype, least=-MOST_VALUE, most=MOST_VALUE)
        try:
            answer_schema.check_tensors(params, schemas)
        except ProtocolError as error:
            raise ProtocolError(
                f"{what}: {error}; install the server's version of atlas-fl, or ask who runs it"
            ) from None


def _cut_words(blocks: int | None) -> str:
    return f"a cut at block {blocks}" if blocks else "the whole model"


def _refusal(request: str, agreed: str) -> ProtocolError:
    return ProtocolError(
        f"the server asks for {request}, and the settings that this site accepted say {agreed}; nothing was sent: ask"
        " who runs it"
    )


def _check_same(what: str, came: Any, agreed: Any) -> None:
    """Raise `ProtocolError` for the first field of a dataclass that is not as it follows from the settings."""
    own = _by_name(came)
    for name, value in _by_name(agreed).items():
        if own[name] != value:
            raise _refusal(f"{what} with {name} {one_line(own[name], limit=60)}", one_line(value, limit=60))


def _by_name(options: Any, before: str = "") -> dict[str, Any]:
    """Options by name, those of nested options with a dot between, but for `hash_loaded`.

    Hashing of the loaded model, for an audit, is the server's choice from session to session.
    """
    values: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if is_dataclass(value):
            values |= _by_name(value, f"{before}{option.name}.")
        elif option.name != "hash_loaded":
            values[before + option.name] = value
    return values
