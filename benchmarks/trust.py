"""Three things that a user has to trust, on one small run: what is delivered, what a kill costs, what the audit sees.

The run is the smoke preset with an audit. Each client's exported folder is loaded by PEFT and transformers alone and
scored text by text on the client's test rows; every round is audited; and the same run is killed (SIGKILL) at random
moments and resumed.

    OMP_NUM_THREADS=1 python benchmarks/trust.py --kills 20
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import AutoPeftModelForSequenceClassification
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from atlas_fl import audit_run, find_preset, load_config
from atlas_fl.data.task import Rows
from atlas_fl.models.registry import locate_model
from atlas_fl.setup.assembly import assemble


def command(*words: str) -> list[str]:
    """The command `atlas` with these words."""
    return [sys.executable, "-m", "atlas_fl", *words]


def train(runs: Path) -> float:
    """Train the run in this folder of runs; its seconds."""
    began = time.monotonic()
    words = command("run", "--preset", "smoke", "--name", "run", "--audit", "--alone", "none", "--runs-dir", str(runs))
    subprocess.run(words, check=True, capture_output=True)
    return time.monotonic() - began


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of every client's delivered tensors."""
    files = sorted((run / "adapters").glob("*/adapter_model.safetensors"))
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed_and_resumed(runs: Path, seconds: float, draws: random.Random) -> bool:
    """Kill the run after a random share of its seconds, and let the same command end it; True if a kill hit it."""
    name = ("--preset", "smoke", "--name", "run", "--audit", "--alone", "none", "--runs-dir", str(runs))
    process = subprocess.Popen(command("run", *name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=draws.uniform(0.2, 1.0) * seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    hit = process.wait() == -signal.SIGKILL
    if (runs / "run" / "config.toml").exists():
        subprocess.run(command("resume", "run", "--runs-dir", str(runs)), check=True, capture_output=True)
    else:
        train(runs)
    return hit


def delivered(run: Path) -> tuple[int, float]:
    """Number of clients, and the largest difference between a reported test loss and that of plain PEFT."""
    summary = json.loads((run / "summary.json").read_text())
    config = load_config(run / "config.toml", base=find_preset("smoke"))
    tokenizer, differences = AutoTokenizer.from_pretrained(locate_model(config.model.model)), []
    for client in assemble(config).clients:
        folder = run / "adapters" / client.name
        labels = json.loads((folder / "labels.json").read_text())
        head = {"id2label": dict(enumerate(labels)), "label2id": {label: k for k, label in enumerate(labels)}}
        model = AutoPeftModelForSequenceClassification.from_pretrained(str(folder), **head).eval()
        losses, test = [], client.test
        assert isinstance(test, Rows)
        length = min(config.data.max_length or client.task.max_length, client.task.max_length)
        for index, text in enumerate(test.text):
            pair = None if test.pair is None else test.pair[index]
            inputs = tokenizer(text, pair, return_tensors="pt", truncation=True, max_length=length)
            with torch.no_grad():
                logits = model(**inputs).logits
            losses.append(float(cross_entropy(logits, torch.tensor(test.label[index : index + 1]))))
        reported = summary["clients"][client.name]["final"]["test"]["loss"]
        differences.append(abs(sum(losses) / len(losses) - reported))
    return len(differences), max(differences)


def main() -> None:
    """Print the three results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="runs that are killed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        seconds = train(whole)
        clients, difference = delivered(whole / "run")
        print(f"delivered: {clients} clients, largest difference of a test loss {difference:.1e}", flush=True)
        report = audit_run(whole / "run")
        errors = [row.error for row in report.rows if row.error is not None]
        checks, failed = len(report.rows), len(report.failures)
        print(f"audit: {checks} checks, {failed} failed, largest relative error {max(errors):.1e}", flush=True)
        hits = same = 0
        draws = random.Random(0)
        for index in range(given.kills):
            runs = Path(folder) / f"killed-{index}"
            hits += killed_and_resumed(runs, seconds, draws)
            same += digests(runs / "run") == digests(whole / "run")
        print(f"kills: {hits} of {given.kills} hit a run, {same} of {given.kills} ended in the same bits")


if __name__ == "__main__":
    main()
