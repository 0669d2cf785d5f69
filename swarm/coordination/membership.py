"""A coordinator's members, invites and bans, in its node.db. The command line writes here while the coordinator runs.

Tokens are kept as SHA-256 only: whoever reads the database cannot make an invite of it.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path

from protocol.board import MAX_MEMBERS, Member, MemberList, Role
from protocol.invite import TOKEN_BYTES
from swarm.database import Database

VERSION = 1
SCHEMA = """
CREATE TABLE coordinator_invites (
    id INTEGER PRIMARY KEY, token BLOB NOT NULL UNIQUE, role TEXT NOT NULL, uses INTEGER NOT NULL,
    expires REAL NOT NULL, made_at REAL NOT NULL);
CREATE TABLE coordinator_members (peer TEXT PRIMARY KEY, role TEXT NOT NULL, since REAL NOT NULL, invite INTEGER);
CREATE TABLE coordinator_kicked (peer TEXT PRIMARY KEY, at REAL NOT NULL, reason TEXT NOT NULL)
"""


class NotAdmitted(Exception):
    """A peer is not let in; the message says why."""


class NoSuchMember(Exception):
    """The peer is not on the list, or cannot be taken off it."""


@dataclass(frozen=True, slots=True)
class Listed:
    peer: str
    role: str
    since: float
    invite: int | None


class Membership:
    """Raises StoreError. `listed_only`: a peer needs an invite to get in; else who asks is let in, up to `most`.

    What is there of another swarm than `swarm` is removed.
    """

    def __init__(
        self, path: Path, swarm: bytes, clock: Callable[[], float], *, listed_only: bool, most: int = MAX_MEMBERS
    ) -> None:
        self._swarm, self._clock, self._listed_only, self._most = swarm, clock, listed_only, most
        self._db = Database(path)
        self._db.migrate("membership_version", VERSION, SCHEMA.strip())
        tables = ("coordinator_invites", "coordinator_members", "coordinator_kicked")
        self._db.keep_for(swarm, "membership_swarm", tables)
        self._read: tuple[object, list[Listed], MemberList] | None = None

    def close(self) -> None:
        self._db.close()

    def invite(self, *, uses: int, expires: float, role: Role) -> bytes:
        """A new token for `uses` peers until `expires` (unix seconds). It is told here and never again."""
        token = secrets.token_bytes(TOKEN_BYTES)
        now = self._clock()
        with self._db.transaction():
            self._db.execute("DELETE FROM coordinator_invites WHERE expires <= ?", now)
            # never the id of one that a member came in by, whose invite is deleted by now
            self._db.execute(
                "INSERT INTO coordinator_invites (id, token, role, uses, expires, made_at) VALUES ("
                "1 + MAX((SELECT IFNULL(MAX(id), 0) FROM coordinator_invites),"
                " (SELECT IFNULL(MAX(invite), 0) FROM coordinator_members)),?,?,?,?,?)",
                _hash(token), role, uses, expires, now,
            )  # fmt: skip
        return token

    def allow(self, peers: Iterable[str]) -> None:
        """Have these peers as members, without an invite of theirs."""
        now = self._clock()
        with self._db.transaction():
            for peer in peers:
                self._db.execute("INSERT OR IGNORE INTO coordinator_members VALUES (?,'member',?,NULL)", peer, now)

    def enter(self, peer: str, token: bytes, idle: Callable[[], Iterable[str]] = tuple) -> str:
        """Let a peer in; its role. A member stays what it is, and no use of the token is taken. Raises NotAdmitted.

        Where the list is full, the first of `idle` that came without an invite makes room.
        """
        now = self._clock()
        with self._db.transaction():
            if self._db.one("SELECT 1 FROM coordinator_kicked WHERE peer = ?", peer):
                raise NotAdmitted("this peer was kicked")
            present = self._db.one("SELECT role FROM coordinator_members WHERE peer = ?", peer)
            if present:
                return str(present[0])
            role, invite = "member", None
            if token:
                row = self._db.one(
                    "SELECT id, role, uses, expires FROM coordinator_invites WHERE token = ?", _hash(token)
                )
                if row is None:
                    raise NotAdmitted("this coordinator does not know the invite; ask for a new one")
                invite, role, uses, expires = row
                if expires <= now:
                    raise NotAdmitted("the invite has expired; ask for a new one")
                if uses < 1:
                    raise NotAdmitted("the invite is used up; ask for a new one")
                self._db.execute("UPDATE coordinator_invites SET uses = uses - 1 WHERE id = ?", invite)
            elif self._listed_only:
                raise NotAdmitted("this swarm takes invites of its coordinator only; ask for one")
            (count,) = self._db.one("SELECT COUNT(*) FROM coordinator_members") or (0,)
            if count >= self._most and not self._make_room(idle()):
                raise NotAdmitted(f"the swarm is full: {self._most} members")
            self._db.execute("INSERT INTO coordinator_members VALUES (?,?,?,?)", peer, role, now, invite)
        return str(role)

    def _make_room(self, idle: Iterable[str]) -> bool:
        """Take one off the list that may ask again. Who was let in by an invite could not, and stays."""
        if self._listed_only:
            return False
        leave = "DELETE FROM coordinator_members WHERE peer = ? AND role = 'member' AND invite IS NULL"
        return any(self._db.execute(leave, peer) for peer in idle)

    def kick(self, peer: str, reason: str) -> int:
        """Take a peer off the list and keep it off. Raises NoSuchMember.

        Whoever runs it still has the invite that it came in by, and new identities are free: what was left of the
        invite's uses is taken away, and told.
        """
        with self._db.transaction():
            row = self._db.one("SELECT invite, since FROM coordinator_members WHERE peer = ?", peer)
            if row is None:
                raise NoSuchMember(f"{peer} is no member ; see `shoal coordinator members`")
            self._db.execute("DELETE FROM coordinator_members WHERE peer = ?", peer)
            # made before: earlier versions of Shoal gave the ids of deleted invites again
            left = self._db.one("SELECT uses FROM coordinator_invites WHERE id = ? AND made_at <= ?", *row)
            self._db.execute("UPDATE coordinator_invites SET uses = 0 WHERE id = ? AND made_at <= ?", *row)
            self._db.execute("INSERT OR REPLACE INTO coordinator_kicked VALUES (?,?,?)", peer, self._clock(), reason)
            self._db.execute(
                "DELETE FROM coordinator_kicked WHERE peer NOT IN"
                " (SELECT peer FROM coordinator_kicked ORDER BY at DESC LIMIT ?)",
                MAX_MEMBERS,
            )
        return int(left[0]) if left else 0

    def forgive(self, peer: str) -> None:
        """Take a kick back: the peer may come in again, with a new invite. Raises NoSuchMember."""
        if not self._db.execute("DELETE FROM coordinator_kicked WHERE peer = ?", peer):
            raise NoSuchMember(f"{peer} was not kicked ; see `shoal coordinator members`")

    def role_of(self, peer: str) -> str | None:
        """None: no member."""
        row = self._db.one("SELECT role FROM coordinator_members WHERE peer = ?", peer)
        return row[0] if row else None

    def members(self) -> list[Listed]:
        return self._present()[0]

    def signed_list(self) -> MemberList:
        """The list as a record names it."""
        return self._present()[1]

    def _present(self) -> tuple[list[Listed], MemberList]:
        """As it is on disk, read again when this process or another wrote: both are asked for twice a second."""
        state = (self._db.one("SELECT total_changes()"), self._db.one("PRAGMA data_version"))
        if self._read is None or self._read[0] != state:
            rows = self._db.all("SELECT peer, role, since, invite FROM coordinator_members ORDER BY peer")
            kicked = self._db.all("SELECT peer FROM coordinator_kicked ORDER BY peer")
            signed = MemberList(
                self._swarm, tuple(Member(row[0], row[1]) for row in rows), tuple(row[0] for row in kicked)
            )
            self._read = state, [Listed(*row) for row in rows], signed
        return self._read[1:]

    def kicked(self) -> list[tuple[str, float, str]]:
        """(peer, when, why)."""
        return [(row[0], row[1], row[2]) for row in self._db.all("SELECT * FROM coordinator_kicked ORDER BY peer")]

    def adopt(self, members: MemberList) -> None:
        """Take up what another coordinator had listed, instead of what is here."""
        with self._db.transaction():
            known = {one.peer: one for one in self.members()}
            why = {peer: (at, reason) for peer, at, reason in self.kicked()}
            self._db.execute("DELETE FROM coordinator_members")
            self._db.execute("DELETE FROM coordinator_kicked")
            for one in members.members:
                before = known.get(one.peer)
                since, invite = (before.since, before.invite) if before else (self._clock(), None)
                self._db.execute("INSERT INTO coordinator_members VALUES (?,?,?,?)", one.peer, one.role, since, invite)
            for peer in members.kicked:
                at, reason = why.get(peer, (self._clock(), ""))
                self._db.execute("INSERT INTO coordinator_kicked VALUES (?,?,?)", peer, at, reason)


def network_of(host: str) -> str:
    """The network that an IP address is counted as: its /24, or the /48 of IPv6."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(ip_network((address, 24 if address.version == 4 else 48), strict=False))


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
