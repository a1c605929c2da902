"""Does ATLAS compute the same on a GPU as on a CPU, and how much faster than one client after another with PEFT?

One command that needs a GPU and no network: models have the shapes of published ones and random weights, and texts are
random words. Correctness comes first (the CPU against the GPU in float32, packs against clients alone, a resumed run
against one that never stopped), then PEFT's seconds over ours for clients that train the same batches from the same
adapters, then memory by the number of clients. Rows that run out of memory say so.

    python benchmarks/gpu.py                                     # at most eight minutes on one H100
    python benchmarks/gpu.py --device cpu --models tiny --repeat 1    # the same path without a GPU
"""

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed import RANK, in_turns, jobs_of, time_call
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from atlas_fl import (
    Config,
    DataConfig,
    Event,
    RoundFinished,
    RunConfig,
    TrainingConfig,
    resume_run,
    run_config,
    run_folder,
    with_values,
)
from atlas_fl.config.schema import ModelConfig, RanksConfig
from atlas_fl.errors import AtlasError
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import Assembly, assemble

WORDS = 2000
LABELS = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A published model's shape, and how it is measured."""

    model_type: str
    settings: dict[str, Any]
    """What its config.json says, but for the vocabulary."""
    vocabulary: int
    clients: int
    tokens: int
    """Median length of a text."""
    precisions: tuple[str, ...]
    """`fast` is bf16 with `--fast-kernels`, where there is a GPU."""
    steps: int = 8


_QWEN = {"num_key_value_heads": 2, "tie_word_embeddings": True}
SHAPES = {
    "tiny": Shape(
        model_type="bert",
        settings={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        vocabulary=WORDS + 4,
        clients=3,
        tokens=12,
        precisions=("fp32",),
        steps=2,
    ),
    "minilm": Shape(  # all-MiniLM-L6-v2
        model_type="bert",
        settings={"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
        vocabulary=30522,
        clients=9,
        tokens=20,
        precisions=("fp32", "bf16"),
    ),
    "qwen2.5-0.5b": Shape(
        model_type="qwen2",
        settings={
            **{"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
            **_QWEN,
        },
        vocabulary=151936,
        clients=9,
        tokens=20,
        precisions=("fp32", "bf16", "fast"),
    ),
    "qwen2.5-7b": Shape(
        model_type="qwen2",
        settings={
            **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944},
            **{"num_key_value_heads": 4, "tie_word_embeddings": False},
        },
        vocabulary=152064,
        clients=4,
        tokens=120,
        precisions=("bf16", "fast"),
        steps=4,
    ),
}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every word, and the special tokens of BERT."""
    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words()])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **roles)


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every word by merges of bytes, since Qwen's class reads nothing else."""
    merges = list(dict.fromkeys((f"\u0120{word[:end]}", word[end]) for end in range(3) for word in words()))
    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|endoftext|>")


def write_model(shape: Shape, folder: Path) -> None:
    """A model of this shape with random weights and a tokenizer of single words."""
    (bpe_tokenizer() if shape.model_type == "qwen2" else word_tokenizer()).save_pretrained(folder)
    settings = {**shape.settings, "vocab_size": shape.vocabulary, "pad_token_id": 0, "num_labels": LABELS}
    config = AutoConfig.for_model(shape.model_type, **settings)
    dtype = torch.float32 if "fp32" in shape.precisions else torch.bfloat16
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if parameter.dim() == 1:
            fill = 1.0 if name.endswith("weight") else 0.0
            tensors[name] = torch.full(parameter.shape, fill, dtype=dtype)
        else:  # one block of noise over and over: drawing seven billion numbers would take minutes
            repeats = -(-parameter.numel() // len(noise))
            tensors[name] = noise.repeat(repeats)[: parameter.numel()].view(parameter.shape).clone()
    model.load_state_dict(tensors, assign=True)
    model.save_pretrained(folder)


def words() -> list[str]:
    """Words of three letters."""
    return ["".join(letters) for letters in itertools.product("abcdefghijklm", repeat=3)][:WORDS]


def write_texts(shape: Shape, file: Path) -> None:
    """Texts of random words by client, in which every label has words of its own."""
    rng = np.random.default_rng(0)
    vocabulary = np.array(words())
    with file.open("w", encoding="utf-8") as rows:
        for client, _ in itertools.product(range(shape.clients), range(16 * shape.steps + 60)):
            label = int(rng.integers(LABELS))
            length = int(np.clip(rng.lognormal(np.log(shape.tokens), 0.5), 4, 6 * shape.tokens))
            own = rng.random(length) < 0.3
            chosen = np.where(own, 100 * label + rng.integers(0, 100, length), rng.integers(600, WORDS, length))
            text = " ".join(vocabulary[chosen])
            rows.write(json.dumps({"text": text, "label": f"label{label}", "client": f"c{client}"}) + "\n")


def config_of(folder: Path, shape: Shape, device: str, precision: str) -> Config:
    base = Config(
        data=DataConfig(
            task=(f"words={folder / 'texts.jsonl'},text=text,label=label,client=client",),
            tasks=(),
            validation_samples=20,
            test_samples=20,
            max_length=6 * shape.tokens + 8,
        ),
        model=ModelConfig(model=str(folder)),
        ranks=RanksConfig(ranks=str(RANK)),
        training=TrainingConfig(pack_memory_gb=30, lr=1e-3),
        run=RunConfig(runs_dir=str(folder / "runs")),
    )
    fast = precision == "fast"
    number = "bf16" if fast else precision
    values = {"precision": number, "base_weights": number, "fast_kernels": fast, "accelerator": device}
    return with_values(base, values)


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A model and texts on disk."""

    name: str
    shape: Shape
    folder: Path

    def assembly(self, device: str, precision: str) -> Assembly:
        return assemble(config_of(self.folder, self.shape, device, precision))


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def correctness(place: Workplace, device: str) -> Iterator[str]:
    """Lines on the same training on the CPU and on the device, packed and alone, and on resume."""
    results = {}
    for where in dict.fromkeys(("cpu", device)):
        assembly = place.assembly(where, "fp32")
        jobs = jobs_of(assembly, steps=place.shape.steps)
        results[where] = LocalEngine(site=assembly.site).run("train", jobs)
        again = LocalEngine(site=assembly.site).run("train", jobs)
        alone = LocalEngine(site=replace(assembly.site, max_tokens=1)).run("train", jobs)
        yield f"{where}: the same packs twice differ by {difference(results[where], again):.1e}"
        yield f"{where}: packs and clients alone differ by {difference(results[where], alone):.1e}"
    yield f"cpu and {device} differ by {difference(results['cpu'], results[device]):.1e}"
    yield from halves(place, device)
    for strategy in ("fedavg", "atlas"):
        yield resumed(place, device, strategy)


def halves(place: Workplace, device: str) -> Iterator[str]:
    """Lines on bf16: the same training packed, alone, and with the fast kernels."""
    assembly = place.assembly(device, "bf16")
    jobs = jobs_of(assembly, steps=place.shape.steps)
    packed = LocalEngine(site=assembly.site).run("train", jobs)
    alone = LocalEngine(site=replace(assembly.site, max_tokens=1)).run("train", jobs)
    yield f"{device} in bf16: packs and clients alone differ by {difference(packed, alone):.1e}"
    if device == "cuda":
        fast = LocalEngine(site=place.assembly(device, "fast").site).run("train", jobs)
        yield f"{device} in bf16: packs without and with the fast kernels differ by {difference(packed, fast):.1e}"


def difference(left: Any, right: Any) -> float:
    return max(
        float((one.params[key] - other.params[key]).abs().max())
        for one, other in zip(left, right, strict=True)
        for key in one.params
    )


def stop_after_two(event: Event) -> None:
    if isinstance(event, RoundFinished) and event.round == 2:
        raise KeyboardInterrupt


def exported(folder: Path) -> dict[str, bytes]:
    """Bytes of the adapters of all clients at the end of a run."""
    files = sorted(folder.rglob("adapter_model.safetensors"))
    assert files, "a run exports its clients' adapters"
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def resumed(place: Workplace, device: str, strategy: str) -> str:
    """A line on a run that stopped after its second round and went on, beside one that did not stop."""
    config = with_values(
        config_of(place.folder, place.shape, device, "fp32"),
        {"strategy": strategy, "rounds": 4, "measure_round": 2, "checkpoint_every": 1, "alone": "none"},
    )
    began = time.perf_counter()
    whole = run_config(with_values(config, {"name": f"whole-{strategy}"}))
    seconds = time.perf_counter() - began
    stopped = with_values(config, {"name": f"stopped-{strategy}"})
    with suppress(KeyboardInterrupt):
        run_config(stopped, on_event=stop_after_two)
    later = resume_run(run_folder(stopped).path)
    same = exported(whole.folder) == exported(later.folder)
    return (
        f"{device}: a run of {strategy} that stopped after two of four rounds ends with"
        f" {'the same bits' if same else 'OTHER BITS'} ({seconds:.0f} s)"
    )


def ratio(place: Workplace, device: str, precision: str, repeat: int) -> str:
    """A row of the table: PEFT's seconds over ours."""
    assembly = place.assembly(device, precision)
    jobs = jobs_of(assembly, steps=place.shape.steps)
    free(device)
    options = argparse.Namespace(device=device, bf16=precision != "fp32", repeat=repeat)
    seconds, ratios, far = in_turns(jobs, assembly, options)
    return (
        f"| {place.name} | {precision} | {len(jobs)} | {statistics.median(seconds):.2f} |"
        f" {statistics.median(ratios):.2f} | {far:.1e} | {launches(jobs, assembly, device)} |"
    )


def launches(jobs: list[Any], assembly: Assembly, device: str) -> str:
    """What a round of one step of all clients starts on the GPU: kernels and copies, each with its call."""
    if device != "cuda":
        return "-"
    one = [replace(job, options=replace(job.options, max_steps=1)) for job in jobs]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        LocalEngine(site=assembly.site).run("train", one)
        torch.cuda.synchronize()
    return f"{sum(event.count for event in profile.key_averages()):,}"


def memory(place: Workplace, device: str, precision: str) -> Iterator[str]:
    """Rows of the table of memory: megabytes at the peak of a step of so many clients in one pack."""
    if device != "cuda":
        return
    assembly = place.assembly(device, precision)
    jobs = jobs_of(assembly, steps=2)
    counts = [count for count in (1, 2, 4, 8, 16) if count <= len(jobs)]
    for count in counts:
        free(device)
        held = torch.cuda.memory_allocated()
        for packed in (True, False):
            torch.cuda.reset_peak_memory_stats()
            site = assembly.site if packed else replace(assembly.site, max_tokens=1)
            LocalEngine(site=site).run("train", jobs[:count])
            peak = torch.cuda.max_memory_allocated()
            how = "packed" if packed else "in turn"
            above = (peak - held) / 2**20
            yield f"| {place.name} | {precision} | {count} | {how} | {held / 2**20:,.0f} | {above:,.0f} |"


def attempt(row: Callable[[], str], words: str) -> None:
    """Print a row, or that it ran out of memory."""
    try:
        print(row(), flush=True)
    except torch.cuda.OutOfMemoryError:
        print(f"{words}: out of memory", flush=True)
    except AtlasError as error:
        print(f"{words}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["minilm", "qwen2.5-0.5b", "qwen2.5-7b"])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if args.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for name in args.models:
            place = Workplace(name=name, shape=SHAPES[name], folder=Path(root) / name)
            place.folder.mkdir()
            seconds, _ = time_call(lambda: write_model(place.shape, place.folder), args.device)  # noqa: B023
            write_texts(place.shape, place.folder / "texts.jsonl")
            print(f"\n{name}: written in {seconds:.0f} s", flush=True)
            if name in ("tiny", "minilm"):
                for line in correctness(place, args.device):
                    print(line, flush=True)
            print("\n| model | precision | clients | packed, s | PEFT over packed | adapters differ | launches |")
            print("|---|---|---|---|---|---|---|", flush=True)
            precisions = [one for one in place.shape.precisions if args.device == "cuda" or one != "fast"]
            for precision in precisions:
                attempt(lambda: ratio(place, args.device, precision, args.repeat), f"{name} {precision}")  # noqa: B023
                free(args.device)
            print("\n| model | precision | clients | how | held, MB | above it at the peak, MB |")
            print("|---|---|---|---|---|---|", flush=True)
            for precision in precisions[-2:]:
                attempt(lambda: "\n".join(memory(place, args.device, precision)), name)  # noqa: B023
            free(args.device)


if __name__ == "__main__":
    main()
