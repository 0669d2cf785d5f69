"""Every endpoint: what it answers, and what it refuses."""

import json
import math
from xml.etree import ElementTree

import pytest
import segno

from web.queries import MAX_BODY
from web.view import NothingToHold, SettingOverridden, SettingRefused


async def get(client, path, status=200):
    async with client.get(path) as answer:
        assert answer.status == status, await answer.text()
        assert answer.content_type == "application/json"
        return await answer.json()


async def test_status(client, view):
    assert await get(client, "/api/v1/status") == view.state


async def test_steps_in_pages(client):
    first = await get(client, "/api/v1/steps?limit=40")
    rest = await get(client, f"/api/v1/steps?after={first[-1]['step']}")
    assert [row["step"] for row in first + rest] == list(range(1, 43))


async def test_evaluations_begin_with_the_initial_models(client):
    found = await get(client, "/api/v1/evaluations?limit=2")
    assert [(row["step"], row["mean"]) for row in found] == [(0, 0.17), (10, 0.385)]
    assert [row["step"] for row in await get(client, "/api/v1/evaluations?after=10")] == [20, 30, 40]
    assert await get(client, "/api/v1/evaluations?after=40") == []


async def test_groups_in_pages(client):
    first = await get(client, "/api/v1/groups?limit=30")
    rest = await get(client, f"/api/v1/groups?before={first[-1]['row']}")
    assert [row["row"] for row in first + rest] == list(range(40, 0, -1))


async def test_one_group_by_a_prefix(client, view):
    row = view.group_rows[3]
    group = await get(client, f"/api/v1/groups/{row['id'][:10].upper()}")
    assert group["id"] == row["id"]
    assert len(group["completions"]) == 8
    assert group["prompt"][0]["role"] == "system"


@pytest.mark.parametrize("given", ["zzzz", "abc", "a" * 65, "..%2f..%2fetc", "%00%00%00%00", "<script>"])
async def test_a_group_id_that_is_none(client, given):
    refused = await get(client, f"/api/v1/groups/{given}", 400)
    assert "not 4 to 64 hex digits" in refused["error"]
    assert "shoal groups" in refused["fix"]


async def test_a_group_that_is_not_there(client):
    assert await get(client, "/api/v1/groups/ffffffffffff", 404) == {
        "error": "no group ffffffffffff",
        "fix": "list them: shoal groups",
    }


async def test_groups_by_what_they_are(client, view):
    found = await get(client, "/api/v1/groups?origin=foreign&environment=chain_sum&limit=500")
    assert {(row["origin"], row["environment"]) for row in found} == {("foreign", "chain_sum")}
    assert len(found) == sum(
        row["origin"] == "foreign" and row["environment"] == "chain_sum" for row in view.group_rows
    )
    producer = found[0]["producer"]
    narrowed = await get(client, f"/api/v1/groups?origin=foreign&producer={producer}&verdict=admitted&before=30")
    assert all(row["producer"] == producer and row["verdict"] == "admitted" and row["row"] < 30 for row in narrowed)


async def test_series(client, view):
    view.history.columns["loss"][:] = math.nan
    found = await get(client, "/api/v1/series?points=50&from=3&to=5")
    assert view.calls == [("series", "50", "3", "5")]
    assert (found["first"], found["last"]) == (1, 42)
    assert (found["step"], found["loss"]) == ([3, 4, 5], [None] * 3)
    await get(client, "/api/v1/series")
    assert view.calls[1] == ("series", "400", "None", "None")


async def test_peers(client, view):
    assert await get(client, "/api/v1/peers") == {"total": 3, "connected": 2, "peers": view.peer_rows}
    view.peer_rows[1]["model"] = "Qwen3-0.6B"
    view.peer_rows[0]["model"] = view.peer_rows[2]["model"] = "SmolLM2-135M-Instruct"
    found = await get(client, "/api/v1/peers?offset=1&limit=1&sort=peer_id&descending=0&search=SmolLM2")
    second = max((view.peer_rows[0], view.peer_rows[2]), key=lambda row: row["peer_id"])
    assert (found["total"], found["peers"]) == (2, [second])
    assert view.calls == [("peers", "last_seen", "True", ""), ("peers", "peer_id", "False", "SmolLM2")]
    assert await get(client, "/api/v1/peers/graph") == view.peer_graph()


async def test_swarm_config(client, view):
    found = await get(client, "/api/v1/swarm")
    assert (found["invite"], found["epoch"]["ends_in"]) == (view.swarm_says["invite"], 600.0)
    assert (await get(client, "/api/v1/config"))["web.port"]["value"] == 8421


async def test_the_invite_as_a_picture(client, view):
    view.swarm_says["invite"] = "shoal:x"
    async with client.get("/api/v1/swarm/invite.svg") as answer:
        assert (answer.status, answer.content_type) == (200, "image/svg+xml")
        assert answer.headers["Cache-Control"] == "no-store"
        first = ElementTree.fromstring(await answer.text())
    assert first.tag == "{http://www.w3.org/2000/svg}svg"
    modules = segno.make_qr("shoal:x", error="l", boost_error=False).symbol_size(4, 4)
    assert (first.get("width"), first.get("height")) == tuple(map(str, modules))
    view.swarm_says["invite"] = "shoal:" + "y" * 4000
    assert "too long" in (await get(client, "/api/v1/swarm/invite.svg", 404))["error"]
    view.swarm_says.clear()
    assert (await get(client, "/api/v1/swarm/invite.svg", 404))["error"] == "this node has no invite yet"


async def test_events_newest_and_after(client):
    assert [event["id"] for event in await get(client, "/api/v1/events?limit=2")] == [6, 7]
    assert [event["id"] for event in await get(client, "/api/v1/events?after=3&limit=2")] == [4, 5]
    assert await get(client, "/api/v1/events?after=7") == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("steps?limit=0", "limit: '0' is not an integer from 1 to 10000"),
        ("steps?limit=10001", "limit: '10001' is not an integer from 1 to 10000"),
        ("steps?limit=-1", "limit: '-1' is not"),
        ("steps?limit=1e2", "limit: '1e2' is not"),
        ("steps?limit=%D9%A3", "limit: '٣' is not"),
        ("steps?after=", "after: '' is not"),
        ("steps?after=9223372036854775808", "after: '9223372036854775808' is not"),
        ("steps?after=" + "9" * 5000, "after: '" + "9" * 40 + "' is not"),
        ("steps?limit=1&limit=2", "limit is given 2 times"),
        ("groups?limit=501", "limit: '501' is not an integer from 1 to 500"),
        ("groups?before=0", "before: '0' is not an integer from 1"),
        ("groups?after=1", "unknown query parameter 'after' for /api/v1/groups"),
        ("events?limit=501", "limit: '501' is not an integer from 1 to 500"),
        ("events?level=x", "unknown query parameter 'level'"),
        ("events/stream?after=x", "after: 'x' is not"),
        ("status?x=1", "unknown query parameter 'x'"),
        ("peers?x=1", "unknown query parameter 'x'"),
        ("peers?limit=501", "limit: '501' is not an integer from 1 to 500"),
        ("peers?offset=1000001", "offset: '1000001' is not an integer from 0 to 1000000"),
        ("peers?sort=name", "sort: 'name' is unknown"),
        ("peers?descending=yes", "descending: 'yes' is unknown"),
        ("peers?search=", "search: '' is not 1 to 128 characters of ["),
        ("peers?search=" + "x" * 129, "search: '" + "x" * 40 + "' is not 1 to 128 characters of ["),
        ("peers?search=a%00b", "search: 'a\\x00b' is not"),
        ("groups?origin=mine", "origin: 'mine' is unknown"),
        ("groups?environment=" + "x" * 65, "environment: '" + "x" * 40 + "' is not 1 to 64 characters"),
        ("groups?producer=a%0A", "producer: 'a\\n' is not 1 to 128 characters"),
        ("groups?verdict=good", "verdict: 'good' is unknown"),
        ("groups?environment=a&environment=b", "environment is given 2 times"),
        ("series?points=49", "points: '49' is not an integer from 50 to 2000"),
        ("series?from=-1", "from: '-1' is not"),
    ],
)
async def test_queries_that_make_no_sense(client, query, error):
    refused = await get(client, f"/api/v1/{query}", 400)
    assert refused["error"].startswith(error) or error in refused["error"]
    assert refused["fix"]


async def test_unknown_paths_and_methods(client):
    assert (await get(client, "/api/v1/nothing", 404))["error"] == "Not Found: /api/v1/nothing"
    async with client.delete("/api/v1/status") as refused:
        assert refused.status == 405
        assert refused.headers["Allow"] == "GET,HEAD"
    assert (await get(client, "/static/..%2fserver.py", 404))["fix"] == "open /"
    assert (await get(client, "/static/missing.js", 404))["error"] == "no file 'missing.js'"


async def test_pause_resume_stop(client, view):
    async with client.post("/api/v1/pause", json={"reason": "a game"}) as done:
        assert done.status == 202
        assert (await done.json())["state"] == "PAUSED"
    async with client.post("/api/v1/resume") as done:
        assert (await done.json())["state"] == "TRAINING"
    async with client.post("/api/v1/stop", json={}) as done:
        assert done.status == 202
    assert view.calls == [("pause", "a game"), ("resume",), ("stop",)]


async def test_what_trains_nothing_says_so_when_it_is_to_pause(client, view, monkeypatch):
    def refuse(*asked):
        raise NothingToHold("it trains nothing ; pause a node")

    monkeypatch.setattr(view, "pause", refuse)
    monkeypatch.setattr(view, "resume", refuse)
    for what in ("pause", "resume"):
        async with client.post(f"/api/v1/{what}", json={}) as refused:
            assert refused.status == 409
            assert await refused.json() == {"error": "it trains nothing", "fix": "pause a node"}


async def change(client, content, status):
    headers = {"Content-Type": "application/json"}
    async with client.post("/api/v1/config", data=content, headers=headers) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_change_settings(client, view):
    many = {key: entry["value"] for key, entry in view.config().items() if entry["source"] == "default"}
    assert len(many) > 80
    for asked in ({"swarm.own_groups": 2}, many):
        done = await change(client, json.dumps(asked), 200)
        assert sorted(done["applied"] + done["restart"]) == sorted(asked)
        assert done["config"]["swarm.own_groups"]["value"] == asked["swarm.own_groups"]
    assert view.calls == [("change", "{'swarm.own_groups': 2}"), ("change", str(many))]


@pytest.mark.parametrize(
    ("refused", "status"), [(SettingRefused("a = 1 is odd ; set it to 2"), 400), (SettingOverridden("by a flag"), 409)]
)
async def test_a_change_that_is_refused(client, view, refused, status):
    view.refuses = refused
    what, _, fix = str(refused).partition(" ; ")
    assert await change(client, b'{"a.b": 1}', status) == {"error": what, "fix": fix}


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"[]", b"3", b'"x"', b"null", b'{"a.b": 1'])
async def test_a_change_of_nothing_or_of_no_object(client, view, content):
    assert (await change(client, content, 400))["fix"]
    assert view.calls == []


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[" * 9000, "application/json", 400),
        (b'{"reason": 3}', "application/json", 400),
        (b'{"reason": "a\\nb"}', "application/json", 400),
        (b'{"reason": "%s"}' % (b"x" * 201), "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"reason=x", "application/x-www-form-urlencoded", 415),
        (b"x" * (MAX_BODY + 1), "application/json", 413),
    ],
)
async def test_bodies_that_are_refused(client, view, content, kind, status):
    async with client.post("/api/v1/pause", data=content, headers={"Content-Type": kind}) as refused:
        assert refused.status == status
        assert set(await refused.json()) == {"error", "fix"}
    assert view.calls == []


@pytest.mark.parametrize(
    ("what", "fix"), [("pause", "it takes reason"), *((name, "it takes none") for name in ("resume", "stop", "login"))]
)
async def test_a_field_that_nobody_reads_is_refused(client, view, what, fix):
    async with client.post(f"/api/v1/{what}", json={"reasn": "a game"}) as refused:
        assert refused.status == 400
        assert await refused.json() == {"error": f"unknown field 'reasn' for /api/v1/{what}", "fix": fix}
    assert view.calls == []


async def test_a_body_without_a_length_is_capped_too(client, view):
    async def endless():
        for _ in range(MAX_BODY // 1024 + 2):
            yield b" " * 1024

    headers = {"Content-Type": "application/json"}
    async with client.post("/api/v1/pause", data=endless(), headers=headers) as refused:
        assert refused.status == 413
    assert view.calls == []


async def test_numbers_that_json_has_not(client, view):
    odd = {"step": 1, "loss": math.nan, "list": [math.inf, 1.5, {"x": -math.inf}], "text": "NaN"}
    view.state = odd
    assert await get(client, "/api/v1/status") == {
        "step": 1, "loss": None, "list": [None, 1.5, {"x": None}], "text": "NaN",
    }  # fmt: skip


HOSTILE = [
    "<script>alert(1)</script>",
    "</script><svg onload=x>",
    "\u202egnp.exe",
    "a\x00b\r\nX: y",
    "\ud800",
    "é" * 10**6,
]


@pytest.mark.parametrize("text", HOSTILE)
async def test_text_of_peers_arrives_as_it_was_and_as_json(client, view, text):
    view.peer_rows[0]["model"] = text
    view.group_rows[0]["detail"] = text
    async with client.get("/api/v1/peers") as answer:
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        raw = await answer.read()
        assert raw.isascii()
        assert (await answer.json())["peers"][0]["model"] == text
    assert (await get(client, f"/api/v1/groups/{view.group_rows[0]['id']}"))["detail"] == text
