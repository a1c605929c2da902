import errno
import signal
import subprocess
import sys
import time

import pytest

from atlas_fl.cli.display import going_on
from atlas_fl.cli.main import COMMANDS, SPINS
from atlas_fl.errors import BudgetError


def replace_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("atlas_fl.cli.run.run", run)


@pytest.mark.parametrize("words", [(), ("-h",), ("help",)])
def test_the_page_names_every_command(words: tuple[str, ...], atlas) -> None:
    said = atlas(*words)
    assert (said.code, said.err) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name} " in said.out
        assert command.summary in " ".join(said.out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page(name: str, atlas) -> None:
    said = atlas(name, "--help")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"usage: atlas {name} ")


def test_the_page_of_run_shows_groups_flags_and_defaults(atlas) -> None:
    page = atlas("run", "--help", "--preset", "full").out
    for heading in ("[data]", "[training]", "[mixing]", "[run]"):
        assert f"\n{heading} " in page
    for flag in ("--tasks TEXT ...", "--lr NUMBER", "--share CHOICE ...", "--[no-]audit", "--[no-]resume"):
        assert f"  {flag} " in page
    assert "(default: movie trec pairs" in " ".join(page.split())
    assert "Rounds of the whole run. (default: 15)" in page


def test_the_version_is_that_of_the_package(atlas) -> None:
    assert atlas("--version").out.startswith("atlas 0.")


def test_an_unknown_command_has_its_nearest(atlas) -> None:
    said = atlas("rnu")
    assert said.code == 2
    assert said.err.startswith(
        "atlas: unknown command 'rnu'; did you mean 'run'? known: fetch, doctor, demo, list, check-method, plan,"
    )
    assert atlas("foo").err.startswith("atlas: unknown command 'foo'; known: fetch, doctor,")


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"list", "fetch"}))
def test_a_number_of_thousands_of_digits_is_one_short_line(command: str, atlas) -> None:
    said = atlas(command, "--rounds" if command in ("run", "plan", "sweep") else "--seed", "7" * 5000)
    assert said.code == 2
    assert "sys." not in said.err
    assert len(said.err) < 250


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BudgetError("nothing fits;\ntake a larger device"), 2, "nothing fits; take a larger device"),
        (KeyboardInterrupt(), 130, "stopped"),
        (
            PermissionError(13, "Permission denied", "runs/x"),
            2,
            "runs/x: Permission denied; check the path and its permissions",
        ),
    ],
)
def test_a_mistake_and_ctrl_c_are_one_line(error: BaseException, code: int, line: str, atlas, monkeypatch) -> None:
    replace_command(monkeypatch, error)
    said = atlas("run")
    assert (said.code, said.out, said.err) == (code, "", f"atlas: {line}\n")


def test_ctrl_c_in_a_run_names_it(monkeypatch, atlas, tmp_path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atlas_fl.cli.run.run_config", interrupted)
    said = atlas("run", "--preset", "smoke", "--name", "mine", "--runs-dir", str(tmp_path))
    again = f"a run goes on where it was with `atlas resume {tmp_path / 'mine'}`"
    assert (said.code, said.err.splitlines()[-1]) == (130, f"atlas: stopped; {again}")


def test_a_full_disk_says_how_the_command_goes_on(atlas, monkeypatch) -> None:
    def full(_: object) -> int:
        with going_on("the same command"):
            raise OSError(errno.ENOSPC, "No space left on device", "site-1-private/rounds.json")

    monkeypatch.setattr("atlas_fl.cli.doctor.demo", full)
    said = atlas("demo")
    remedy = "free some space; a run goes on with the same command"
    assert (said.code, said.err) == (2, f"atlas: site-1-private/rounds.json: No space left on device; {remedy}\n")


def test_ctrl_c_that_falls_into_a_destructor_still_ends_the_command(atlas, monkeypatch) -> None:
    """Python drops what a destructor raises, and a server had gone on to its last round as if nobody had typed it."""

    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def working(_: object) -> int:
        Interrupted()
        time.sleep(10)
        return 0

    monkeypatch.setattr("atlas_fl.cli.doctor.demo", working)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        said = atlas("demo")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (said.code, said.err) == (130, "atlas: stopped\n")


def test_our_own_faults_are_not_hidden(atlas, monkeypatch) -> None:
    replace_command(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        atlas("run")


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [["sweep", "--help"], ["run", "--etta"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    done = in_a_process(
        f"import sys; from atlas_fl.cli.main import main; main({words}); "
        "print(sorted({'torch', 'numpy', 'transformers', 'vl_convert', 'sklearn'} & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.slow
def test_a_command_imports_what_it_always_needs_and_collects_garbage_after_it() -> None:
    done = in_a_process(
        "import gc, sys; from atlas_fl.cli.main import main; main(['list', 'presets']); "
        "of_list = 'transformers' in sys.modules; import atlas_fl.cli.deploy; "
        "print(of_list, sorted({'pandas', 'scipy.stats', 'sklearn'} & set(sys.modules)), gc.isenabled())"
    )
    assert done.stdout.splitlines()[-1] == "False [] True", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU OpenMP on Linux alone")
def test_threads_wait_asleep(monkeypatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    done = in_a_process("from atlas_fl.cli.main import main; main(['--version']); import torch")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = "import sys; from atlas_fl.cli.main import main; sys.exit(main(['run', '--help']))"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""
