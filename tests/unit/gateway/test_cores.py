"""Shell. Bounds of kept outcomes and deliveries; settings; tokens checked at the metaserver."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from qmq.errors import AccessError, MissingRight, NotServed, RolledBack, SubjectFull
from qmq.gateway.deliveries import Decision, Deliveries, RepeatDiffers, Repeats
from qmq.gateway.guard import CLIENT, VIEWER, Access
from qmq.gateway.main import main
from qmq.gateway.outcomes import Code, code_of, worst
from qmq.gateway.settings import GatewaySettings
from qmq.settings import InvalidSettings


def test_repeats_are_bounded_by_time_and_number():
    repeats = Repeats(keep_s=10, keys_max=2)
    for number in range(3):
        repeats.keep(("s", f"k{number}", 0), b"f", number, now_s=number)
    assert [repeats.find(("s", f"k{number}", 0), b"f", now_s=10.5) for number in range(3)] == [None, 1, 2]
    assert repeats.find(("s", "k1", 0), b"f", now_s=11) is None
    with pytest.raises(RepeatDiffers):
        repeats.find(("s", "k2", 0), b"other", now_s=11)


def test_decided_handles_are_bounded():
    deliveries = Deliveries("s", remembered_max=2)
    handles = [deliveries.add(number, until_s=60) for number in range(3)]
    for handle in handles:
        deliveries.decide(handle, Decision.ACK)
        deliveries.stored(handle)
    found = [deliveries.find(handle) for handle in handles]
    assert found[0] is None and all(delivery.message is None for delivery in found[1:])


def test_leases_end_in_any_order():
    deliveries = Deliveries("s")
    late, early = deliveries.add("late", until_s=60), deliveries.add("early", until_s=5)
    deliveries.renew(late, until_s=20)
    sooner = deliveries.add("sooner", until_s=90)
    assert deliveries.expired(4) == []
    deliveries.renew(sooner, until_s=4.5)
    assert deliveries.expired(4.5) == ["sooner"]
    assert (deliveries.expired(4.9), deliveries.expired(5), deliveries.expired(6)) == ([], ["early"], [])
    assert deliveries.find(early) is None and deliveries.expired(20) == ["late"] and len(deliveries) == 0


@pytest.mark.parametrize(
    "codes, expected",
    [
        ([], None),
        ([Code.INVALID, Code.TOO_LARGE], Code.INVALID),
        ([Code.INVALID, Code.NOT_SERVED], Code.NOT_SERVED),
        ([Code.NOT_SERVED, Code.GONE, Code.UNKNOWN], Code.UNKNOWN),
    ],
)
def test_status_of_several_outcomes_is_the_worst(codes, expected):
    assert worst(codes) == expected


def test_class_of_an_error_determines_its_code():
    kinds = (MissingRight("x"), AccessError("x"), SubjectFull("x"), NotServed("x"), RolledBack("x"))
    expected = [Code.MISSING_RIGHT, Code.UNAUTHORIZED, Code.LIMIT, Code.NOT_SERVED, Code.NOT_SERVED]
    assert [code_of(error) for error in kinds] == expected


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"lease_s": 100, "lease_s_max": 10}, "lease_s_max"),
        ({"cors_origins": ("shop.example",)}, "https://shop.example"),
        ({"metaserver": ""}, "metaserver="),
    ],
)
def test_wrong_settings_name_the_remedy(wrong, text):
    with pytest.raises(InvalidSettings, match=text):
        GatewaySettings(**{"metaserver": "http://mq1:8080"} | wrong)


def test_wrong_file_ends_the_process_with_2(tmp_path, capsys):
    (tmp_path / "gateway.toml").write_text('metaserver = "http://mq1:8080"\nlease = 5\n')
    assert main(["--config", str(tmp_path / "gateway.toml")]) == 2
    assert "lease: unknown setting; known are metaserver, app" in capsys.readouterr().err


@asynccontextmanager
async def metaserver(answers, body=b'{"error": {"message": "role viewer"}}'):
    """A metaserver that gives each request the next status; the last one stays."""
    asked = []

    async def answer(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        status = answers.pop(0) if len(answers) > 1 else answers[0]
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Access(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), asked


@pytest.mark.parametrize(
    "status, address, raised",
    [
        (200, CLIENT, None),
        (400, CLIENT, None),
        (401, CLIENT, AccessError),
        (403, CLIENT, MissingRight),
        (503, CLIENT, NotServed),
        (200, VIEWER, None),
        (400, VIEWER, NotServed),
        (404, VIEWER, NotServed),
    ],
)
async def test_metaserver_decides_on_a_token(status, address, raised):
    async with metaserver([status]) as (access, asked):
        if raised is None:
            await access.check("token", address)
        else:
            with pytest.raises(raised) as caught:
                await access.check("token", address)
            assert type(caught.value) is raised
    assert asked == [address]


async def test_one_check_serves_many_requests():
    async with metaserver([400]) as (access, asked):
        await asyncio.gather(*(access.check("token") for _ in range(50)))
        await access.check("token")
    assert len(asked) == 1


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_code_of_a_route_refuses_a_subject(is_allowed):
    refusal = {
        "refused": "token 'shop' may not produce to 'order'",
        "refusedCode": "" if is_allowed else "MISSING_RIGHT",
    }
    body = json.dumps({"routes": [refusal]}).encode()
    async with metaserver([200], body) as (access, asked):
        if is_allowed:
            await access.check_subject("token", "order", produces=True)
        else:
            with pytest.raises(MissingRight, match="may not produce"):
                await access.check_subject("token", "order", produces=True)
    assert asked == ["/meta/routes?app=gateway&clientId=gateway-access&subject=order&produces=true"]


async def test_accepted_token_outlives_a_silent_metaserver(monkeypatch):
    monkeypatch.setattr("qmq.gateway.guard.VALID_S", 0.0)
    async with metaserver([400, 503, 401, 503]) as (access, asked):
        await access.check("token")
        await access.check("token")
        with pytest.raises(AccessError):
            await access.check("token")
        with pytest.raises(NotServed):
            await access.check("token")
    assert len(asked) == 4


async def test_unanswered_check_is_repeated():
    async with metaserver([503, 400]) as (access, asked):
        with pytest.raises(NotServed):
            await access.check("token")
        await access.check("token")


@pytest.mark.parametrize("token", ["", "a\nb", "ü", "x" * 5000])
async def test_text_that_is_no_token_is_not_asked(token):
    with pytest.raises(AccessError):
        await Access("http://127.0.0.1:1").check(token)
