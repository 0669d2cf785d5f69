"""Events over SSE: order, resume, beats, bounds, and clients that leave."""

import asyncio
import json

import pytest

from web import live, streams


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.02)


async def blocks(answer, count, kind=None):
    """The next `count` blocks with this `event:`, each as its fields."""
    found = []
    async with asyncio.timeout(5):
        while len(found) < count:
            block = (await answer.content.readuntil(b"\n\n")).decode().strip()
            fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith((":", "retry")))
            if fields and fields.get("event") == kind:
                found.append(fields)
    return found


async def read(answer, count):
    """The next `count` log events: (id, data)."""
    return [(int(block["id"]), json.loads(block["data"])) for block in await blocks(answer, count)]


async def statuses(answer, count):
    found = await blocks(answer, count, "status")
    assert all("id" not in block for block in found)  # what is no log event must not move Last-Event-ID
    return [json.loads(block["data"]) for block in found]


async def test_events_as_they_happen(client, view):
    async with client.get("/api/v1/events/stream") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        view.say("info", "step", "one")
        view.say("info", "step", "two")
        assert [(id, event["message"]) for id, event in await read(answer, 2)] == [(8, "one"), (9, "two")]


async def test_resume_after_the_last_event_seen(client):
    async with client.get("/api/v1/events/stream", params={"after": 2}) as answer:
        assert [id for id, _ in await read(answer, 2)] == [3, 4]
    # the browser opens the same address again; what it has seen is newer
    async with client.get("/api/v1/events/stream", params={"after": 2}, headers={"Last-Event-ID": "4"}) as answer:
        assert [id for id, _ in await read(answer, 3)] == [5, 6, 7]


@pytest.mark.parametrize("seen", ["x", "-1", "9" * 30, "1 OR 1=1"])
async def test_a_last_event_id_that_is_none(client, seen):
    async with client.get("/api/v1/events/stream", headers={"Last-Event-ID": seen}) as refused:
        assert refused.status == 400
        assert (await refused.json())["error"].startswith("Last-Event-ID: ")


async def test_text_cannot_make_events_of_its_own(client, view):
    view.say("info", "peer", "a\n\nid: 99\ndata: {}\r\n\u2028<script>\ud800")
    async with client.get("/api/v1/events/stream", params={"after": 7}) as answer:
        (found,) = await read(answer, 1)
    assert found == (8, view.event_rows[-1])


async def test_beats_keep_a_quiet_stream_alive(client, monkeypatch):
    monkeypatch.setattr(streams, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(live, "LOOK_SECONDS", 60)
    async with client.get("/api/v1/events/stream") as answer:
        assert await answer.content.readuntil(b"\n\n") == b"retry: 2000\n\n"
        assert (await answer.content.readuntil(b"\n\n")).startswith(b"event: status\n")
        assert await answer.content.readuntil(b"\n\n") == b": beat\n\n"
        assert await answer.content.readuntil(b"\n\n") == b": beat\n\n"


async def test_the_status_at_once_and_then_when_it_changed(client, view, monkeypatch):
    monkeypatch.setattr(live, "STATUS_SECONDS", 0.05)
    async with client.get("/api/v1/events/stream") as answer:
        assert await statuses(answer, 1) == [view.state]
        view.state["uptime"] += 1  # a clock alone is no change
        await asyncio.sleep(0.2)
        view.state["step"] = 43
        (changed,) = await statuses(answer, 1)
        assert (changed["step"], changed["uptime"]) == (43, view.state["uptime"])


async def test_a_status_in_which_nothing_changes_is_told_now_and_then(client, view, monkeypatch):
    monkeypatch.setattr(live, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr(live, "STILL_SECONDS", 0.05)
    async with client.get("/api/v1/events/stream") as answer:
        assert await statuses(answer, 3) == [view.state] * 3


async def test_all_streams_share_one_look_at_the_status(client, view, monkeypatch):
    asked = []
    monkeypatch.setattr(view, "status", lambda: asked.append(1) or dict(view.state))
    opened = [await client.get("/api/v1/events/stream") for _ in range(8)]
    for answer in opened:
        assert (await statuses(answer, 1))[0]["step"] == 42
    assert len(asked) == 1
    for answer in opened:
        answer.close()


async def test_events_that_are_gone_are_said_to_be(client, view):
    del view.event_rows[:4]
    async with client.get("/api/v1/events/stream", headers={"Last-Event-ID": "2"}) as answer:
        (gap,) = await blocks(answer, 1, "gap")
        assert (gap["id"], json.loads(gap["data"])) == ("7", {"oldest": 5, "newest": 7})
        view.say("info", "step", "after the gap")
        assert [(id, event["message"]) for id, event in await read(answer, 1)] == [(8, "after the gap")]
    async with client.get("/api/v1/events/stream", headers={"Last-Event-ID": "4"}) as answer:
        assert [id for id, _ in await read(answer, 4)] == [5, 6, 7, 8]  # nothing is missing after 4


async def test_ids_of_a_database_that_is_gone_are_a_gap_too(client, view):
    async with client.get("/api/v1/events/stream", params={"after": 900}) as answer:
        (gap,) = await blocks(answer, 1, "gap")
        assert json.loads(gap["data"]) == {"oldest": 1, "newest": 7}
    view.event_rows = []
    async with client.get("/api/v1/events/stream") as answer:  # and a node without any yet has none
        await statuses(answer, 1)
        view.say("info", "start", "first")
        assert [id for id, _ in await read(answer, 1)] == [1]


async def test_a_long_way_behind_is_caught_up_with(client, view):
    for number in range(250):
        view.say("info", "step", str(number))
    async with client.get("/api/v1/events/stream", params={"after": 0}) as answer:
        assert [id for id, _ in await read(answer, 257)] == list(range(1, 258))


async def test_streams_are_bounded_and_leaving_makes_room(client, server, monkeypatch):
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    first, second = [await client.get("/api/v1/events/stream") for _ in range(2)]
    async with client.get("/api/v1/events/stream") as refused:
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "10"
    first.close()
    async with asyncio.timeout(2):
        while len(server.streams) > 1:  # noqa: ASYNC110 - the server sees a client leave when it will
            await asyncio.sleep(0.01)
    async with client.get("/api/v1/events/stream") as third:
        assert third.status == 200
    second.close()


async def test_a_view_that_fails_ends_the_stream_and_is_logged(client, view, caplog):
    def broken(after, limit):
        raise RuntimeError("database is gone")

    view.events = broken
    async with client.get("/api/v1/events/stream", params={"after": 0}) as answer:
        assert len(await statuses(answer, 1)) == 1
        assert await answer.content.read() == b""
    assert "database is gone" in caplog.text
    async with client.get("/api/v1/status") as status:
        assert status.status == 200
