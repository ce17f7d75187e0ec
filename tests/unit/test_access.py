"""Shell. Tokens come from an argument, a private file, standard input or the environment, safe from other users."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace

import pytest

import qmq.access as module
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


@pytest.mark.parametrize("mode", [0o644, 0o444, 0o604, 0o620, 0o602, 0o660, 0o777])
def test_file_open_to_others_is_refused(tmp_path, mode):
    """Weakness 28: tokens were read from a file of any mode."""
    path = write(tmp_path / "token", "secret\n", mode)
    with pytest.raises(AccessError, match=f"mode {mode:03o}.*chmod 600") as error:
        find_token(token_file=path, environ={})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_file_readable_by_its_group_is_accepted(tmp_path, mode):
    assert find_token(token_file=write(tmp_path / "token", "secret\n", mode), environ={}) == "secret"


def mount(monkeypatch, tmp_path, point):
    """Let `point` be a mount within one file system."""
    (mounts := tmp_path / "mountinfo").write_text(f"1 2 0:3 / / rw - x\n4 1 0:3 /f {point} rw,relatime - ext4 d rw\n")
    monkeypatch.setattr(module, "MOUNTS", mounts)


@pytest.mark.parametrize("mounted", ["secrets/data/token", "secrets"], ids=["file", "folder"])
def test_mounted_file_readable_by_others_is_accepted(tmp_path, monkeypatch, mounted):
    """Docker mounts the file, Kubernetes a folder with a link to it."""
    (tmp_path / "secrets" / "data").mkdir(parents=True)
    data = write(tmp_path / "secrets" / "data" / "token", "secret\n", 0o444)
    (path := tmp_path / "secrets" / "token").symlink_to("data/token")
    with pytest.raises(AccessError, match="may read"):
        find_token(token_file=path, environ={})
    mount(monkeypatch, tmp_path, tmp_path / mounted)
    assert find_token(token_file=path, environ={}) == "secret"
    data.chmod(0o664)
    with pytest.raises(AccessError, match="may write"):
        find_token(token_file=path, environ={})


def test_mounted_folder_of_all_users_counts_for_nothing(tmp_path, monkeypatch):
    """/tmp is often a mount."""
    path = write(tmp_path / "token", "secret\n", 0o444)
    mount(monkeypatch, tmp_path, tmp_path)
    monkeypatch.setattr(module, "SHARED_FOLDERS", frozenset({str(tmp_path)}))
    with pytest.raises(AccessError, match="may read"):
        find_token(token_file=path, environ={})


def test_readable_file_of_another_user_is_accepted(tmp_path, monkeypatch):
    path = write(tmp_path / "token", "secret\n", 0o444)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert find_token(token_file=path, environ={}) == "secret"


def test_file_on_a_readonly_file_system_is_accepted(tmp_path, monkeypatch):
    path = write(tmp_path / "token", "secret\n", 0o444)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert find_token(token_file=path, environ={}) == "secret"


def test_pipe_is_private():
    """A shell's `<(…)` gives the path of a pipe."""
    reader, writer = os.pipe()
    os.write(writer, b"secret\n")
    os.close(writer)
    os.fchmod(reader, 0o666)
    try:
        assert find_token(token_file=f"/dev/fd/{reader}", environ={}) == "secret"
    finally:
        os.close(reader)


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


def test_process_hides_its_new_files(tmp_path):
    before = os.umask(0o022)
    try:
        module.keep_private()
        (tmp_path / "f").touch()
        os.umask(0o077)
        module.keep_private()
        (tmp_path / "g").touch()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "fg"] == [0o640, 0o600]
