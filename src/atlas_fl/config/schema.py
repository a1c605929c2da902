"""The settings: frozen dataclasses with the default and the help text of every flag, a group for each part.

A setting is declared on one line. Its name is its flag and its key in a file, so no two groups share one; its
docstring is its help; its annotation has its type, its range and its marks (`config.values`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from atlas_fl.config.values import Form, Mark, invalid_value, parse_integer
from atlas_fl.frozen import Frozen
from atlas_fl.methods.knobs import Tried, knobs_class
from atlas_fl.plugins import split_pin
from atlas_fl.ranges import Range

MOST_NAME_BYTES = 200
"""Bytes of a run's name: file systems allow 255, and files beside it are named after it."""


def _is_folder_name(name: str | None) -> bool:
    return name is None or not ("/" in name or name.startswith(".") or len(name.encode()) > MOST_NAME_BYTES)


class DataConfig(Frozen):
    """Tasks, clients and their devices."""

    tasks: Annotated[
        tuple[str, ...],
        Form(lambda names: len({*names}) == len(names), "each task once; raise --clients-per-task for more clients"),
        Mark.COMMON,
    ] = ("movie", "trec", "pairs")
    """Tasks of the federation (`atlas list tasks`)."""
    task: Annotated[tuple[str, ...], Mark.COMMON] = ()
    """Your own csv, json, xlsx or parquet: `name=path`, then as needed text=, pair= and label= (columns) and metric=,
    or text= and target= for text that is to be written; client= (a column, or `file`) where the data have clients, with
    split=, order=, group= and least=; labels=a|b for classes that some lack; sep=, encoding=, missing=, rows= and
    truncate=; commas between; may be repeated."""
    clients_per_task: Annotated[int, Range(least=1, most=10**6), Mark.COMMON] = 3
    """Clients that share each task."""
    samples: Annotated[int | None, Range(least=2), Mark.COMMON] = 200
    """Training examples of a client, at most; `none` deals out all that there are."""
    validation_samples: Annotated[int | None, Range(least=1)] = 100
    """Validation examples of a client, at most, or `none`; choices are made on these."""
    test_samples: Annotated[int | None, Range(least=1)] = 130
    """Test examples of a client, at most, or `none`; results are reported on these."""
    partition: Annotated[str, Mark.COMMON] = "iid"
    """The way a task's examples fall to its clients. By label mixes: `iid`, `dirichlet`, `shard` (two shards of rows
    sorted by class), `pathological` (`--nc` classes each). By sizes: `quantity` (Dirichlet), `linear`, `square`,
    `exponential`. `natural`: as client= of `--task` says. Or that of a plug-in."""
    dirichlet_alpha: Annotated[float, Range(above=0, most=1e6), Mark.COMMON] = 0.5
    """Concentration of the Dirichlet partition; smaller is more uneven."""
    client_sizes: Annotated[tuple[int, ...], Range(least=2)] = ()
    """Training examples of the clients of a task in turn, in the place of `--samples`."""
    test_mix: Literal["own", "task", "balanced"] = "own"
    """Labels of a client's test examples: in its own mix, in that of its task, or as many of each class, as far as the
    data allow."""
    rating_cuts: Annotated[tuple[float, ...], Range()] = ()
    """Concept shift: of a task with numbers, such as `movie_ratings`, the clients in turn call positive what lies above
    these, and the task has two classes."""
    flipped_clients: Annotated[float, Range(least=0, most=1)] = 0.0
    """Contradiction: share of the clients of each task, its last ones, whose classes are reversed in all splits."""
    one_task: bool = False
    """The tasks are sources of one task: their classes are the same, and their clients share heads."""
    own_share: Annotated[float, Range(above=0, most=1)] = 1.0
    """With `--one-task`, share of a client's examples from its own source; the rest come from the others evenly."""
    centralized: bool = False
    """Reference: the examples of all clients of a task lie in one place, and it trains one model on them."""
    client_parts: Annotated[int, Range(least=1, most=100)] = 1
    """Parts of every client, clusters of its texts by the frozen model, each with an adapter of its own (FedRouter)."""
    max_length: Annotated[int | None, Range(least=4, at_site=2**16)] = None
    """Longest sequence in tokens; the task's own limit by default."""
    devices: Annotated[tuple[str, ...], Mark.COMMON] = ("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb")
    """Device profiles (`atlas list devices`), dealt out to the clients in turn; your own data alone: `laptop_8gb`."""
    device: tuple[str, ...] = ()
    """A profile of your own: `name=memory_gb=3,gflops=50,...` with every number from memory_gb to max_rank that
    `atlas list devices` shows; may be repeated."""
    rouge_examples: Annotated[int, Range(least=0, at_site=10**4)] = 16
    """Most held-out prompts of a split that a client answers after the last round, for ROUGE; 0 for none."""
    new_tokens: Annotated[int, Range(least=1, at_site=4096)] = 32
    """Most tokens of such an answer."""
    data_dir: str | None = None
    """A directory that holds data sets which would else come from the hub or its cache."""
    shuffle_labels: bool = False
    """Control: permute the training labels; accuracy must fall to the majority class."""
    arrive: tuple[str, ...] = ()
    """Clients that come when the run has begun: `movie-1=3` joins before round 3, placed beside the clusters that there
    by then; may be repeated."""


def parse_arrivals(words: Sequence[str]) -> Mapping[str, int]:
    """The round before which each client joins that `--arrive` names.

    >>> dict(parse_arrivals(("movie-1=3",)))
    {'movie-1': 3}

    Raises:
        ConfigError: a word is no `client=round` with a round from 2, or a client stands there twice.
    """
    round_by_client: dict[str, int] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        number = parse_integer(text) or 0
        if not name or name in round_by_client or number < 2:
            raise invalid_value("--arrive", word, "client=round with a round from 2, each client once")
        round_by_client[name] = number
    return round_by_client


class TrainingConfig(Frozen):
    """Rounds and local training."""

    rounds: Annotated[int, Range(least=1, at_site=10**5), Mark.COMMON] = 12
    """Rounds of the whole run."""
    local_epochs: Annotated[int, Range(least=1, at_site=10**3), Mark.COMMON] = 1
    """Passes of a client over its data in a round."""
    batch_size: Annotated[int, Range(least=1, at_site=4096), Mark.COMMON] = 16
    """Examples in a client's step."""
    lr: Annotated[float | None, Range(above=0), Mark.COMMON] = None
    """Peak learning rate; by default the model's own (`atlas list models`), which suits the optimizer of `auto`, and a
    tenth of it for all weights of a text model."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """Learning rate over the steps of all rounds; `step`: a tenth after half, a hundredth after three quarters."""
    warmup: Annotated[float, Range(least=0, below=1)] = 0.0
    """Share of all steps in which the learning rate rises from zero."""
    weight_decay: Annotated[float, Range(least=0)] = 0.0
    """AdamW's decoupled weight decay, or SGD's."""
    clip: Annotated[float, Range(least=0)] = 1.0
    """Largest gradient norm of a client; 0 switches clipping off."""
    trainable: Annotated[Literal["auto", "lora", "full"], Mark.COMMON] = "auto"
    """Weights that clients train: LoRA adapters and a head on the frozen model, or all weights; `auto` is `lora` for
    texts and the value of `--tune` for images."""
    optimizer: Annotated[Literal["auto", "adamw", "sgd"], Mark.COMMON] = "auto"
    """Optimizer of the clients; `auto` is SGD for whole image models and AdamW for all else. `--momentum` and
    `--nesterov` are of SGD."""
    proximal_mu: Annotated[
        float,
        Range(least=0),
        Tried("fedprox", values=(0.01, 0.1, 0.001, 1.0)),
        Tried("mr_mtl", "mr_mtl_cluster", "fedamp", "feddyn", values=(0.1, 0.01, 1.0, 0.03)),
    ] = 0.0
    """FedProx: weight mu of `mu / 2 ||w - w_start||^2` in every client's objective, where w_start is its model at the
    start of the round; 0 for none."""
    control_variates: bool = False
    """SCAFFOLD: add to every gradient of a client what its last round's mean gradient lacks of the mean of all."""
    trainer: str = "atlas"
    """The training loop of the clients: `atlas`, or that of a plug-in, such as a stock `transformers.Trainer`."""
    trained_parts: Literal["all", "B", "core", "head", "alternate", "head_then_rest", "without_head"] = "all"
    """Parameters that a client trains: all; of adapters B alone, A stays as drawn (FFA-LoRA); B in odd rounds and A in
    even ones (RoLoRA); in each round first the head alone, then the rest alone (`--head-epochs`); the square blocks
    between A and B alone (Fed-SB, RAVAN); or all but the head, which trains in the rounds of `--personal-rounds`
    (FedBABU)."""
    head_epochs: Annotated[
        int, Range(least=0, at_site=10**3), Tried("fedrep", values=(10, 1, 3, 5)), Tried("fedpac", values=(1, 3, 5, 10))
    ] = 0
    """Passes of `head_then_rest` over the head alone, before `--local-epochs` over the rest (FedRep, FedPAC); 0 gives
    each half of the round's steps, so that a client takes no more than with `all`."""
    head_rate: Annotated[float, Range(above=0), Tried("fedpac", values=(1.0, 10.0, 3.0, 0.3))] = 1.0
    """Multiple of the learning rate in the steps of `head_then_rest` on the head alone (FedPAC)."""
    rate_factor: Annotated[float, Range(above=0), Tried("ffa", "fedsvd", values=(4.0, 10.0, 2.0))] = 1.0
    """Multiple of `--lr`, also of a model's own, at which clients train: `ffa` and `fedsvd` need a larger one."""
    prior_correction: bool = False
    """Add the log frequencies of a client's own classes to its logits, in training and in evaluation: the shared model
    learns what classes look like, and every client brings how frequent they are with it."""
    update_filter: tuple[str, ...] = ()
    """Filters of a client's update before it leaves, in this order: `clip=NORM` scales the change down to an L2 norm,
    `noise=DEVIATION` adds Gaussian noise to every value, `topk=SHARE` keeps the largest values, `quantise=BITS` rounds
    at random, or those of plug-ins. Messages take the bytes that the filtered change needs."""
    error_feedback: bool = False
    """Add to a client's change what `--update-filter` took from its last one."""
    dp: Literal["none", "example", "client"] = "none"
    """Differential privacy that keeps `--epsilon` at `--delta` over all rounds: `example` of each training example at
    its client (DP-SGD: batches by chance, gradients of examples clipped to --clip, noise), `client` of each client, by
    noise in the sums of updates, which `--update-filter clip=NORM` bounds."""
    epsilon: Annotated[float, Range(above=0, most=1e4)] = 8.0
    """Budget of each client under --dp, spent when the last round ends."""
    delta: Annotated[float | None, Range(above=0, below=1)] = None
    """Chance at which --epsilon may not hold; by default n^-1.1 for a client with n examples, or for n clients."""
    clip_quantile: Annotated[float | None, Range(above=0, below=1)] = None
    """Share of the clients whose updates the clip of `--dp client` is to leave as they are: it begins with NORM of
    `--update-filter clip=NORM`, and follows the norms, of which the server counts those below it, with noise."""
    noise_bands: Annotated[int, Range(least=1, most=1000)] = 1
    """Rounds over which the noise of `--dp client` is correlated, so that much of it cancels in the models (banded
    matrix factorisation): a client takes part in one of so many rounds, in turn."""
    dpo_beta: Annotated[float | None, Range(above=0)] = None
    """DPO: learn to prefer the chosen answers of `chat=preference` to the rejected ones, against the frozen model, with
    this weight of the rewards (0.1, say); by default the chosen answers alone are learned. `--label-smoothing` is the
    share of pairs that are taken to be the wrong way round."""
    orpo_lambda: Annotated[float | None, Range(above=0)] = None
    """ORPO: learn the chosen answers of `chat=preference`, and with this weight (0.1, say) the odds of each over its
    rejected one; no reference model."""
    participation: Annotated[float, Range(above=0, most=1), Mark.COMMON] = 1.0
    """Share of the clients that train in a round."""
    eval_every: Annotated[int, Range(least=1), Mark.COMMON] = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    patience: Annotated[int, Range(least=0), Mark.COMMON] = 0
    """Rounds without a better mean validation score after which the run ends early; 0 for never."""
    min_delta: Annotated[float, Range(least=0)] = 0.0
    """Least improvement of a score that counts under `--patience`."""
    pack_tokens: Annotated[int | None, Range(least=1, at_site=2**20)] = None
    """Tokens that train together; chosen for the machine by default, and never above the memory budget."""
    pack_memory_gb: Annotated[float, Range(above=0, most=1e6, at_site=1024)] = 4.0
    """Memory that one pack's activations may take."""
    prefix_cache_gb: Annotated[float, Range(least=0, most=1e6, at_site=1024), Mark.SESSION] = 1.0
    """Memory of each process for what enters the first adapted block under `--adapted-blocks`, which is then computed
    once for each example; 0 keeps nothing. It changes no number."""


NONE, AUTO = "none", "auto"
WILDCARD = "*"
"""Stands for everyone who is not named."""


class SplitConfig(Frozen):
    """Phase 3: models cut in two, the lower part on the client and the upper one on the server."""

    split: Annotated[str, Mark.COMMON, Mark.WORD_OR_NUMBER] = NONE
    """Blocks that stay on the client: `none` (the whole model), a number, or `auto` (a cut where the device cannot hold
    the model); or one of these for each client, task or device that is named, `cpu_2gb=2,movie=auto,trec-0=1`, and none
    for the others. The client's name goes before its task's, and that before its device's."""
    split_objective: Literal["score", "time"] = "score"
    """Criterion of `auto` among the cuts that fit: memory, communication, importance and balance weighed together, or
    the smallest predicted round time."""
    wire: Annotated[Literal["fp32", "bf16", "int8"], Mark.COMMON] = "fp32"
    """Format of activations and gradients on the way; int8 has a scale a token."""
    wire_noise: Annotated[float, Range(least=0)] = 0.0
    """Gaussian noise on what leaves a cut client, in root mean squares of each token."""
    head: Literal["client", "server"] = "server"
    """Place of a cut model's head; at the client the labels stay there too."""
    topology: Annotated[Literal["server", "paired"], Mark.COMMON] = "server"
    """Machines that compute the upper parts of cut models: the server, or clients that hold the whole model and have
    room, the server for the rest. It changes no model, but traffic and time."""


def cuts_by_name(text: str) -> Mapping[str, str]:
    """Cuts that `--split` sets: `none`, `auto` or a number by the name of a client, task or device, or by `WILDCARD`.

    >>> dict(cuts_by_name("cpu_2gb=2,movie=auto"))
    {'*': 'none', 'cpu_2gb': '2', 'movie': 'auto'}

    Raises:
        ConfigError: a word is none of these, or a name stands there twice.
    """
    parts = [part.partition("=") for part in text.split(",")] if "=" in text else [(WILDCARD, "=", text)]
    cuts = {name.strip(): word.strip() for name, sign, word in parts if sign and name.strip()}
    are_cuts = all(word in (NONE, AUTO) or (parse_integer(word) or 0) >= 1 for word in cuts.values())
    if len(cuts) < len(parts) or not are_cuts:
        allowed = "none, auto, a number of blocks from 1, or name=word with commas between and each name once"
        raise invalid_value("--split", text, allowed)
    return {WILDCARD: NONE, **cuts}


def cut_setting(text: str, *, client: str, task: str, device: str) -> str:
    """Cut that `--split` sets for this client: by its own name, else its task's, else its device's.

    >>> cut_setting("cpu_2gb=2,movie=auto", client="movie-0", task="movie", device="cpu_2gb")
    'auto'
    """
    words = cuts_by_name(text)
    return next(words[name] for name in (client, task, device, WILDCARD) if name in words)


class RobustConfig(Frozen):
    """Robust aggregation: what an update, or a claim of examples, may do to the others."""

    norm_bound: Annotated[Literal["refuse", "clip", "off"], Mark.COMMON] = "refuse"
    """Treatment of an update whose change is more than `--max-norm-ratio` times the median norm of the round: refuse
    it, or scale it down to that."""
    max_norm_ratio: Annotated[float, Range(above=1)] = 10.0
    """Largest norm of a client's change, as a multiple of the median over the clients that trained in the round, of
    heads over those of the same task; compared from three clients on."""
    max_share: Annotated[float, Range(above=0, most=1)] = 1.0
    """Largest share of a weighted average that one client's examples may give it, where three or more are averaged; 1
    leaves the shares as they are. `atlas serve` takes 0.5 unless told."""
    within: Literal["all", "clusters"] = "all"
    """Scope of robust rules and server optimizers, such as `median` and `fedadam`: all clients, or each cluster. With
    `clusters` `kriging` is what `atlas` is: it averages where clients hardly differ."""


def server_config(**values: Any) -> Any:
    """The knobs of single strategies with these values; their class is read from the sources of the methods."""
    return knobs_class()(**values)


class AttackConfig(Frozen):
    """Hostile clients, in simulations alone: what they do, and what they do not harm under a robust rule."""

    attack: Annotated[
        Literal["none", "label_flip", "sign_flip", "scale", "model_replacement", "noise"], Mark.COMMON
    ] = "none"
    """Behaviour of the attackers: train on reversed labels, send their change reversed, times 30, or with noise of 10
    times its size, or replace the average by a random model."""
    attackers: Annotated[tuple[str, ...], Mark.COMMON] = ()
    """Attacking clients, by name, or a number of them, drawn by the seed; their scores are left out of `honest` in
    summary.json."""
    attack_scale: Annotated[float | None, Range(above=0)] = None
    """Size of the attack in the place of its own: 1 of `sign_flip`, 30 of `scale`, 10 of `noise`, and what outweighs
    all others of `model_replacement`."""


WHOLE = "whole"
ALL_CLASSES = "iid"
"""Value of `nc` under which every client has all classes."""


class ImagesConfig(Frozen):
    """Image tasks: all weights are trained by SGD, or adapters as on texts."""

    tune: Annotated[Literal["whole", "lora"], Mark.COMMON, Mark.OF_IMAGES] = "whole"
    """Trained weights of image models: `whole` is `--trainable full`, `lora` is `--trainable lora`, which comes first
    where it is given."""
    nc: Annotated[
        str,
        Form(lambda nc: nc == ALL_CLASSES or (parse_integer(nc) or 0) > 0, "iid, or a number of classes from 1"),
        Mark.COMMON,
        Mark.WORD_OR_NUMBER,
    ] = ALL_CLASSES
    """Classes of each client: `iid` (all of them), or a number, for images or with `--partition pathological`."""
    validation_share: Annotated[float | None, Range(above=0, below=1), Mark.OF_IMAGES] = None
    """Share of a data set's training images that becomes its validation split, where it brings none; a fifth, and at
    most 2,000, by default."""
    image_size: Annotated[int | None, Range(least=8, at_site=1024), Mark.OF_IMAGES] = None
    """Side of the square that the model sees, in pixels; what it was pretrained on by default."""
    frozen_blocks: Annotated[int, Range(least=0), Mark.OF_WHOLE_MODELS] = 0
    """Blocks from the first one up that stay as they are, the embeddings with them; 0 freezes nothing."""
    head_first: Annotated[Literal["none", "ridge"], Mark.OF_IMAGES] = "ridge"
    """Fit the head before anything else, by ridge regression over all clients' sums (no image leaves a client).
    Of whole models: beside adapters it begins and trains as on texts."""
    ridge: Annotated[float, Range(above=0), Mark.OF_WHOLE_MODELS, Mark.OF_IMAGES] = 10.0
    """Penalty of that regression, in examples."""
    local_steps: Annotated[int | None, Range(least=1, at_site=10**5)] = None
    """Steps of a client in a round (J); whole passes (`--local-epochs`) by default."""
    momentum: Annotated[float, Range(least=0, below=1), Mark.OF_SGD] = 0.9
    """SGD's momentum; it begins anew in every round, or with `--carry-momentum` once."""
    nesterov: Annotated[bool, Mark.OF_SGD] = False
    """Nesterov's momentum."""
    carry_momentum: Annotated[bool, Mark.OF_WHOLE_MODELS, Mark.OF_SGD] = False
    """Let every client begin a round with the momentum that it ended its last one with; needs all clients in every
    round, and memory for one more model a client."""
    label_smoothing: Annotated[float, Range(least=0, below=1)] = 0.0
    """Share of a label that is spread over all classes."""
    crop: Annotated[int, Range(least=0), Mark.OF_IMAGES] = 0
    """Border in pixels, of the images as they are, out of which training images are cropped at random; 0 for none."""
    flip: Annotated[bool, Mark.OF_IMAGES] = False
    """Mirror every second training image."""


class SparseConfig(Frozen):
    """Task arithmetic: only the weights under a mask move."""

    mask: Annotated[
        Literal["none", "least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random"],
        Mark.COMMON,
    ] = "none"
    """Weights that may move; the head, once fitted, is not among them."""
    mask_file: str | None = None
    """A mask that there is, in the place of one that is made: `mask.safetensors` of a run's folder, or what
    `atlas masks --merge` wrote. A run puts the digest of its content behind it and goes on with no other."""
    sparsity: Annotated[float, Range(above=0, below=1), Mark.COMMON] = 0.9
    """Share of the weights that may not."""
    mask_scope: Literal["global", "layer"] = "global"
    """Choose over all weights together, or the same share of each tensor."""
    calibration_rounds: Annotated[int, Range(least=1, at_site=10**3)] = 1
    """Rounds in which the mask is made: in each a part is frozen and the rest is scored again."""
    calibration_clients: Annotated[int, Range(least=1)] = 10
    """Clients, drawn once, that score the weights; all where there are fewer."""
    calibration_examples: Annotated[int, Range(least=1, at_site=10**5)] = 32
    """Training examples of each of them that its scores are made from."""
    fisher_labels: Literal["sampled", "true"] = "sampled"
    """Labels of the Fisher information: drawn from the model, or the true ones (empirical Fisher)."""

    @property
    def has_mask(self) -> bool:
        """Return true where only some weights may move."""
        return self.mask != "none" or self.mask_file is not None


def parse_mask_file(mask_file: str | None) -> tuple[str | None, str | None]:
    """(path, digest of the content) of a `mask_file`; None for each that it lacks."""
    return (None, None) if mask_file is None else split_pin(mask_file)


class ModelConfig(Frozen):
    """The frozen backbone and its adapters."""

    model: Annotated[str, Mark.COMMON] = "minilm"
    """Alias (`atlas list models`), hub name or directory."""
    targets: Annotated[tuple[str, ...], Mark.COMMON, Mark.OF_ADAPTERS] = ()
    """Module names that get LoRA, or `all-linear`; PEFT's table for the architecture by default."""
    adapted_blocks: Annotated[int | None, Range(least=1), Mark.OF_ADAPTERS] = None
    """LoRA on this many uppermost blocks alone; all by default."""
    lora_alpha: Annotated[float | None, Range(above=0), Mark.OF_ADAPTERS] = None
    """LoRA alpha; twice the rank by default."""
    rslora: Annotated[bool, Mark.OF_ADAPTERS] = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Dropout on the inputs of adapters and head, drawn from a generator of the client's own."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Mark.COMMON] = "fp32"
    """Arithmetic of the model; bf16 and fp16 by autocast, fp16 with scaled losses, and of adapters on CUDA alone."""
    base_weights: Annotated[Literal["fp32", "bf16", "fp16", "int8", "nf4"], Mark.OF_ADAPTERS] = "fp32"
    """Type in which the frozen weights of a text model are held in memory, whatever the arithmetic; int8 and nf4, the
    four bits of QLoRA, need torchao."""
    gradient_checkpointing: Annotated[bool, Mark.OF_ADAPTERS] = False
    """Recompute each block in the backward pass: less memory, more time."""
    fast_kernels: Annotated[bool, Mark.OF_ADAPTERS] = False
    """On CUDA in bf16 or fp16: flash attention, which keeps no scores in memory, and in bf16 grouped products of
    adapters. Flash attention adds gradients in no fixed order, so that a run and its repetition differ by rounding."""
    init_adapter: Annotated[str | None, Mark.OF_ADAPTERS] = None
    """A PEFT adapter folder that every client starts from."""


class ClusteringConfig(Frozen):
    """Phase 1: which clients share a task."""

    clusters: Annotated[str, Mark.COMMON, Mark.WORD_OR_NUMBER] = "auto"
    """`auto`, `oracle` (the true tasks) or a number of clusters."""
    cluster_by: Literal["corrected", "atlas", "silhouette", "cosine"] = "corrected"
    """Method by which `auto` finds the clusters: noise-corrected similarity without k, a k search by this score, or
    `cosine`, average linkage with the k of the best silhouette and no test (FedLEASE)."""
    fingerprint: str = "fisher"
    """Source of a client's fingerprint: `fisher`, `delta`, `gradient`, `embedding`, or that of a plug-in."""
    fingerprint_batches: Annotated[int, Range(least=2, at_site=10**4)] = 12
    """Most batches of the gradient and fisher fingerprints; a half takes no more than its examples fill."""
    fingerprint_blocks: Annotated[int, Range(least=1)] = 2
    """Blocks, from the last one down, whose gradients the gradient and fisher fingerprints read."""
    fingerprint_samples: Annotated[int | None, Range(least=2)] = None
    """Most examples of a client that its fingerprint is made from, half of them for each half; all by default."""
    fingerprint_steps: Annotated[int, Range(least=1, at_site=10**5)] = 60
    """Most warm-up steps of each half for the delta fingerprint."""
    sketch_dim: Annotated[int, Range(least=2, most=10**6)] = 1024
    """Length of the sketch that leaves the client."""
    pca_components: Annotated[int, Range(least=1)] = 64
    """Most principal components on the server; n clients have at most n - 1."""
    k_range: Annotated[
        tuple[int, int], Range(least=2), Form(lambda ends: ends[0] <= ends[1], "the smaller number first")
    ] = (2, 5)
    """Smallest and largest k of the search."""
    min_cluster_size: Annotated[int, Range(least=1)] = 1
    """Clusters below this size are merged into their nearest."""
    similarity_threshold: Annotated[float, Range(above=-1, below=1)] = 0.8
    """Noise-corrected similarity from which clients share a cluster under `corrected`."""
    min_reliability: Annotated[float, Range(above=-1, below=1)] = 0.1
    """Agreement of a client's own halves below which it is undecided and in no cluster."""
    incremental_pca: bool = False
    """Fit the principal components in batches of clients."""
    recluster_every: Annotated[int, Range(least=0), Mark.COMMON] = 0
    """Rounds between two clusterings; 0 clusters once."""
    stability: Annotated[float, Range(least=0, below=1)] = 0.0
    """Weight of the previous clusters when clients are clustered again."""


class RanksConfig(Frozen):
    """Phase 2: LoRA ranks per layer and client."""

    ranks: Annotated[str, Mark.COMMON, Mark.WORD_OR_NUMBER] = "budget"
    """`budget`, `greedy`, `matched` (to the bytes of uniform), `uniform`, or one rank for every layer and client; your
    own data alone: 8, unless you give devices."""
    candidates: Annotated[
        tuple[int, ...],
        Range(least=1, at_site=1024),
        Form(
            lambda ranks: bool(ranks) and list(ranks) == sorted({*ranks}),
            "at least one rank, each larger than the one before it",
        ),
    ] = (4, 8, 16, 32, 64)
    """Ranks that a layer may have."""
    importance: Literal["gradient", "rngwp"] = "gradient"
    """Measure of a layer's importance."""
    adapter_bytes: Annotated[int | None, Range(least=1)] = None
    """Most bytes of one client's adapters; the device's own upload budget by default."""
    budget: Literal["memory", "fractions"] = "memory"
    """Device memory by the true model, or by fixed fractions."""
    alpha_base: Annotated[float, Range(least=0, below=1)] = 0.35
    """Fraction of memory for the backbone, when budget is `fractions`."""
    alpha_act: Annotated[float, Range(least=0, below=1)] = 0.25
    """Fraction of memory for activations, when budget is `fractions`."""
    alpha_opt: Annotated[float, Range(least=0, below=1)] = 0.15
    """Fraction of memory for the optimizer, when budget is `fractions`."""
    rerank: bool = False
    """Choose the ranks again whenever clients are clustered again, and bring every model to them."""
    complexity_scaling: bool = False
    """Give clusters with a harder task more of their budget."""


class MixingConfig(Frozen):
    """Phase 4: the server's rule."""

    strategy: Annotated[str, Mark.COMMON] = "atlas"
    """The rule (`atlas list strategies`); `--ablation` is the same flag and takes old names, such as local_only."""
    knob: Annotated[tuple[str, ...], Mark.COMMON] = ()
    """Settings of methods that plug-ins bring, `name=value` (`atlas list strategies NAME`); may be repeated."""
    eta: Annotated[
        float,
        Range(least=0, below=2),
        Tried("atlas_laplacian", "atlas_pad", "atlas_truncate", values=(0.5, 0.25, 0.9, 0.1)),
    ] = 0.5
    """Step of the Laplacian: 0 mixes nothing."""
    eta_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    """Factor on eta after each round."""
    alpha: Annotated[float | None, Range(above=0)] = None
    """Sharpness of the graph's RBF; one over the median squared distance by default."""
    graph: Literal["similarity", "uniform", "adaptive"] = "similarity"
    """Edge weights: fingerprint similarity, equal, or similarity times validation performance."""
    symmetrize: Literal["average", "max", "min"] = "average"
    """Reduction of a directed graph's two weights to one."""
    neighbours: Annotated[int, Range(least=0)] = 0
    """Keep only this many nearest neighbours of a client; 0 keeps all."""
    singleton_neighbours: Annotated[int, Range(least=0)] = 1
    """Nearest clients that a client alone in its cluster is joined to; 0 leaves it alone."""
    graph_ema: Annotated[float, Range(least=0, below=1)] = 0.0
    """Share of the previous graph that re-clustering keeps."""
    block_diagonal: bool = True
    """Cut the edges between clusters."""
    space: Literal["factors", "product"] = "product"
    """Mix A and B apart, or the update s B A itself."""
    share: Annotated[
        tuple[Literal["A", "B", "head"], ...],
        Form(lambda parts: bool(parts) and len({*parts}) == len(parts), "one or more of A, B, head, each once"),
        Mark.COMMON,
    ] = ("A", "B", "head")
    """Parts of a client's model that leave it."""
    align: Literal["pad", "truncate"] = "pad"
    """Alignment of factors of different ranks in factor space."""
    layer_weighting: Literal["none", "importance"] = "none"
    """Scale eta per layer by the layer's importance."""
    aggregate_every: Annotated[int, Range(least=1)] = 1
    """Rounds between two aggregations; between them clients train on from their own models and nothing is mixed."""
    personal_models: bool = False
    """Every client goes on with the model that it trained, and what the server mixes is the point that `--proximal-mu`
    pulls it to: mean-regularised multi-task learning."""
    second_model: Literal["none", "proximal", "interpolated", "stacked", "shrunk"] = "none"
    """A model of each client's own beside the shared one, which is trained and mixed as ever: pulled to it (Ditto),
    interpolated with it by a trained weight (APFL), or stacked on it as a second adapter (FedDPA). It is what the
    client predicts with, and never leaves it. With `--personal-models`, `stacked` freezes what the server mixes under
    the client's own model, instead of pulling to it (FedALT), and `shrunk` moves the own model to it (`shrinkage`)."""
    personal_rounds: Annotated[
        int, Range(least=0), Mark.COMMON, Tried("fedavg_ft", "fedavg_cluster_ft", "fedbabu", values=(2, 1, 4))
    ] = 0
    """Last rounds in which nothing is mixed: every client fine-tunes its model of the last aggregation for itself. A
    simulation counts no bytes for them; a site across machines reports its shared part to the server as ever."""
    secure: bool = False
    """Secure sums: the server sees the sums of models over all clients, or clusters, of at least three, and nothing of
    a single one. Needs a rule that is an average, `--space factors` and one rank."""
    secure_range: Annotated[float, Range(above=0, most=1e6)] = 4.0
    """Largest size of a weight under --secure; a client with a larger one is refused. Means are right to about
    this times the clients over 2^30."""


class RunConfig(Frozen):
    """Seed, records and machine."""

    seed: Annotated[int, Range(least=0), Mark.COMMON] = 42
    """Every random choice derives from it, but for what `--secrets` are for."""
    secrets: Annotated[str | None, Mark.SESSION] = None
    """Folder with the NAME-secret of every client, as `atlas join` keeps it: a simulation then draws the order, subsets
    and augmentation of examples, dropout and noise as these sites do. Without it all follow from --seed."""
    preset: Annotated[
        str,
        Form(
            lambda name: re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) is not None,
            "a name of small letters, digits, - and _ (`atlas list presets`)",
        ),
        Mark.COMMON,
    ] = "quick"
    """The recipe that all other defaults come from (`atlas list presets`). `--mode` is the same flag."""
    dial: Annotated[int | None, Range(least=0, most=4)] = None
    """Amount by which clients of a federation with a dial (`atlas list presets`) differ: 0 to 4; 2 by default."""
    plugin: Annotated[tuple[str, ...], Mark.COMMON] = ()
    """Plug-ins that register partitions, tasks, strategies and more: a .py file, a module, or an entry point of the
    group `atlas_fl`; may be repeated. A run puts the digest of its code behind each and goes on with no other."""
    name: Annotated[
        str | None,
        Form(
            _is_folder_name,
            f"the name of a folder of at most {MOST_NAME_BYTES} bytes, without / and not starting with a dot",
        ),
        Mark.SESSION,
        Mark.COMMON,
    ] = None
    """Name of the run's folder; preset, strategy, model, seed and config hash by default."""
    runs_dir: Annotated[str, Mark.SESSION, Mark.COMMON] = "runs"
    """Folder of run folders."""
    audit: Annotated[bool, Mark.SESSION, Mark.COMMON] = False
    """Keep what every client trained and loaded, for `atlas audit`."""
    alone: Annotated[Literal["none", "sample", "all"], Mark.SESSION] = "sample"
    """Clients that are trained alone as well once the rounds are over, so that the run can say what they gain: none, at
    most twelve (four of whole models), or all. `atlas compare`, `sweep` and `search` train none: there `local` is a
    strategy among others."""
    max_rounds: Annotated[int | None, Range(least=1), Mark.SESSION, Mark.COMMON] = None
    """Stop after this many rounds of this session; `atlas resume` goes on."""
    checkpoint_every: Annotated[int, Range(least=1), Mark.SESSION] = 1
    """Rounds between two checkpoints; a session always ends with one."""
    keep_checkpoints: Annotated[int, Range(least=1), Mark.SESSION] = 2
    """Newest checkpoints that are kept."""
    keep_best: Annotated[int, Range(least=0), Mark.SESSION] = 0
    """Best rounds by mean validation score whose checkpoints are kept too, for `atlas export --round best`."""
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Mark.COMMON] = "cpu"
    """Processor that trains the packs."""
    engine: Annotated[Literal["local", "ray"], Mark.SESSION] = "local"
    """Processes that train the packs: those of this machine, or the actors of a Ray cluster (`pip install 'ray>=2.40'`;
    RAY_ADDRESS names the cluster, without it one is started here)."""
    workers: Annotated[int | None, Range(least=1), Mark.SESSION, Mark.COMMON] = None
    """Processes that train packs at once, on shared backbone weights; by default this one alone, and with Ray one for
    each GPU, or CPU, of the cluster. With as many threads each, any number of them ends in the same bits."""


class Config(Frozen):
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    clustering: ClusteringConfig = field(default_factory=ClusteringConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    mixing: MixingConfig = field(default_factory=MixingConfig)
    robust: RobustConfig = field(default_factory=RobustConfig)
    server: Any = field(default_factory=server_config)
    attack: AttackConfig = field(default_factory=AttackConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def measures_importance(self) -> bool:
        """Something follows the importance of layers, and differential privacy leaves it to be measured."""
        has_equal_ranks = self.ranks.ranks == "uniform" or self.ranks.ranks.isdigit()
        follows = not has_equal_ranks or AUTO in self.split.split or self.mixing.layer_weighting == "importance"
        return follows and self.training.dp == "none"

    @property
    def needs_sums(self) -> bool:
        """The server works with sums over clients alone."""
        return self.mixing.secure or self.training.dp == "client"

    @property
    def compresses_updates(self) -> bool:
        """Updates travel as their change in few bytes; secure sums take whole models."""
        return bool(self.training.update_filter) and not self.mixing.secure

    def trainable(self, *, images: bool) -> Literal["lora", "full"]:
        """Weights that clients of image tasks, or of text tasks, train."""
        if self.training.trainable != "auto":
            return self.training.trainable
        return "full" if images and self.images.tune == WHOLE else "lora"

    def optimizer(self, *, images: bool) -> Literal["adamw", "sgd"]:
        """The optimizer of clients of image tasks, or of text tasks."""
        if self.training.optimizer != "auto":
            return self.training.optimizer
        return "sgd" if images and self.trainable(images=True) == "full" else "adamw"
