"""A view with seeded, plausible data that tests change, and a server over it."""

import hashlib
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import pytest

from web.server import WebServer
from web.view import NotFound

TOKEN = "a-token-for-tests-0123456789"
NOW = 1_800_000_000.0
PORT = {
    "source": "default",
    "default": 8420,
    "help": "port; 0: a free one",
    "applies": "restart",
    "type": "int",
    "choices": None,
    "secret": False,
}
PEERS = (
    "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo",
    "12D3KooWLRPJAA5o6fUyrX2pLEg3sfDuNqDsLXQyiyHwuZQbqKT4",
    "12D3KooWGzh5bDDTvbrPBWhJmp1ZZjC7kF3yDLP2FsPyTk8WfLwQ",
)


class FixtureView:
    """A node at step 42 with two peers that are there and one that is gone."""

    def __init__(self, now: float = NOW, seed: int = 7) -> None:
        draw = random.Random(seed)
        self.now = now
        self.calls: list[tuple[str, ...]] = []
        self.refuses: Exception | None = None
        self.step_rows = [
            {
                "step": step,
                "at": now - (42 - step) * 13.0,
                "reward": round(0.19 + 0.26 * (1 - math.exp(-step / 18)) + draw.gauss(0, 0.035), 4),
                "own_groups": 4,
                "foreign_groups": 0 if step < 2 else 4,
                "tokens_per_second": draw.uniform(280, 330),
            }
            for step in range(1, 43)
        ]
        self.state: dict[str, Any] = {
            "state": "TRAINING",
            "reason": "step 43, sampling 4 tasks",
            "next": "",
            "step": 42,
            "reward": self.step_rows[-1]["reward"],
            "reward_start": self.step_rows[0]["reward"],
            "held_out": 0.39,
            "held_out_start": 0.17,
            "held_out_best": 0.39,
            "held_out_steps": [0, 40],
            "tokens_per_second": 312.4,
            "own_groups": 4,
            "foreign_groups": 4,
            "peers": 2,
            "peer_id": "12D3KooWBXZJNBTSdAdx5sW3ToYvB1ZqkMd7iYsJxLqkSMfLmT9a",
            "name": "lagoon",
            "swarm": "first-words",
            "stage": "rollouts",
            "stage_seconds": 3.2,
            "stages": {"prompts": 0.1, "rollouts": 3.2},
            "last_step_age": 4.1,
            "step_deadline": 600.0,
            "rss_mb": 2310.0,
            "peak_rss_mb": 2740.0,
            "memory": {"weights": 540_000_000, "gradients": 0, "optimizer": 1_080_000_000},
            "uptime": 640.0,
            "version": "0.1.0",
            "model": "SmolLM2-135M-Instruct",
            "groups": {
                "published": 168,
                "fetched": 201,
                "admitted": 187,
                "rejected": {"uninformative": 9, "reward_mismatch": 3, "stale": 2},
                "trained_foreign": 164,
            },
        }
        verdicts = [("admitted", "")] * 5 + [
            ("uninformative", "all 8 rewards are equal"),
            ("reward_mismatch", "completion 3 claims 1.00, scored here 0.01"),
        ]
        tasks = ("letter_counting", "chain_sum", "spell_backward", "word_sorting")
        self.group_rows: list[dict[str, Any]] = []
        for row in range(40, 0, -1):
            own = row % 2 == 0
            verdict, detail = ("admitted", "") if own else draw.choice(verdicts)
            rewards = (
                [0.01] * 8
                if verdict == "uninformative"
                else [draw.choice((0.01, 0.01, 0.2, 0.5, 1.0)) for _ in range(8)]
            )
            self.group_rows.append(
                {
                    "row": row,
                    "id": hashlib.sha256(b"group %d" % row).hexdigest(),
                    "origin": "own" if own else "foreign",
                    "producer": self.state["peer_id"] if own else PEERS[row % 3],
                    "environment": tasks[row % 4],
                    "epoch": 12,
                    "rewards": rewards,
                    "verdict": verdict,
                    "detail": detail,
                    "at": now - (40 - row) * 3.0,
                }
            )
        self.peer_rows: list[dict[str, Any]] = [
            {
                "peer_id": peer,
                "connected": i < 2,
                "model": ("SmolLM2-135M-Instruct", "Qwen3-0.6B", "SmolLM2-360M-Instruct")[i],
                "direction": ("outbound", "inbound", None)[i],
                "latency_ms": (11.5, None, None)[i],
                "reputation": (0.94, 0.88, 0.31)[i],
                "banned": False,
                "published": (96, 84, 21)[i],
                "admitted": (93, 80, 14)[i],
                "rejected": (
                    {"uninformative": 3},
                    {"uninformative": 2, "stale": 2},
                    {"reward_mismatch": 3, "uninformative": 4},
                )[i],
                "trained": (80, 70, 9)[i],
                "followed": (0, 65, 0)[i],
                "last_seen": now - (1, 3, 420)[i],
            }
            for i, peer in enumerate(PEERS)
        ]
        self.swarm_says: dict[str, Any] = {
            "name": "first-words",
            "digest": "ab" * 32,
            "epoch": {"number": 12, "ends_in": 300.0},
            "epochs": {"seconds": 600, "genesis": now - 7_500, "own_tasks": 4096, "shared_tasks": 64},
            "words": ["The swarm first-words practises chain_sum."],
            "private": False,
            "members": 4,
            "coordinator": None,
            "invite": "shoal:x",
        }
        self.event_rows: list[dict[str, Any]] = []
        for ago, level, kind, message in (
            (640, "info", "start", "loaded SmolLM2-135M-Instruct in bfloat16, 4 threads"),
            (632, "info", "peers", "connected to …WDWez9kSCVe2Xo"),
            (602, "info", "evaluate", "held-out score 0.17 over 64 tasks"),
            (428, "info", "peers", "connected to …QyiyHwuZQbqKT4"),
            (420, "warning", "share", "…SPyTk8WfLwQ claims rewards that scoring here does not find: reward_mismatch"),
            (31, "info", "evaluate", "held-out score 0.39 over 64 tasks, the best so far"),
            (4, "info", "step", "step 42: reward 0.43, 4 own and 4 foreign groups"),
        ):
            self.say(level, kind, message, at=now - ago)

    def say(self, level: str, kind: str, message: str, at: float | None = None) -> None:
        event = {"id": self.event_range()[1] + 1, "at": self.now if at is None else at, "level": level, "kind": kind}
        self.event_rows.append({**event, "message": message})

    def status(self) -> Mapping[str, Any]:
        return self.state

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        return [row for row in self.step_rows if row["step"] > after][:limit]

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        scores = [(0, 0.17), (10, 0.24), (20, 0.31), (30, 0.36), (40, 0.39)]
        rows = [{"step": step, "at": self.now, "mean": mean, "scores": {"chain_sum": mean}} for step, mean in scores]
        return [row for row in rows if row["step"] > after][:limit]

    def series(self, points: int, first: int | None, last: int | None) -> Mapping[str, Any]:
        self.calls.append(("series", str(points), str(first), str(last)))
        rows = [row for row in self.step_rows if (first or 0) <= row["step"] <= (last or 42)]
        rewards = [row["reward"] for row in rows]
        return {
            "first": 1,
            "last": 42,
            "width": 1,
            "step": [row["step"] for row in rows],
            **dict.fromkeys(("reward", "reward_low", "reward_high"), rewards),
            "loss": [math.nan] * len(rows),
            "environments": {"chain_sum": rewards},
            "evaluations": {"step": [0, 40], "mean": [0.17, 0.39], "scores": {"chain_sum": [0.17, 0.39]}},
        }

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
        rows = [row for row in self.group_rows if before is None or row["row"] < before]
        return [row for row in rows if all(row[name] == value for name, value in where.items())][:limit]

    async def group(self, group_id: str) -> Mapping[str, Any]:
        found = [row for row in self.group_rows if row["id"].startswith(group_id)]
        if len(found) != 1:
            raise NotFound(f"no group {group_id}")
        return {
            **found[0],
            "prompt": [
                {"role": "system", "content": "Answer with the answer alone."},
                {"role": "user", "content": 'How many times does the letter "e" appear in "the reef keeper"?'},
            ],
            "completions": [
                {
                    "text": f"{i}",
                    "finish": "stop",
                    "tokens": 2,
                    "claimed": reward,
                    "reward": reward,
                    "parts": {"parsed": 1.0},
                    "pieces": [{"text": f"{i}", "logprob": -0.5}, {"text": "<|im_end|>", "logprob": None}],
                }
                for i, reward in enumerate(found[0]["rewards"])
            ],
            "task": {"environment": found[0]["environment"], "version": "1", "seed": str(2**62), "index": 3},
            "shared": False,
            "siblings": [row for row in self.group_rows if row["environment"] == found[0]["environment"]][1:3],
        }

    def peers(self, offset: int, limit: int, *, sort: str, descending: bool, search: str) -> Mapping[str, Any]:
        self.calls.append(("peers", sort, str(descending), search))
        rows = [row for row in self.peer_rows if search in row["peer_id"] + row["model"]]
        return {"total": len(rows), "connected": 2, "peers": rows[offset : offset + limit]}

    def peer_graph(self) -> Mapping[str, Any]:
        me = self.state["peer_id"]
        kept = ("peer_id", "connected", "reputation", "model", "admitted")
        return {
            "nodes": [
                {"peer_id": me, "self": True},
                *({"self": False, **{name: row[name] for name in kept}} for row in self.peer_rows),
            ],
            "edges": [
                {"from": me, "to": PEERS[0], "kind": "connection", "weight": 1},
                {"from": PEERS[2], "to": me, "kind": "groups", "weight": 14},
            ],
        }

    def swarm(self) -> Mapping[str, Any]:
        return self.swarm_says

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Any]]:
        if after is None:
            return self.event_rows[-limit:]
        return [event for event in self.event_rows if event["id"] > after][:limit]

    def event_range(self) -> tuple[int, int]:
        return (self.event_rows[0]["id"], self.event_rows[-1]["id"]) if self.event_rows else (1, 0)

    def config(self) -> Mapping[str, Any]:
        return {"web.port": {**PORT, "value": 8420}}

    def change(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(("change", str(dict(values))))
        return {
            "applied": list(values),
            "restart": [],
            "config": {key: {**PORT, "value": values[key]} for key in values},
        }

    def metrics(self) -> Mapping[str, float]:
        return {
            "shoal_step": 42.0,
            "shoal_reward": 0.4375,
            'shoal_groups_rejected_total{reason="stale"}': 2.0,
            "shoal_up": 1.0,
            'shoal_groups_rejected_total{reason="reward_mismatch"}': 3.0,
            "shoal_loss": math.nan,
        }

    def pause(self, reason: str) -> None:
        self.calls.append(("pause", reason))
        self.state |= {"state": "PAUSED", "reason": reason, "next": "run shoal resume to go on"}

    def resume(self) -> None:
        self.calls.append(("resume",))
        self.state |= {"state": "TRAINING", "reason": "step 43, sampling 4 tasks", "next": ""}

    def stop(self) -> None:
        self.calls.append(("stop",))


@pytest.fixture
def view() -> FixtureView:
    return FixtureView()


@pytest.fixture
async def server(view: FixtureView, clock: Callable[[], float]) -> AsyncIterator[WebServer]:
    made = WebServer(view, host="127.0.0.1", port=0, token=TOKEN, allowed_hosts=("reef.lan",), clock=clock)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def anyone(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A client without credentials; keeps cookies, also for 127.0.0.1."""
    async with aiohttp.ClientSession(server.url, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


@pytest.fixture
async def client(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    """The command line: a client with the token."""
    async with aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield session
