"""A node as `web.server` sees it, with seeded, plausible data of any size behind it; tests change its attributes.

With hostile=True every text is what a hostile peer might send.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.identity import peer_id_of
from tests.web.fixture_history import TASKS, History
from tests.web.fixture_settings import FixtureSettings
from web.view import NotFound

TOKEN = "a-token-for-tests-0123456789"
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202egnp.exe\u0000"
    "javascript:alert(1) {{7*7}} " + "A" * 3000
)
VERDICTS = ("admitted",) * 12 + ("uninformative", "uninformative", "reward_mismatch", "stale", "over_budget")
DETAILS = {
    "uninformative": "all 8 rewards are equal",
    "reward_mismatch": "completion 3 claims 1.00, scored here 0.01",
    "stale": "made 41 minutes ago, at most 30",
    "over_budget": "this producer sent 64 MB in this epoch, at most 64",
}
MODELS = ("SmolLM2-135M-Instruct", "Qwen3-0.6B", "SmolLM2-360M-Instruct", "")
EVENTS = (
    *(("info", "peers", "connected to …WDWez9kSCVe2Xo"),) * 12,
    *(("info", "peers", "…SPyTk8WfLwQ has gone"),) * 12,
    *(("info", "checkpoint", "a checkpoint was written"),) * 8,
    ("warning", "share", "…SPyTk8WfLwQ claims rewards that scoring here does not find: reward_mismatch"),
    ("debug", "fetch", "group 35a15d3e in 41 ms from …WDWez9kSCVe2Xo"),
    ("error", "disk", "the checkpoint was not written: no space left on device; free some, or set limits.disk_mb"),
)
EPOCH_SECONDS = 600


def peer_id(i: int) -> str:
    return peer_id_of(hashlib.sha256(b"peer %d" % i).digest())


class FixtureView:
    """Implements `web.view.NodeView`. `step()` makes it do one, `say()` makes something happen; `calls` is what was
    asked of it."""

    def __init__(
        self,
        *,
        steps: int = 100_000,
        peers: int = 1000,
        connected: int = 24,
        groups: int = 20_000,
        events: int = 3000,
        hostile: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.now, self.hostile = now, hostile
        self.history, self.settings = History(steps), FixtureSettings()
        self.calls: list[tuple[str, ...]] = []
        self.refuses: Exception | None = None
        self.me = peer_id(-1)
        connected = min(peers, connected)
        self.state: dict[str, Any] = {
            **self.history.latest(), "state": "TRAINING", "reason": f"with {connected} peers", "next": "",
            "held_by": None, "resumes_at": None, "trained_today_seconds": 31_260.0, "peers": connected,
            "peer_id": self.me, "name": "lagoon", "swarm": "first-words", "stage": "rollout", "stage_seconds": 3.2,
            "stage_count": [12, 32], "stages": {"mix": 0.4}, "last_step_age": 4.1, "step_deadline": 600.0,
            "rss_mb": 2310.0, "peak_rss_mb": 2740.0, "uptime": 10.5 * 86400, "version": "0.1.0",
            "memory": {"weights": 540_000_000, "gradients": 0, "optimizer": 1_080_000_000},
            "model": "SmolLM2-135M-Instruct", "engine": "transformers: there is no GPU",
            "groups": {
                "published": 168_204, "fetched": 201_377, "admitted": 187_331, "trained_foreign": 164_020,
                "rejected": {"uninformative": 9_012, "reward_mismatch": 311, "stale": 204},
            },
        }  # fmt: skip
        self.peer_rows = [self._peer(i, i < connected) for i in range(peers)]
        self.group_rows = [self._summary(row, self.now() - (groups - row) * 1.6) for row in range(groups, 0, -1)]
        self.swarm_says = self._manifest()
        self.event_rows: list[dict[str, Any]] = []
        draw = random.Random(7)
        for i in range(events):
            self.say(*draw.choice(EVENTS), at=self.now() - (events - i) * 9)
        if hostile:
            self.state |= dict.fromkeys(("reason", "next", "name", "swarm", "model", "stage", "engine"), HOSTILE)
            self.peer_rows[0] |= {"model": "\u202e" + "X" * 1_000_000, "rejected": {HOSTILE: 3}}
            self.say("warning", HOSTILE, HOSTILE * 300)

    # -- what happens -----------------------------------------------------------------------------------------

    def say(self, level: str, kind: str, message: str, at: float | None = None) -> None:
        event = {"id": self.event_range()[1] + 1, "at": self.now() if at is None else at, "level": level, "kind": kind}
        self.event_rows.append({**event, "message": message})

    def step(self) -> None:
        self.history.add()
        for _ in range(8):
            self.group_rows.insert(0, self._summary(len(self.group_rows) + 1, self.now()))
        self.state |= {**self.history.latest(), "stages": {}}
        self.say("info", "step", f"step {self.history.steps}: reward {self.history.reward[-1]:.3f}")

    def row(self, number: int) -> dict[str, Any]:
        """The summary of a group by its row, which count from 1."""
        return self.group_rows[-number]

    # -- what it says -----------------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        return self.state

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        return [
            {**row, "at": self.now() - 13.0 * (self.history.steps - row["step"])}
            for row in self.history.rows(after, limit)
        ]

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        found = self.history.evaluations(after + 1, self.history.steps)[:limit]
        return [{"step": step, "at": self.now(), "mean": mean, "scores": {"chain_sum": mean}} for step, mean in found]

    def series(self, points: int, first: int | None, last: int | None) -> Mapping[str, Any]:
        self.calls.append(("series", str(points), str(first), str(last)))
        return self.history.series(points, first, last)

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
        found = []
        for group in self.group_rows:
            if (before is None or group["row"] < before) and all(group[key] == where[key] for key in where):
                found.append(group)
            if len(found) == limit:
                break
        return found

    async def group(self, group_id: str) -> Mapping[str, Any]:
        found = [row for row in self.group_rows if row["id"].startswith(group_id)]
        if len(found) != 1:
            raise NotFound(f"no group {group_id}")
        (group,) = found
        row, draw = group["row"], random.Random(group["row"] // 8)
        word = "the reef keeper feeds eels"
        answers = [f"Let me count.\nIn “{word}” the letter “e” appears {n} times.\nAnswer: {n}" for n in range(6, 10)]
        shared, kin = row % 8 < 4, range(row - row % 8, row - row % 8 + 4)
        return {
            **group,
            "task": {
                "environment": group["environment"], "version": "1", "seed": str(2**62 + row // 8), "index": row // 8,
            },
            "shared": shared,
            "siblings": [self.row(r) for r in kin if 0 < r <= len(self.group_rows) and r != row] if shared else [],
            "prompt": [
                {"role": self._text("system"), "content": "Think briefly, then answer on a line of its own."},
                {"role": "user", "content": self._text(f'How many times does the letter "e" appear in "{word}"?')},
            ],
            "completions": [
                self._completion(f"{3 + row % 8}, I think." if i == 6 else draw.choice(answers[:3]), reward, i)
                for i, reward in enumerate(group["rewards"])
            ],
        }  # fmt: skip

    def peers(self, offset: int, limit: int, *, sort: str, descending: bool, search: str) -> Mapping[str, Any]:
        self.calls.append(("peers", sort, str(descending), search))
        wanted = search.casefold()
        found = [row for row in self.peer_rows if wanted in f"{row['peer_id']} {row['model']}".casefold()]
        found.sort(
            key=lambda row: sum(row["rejected"].values()) if sort == "rejected" else row[sort], reverse=descending
        )
        connected = sum(row["connected"] for row in self.peer_rows)
        return {"total": len(found), "connected": connected, "peers": found[offset : offset + limit]}

    def peer_graph(self) -> Mapping[str, Any]:
        kept = ("peer_id", "connected", "reputation", "model", "admitted")
        mine = {"peer_id": self.me, "connected": True, "reputation": 1.0, "model": MODELS[0], "admitted": 0}
        nodes, edges = [{"self": True, **mine}], []
        for row in self.peer_rows[:199]:
            nodes.append({"self": False, **{name: row[name] for name in kept}})
            if row["connected"]:
                edges.append({"from": self.me, "to": row["peer_id"], "kind": "connection", "weight": 1})
            if row["trained"]:
                edges.append({"from": row["peer_id"], "to": self.me, "kind": "groups", "weight": row["trained"]})
        return {"nodes": nodes, "edges": edges}

    def swarm(self) -> Mapping[str, Any]:
        epoch = {"number": int(self.now() // EPOCH_SECONDS), "ends_in": EPOCH_SECONDS - self.now() % EPOCH_SECONDS}
        return {**self.swarm_says, "epoch": epoch} if self.swarm_says else {}

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Any]]:
        if after is None:
            return self.event_rows[-limit:]
        self.calls.append(("events", str(after)))
        begin = max(0, after + 1 - self.event_range()[0])
        return self.event_rows[begin : begin + limit]

    def event_range(self) -> tuple[int, int]:
        return (self.event_rows[0]["id"], self.event_rows[-1]["id"]) if self.event_rows else (1, 0)

    def config(self) -> Mapping[str, Any]:
        return self.settings.entries

    def metrics(self) -> Mapping[str, float]:
        return {
            "shoal_step": 42.0,
            "shoal_reward": 0.4375,
            'shoal_groups_rejected_total{reason="stale"}': 2.0,
            "shoal_up": 1.0,
            'shoal_groups_rejected_total{reason="reward_mismatch"}': 3.0,
            "shoal_loss": math.nan,
        }

    # -- what a person asks of it -----------------------------------------------------------------------------

    def change(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(("change", str(dict(values))))
        return self.settings.change(values)

    def pause(self, reason: str) -> None:
        self.calls.append(("pause", reason))
        self.state |= {"state": "PAUSED", "reason": reason, "next": "run shoal resume to go on", "held_by": "person"}

    def resume(self) -> None:
        self.calls.append(("resume",))
        self.state |= {"state": "TRAINING", "reason": "with 24 peers", "next": "", "held_by": None}

    def stop(self) -> None:
        self.calls.append(("stop",))

    # -- what is made up --------------------------------------------------------------------------------------

    def _text(self, plain: str) -> str:
        return HOSTILE if self.hostile else plain

    def _summary(self, row: int, at: float) -> dict[str, Any]:
        draw, own = random.Random(row), row % 2 == 0
        verdict = "admitted" if own else draw.choice(VERDICTS)
        scored = [0.01] * 8 if verdict == "uninformative" else draw.choices((0.01, 0.01, 0.2, 0.5, 1.0), k=8)
        return {
            "row": row, "id": hashlib.sha256(b"group %d" % row).hexdigest(), "origin": "own" if own else "foreign",
            "producer": self.me if own else self._text(peer_id(row % max(1, len(self.peer_rows)))),
            "model": self._text(MODELS[0]), "environment": self._text(TASKS[row // 8 % 4]), "epoch": 12,
            "rewards": scored, "claimed": scored, "verdict": verdict if own else self._text(verdict),
            "detail": self._text(DETAILS[verdict]) if verdict in DETAILS else "", "size": 5000, "uses": row % 3,
            "at": at,
        }  # fmt: skip

    def _completion(self, text: str, reward: float, seed: int) -> dict[str, Any]:
        draw = random.Random(f"{text}{seed}")
        text = self._text(text) * (300 if self.hostile and seed == 0 else 1)
        words = [part + " " for part in text[:9000].split(" ")]
        return {
            "text": text, "finish": "stop", "tokens": len(words), "claimed": reward, "reward": reward,
            "parts": {"reward": reward, "parsed": 1.0},
            "pieces": [{"text": word, "logprob": -draw.expovariate(1.1)} for word in words],
        }  # fmt: skip

    def _peer(self, i: int, connected: bool) -> dict[str, Any]:
        draw = random.Random(i)
        admitted, refused = int(draw.paretovariate(0.7) * 10) % 4000, draw.randrange(0, 40)
        return {
            "peer_id": self._text("") + peer_id(i), "connected": connected, "model": self._text(draw.choice(MODELS)),
            "direction": draw.choice(("inbound", "outbound")) if connected else None,
            "latency_ms": draw.uniform(8, 220) if connected else None,
            "reputation": round(min(1.0, draw.betavariate(6, 1.4)), 3), "banned": i % 97 == 13,
            "published": admitted + refused, "admitted": admitted, "trained": admitted // 2,
            "followed": admitted // 4 if i % 5 == 1 else 0,
            "rejected": {"uninformative": refused, **({"reward_mismatch": 7} if i % 97 == 13 else {})},
            "last_seen": self.now() - (i if connected else i * 310),
        }  # fmt: skip

    def _manifest(self) -> dict[str, Any]:
        return {
            "name": self._text("first-words"), "version": 1, "digest": "ab" * 32, "genesis": 1_790_000_000,
            "epoch_seconds": EPOCH_SECONDS, "slots_per_epoch": 64, "shared_slots": 8, "shards": 16,
            "environments": [{"name": self._text(name), "version": "1", "weight": 1 + i,
                              "settings": {"max_tokens": 64 + i}}
                             for i, name in enumerate(TASKS)],
            "caps": {"max_group_bytes": 262_144, "max_completions": 64, "max_producer_share": 0.5,
                     "reward_tolerance": 1e-4, "group_ttl_seconds": 1800},
            "epochs": {"seconds": EPOCH_SECONDS, "genesis": 1_790_000_000, "own_tasks": 64, "shared_tasks": 8},
            "invite": "shoal:eyJtYW5pZmVzdCI6ImFiYWJhYmFiIn0" + "aB3dE6" * 24,
            "words": ["Everybody practises 4 environments; harder ones come more often.",
                      "An epoch lasts 10 minutes. In each one a node works on 64 tasks of its own and 8 of all.",
                      "A group counts for 30 minutes. At most half of what comes from peers in a step is of one peer.",
                      "Every node scores what it gets itself; a claim may be off by 0.0001."],
            "private": True, "listed": False, "members": len(self.peer_rows) // 7,
            "invite_caution": self._text("these addresses are of this container"), "coordinator": self._coordination(),
        }  # fmt: skip

    def _coordination(self) -> dict[str, Any]:
        """A coordinator in the middle of a round, another one that was proven false."""
        peers = [self._text("") + str(peer["peer_id"]) for peer in self.peer_rows[:12]]
        return {
            "coordinators": peers[:2], "leader": peers[0] if peers else None, "leading": False,
            "heard": {}, "listed_only": False,
            "listed": False, "said": self._text("the invite is used up; ask for a new one"), "members": len(peers),
            "faults": [{"coordinator": peer, "reason": "equivocation", "detail": self._text("signed two records")}
                       for peer in peers[1:2]],
            "round": {"number": 12, "state": "open", "term": 1, "opened": self.now(), "closes": self.now() + 300,
                      "answers_by": None, "mix": {self._text(name): 1 / len(TASKS) for name in TASKS}},
            "board": {"number": 11, "of": len(peers), "standings": [
                {"peer": peer, "mean": 0.9 - i / 20 if i % 4 else None, "best": 0.95 - i / 20, "credit": i / 50,
                 "scores": [0.5] * len(TASKS) if i % 4 else []}
                for i, peer in enumerate(peers)]},
        }  # fmt: skip
