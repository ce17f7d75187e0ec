"""Core. Completion of commands, options and values in bash and zsh, written out of the table of commands."""

from __future__ import annotations

from collections.abc import Iterator

from tools.command import Command, Kind, Option
from tools.commands import COMMANDS

_COMMON = {"--metaserver": True, "--token-file": True, "--json": False, "--help": False}
_CHANGES = ("--dry-run", "--yes")


def completion(shell: str) -> str:
    """Write the script that a shell sources."""
    if shell == "bash":
        return _script("=")
    # zsh runs bash's functions. It puts a blank behind each word, so there the value stands as a word of its own.
    return f"#compdef tools.sh\nautoload -U +X bashcompinit && bashcompinit\n{_script('')}"


def _words(command: Command, equals: str) -> Iterator[str]:
    for name, takes_value in (*map(_option, command.options), *_COMMON.items()):
        yield name + equals * takes_value
    yield from _CHANGES * command.changes


def _option(option: Option) -> tuple[str, bool]:
    """How an option is offered, and whether a value has to follow."""
    name = f"--{option.name}-file" if option.kind is Kind.SECRET else f"--{option.name}"
    return name, not option.alone


def _choices(command: Command) -> Iterator[tuple[str, str]]:
    """Options whose values are known, and these values."""
    for option in command.options:
        if option.choices:
            yield f"--{option.name}", " ".join(option.choices)


def _script(equals: str) -> str:
    cases = "\n".join(
        f'        {name}) echo "{" ".join(_words(command, equals))}" ;;' for name, command in COMMANDS.items()
    )
    values = "\n".join(
        f'        {name}:{option}) echo "{choices}" ;;'
        for name, command in COMMANDS.items()
        for option, choices in _choices(command)
    )
    return _BASH.format(names=" ".join([*COMMANDS, "completion"]), cases=cases, values=values)


_BASH = """\
# Completion of tools.sh: source <(tools.sh completion bash), or zsh

_qmq_tools_options() {{
    case "$1" in
{cases}
        completion) echo "bash zsh" ;;
    esac
}}

_qmq_tools_values() {{
    case "$1:$2" in
{values}
    esac
}}

# bash takes `=` for the end of a word, so `--option=value` arrives as three words; zsh leaves it one.
_qmq_tools() {{
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
            COMPREPLY=($(compgen -W "$(_qmq_tools_options "$command")" -- "$current"))
            if [[ "${{COMPREPLY[0]:-}}" == *= ]]; then compopt -o nospace 2>/dev/null; fi ;;
        --file|--out|--token-file|--password-file)
            COMPREPLY=($(compgen -P "$prefix" -f -- "$current")) ;;
        *)
            COMPREPLY=($(compgen -P "$prefix" -W "$(_qmq_tools_values "$command" "$option")" -- "$current")) ;;
    esac
}}
complete -F _qmq_tools tools.sh
"""
