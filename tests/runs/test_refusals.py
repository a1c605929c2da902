"""Settings that do not go together: each is refused in one line, and nothing is left behind."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from atlas_fl.config import run_folder
from atlas_fl.errors import AtlasError
from atlas_fl.experiment.run import run_config
from tests.runs.finished import Make

Rows = Sequence[tuple[Mapping[str, Any], str]]
FACTORS: Mapping[str, Any] = {"space": "factors", "ranks": "4"}
STACKED: Mapping[str, Any] = {"strategy": "fedavg_stacked"}
DYNAMIC: Mapping[str, Any] = {"strategy": "fedavg_dynamic"}
FLORA: Rows = (
    (STACKED, "^--strategy fedavg_stacked holds factors frozen .* --space factors"),
    ({**STACKED, "space": "factors", "share": ("A", "head")}, "^--strategy fedavg_stacked .* --share with A and B"),
    ({"workers": 2}, "^--strategy flora has a second set of tensors beside the model"),
    ({"split": "movie-0=1"}, "^--strategy flora and --split movie-0=1 do not go together"),
    ({"personal_models": True}, "^--strategy flora and --personal-models do not go together"),
    ({"trained_parts": "alternate"}, "^--strategy flora and --trained-parts alternate do not go together"),
    ({"strategy": "fedex", "ranks": "greedy"}, "^--strategy fedex averages factors of one rank"),
)
FEDDYN: Rows = (
    (DYNAMIC, "^--strategy fedavg_dynamic sums changes of A and B, .* --space factors"),
    ({**DYNAMIC, **FACTORS, "proximal_mu": 0}, "^--proximal-mu is 0; allowed: above 0 with --strategy fedavg_dynamic"),
    ({"workers": 2}, "^--strategy feddyn has a second set of tensors beside the model"),
    ({"split": "movie-0=1"}, "^--strategy feddyn and --split movie-0=1 do not go together"),
    ({"aggregate_every": 2, "rounds": 4}, "^--strategy feddyn and --aggregate-every 2 do not go together"),
    ({"ranks": "greedy"}, "^--strategy feddyn .* one rank"),
)
SCAFFOLD: Rows = (
    ({"ranks": "greedy"}, r"^--control-variates averages gradients of A and B, .* and one rank for all"),
    ({"workers": 2}, r"^--control-variates has a second set of tensors beside the model"),
    (
        {"split": "movie-0=1"},
        r"^--control-variates and --split movie-0=1 do not go together so far; leave --split movie-0=1 out, or take"
        " another strategy than scaffold, which sets --control-variates$",
    ),
    ({"personal_models": True}, r"^--control-variates is for one shared model"),
    ({"strategy": "local"}, r"^--control-variates corrects by the gradients of all, and --strategy local mixes"),
    ({"strategy": "fedavg_cluster"}, r"^--control-variates .* --strategy fedavg_cluster mixes otherwise"),
    ({"strategy": "fedavg", "share": ("A", "B")}, r"^--control-variates .* --share A B keeps some parameters"),
)
IFCA: Rows = (
    ({"ranks": "greedy"}, "^--strategy ifca lets a client take the model of others, .* one rank for all"),
    ({"aggregate_every": 2}, "^--strategy ifca and --aggregate-every 2 do not go together"),
    ({"split": "movie-0=1"}, "^--strategy ifca and --split movie-0=1 do not go together"),
)
ROUTER: Rows = (
    (
        {"recluster_every": 1},
        r"^--strategy fedlease_router has a router over the clusters, and --recluster-every 1 may",
    ),
    ({"secure": True}, r"^--strategy fedlease_router holds experts of other clusters frozen, and --secure is for sums"),
    ({"arrive": "movie-1=2"}, r"^--strategy fedlease_router and --arrive movie-1=2 do not go together so far"),
    ({"workers": 2}, r"^--strategy fedlease_router has a second set of tensors beside the model"),
    ({"ranks": "greedy"}, r"^--strategy fedlease_router averages factors of one rank, and --ranks greedy"),
)
SECOND_MODELS: Rows = (
    ({"strategy": "fedavg", "second_gate": "input"}, r"^--second-gate input weighs two .*; set it to stacked"),
    ({"strategy": "fedalt", "workers": 2}, r"^--personal-models has a second set of tensors beside the model"),
    (
        {"strategy": "fedalt_fixed", "second_gate": "input"},
        r"^--second-gate is input, and --strategy fedalt_fixed is .* none",
    ),
    ({"strategy": "ditto", "ranks": "greedy"}, r"^--second-model proximal compares A and B .* one rank for all"),
    ({"strategy": "apfl", "second_weight": 1.5}, r"^--second-weight 1.5 is a share .*; allowed: at most 1"),
    ({"strategy": "local", "second_model": "stacked"}, r"^--second-model stacked stands beside a shared model"),
    ({"strategy": "feddpa", "workers": 2}, r"^--second-model stacked has a second set of tensors beside the model"),
    ({"strategy": "feddpa", "split": "movie-0=1"}, r"^--second-model stacked and --split movie-0=1 do not go together"),
)
KRIGING: Rows = (
    ({"share": "A+B"}, "--strategy kriging compares all that clients train, and --share A B leaves a part of it out"),
    (
        {**FACTORS, "control_variates": True},
        "--control-variates corrects by the gradients of all, and --strategy kriging mixes otherwise",
    ),
    ({"measure_round": 0}, "--measure-round is 0"),
    ({"measure_round": 5}, "--measure-round 5 is after the last aggregation of --strategy kriging; set an earlier"),
    ({"measure_round": 3, "personal_rounds": 1}, "--measure-round 3 is after the last aggregation of"),
)
ATLAS: Rows = (
    ({**FACTORS, "second_model": "proximal"}, "and --second-model .* does not go with that so far; .* atlas_laplacian"),
    ({"recluster_every": 1, "rerank": True}, "and --rerank does not go with that so far; .* atlas_laplacian"),
)
SMALL = "small=memory_gb=2,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=2"
MTA: Rows = (
    (
        {"share": "A+B"},
        "--strategy mta_minimax compares all that clients train, and --share A B leaves a part of it out",
    ),
    ({"measure_round": 5}, "--measure-round 5 is after the last aggregation of --strategy mta_minimax; set an earlier"),
    ({"mta_similarity": "measured"}, "--mta-similarity is measured, and --strategy mta_minimax is"),
    ({"mta_gamma": 0}, "^--mta-gamma is 0.0; allowed: above 0"),
)
FEDADAM: Rows = (
    ({"space": "factors", "devices": ("small", "workstation"), "device": SMALL}, "^--strategy fedadam needs one rank"),
    ({"within": "clusters", "recluster_every": 2}, "^--strategy fedadam --within clusters has moments of each"),
    ({"server_lr": 0}, "^--server-lr is 0.0; allowed: above 0"),
    ({"server_beta1": 1}, "^--server-beta1 is 1.0; allowed: at least 0, below 1"),
)
RERANK: Rows = (
    ({"recluster_every": 0}, "--recluster-every is 0; set it to 1"),
    ({"aggregate_every": 2}, "no multiple of --agg"),
)
OF_ATTACKS: Rows = (
    ({"attackers": ("movie-1",)}, "--attackers and --attack-scale say who attacks and how, and --attack is none"),
    ({"attack": "noise"}, "--attack noise needs --attackers: clients by name, or how many"),
    ({"attack": "noise", "attackers": ("1",), "arrive": ("movie-1=2",)}, "leave --arrive movie-1=2 out"),
    ({"max_norm_ratio": 1}, "--max-norm-ratio is 1.0; allowed: above 1"),
    ({"trim": 0.5}, "--trim is 0.5; allowed: at least 0, below 0.5"),
    ({"norm_bound": "refused"}, "did you mean 'refuse'"),
)
OF_LATE_CLIENTS: Rows = (
    ({"arrive": "movie-7=2"}, r"unknown client 'movie-7'; did you mean 'movie-"),
    ({"arrive": "movie-1=1"}, r"^--arrive is 'movie-1=1'; allowed: client=round with a round from 2"),
    ({"arrive": "movie-1"}, r"^--arrive is 'movie-1'; allowed: client=round"),
    ({"arrive": ("movie-1=2", "movie-1=3")}, r"^--arrive is 'movie-1=3'; allowed: .* each client once"),
    ({"arrive": "movie-1=4"}, r"^--arrive lets movie-1 join before round 4, and the run has 2; choose an earlier"),
    ({"arrive": ("movie-0=2", "movie-1=2"), "tasks": "movie"}, r"^--arrive names every client, and somebody must"),
)
OTHERS: Rows = (
    ({"topology": "paired"}, r"^--topology paired says who .* and --split none cuts none; "),
    ({"adapted_blocks": 4}, r"--adapted-blocks is 4; allowed: 1 to 3, the blocks of "),
    ({"fingerprint": "fisher", "fingerprint_blocks": 4}, r"--fingerprint-blocks.*4.*1 to 3, the model's blocks"),
)
REFUSED: Sequence[tuple[Mapping[str, Any], Rows]] = (
    ({"strategy": "flora", "ranks": "4"}, FLORA),
    ({"strategy": "feddyn", "ranks": "4", "proximal_mu": 0.1}, FEDDYN),
    ({**FACTORS, "strategy": "scaffold", "control_variates": True}, SCAFFOLD),
    ({"strategy": "ifca", "ranks": "4", "ifca_clusters": 2}, IFCA),
    ({"strategy": "fedlease_router", "ranks": "4"}, ROUTER),
    ({**FACTORS, "tasks": "movie"}, SECOND_MODELS),
    ({"strategy": "kriging", "measure_round": 2}, KRIGING),
    ({"strategy": "atlas", "measure_round": 2}, ATLAS),
    ({"strategy": "mta_minimax", "measure_round": 2}, MTA),
    ({"strategy": "fedadam"}, FEDADAM),
    ({"rerank": True, "recluster_every": 1, "eta": 0.3, "adapter_bytes": 8_500}, RERANK),
    ({}, (*OF_ATTACKS, *OF_LATE_CLIENTS, *OTHERS)),
)
"""Settings of a method, with what it does not go with."""


@pytest.mark.parametrize(
    ("values", "message"), [({**base, **values}, message) for base, some in REFUSED for values, message in some]
)
def test_what_does_not_go_together_is_refused_in_one_line_and_leaves_nothing(
    config: Make, values: Mapping[str, Any], message: str
) -> None:
    check_refused(config, values, message)


def check_refused(make: Make, values: Mapping[str, Any], message: str) -> None:
    """A config of these values is refused in one line, and the run, whose name is always the same, has no folder."""
    with pytest.raises(AtlasError, match=message) as caught:
        run_config(make(**values))
    assert "\n" not in str(caught.value)
    assert not run_folder(make()).path.exists()


OF_MOMENTUM: Rows = (
    ({}, "--carry-momentum keeps what a client did in the round before, and with --participation 0.5"),
    ({"participation": 1, "workers": 2}, "--carry-momentum keeps what clients did in one process"),
    ({"participation": 1, "momentum": 0.0}, "--carry-momentum has nothing to carry with --momentum 0;"),
    (
        {"tune": "lora", "strategy": "atlas_laplacian", "participation": 1},
        "--carry-momentum is for whole models, and these tasks train adapters",
    ),
)
OF_IMAGES: Rows = (
    *(({**values, "carry_momentum": True}, message) for values, message in OF_MOMENTUM),
    ({"tasks": "digits+movie"}, "images .digits. and texts .movie."),
    ({"tasks": "digits+movie", "strategy": "atlas_laplacian"}, "images .digits. and texts .movie."),
    ({"precision": "bf16", "sparsity": 1.0}, "--sparsity is 1.0.*below 1"),
    ({"nc": "many"}, "--nc is 'many'.*iid, or a number"),
    ({"nc": "2", "partition": "dirichlet"}, "--nc 2 and --partition dirichlet are two ways"),
    ({"mask": "random", "head_first": "none"}, "--mask random freezes the head.*a random one"),
    ({"mask": "random", "mask_file": "m"}, "--mask random says how a mask is made, and --mask-file brings one"),
    ({"sparsity": 0.5, "mask_file": "m"}, "--sparsity 0.5 says how a mask is made"),
    ({"mask_file": "m", "head_first": "none"}, "--mask-file m freezes the head"),
    ({"split": "1"}, "--split is for adapters"),
    ({"init_adapter": "nowhere"}, "--init-adapter is for adapters, and these tasks train whole models"),
    ({"gradient_checkpointing": True}, "--gradient-checkpointing is for adapters"),
    ({"precision": "fp16", "tune": "lora", "strategy": "atlas_laplacian"}, "--precision fp16 needs a GPU with CUDA"),
    ({"validation_share": 1.0}, "--validation-share is 1.0; allowed: above 0, below 1"),
    ({"validation_share": 1e-4}, "--validation-share 0.0001 of the 1254 rows of task 'digits' is not one"),
    ({"tasks": "movie", "validation_share": 0.1}, "--validation-share is for image tasks, and --tasks has texts"),
    ({"tasks": "movie", "model": "minilm"}, "is for image tasks, and --tasks has texts alone"),
)


@pytest.mark.parametrize(("values", "message"), OF_IMAGES)
def test_what_cannot_be_run_of_images_is_refused_in_one_line_and_leaves_nothing(
    image_config: Make, values: Mapping[str, Any], message: str
) -> None:
    check_refused(image_config, values, message)
