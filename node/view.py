"""The daemon as the web layer sees it: one method per question, answers in plain JSON values."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from node.limits import Holder
from node.scorer import ScorerError
from node.settings import ConfigError, Overridden, public_values
from node.supervised import how_to_restart
from node.view_coordinator import coordination
from node.view_group import MAX_SIBLINGS, completions, group_summary, task_of
from node.view_peers import members_seen, peer_graph, peers_page
from node.view_presence import presence_facts, presence_samples
from node.view_swarm import swarm_facts
from swarm.experience import UnknownGroup
from web.view import NotFound, SettingOverridden, SettingRefused

if TYPE_CHECKING:
    from node.daemon import Daemon
    from node.loop import Loop

log = logging.getLogger(__name__)

Json = Any
LONG_STAGES = 3
"""Of a step: sampling, updating and scoring may each take as long as one stage may."""


class DaemonView:
    """Implements `web.view.NodeView`. Reads only; `pause`, `resume` and `stop` set an event and return."""

    def __init__(self, daemon: "Daemon") -> None:
        self.node = daemon

    def status(self) -> Mapping[str, Json]:
        node, progress = self.node, self.node.progress
        now = node.clock()
        first, last = node.history.first_step(), node.history.last_step()
        last = last or {}
        exchange = node.exchange.counters() if node.exchange else {}
        return {
            **presence_facts(node, now),
            "step": _step(node.loop, last.get("step", 0)),
            "reward": last.get("reward"),
            "reward_start": (first or {}).get("reward"),
            "held_out": node.history.held_out_latest(),
            "held_out_start": node.history.held_out_start(),
            "held_out_best": node.history.best_held_out(),
            "held_out_steps": node.history.held_out_steps(),
            "tokens_per_second": last.get("tokens_per_second", 0.0),
            "own_groups": last.get("own_groups", 0),
            "foreign_groups": last.get("foreign_groups", 0),
            "stage": progress.stage,
            "stage_seconds": now - progress.since,
            "stage_count": progress.count,
            "stages": dict(progress.stages),
            "last_step_age": progress.step_age(now),
            "step_deadline": LONG_STAGES * node.config.limits.stage_seconds,
            "memory": dict(progress.memory),
            "model": node.bundle.name if node.bundle else node.config.model.path,
            "engine": node.engine,
            "held_by": progress.hold.by if progress.hold else None,
            "resumes_at": progress.hold.resumes_at if progress.hold else None,
            "trained_today_seconds": node.holding.trained_today,
            "policy_version": _policy_version(node),
            "followed": node.loop.following.facts() if node.loop and node.loop.following else None,
            "groups": {
                **exchange,
                "trained_foreign": node.history.trained_foreign(),
                "trained_followers": node.store.peers.credited(),
            },
        }

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        return self.node.history.steps(after, limit)

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        return self.node.history.evaluations(after, limit)

    def series(self, points: int, first: int | None, last: int | None) -> Mapping[str, Json]:
        return self.node.history.series(points, first, last)

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> Sequence[Mapping[str, Json]]:
        return [group_summary(record) for record in self.node.store.summaries(before, limit, where)]

    async def group(self, group_id: str) -> Mapping[str, Json]:
        node = self.node
        try:
            record = node.store.find(group_id)
            group = node.store.group_body(record.digest)
        except UnknownGroup as error:
            raise NotFound(str(error)) from error
        messages: list[Json] = []
        if node.scorer is not None:
            try:  # as foreign work: whoever looks at groups must not hold training up
                (task,) = await node.scorer.tasks([group.task], foreign=True)
            except ScorerError as error:
                log.warning("group %s is shown without its prompt: %s", record.digest.hex()[:12], error)
            else:
                messages = [{"role": message.role, "content": message.content} for message in task.messages]
        return {
            **group_summary(record),
            **task_of(record, node.manifest),
            "prompt": messages,
            "completions": await completions(group, record, node.bundle),
            "siblings": [group_summary(other) for other in node.store.same_task(record, MAX_SIBLINGS)],
        }

    def peers(self, offset: int, limit: int, *, sort: str, descending: bool, search: str) -> Mapping[str, Json]:
        return peers_page(self.node, offset, limit, sort=sort, descending=descending, search=search)

    def peer_graph(self) -> Mapping[str, Json]:
        return peer_graph(self.node)

    def swarm(self) -> Mapping[str, Json]:
        node = self.node
        if node.manifest is None:
            return {}
        rounds = node.rounds
        return swarm_facts(
            node.home,
            node.manifest,
            node.clock(),
            members=members_seen(node),
            invite=node.presence.invite_uri(),
            invite_caution=node.presence.invite_caution(),
            coordinator=None
            if rounds is None
            else coordination(rounds.chain, said=rounds.entering.said, listed=rounds.entering.listed),
        )

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Json]]:
        return self.node.history.events(after, limit)

    def event_range(self) -> tuple[int, int]:
        return self.node.history.event_range()

    def config(self) -> Mapping[str, Json]:
        return public_values(self.node.settings, self.node.wanted)

    def change(self, values: Mapping[str, Json]) -> Mapping[str, Json]:
        try:
            changed = self.node.change(values)
        except Overridden as error:
            raise SettingOverridden(str(error)) from error
        except ConfigError as error:
            raise SettingRefused(str(error)) from error
        entries, concerned = self.config(), (*changed.applied, *changed.restart)
        return {
            "applied": list(changed.applied),
            "restart": list(changed.restart),
            "restart_by": self.node.home.hints(how_to_restart(os.getpid())),
            "config": {key: entries[key] for key in concerned},
        }

    def metrics(self) -> Mapping[str, float]:
        status = self.status()
        last = self.node.history.last_step() or {}
        stats, scorer, rounds = self.node.transport.stats(), self.node.scorer, self.node.rounds
        samples = {
            **presence_samples(self.node, status),
            "shoal_step": status["step"],
            "shoal_reward": status["reward"],
            "shoal_held_out": status["held_out"],
            "shoal_round": rounds.chain.round.number if rounds and rounds.chain.round else None,
            "shoal_members": len(rounds.chain.members.members) if rounds and rounds.chain.members else None,
            "shoal_tokens_per_second": status["tokens_per_second"],
            "shoal_last_step_age_seconds": status["last_step_age"],
            **{f'shoal_held{{by="{by}"}}': float(status["held_by"] == by) for by in get_args(Holder)},
            "shoal_trained_foreign_total": status["groups"]["trained_foreign"],
            "shoal_trained_followers_total": status["groups"].get("trained_followers"),
            "shoal_policy_version": status["policy_version"],
            "shoal_policy_skipped_total": _policy_skipped(self.node),
            "shoal_network_dropped_events_total": stats.dropped_events,
            "shoal_network_dropped_publishes_total": stats.dropped_publishes,
            "shoal_groups_published_total": status["groups"].get("published"),
            "shoal_groups_fetched_total": status["groups"].get("fetched"),
            "shoal_groups_admitted_total": status["groups"].get("admitted"),
            "shoal_scorer_answers_total": scorer.answers if scorer else None,
            "shoal_scorer_failures_total": scorer.failures if scorer else None,
            "shoal_scorer_restarts_total": scorer.restarts if scorer else None,
            "shoal_scorer_turned_away_total": scorer.turned_away if scorer else None,
            **{
                f'shoal_groups_rejected_total{{reason="{reason}"}}': count
                for reason, count in status["groups"].get("rejected", {}).items()
            },
            **{f'shoal_trainer_bytes{{kind="{kind}"}}': held for kind, held in status["memory"].items()},
            **{f'shoal_stage_seconds{{stage="{stage}"}}': seconds for stage, seconds in status["stages"].items()},
            **{
                f"shoal_{name}": last.get(name)
                for name in (
                    "loss",
                    "grad_norm",
                    "kl_behaviour",
                    "kl_teacher",
                    "max_mismatch",
                    "clip_fraction",
                    "ess",
                    "entropy",
                )
            },
        }
        return {name: float(value) for name, value in samples.items() if value is not None}

    def pause(self, reason: str) -> None:
        self.node.holding.pause(reason)

    def resume(self) -> None:
        self.node.holding.resume()

    def stop(self) -> None:
        self.node.request_stop()


def _step(loop: "Loop | None", last: int) -> int:
    """The node's step; until it has recovered, the `last` one in its history, which it goes on from."""
    if loop is None:
        return last
    if loop.following is None and loop.saving.saved is None:
        return max(loop.parts.trainer.step, last)
    return max(loop.parts.trainer.step, loop.saving.saved or 0)


def _policy_skipped(node: "Daemon") -> int | None:
    leading = node.loop.leading if node.loop is not None else None
    return leading.publisher.skipped if leading is not None else None


def _policy_version(node: "Daemon") -> int | None:
    """Of the policy that this node publishes or follows."""
    if node.loop is None:
        return None
    if node.loop.leading is not None:
        return node.loop.leading.publisher.version
    return node.loop.parts.trainer.step if node.loop.following is not None else None
