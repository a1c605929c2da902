"""The learning rate that suits what trains, where the user gives none."""

import pytest

from atlas_fl.config import Config, validate, with_values
from atlas_fl.data.registry import find_tasks
from atlas_fl.setup.options import paper_notes, scale_of, train_options, warmup_options


@pytest.mark.parametrize(
    ("changes", "with_images", "expected"),
    [
        ({}, False, 1e-3),  # MiniLM's adapters
        ({"model": "bert"}, False, 3e-4),
        ({"trainable": "full"}, False, 1e-4),
        ({"trainable": "full", "model": "bert"}, False, 3e-5),
        ({"trainable": "full", "lr": 0.02}, False, 0.02),
        ({"trainable": "full", "model": "dino-vits16"}, True, 1e-3),  # registered for SGD on all of it
    ],
)
def test_all_weights_of_a_text_model_train_at_a_tenth_of_the_rate_of_its_adapters(
    changes: dict[str, object], with_images: bool, expected: float
) -> None:
    config = with_values(Config(), changes)
    assert train_options(config, with_images=with_images).lr == pytest.approx(expected)


def test_the_warm_up_of_adapters_keeps_their_rate() -> None:
    assert warmup_options(with_values(Config(), {"trainable": "full"})).lr == 1e-3


AS_IN_THE_PAPER = {"strategy": "fedavg", "optimizer": "sgd", "clip": 0, "norm_bound": "off"}


@pytest.mark.parametrize(
    ("values", "tasks", "is_full", "words"),
    [
        ({}, ["movie"], True, None),
        ({}, ["movie"], False, "adapters and heads train, not whole models"),
        ({}, ["movie", "trec"], True, "tasks have heads of their own, averaged inside their task"),
        ({"optimizer": "auto"}, ["movie"], True, "clients train with AdamW (--optimizer sgd)"),
        ({"clip": 2}, ["movie"], True, "gradients are clipped at 2 (--clip 0)"),
        ({"norm_bound": "clip"}, ["movie"], True, "an update that is far larger than others is bounded"),
        ({"max_share": 0.5}, ["movie"], True, "no client weighs more than 0.5 (--max-share 1)"),
        ({"strategy": "atlas", "clip": 2}, ["movie"], True, None),
        (
            {"strategy": "fedex", "ranks": "8", "clip": 2},
            ["movie"],
            False,
            "averages are weighted by examples, there eq",
        ),
        ({"strategy": "fedit", "ranks": "8"}, ["movie"], False, None),
        ({"strategy": "fedsa", "ranks": "8"}, ["movie", "trec"], False, None),
        ({"strategy": "krum"}, ["movie"], False, "adapters and heads train, not whole models; what is aggregated are"),
    ],
)
def test_the_plan_says_what_differs_between_a_method_and_its_paper(values, tasks, is_full, words) -> None:
    config = validate(with_values(Config(), {**AS_IN_THE_PAPER, **values}))
    lines = paper_notes(config, find_tasks(tasks), is_full=is_full)
    start = f"{config.mixing.strategy}, other than in its paper: "
    assert [line.removeprefix(start)[: len(words or "")] for line in lines] == ([words] if words else [])


@pytest.mark.parametrize(
    ("changes", "scales"),  # at ranks 4, 16 and 64
    [
        ({}, (2, 2, 2)),
        ({"lora_alpha": 8.0, "rslora": True}, (4, 2, 1)),
        ({"lora_alpha": 8.0}, (2, 0.5, 0.125)),
        ({"ranks": "4"}, (2, 2, 2)),
        ({"ranks": "budget"}, (2, 2, 2)),
        ({"ranks": "budget", "rslora": True}, (4, 8, 16)),
    ],
)
def test_the_scale_falls_with_the_root_of_the_rank_with_an_alpha_and_rslora(
    changes: dict[str, object], scales: tuple[float, ...]
) -> None:
    scale = scale_of(with_values(Config(), changes))
    assert [scale(rank) for rank in (4, 16, 64)] == pytest.approx(scales)
