"""Other forms of an exported model: merged into its base, in GGUF, and published with a card that says its origin."""

import base64
import json
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from gguf import GGUFReader
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from atlas_fl.cli.main import main
from atlas_fl.config import Config, validate, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.data.task import Images
from atlas_fl.experiment.run import run_config
from atlas_fl.models.gguf_adapter import export_gguf_adapter
from atlas_fl.models.loading import find_family
from atlas_fl.params import LORA_A, LORA_B
from atlas_fl.setup.assembly import load_clients
from tests.models.tiny_vision import save_tiny
from tests.runs.conftest import saved_once
from tests.runs.finished import Make
from tests.runs.test_exports import evaluated_losses, files, image_loss, load_by_card, plain_loss, small

__all__ = ["files", "small"]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def export(folder: Path, client: str, to: Path, *words: str) -> int:
    return main(["export", str(folder), "--client", client, "--to", str(to), *words])


def check_merged(config: Config, to: Path) -> None:
    """A merged model scores in stock transformers what the run has evaluated, and is no adapter any more."""
    result = run_config(config)
    for client in load_clients(validate(config)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # none reaches a terminal
            assert export(result.folder, client.name, to / client.name, "--form", "merged") == 0
        assert not list((to / client.name).glob("adapter*"))
        model, added = load_by_card(to / client.name)
        assert not isinstance(model, PeftModel)
        score = image_loss if isinstance(client.test, Images) else plain_loss
        loss = evaluated_losses(result)[client.name]
        assert score(model, added, client, config.model.model) == pytest.approx(loss, abs=1e-5, rel=1e-5)
        if client.task.num_labels > 1:
            assert tuple(model.config.id2label.values()) == client.task.label_names


@pytest.mark.parametrize(
    ("family", "tasks"),
    [
        ("bert", ("kind",)),
        pytest.param("roberta", ("grade",), marks=pytest.mark.slow),
        pytest.param("llama", ("next",), marks=pytest.mark.slow),
        pytest.param("gemma2", ("kind", "next"), marks=pytest.mark.slow),
        pytest.param("t5", ("next",), marks=pytest.mark.slow),
    ],
)
def test_a_merged_model_scores_what_was_evaluated(
    small: Make, tmp_path: Path, family: str, tasks: tuple[str, ...]
) -> None:
    check_merged(small(family, tasks, strategy="fedavg_prior" if family == "bert" else "atlas"), tmp_path)


@pytest.mark.slow
def test_a_merged_model_of_several_labels(small: Make, tmp_path: Path) -> None:
    check_merged(small("bert", ("tags",)), tmp_path / "tags")


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2"))]
)
def test_a_gguf_adapter_is_peft_s_in_the_order_of_llama_cpp(writer_of: Callable, tmp_path: Path, family: str) -> None:
    """Each layer's change, alpha / rank x B A, equals PEFT's own with its rows as llama.cpp has them."""
    base = str(writer_of(family).path)
    _, known = find_family(base, writes=True)
    config, model = AutoConfig.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    draw, params, ranks = torch.Generator().manual_seed(1), {}, {}
    names = [name for name, _ in model.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj", "down_proj"))]
    for number, name in enumerate(names):
        layer, rank = model.get_submodule(name), (2, 4)[number % 2]
        own = name.removeprefix(f"{known.prefix}.")
        params[own + LORA_A] = torch.randn(rank, layer.in_features, generator=draw)
        params[own + LORA_B] = torch.randn(layer.out_features, rank, generator=draw)
        ranks[own] = rank
    export_gguf_adapter(params, tmp_path, family=known, config=config, scale=lambda rank: 3.0 if rank == 4 else 0.5)
    reader = GGUFReader(tmp_path / "adapter.gguf")
    alpha = reader.fields["adapter.lora.alpha"].contents()
    assert (alpha, reader.fields["adapter.type"].contents()) == (12.0, "lora")
    assert reader.fields["general.type"].contents() == "adapter"
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert len(stored) == 2 * len(names)
    short = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "down_proj": "ffn_down"}
    for own, rank in ranks.items():
        block, kind = own.split(".")[1], short[own.rpartition(".")[2]]
        a, b = (stored[f"blk.{block}.{kind}.weight.lora_{part}"] for part in "ab")
        change = (3.0 if rank == 4 else 0.5) * params[own + LORA_B] @ params[own + LORA_A]
        if family == "llama" and kind in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
            half = len(change) // heads // 2
            # row 2i of a head is row i of its first half, and row 2i + 1 that of its second
            order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
            change = change[order]
        torch.testing.assert_close(alpha / rank * b @ a, change)


@pytest.mark.slow
def test_a_merged_model_of_images(shared_folder: Path, tmp_path: Path) -> None:
    model = saved_once(shared_folder / "exported-vit", lambda folder: save_tiny(folder, "vit"))
    small = {"tasks": "digits", "clients_per_task": 2, "participation": 1, "rounds": 1, "clusters": "oracle"}
    few = {"samples": 24, "validation_samples": 8, "test_samples": 10, "image_size": 16, "fingerprint_steps": 2}
    places = {"model": str(model), "runs_dir": str(tmp_path / "runs"), "audit": False, "strategy": "fedavg_prior"}
    check_merged(with_values(find_preset("vision-lora"), {**small, **few, **places}), tmp_path / "to")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files by name that a hub on this machine was sent, with what else it was told under the empty name."""
    files: dict[str, bytes] = {}

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer: dict[str, object] = {"errors": [], "warnings": []}
            if self.path == "/api/repos/create":
                files[""] = body
                answer = {"url": f"{address}/north/films", "id": "north/films"}
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                known = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                answer = {"files": [{"path": name, **known} for name in names]}
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                answer = {"commitUrl": f"{address}/north/films/commit/{'0' * 40}", "commitOid": "0" * 40}
            self.reply(200, answer)

        def do_GET(self) -> None:
            self.reply(404, {"error": "nothing is here"})

        def reply(self, code: int, answer: dict[str, object]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield files
        server.shutdown()


def test_a_published_folder_is_what_was_written_and_its_card_says_where_it_comes_from(
    small: Make, tmp_path: Path, hub: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    result, to = run_config(small("bert", ("kind",), strategy="fedavg", alone="all")), tmp_path / "to"
    assert export(result.folder, "kind-1", to) == 0
    assert not hub, "nothing leaves the machine unasked"
    card = (to / "README.md").read_text()
    score = next(row for row in result.summary["clients"].items() if row[0] == "kind-1")[1]["final"]["test"]["primary"]
    assert f"| test accuracy | {score:.3f} |" in card
    assert "| the same, trained alone |" in card
    assert "Model of client `kind-1` after round 1 of a federation of 2 clients" in card
    assert "Privacy: no differential privacy was used." in card
    assert export(result.folder, "kind-1", tmp_path / "again", "--push-to", "north/films") == 0
    assert "uploaded to" in capsys.readouterr().out
    told = json.loads(hub.pop(""))
    assert (told["name"], told["organization"], told["visibility"]) == ("films", "north", "private")
    assert hub == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


WRONG = {
    "gguf of classes": (("--form", "gguf"), "--form gguf has no place for a head of classes; allowed: adapter, merged"),
    "public alone": (("--public",), "--public without --push-to OWNER/NAME"),
    "a form": (("--form", "onnx"), "--form: 'onnx' is not one of adapter, merged, gguf"),
    "no hub": (("--push-to", "north/films"), "is written, and --push-to north/films failed"),
    "no name": (("--push-to", "a b"), "is written, and --push-to a b failed"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_exported_is_one_line(
    small: Make, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    words, said = WRONG[kind]
    folder = run_config(small("bert", ("kind",), strategy="local")).folder
    capsys.readouterr()
    assert export(folder, "kind-0", tmp_path / "to", *words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error and "Traceback" not in error
    assert (tmp_path / "to").exists() == ("--push-to" in words)
