"""Shell. Completion in real shells: bash runs the script and completes words."""

from __future__ import annotations

import os
import subprocess

import pytest

from qmq.cli import PROGRAMS
from qmq.tools.usage import completion

ASK = """
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
read -ra asked <<< "$(complete -p "$1")"
"${asked[2]}" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(*words, directory="/", program="tools.sh"):
    """Return bash's offers for the last word; `=` counts as a word."""
    others = {name: entry.words for name, entry in PROGRAMS.items()}
    both = completion("bash") + completion("bash", program="qmq", others=others)  # one shell may have both
    script = both + ASK
    ended = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", program, *words],
        cwd=directory,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    return [line for line in ended.stdout.splitlines() if line]


@pytest.mark.parametrize(
    "words, offered",
    [
        pytest.param(["Mark"], ["MarkReadonly"], id="a command"),
        pytest.param(["Swap", ""], [], id="no command, no options"),
        pytest.param(["ListBrokers", "--b"], ["--brokerGroup="], id="an option"),
        pytest.param(["RemoveBroker", "--f"], ["--force"], id="a flag takes no value"),
        pytest.param(["AddDb", "--passw"], ["--password-file="], id="a password is not typed"),
        pytest.param(["AddToken", "--role", "=", "v"], ["viewer"], id="a value behind ="),
        pytest.param(["AddToken", "--role", "="], ["viewer", "operator", "admin", "client", "broker"], id="all values"),
        pytest.param(["AddToken", "--role", "op"], ["operator"], id="a value as the next word"),
        pytest.param(["AddToken", "--role=ad"], ["--role=admin"], id="= within a word, as zsh has it"),
        pytest.param(["SwapRoles", "--y"], ["--yes"], id="a change can be confirmed"),
        pytest.param(["ListBrokers", "--y"], [], id="a list cannot"),
        pytest.param(["completion", "z"], ["zsh"], id="shells"),
    ],
)
def test_bash_offers(words, offered):
    assert complete(*words) == offered


@pytest.mark.parametrize(
    "words, offered",
    [
        pytest.param(["metas"], ["metaserver"], id="a process"),
        pytest.param(["Mark"], ["MarkReadonly"], id="an operators' command"),
        pytest.param(["broker", "--"], ["--config="], id="an option of a process"),
        pytest.param(["dev", "s"], ["stop"], id="an action"),
        pytest.param(["AddToken", "--role", "=", "v"], ["viewer"], id="a value"),
    ],
)
def test_bash_offers_for_qmq(words, offered):
    assert complete(*words, program="qmq") == offered


def test_tools_sh_offers_no_processes():
    assert complete("metas") == []


def test_file_options_complete_files(tmp_path):
    (tmp_path / "metadata.json").touch()
    assert complete("Restore", "--file", "=", "meta", directory=tmp_path) == ["metadata.json"]


def test_zsh_offers_values_as_words():
    """zsh adds a blank after each completed word: `--role= viewer` would be no role."""
    bash, zsh = completion("bash"), completion("zsh")
    assert zsh.startswith("#compdef tools.sh\n")
    assert "--role=" in bash and "--role=" not in zsh


@pytest.mark.parametrize("before", ["", "autoload -U compinit && compinit -D\n"], ids=["bare", "with completion"])
def test_zsh_completes_after_sourcing(before, tmp_path):
    """Debian's has no compinit in its zshrc: the script ended with "command not found: compdef"."""
    text = f"{before}{completion('zsh', program='qmq')}\nprint -r -- $_comps[qmq]"
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    ended = subprocess.run(["zsh", "-f", "-c", text], env=environ, capture_output=True, text=True, check=True)
    assert (ended.stdout.split()[-1], ended.stderr) == ("_qmq", "")
    assert not list(tmp_path.iterdir()), "nothing is left in a home directory"
