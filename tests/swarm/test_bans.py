"""Kicks and verdicts ban at the transport; neither lifts what the other holds."""

from pathlib import Path

import pytest

from protocol.board import MemberList
from protocol.rejection import Reason, Rejected
from swarm.accounts import Accounts
from swarm.bans import Bans
from swarm.coordination.access import Access
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.reputation import HALF_LIFE, Reputation
from swarm.transport import PeerUnreachable
from tests.swarm.coordinated import Clock, manifest_of
from tests.swarm.world import who

EVE = who("eve")


class Node:
    """What a node has that bans; everything real but the network."""

    def __init__(self, path: Path) -> None:
        self.hub, self.clock = MemoryHub(), Clock()
        self.transport = self.hub.transport(who("anna"))
        manifest = manifest_of("lead")
        self.swarm = manifest.digest
        self.access = Access(self.transport, manifest, self.clock)
        self.store = ExperienceStore(path / "node.db", 1 << 20, self.clock)
        reputation = Reputation(self.store, self.clock)
        self.accounts = Accounts(self.transport, reputation, self.clock, lambda kind, said: None, self.access.bans)

    def kick(self, *peers: str) -> None:
        self.access.take(MemberList(self.swarm, (), peers))

    def offend(self) -> None:
        for _ in range(4):
            self.accounts.offence(Rejected(Reason.malformed, ""), EVE.peer_id)

    def fade(self) -> None:
        self.clock.ahead += 4 * HALF_LIFE
        self.accounts.lift_bans()

    async def lets_in(self) -> bool:
        try:
            await self.transport.connect(self.eve.addresses()[0], timeout=1)
        except PeerUnreachable:
            return False
        await self.transport.disconnect(EVE.peer_id)
        return True

    async def start(self) -> "Node":
        self.eve = self.hub.transport(EVE)
        await self.eve.start()
        await self.transport.start()
        return self


@pytest.mark.parametrize("kicked_first", [True, False])
async def test_a_ban_that_faded_leaves_the_coordinators(tmp_path: Path, kicked_first: bool) -> None:
    node = await Node(tmp_path).start()
    for ban in (node.offend, lambda: node.kick(EVE.peer_id))[:: -1 if kicked_first else 1]:
        ban()
    node.fade()
    assert not await node.lets_in()
    node.kick()
    assert await node.lets_in()


async def test_a_kick_taken_back_leaves_the_nodes_own_ban(tmp_path: Path) -> None:
    node = await Node(tmp_path).start()
    node.kick(EVE.peer_id)
    node.offend()
    node.kick()
    assert not await node.lets_in()
    node.fade()
    assert await node.lets_in()


def test_bans_of_free_ids_give_way_to_later_ones_and_not_to_kicks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.bans.MAX_HELD", 3)
    node = Node(tmp_path)
    node.kick(EVE.peer_id)
    bans, ids = node.access.bans, [who(f"sybil {number}").peer_id for number in range(5)]
    for peer in (EVE.peer_id, *ids[:3], ids[2], *ids[3:]):
        bans.ban(peer, "reputation")
    assert bans.of("reputation") == set(ids[2:])
    assert [node.transport.refuses(peer) for peer in ids] == [False, False, True, True, True]
    assert node.transport.refuses(EVE.peer_id)


async def test_what_was_never_banned_is_lifted_without_a_word(tmp_path: Path) -> None:
    node = await Node(tmp_path).start()
    bans = Bans(node.transport)
    bans.lift(EVE.peer_id, "coordinator")
    assert bans.of("coordinator") == frozenset()
    assert await node.lets_in()
