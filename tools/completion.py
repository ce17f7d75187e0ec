"""Core. Completion of commands, options and values in bash and zsh, written out of the table of commands."""

from __future__ import annotations

from collections.abc import Iterator

from tools.command import Command, Kind, Option
from tools.commands import COMMANDS

_COMMON = ("--metaserver=", "--token-file=", "--json", "--help")
_CHANGES = ("--dry-run", "--yes")


def completion(shell: str) -> str:
    """Write the script that a shell sources."""
    return {"bash": _bash, "zsh": _zsh}[shell]()


def _words(command: Command) -> list[str]:
    return [*(word for option in command.options for word in _option(option)), *_COMMON, *_CHANGES * command.changes]


def _option(option: Option) -> Iterator[str]:
    if option.kind is Kind.SECRET:
        yield f"--{option.name}-file="
    elif option.kind is Kind.FLAG:
        yield f"--{option.name}"
    else:
        yield f"--{option.name}="
        if option.alone:
            yield f"--{option.name}"


def _choices(command: Command) -> Iterator[tuple[str, str]]:
    """Options whose values are known, and these values."""
    for option in command.options:
        if option.choices:
            yield f"--{option.name}", " ".join(option.choices)


def _bash() -> str:
    cases = "\n".join(f'        {name}) echo "{" ".join(_words(command))}" ;;' for name, command in COMMANDS.items())
    values = "\n".join(
        f'        {name}:{option}) echo "{choices}" ;;'
        for name, command in COMMANDS.items()
        for option, choices in _choices(command)
    )
    return _BASH.format(names=" ".join([*COMMANDS, "completion"]), cases=cases, values=values)


def _zsh() -> str:
    # zsh runs bash's completion functions; its own caching would not make it faster.
    return f"#compdef tools.sh\nautoload -U +X bashcompinit && bashcompinit\n{_bash()}"


_BASH = """\
# Completion of tools.sh for bash: source <(tools.sh completion bash)

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

# bash takes `=` for the end of a word, so `--role=vi` arrives as three words; zsh leaves it one.
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
