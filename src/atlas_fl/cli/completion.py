"""`atlas completion`: a script with which a shell completes commands, flags and choices; tyro writes it."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import tyro

from atlas_fl.cli.arguments import parse, registry, split


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script with which the shell completes the commands and flags of atlas; docs/guides/installation.md says
    where to put it."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """The shell."""


def completion(words: Sequence[str], commands: Mapping[str, tuple[type[Any], str]]) -> int:
    """Print the script for the shell that these words name; 0."""
    options = parse(CompletionOptions(shell=tyro.MISSING), split(words), command="atlas completion")
    print(completion_script(options.shell, commands))
    return 0


def completion_script(shell: str, commands: Mapping[str, tuple[type[Any], str]]) -> str:
    """The script for this shell; `commands` are (type of the options, summary) by name."""
    kind: Any = reduce(
        or_,
        (
            Annotated[options, tyro.conf.subcommand(name=name, prefix_name=False)]
            for name, (options, _) in commands.items()
        ),
    )
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(
            kind,
            prog="atlas",
            args=["--tyro-write-completion", shell, "-"],
            registry=registry(with_choices=True),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    return _with_summaries(_with_short_lines(printed.getvalue()), commands)


def _with_short_lines(script: str) -> str:
    """The script with every help text on one line: the shell would take a second one for another completion."""
    return re.sub(r"(?<=COMPLETION_SPEC = ).*", lambda spec: re.sub(r"\\{1,2}n", " ", spec[0]), script)


def _with_summaries(script: str, commands: Mapping[str, tuple[type[Any], str]]) -> str:
    """The script with the summary of each command, where tyro repeats its name.

    Apostrophes would end the strings that these texts stand in.
    """
    for name, (_, summary) in commands.items():
        text = summary.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")
        script = script.replace(f"'{name}': {{'description': '{name}'", f"'{name}': {{'description': '{text}'")
    return script
