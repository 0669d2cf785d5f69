"""What the web layer may know of a node. `node.daemon` implements `NodeView`; tests use a fixture.

All answers are plain JSON values (dict, list, str, int, float, bool, None), already safe to serialise. Text that
came from peers stays text: the web layer never turns it into markup.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

Json = Any
"""A JSON value."""


class NotFound(Exception):
    """No such group, step or peer."""


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
        (which one samples, and why), `groups` ({published, fetched, admitted, rejected: {reason: n},
        trained_foreign}, and the counters of `web.probes.EXCHANGE_TROUBLE`)."""

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        """Step records with step > `after`, oldest first."""

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        """Held-out scores of steps > `after` (-1: the initial model's too), oldest first: `step`, `at`, `mean`,
        `scores` by environment."""

    def groups(self, before: int | None, limit: int) -> Sequence[Mapping[str, Json]]:
        """Summaries, newest first, with row id < `before` (paging); each has `row`, `id` (hex digest), `origin`
        (own/foreign), `producer`, `environment`, `epoch`, `rewards`, `verdict` (admitted or a reason), `detail`,
        `at`."""

    async def group(self, group_id: str) -> Mapping[str, Json]:
        """One group whole: prompt messages and completions too. A unique prefix will do. Raises NotFound."""

    def peers(self) -> Sequence[Mapping[str, Json]]:
        """`peer_id`, `connected`, `model`, `reputation`, `published`, `admitted`, `rejected`,
        `last_seen`."""

    def swarm(self) -> Mapping[str, Json]:
        """Manifest in JSON with `digest`, `epoch` (number, ends_in), and `invite` of this node."""

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Json]]:
        """Events with id > `after`, or the newest `limit` for None; oldest first: `id`, `at`, `level`, `kind`,
        `message`."""

    def follow(self, after: int) -> AsyncIterator[Mapping[str, Json]]:
        """Events as they happen, starting after id `after`."""

    def config(self) -> Mapping[str, Json]:
        """key -> {value, source, default, help, applies, type, choices, secret}, and `pending` where another value
        holds from the next start; secrets are not in it."""

    def change(self, values: Mapping[str, Json]) -> Mapping[str, Json]:
        """Change settings: {applied: [keys in force now], restart: [keys in force from the next start], config: their
        entries}. Raises SettingRefused and SettingOverridden, and nothing is changed then."""

    def metrics(self) -> Mapping[str, float]:
        """Prometheus samples: full metric name with labels (`shoal_rejected_total{reason="stale"}`) -> value."""

    def pause(self, reason: str) -> None: ...

    def resume(self) -> None: ...

    def stop(self) -> None:
        """Ask the daemon to stop in good order; returns at once."""
