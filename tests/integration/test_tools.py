"""Shell. `tools/tools.sh` with a stub metaserver: plans, confirmations, exit statuses, secrets, files."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tools_world import (
    DONE,
    REFUSED,
    TOKEN,
    TOOLS,
    UNKNOWN,
    UNREACHABLE,
    USAGE,
    Stub,
    answering,
    environment,
    ok,
    planned,
    preview,
    run,
    run_at_terminal,
    watchdog,
)
from tests.support.ports import free_ports

MARKED = {"producers": 3, "consumers": 0, "watchers": 40, "metaserversUnasked": [], "allKnow": False, "waitedMs": 0}


# Plans and confirmations.


def test_change_is_shown_and_needs_a_yes():
    """Weakness 33: QMQ's tools have neither a dry run nor a confirmation."""
    with Stub(planned(MARKED)) as stub:
        unconfirmed = run("MarkReadonly", stub.address, brokerGroup="g1")
        assert (unconfirmed.returncode, unconfirmed.stdout, stub.asked) == (USAGE, "", [])
        assert "use --yes, or --dry-run to see the plan" in unconfirmed.stderr
        plan = run("MarkReadonly", stub.address, "--dry-run", brokerGroup="g1")
        assert (plan.returncode, stub.done) == (DONE, [])
        assert "affects 12 subjects, 3 groups, 40 clients" in plan.stdout and "term" in plan.stdout
        done = run("MarkReadonly", stub.address, "--yes", brokerGroup="g1", subject="a")
        assert (done.returncode, stub.done) == (DONE, ["MarkReadonlyBrokerGroup"])
    assert "affects 12 subjects" in done.stderr
    assert done.stdout.splitlines() == [
        "marked readonly: producers use other groups, consumers continue",
        "3 producers and 0 consumers hold the old route",
    ]


@pytest.mark.parametrize("answer, is_done", [("YES", True), ("maybe", False), ("", False)])
def test_at_a_terminal_the_plan_is_confirmed(answer, is_done):
    with Stub(planned(MARKED)) as stub:
        ended = run_at_terminal("MarkReadonly", stub.address, answer=answer, brokerGroup="g1")
    assert ended.returncode == (DONE if is_done else REFUSED)
    assert stub.done == ["MarkReadonlyBrokerGroup"] * is_done
    assert "affects 12 subjects, 3 groups, 40 clients" in ended.shown and "Do it? [y/N]" in ended.shown
    assert ("not confirmed; nothing was changed" in ended.shown) != is_done
    assert "Do it?" not in ended.stdout


@pytest.mark.parametrize("where", ["plan", "answer"])
def test_refused_plan_is_not_confirmed(where):
    reasons = ["there is no broker group g1"]
    refused = preview(reasons=reasons, wouldChange=False)
    with Stub(lambda _: refused if where == "plan" else refused | {"status": -1, "message": reasons[0]}) as stub:
        ended = run("MarkReadonly", stub.address, "--yes", brokerGroup="g1")
    assert (ended.returncode, ended.stdout, stub.done) == (REFUSED, "", [])
    assert ended.stderr.splitlines()[-1] == "tools.sh: there is no broker group g1"


def test_list_is_not_planned():
    with Stub(lambda _: ok([])) as stub:
        ended = run("ListBrokers", stub.address)
    assert (ended.returncode, ended.stdout) == (DONE, "no broker is added yet; AddBroker adds one\n")
    assert stub.asked == [{"action": "ListBrokers", "details": "true"}]


# Output for scripts.


def test_json_is_the_metaservers_answer_and_nothing_else():
    with Stub(planned(MARKED)) as stub:
        ended = run("MarkReadonly", stub.address, "--yes", "--json", brokerGroup="g1")
        plan = run("MarkReadonly", stub.address, "--dry-run", "--json", brokerGroup="g1")
    assert json.loads(ended.stdout) == ok(MARKED) and json.loads(plan.stdout) == preview()
    refusal = {"error": "it is there", "data": {"name": "s"}}
    with Stub(lambda _: refusal) as stub:
        refused = run("AddNewSubject", stub.address, "--yes", "--json", subject="s", tag="t")
    assert refused.returncode == REFUSED and "it is there" in refused.stderr and json.loads(refused.stdout) == refusal


def test_answer_of_another_version_is_shown_raw():
    """An unknown answer to a change that was made is no refusal."""
    with Stub(planned("success")) as stub:
        ended = run("MarkReadonly", stub.address, "--yes", brokerGroup="g1")
    assert ended.returncode == DONE and json.loads(ended.stdout.splitlines()[-1]) == ok("success")
    assert "the format of another version" in ended.stderr


def test_output_without_a_terminal_is_plain():
    row = {
        "group": "g1",
        "role": "MASTER",
        "hostname": "a",
        "ip": "10.0.0.1",
        "servePort": 1,
        "syncPort": 2,
        "up": True,
    }
    with Stub(lambda _: ok([row])) as stub:
        ended = run("ListBrokers", stub.address, environ={"COLUMNS": "20"})
    assert ended.stdout == (
        "GROUP  ROLE    HOSTNAME  IP        SERVE  SYNC  UP\ng1     MASTER  a         10.0.0.1      1     2  yes\n"
    )


def test_closed_pipe_is_no_error():
    rows = [{"subject": f"s{n}", "brokerGroups": ["g1"], "version": 1, "updateTime": 1} for n in range(50_000)]
    with Stub(lambda _: rows) as stub:
        command = f'"{TOOLS}" ListSubjectRoutes --metaserver={stub.address} | head -n 1'
        ended = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("SUBJECT  BROKER GROUPS  VERSION  CHANGED\n", "")


# Exit statuses.


@pytest.mark.parametrize("status, exit_status", [(-1, REFUSED), (-2, UNKNOWN), (-3, UNREACHABLE)])
def test_exit_status_reports_the_outcome_of_a_change(status, exit_status):
    """Weakness 33: QMQ's tools end with 0 after every outcome of an action."""
    answer, failure = planned(MARKED), {"status": status, "message": "because", "data": None}
    with Stub(lambda words: answer(words) if "dryRun" in words else failure) as stub:
        ended = run("SwapRoles", stub.address, "--yes", brokerGroup="g1")
    assert (ended.returncode, ended.stdout) == (exit_status, "") and "because" in ended.stderr
    look = f"tools.sh ReplicaStatus --metaserver={stub.address} --brokerGroup=g1"
    assert (look in ended.stderr) == (exit_status == UNKNOWN)


@pytest.mark.parametrize(
    "words", [["AddBroker", "--brokerGroup=g1"], ["RemoveDb", "--host=h", "--port=x"], ["Explode"], []], ids=str
)
def test_wrong_usage_ends_with_2(words):
    """Weakness 33: QMQ's tools end with 0 on usage errors."""
    ended = subprocess.run([TOOLS, *words], env=environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (USAGE, "") and (
        "tools.sh: " if words else "MarkReadonly"
    ) in ended.stderr


def test_no_metaserver_ends_with_3():
    [port] = free_ports(1)
    ended = run("SwapRoles", f"127.0.0.1:{port}", "--yes", brokerGroup="g1")
    assert ended.returncode == UNREACHABLE and "cannot reach a metaserver" in ended.stderr
    unknown = run("ListBrokers", "no-such-host.invalid")
    assert unknown.returncode == UNREACHABLE and "cannot reach a metaserver" in unknown.stderr


@pytest.mark.parametrize(
    "command, answer, status",
    [
        pytest.param("SwapRoles", b"", UNKNOWN, id="change, connection closed"),
        pytest.param("ListBrokers", b"", UNREACHABLE, id="list, connection closed"),
        pytest.param("SwapRoles", b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\n{}", UNREACHABLE, id="another server"),
        pytest.param("SwapRoles", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", UNKNOWN, id="change, cut short"),
    ],
)
def test_answer_that_is_lost_after_sending(command, answer, status):
    with answering(answer) as address:
        ended = run(command, address, *["--yes"] * (command == "SwapRoles"), brokerGroup="g1")
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ("check before you repeat it" in ended.stderr) == (status == UNKNOWN)


@pytest.mark.parametrize("buffered", ["", "1"])
def test_unprintable_result_ends_with_4(tmp_path, buffered):
    environ = environment(PYTHONUNBUFFERED=buffered)
    with Stub(planned(MARKED)) as stub, open("/dev/full", "w") as full:
        marking = [TOOLS, "MarkReadonly", f"--metaserver={stub.address}", "--yes", "--brokerGroup=g1"]
        ended = subprocess.run(marking, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, stub.done) == (UNKNOWN, ["MarkReadonlyBrokerGroup"])
    assert "nothing was changed" not in ended.stderr and "tools.sh ListReadonly" in ended.stderr
    with Stub(planned({"id": "i1", "name": "a", "role": "viewer", "token": "qmq_i1_secret"})) as stub:
        making = f"{TOOLS} AddToken --metaserver={stub.address} --yes --name=a --role=viewer --out={tmp_path}/token"
        kept = subprocess.run(["bash", "-c", f"ulimit -f 0; {making}"], env=environ, capture_output=True, text=True)
    assert (kept.returncode, stub.done) == (UNKNOWN, ["AddToken"])
    assert "nothing was changed" not in kept.stderr and "tools.sh ListTokens" in kept.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("buffered", ["", "1"])
def test_unprintable_list_ends_with_2(buffered):
    with Stub(lambda _: ok([])) as stub, open("/dev/full", "w") as full:
        listing = [TOOLS, "ListBrokers", f"--metaserver={stub.address}"]
        environ = environment(PYTHONUNBUFFERED=buffered)
        ended = subprocess.run(listing, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == USAGE and "No space left" in ended.stderr


def test_doctor_keeps_findings_when_actions_fail():
    """A balancer may pass on GET alone."""
    with Stub(None) as stub:
        ended = run("Doctor", stub.address, "--json")
    found = json.loads(ended.stdout)
    assert ended.returncode == REFUSED and found[-1]["step"] == "operators' actions"
    assert [finding["step"] for finding in found[:2]] == ["name resolution", "HTTP port"]


# Outboxes.

NOTHING_PARKED = {"database": "a", "pending": 0, "claimed": 0, "oldest": 0, "parked": 0, "rows": []}
AWAY = {"database": "b", "problem": "no answer in time"}


@pytest.mark.parametrize(
    "reply, status",
    [
        pytest.param((200, {"databases": [NOTHING_PARKED]}), DONE, id="done"),
        pytest.param((409, {"problem": "no such database"}), REFUSED, id="refused"),
        pytest.param((503, {"problem": "not the active one"}), UNREACHABLE, id="not served"),
        pytest.param((500, "failed"), UNREACHABLE, id="failed inside"),
        pytest.param((200, {"databases": [NOTHING_PARKED, AWAY]}), UNREACHABLE, id="one database did not answer"),
        pytest.param(None, UNREACHABLE, id="no answer"),
    ],
)
def test_exit_status_reports_a_silent_watchdog(reply, status):
    with watchdog(reply) as address:
        assert run("OutboxStuck", "127.0.0.1:1", watchdog=address).returncode == status


@pytest.mark.parametrize("failed", [False, True])
def test_retry_without_a_database_has_an_unknown_outcome(failed):
    done = {"retried": {"a": 2}, "notAsked": {"b": "no answer in time"} if failed else {}}
    partly = {"status": -2, "message": "not of every database: b: no answer in time", "data": done}
    with Stub(lambda words: partly if failed and "dryRun" not in words else ok(done)) as stub:
        ended = run("OutboxRetry", stub.address, "--yes")
    assert ended.returncode == (UNKNOWN if failed else DONE)
    assert ("tools.sh OutboxStuck" in ended.stderr) == failed and ("a: 2 rows" in ended.stdout) != failed


# Tokens and passwords.


def test_token_comes_from_environment_file_or_stdin(tmp_path):
    (file := tmp_path / "token").write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    with Stub(lambda _: ok([])) as stub:
        ways = [
            run("ListBrokers", stub.address),
            run("ListBrokers", stub.address, token=None, token_file=file),
            run("ListBrokers", stub.address, token=None, token_file="-", stdin=f"{TOKEN}\n"),
            run("ListBrokers", stub.address, token=None, environ={"QMQ_TOKEN_FILE": str(file)}),
        ]
    assert [(way.returncode, way.stderr) for way in ways] == [(DONE, "")] * 4 and stub.tokens == [TOKEN] * 4


def test_typed_token_is_warned_about():
    with Stub(lambda _: ok([])) as stub:
        typed = run("ListBrokers", stub.address, f"--token={TOKEN}", token=None)
        assert (typed.returncode, stub.tokens) == (DONE, [TOKEN]) and "stands in the process list" in typed.stderr


def test_token_with_a_line_end_is_stripped(tmp_path):
    with Stub(lambda _: ok([])) as stub:
        assert run("ListMetaservers", stub.address, token="token\n").returncode == DONE
        (file := tmp_path / "token").write_text("日")
        file.chmod(0o600)
        for words, token in ((["--token=a\nb"], ""), ([f"--token-file={file}"], ""), ([], "日")):
            ended = run("ListMetaservers", stub.address, *words, token=token)
            assert ended.returncode == USAGE and "holds no token" in ended.stderr
    assert stub.tokens == ["token"]


def test_missing_token_is_explained():
    """A list is requested without one, as metaservers may leave their lists open."""
    change = run("SwapRoles", "127.0.0.1:1", "--yes", token=None, brokerGroup="g1")
    assert change.returncode == USAGE and "needs a token" in change.stderr
    with Stub(lambda _: {"status": -1, "message": "the API token is missing"}) as stub:
        listing = run("ListBrokers", stub.address, token=None)
    assert listing.returncode == REFUSED
    assert listing.stderr.startswith("tools.sh: the API token is missing; a token comes from QMQ_TOKEN, ")


DB = {"host": "db1", "port": 3306, "username": "qmq"}


def test_password_comes_from_file_stdin_or_prompt(tmp_path):
    (file := tmp_path / "password").write_text("pass word\n")
    file.chmod(0o600)
    with Stub(planned({"result": "register success"})) as stub:
        run("AddDb", stub.address, "--yes", password_file=file, **DB)
        run("AddDb", stub.address, "--yes", password_file="-", stdin="pass word\n", **DB)
        asked = run_at_terminal("AddDb", stub.address, "--yes", answer="pass word", **DB)
    assert [words["password"] for words in stub.asked] == ["pass word"] * 6 and stub.done == ["AddDb"] * 3
    assert asked.returncode == DONE and "password: " in asked.shown and "pass word" not in asked.shown + asked.stdout


def test_password_is_shown_nowhere():
    """Weakness 29: QMQ takes passwords on the command line only."""
    with Stub(planned({"result": "register success"})) as stub:
        ended = run("AddDb", stub.address, "--yes", password_file="-", stdin="hidden", **DB)
        typed = run("AddDb", stub.address, "--yes", "--password=hidden", **DB)
        missing = run("AddDb", stub.address, "--yes", **DB)
    assert "hidden" not in ended.stdout + ended.stderr and "stands in the process list" in typed.stderr
    assert missing.returncode == USAGE and "--password-file" in missing.stderr
    both = run("AddDb", "127.0.0.1:1", "--yes", token=None, token_file="-", password_file="-", stdin="x", **DB)
    assert both.returncode == USAGE and "one thing only" in both.stderr


# Files.


DUMP = {"format": 1, "tables": {"subject_route": [{"subject": "日本"}], "broker": []}}


def test_backup_is_written_whole_for_its_owner_alone(tmp_path):
    (old := tmp_path / "backup.json").write_text("old")
    old.chmod(0o644)
    with Stub(lambda _: {"status": -3, "message": "the database does not answer", "data": None}) as stub:
        assert run("Backup", stub.address, file=old).returncode == UNREACHABLE
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["backup.json"]
    with Stub(lambda _: ok(DUMP)) as stub:
        ended = run("Backup", stub.address, file="backup.json", cwd=tmp_path)
        assert json.loads(run("Backup", stub.address, file="-").stdout) == DUMP
    assert ended.returncode == DONE and "B; 1 subject_route\n" in ended.stdout
    assert json.loads(old.read_text()) == DUMP and stat.S_IMODE(old.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["backup.json"]


def test_unwritable_path_fails_before_any_request(tmp_path):
    with Stub(planned({})) as stub:
        ended = run("AddToken", stub.address, "--yes", name="a", role="viewer", out=tmp_path / "no" / "token")
        directory = run("Backup", stub.address, file=tmp_path)
    assert (ended.returncode, directory.returncode, stub.done) == (USAGE, USAGE, [])
    assert "nothing was changed" in ended.stderr


def test_new_token_is_written_to_its_file_only(tmp_path):
    made = {"id": "i1", "name": "shop", "role": "client", "token": "qmq_i1_secret"}
    with Stub(planned(made)) as stub:
        kept = run("AddToken", stub.address, "--yes", name="shop", role="client", out=tmp_path / "token")
        as_json = run("AddToken", stub.address, "--yes", "--json", name="shop", role="client", out=tmp_path / "token")
        shown = run("AddToken", stub.address, "--yes", name="shop", role="client")
    assert (tmp_path / "token").read_text() == "qmq_i1_secret\n"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert "secret" not in kept.stdout + kept.stderr + as_json.stdout + as_json.stderr
    assert shown.stdout.splitlines()[-1] == "qmq_i1_secret"


def test_restore_sends_the_document_of_its_file(tmp_path):
    (file := tmp_path / "backup.json").write_text(json.dumps(DUMP, indent=4))
    with Stub(planned({"restored": {}})) as stub:
        assert run("Restore", stub.address, "--yes", "--force", file=file).returncode == DONE
        assert run("Restore", stub.address, "--yes", file="-", stdin=json.dumps(DUMP)).returncode == DONE
        broken = run("Restore", stub.address, "--yes", file="-", stdin="{")
    assert [json.loads(words["backup"]) for words in stub.asked] == [DUMP] * 4
    assert [words.get("force") for words in stub.asked] == ["true", "true", None, None]
    assert broken.returncode == USAGE and "cannot be read" in broken.stderr


# The script.


def test_arguments_arrive_as_they_were_typed(tmp_path):
    """Weakness 38: QMQ's script splits a value at its blanks, and turns a lone `*` into names of files."""
    (tmp_path / "some file").touch()
    with Stub(lambda _: ok([])) as stub:
        for who in ("two  words", "*", 'it\'s "quoted" $HOME `id` \\n', ""):
            ended = run("AuditTrail", stub.address, "--who", who, cwd=tmp_path)
            assert ended.returncode in (DONE, REFUSED), ended.stderr
    assert [words.get("who", "") for words in stub.asked] == ["two  words", "*", 'it\'s "quoted" $HOME `id` \\n', ""]


def test_script_runs_from_any_directory_and_link(tmp_path):
    """Weakness 38: QMQ's script empties JAVA_HOME, although the environment sets it."""
    (link := tmp_path / "my tools").symlink_to(TOOLS)
    with Stub(lambda _: ok([])) as stub:
        ended = subprocess.run(
            [link, "ListBrokers", f"--metaserver={stub.address}"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert ended.returncode == DONE, ended.stderr
    old = subprocess.run(
        [TOOLS, "--help"], env=environment(QMQ_PYTHON=shutil.which("false")), capture_output=True, text=True
    )
    assert old.returncode == USAGE and "set QMQ_PYTHON" in old.stderr


def test_every_command_is_in_the_guide():
    guide = (Path(TOOLS).parents[1] / "docs" / "tools.md").read_text()
    listed = subprocess.run([TOOLS, "--help"], env=environment(), capture_output=True, text=True).stdout
    commands = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2].isupper()]
    assert len(commands) > 30 and [name for name in commands if f"`{name}`" not in guide] == []


def test_interrupt_at_start_shows_no_traceback(tmp_path):
    (tmp_path / "difflib.py").write_text("raise KeyboardInterrupt")  # as if Ctrl-C came during this import
    ended = subprocess.run(
        [sys.executable, "-m", "qmq.tools", "ListBrokers"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:."},
    )
    assert (ended.returncode, ended.stderr) == (1, "tools.sh: interrupted before anything was changed\n")
