import torch

from atlas_fl.client.batching import collate_packed
from atlas_fl.models.backbone import embed_tokens, run_blocks
from atlas_fl.planning.leakage import token_probe
from atlas_fl.split.codec import add_noise


def test_a_probe_reads_what_is_plain_and_not_what_is_noise() -> None:
    source = torch.Generator().manual_seed(3)
    embeddings = torch.randn(40, 16, generator=source)
    tokens = torch.randint(40, (600,), generator=source)
    turned = torch.linalg.qr(torch.randn(16, 16, generator=source)).Q
    rows = embeddings[tokens] @ turned + 3.0
    found = token_probe(rows[:400], tokens[:400], rows[400:], embeddings=embeddings)
    assert torch.equal(found, tokens[400:])
    noise = torch.randn(600, 16, generator=source)
    blind = token_probe(noise[:400], tokens[:400], noise[400:], embeddings=embeddings)
    assert float((blind == tokens[400:]).float().mean()) < 0.15


def test_a_deeper_cut_and_noise_leave_a_probe_less(client_of) -> None:
    site, _ = client_of(examples=200)
    row = collate_packed([site.data["a-0"].splits["train"]], device=torch.device("cpu"))
    table = site.backbone.model.get_input_embeddings().weight
    embedded = embed_tokens(site.backbone, row.ids, row.types, row.layout)
    half = len(row.ids) // 2
    right = {}
    for blocks in (0, 3):
        rows = run_blocks(site.backbone, embedded, row.layout, range(blocks))
        for noise in (0.0, 2.0):
            sent = add_noise(rows, noise=noise, secret=bytes(32), kind="activation")
            found = token_probe(sent[:half], row.ids[:half], sent[half:], embeddings=table)
            right[blocks, noise] = float((found == row.ids[half:]).float().mean())
    assert right[0, 0.0] > 0.9
    assert right[3, 0.0] <= right[0, 0.0]
    assert right[0, 2.0] < right[0, 0.0] - 0.2
