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
    """The schemas named here are those of web/schemas.py."""

    def status(self) -> Mapping[str, Json]:
        """Schema `Status`."""

    def steps(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        """Schema `Step`: steps > `after`, oldest first."""

    def evaluations(self, after: int, limit: int) -> Sequence[Mapping[str, Json]]:
        """Schema `Evaluation`: of steps > `after` (-1: the initial model's too), oldest first."""

    def series(self, points: int, first: int | None, last: int | None) -> Mapping[str, Json]:
        """Schema `Series`: steps `first` to `last` (None: all) in about `points` buckets."""

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> Sequence[Mapping[str, Json]]:
        """Schema `GroupSummary`: newest first, with row id < `before` (None: from the newest), that have the values of
        `where` (of `origin`, `verdict`, `environment`, `producer`)."""

    async def group(self, group_id: str) -> Mapping[str, Json]:
        """Schema `Group`. A unique prefix will do. Raises NotFound."""

    def peers(self, offset: int, limit: int, *, sort: str, descending: bool, search: str) -> Mapping[str, Json]:
        """Schema `Peers`: a page of those searched for."""

    def peer_graph(self) -> Mapping[str, Json]:
        """Schema `PeerGraph`: this node first."""

    def swarm(self) -> Mapping[str, Json]:
        """Schema `Swarm`."""

    def events(self, after: int | None, limit: int) -> Sequence[Mapping[str, Json]]:
        """Schema `Event`: with id > `after`, or the newest `limit` for None; oldest first."""

    def event_range(self) -> tuple[int, int]:
        """Ids of the oldest and of the newest event there is; (1, 0) where there is none."""

    def config(self) -> Mapping[str, Json]:
        """Schema `Config`; secrets are not in it."""

    def change(self, values: Mapping[str, Json]) -> Mapping[str, Json]:
        """Change settings: schema `Changed`. Raises SettingRefused and SettingOverridden, and nothing is changed
        then."""

    def metrics(self) -> Mapping[str, float]:
        """Prometheus samples: full metric name with labels (`shoal_rejected_total{reason="stale"}`) -> value."""

    def pause(self, reason: str) -> None:
        """Raises NothingToHold, as `resume` does."""

    def resume(self) -> None: ...

    def stop(self) -> None:
        """Ask the daemon to stop in good order; returns at once."""
