"""Events over SSE: order, resume, beats, bounds, and clients that leave."""

import asyncio
import json

import pytest

from web import streams


async def read(answer, count):
    """The next `count` events: (id, data)."""
    found = []
    async with asyncio.timeout(3):
        while len(found) < count:
            block = (await answer.content.readuntil(b"\n\n")).decode()
            if block.startswith("id: "):
                first, second = block.strip().split("\n")
                found.append((int(first.removeprefix("id: ")), json.loads(second.removeprefix("data: "))))
    return found


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
    async with client.get("/api/v1/events/stream") as answer:
        assert await answer.content.readuntil(b"\n\n") == b"retry: 2000\n\n"
        assert await answer.content.readuntil(b"\n\n") == b": beat\n\n"
        assert await answer.content.readuntil(b"\n\n") == b": beat\n\n"


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
    async def broken(after):
        yield view.event_rows[0]
        raise RuntimeError("database is gone")

    view.follow = broken
    async with client.get("/api/v1/events/stream") as answer:
        assert [id for id, _ in await read(answer, 1)] == [1]
        assert await answer.content.read() == b""
    assert "database is gone" in caplog.text
    async with client.get("/api/v1/status") as status:
        assert status.status == 200
