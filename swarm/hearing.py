"""Takes note of announcements: judges each once, keeps it for peers that lack it, and wants its group if it may.

A producer's first announcement for a task of an epoch counts. A second one of another group is dropped unread, as
`equivocation`: so a producer gains nothing by making many groups of one task and sending each somewhere else. It costs
no reputation, because a node that lost its database in a power cut, or was restored from a backup, answers the tasks
of its epoch anew and cannot know what it announced before.
"""

from collections.abc import Callable

from protocol.envelope import digest_of
from protocol.manifest import Manifest
from protocol.messages import Announcement
from protocol.rules import Reason, Rejected, check_announcement
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.gate import culprits
from swarm.newest import remember
from swarm.pulling import MAX_WANTED
from swarm.records import ANNOUNCED
from swarm.wanted import Candidate

MAX_REFUSED = 4096
"""Refused announcements remembered: peers that judge otherwise offer them at every healing."""


class Hearing:
    """`want(candidate)` is told of every group that may be pulled. `me` is the own peer id."""

    def __init__(
        self,
        me: str,
        store: ExperienceStore,
        manifest: Manifest,
        accounts: Accounts,
        want: Callable[[Candidate], None],
        clock: Callable[[], float],
        *,
        banned: Callable[[str], bool],
    ) -> None:
        self._me, self._store, self._manifest, self._accounts = me, store, manifest, accounts
        self._want, self._clock = want, clock
        self._reputation, self._banned = accounts.reputation, banned
        self._refused: dict[bytes, None] = {}

    def hear(self, sealed: bytes, forwarder: str) -> bool:
        """Take note of an announcement, from gossip or healing. True when it was valid and new. Raises StoreError."""
        now, name = self._clock(), digest_of(sealed)
        if name in self._refused:
            return False
        try:
            opened, announcement = check_announcement(sealed, self._manifest, now, banned=self._banned)
        except Rejected as rejected:
            if rejected.reason not in (Reason.from_future, Reason.banned):  # both pass
                self._refuse(name)
            self._accounts.offence(rejected, *culprits(sealed, forwarder, rejected, now))
            return False
        producer = opened.producer
        if producer == self._me:
            return False
        first = self._first_for(announcement, producer)
        if first not in (None, announcement.group):
            self._refuse(name)
            self._accounts.offence(_second(announcement), producer)
            return False
        with self._store.transaction():
            if not self.remember(announcement, producer, sealed, opened.expires):
                return False
            self._reputation.record(producer, ANNOUNCED, announcement.model)
        self._accounts.counters.heard += 1
        self._want(Candidate(announcement, producer, opened.expires, forwarder))
        return True

    def _first_for(self, announcement: Announcement, producer: str) -> bytes | None:
        """Digest of the group that this producer announced first for that task of that epoch."""
        of_task = (producer, announcement.epoch, announcement.task)
        return self._store.announcements.of_task(*of_task) or self._store.group_of(*of_task)

    def remember(self, announcement: Announcement, producer: str, sealed: bytes, expires: float) -> bool:
        return self._store.announcements.add(
            announcement.group,
            producer,
            announcement.epoch,
            announcement.task,
            sealed,
            heard_at=self._clock(),
            expires_at=expires,
        )

    def _refuse(self, name: bytes) -> None:
        remember(self._refused, name, None, MAX_REFUSED)

    def want_again(self) -> None:
        """After a restart: what was announced and not pulled is still worth having."""
        now = self._clock()
        for sealed in reversed(self._store.announcements.live(now, MAX_WANTED)):
            try:
                opened, announcement = check_announcement(sealed, self._manifest, now, banned=self._banned)
            except Rejected:  # it was judged when it came; banned since, or of another swarm
                continue
            if opened.producer != self._me:
                self._want(Candidate(announcement, opened.producer, opened.expires, opened.producer))


def _second(announcement: Announcement) -> Rejected:
    task = announcement.task
    return Rejected(
        Reason.equivocation,
        f"announces a second group for {task.environment} {task.index} of epoch {announcement.epoch}: "
        "the first one counts",
    )
