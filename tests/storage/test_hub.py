"""Whether the hub answers: a closed port, an answer that is an error, and a user who says that there is none."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from atlas_fl.storage.hub import hub_fault


class Refusal(BaseHTTPRequestHandler):
    """Every request is forbidden."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_hub_that_cannot_be_reached_is_told_from_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.handle_request).start()
        assert hub_fault() is None
    assert "refused" in str(hub_fault())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_fault() == "HF_HUB_OFFLINE is set"
