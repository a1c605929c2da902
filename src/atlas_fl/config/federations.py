"""Federations with a dial (`--preset NAME --dial 0..4`), as settings; what they do to clients is `data.heterogeneity`.

Null, label skew, concept shift, sources, contradiction, sizes, a wrong number of clusters, images with N_c classes. A
dial is five sets of settings; each setting is one of `DataConfig` and fits a user's own tasks as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atlas_fl.config.schema import (
    ClusteringConfig,
    Config,
    DataConfig,
    ImagesConfig,
    MixingConfig,
    ModelConfig,
    RanksConfig,
    RunConfig,
    TrainingConfig,
)
from atlas_fl.config.settings import replace_settings, settings, value_of
from atlas_fl.config.values import invalid_value, to_words
from atlas_fl.errors import ConfigError

MIDDLE = 2
"""The dial of a preset where none is given."""


@dataclass(frozen=True, kw_only=True)
class Dial:
    """A difference between the clients of a federation, at five amounts."""

    what: str
    """What is turned."""
    words: tuple[str, str, str, str, str]
    """The five amounts, for people."""
    settings: tuple[Mapping[str, Any], ...]
    """The settings of each amount."""


def _values(name: str, *values: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({name: value} for value in values)


DIALS: Mapping[str, Dial] = {
    "null": Dial(
        what="training examples of a client; clients of a task are drawn alike",
        words=("25", "50", "100", "200", "400"),
        settings=_values("samples", 25, 50, 100, 200, 400),
    ),
    "label-skew": Dial(
        what="concentration of the Dirichlet draw of a client's label mix",
        words=("infinite (iid)", "3", "1", "0.3", "0.1"),
        settings=(
            {"partition": "iid", "dirichlet_alpha": 0.5},
            *({"partition": "dirichlet", "dirichlet_alpha": alpha} for alpha in (3.0, 1.0, 0.3, 0.1)),
        ),
    ),
    "concept-shift": Dial(
        what="ratings from which a review is positive, for a third of the clients each",
        words=("0 for all", "-1, 0, 1", "-1.5, 0, 1.5", "-1.75, 0, 1.75", "-2, 0, 2"),
        settings=_values(
            # film ratings are bimodal: between -1 and 1 there are few
            "rating_cuts",
            (0.0, 0.0, 0.0),
            (-1.0, 0.0, 1.0),
            (-1.5, 0.0, 1.5),
            (-1.75, 0.0, 1.75),
            (-2.0, 0.0, 2.0),
        ),
    ),
    "sources": Dial(
        what="share of a client's texts that come from its own source",
        words=("1/4 (all alike)", "7/16", "5/8", "13/16", "1"),
        settings=_values("own_share", 0.25, 0.4375, 0.625, 0.8125, 1.0),
    ),
    "contradiction": Dial(
        what="share of the clients whose classes are reversed",
        words=("0", "1/8", "1/4", "3/8", "1/2"),
        settings=_values("flipped_clients", 0.0, 0.125, 0.25, 0.375, 0.5),
    ),
    "sizes": Dial(
        what="training examples of the clients",
        words=("200 each", "141 to 283", "100 to 400", "50 to 600", "25 to 800"),
        settings=_values(
            "client_sizes",
            (200,),
            (141, 159, 178, 200, 225, 283),
            (100, 132, 174, 230, 303, 400),
            (50, 82, 135, 222, 365, 600),
            (25, 50, 100, 200, 400, 800),
        ),
    ),
    "wrong-k": Dial(
        what="number of clusters that is forced, where three are true",
        words=("3", "2", "4", "1", "9"),
        settings=_values("clusters", "3", "2", "4", "1", "9"),
    ),
    "images-nc": Dial(
        what="classes of a client, of ten",
        words=("10 (iid)", "5", "3", "2", "1"),
        settings=_values("nc", "iid", "5", "3", "2", "1"),
    ),
    "instructions": Dial(
        what="clients that share a task",
        words=("5", "4", "3", "2", "1 (nobody has a twin)"),
        settings=_values("clients_per_task", 5, 4, 3, 2, 1),
    ),
}
"""The dial of every federation that has one, by the name of its preset."""


def check_dial(preset: str, dial: int | None) -> None:
    """Raise ConfigError unless the preset has this dial, or none is given."""
    if dial is None:
        return
    if preset not in DIALS:
        raise ConfigError(f"--dial is {dial}, and --preset {preset} has no dial; those with one: {', '.join(DIALS)}")
    if not 0 <= dial <= 4:
        raise invalid_value("--dial", dial, "0 to 4")


def turn_dial(config: Config, dial: int) -> Config:
    """The config of a federation with its dial at another amount; all that the dial does not turn stays.

    Raises:
        ConfigError: its preset has no dial, or not this one.
    """
    check_dial(config.run.preset, dial)
    config = replace(config, run=replace(config.run, dial=dial))
    return replace_settings(DIALS[config.run.preset].settings[dial], base=config)


def check_turned(config: Config) -> None:
    """Raise ConfigError where the settings are those of another position of the dial."""
    preset, dial = config.run.preset, config.run.dial
    check_dial(preset, dial)
    if dial is None or not (changed := _changed_settings(config, dial)):
        return
    for other in range(len(DIALS[preset].settings)):
        if not _changed_settings(config, other):
            flag = settings()[changed[0]].flag
            raise ConfigError(
                f"--dial is {dial}, and {flag} is that of dial {other} of {preset}; turn the dial with the preset"
                f" (--preset {preset} --dial {dial}, find_preset({preset!r}, dial={dial})), or say --dial {other}"
            )


def _changed_settings(config: Config, dial: int) -> list[str]:
    """The settings that are not as this amount of the dial has them."""
    values = DIALS[config.run.preset].settings[dial]
    return [name for name, value in values.items() if value_of(config, name) != value]


def dial_note(config: Config) -> tuple[str, ...]:
    """One line that says what the dial of this federation is and where it stands; none without a dial."""
    preset, turned = config.run.preset, config.run.dial
    if turned is None or preset not in DIALS:
        return ()
    dial = DIALS[preset]
    line = f"federation {preset}, dial {turned} of 0 to 4: {dial.what}: {dial.words[turned]}"
    if changed := _changed_settings(config, turned):
        own = (" ".join([settings()[name].flag, *to_words(value_of(config, name))]) for name in changed)
        line += f"; but here {', '.join(own)}"
    return (line,)


def _text_federation(name: str, *, tasks: tuple[str, ...], clients_per_task: int, samples: int = 120) -> Config:
    """A federation of text tasks that trains in seconds on one core: what is frozen is computed once.

    LoRA on the last of MiniLM's six blocks needs ten times the learning rate of all six.
    """
    return Config(
        data=DataConfig(
            tasks=tasks,
            clients_per_task=clients_per_task,
            samples=samples,
            validation_samples=60,
            test_samples=120,
            max_length=64,
            devices=("laptop_8gb",),
        ),
        model=ModelConfig(adapted_blocks=1),
        training=TrainingConfig(rounds=10, eval_every=5, lr=1e-2),
        ranks=RanksConfig(ranks="8"),
        run=RunConfig(preset=name),
    )


def null(dial: int = MIDDLE) -> Config:
    """Nine clients of three tasks, those of a task drawn alike: nothing is to be gained by a rule (dial: examples)."""
    return turn_dial(_text_federation("null", tasks=("movie", "trec", "pairs"), clients_per_task=3), dial)


def label_skew(dial: int = MIDDLE) -> Config:
    """Eight clients of TREC whose label mixes differ (dial: Dirichlet concentration)."""
    return turn_dial(_text_federation("label-skew", tasks=("trec",), clients_per_task=8), dial)


def concept_shift(dial: int = MIDDLE) -> Config:
    """Nine clients of film reviews that call other ratings positive (dial: distance of the cuts)."""
    return turn_dial(_text_federation("concept-shift", tasks=("movie_ratings",), clients_per_task=9), dial)


def sources(dial: int = MIDDLE) -> Config:
    """Films, products, editorials and tweets, one rating of sentences, two clients each (dial: share of own source)."""
    names = ("movie", "amazon", "nyt_sentiment", "tweets")
    base = _text_federation("sources", tasks=names, clients_per_task=2)
    return turn_dial(replace_settings({"one_task": True}, base=base), dial)


def contradiction(dial: int = MIDDLE) -> Config:
    """Eight clients of film reviews, some with reversed classes (dial: how many)."""
    return turn_dial(_text_federation("contradiction", tasks=("movie",), clients_per_task=8), dial)


def sizes(dial: int = MIDDLE) -> Config:
    """Six clients of film reviews with few and many examples (dial: the spread)."""
    return turn_dial(_text_federation("sizes", tasks=("movie",), clients_per_task=6), dial)


def wrong_k(dial: int = MIDDLE) -> Config:
    """Nine clients of three tasks in a forced number of clusters (dial: how wrong)."""
    return turn_dial(_text_federation("wrong-k", tasks=("movie", "trec", "pairs"), clients_per_task=3), dial)


def images_nc(dial: int = MIDDLE) -> Config:
    """Ten clients of handwritten digits, LoRA on ViT-S at 28 pixels (dial: classes of a client)."""
    base = Config(
        data=DataConfig(
            tasks=("digits",),
            clients_per_task=10,
            samples=60,
            validation_samples=20,
            test_samples=40,
            devices=("laptop_8gb",),
        ),
        model=ModelConfig(model="dinov2-vits14", adapted_blocks=2),
        # two of twelve blocks: below them everything is computed once
        training=TrainingConfig(rounds=12, eval_every=4, lr=2e-3),
        clustering=ClusteringConfig(clusters="1"),
        ranks=RanksConfig(ranks="8"),
        mixing=MixingConfig(strategy="fedavg"),
        images=ImagesConfig(tune="lora", image_size=28),
        run=RunConfig(preset="images-nc"),
    )
    return turn_dial(base, dial)


def instructions(dial: int = MIDDLE) -> Config:
    """SQuAD, E2E and XSum written by SmolLM2: needs these from the hub, and wants a GPU (dial: clients of a task)."""
    base = Config(
        data=DataConfig(
            tasks=("squad", "e2e", "xsum"),
            samples=500,
            validation_samples=60,
            test_samples=120,
            devices=("gpu_16gb",),
        ),
        model=ModelConfig(model="smollm2-135m"),
        training=TrainingConfig(rounds=20, batch_size=8, eval_every=5),
        ranks=RanksConfig(ranks="8"),
        run=RunConfig(preset="instructions", accelerator="auto"),
    )
    return turn_dial(base, dial)
