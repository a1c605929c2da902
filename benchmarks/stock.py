"""How much slower is the stock path than the loop that users write today?

Both train the same clients from the same adapters on the same padded batches, one client after another, on a model of
random weights with MiniLM's tokenizer, of an architecture that has no packs. They take turns as in `packed.py`, and
what counts is the seconds of the CPU in this process, which others on the machine hardly change.

    python benchmarks/stock.py --models modernbert deberta-v2 albert --repeat 5
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from packed import config_of, jobs_of, largest_difference, peft_model, peft_round
from transformers import AutoConfig, AutoModel, AutoTokenizer

from atlas_fl.models.registry import locate_model
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import assemble

ResultT = TypeVar("ResultT")

SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 128},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 64},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 32},
}


def save_model(folder: Path, model_type: str) -> Path:
    """A model of MiniLM's size and random weights."""
    tokenizer = AutoTokenizer.from_pretrained(locate_model("minilm"))
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(
        model_type,
        **SIZES,
        **OWN.get(model_type, {}),
        **special,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["modernbert", "deberta-v2", "albert"])
    parser.add_argument("--clients-per-task", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def cpu_seconds(work: Callable[[], ResultT]) -> tuple[float, ResultT]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def compare(model_type: str, args: argparse.Namespace) -> None:
    """Print our seconds over PEFT's, and the largest difference that the adapters have at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args)
        model = replace(config.model, model=str(save_model(Path(folder), model_type)))
        assembly = assemble(replace(config, model=model))
        assert assembly.site.backbone.family.stock, f"{model_type} has packs"
        jobs, engine = jobs_of(assembly, steps=args.steps), LocalEngine(site=assembly.site)
        labels = {client.task.num_labels for client in assembly.clients}
        models = {count: peft_model(assembly, count, args.device) for count in labels}
        ratios = []
        for _ in range(args.repeat + 1):
            seconds, ours = cpu_seconds(lambda: engine.run("train", jobs))
            peft_seconds, (_, theirs) = cpu_seconds(lambda: peft_round(models, jobs, assembly, args.device, bf16=False))
            ratios.append(seconds / peft_seconds)
    every = ", ".join(f"{ratio:.2f}" for ratio in ratios[1:])  # the first turn warms both up
    difference = largest_difference(ours, theirs, assembly)
    print(f"{model_type}: {median(ratios[1:]):.2f} of PEFT's seconds ({every}); largest difference {difference:.1e}")


def main() -> None:
    args = arguments()
    args.tasks, args.pack_tokens, args.bf16, args.device = ["movie", "trec", "pairs"], None, False, "cpu"
    for model_type in args.models:
        compare(model_type, args)


if __name__ == "__main__":
    main()
