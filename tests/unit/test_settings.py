"""Shell. Settings are read from file and environment, checked as a whole, and every complaint has a remedy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from qmq.access import Token, token_text
from qmq.settings import SECRET, InvalidSettings, load, setting, shown


@dataclass(frozen=True)
class Settings:
    name: str = setting(why="who it is")
    port: int = setting(20881, unit="port", least=1, most=65535, why="where it listens")
    pause_s: float = setting(0.5, unit="s", least=0.0, why="how long it waits")
    eager: bool = setting(False, why="whether it waits at all")
    tokens: tuple[str, ...] = setting((), why="who may come in")
    mode: str = setting("fsync", one_of=("fsync", "replicated"), why="when a frame counts as stored")
    folder: Path = setting(Path("data"), why="where it keeps things")
    key: str = setting("", secret=True, why="what opens it")


def read(tmp_path, text, **environ):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return load(Settings, prefix="QMQ_X", path=path, environ=environ)


def complaints_of(tmp_path, text, **environ):
    with pytest.raises(InvalidSettings) as refusal:
        read(tmp_path, text, **environ)
    assert str(refusal.value) == "\n".join(refusal.value.complaints)
    return refusal.value.complaints


def test_missing_settings_have_defaults(tmp_path):
    assert read(tmp_path, 'name = "a"') == Settings(name="a")


def test_settings_file_is_read(tmp_path):
    text = 'name = "a"\nport = 1\npause_s = 2\neager = true\ntokens = ["x", "y"]\nmode = "replicated"\nfolder = "/d"'
    assert read(tmp_path, text) == Settings(
        name="a", port=1, pause_s=2.0, eager=True, tokens=("x", "y"), mode="replicated", folder=Path("/d")
    )


def test_environment_overrides_the_file(tmp_path):
    settings = read(
        tmp_path,
        'name = "a"\nport = 1',
        QMQ_X_NAME="b",
        QMQ_X_PORT="2",
        QMQ_X_PAUSE_S="0.25",
        QMQ_X_EAGER="true",
        QMQ_X_TOKENS="x, y,",
    )
    assert settings == Settings(name="b", port=2, pause_s=0.25, eager=True, tokens=("x", "y"))


def test_token_file_is_read_again(tmp_path):
    @dataclass(frozen=True)
    class Own:
        token: Token = setting(secret=True, why="key of the installation")

    (file := tmp_path / "key").write_text("first")
    file.chmod(0o600)
    settings = load(Own, prefix="QMQ_X", path=None, environ={"QMQ_X_TOKEN_FILE": str(file)})
    assert token_text(settings.token) == "first"
    file.write_text("next")
    assert token_text(settings.token) == "next"
    assert load(Own, prefix="QMQ_X", path=None, environ={"QMQ_X_TOKEN": "fixed"}).token == "fixed"
    with pytest.raises(InvalidSettings, match="cannot be read"):
        load(Own, prefix="QMQ_X", path=None, environ={"QMQ_X_TOKEN_FILE": "/nowhere"})


def test_secret_is_read_from_a_file(tmp_path):
    """Docker, Kubernetes and systemd give secrets as files."""
    (file := tmp_path / "key").write_text("from-the-file\n")
    file.chmod(0o440)
    assert read(tmp_path, 'name = "a"\nkey = "other"', QMQ_X_KEY_FILE=str(file)).key == "from-the-file"
    assert complaints_of(tmp_path, 'name = "a"', QMQ_X_KEY_FILE=str(file), QMQ_X_KEY="b") == [
        "key: both QMQ_X_KEY and QMQ_X_KEY_FILE are set; keep one"
    ]
    file.chmod(0o666)
    (complaint,) = complaints_of(tmp_path, 'name = "a"', QMQ_X_KEY_FILE=str(file))
    assert complaint.startswith("key: other users may write") and "chmod 600" in complaint
    assert read(tmp_path, 'name = "a"', QMQ_X_FOLDER_FILE="/nowhere").folder == Path("data"), "it is no secret"


def test_settings_need_no_file():
    assert load(Settings, prefix="QMQ_X", path=None, environ={"QMQ_X_NAME": "a"}).name == "a"


def test_variables_of_other_processes_are_ignored(tmp_path):
    assert read(tmp_path, 'name = "a"', QMQ_Y_PORT="1", PORT="2", QMQ_X_UNKNOWN="3").port == 20881


def test_settings_cannot_be_changed(tmp_path):
    with pytest.raises(FrozenInstanceError):
        read(tmp_path, 'name = "a"').port = 1


def test_all_complaints_are_reported_together(tmp_path):
    complaints = complaints_of(tmp_path, 'port = 0\nmode = "never"\nprot = 1', QMQ_X_PAUSE_S="soon")
    assert [complaint.partition(":")[0] for complaint in complaints] == ["prot", "name", "port", "pause_s", "mode"]


@pytest.mark.parametrize(
    "text, complaint",
    [
        pytest.param("", "name: missing; set it in the file or as QMQ_X_NAME (who it is)", id="missing"),
        pytest.param('name = ""', "name: '' is no text (who it is)", id="empty"),
        pytest.param("name = 7", "name: 7 is no text (who it is)", id="number for text"),
        pytest.param("port = 0", "port: 0 port is less than 1 (where it listens)", id="too small"),
        pytest.param("port = 65536", "port: 65536 port is more than 65535 (where it listens)", id="too large"),
        pytest.param("port = true", "port: True is no number (where it listens)", id="truth for a number"),
        pytest.param("pause_s = -0.1", "pause_s: -0.1 s is less than 0.0 (how long it waits)", id="negative"),
        pytest.param("pause_s = nan", "pause_s: nan is no number (how long it waits)", id="not a number"),
        pytest.param("pause_s = inf", "pause_s: inf is no number (how long it waits)", id="infinite"),
        pytest.param("port = 1.5", "port: 1.5 is no whole number (where it listens)", id="fraction"),
        pytest.param("eager = 1", "eager: 1 is neither true nor false (whether it waits at all)", id="1 for true"),
        pytest.param('tokens = "a"', None, id="one word is a list of one"),
        pytest.param("tokens = [1]", "tokens: [1] is no list of words (who may come in)", id="numbers for words"),
        pytest.param(
            "extra = 1",
            "extra: unknown setting; known are name, port, pause_s, eager, tokens, mode, folder, key",
            id="unknown",
        ),
    ],
)
def test_wrong_value_is_reported(tmp_path, text, complaint):
    whole = text if "name" in text or complaint and "missing" in complaint else f'name = "a"\n{text}'
    if complaint is None:
        assert read(tmp_path, whole).tokens == ("a",)
    else:
        assert complaints_of(tmp_path, whole) == [complaint]


def test_invalid_number_in_the_environment_is_reported(tmp_path):
    [complaint] = complaints_of(tmp_path, 'name = "a"', QMQ_X_PORT="many")
    assert complaint.startswith("port: ") and "many" in complaint and "where it listens" in complaint


def test_unreadable_settings_file_is_reported(tmp_path):
    with pytest.raises(InvalidSettings, match="none.toml"):
        load(Settings, prefix="QMQ_X", path=tmp_path / "none.toml", environ={})
    assert "x.toml" in complaints_of(tmp_path, "name = ")[0]
    (tmp_path / "x.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(InvalidSettings, match=r"x\.toml"):
        load(Settings, prefix="QMQ_X", path=tmp_path / "x.toml", environ={})


def test_shown_settings_have_no_secrets():
    texts = shown(Settings(name="a", key="open sesame", tokens=("x", "y"), eager=True))
    assert (texts["key"], texts["tokens"], texts["eager"], texts["pause_s"]) == (SECRET, "x, y", "true", "0.5")
    assert shown(Settings(name="a"))["key"] == ""
