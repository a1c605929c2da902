"""How much faster is one pack than the loop that users write today?

Both train the same clients from the same adapters on the same batches: ATLAS in one padding-free pack, PEFT one
client after another with every batch padded to its longest example. They take turns, so that a noisy machine slows
both; the largest difference of the adapters afterwards says whether they did the same work.

    python benchmarks/packed.py                                     # 9 clients on the CPU
    python benchmarks/packed.py --device cuda --clients-per-task 22 # on a GPU
    python benchmarks/packed.py --model smollm2-135m --tasks spans_english definitions_english --samples 24 --steps 2
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from atlas_fl.client.job import Job, Update
from atlas_fl.client.local_training import batches, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from atlas_fl.models.peft_io import peft_name
from atlas_fl.models.registry import modules_to_save
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import Assembly, assemble

RANK = 8

ResultT = TypeVar("ResultT")


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_call(work: Callable[[], ResultT], device: str) -> tuple[float, ResultT]:
    synchronise(device)
    began = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - began, result


def pad_batch(batch: EncodedExamples, pad: int, device: str) -> dict[str, torch.Tensor]:
    """A batch as the usual loop sees it: rectangular, with a mask."""
    longest, count = int(batch.lengths.max()), len(batch)
    ids = torch.full((count, longest), pad)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (start, stop) in enumerate(zip(batch.offsets, batch.offsets[1:])):
        ids[row, : stop - start] = torch.from_numpy(batch.ids[start:stop])
        types[row, : stop - start] = torch.from_numpy(batch.types[start:stop])
        mask[row, : stop - start] = 1
    labels = torch.from_numpy(batch.labels)
    if batch.target_mask is not None:
        labels = torch.full((count, longest), -100)
        labels[mask.bool()] = torch.from_numpy(np.where(batch.target_mask, batch.ids, -100))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    inputs |= {} if batch.target_mask is not None else {"token_type_ids": types}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def peft_model(assembly: Assembly, num_labels: int, device: str, *, bf16: bool = False) -> torch.nn.Module:
    """The stock model under PEFT, without dropout: the loop must be comparable to the last digits.

    With `bf16` the frozen weights are of that dtype, as who trains in it loads them; adapters stay float32.
    """
    backbone = assembly.site.backbone
    dtype = torch.bfloat16 if bf16 else torch.float32
    first = assembly.site.first_adapted
    if backbone.vocabulary is None:
        model = AutoModelForSequenceClassification.from_pretrained(backbone.source, num_labels=num_labels, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(backbone.source, dtype=dtype)
    settings = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=0.0,
        target_modules=list(assembly.site.targets),
        layers_to_transform=list(range(first, len(backbone.blocks))) if first else None,
        modules_to_save=modules_to_save(backbone.family) if backbone.vocabulary is None else None,
    )
    adapted: torch.nn.Module = get_peft_model(model, settings)
    for module in adapted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return adapted.to(device).train()


def peft_client(
    model: torch.nn.Module, job: Job, assembly: Assembly, device: str, *, bf16: bool
) -> dict[str, torch.Tensor]:
    """One client's turn in the sequential loop."""
    options = job.options
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=options.weight_decay)
    pad = assembly.site.backbone.tokenizer.pad_token_id
    for batch in batches(assembly.site.data[job.client].splits["train"], job, secret=None):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            loss = model(**pad_batch(batch, pad, device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().cpu().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def load(model: torch.nn.Module, job: Job, assembly: Assembly) -> None:
    family = assembly.site.backbone.family
    set_peft_model_state_dict(model, {peft_name(key, family): tensor for key, tensor in job.params.items()})


def peft_round(
    models: Mapping[int, torch.nn.Module], jobs: list[Job], assembly: Assembly, device: str, *, bf16: bool
) -> tuple[float, list[Params]]:
    """Seconds of the sequential loop over all clients, without loading their adapters."""
    seconds, results = 0.0, list[Params]()
    for job in jobs:
        model = models[assembly.site.data[job.client].task.num_labels]
        load(model, job, assembly)
        taken, result = time_call(lambda: peft_client(model, job, assembly, device, bf16=bf16), device)  # noqa: B023
        seconds += taken
        results.append(result)
    return seconds, results


def gemm_rate(device: str, *, bf16: bool) -> float:
    """The best of this machine on the largest product of the model, in floating-point operations per second."""
    kind = torch.bfloat16 if bf16 else torch.float32
    left, right = torch.randn(4096, 384, device=device, dtype=kind), torch.randn(384, 1536, device=device, dtype=kind)
    best = min(time_call(lambda: left @ right, device)[0] for _ in range(30))
    return 2 * 4096 * 384 * 1536 / best


def padding(jobs: list[Job], assembly: Assembly) -> float:
    """Tokens that the padded batches have over tokens that there are."""
    taken = [
        batch for job in jobs for batch in batches(assembly.site.data[job.client].splits["train"], job, secret=None)
    ]
    return sum(len(batch) * int(batch.lengths.max()) for batch in taken) / sum(
        int(batch.lengths.sum()) for batch in taken
    )


def largest_difference(ours: Sequence[Update], theirs: Sequence[Params], assembly: Assembly) -> float:
    family = assembly.site.backbone.family
    return max(
        float((tensor - result[peft_name(key, family)]).abs().max())
        for update, result in zip(ours, theirs)
        for key, tensor in update.params.items()
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clients-per-task", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pack-tokens", type=int)
    parser.add_argument("--tasks", nargs="+", default=["movie", "trec", "pairs"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--model", default="minilm", help="a model that writes takes tasks of chats")
    parser.add_argument("--adapted-blocks", type=int, help="all by default")
    parser.add_argument("--conversations", action="store_true", help="of random words, their lengths log-normal")
    return parser.parse_args()


def write_conversations(path: Path, count: int) -> str:
    """The task of a file of conversations: answers of 60 words in the median, .9 the deviation of logs."""
    draw = np.random.default_rng(0)
    words = ["how", "many", "people", "live", "there", "in", "the", "north", "of", "a", "small", "town", "and", "why"]
    with path.open("w") as file:
        for length in np.exp(draw.normal(np.log(60), 0.9, count)).astype(int) + 1:
            answer = " ".join(draw.choice(words, length))
            file.write(json.dumps({"prompt": " ".join(draw.choice(words, 12)), "completion": answer}) + "\n")
    return f"conversations={path},chat=completion"


def config_of(args: argparse.Namespace) -> Config:
    own: tuple[str, ...] = ()
    if args.conversations:
        count = 2 * args.clients_per_task * (args.samples + 20)
        own = (write_conversations(Path(tempfile.mkdtemp()) / "conversations.jsonl", count),)
    return Config(
        data=DataConfig(
            tasks=() if own else tuple(args.tasks),
            task=own,
            max_length=512 if own else None,
            clients_per_task=args.clients_per_task,
            samples=args.samples,
            validation_samples=10,
            test_samples=10,
        ),
        model=ModelConfig(
            model=args.model, precision="bf16" if args.bf16 else "fp32", adapted_blocks=args.adapted_blocks
        ),
        training=TrainingConfig(pack_tokens=args.pack_tokens),
        run=RunConfig(accelerator=args.device),
    )


def jobs_of(assembly: Assembly, *, steps: int) -> list[Job]:
    options = TrainOptions(seed=0, epochs=steps, max_steps=steps, lr=1e-3)
    ranks = (RANK,) * assembly.shape.num_layers
    return [
        Job(client=c.name, params=assembly.initial_params(c, ranks), round=1, options=options) for c in assembly.clients
    ]


def in_turns(jobs: list[Job], assembly: Assembly, args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Our seconds, PEFT's over ours, and the largest difference that the adapters have at the end."""
    labels = {client.task.num_labels for client in assembly.clients}
    models = {count: peft_model(assembly, count, args.device, bf16=args.bf16) for count in labels}
    engine = LocalEngine(site=assembly.site)
    engine.run("train", jobs)  # warm both up
    peft_round(models, jobs[:1], assembly, args.device, bf16=args.bf16)
    our_seconds, ratios = [], []
    for _ in range(args.repeat):
        seconds, ours = time_call(lambda: engine.run("train", jobs), args.device)
        peft_seconds, theirs = peft_round(models, jobs, assembly, args.device, bf16=args.bf16)
        our_seconds.append(seconds)
        ratios.append(peft_seconds / seconds)
        print(f"packed {seconds:.2f} s, peft {peft_seconds:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    return our_seconds, ratios, largest_difference(ours, theirs, assembly)


def operations(jobs: list[Job], assembly: Assembly) -> float:
    """Floating-point operations of training all jobs, by those of a few of them."""
    few = jobs[:9]
    with FlopCounterMode(display=False) as counter:
        train(few, assembly.site)
    counted: int = counter.get_total_flops()
    return counted * len(jobs) / len(few)


def main() -> None:
    args = arguments()
    assembly = assemble(config_of(args))
    jobs = jobs_of(assembly, steps=args.steps)
    seconds, ratios, difference = in_turns(jobs, assembly, args)
    rate = gemm_rate(args.device, bf16=args.bf16)
    own_rate = operations(jobs, assembly) / statistics.median(seconds)
    precision = "bf16" if args.bf16 else "fp32"
    print(f"{len(jobs)} clients, {args.steps} steps of 16, rank {RANK}, {precision}, {args.device}")
    print(f"tokens with padding over tokens: {padding(jobs, assembly):.2f}")
    print(f"largest difference of the adapters: {difference:.1e}")
    print(f"packed training: {own_rate / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s, {own_rate / rate:.0%} of GEMM peak")
    print(f"ratio packed/peft: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
