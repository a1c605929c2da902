"""What runs with workers have in common: settings that a pack or a message could get wrong, and who is compared how."""

from pathlib import Path

from atlas_fl.audit import audit
from tests.runs.reading import rows, same_tensors, state

# Packs of a client or two each, with cuts, noise, dropout, some of the clients, and clusters that are measured anew.
SETTINGS = {
    "split": "cpu_2gb=2,trec-0=1",
    "wire": "int8",
    "wire_noise": 0.05,
    "head": "client",
    "dropout": 0.1,
    "participation": 0.75,
    "recluster_every": 2,
    "pack_tokens": 200,
    "eta": 0.3,
}


def check_same(left: Path, right: Path) -> None:
    """Both runs have left the same models, metrics and bytes behind, and the audit finds nothing."""
    assert same_tensors(state(left), state(right))
    assert rows(left) == rows(right)
    assert rows(left, "ledger") == rows(right, "ledger")
    adapters = sorted(path.relative_to(left) for path in left.glob("adapters/*/*.safetensors"))
    assert adapters
    assert all((left / path).read_bytes() == (right / path).read_bytes() for path in adapters)
    assert audit(right).ok
