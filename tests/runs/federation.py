"""One config, simulated and served across real processes on loopback."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.data.registry import find_tasks
from atlas_fl.methods.registry import METHODS
from atlas_fl.params import digest
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.storage.jsonl import read_rows
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors
from tests.runs.processes import Program, Programs

SITES = {"movie-0": "cpu_2gb", "movie-1": "tablet_4gb"}
"""The clients of the simulation, and the devices that it deals out to them."""


def sorted_ledger(folder: Path) -> list[str]:
    """The rows of a ledger, in an order that does not depend on who was first."""
    return sorted(map(str, read_rows(RunFolder(folder).ledger)))


def adapters(folder: Path) -> dict[str, str]:
    return {
        path.name: digest(read_tensors(path / "adapter_model.safetensors"))
        for path in sorted(RunFolder(folder).adapters.iterdir())
    }


class Federation:
    """One config, simulated here and served across processes."""

    def __init__(self, config, folder, sites: dict[str, str], programs: Programs, finished) -> None:
        self.folder, self.sites, self.programs, self.runs = folder, sites, programs, Path(config.run.runs_dir)
        self._config, self._finished = config, finished
        make_certs(folder / "certs", servers=["localhost", "127.0.0.1"], clients=list(sites))
        (folder / "fed.toml").write_text(to_toml(config))

    @cached_property
    def simulated(self) -> Path:
        """The folder of the same federation in one process, which is given the sites' secrets once they have them."""
        return self.simulate()

    def simulate(self, **changes: object) -> Path:
        """The folder of a simulation that draws from the sites' secrets, with these settings changed."""
        values = {key: str(value) for key, value in changes.items()}
        return self._finished(with_values(self.with_secrets(self._config), values)).folder

    def with_secrets(self, config: Config) -> Config:
        """The config of a simulation that draws from the secrets which these sites have made."""
        return replace(config, run=replace(config.run, secrets=str(self.folder)))

    @property
    def consent(self) -> tuple[str, ...]:
        """What every site agrees to: all that these settings ask of one."""
        config = self._config
        split = config.split
        method = METHODS.get(config.mixing.strategy)
        trained = {} if method is None else method.settings
        words = [] if split.split == "none" else ["cut", "labels"] if split.head == "server" else ["cut"]
        images = any(task.images for task in find_tasks(config.data.tasks))
        words += ["linear-steps"] if config.optimizer(images=images) == "sgd" else []
        trained_parts = trained.get("trained_parts", config.training.trained_parts)
        words += ["partial-training"] if trained_parts != "all" else []
        few = ("--least-examples", "2", "--max-rounds-per-example", "2")  # the data here are small
        return (*few, "--allow", *words) if words else few

    @property
    def own_model(self) -> tuple[str, str]:
        """The words with which every site names the folder of the model for itself."""
        return "--model", self._config.model.model

    def serve(self, *more: str, port: int = 0, fault: str = "") -> tuple[Program, int]:
        """The server and the port that it listens on."""
        words = ("--config", "fed.toml", "--name", "served", "--host", "127.0.0.1", "--port", str(port), *more)
        server = self.programs.start("serve", *words, "--certs", "certs/server", folder=self.folder, fault=fault)
        return server, int(server.wait_for(r"listening on 127\.0\.0\.1:(\d+)")[1])

    def join(self, name: str, port: int, *more: str, device: str = "", fault: str = "") -> Program:
        task, _, part = name.partition("-")
        words = ("--certs", f"certs/{name}", "--task", task, "--part", part, "--device", device or self.sites[name])
        words += (*self.consent, *(() if "--model" in more else self.own_model))
        return self.programs.start("join", f"localhost:{port}", *words, *more, folder=self.folder, fault=fault)

    def joins_late(
        self, late: str, *, device: str, where: str = "", meanwhile: Callable[[], None] = lambda: None
    ) -> int:
        """The round before which a third site joined in mid-run, at a place that the server says; then it is killed.

        The site's certificate is made when the run has begun. `meanwhile` looks at what is there at that time.
        """
        server, port = self.serve()
        stays, leaves = self.sites
        first, other = self.join(stays, port), self.join(leaves, port)
        server.wait_for("round 1/")
        other.kill()  # nobody gets ahead while it is away
        meanwhile()
        make_certs(self.folder / "certs", servers=[], clients=[late])
        newcomer = self.join(late, port, device=device)
        server.wait_for(f"{late} came after the plan was made and joins before the next round")
        again = self.join(leaves, port)
        number = int(server.wait_for(rf"{late} joins before round (\d){where}")[1])
        server.wait_for(f"round {number}/")
        server.kill()
        last, _ = self.serve(port=port)
        for site in (first, again, newcomer):
            site.end()
        assert "resumed after round" in last.end()
        return number

    def complete(
        self, *more: str, own: Mapping[str, Sequence[str]] | None = None, serve: Sequence[str] = ()
    ) -> tuple[str, list[str]]:
        """What the server and the sites said from start to end; sites get the words `more`, and some `own` ones."""
        server, port = self.serve(*serve)
        sites = [self.join(name, port, *more, *(own or {}).get(name, ())) for name in self.sites]
        said = [site.end() for site in sites]
        return server.end(), said

    @property
    def own_adapters(self) -> dict[str, str]:
        """The digests of the adapters at the sites that have one."""
        files = {path.parent.name: path for path in sorted(self.folder.glob("*-adapter/adapter_model.safetensors"))}
        return {name.removesuffix("-adapter"): digest(read_tensors(path)) for name, path in files.items()}

    @property
    def served(self) -> RunFolder:
        return RunFolder(self.runs / "served")

    def is_as_simulated(self) -> None:
        assert adapters(self.served.path) == adapters(self.simulated)
        assert self.own_adapters == adapters(self.simulated)


Federations = Callable[..., Federation]
"""Makes a federation of sites by their devices; keywords set single settings by their flat names."""
