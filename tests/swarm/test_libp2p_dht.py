"""What a peer may answer to whoever asks it for providers."""

from types import SimpleNamespace

import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from protocol.identity import Identity, peer_id_of
from swarm.libp2p_dht import MAX_PROVIDERS, Dht
from swarm.libp2p_host import Libp2pHost

KEY = b"k" * 32
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = Multiaddr("/ip4/10.0.0.1/tcp/1")


def made_up(number: int) -> str:
    return peer_id_of(number.to_bytes(32, "big"))


def answering(answers: dict[str, list[str]], addresses: list[str] | None = None) -> Dht:
    """A DHT whose holders give these answers; the peers whose addresses are stored go to `addresses`."""

    async def ask(holder: ID, key: bytes) -> tuple[list[PeerInfo], list[ID]]:
        return [PeerInfo(ID.from_base58(peer), [ADDRESS]) for peer in answers[str(holder)]], []

    stored = SimpleNamespace(
        add_addrs=lambda peer, found, ttl: None if addresses is None else addresses.append(str(peer))
    )
    dht = object.__new__(Dht)
    dht.service = SimpleNamespace(
        provider_store=SimpleNamespace(
            _get_providers_from_peer_with_closers=ask, get_providers=lambda key: [PeerInfo(ID.from_base58(RSA), [])]
        )
    )
    dht._host = SimpleNamespace(get_id=lambda: ID.from_base58(made_up(0)), get_peerstore=lambda: stored)
    return dht


def test_an_answer_is_bounded_and_names_peers_that_can_take_part() -> None:
    holder, addresses = made_up(1), []
    named = [RSA, *(made_up(number) for number in range(100, 2000))]
    dht = answering({holder: named}, addresses)
    found = trio.run(dht.ask, ID.from_base58(holder), KEY)
    assert found == named[1:MAX_PROVIDERS]
    assert addresses == found
    assert dht.stored_providers(KEY) == []


def test_whom_most_holders_name_comes_first() -> None:
    real, holders = Identity.generate().peer_id, [made_up(number) for number in range(1, 4)]
    answers = {holders[0]: [made_up(number) for number in range(100, 120)] * 2, holders[1]: [real], holders[2]: [real]}
    host = object.__new__(Libp2pHost)
    host._dht, host._banned = answering(answers), set()
    host._host = host._dht._host

    async def closest(key: bytes) -> list[ID]:
        return [ID.from_base58(holder) for holder in holders]

    host._dht.closest = closest
    found = trio.run(host.find_providers, KEY, 5.0)
    assert found[0] == real
    assert len(found) == 21
