"""A judge model over HTTP: a server of this test stands in for it and sees what is sent."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from atlas_fl.cli.main import main
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.answers import judge_run, read_evaluation
from atlas_fl.experiment.judge import KEY, Judge
from atlas_fl.storage.run_folder import RunFolder

Said = str | int | bytes
ASKED = {"prompt": "q", "reference": "ja"}


@contextmanager
def server(say: Callable[[str], Said]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a judge that says this to a question, and its requests; a number is a status, bytes a body."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
            said = say(body["messages"][0]["content"])
            answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            self.send_response(said if isinstance(said, int) else 200)
            if said == 302:
                self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
            self.end_headers()
            self.wfile.write(said if isinstance(said, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1", requests
        finally:
            http.shutdown()
            thread.join()


def honest(text: str) -> str:
    """Prefer the answer that is the reference."""
    first, second = text.split("[Answer A]\n")[1].split("\n\n[Answer B]\n")
    return "I think so. [[" + ("A" if first == "ja" else "B" if second.strip() == "ja" else "C") + "]]"


VERDICTS: dict[str, tuple[Callable[[str], Said], str]] = {
    "the better one in both orders": (honest, "federated"),
    "always the first": (lambda _: "[[A]]", "tie"),
    "always a tie": (lambda _: "[[C]]", "tie"),
    "no verdict": (lambda _: "A is better", "unclear"),
    "two verdicts": (lambda _: "[[A]] or [[B]]", "unclear"),
    "no verdict in one order": (lambda text: honest(text) if text.rstrip().endswith("ja") else "", "unclear"),
}


@pytest.mark.parametrize(("say", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_a_pair_is_judged_in_both_orders(say: Callable[[str], Said], expected: str) -> None:
    with server(say) as (url, requests):
        assert Judge(url=url, model="m").compare(**ASKED, base="no", federated="ja") == expected
    assert [request["path"] for request in requests] == ["/v1/chat/completions"] * 2
    assert {(request["model"], request["temperature"], request["key"]) for request in requests} == {("m", 0, None)}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (401, "HTTP Error 401"),
        (302, "HTTP Error 302"),
        (b"<html>", "does not answer as"),
        (b"{}", "does not answer as"),
    ],
)
def test_an_address_that_is_no_judge_is_named_and_a_redirect_not_followed(said: Said, message: str) -> None:
    with server(lambda _: said) as (url, requests), pytest.raises(ConfigError, match=message) as caught:
        Judge(url=url, model="m").compare(**ASKED, base="no", federated="ja")
    assert url in str(caught.value) and len(requests) == 1


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "localhost:8000", "ftp://a", "http://me:x@a", "https://a/?key=x"]
)
def test_only_plain_http_addresses_are_taken_and_none_with_a_key_is_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="--judge takes an http or https address") as caught:
        Judge(url=url, model="m")
    assert "me:x" not in str(caught.value) and "key=x" not in str(caught.value)


def test_verdicts_stand_beside_the_answers_and_the_key_nowhere(
    tmp_path: Path, make_evaluated: Callable[[Path], RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret-of-the-judge")
    folder = make_evaluated(tmp_path)
    with server(honest) as (url, requests):
        found = judge_run(folder.path, Judge(url=url, model="m"))
    assert {request["key"] for request in requests} == {"Bearer secret-of-the-judge"}
    assert [answer.verdict for answer in found.answers] == ["federated", "tie", None]
    assert found == read_evaluation(folder)
    assert found.notes == ["judge m, better one in both orders: base 0, federated 1, tie 1, unclear 0"]
    assert "secret" not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    with server(lambda _: 500) as (url, _), pytest.raises(ConfigError, match="HTTP Error 500"):
        judge_run(folder.path, Judge(url=url, model="m"))


@pytest.fixture
def make_evaluated() -> Callable[[Path], RunFolder]:
    """A run's folder with answers of two kinds, one of them without the base."""

    def make(path: Path) -> RunFolder:
        folder = RunFolder(path)
        folder.config.touch()
        folder.plan.touch()
        folder.evaluation.write_text('{"split": "test", "clients": {}}')
        answers = [{"base": "no", "federated": "ja"}, {"base": "no", "federated": "si"}, {"federated": "ja"}]
        rows = [{"client": "a", **ASKED, "answers": own} for own in answers]
        folder.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judge-model", "m"], "--judge-model goes with --judge"),
        (["--harness-limit", "3"], "--harness-limit goes with --harness"),
        (["--judge", "http://localhost:1/v1"], "add --judge-model NAME"),
    ],
)
def test_an_option_without_the_one_that_it_belongs_to_is_refused(words: list[str], message: str, capsys: Any) -> None:
    assert main(["evaluate", "run", *words]) == 2
    assert message in capsys.readouterr().err
