"""`atlas completion`: a script with which a shell completes commands, flags and choices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from atlas_fl.cli.arguments import Command, Positional, arguments, choices, known_flags, parse, split

Commands: TypeAlias = Mapping[str, Command]

BASH = """_atlas() {{
  local words=""
  case "$COMP_CWORD:${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}}" in
    1:*) words="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _atlas atlas
"""
ZSH = """#compdef atlas
_atlas() {{
  local -a commands=({described})
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case "$CURRENT:${{words[2]}}:${{words[CURRENT-1]}}" in
{cases}
  esac
}}
compdef _atlas atlas
"""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script with which the shell completes the commands and flags of atlas; docs/guides/installation.md says
    where to put it."""

    shell: Annotated[Literal["bash", "zsh", "fish"], Positional("SHELL")]
    """The shell."""


def completion(words: Sequence[str], commands: Commands) -> int:
    """Print the script for the shell that these words name; 0."""
    options = parse(CompletionOptions, split(words), command="atlas completion")
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](commands), end="")
    return 0


def _bash(commands: Commands) -> str:
    cases = (f'    *:{place}) words="{" ".join(words)}" ;;' for place, words in _cases(commands))
    return BASH.format(commands=" ".join([*commands, "-h", "--help"]), cases="\n".join(cases))


def _zsh(commands: Commands) -> str:
    described = " ".join(f"{name}:{_quoted(command.summary)}" for name, command in commands.items())
    cases = (f"    *:{place}) compadd -- {' '.join(words)} ;;" for place, words in _cases(commands))
    return ZSH.format(described=described, cases="\n".join(cases))


def _fish(commands: Commands) -> str:
    lines = ["complete -c atlas -f -n __fish_use_subcommand -s h -l help"]
    for name, command in commands.items():
        lines.append(f"complete -c atlas -f -n __fish_use_subcommand -a {name} -d {_quoted(command.summary)}")
        here = f"complete -c atlas -n '__fish_seen_subcommand_from {name}'"
        lines.append(f"{here} -s h -l help")
        for argument in arguments(command.options):
            listed = choices(argument.kind)
            takes = f" -x -a '{' '.join(listed)}'" if listed else "" if argument.kind is bool else " -r"
            flags = argument.spellings if argument.flag else []
            lines += [f"{here} -l {flag[2:]}{takes} -d {_quoted(argument.help)}" for flag in flags]
    return "\n".join([*lines, ""])


def _cases(commands: Commands) -> Iterator[tuple[str, Sequence[str]]]:
    """The words that may follow, by COMMAND:WORD BEFORE; the choices of a flag stand before all flags."""
    for name, command in commands.items():
        for argument in arguments(command.options):
            if argument.flag and choices(argument.kind):
                yield f"{name}:{argument.flag}", choices(argument.kind)
        yield f"{name}:*", known_flags(command.options)


def _quoted(text: str) -> str:
    """The text in apostrophes, which would end at one of its own."""
    return "'" + text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}") + "'"
