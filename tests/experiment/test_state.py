"""What the ledger counts of a round."""

import torch

from atlas_fl.experiment.state import FederationState, ReceivedUpdates, RoundOutcome, RoundRecord, ServerStep
from atlas_fl.methods.registry import find_method
from atlas_fl.storage.tensors import encoded_size


def test_who_took_no_part_gets_its_model_at_the_end_of_the_run_alone() -> None:
    before = {name: {"q.lora_A": torch.zeros(2, 3)} for name in ("a", "b", "c")}
    after = {name: {"q.lora_A": torch.ones(2, 3)} for name in before}

    def receivers(*, final: bool) -> list[str]:
        record = RoundRecord(
            round=1,
            sampled=("a", "c"),
            device_seconds=0.0,
            before=FederationState(round=0, server_models=before, client_models=before),
            received=ReceivedUpdates(updates={}, refused={"a": "too large"}),
            step=ServerStep(server_state={}, server_models=after, client_models=after),
            outcome=RoundOutcome(final=final),
            method=find_method("fedavg"),
            aggregated=True,
        )
        rows = record.messages(("A", "B"))
        assert {(row.direction, row.kind, row.bytes) for row in rows} == {("down", "adapter", encoded_size(after["a"]))}
        return [row.client for row in rows]

    assert receivers(final=False) == ["a"]
    assert receivers(final=True) == ["a", "b", "c"]
