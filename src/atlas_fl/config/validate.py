"""Whether a config can be run, as far as that can be told without reading any data."""

from dataclasses import fields

from atlas_fl.config.counts import check_counts
from atlas_fl.config.data import arrivals
from atlas_fl.config.fields import settings, value_of
from atlas_fl.config.groups import Config, DataConfig, MixingConfig, RanksConfig, RunConfig
from atlas_fl.config.images import EVENLY
from atlas_fl.config.kinds import mistake, read, whole_number, wrong_kind
from atlas_fl.config.names import check_names
from atlas_fl.config.ranges import check_ranges
from atlas_fl.config.splitting import AUTO, NONE, SplitConfig, cuts_by_name
from atlas_fl.config.training import TrainingConfig
from atlas_fl.errors import ConfigError

LONGEST_NAME = 200
"""Bytes of a run's name: file systems allow 255, and files beside it are named after it."""


def validate(config: Config, *, at_sites: bool = False) -> Config:
    """The same config, if every setting has its type and range, contradicts no other and names what there is.

    With `at_sites` the clients are those who come, whoever that is: nothing is held against the config's own.

    Raises:
        AtlasError: the first setting that does not; one line with its value, what is allowed and the remedy.
    """
    check_types(config)
    check_ranges(config)
    _check_data(config.data)
    _check_arrivals(config)
    _check_clusters(config, at_sites=at_sites)
    _check_ranks(config.ranks)
    _check_split(config.split)
    _check_mixing(config.mixing)
    _check_run(config.run)
    _check_rerank(config)
    _check_patience(config.training)
    _check_shared(config)
    _check_images(config)
    _check_attack(config)
    check_names(config, at_sites=at_sites)
    return config


def check_types(config: Config) -> None:
    """Nothing where every value has the type that its setting declares, and every text is printable.

    Raises:
        ConfigError: one has not.
    """
    for setting in settings().values():
        value = value_of(config, setting.name)
        try:
            # a list is unequal to the tuple that it should be; NaN, unequal to itself, is a matter of ranges
            fits = bool(read(value, setting.kind) == value or value != value)
        except ValueError:
            fits = False
        if not fits:
            raise wrong_kind(setting.flag, value, setting.kind)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not (text and text.isprintable()):
                raise mistake(setting.flag, text, "printable text that is not empty")


def _check_data(data: DataConfig) -> None:
    if not data.tasks and not data.task:
        raise ConfigError("--tasks is empty; a federation needs at least one task; see `atlas list tasks`")
    if repeated := _repeated(data.tasks):
        raise ConfigError(f"--tasks names {repeated!r} twice; name a task once and raise --clients-per-task")


def _check_arrivals(config: Config) -> None:
    for name, number in arrivals(config.data.arrive).items():
        if number > config.training.rounds:
            raise ConfigError(
                f"--arrive lets {name} join before round {number}, and the run has {config.training.rounds}; choose an"
                " earlier round"
            )


def _check_clusters(config: Config, *, at_sites: bool) -> None:
    tasks = {*config.data.tasks, *(own.partition("=")[0] for own in config.data.task)}
    check_counts(config.clustering, clients=None if at_sites else len(tasks) * config.data.clients_per_task)
    low, high = config.clustering.k_range
    if low > high:
        raise mistake("--k-range", (low, high), "the smaller number first")


def _check_ranks(ranks: RanksConfig) -> None:
    candidates = ranks.candidates
    if not candidates or list(candidates) != sorted(set(candidates)):
        raise mistake("--candidates", candidates, "at least one rank, each larger than the one before it")
    rank = whole_number(ranks.ranks)
    if rank is not None and rank not in candidates:
        listed = ", ".join(map(str, candidates))
        raise ConfigError(
            f"--ranks is {rank}, a rank that is no candidate; the candidates are {listed}; "
            "choose one of them, or add it to --candidates"
        )
    if (total := ranks.alpha_base + ranks.alpha_act + ranks.alpha_opt) >= 1:
        raise ConfigError(
            f"--alpha-base, --alpha-act and --alpha-opt add up to {total:g}; allowed: below 1, or nothing is left "
            "for the adapters; lower one of them"
        )


def _check_split(split: SplitConfig) -> None:
    if set(cuts_by_name(split.split).values()) != {NONE}:
        return
    if split.server_adapters != "per_client":
        raise ConfigError(
            f"--server-adapters {split.server_adapters} is about the parts above cuts, and --split {split.split} cuts"
            " none; choose cuts, such as --split auto, or leave --server-adapters out"
        )
    if split.topology != "server":
        raise ConfigError(
            f"--topology {split.topology} says who computes the upper parts of cut models, and --split {split.split}"
            " cuts none; choose cuts, such as --split auto, or leave --topology out"
        )
    if split.leakage:
        raise ConfigError(
            f"--leakage tells what the cuts give away, and --split {split.split} makes none; choose cuts, or see"
            " `atlas leakage` for every one that there could be"
        )


def _check_mixing(mixing: MixingConfig) -> None:
    share = mixing.share
    if not share or _repeated(share):
        raise mistake("--share", share, "one or more of A, B, head, each once")
    if mixing.space == "product" and ("A" in share) != ("B" in share):
        raise ConfigError(
            f"--share {' '.join(share)} leaves out one factor of the update s B A, which --space product mixes as a "
            "whole; share both A and B, or choose --space factors"
        )


def _check_run(run: RunConfig) -> None:
    name = run.name
    if name is not None and ("/" in name or name.startswith(".") or len(name.encode()) > LONGEST_NAME):
        words = f"the name of a folder of at most {LONGEST_NAME} bytes, without / and not starting with a dot"
        raise mistake("--name", name[:LONGEST_NAME], words)


def _check_rerank(config: Config) -> None:
    every, waits = config.clustering.recluster_every, config.mixing.aggregate_every
    if config.ranks.rerank and every == 0:
        raise ConfigError(
            "--rerank chooses ranks again when clients are clustered again, and --recluster-every is 0; set it to 1 or "
            "more, or leave --rerank out"
        )
    if config.ranks.rerank and AUTO in cuts_by_name(config.split.split).values():
        raise ConfigError(
            f"--rerank may move the cut that --split {config.split.split} chooses, and cuts stay where they are; give"
            " the number of blocks that `atlas plan` shows, or leave --rerank out"
        )
    if config.ranks.rerank and every % waits:
        raise ConfigError(
            f"--rerank changes the models that the server holds, and --recluster-every is {every}, no multiple of "
            f"--aggregate-every {waits}; make it one"
        )


def _check_attack(config: Config) -> None:
    attack = config.attack
    if attack.attack == "none":
        if attack.attackers or attack.attack_scale is not None:
            raise ConfigError(
                "--attackers and --attack-scale say who attacks and how, and --attack is none; choose one"
            )
        return
    if not attack.attackers:
        raise ConfigError(f"--attack {attack.attack} needs --attackers: clients by name, or how many")
    if config.data.arrive:
        raise ConfigError(
            f"--attack is of those who are there from the start; leave --arrive {config.data.arrive[0]} out"
        )
    if config.split.server_adapters != "per_client":
        raise ConfigError(
            f"--attack {attack.attack} alters what a client sends, and --server-adapters {config.split.server_adapters}"
            " are the server's; take per_client"
        )


def _check_patience(training: TrainingConfig) -> None:
    if training.min_delta and not training.patience:
        raise ConfigError(
            f"--min-delta is {training.min_delta} and says what is better for --patience, which is 0; set --patience to"
            " a number of rounds, or leave --min-delta out"
        )


def _check_shared(config: Config) -> None:
    split = config.split
    if split.server_adapters == "per_client":
        return
    if split.topology != "server":
        raise ConfigError(
            f"--server-adapters {split.server_adapters} moves one set by all of a cluster at once, and --topology"
            f" {split.topology} puts its clients on several hosts; leave one of them out"
        )
    if (every := config.clustering.recluster_every) > 0:
        raise ConfigError(
            f"--server-adapters {split.server_adapters} belong to a cluster, and --recluster-every {every} may change"
            " who that is; set it to 0, or take per_client"
        )
    if config.data.arrive:
        raise ConfigError(
            f"--server-adapters {split.server_adapters} belong to those who were there when the plan was made, and"
            f" --arrive {config.data.arrive[0]} comes later; leave one of them out"
        )


def _check_images(config: Config) -> None:
    nc, partition = config.images.nc, config.data.partition
    if nc != EVENLY and partition != "iid":
        raise ConfigError(
            f"--nc {nc} and --partition {partition} are two ways to deal out classes; leave one of them out"
        )
    _check_mask(config)
    _check_momentum(config)
    if nc != EVENLY and (whole_number(nc) or 0) < 1:
        raise mistake("--nc", nc, "iid, or a number of classes from 1")


def _check_mask(config: Config) -> None:
    sparse = config.sparse
    made = [one.name for one in fields(sparse) if one.name != "mask_file" and getattr(sparse, one.name) != one.default]
    if sparse.mask_file is not None and made:
        raise ConfigError(
            f"--{made[0].replace('_', '-')} {getattr(sparse, made[0])} says how a mask is made, and --mask-file brings"
            " one; leave one of them out"
        )
    if sparse.masked and config.images.head_first == "none":
        flag = f"--mask {sparse.mask}" if sparse.mask_file is None else "--mask-file"
        raise ConfigError(
            f"{flag} freezes the head, and with --head-first none that is a random one; leave --head-first at ridge, or"
            f" {flag.split()[0]} out"
        )
    if sparse.masked and config.mixing.share == ("head",):
        raise ConfigError("a mask freezes the head, and --share head shares nothing else; share A B head, or no mask")


def _check_momentum(config: Config) -> None:
    images, share = config.images, config.training.participation
    if images.carry_momentum and images.momentum == 0:
        raise ConfigError("--carry-momentum has nothing to carry with --momentum 0; set it, or leave the other out")
    if images.carry_momentum and share < 1:
        raise ConfigError(
            f"--carry-momentum keeps what a client did in the round before, and with --participation {share:g} that is"
            " mostly an older one; take --participation 1, or leave --carry-momentum out"
        )
    if images.carry_momentum and (config.run.engine != "local" or config.run.workers not in (None, 1)):
        raise ConfigError(
            "--carry-momentum keeps what clients did in one process, and --workers and --engine ray have several; leave"
            " one of them out"
        )


def _repeated(names: tuple[str, ...]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)
