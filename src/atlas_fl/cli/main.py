"""The command `atlas`: finds the command, and turns errors into one line and an exit code."""

import errno
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from threading import Timer

from atlas_fl.cli import options
from atlas_fl.cli.arguments import ALIASES, Command, Words, last_value, parse, split, table, wrap_lines
from atlas_fl.errors import MAX_REPR_CHARACTERS, AtlasError, ConfigError, did_you_mean, replace_unprintable, short_repr
from atlas_fl.storage.extras import silence_libraries

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a disk that takes no more."""
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
SPINS = "10000"
"""Times that a thread of GNU OpenMP looks for new work before it sleeps: fewer cost time on an idle machine."""


OF_ONE_RUN = {
    "--seed": "how many seeds there are is --seeds, and which they are `atlas sweep --help` says",
    "--strategy": "name all that are compared with --strategies",
}
"""Settings that runs of a comparison have each of their own, and what to give instead."""
COMMANDS: Mapping[str, Command] = {
    "fetch": Command("run.fetch", options.FetchOptions),
    "doctor": Command("doctor.doctor", options.DoctorOptions),
    "demo": Command("doctor.demo", options.DemoOptions),
    "list": Command("catalogue.catalogue", options.ListOptions),
    "check-method": Command("run.check_methods", options.CheckMethodOptions),
    "plan": Command("run.plan", options.PlanOptions),
    "run": Command("run.run", options.RunOptions),
    "resume": Command("run.resume", options.ResumeOptions),
    "report": Command("results.report", options.ReportOptions),
    "results": Command("results.page_of_results", options.ResultsOptions),
    "evaluate": Command("answers.evaluate", options.EvaluateOptions),
    "generate": Command("answers.generate", options.GenerateOptions),
    "audit": Command("results.audit", options.AuditOptions),
    "export": Command("results.export", options.ExportOptions),
    "place": Command("results.place", options.PlaceOptions),
    "compare": Command("sweep.compare", options.CompareOptions, refused=("--seed", "--strategy")),
    "sweep": Command("sweep.sweep", options.SweepOptions, refused=("--seed",)),
    "attack": Command("results.attack", options.AttackOptions),
    "masks": Command("results.masks", options.MasksOptions),
    "vectors": Command("results.vectors", options.VectorsOptions),
    "certs": Command("deploy.certs", options.CertsOptions),
    "serve": Command("deploy.serve", options.ServeOptions),
    "join": Command("deploy.join", options.JoinOptions),
}
"""In the order in which a newcomer meets them."""

COMPARED = {**ALIASES, "--ablation": "--strategies"}
"""The same in a comparison."""
SYNONYMS = {"train": "run", "visualize": "report", "visualise": "report", "plot": "report", "ls": "list"}
"""Commands of other programs, and their names here."""

ABOUT = "ATLAS: federated fine-tuning of transformers across clients with different tasks, devices and data."
START = "Start with `atlas fetch embedded`, then `atlas run --preset quick`; `atlas COMMAND --help` explains a command."


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for an audit that found something, 2 for a mistake of the user, 130 for Ctrl-C."""
    words = sys.argv[1:] if words is None else words
    # Waiting threads leave their cores to others soon, unless the user says how they wait. GNU OpenMP reads this when
    # torch is loaded; by default it spins thirty times as long, time lost where other work holds a core
    # (`benchmarks/waiting.py`).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    silence_libraries()
    try:
        with _resending_interrupts():
            code = _dispatch(words)
        sys.stdout.flush()
    except AtlasError as error:
        return _fail(str(error), USER_ERROR)
    except KeyboardInterrupt as stop:
        # who has something to go on with says how
        return _fail("; ".join(["stopped", *map(str, stop.args)]), INTERRUPTED)
    except BrokenPipeError:
        # the reader has gone, and Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        (how,) = getattr(error, "__notes__", ["`atlas resume RUN`"])[:1]
        full = f"free some space; a run goes on with {how}"
        remedy = full if error.errno in FULL else "check the path and its permissions"
        return _fail(f"{error.filename or 'the disk'}: {error.strerror}; {remedy}", USER_ERROR)
    except SystemExit as stop:  # a help page was printed
        return int(stop.code or 0)
    return code


@contextmanager
def _resending_interrupts() -> Iterator[None]:
    """Send Ctrl-C again where a destructor or a callback of a weak reference raises it, which Python drops."""
    before = sys.unraisablehook

    def send_again(ignored: "sys.UnraisableHookArgs") -> None:
        if ignored.exc_type is KeyboardInterrupt:
            Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(ignored)

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def page() -> str:
    """The page of `atlas --help`."""
    lines = table([(name, command.summary) for name, command in COMMANDS.items()], names=max(map(len, COMMANDS)))
    usage = "usage: atlas COMMAND [OPTIONS]"
    return "\n".join([usage, "", *wrap_lines(ABOUT), "", "commands:", *lines, "", *wrap_lines(START)])


def _dispatch(words: Sequence[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "help"):
        print(page())
        return 0
    if first == "--version":
        print(f"atlas {version('atlas-fl')}")
        return 0
    first = SYNONYMS.get(first, first)
    if first not in COMMANDS:
        raise ConfigError(
            f"unknown command {short_repr(first)}{did_you_mean(first, COMMANDS)} known: {', '.join(COMMANDS)}"
        )
    groups = split(words[1:], aliases=COMPARED if first == "compare" else ALIASES)
    if first == "run" and (resumed := last_value(groups, "--resume")) is not None:
        first = "resume"
        groups = (Words("", (resumed,)), *(group for group in groups if group.flag != "--resume"))
    command = COMMANDS[first]
    for group in groups:
        if group.flag in command.refused:
            given = " ".join(group.values)[:MAX_REPR_CHARACTERS]
            raise ConfigError(f"{group.flag} {given} is for one run, and these are several; {OF_ONE_RUN[group.flag]}")
    parsed = parse(command.options, groups, command=f"atlas {first}")
    module, _, function = command.run.partition(".")
    gc.disable()  # a fifth of the seconds of importing would go into it, and nothing is found
    run = getattr(import_module(f"{options.__package__}.{module}"), function)
    gc.freeze()
    gc.enable()
    code: int = run(parsed, groups) if first == "compare" else run(parsed)
    return code


def _fail(message: str, code: int) -> int:
    print(f"atlas: {replace_unprintable(' '.join(message.split()))}", file=sys.stderr)
    return code
