"""What do attacks on a client's models and updates learn, by setting and by epsilon, and what does noise cost?

Membership and canaries of `atlas attack` on MiniLM and questions (trec), tokens on movie sentences; a row each, in CSV.

    python benchmarks/attacks.py --to build/attacks.csv
    python benchmarks/attacks.py --attacks tokens
    python benchmarks/attacks.py --attacks tokens --settings "16 examples" --factors 0.03 1   # starts that suit noise
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.privacy_attacks import updates
from atlas_fl.privacy_attacks.registry import run_attack
from atlas_fl.report.csv_text import format_csv
from atlas_fl.storage.folder_access import write_atomic

COMMON = {"clients_per_task": "2", "max_length": "24", "ranks": "8", "delta": "1e-3"}
OF_SHADOWS = {"tasks": "trec", "adapted_blocks": "1", "samples": "60", "rounds": "6", "lr": "5e-3"}
OF_TOKENS = {"tasks": "movie", "samples": "16", "rounds": "8"}
EPSILONS = (None, 8.0, 3.0, 1.0)
TOKENS: Mapping[str, Mapping[str, str]] = {
    "16 examples": {},
    "64 examples": {"samples": "64", "rounds": "8"},
    "64 examples, batch 1": {"samples": "64", "rounds": "2", "batch_size": "1"},
    "rank 2": {"ranks": "2"},
    "rank 32": {"ranks": "32"},
    "SGD": {"optimizer": "sgd", "lr": "1e-2"},
    "SGD, momentum .9": {"optimizer": "sgd", "lr": "1e-2", "momentum": "0.9"},
    "B alone": {"strategy": "ffa"},
    "sums of three": {"clients_per_task": "6", "secure": "true", "strategy": "fedit"},
    "sums of ten": {"clients_per_task": "20", "secure": "true", "strategy": "fedit"},
}
"""Settings of the attack on updates, over those of `OF_TOKENS`."""


def units(attacks: list[str], settings: list[str]) -> Iterator[tuple[str, str, dict[str, str], float | None]]:
    """(attack, setting in words, its values, epsilon)."""
    for attack in attacks:
        if attack != "tokens":
            yield from ((attack, "60 questions, last block", dict(OF_SHADOWS), epsilon) for epsilon in EPSILONS)
            continue
        for words in settings:
            budgets = EPSILONS if words == "16 examples" else (None,)
            yield from ((attack, words, {**OF_TOKENS, **TOKENS[words]}, epsilon) for epsilon in budgets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", default=["tokens", "membership", "canaries"])
    parser.add_argument("--settings", nargs="+", default=list(TOKENS), help="settings of the attack on updates")
    parser.add_argument("--shadows", type=int, default=16, help="shadow clients of membership and canaries")
    parser.add_argument("--factors", nargs="+", type=float, default=[updates.TINY], help="sizes of a hostile start")
    parser.add_argument("--to", help="a file for the rows, as CSV; printed by default")
    args = parser.parse_args()
    rows = list[dict[str, object]]()
    for attack, words, values, epsilon in units(args.attacks, args.settings):
        privacy = {} if epsilon is None else {"dp": "example", "epsilon": str(epsilon)}
        config = with_values(find_preset("quick"), {**COMMON, **values, **privacy})
        for factor in args.factors if attack == "tokens" else args.factors[:1]:
            updates.TINY = factor
            for row in run_attack(config, attack, shadows=args.shadows):
                rows.append({"attack": attack, "setting": words, "budget": epsilon, "factors": factor, **row})
                print(rows[-1], file=sys.stderr, flush=True)
        if args.to is not None:
            write_atomic(Path(args.to), format_csv(rows).encode())
    if args.to is None:
        print(format_csv(rows), end="")


if __name__ == "__main__":
    main()
