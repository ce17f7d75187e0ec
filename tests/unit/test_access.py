"""Shell. Tokens come from an argument, a private file, standard input or the environment, safe from other users."""

from __future__ import annotations

import io

import pytest

from qmq.access import find_token
from qmq.errors import AccessError


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_argument_precedes_all_sources(tmp_path):
    assert find_token("given", environ={"QMQ_TOKEN": "other"}) == "given"


def test_file_precedes_the_environment(tmp_path):
    path = write(tmp_path / "token", "from the file\n".replace(" ", "-"))
    assert find_token(token_file=path, environ={"QMQ_TOKEN": "other"}) == "from-the-file"
    assert find_token(environ={"QMQ_TOKEN_FILE": str(path)}) == "from-the-file"


def test_environment_is_the_default():
    assert find_token(environ={"QMQ_TOKEN": "value", "QMQ_TOKEN_FILE": "/nowhere"}) == "value"
    assert find_token(environ={}) == ""


@pytest.mark.parametrize("how", [{"given": "-"}, {"token_file": "-"}])
def test_dash_reads_standard_input(how):
    stdin = io.StringIO("secret\nrest\n")
    assert find_token(**how, environ={}, stdin=stdin) == "secret" and stdin.read() == "rest\n"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o777])
def test_file_readable_by_others_is_refused(tmp_path, mode):
    """Weakness 28: tokens were read from a file of any mode."""
    path = write(tmp_path / "token", "secret\n", mode)
    with pytest.raises(AccessError, match="chmod 600") as error:
        find_token(token_file=path, environ={})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n", "two words\n", "a\nb\n", "x" * 5000], ids=range(5))
def test_file_without_a_token_is_refused(tmp_path, text):
    with pytest.raises(AccessError, match="one token on one line"):
        find_token(token_file=write(tmp_path / "token", text), environ={})


def test_missing_or_binary_file_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    (tmp_path / "bytes").chmod(0o600)
    for path in (tmp_path / "missing", tmp_path, tmp_path / "bytes"):
        with pytest.raises(AccessError):
            find_token(token_file=path, environ={})


def test_two_sources_in_one_call_are_refused(tmp_path):
    with pytest.raises(AccessError, match="not both"):
        find_token("given", token_file=tmp_path / "token", environ={})
