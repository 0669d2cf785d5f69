"""What the web layer may know of a node. `node.daemon` implements `NodeView`; tests use a fixture.

All answers are plain JSON values (dict, list, str, int, float, bool, None), already safe to serialise. Text that
came from peers stays text: the web layer never turns it into markup.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Json = Any
"""A JSON value."""


class NotFound(Exception):
    """No such group, step or peer."""


class NothingToHold(Exception):
    """A pause of what does not train; the message is "what ; what to do"."""


class SettingRefused(Exception):
    """A change of settings that is not valid; the message is "what ; what to do"."""


class SettingOverridden(SettingRefused):
    """A change that would not count, because a flag or an environment variable says otherwise."""


class NodeView(Protocol):
    def status(self) -> Mapping[str, Json]:
        """`state` (STARTING, RESUMING, TRAINING, WAITING, PAUSED, IDLE, STOPPING, FAILED), `reason`, `next` (action
        for a person, or ''), `step`, `reward` (mean of the last step or None), `reward_start`, `held_out`,
        `held_out_start` and `held_out_best` (or None), `held_out_steps` ([first, latest] or None),
        `tokens_per_second`, `own_groups` and `foreign_groups` of the last step, `peers` (count), `peer_id`, `name`,
        `swarm` (name), `stage`, `stage_seconds` and `stage_count` ([parts done, of how many] or None),
        `last_step_age` (seconds since the last step or, if that is later, the end of a pause; or None),
        `step_deadline` (seconds after which a missing step is a fault), `rss_mb`, `peak_rss_mb`, `memory`
        ({weights, gradients, optimizer} in bytes, as of the last update), `uptime`, `version`, `model`, `engine`
        (which one samples, and why), `policy_version` (that is published, or followed; or None), `followed`
        (of a follower: `leader`, `newest` version known and when it was `issued`, when the leader `answered` last, and
        `problem`; or None), `groups` ({published,
        fetched, admitted, rejected: {reason: n}} since the start, with the counters of `web.probes.EXCHANGE_TROUBLE`,
        and of its whole life {trained_foreign, trained_followers})."""

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        """Step records with step > `after`, oldest first."""

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        """Held-out scores of steps > `after` (-1: the initial model's too), oldest first: `step`, `at`, `mean`,
        `scores` by environment."""

    def series(self, points: int, first: int | None, last: int | None) -> Mapping[str, Json]:
        """Steps `first` to `last` (None: all) in about `points` buckets of `width` steps, as columns: `first` and
        `last` (of all steps; None before the first one), `width`, `step` (the last of each bucket), `reward` with
        `reward_low` and `reward_high` (of the steps' means), means of the numbers of the step records by their names,
        `seconds` (of whole steps), `environments` {name: mean rewards}, and `evaluations` {`step`, `mean`, `scores`
        {environment: [...]}}, the last ones of each bucket. None where there is no number."""

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> Sequence[Mapping[str, Json]]:
        """Summaries, newest first, with row id < `before` (paging), that have the values of `where` (of `origin`,
        `verdict`, `environment`, `producer`); each has `row`, `id` (hex digest), `origin` (own/foreign), `producer`,
        `environment`, `epoch`, `rewards`, `verdict` (admitted or a reason), `detail`, `at`."""

    async def group(self, group_id: str) -> Mapping[str, Json]:
        """One group whole: `prompt` messages and `completions`, its `task` and whether it is `shared`, and `siblings`,
        summaries of other groups on the same task. A unique prefix will do. Raises NotFound."""

    def peers(self, offset: int, limit: int, *, sort: str, descending: bool, search: str) -> Mapping[str, Json]:
        """`total` (of those searched for), `connected` (of all) and a page of `peers`: `peer_id`, `connected`,
        `direction`, `latency_ms`, `model`, `reputation`, `banned`, `published`, `admitted`, `rejected` by reason,
        `trained`, `followed` (of them, those sampled with this node's policy), `last_seen`."""

    def peer_graph(self) -> Mapping[str, Json]:
        """`nodes` (at most 200, this one first) and `edges`: this node's connections, and from whose groups it
        learned how often."""

    def swarm(self) -> Mapping[str, Json]:
        """Manifest in JSON with `digest`, `epoch` (number, ends_in), `epochs`, `words` (the manifest in sentences),
        `private`, `listed` (in the public directory), `members` (seen in the last day), `invite` of this node and
        `invite_caution` (why others may not be able to use it, or ''), and `coordinator` (who leads, round, board,
        faults; None where the manifest names none); empty while none is known."""

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Json]]:
        """Events with id > `after`, or the newest `limit` for None; oldest first: `id`, `at`, `level`, `kind`,
        `message`."""

    def event_range(self) -> tuple[int, int]:
        """Ids of the oldest and of the newest event there is; (1, 0) where there is none."""

    def config(self) -> Mapping[str, Json]:
        """key -> {value, source, default, help, applies, type, choices, secret}, and `pending` where another value
        holds from the next start; secrets are not in it."""

    def change(self, values: Mapping[str, Json]) -> Mapping[str, Json]:
        """Change settings: {applied: [keys in force now], restart: [keys in force from the next start], restart_by:
        what a person does for it, config: their entries}. Raises SettingRefused and SettingOverridden, and nothing is
        changed then."""

    def metrics(self) -> Mapping[str, float]:
        """Prometheus samples: full metric name with labels (`shoal_rejected_total{reason="stale"}`) -> value."""

    def pause(self, reason: str) -> None:
        """Raises NothingToHold, as `resume` does."""

    def resume(self) -> None: ...

    def stop(self) -> None:
        """Ask the daemon to stop in good order; returns at once."""
