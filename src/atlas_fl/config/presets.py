"""Presets: functions that return a whole config. Flags and files change single settings of one."""

from collections.abc import Callable
from dataclasses import replace

from atlas_fl.config import federations
from atlas_fl.config.schema import (
    ClusteringConfig,
    Config,
    DataConfig,
    ImagesConfig,
    MixingConfig,
    ModelConfig,
    RanksConfig,
    RunConfig,
    SparseConfig,
    TrainingConfig,
)
from atlas_fl.errors import unknown_name


def quick() -> Config:
    """Nine clients, three embedded tasks, four device profiles, twelve rounds: minutes on two cores."""
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


def vision_quick() -> Config:
    """A hundred clients of Fashion-MNIST, ten a round, four steps each, ViT-S at 56 pixels: minutes on two cores."""
    return Config(
        data=DataConfig(
            tasks=("fashion_mnist",),
            clients_per_task=100,
            samples=100,
            validation_samples=10,
            test_samples=20,
        ),
        model=ModelConfig(model="dinov2-vits14"),
        training=TrainingConfig(rounds=6, batch_size=16, lr=3e-3, clip=1.0, participation=0.1, eval_every=6),
        mixing=MixingConfig(strategy="fedavg"),
        images=ImagesConfig(image_size=56, local_steps=4),
        run=RunConfig(preset="vision-quick"),
    )


def vision_fedavg() -> Config:
    """The same over 500 rounds with 500 images a client and a cosine schedule: hours on a GPU."""
    base = vision_quick()
    return replace(
        base,
        data=replace(base.data, samples=500, validation_samples=20, test_samples=100),
        training=replace(base.training, rounds=500, batch_size=64, schedule="cosine", eval_every=25),
        run=RunConfig(preset="vision-fedavg", accelerator="auto"),
    )


def vision_sparse() -> Config:
    """The quick one with nine tenths of the weights frozen, those to which predictions are most sensitive."""
    base = vision_quick()
    return replace(base, sparse=SparseConfig(mask="least_sensitive"), run=RunConfig(preset="vision-sparse"))


def vision_central() -> Config:
    """One client that has all images of the quick preset: what federated runs are compared with."""
    base = vision_quick()
    return replace(
        base,
        data=replace(base.data, clients_per_task=1, samples=10000, validation_samples=1000, test_samples=2000),
        training=replace(base.training, participation=1.0),
        mixing=MixingConfig(strategy="local"),
        run=RunConfig(preset="vision-central"),
    )


def vision_lora() -> Config:
    """Two image tasks, four clients each, LoRA on the frozen ViT-S at 56 pixels: all phases, minutes on two cores."""
    base = vision_quick()
    return replace(
        base,
        data=replace(base.data, tasks=("digits", "fashion_mnist"), clients_per_task=4, test_samples=50),
        training=TrainingConfig(rounds=3),
        mixing=MixingConfig(),
        images=ImagesConfig(tune="lora", image_size=56),
        run=RunConfig(preset="vision-lora"),
    )


PRESETS: dict[str, Callable[..., Config]] = {
    "smoke": smoke,
    "quick": quick,
    "full": full,
    "publication": publication,
    "vision-quick": vision_quick,
    "vision-fedavg": vision_fedavg,
    "vision-sparse": vision_sparse,
    "vision-central": vision_central,
    "vision-lora": vision_lora,
    "null": federations.null,
    "label-skew": federations.label_skew,
    "concept-shift": federations.concept_shift,
    "sources": federations.sources,
    "contradiction": federations.contradiction,
    "sizes": federations.sizes,
    "wrong-k": federations.wrong_k,
    "images-nc": federations.images_nc,
    "instructions": federations.instructions,
}


def find_preset(name: str, *, dial: int | None = None) -> Config:
    """The config of this recipe, its dial turned to this amount (`config.federations`).

    Raises:
        ConfigError: there is none of this name, the message has the nearest; or it has no such dial.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    federations.check_dial(name, dial)
    return PRESETS[name]() if dial is None else PRESETS[name](dial)
