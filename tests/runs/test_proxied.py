"""The ledger against the bytes that a proxy counts on the sockets of a real federation over mutual TLS."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas_fl.config import Config
from atlas_fl.deployment.server import remote_backend
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.deployment.site import SiteOptions, join_federation
from atlas_fl.events import Event, Note, RoundFinished
from atlas_fl.experiment.run import run_config
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.runtime.transport.sessions import Session, Sessions
from tests.runs.finished import Make
from tests.runs.reading import rows
from tests.runtime.conftest import Proxy

SITES = ("movie-0", "trec-0")
HEAD_BYTES = 512
"""Of the frame of a question or an answer, most that is no payload: header, JSON head, list of tensors, metrics."""
TLS_BYTES = 160
"""Most that HTTP/2 and TLS add to a frame, beside a hundredth of it: records, headers, windows, pings."""
LINK_BYTES = 20_480
"""Most that a connection costs at its start, each way: handshake, certificates, and the settings of the run."""


class Watched:
    """A run whose sites come through a proxy each; what each of them has passed on when a round ends."""

    def __init__(self, config: Config, folder: Path, patch: pytest.MonkeyPatch) -> None:
        make_certs(folder / "certs", servers=["localhost", "127.0.0.1"], clients=list(SITES))
        self.folder, self.proxies, self.model = folder, dict[str, Proxy](), config.model.model
        self.exchanges, self.frames = Counter[str](), Counter[tuple[str, str]]()
        self.marks: list[dict[str, Counter[str]]] = []
        self._threads: list[threading.Thread] = []
        handle, watched = Sessions.handle, self

        async def counted(self, session: Session, payload: bytes) -> bytes:
            watched.frames[session.name, "up"] += len(payload)
            answer = await handle(self, session, payload)
            watched.exchanges[session.name] += 1
            watched.frames[session.name, "down"] += len(answer)
            return answer

        patch.setattr(Sessions, "handle", counted)
        service = ServerOptions(certs=folder / "certs/server", host="127.0.0.1", port=0, wait=60, deadline=60)
        self.result = run_config(config, backend=remote_backend(service), on_event=self.on_event)
        for thread in self._threads:
            thread.join(60)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("listening on"):
            port = int(event.text.split(" for ")[0].rpartition(":")[2])
            self.proxies = {name: Proxy(port) for name in SITES}
            for name, proxy in self.proxies.items():
                task, _, part = name.partition("-")
                joining = SiteOptions(
                    allow=("cut", "labels"),
                    address=f"localhost:{proxy.port}",
                    certs=self.folder / "certs" / name,
                    task=task,
                    part=int(part),
                    device="cpu_2gb",
                    model=self.model,
                    to=str(self.folder / f"{name}-adapter"),
                    patience=60,
                    first_seconds=60,
                )
                self._threads.append(threading.Thread(target=join_federation, args=[joining], daemon=True))
                self._threads[-1].start()
        if isinstance(event, RoundFinished):
            self.marks.append(self.now())

    def now(self) -> dict[str, Counter[str]]:
        return {
            name: Counter(
                links=proxy.links,
                up=proxy.up,
                down=proxy.down,
                frames_up=self.frames[name, "up"],
                frames_down=self.frames[name, "down"],
                exchanges=self.exchanges[name],
            )
            for name, proxy in self.proxies.items()
        }


@pytest.fixture(scope="module")
def watched(shared_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    config = shared_config(tasks=("movie", "trec"), pack_tokens=1, split="movie-0=1", rounds=2)
    with pytest.MonkeyPatch.context() as patch:
        found = Watched(config, tmp_path_factory.mktemp("fed"), patch)
        yield found
    for proxy in found.proxies.values():
        proxy.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_socket_carries_the_ledgers_bytes_and_the_stated_rest(watched: Watched, name: str, way: str) -> None:
    """Of the second round, before which everybody has what it begins with: with a cut and without."""
    counted = sum(
        int(row["bytes"])
        for row in rows(watched.result.folder, "ledger")
        if (row["client"], row["direction"], row["round"]) == (name, way, 2)
    )
    first, second = (mark[name] for mark in watched.marks)
    frames, proxied, exchanges = (second[key] - first[key] for key in (f"frames_{way}", way, "exchanges"))
    assert counted > 10_000
    assert exchanges >= 3
    assert 0 <= frames - counted <= HEAD_BYTES * exchanges
    assert 0 <= proxied - frames <= TLS_BYTES * exchanges + 0.01 * frames


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_costs_the_stated_bytes(watched: Watched, name: str, way: str) -> None:
    """A site connects twice at its start: once to see whether the server is what it should be, once for its stream."""
    first = watched.marks[0][name]
    more = first[way] - first[f"frames_{way}"] - TLS_BYTES * first["exchanges"] - 0.01 * first[f"frames_{way}"]
    assert first["links"] == 2
    assert more <= first["links"] * LINK_BYTES
