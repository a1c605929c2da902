"""Recipes: functions that return a whole config. Flags and files change single settings of one."""

from collections.abc import Callable

from atlas_fl.config import ClusteringConfig, Config, DataConfig, ModelConfig, RanksConfig, RunConfig, TrainingConfig
from atlas_fl.errors import unknown


def quick() -> Config:
    """Nine clients, three embedded tasks, four device profiles, six rounds: minutes on two cores."""
    return Config(run=RunConfig(preset="quick"))


def smoke() -> Config:
    """Four clients, two tasks, a few examples, two rounds of rank 4: only to see that everything runs."""
    return Config(
        data=DataConfig(
            tasks=("movie", "trec"),
            clients_per_task=2,
            samples=24,
            validation_samples=16,
            test_samples=16,
            max_length=32,
        ),
        training=TrainingConfig(rounds=2, batch_size=8),
        clustering=ClusteringConfig(clusters="oracle", fingerprint_steps=2, fingerprint_batches=2, sketch_dim=128),
        ranks=RanksConfig(ranks="4"),
        run=RunConfig(preset="smoke"),
    )


def full() -> Config:
    """Twenty-five clients, five embedded tasks with 500 examples a client, fifteen rounds: hours on two cores."""
    return Config(
        data=DataConfig(
            tasks=("movie", "trec", "pairs", "scramble", "sms"),
            clients_per_task=5,
            samples=500,
            validation_samples=100,
            test_samples=200,
        ),
        training=TrainingConfig(rounds=15),
        run=RunConfig(preset="full"),
    )


def publication() -> Config:
    """DistilBERT on SST-2, MRPC, CoLA and QNLI, three clients each, thirty rounds: needs GLUE, and wants a GPU."""
    return Config(
        data=DataConfig(
            tasks=("sst2", "mrpc", "cola", "qnli"),
            clients_per_task=3,
            samples=1000,
            validation_samples=120,
            test_samples=200,
        ),
        model=ModelConfig(model="distilbert"),
        training=TrainingConfig(rounds=30, schedule="linear", warmup=0.05),
        run=RunConfig(preset="publication", accelerator="auto"),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "smoke": smoke,
    "quick": quick,
    "full": full,
    "publication": publication,
}


def find_preset(name: str) -> Config:
    """The config of this recipe.

    Raises:
        ConfigError: there is none of this name; the message has the nearest.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]()
