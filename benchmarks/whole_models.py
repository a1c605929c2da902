"""How much memory do a server and its sites take for whole models, beyond their libraries?

A federation over loopback mutual TLS: `atlas serve` and two `atlas join`, a process each. They train all weights of a
random BERT in two rounds, first of one so small that only the libraries are seen, then of the size that is asked for.
Peaks are of resident memory; what is beyond the libraries stands beside the bytes of the weights.

    python benchmarks/whole_models.py [--hidden 512] [--layers 11] [--vocabulary 30522] [--optimizer adamw]
"""

import argparse
import contextlib
import re
import sys
import tempfile
from pathlib import Path

from many_clients import make_data, make_model, names, program

from atlas_fl.cli.main import main as atlas
from atlas_fl.runtime.transport.certificates import make_certs

CONFIG = """
[run]
name = "whole"
runs_dir = "{folder}/runs"
[model]
model = "{folder}/model"
[data]
max_length = 16
samples = 16
validation_samples = 6
test_samples = 6
tasks = []
task = ["texts,labels=0|1"]
[mixing]
strategy = "fedavg"
[training]
trainable = "full"
rounds = 2
batch_size = 4
local_epochs = 1
optimizer = "{optimizer}"
"""


def run(words: list[str]) -> None:
    """One command of `atlas`, and the peak of this process."""
    code = atlas(words)
    # not ru_maxrss, which a new process takes over from the one that started it
    status = Path("/proc/self/status").read_text()
    print(f"peak {int(status.split('VmHWM:')[1].split()[0]) * 1024}", flush=True)
    sys.exit(code)


def peaks(folder: Path, args: argparse.Namespace, sizes: dict[str, int]) -> tuple[list[int], int]:
    """Bytes at the peak of the server and of each site, and those of the model's files."""
    sites = names(2)
    make_certs(folder / "certs", servers=["localhost"], clients=sites)
    make_model(folder / "model", **sizes)
    make_data(folder, len(sites))
    config = folder / "fed.toml"
    config.write_text(CONFIG.format(folder=folder, optimizer=args.optimizer))
    with contextlib.ExitStack() as stack:
        words = ["serve", "--config", str(config), "--certs", str(folder / "certs/server"), "--port", "0", "--no-late"]
        server = stack.enter_context(program(__file__, "--run", *words, "--host", "127.0.0.1"))
        assert server.stdout is not None
        port = next(match[1] for line in server.stdout if (match := re.search(r"listening on \S+:(\d+)", line)))
        processes = [server]
        for name in sites:
            words = ["join", f"localhost:{port}", "--certs", str(folder / "certs" / name), "--config", str(config)]
            words += ["--task", f"texts={folder / name}.csv", "--device", "gpu_16gb", "--allow", "linear-steps"]
            words += ["--to", str(folder / f"to-{name}")]
            processes.append(stack.enter_context(program(__file__, "--run", *words)))
        said = [process.communicate()[0] for process in processes]
    if failed := [text for process, text in zip(processes, said, strict=True) if process.returncode]:
        raise SystemExit("\n".join(failed))
    weights = (folder / "model/model.safetensors").stat().st_size
    return [int(text.rpartition("peak ")[2]) for text in said], weights


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--optimizer", default="adamw")
    args = parser.parse_args()
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    sizes |= {"intermediate_size": 4 * args.hidden, "num_attention_heads": args.hidden // 64}
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        libraries, _ = peaks(Path(small), args, {})
        taken, weights = peaks(Path(large), args, sizes)
    print(f"weights {weights / 1e6:.0f} MB")
    for end, least, most in zip(("server", *names(2)), libraries, taken, strict=True):
        times = (most - least) / weights
        print(f"{end}: peak {most / 1e6:.0f} MB, libraries {least / 1e6:.0f} MB, beyond them {times:.1f} x the weights")


if __name__ == "__main__":
    main()
