"""A node with 100,000 steps, 1,000 peers and 20,000 groups behind it, as the local API tells of one. Seeded.

Only the answers are made up here: credentials, headers and the page's files are those of `web`.
"""

import asyncio
import hashlib
import json
import math
import random
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.web.dashboard_settings import Settings
from tests.web.large_history import History
from web.answers import Refused, answer
from web.auth import Auth
from web.files import STATIC, TYPES
from web.guard import Guard, add_headers, cookie_name

PLOTLY = Path(find_spec("plotly").origin).parent
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
TASKS = ("chain_sum", "letter_counting", "spell_backward", "word_sorting")
MODELS = ("SmolLM2-135M-Instruct", "Qwen3-0.6B", "SmolLM2-360M-Instruct", "")
STAGES = {"mix": 0.4, "rollout": 8.2, "journal": 0.1, "update": 3.9, "weights": 0.2}


def peer_id(i: int) -> str:
    return "12D3KooW" + hashlib.sha256(b"peer %d" % i).hexdigest()[:44]


class Dashboard:
    """The node. Tests change its attributes; `step()` makes it do one."""

    def __init__(self, *, steps: int = 100_000, peers: int = 1000, groups: int = 20_000, hostile: bool = False) -> None:
        self.draw = random.Random(7)
        self.now = time.time
        self.hostile, self.group_count = hostile, groups
        self.history = History(steps)
        self.settings = Settings()
        self.calls: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.started = self.now() - 8.4 * 86400
        self.me = peer_id(-1)
        self.state: dict[str, Any] = {
            "state": "TRAINING", "reason": f"with {min(peers, 24)} peers", "next": "", "held_by": None,
            "resumes_at": None, "trained_today_seconds": 31_260.0, "peers": min(peers, 24), "peer_id": self.me,
            "name": "lagoon", "swarm": "first-words", "stage": "rollout", "stage_seconds": 3.2, "stage_count": [12, 32],
            "stages": {"mix": 0.4}, "last_step_age": 4.1, "step_deadline": 600.0, "rss_mb": 2310.0,
            "peak_rss_mb": 2740.0, "memory": {"weights": 540_000_000, "gradients": 0, "optimizer": 1_080_000_000},
            "version": "0.1.0", "model": "SmolLM2-135M-Instruct", "engine": "transformers: there is no GPU",
            "groups": {
                "published": 168_204, "fetched": 201_377, "admitted": 187_331, "trained_foreign": 164_020,
                "rejected": {"uninformative": 9_012, "reward_mismatch": 311, "stale": 204},
            },
        }  # fmt: skip
        self.peers = [self._peer(i) for i in range(peers)]
        for i in range(3000 if steps else 3):
            self.say(*self.draw.choice(EVENTS), at=self.now() - (3000 - i) * 9)
        if hostile:
            self.state |= dict.fromkeys(("reason", "next", "name", "swarm", "model", "stage", "engine"), HOSTILE)
            self.peers[0] |= {"model": "\u202e" + "X" * 1_000_000, "rejected": {HOSTILE: 3}}
            self.say("warning", HOSTILE, HOSTILE * 300)

    def text(self, plain: str) -> str:
        return HOSTILE if self.hostile else plain

    def say(self, level: str, kind: str, message: str, at: float | None = None) -> None:
        event = {"id": len(self.events) + 1, "at": at or self.now(), "level": level, "kind": kind, "message": message}
        self.events.append(event)

    def step(self) -> None:
        self.history.add()
        self.group_count += 8
        self.state["stages"] = {}
        self.say("info", "step", f"step {self.history.steps}: reward {self.history.reward[-1]:.3f}")

    def status(self) -> dict[str, Any]:
        return {**self.state, **self.history.latest(), "uptime": self.now() - self.started}

    # -- groups -----------------------------------------------------------------------------------------------

    def group(self, row: int) -> dict[str, Any]:
        draw = random.Random(row)
        own = row % 2 == 0
        verdict = "admitted" if own else draw.choice(VERDICTS)
        rewards = (
            [0.01] * 8 if verdict == "uninformative" else [draw.choice((0.01, 0.01, 0.2, 0.5, 1.0)) for _ in "8" * 8]
        )
        return {
            "row": row, "id": hashlib.sha256(b"group %d" % row).hexdigest(), "origin": "own" if own else "foreign",
            "producer": self.me if own else self.text(peer_id(row % max(1, len(self.peers)))),
            "model": self.text(MODELS[0]), "environment": self.text(TASKS[row // 2 % 4]), "epoch": 12,
            "rewards": rewards, "claimed": rewards, "verdict": self.text(verdict) if not own else verdict,
            "detail": self.text(DETAILS[verdict]) if verdict in DETAILS else "", "size": 5000, "uses": row % 3,
            "at": self.now() - (self.group_count - row) * 1.6,
        }  # fmt: skip

    def groups(self, before: int | None, limit: int, wanted: dict[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for row in range(min(before or math.inf, self.group_count + 1) - 1, 0, -1):
            group = self.group(row)
            if all(group[key] == value for key, value in wanted.items()):
                found.append(group)
            if len(found) == limit:
                break
        return found

    def whole_group(self, prefix: str) -> dict[str, Any]:
        row = next((r for r in range(self.group_count, 0, -1) if self.group(r)["id"].startswith(prefix)), None)
        if row is None:
            raise Refused(404, f"no group {prefix}", "list them: shoal groups")
        group, draw = self.group(row), random.Random(row // 8)
        word = "the reef keeper feeds eels"
        answers = [f"Let me count.\nIn “{word}” the letter “e” appears {n} times.\nAnswer: {n}" for n in range(6, 10)]
        shared = row % 8 < 4
        kin = [self.group(r) for r in range(row - row % 8, row - row % 8 + 4) if r not in (0, row)] if shared else []
        return {
            **group,
            "task": {"environment": group["environment"], "version": "1", "seed": "4117", "index": row},
            "shared": shared, "siblings": kin,
            "prompt": [
                {"role": self.text("system"), "content": "Think briefly, then give the answer on a line of its own."},
                {"role": "user", "content": self.text(f'How many times does the letter "e" appear in "{word}"?')},
            ],
            "completions": [
                self.completion(f"{3 + row % 8}, I think." if i == 6 else draw.choice(answers[:3]), reward, i)
                for i, reward in enumerate(group["rewards"])
            ],
        }  # fmt: skip

    def completion(self, text: str, reward: float, seed: int) -> dict[str, Any]:
        draw = random.Random(f"{text}{seed}")
        text = self.text(text) * (300 if self.hostile and seed == 0 else 1)
        words = [part + " " for part in text[:9000].split(" ")]
        return {
            "text": text, "finish": "stop", "tokens": len(words), "claimed": reward, "reward": reward,
            "parts": {"reward": reward, "parsed": 1.0},
            "pieces": [{"text": word, "logprob": -draw.expovariate(1.1)} for word in words],
        }  # fmt: skip

    # -- peers and swarm --------------------------------------------------------------------------------------

    def _peer(self, i: int) -> dict[str, Any]:
        draw, connected = random.Random(i), i < self.state["peers"]
        admitted = int(draw.paretovariate(0.7) * 10) % 4000
        refused = draw.randrange(0, 40)
        return {
            "peer_id": self.text("") + peer_id(i), "connected": connected, "model": self.text(draw.choice(MODELS)),
            "direction": draw.choice(("inbound", "outbound")) if connected else None,
            "latency_ms": draw.uniform(8, 220) if connected else None, "name": "",
            "reputation": round(min(1.0, draw.betavariate(6, 1.4)), 3), "banned": i % 97 == 13,
            "published": admitted + refused, "admitted": admitted, "trained": admitted // 2,
            "rejected": {"uninformative": refused, **({"reward_mismatch": 7} if i % 97 == 13 else {})},
            "last_seen": self.now() - (i if connected else i * 310),
        }  # fmt: skip

    def peer_page(self, query: dict[str, str]) -> dict[str, Any]:
        found = [
            peer
            for peer in self.peers
            if query.get("search", "").lower() in f"{peer['peer_id']} {peer['model']}".lower()
        ]
        key = query.get("sort", "last_seen")
        value = (lambda peer: sum(peer["rejected"].values())) if key == "rejected" else (lambda peer: peer[key])
        found.sort(key=value, reverse=query.get("descending") == "1")
        start = int(query.get("offset", 0))
        page = found[start : start + int(query.get("limit", 100))]
        return {"total": len(found), "connected": sum(peer["connected"] for peer in self.peers), "peers": page}

    def graph(self) -> dict[str, Any]:
        nodes = [
            {"peer_id": self.me, "self": True, "connected": True, "reputation": 1.0, "model": MODELS[0], "admitted": 0}
        ]
        edges = []
        for peer in self.peers[:199]:
            nodes.append(
                {"self": False, **{k: peer[k] for k in ("peer_id", "connected", "reputation", "model", "admitted")}}
            )
            if peer["connected"]:
                edges.append({"from": self.me, "to": peer["peer_id"], "kind": "connection", "weight": 1})
            if peer["trained"]:
                edges.append({"from": peer["peer_id"], "to": self.me, "kind": "groups", "weight": peer["trained"]})
        return {"nodes": nodes, "edges": edges}

    def swarm(self) -> dict[str, Any]:
        epoch_seconds = 600
        return {
            "name": self.text("first-words"), "version": 1, "digest": "ab" * 32, "genesis": 1_790_000_000,
            "epoch_seconds": epoch_seconds, "slots_per_epoch": 64, "shared_slots": 8, "shards": 16,
            "environments": [{"name": self.text(name), "version": "1", "weight": 1 + i,
                              "settings": {"max_tokens": 64 + i}}
                             for i, name in enumerate(TASKS)],
            "caps": {"max_group_bytes": 262_144, "max_completions": 64, "max_producer_share": 0.5,
                     "reward_tolerance": 1e-4, "group_ttl_seconds": 1800},
            "epoch": {"number": 1817, "ends_in": epoch_seconds - self.now() % epoch_seconds},
            "invite": self.text("shoal:eyJtYW5pZmVzdCI6ImFiYWJhYmFiIn0" + "aB3dE6" * 24),
            "words": ["Everybody practises 4 environments; harder ones come more often.",
                      "An epoch lasts 10 minutes. In each one a node works on 64 tasks of its own and 8 of all.",
                      "A group counts for 30 minutes. At most half of what comes from peers in a step is of one peer.",
                      "Every node scores what it gets itself; a claim may be off by 0.0001."],
            "private": True, "members": len(self.peers) // 7, "epochs": {"seconds": epoch_seconds},
            "coordinator": self.coordination(),
        }  # fmt: skip

    def coordination(self) -> dict[str, Any]:
        """A coordinator in the middle of a round, another one that was proven false."""
        peers = [self.text(str(peer["peer_id"])) for peer in self.peers[:12]]
        return {
            "coordinators": peers[:2], "leader": peers[0] if peers else None, "leading": False, "listed_only": False,
            "listed": False, "said": self.text("the invite is used up; ask for a new one"), "members": len(peers),
            "faults": [{"coordinator": peer, "reason": "equivocation", "detail": self.text("signed two records")}
                       for peer in peers[1:2]],
            "round": {"number": 12, "state": "open", "term": 1, "opened": self.now(), "closes": self.now() + 300,
                      "answers_by": None, "mix": {self.text(name): 1 / len(TASKS) for name in TASKS}},
            "board": {"number": 11, "standings": [
                {"peer": peer, "mean": 0.9 - i / 20 if i % 4 else None, "best": 0.95 - i / 20, "credit": i / 50,
                 "scores": [0.5] * len(TASKS) if i % 4 else []}
                for i, peer in enumerate(peers)]},
        }  # fmt: skip


EVENTS = (
    ("info", "step", "step done: reward 0.43, 4 own and 4 foreign groups"),
    ("info", "peers", "connected to …WDWez9kSCVe2Xo"),
    ("info", "evaluate", "held-out score 0.39 over 64 tasks, the best so far"),
    ("warning", "share", "…SPyTk8WfLwQ claims rewards that scoring here does not find: reward_mismatch"),
    ("debug", "fetch", "group 35a15d3e in 41 ms from …WDWez9kSCVe2Xo"),
    ("error", "disk", "the checkpoint was not written: no space left on device; free some, or set limits.disk_mb"),
)


class DashboardServer:
    """The API over one `Dashboard`; may stop and start again at the same address, and then knows its sessions."""

    def __init__(self, node: Dashboard) -> None:
        self.node, self.port = node, 0
        self.auth = Auth(TOKEN, time.time)
        self.resumed: list[str] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sign_in(self) -> str:
        return f"{self.url}/login?code={self.auth.new_code()}"

    async def start(self) -> None:
        app = web.Application(middlewares=[Guard(self.auth, "127.0.0.1", ()).middleware])
        app.on_response_prepare.append(add_headers)
        api = "/api/v1"
        app.add_routes(
            [
                web.get("/", self.file),
                web.get("/static/{name}", self.file),
                web.get("/login", self.login),
                web.get(f"{api}/events/stream", self.stream),
                web.get(f"{api}/swarm/invite.svg", self.invite),
                web.get(f"{api}/{{path:.+}}", self.ask),
                web.post(f"{api}/{{path:.+}}", self.send),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        path = PLOTLY / "package_data" / name if name == "plotly.min.js" else STATIC / name
        if not path.is_file():
            raise Refused(404, f"no file {name}", "open /")
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")

    async def login(self, request: web.Request) -> web.Response:
        cookie = self.auth.new_session(request.query.get("code", ""))
        if cookie is None:
            return web.Response(status=401, body=(STATIC / "index.html").read_bytes(), content_type="text/html")
        home = web.Response(status=303, headers={"Location": "/"})
        home.set_cookie(cookie_name(request), cookie, httponly=True, samesite="Strict")
        return home

    async def ask(self, request: web.Request) -> web.Response:
        node, query, path = self.node, dict(request.query), request.match_info["path"]
        if path.startswith("groups/"):
            return answer(node.whole_group(path.partition("/")[2]))
        if path == "groups":
            wanted = {key: query[key] for key in ("origin", "verdict", "environment", "producer") if key in query}
            before = int(query["before"]) if "before" in query else None
            return answer(node.groups(before, int(query.get("limit", 50)), wanted))
        if path == "events":
            limit = int(query.get("limit", 100))
            after = int(query["after"]) if "after" in query else None
            return answer(node.events[-limit:] if after is None else node.events[after : after + limit])
        answers = {
            "status": node.status,
            "series": lambda: node.history.series(int(query.get("points", 400)), query.get("from"), query.get("to")),
            "peers": lambda: node.peer_page(query),
            "peers/graph": node.graph,
            "swarm": node.swarm,
            "config": lambda: node.settings.entries,
        }
        if path not in answers:
            raise Refused(404, f"no {path}", "see docs/api.md")
        return answer(answers[path]())

    async def send(self, request: web.Request) -> web.Response:
        path, said = request.match_info["path"], await request.json()
        self.node.calls.append(path)
        if path == "config":
            return answer(self.node.settings.change(said))
        if path == "pause":
            self.node.state |= {"state": "PAUSED", "reason": said["reason"], "held_by": "person"}
        elif path == "resume":
            self.node.state |= {"state": "TRAINING", "reason": "with 24 peers", "held_by": None, "next": ""}
        elif path == "logout":
            self.auth.end_session(request.cookies.get(cookie_name(request), ""))
        return answer(self.node.status(), 202)

    async def invite(self, request: web.Request) -> web.Response:
        squares = "".join(f"M{x} {y}h1v1h-1z" for x in range(29) for y in range(29) if (x * y + x + y) % 3 == 0)
        picture = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 33 33"><path d="{squares}"/></svg>'
        return web.Response(text=picture, content_type="image/svg+xml")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        seen = request.headers.get("Last-Event-ID", "")
        self.resumed.append(seen)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"retry: 300\n\n")
        async for block in self.blocks(int(seen or request.query.get("after", len(self.node.events)))):
            await response.write(block.encode())
        return response

    async def blocks(self, after: int) -> AsyncIterator[str]:
        said = 0.0
        while True:
            if time.monotonic() - said >= 1:
                said = time.monotonic()
                yield f"event: status\ndata: {json.dumps(self.node.status())}\n\n"
            for event in self.node.events[after:]:
                after = event["id"]
                yield f"id: {after}\ndata: {json.dumps(event)}\n\n"
            await asyncio.sleep(0.05)
