"""The coordinator as the web layer sees it: the questions of `web.view.NodeView` that make sense without a model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from node.settings import public_values
from node.view_coordinator import coordination
from node.view_presence import presence_facts, presence_samples
from node.view_swarm import swarm_facts
from web.view import NotFound, NothingToHold, SettingOverridden

if TYPE_CHECKING:
    from node.coordinator.process import CoordinatorProcess

Json = Any


class CoordinatorView:
    """Implements `web.view.NodeView`."""

    def __init__(self, process: "CoordinatorProcess") -> None:
        self.node = process

    def status(self) -> Mapping[str, Json]:
        node, now = self.node, self.node.clock()
        none = dict.fromkeys(
            ("reward", "reward_start", "held_out", "held_out_start", "held_out_best", "held_out_steps", "stage_count",
             "last_step_age", "held_by", "resumes_at", "policy_version", "followed")
        )  # fmt: skip
        return {
            **none,
            **presence_facts(node, now),
            "step": 0,
            "tokens_per_second": 0.0,
            "own_groups": 0,
            "foreign_groups": 0,
            "stage": "coordinate",
            "stage_seconds": now - node.started_at,
            "stages": {},
            "step_deadline": node.config.limits.stage_seconds,
            "memory": {},
            "model": "none: it coordinates",
            "engine": "",
            "trained_today_seconds": 0.0,
            "groups": {"trained_foreign": 0},
        }

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        return []

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        return []

    def series(self, points: int, first: int | None, last: int | None) -> Mapping[str, Json]:
        return self.node.history.series(points, first, last)

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> Sequence[Mapping[str, Json]]:
        return []

    async def group(self, group_id: str) -> Mapping[str, Json]:
        raise NotFound("a coordinator keeps no groups")

    def peers(self, offset: int, limit: int, *, sort: str, descending: bool, search: str) -> Mapping[str, Json]:
        connected = sorted(self.node.transport.peers(), reverse=sort == "peer_id" and descending)
        found = [peer for peer in connected if search in peer]
        page: list[Json] = [
            {
                "peer_id": peer, "connected": True, "direction": None, "latency_ms": None, "model": "",
                "reputation": 0.0, "banned": False, "published": 0, "admitted": 0, "rejected": {}, "trained": 0,
                "followed": 0, "last_seen": self.node.clock(),
            }
            for peer in found[offset : offset + limit]
        ]  # fmt: skip
        return {"total": len(found), "connected": len(connected), "peers": page}

    def peer_graph(self) -> Mapping[str, Json]:
        return {"nodes": [{"peer_id": self.node.identity.peer_id, "self": True}], "edges": []}

    def swarm(self) -> Mapping[str, Json]:
        node, lead = self.node, self.node.coordinator
        if node.manifest is None:
            return {}
        return swarm_facts(
            node.home,
            node.manifest,
            node.clock(),
            members=len(lead.membership.members()) if lead else 0,
            invite=node.presence.invite_uri(),
            invite_caution=node.presence.invite_caution(),
            coordinator=coordination(lead.chain, leading=lead.leading, heard=lead.heard()) if lead else None,
        )

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Json]]:
        return self.node.history.events(after, limit)

    def event_range(self) -> tuple[int, int]:
        return self.node.history.event_range()

    def config(self) -> Mapping[str, Json]:
        return public_values(self.node.settings, self.node.config)

    def change(self, values: Mapping[str, Json]) -> Mapping[str, Json]:
        raise SettingOverridden("a coordinator takes settings up at its next start ; stop it, then start it again")

    def metrics(self) -> Mapping[str, float]:
        samples, lead = presence_samples(self.node, self.status()), self.node.coordinator
        if lead is not None:
            samples["shoal_round"] = lead.chain.round.number if lead.chain.round else 0
            samples["shoal_members"] = len(lead.membership.members())
        return {name: float(value) for name, value in samples.items()}

    def pause(self, reason: str) -> None:
        """Raises NothingToHold: an answer of 202 would be taken for a pause of the swarm."""
        raise NothingToHold("a coordinator trains nothing ; end it with `shoal down`, or pause a node")

    def resume(self) -> None:
        self.pause("")

    def stop(self) -> None:
        self.node.presence.stopped.set()
