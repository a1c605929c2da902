"""What does the gradient fingerprint save by going through the last two blocks alone?

The same batches in turns: with the gradients of the last two blocks and the head, with those of all blocks (both on
padding-free rows), and as the usual loop passes them, forwards and backwards through the stock model, padded.

    python benchmarks/fingerprint_pass.py
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from packed import pad_batch
from transformers import AutoModelForSequenceClassification

from atlas_fl.client.importance import batch_gradients
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches
from atlas_fl.client.options import FingerprintOptions
from atlas_fl.config import Config
from atlas_fl.config.schema import DataConfig
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.setup.options import warmup_options


def seconds(work: Iterable[object]) -> float:
    began = time.perf_counter()
    for _ in work:
        pass
    return time.perf_counter() - began


def stock_passes(model: torch.nn.Module, job: Job, assembly: Assembly) -> Iterator[None]:
    """As many passes through the stock model, with the gradients of all its weights."""
    options = replace(job.options.train, half=0, max_steps=job.options.batches)
    data, pad = assembly.site.data[job.client].splits["train"], assembly.site.backbone.tokenizer.pad_token_id
    for batch in batches(data, replace(job, options=options), secret=None):
        model(**pad_batch(batch, pad, "cpu")).loss.backward()
        model.zero_grad()
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    config = Config(data=DataConfig(tasks=("movie",), clients_per_task=1, validation_samples=10, test_samples=10))
    assembly = assemble(config)
    site, client = assembly.site, assembly.clients[0]
    options = FingerprintOptions(
        kind="gradient", sketch_dim=1024, train=warmup_options(config), batches=args.batches, steps=1
    )
    params = assembly.initial_params(client, (4,) * assembly.shape.num_layers)
    job = Job(client=client.name, params=params, round=0, options=options)
    stock = AutoModelForSequenceClassification.from_pretrained(site.backbone.source, num_labels=2).eval()
    ratios, stock_ratios = [], []
    for number in range(args.repeat + 1):
        few, whole = (
            seconds(batch_gradients(job, site, half=0, blocks=blocks, count=args.batches))
            for blocks in (2, assembly.shape.num_layers)
        )
        usual = seconds(stock_passes(stock, job, assembly))
        if number:  # the first turn warms up
            ratios.append(few / whole)
            stock_ratios.append(few / usual)
            print(f"last two blocks {few:.2f} s, all blocks {whole:.2f} s, stock model {usual:.2f} s", flush=True)
    print(f"ratio fingerprint/all blocks, both padding-free: {statistics.median(ratios):.2f}")
    print(f"ratio fingerprint/full: {statistics.median(stock_ratios):.2f}")


if __name__ == "__main__":
    main()
