"""Readiness in every state, and the text format of metrics."""

import re

import pytest
from aiohttp.test_utils import make_mocked_request

from web.auth import Auth
from web.guard import Guard
from web.handlers import Handlers
from web.probes import number, prometheus
from web.streams import Streams

TOKEN = "a-token-for-tests-0123456789"


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({}, 200, None),
        ({"last_step_age": 600.0}, 200, None),
        (
            {"last_step_age": 601.0},
            503,
            "no step for 601 s, the deadline is 600 s; training, stage rollout for 3 s",
        ),
        ({"state": "PAUSED", "last_step_age": 9e9, "held_by": "quiet_hours"}, 200, None),
        ({"state": "PAUSED", "held_by": "disk", "reason": "5 MB are free"}, 503, "training is held: 5 MB are free"),
        ({"state": "STOPPING", "last_step_age": 9e9}, 200, None),
        ({"state": "WAITING", "last_step_age": 700.0}, 503, "no step for 700 s"),
        ({"state": "STARTING", "last_step_age": None, "uptime": 599.0}, 200, None),
        ({"state": "STARTING", "last_step_age": None, "uptime": 700.0}, 503, "no step for 700 s"),
        ({"state": "FAILED", "reason": "no space left", "last_step_age": 1.0}, 503, "failed: no space left"),
    ],
)
async def test_readyz(anyone, view, change, status, reason):
    view.state |= change
    async with anyone.get("/readyz") as answer:
        assert answer.status == status
        verdict = await answer.json()
    assert verdict["ready"] is (reason is None)
    assert verdict["state"] == view.state["state"]
    assert len(verdict["reasons"]) == (reason is not None)
    assert all(given.startswith(reason) for given in verdict["reasons"])


async def test_healthz_says_only_that_it_lives(anyone, view):
    view.state |= {"state": "FAILED"}
    async with anyone.get("/healthz") as answer:
        assert (answer.status, await answer.json()) == (200, {"alive": True})


async def test_metrics(anyone):
    async with anyone.get("/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await answer.text()
    assert text.splitlines()[:4] == [
        "# HELP shoal_groups_rejected_total Announcements, groups and answers of peers refused, by reason",
        "# TYPE shoal_groups_rejected_total counter",
        'shoal_groups_rejected_total{reason="stale"} 2',
        'shoal_groups_rejected_total{reason="reward_mismatch"} 3',
    ]
    assert "# TYPE shoal_reward gauge\nshoal_reward 0.4375\n" in text
    assert text.endswith("\n")
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"\n]*"(,[a-z]+="[^"\n]*")*\})? (NaN|[+-]Inf|-?[0-9.e+-]+)')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in text.splitlines())


async def test_metrics_have_what_the_exchange_lost(anyone, view):
    view.state["groups"] |= {"dropped_outbox": 3, "put_off": 0}
    async with anyone.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    assert [line for line in lines if "exchange_trouble" in line][1:] == [
        "# TYPE shoal_exchange_trouble_total counter",
        'shoal_exchange_trouble_total{reason="dropped_outbox"} 3',
        'shoal_exchange_trouble_total{reason="put_off"} 0',
    ]


def test_a_metric_without_a_help_of_its_own_is_named():
    assert prometheus({"shoal_new_thing": 1.0}).splitlines()[0] == "# HELP shoal_new_thing new thing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (0.1, "0.1"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Inf"),
        (float("inf"), "+Inf"),
        (1e300, "1e+300"),
    ],
)
def test_numbers_as_prometheus_reads_them(value, text):
    assert number(value) == text


class Elsewhere:
    """A transport whose other end is on another machine."""

    def get_extra_info(self, name, default=None):
        return ("192.0.2.7", 5555) if name == "peername" else default


async def test_beyond_loopback_probes_say_less(view, clock):
    auth = Auth(TOKEN, clock)
    handlers = Handlers(view, auth, Guard(auth, "0.0.0.0", (), str), Streams())
    view.state |= {"state": "FAILED", "reason": "/home/user/secret"}

    def request(path, **headers):
        made = make_mocked_request("GET", path, headers={"Host": "localhost", **headers}, transport=Elsewhere())
        return made.clone(remote="192.0.2.7")

    bare = await handlers.readyz(request("/readyz"))
    assert (bare.status, bare.text) == (503, '{"ready":false,"state":"FAILED"}')
    told = await handlers.readyz(request("/readyz", Authorization=f"Bearer {TOKEN}"))
    assert "/home/user/secret" in told.text
    with pytest.raises(Exception, match="metrics beyond loopback need the token"):
        await handlers.metrics(request("/metrics"))
    assert (await handlers.metrics(request("/metrics", Authorization=f"Bearer {TOKEN}"))).status == 200
