"""Core. Completion of commands, options and values in bash and zsh, generated from the table of commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from qmq.tools.command import Command, Kind, Option
from qmq.tools.commands import COMMANDS

_COMMON = {"--metaserver": True, "--token-file": True, "--json": False, "--help": False}
_CHANGES = ("--dry-run", "--yes")
_NOTHING: Mapping[str, Sequence[str]] = MappingProxyType({})
_FUNCTIONS = {"tools.sh": "_qmq_tools", "qmq": "_qmq"}
"""Function name by program; a shell may source both scripts."""


def completion(shell: str, *, program: str = "tools.sh", others: Mapping[str, Sequence[str]] = _NOTHING) -> str:
    """Return the completion script for a shell.

    Args:
        others: further commands of `program`, each with the words that may follow it.
    """
    if shell == "bash":
        return _script("=", program, others)
    # zsh runs bash's functions, but adds a blank after each word, so a value is a word of its own there.
    script = _script("", program, others)
    return f"#compdef {program}\n{_ZSH}{script}"


def _words(command: Command, equals: str) -> Iterator[str]:
    for name, takes_value in (*map(_option, command.options), *_COMMON.items()):
        yield name + equals * takes_value
    yield from _CHANGES * command.changes


def _option(option: Option) -> tuple[str, bool]:
    """Return the option as offered, and whether a value follows it."""
    name = f"--{option.name}-file" if option.kind is Kind.SECRET else f"--{option.name}"
    return name, not option.alone


def _choices(command: Command) -> Iterator[tuple[str, str]]:
    """Yield options with a fixed set of values, and these values."""
    for option in command.options:
        if option.choices:
            yield f"--{option.name}", " ".join(option.choices)


def _script(equals: str, program: str, others: Mapping[str, Sequence[str]]) -> str:
    words = {name: [word.replace("=", equals) for word in more] for name, more in others.items()}
    words |= {name: list(_words(command, equals)) for name, command in COMMANDS.items()}
    cases = "\n".join(f'        {name}) echo "{" ".join(more)}" ;;' for name, more in words.items())
    values = "\n".join(
        f'        {name}:{option}) echo "{choices}" ;;'
        for name, command in COMMANDS.items()
        for option, choices in _choices(command)
    )
    return _BASH.format(
        program=program,
        function=_FUNCTIONS[program],
        names=" ".join([*words, "completion"]),
        cases=cases,
        values=values,
    )


_ZSH = """\
# Debian's zsh has its completion off until somebody asks for it; bashcompinit builds on that.
(( $+functions[compdef] )) || { autoload -U compinit && compinit -i -D; }
autoload -U +X bashcompinit && bashcompinit
"""

_BASH = """\
# Completion of {program}: source <({program} completion bash), or zsh

{function}_options() {{
    case "$1" in
{cases}
        completion) echo "bash zsh" ;;
    esac
}}

{function}_values() {{
    case "$1:$2" in
{values}
    esac
}}

# bash takes `=` for the end of a word, so `--option=value` arrives as three words; zsh leaves it one.
{function}() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]:-}}" option="" prefix=""
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{names}" -- "$current"))
        return
    fi
    if [[ "$current" == --*=* ]]; then
        option="${{current%%=*}}" prefix="${{current%%=*}}="
        current="${{current#*=}}"
    elif [[ "$current" == "=" ]]; then
        option="$last" current=""
    elif [[ "$last" == "=" ]]; then
        option="${{COMP_WORDS[COMP_CWORD-2]}}"
    elif [[ "$current" != -* && "$last" == --* ]]; then
        option="$last"
    fi
    case "$option" in
        "")
            COMPREPLY=($(compgen -W "$({function}_options "$command")" -- "$current"))
            if [[ "${{COMPREPLY[0]:-}}" == *= ]]; then compopt -o nospace 2>/dev/null; fi ;;
        --file|--out|--token-file|--password-file|--config|--dir|--input)
            COMPREPLY=($(compgen -P "$prefix" -f -- "$current")) ;;
        *)
            COMPREPLY=($(compgen -P "$prefix" -W "$({function}_values "$command" "$option")" -- "$current")) ;;
    esac
}}
complete -F {function} {program}
"""
