"""`atlas watch`: who sees what over HTTP, and its one-line refusals."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.cli.watch import CONNECTIONS, COOKIE, Watched, address, listen
from atlas_fl.config import Config, to_toml
from atlas_fl.storage.run_folder import RunFolder, is_readable_file

TOKEN = "a-token"


def begun(folder: Path, log: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(Config()))
    (folder / "log.txt").write_text(log)
    return folder


@contextmanager
def serving(watched: Watched) -> Iterator[int]:
    with listen(watched, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str = "/", **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_all_runs_of_a_folder_are_listed_and_new_ones_appear(tmp_path) -> None:
    begun(tmp_path / "one")
    (tmp_path / "notes").mkdir()
    with serving(Watched(runs=(), runs_dir=tmp_path, token=None)) as port:
        _, text = get(port)
        assert 'href="/one"' in text and "notes" not in text
        _, before = get(port, "/?state")
        hostile = begun(tmp_path / "<script>alert(1)")
        assert get(port, "/?state")[1] != before
        _, text = get(port)
        assert "<script>alert" not in text and 'href="/%3Cscript%3Ealert%281%29"' in text
        answer, text = get(port, "/%3Cscript%3Ealert%281%29")
        assert answer.status == 200 and "cannot be shown yet" in text
        assert get(port, "/../etc/passwd")[0].status == 404
        before = get(port, "/%3Cscript%3Ealert%281%29?state")[1]
        (hostile / "log.txt").write_text("2026-01-01T10:00:00Z INFO fingerprints\n")
        assert get(port, "/%3Cscript%3Ealert%281%29?state")[1] != before, "with the next line it is another page"


def test_a_run_alone_is_the_page_itself_and_what_cannot_be_read_is_said(tmp_path) -> None:
    run = begun(tmp_path / "one")
    with serving(Watched(runs=(run,), runs_dir=tmp_path, token=None)) as port:
        (run / "plan.json").write_text("{")
        answer, text = get(port)
        assert answer.status == 200 and "cannot be shown yet" in text and "plan.json" in text


@pytest.mark.slow
def test_another_site_in_the_browser_and_who_has_no_token_see_nothing(tmp_path) -> None:
    run = begun(tmp_path / "one")
    with serving(Watched(runs=(run,), runs_dir=tmp_path, token=None)) as port:
        assert get(port, Host="evil.example")[0].status == 403
        assert get(port, Host=f"localhost:{port}")[0].status == 200
    with serving(Watched(runs=(run,), runs_dir=tmp_path, token=TOKEN)) as port:
        cookie = f"{COOKIE}-{port}"
        for path, headers in (("/", {}), ("/?token=other", {}), ("/?state", {"Cookie": f"{cookie}=other"})):
            answer, text = get(port, path, **headers)
            assert answer.status == 403 and text == "Open the address that `atlas watch` has printed.\n"
            assert answer.headers["Set-Cookie"] is None
        answer, _ = get(port, f"/?token={TOKEN}")
        assert answer.status == 200 and "HttpOnly; SameSite=Strict" in answer.headers["Set-Cookie"]
        for others in ("", 'a={"x":1}; ', f"{cookie}=bad; ", f"{COOKIE}-1=bad; foo bar; "):
            assert get(port, "/?state", Cookie=f"{others}{cookie}={TOKEN}")[0].status == 200


def test_what_is_no_request_and_who_breaks_off_leave_no_traceback(tmp_path, capsys) -> None:
    run = begun(tmp_path / "one")
    with serving(Watched(runs=(run,), runs_dir=tmp_path, token=None)) as port:
        for host in ("[::1", "[x]"):
            assert get(port, Host=host)[0].status == 400
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as broken:
                broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                broken.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("HEAD", "/")
        assert connection.getresponse().read() == b""
        connection.close()
        (run / "config.toml").unlink()
        assert get(port)[0].status == 404, "it is gone"
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out


@pytest.mark.slow
def test_connections_that_say_nothing_keep_nobody_out(tmp_path) -> None:
    run = begun(tmp_path / "one")
    with serving(Watched(runs=(run,), runs_dir=tmp_path, token=TOKEN)) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for one in idle[::2]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: ")
        for _ in range(CONNECTIONS + 13):
            assert get(port, f"/?token={TOKEN}")[0].status == 200
            assert get(port, "/")[0].status == 403
        for one in idle:
            one.close()


def test_a_page_is_in_no_frame_of_another(tmp_path) -> None:
    run = begun(tmp_path / "one")
    with serving(Watched(runs=(run,), runs_dir=tmp_path, token=TOKEN)) as port:
        for path in ("/", f"/?token={TOKEN}"):
            answer, _ = get(port, path)
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_two_runs_of_one_name_are_refused(tmp_path, capsys) -> None:
    runs = [str(begun(tmp_path / place / "same")) for place in ("a", "b")]
    assert main(["watch", *runs]) == 2
    assert "two of these runs have the same name" in capsys.readouterr().err


def test_the_address_has_the_token_only_where_one_is_needed(tmp_path) -> None:
    for token, words in ((None, "/"), (TOKEN, f"/?token={TOKEN}")):
        watched = Watched(runs=(), runs_dir=tmp_path, token=token)
        with listen(watched, host="127.0.0.1", port=0) as server:
            assert address(server, watched) == f"http://127.0.0.1:{server.server_address[1]}{words}"


def test_a_port_that_is_taken_is_one_line(tmp_path, capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["watch", "--runs-dir", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "take another, port 0 is a free one" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_folder_that_may_not_be_read_takes_no_page_away(tmp_path) -> None:
    begun(tmp_path / "a")
    begun(tmp_path / "other").chmod(0)
    with serving(Watched(runs=(), runs_dir=tmp_path, token=None)) as port:
        _, text = get(port)
        assert 'href="/a"' in text and "other" not in text
    (tmp_path / "other").chmod(0o700)


def test_a_file_that_may_not_be_looked_at_is_none(tmp_path, monkeypatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    assert is_readable_file(begun(tmp_path / "a") / "config.toml")
    monkeypatch.setattr(Path, "is_file", refuse)
    assert not is_readable_file(tmp_path / "a" / "config.toml")
    assert not RunFolder(tmp_path / "a").is_resumable()
