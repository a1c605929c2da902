from typing import Any, Literal, get_origin

import pytest

from atlas_fl.config import Config, settings, validate, with_values
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.config.settings import replace_settings
from atlas_fl.errors import AtlasError, ConfigError


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_valid_and_comes_back_as_it_is(preset: str) -> None:
    config = find_preset(preset)
    assert validate(config) is config


def test_every_number_has_a_range() -> None:
    kinds = {name: str(setting.kind) for name, setting in settings().items() if get_origin(setting.kind) is not Literal}
    numbers = {name for name, kind in kinds.items() if "int" in kind or "float" in kind}
    assert {name for name, setting in settings().items() if setting.range is not None} == numbers


@pytest.mark.parametrize("name", [name for name, setting in settings().items() if setting.range is not None])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), -1, 10**16])
def test_no_number_is_out_of_range(name: str, number: float) -> None:
    value: Any = (number, number) if name in ("k_range", "candidates") else number
    with pytest.raises(ConfigError, match=settings()[name].flag + " is "):
        validate(replace_settings({name: value}, base=Config()))


PERSONAL = {"strategy": "mr_mtl", "ranks": "8"}
FEDPAC = {"strategy": "fedpac"}
FEDSA = {"strategy": "fedsa", "ranks": "8"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rounds": 0}, "--rounds is 0; allowed: at least 1; set it to that, or leave it out"),
        ({"participation": 0.0}, "--participation is 0.0; allowed: above 0, at most 1"),
        ({"participation": 1.5}, "--participation is 1.5; allowed: above 0, at most 1"),
        ({"lr": 0.0}, "--lr is 0.0; allowed: above 0"),
        ({"eta": 2.0}, "--eta is 2.0; allowed: at least 0, below 2"),
        ({"eta": "0.1"}, "--eta is '0.1'; allowed: a number"),
        ({"tasks": ["movie"]}, r"--tasks is \['movie'\]; allowed: a list of texts"),
        ({"tasks": ()}, "--tasks is empty; a federation needs at least one task"),
        ({"tasks": ("movie", "movie")}, r"--tasks is \('movie', 'movie'\); allowed: each task once; raise"),
        ({"tasks": ("movei",)}, r"unknown task 'movei'; did you mean 'movie'\?"),
        ({"devices": ("cpu_2gbb",)}, r"unknown device 'cpu_2gbb'; did you mean 'cpu_2gb'\?"),
        ({"devices": ()}, "no devices; choose from"),
        ({"device": ("mine",)}, "--device 'mine' is no profile"),
        ({"strategy": "atals"}, r"unknown strategy 'atals'; did you mean 'atlas'\?"),
        ({"model": "minlm"}, r"unknown model 'minlm'; did you mean 'minilm'\?"),
        ({"ranks": "buget"}, r"unknown allocator for --ranks 'buget'; did you mean 'budget'\?"),
        ({"ranks": "5"}, "--ranks is 5, a rank that is no candidate; the candidates are 4, 8, 16, 32, 64; choose"),
        ({"ranks": "08"}, "unknown allocator for --ranks '08'"),
        ({"candidates": ()}, r"--candidates is \(\); allowed: at least one rank, each larger"),
        ({"candidates": (8, 4)}, r"--candidates is \(8, 4\); allowed: at least one rank, each larger"),
        ({"clusters": "four"}, "--clusters is 'four'; allowed: auto, oracle, or a number from 1 to 9"),
        ({"clusters": "10"}, "--clusters is '10'; allowed: auto, oracle, or a number from 1 to 9"),
        ({"k_range": (5, 2)}, r"--k-range is \(5, 2\); allowed: the smaller number first"),
        ({"k_range": (1, 2)}, r"--k-range is \(1, 2\); allowed: at least 2"),
        ({"min_cluster_size": 10}, "--min-cluster-size is 10; allowed: at most 9, the number of clients"),
        ({"alpha_base": 0.9}, "--alpha-base, --alpha-act and --alpha-opt add up to 1.3; allowed: below 1"),
        ({"share": ()}, r"--share is \(\); allowed: one or more of A, B, head, each once"),
        ({"share": ("A", "A")}, r"--share is \('A', 'A'\); allowed: one or more of A, B, head, each once"),
        ({"share": ("A", "head")}, "--share A head leaves out one factor of the update s B A, which --space product"),
        ({"share": ("head",), "mask": "random"}, "a mask freezes the head, and --share head shares nothing else"),
        ({"dirichlet_alpha": 2e6}, r"--dirichlet-alpha is 2000000.0; allowed: above 0, at most 1e\+06"),
        ({"name": "a/b"}, "--name is 'a/b'; allowed: the name of a folder"),
        ({"name": ".."}, "--name is '..'; allowed: the name of a folder"),
        ({"name": "a\nb"}, r"--name is 'a\\nb'; allowed: printable text"),
        ({"name": ""}, "--name is ''; allowed: printable text that is not empty"),
        ({"runs_dir": "\udcff"}, "--runs-dir is .*; allowed: printable text"),
        ({"split": "half"}, "--split is 'half'; allowed: none, auto, a number of blocks from 1, or name=word with"),
        ({"split": "0"}, "--split is '0'; allowed: none, auto, a number"),
        ({"split": "cpu_2gb=2,cpu_2gb=3"}, "--split is 'cpu_2gb=2,cpu_2gb=3'; allowed: .* each name once"),
        ({"split": "cpu_2gb=2,3"}, "--split is 'cpu_2gb=2,3'; allowed: none, auto, a number of blocks from 1, or name"),
        ({"split": "cpu_2gb=all"}, "--split is 'cpu_2gb=all'; allowed: none, auto, a number"),
        ({"split": "cpu_2g=2"}, r"unknown name in --split 'cpu_2g'; did you mean 'cpu_2gb'\?"),
        ({"split": "smartphone=2"}, "unknown name in --split 'smartphone'; known: cpu_2gb, gpu_16gb, laptop_8gb"),
        ({"split": "movie=2,trec-3=1"}, r"unknown name in --split 'trec-3'; did you mean 'trec-2'\?"),
        ({"split": "auto", "rerank": True, "recluster_every": 2}, "--rerank may move the cut that --split auto"),
        ({"adapted_blocks": 0}, "--adapted-blocks is 0; allowed: at least 1"),
        ({"adapted_blocks": 1.5}, "--adapted-blocks is 1.5; allowed: "),
        ({"adapted_blocks": 2, "trainable": "full"}, "--adapted-blocks is for adapters, and these tasks train whole"),
        ({"preset": "Ä"}, "--preset is 'Ä'; allowed: a name of small letters"),
        ({"clients_per_task": 10**15}, "is 1000000000000000; allowed: at least 1, at most 1000000"),
        ({"sketch_dim": 10**9}, "--sketch-dim is 1000000000; allowed: at least 2, at most 1000000"),
        ({"lr": 1e300}, r"--lr is 1e\+300; allowed: above 0, at most 1e\+15"),
        ({"lr": -1.0}, r"--lr is -1.0; allowed: above 0"),
        ({"name": "n" * 201}, "allowed: the name of a folder of at most 200 bytes"),
        # of federations
        ({"own_share": 0.5}, "--own-share 0.5 mixes the sources of one task; set --one-task"),
        ({"client_sizes": (50,), "partition": "quantity"}, "--client-sizes and --partition quantity both say how much"),
        ({"flipped_clients": 1.5}, "--flipped-clients is 1.5; allowed: at least 0, at most 1"),
        (
            {"rating_cuts": (0.0,)},
            "--rating-cuts needs tasks of values .movie_ratings, metric=pearson., and 'movie' has none",
        ),
        ({"one_task": True}, "--one-task takes tasks as sources of one, and 'trec' has other classes than 'movie'"),
        # of methods
        ({"buffer": 4, "round_percentile": 50.0}, "--buffer 4 and --round-percentile 50 both say when the server"),
        ({"strategy": "fedit"}, "--strategy fedit averages factors of one rank, and --ranks budget may"),
        ({"centralized": True, "arrive": ("trec-1=3",)}, "--arrive trec-1=3 comes later, and --centralized has no"),
        ({"personal_rounds": 12}, "--personal-rounds 12 leaves no round of --rounds 12 whose models are mixed; raise"),
        ({"trained_parts": "alternate", "split": "2"}, "--trained-parts alternate changes what trains during a run"),
        ({"trained_parts": "B"}, "--trained-parts B leaves A as drawn, and --space product would change it"),
        ({"strategy": "fedavg", "personal_models": True}, "--personal-models pulls A and B to those of the others"),
        (PERSONAL | {"split": "2"}, "--split 2 do not go together so far; leave --split 2 out, or take another"),
        (PERSONAL | {"workers": 2}, "--personal-models has a second set .* --workers or --engine ray holds yet"),
        (FEDPAC | {"tasks": ("movie", "movie_ratings")}, r"there is movie \(classes\), movie_ratings \(regression\)"),
        ({"strategy": "fedrep", "feature_alignment": 0.5}, "--feature-alignment pulls to class means that"),
        ({"strategy": "flora", "orthogonality": 0.5}, "--orthogonality pulls away from the frozen levels of HiLoRA"),
        ({"strategy": "hilora", "space": "factors"}, "--space is factors, and --strategy hilora is --space product"),
        (FEDPAC | {"feature_alignment": -1.0}, "--feature-alignment is -1.0"),
        (FEDPAC | {"share": ("A", "B")}, "--share is A B, and --strategy fedpac is --share A B head"),
        (FEDSA | {"share": ("B", "head")}, "--share is B head, and --strategy fedsa is --share A; set --share A, or"),
        # each form of values in the table of contradictions
        ({"patience": 3, "personal_rounds": 2}, "^--patience 3 ends a run before .*, which --personal-rounds 2 are;"),
        ({"second_model": "stacked", "second_weight": 1.5}, "^--second-weight 1.5 is a share with --second-model"),
        ({"carry_momentum": True, "participation": 0.5}, "^--carry-momentum keeps .* with --participation 0.5 that is"),
        ({"carry_momentum": True, "workers": 2}, "^--carry-momentum keeps what clients did in one process"),
        ({"share": ("head",), "mask_file": "x"}, "^a mask freezes the head, and --share head shares nothing else;"),
        ({"attack": "noise"}, "^--attack noise needs --attackers: clients by name, or how many; set it"),
    ],
)
def test_what_is_wrong_is_said_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(AtlasError, match=message) as caught:
        validate(replace_settings(values, base=Config()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"share": "A+head", "space": "factors", "strategy": "atlas_laplacian"},
        {"share": "head", "strategy": "atlas_laplacian"},
        {"ranks": "16"},
        {"strategy": "standard_fl"},
        {"clusters": "9"},
        {"clusters": "10", "clients_per_task": "4"},
        {"model": "someone/some-model"},
        {"eta": "1"},
        {"eta": "0"},
        {"participation": "1"},
        {"clip": "0"},
        {"max_length": "none"},
    ],
)
def test_what_is_allowed_passes(values: dict[str, str]) -> None:
    validate(with_values(Config(), values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "--fast-kernels compute in half precision, and --precision fp32 does not; take --precision bf16"),
        ({"precision": "bf16", "accelerator": "cpu"}, "--fast-kernels need a GPU with CUDA"),
        ({"precision": "bf16", "split": "4"}, "--fast-kernels are of a model that stands whole on one machine"),
        (
            {"precision": "bf16", "tasks": "fashion_mnist", "model": "dinov2-vits14", "tune": "lora"},
            "--fast-kernels are for models of texts",
        ),
    ],
)
def test_fast_kernels_are_refused_where_they_cannot_run(values: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        validate(with_values(Config(), {"accelerator": "cuda", "fast_kernels": "yes", **values}))
    assert validate(with_values(Config(), {"accelerator": "cuda", "fast_kernels": "yes", "precision": "bf16"}))


def test_fp16_on_the_cpu_is_one_line_that_names_the_other_precisions() -> None:
    with pytest.raises(ConfigError, match=r"--precision fp16 needs a GPU with CUDA.*take --precision bf16 or") as one:
        validate(with_values(Config(), {"precision": "fp16"}))
    assert "\n" not in str(one.value)
    assert validate(with_values(Config(), {"precision": "bf16"}))
    assert validate(with_values(Config(), {"precision": "fp16", "accelerator": "cuda"}))
