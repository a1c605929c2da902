"""Real runs made small: real text, a random BERT of three narrow blocks, seconds instead of minutes."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, ViTConfig, ViTImageProcessorPil, ViTModel

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.config.schema import (
    ClusteringConfig,
    DataConfig,
    MixingConfig,
    ModelConfig,
    RanksConfig,
    RunConfig,
    TrainingConfig,
)
from atlas_fl.experiment import run
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.vision_loading import load_image_backbone
from atlas_fl.params import Params, digest
from atlas_fl.runtime.reuse import MAX_BYTES, REUSED_RESULTS
from atlas_fl.setup import assembly
from atlas_fl.storage.assets import asset_dir, embedded_dir
from tests.runs.federation import SITES, Federation
from tests.runs.finished import FinishedRuns, locked
from tests.runs.processes import Programs

LOAD_ANEW = (
    *("test_resume", "test_deployed_mistakes", "test_plugin_runs", "test_trainer_runs"),
    *("test_proxied", "test_membership", "test_flower", "test_deployed", "test_deployed_images"),
)
"""Modules whose runs load models as those of users do; a loaded model reads a file that test_resume alters, and a
server in this process gives up the weights of its own."""
COMPUTE_ANEW = (
    *("test_same_bits", "test_adapted_blocks", "test_data_read_once", "test_descent"),
    *("test_jobs", "test_ray", "test_workers", *LOAD_ANEW),
)
"""Modules about how the work of clients is computed: by workers, from a cache, in what precision, twice alike."""
PLAN_ANEW = ("test_same_bits", "test_split")
"""Modules whose runs plan with as many batches as those of users do."""
DRAW_ANEW = ("test_alone", "test_same_bits")
"""Modules whose runs draw test examples as often as those of users do."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@pytest.fixture(scope="session")
def loaded_models() -> dict[object, Backbone]:
    """The models that runs of this process have loaded, by their files and how they were loaded."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def models_loaded_once(request: pytest.FixtureRequest, loaded_models: dict[object, Backbone]) -> Iterator[None]:
    """Let all runs read a model's folder once: a tokenizer of thirty thousand words takes longer than a round.

    No run of a module may leave a weight of it other than it found it.
    """
    if request.module.__name__.endswith(LOAD_ANEW):
        yield
        return
    digests: dict[object, str] = {}

    def loads_once(load: Callable[..., Backbone]) -> Callable[..., Backbone]:
        def once(name: str, *, weights: Params | None = None, **options: object) -> Backbone:
            if weights is not None or not Path(name).is_dir():
                return load(name, weights=weights, **options)
            files = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in Path(name).iterdir()]
            key = (load.__name__, name, tuple(sorted(files)), tuple(sorted(options.items())))
            if key not in loaded_models:
                loaded_models[key] = load(name, **options)
            if key not in digests:
                digests[key] = digest(loaded_models[key].frozen)
            return loaded_models[key]

        return once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly.loading, "load_backbone", loads_once(load_backbone))
        patch.setattr(assembly, "load_image_backbone", loads_once(load_image_backbone))
        yield
    assert all(digest(loaded_models[key].frozen) == before for key, before in digests.items()), "a run altered a model"


@pytest.fixture(scope="module", autouse=True)
def importance_is_measured_on_one_batch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan with a batch a client in the place of four, but in modules that start programs, which know of no fixture."""
    module = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    with pytest.MonkeyPatch.context() as patch:
        starts_programs = any("programs" in item.fixturenames for item in module)
        if not starts_programs and not request.module.__name__.endswith(PLAN_ANEW):
            patch.setattr("atlas_fl.setup.options.IMPORTANCE_BATCHES", 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def examples_are_drawn_a_few_times(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw them twenty times in the place of a thousand, each of which ranks the answers of a client anew."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith(DRAW_ANEW):
            patch.setattr("atlas_fl.experiment.alone.RESAMPLES", 20)
        yield


@pytest.fixture(autouse=True)
def equal_work_is_done_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of this process take fingerprints, first rounds and scores that another one has computed of equal input.

    `tests/runtime/test_reuse.py` holds what is reused to what is computed. A run that is resumed computes all anew, as
    in a process of its own: else it would end in the bits of an undisturbed one whatever it draws.
    """
    is_computed = request.module.__name__.endswith(COMPUTE_ANEW)
    monkeypatch.setattr(REUSED_RESULTS, "max_bytes", 0 if is_computed else MAX_BYTES)
    restore = run._restore_checkpoint

    def restore_alone(*given: Any, **words: Any) -> Any:
        REUSED_RESULTS._results.clear()
        return restore(*given, **words)

    monkeypatch.setattr(run, "_restore_checkpoint", restore_alone)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of pytest-xdist see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def finished(shared_folder: Path) -> FinishedRuns:
    """Call it with a config for a copy of that run's folder; each run is computed once."""
    return FinishedRuns(shared_folder / "runs")


@pytest.fixture(scope="session")
def tiny_model(shared_folder: Path) -> Path:
    """A random BERT with the embedded model's tokenizer, as a directory that `--model` takes."""
    return saved_once(shared_folder / "tiny-bert", save_bert)


def saved_once(folder: Path, save: Callable[[Path], object]) -> Path:
    """This folder, once `save` has filled it in one of the workers."""
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            unfinished = folder.with_suffix(".part")
            save(unfinished)
            unfinished.rename(folder)
    return folder


def save_bert(folder: Path) -> None:
    folder.mkdir()
    source = asset_dir(embedded_dir(), "minilm")
    for name in TOKENIZER:
        shutil.copy(source / name, folder / name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertModel(
            BertConfig(
                vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=64,
                max_position_embeddings=64,
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """A config of four clients on two tasks; keywords set single settings by their flat names."""
    return configs(tiny_model, tmp_path)


@pytest.fixture(scope="module")
def shared_config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """The same for runs that all tests of a module look at."""
    return configs(tiny_model, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Starts commands as processes; one import of everything serves all modules."""
    found = Programs()
    yield found
    found.close()


def configs(tiny_model: Path, folder: Path) -> Callable[..., Config]:
    base = Config(
        data=DataConfig(
            tasks=("movie", "trec"),
            clients_per_task=2,
            samples=24,
            validation_samples=12,
            test_samples=12,
            max_length=24,
        ),
        model=ModelConfig(model=str(tiny_model)),
        training=TrainingConfig(rounds=2, batch_size=8, lr=5e-3),
        clustering=ClusteringConfig(clusters="oracle", fingerprint_steps=2, fingerprint_batches=2, sketch_dim=64),
        ranks=RanksConfig(candidates=(2, 4, 8)),
        mixing=MixingConfig(strategy="atlas_laplacian"),
        run=RunConfig(runs_dir=str(folder / "runs"), audit=True, name="run", alone="none"),
    )

    def make(**values: object) -> Config:
        """Lists are given as tuples, everything else as it is."""
        texts = {key: "+".join(map(str, v)) if isinstance(v, tuple) else str(v) for key, v in values.items()}
        return with_values(base, texts)

    return make


@pytest.fixture(scope="session")
def tiny_vit(shared_folder: Path) -> Path:
    """A random ViT of two narrow blocks, as a directory that `--model` takes."""
    return saved_once(shared_folder / "tiny-vit", save_vit)


def save_vit(folder: Path) -> None:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8), add_pooling_layer=False).save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)


@pytest.fixture
def image_config(tiny_vit: Path, tmp_path: Path) -> Callable[..., Config]:
    """Eight clients of the digits, half of them a round; keywords set single settings by their flat names."""
    return image_configs(tiny_vit, tmp_path)


def image_configs(tiny_vit: Path, folder: Path) -> Callable[..., Config]:
    base = with_values(
        find_preset("vision-quick"),
        {
            **{"model": str(tiny_vit), "image_size": 16, "tasks": "digits", "clients_per_task": 8, "samples": 40},
            **{"validation_samples": 10, "test_samples": 20, "participation": 0.5, "rounds": 2, "eval_every": 2},
            **{"lr": 0.02, "alone": "none", "audit": True, "runs_dir": str(folder / "runs"), "name": "run"},
        },
    )
    return lambda **values: with_values(base, values)


@pytest.fixture
def federation(
    config: Callable[..., Config], tmp_path: Path, programs: Programs, finished: FinishedRuns
) -> Iterator[Callable[..., Federation]]:
    def make(sites: dict[str, str] = SITES, **values: object) -> Federation:
        tasks = tuple(dict.fromkeys(name.partition("-")[0] for name in sites))
        # packs of one, because a client that is alone has no other
        return Federation(
            config(tasks=tasks, pack_tokens=1, **{"rounds": 3, **values}), tmp_path, sites, programs, finished
        )

    yield make
    programs.kill_all()


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


@pytest.fixture
def chats(config: Callable[..., Config], tmp_path: Path, writer_of: Callable) -> Config:
    """The config of two clients that answer the same with other words."""
    (tmp_path / "own.jinja").write_text(CHAT_TEMPLATE)
    source = np.random.default_rng(4)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(80):
            asked, client = "".join(source.choice([*"abcd"], size=6)), ("ja", "si")[number % 2]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": client}]
            file.write(json.dumps({"messages": turns, "land": client}) + "\n")
    task = f"help={tmp_path}/chats.jsonl,chat=messages,client=land,template={tmp_path}/own.jinja"
    base = config(strategy="fedavg", clusters="oracle", ranks="8", rounds=10, max_length=32, lr=3e-2, alone="all")
    data = replace(base.data, tasks=(), task=(task,), clients_per_task=3, samples=40, rouge_examples=4, new_tokens=4)
    return replace(base, data=data, model=replace(base.model, model=str(writer_of("qwen2").path)))
