"""Two operating-system processes: `kill -9` of a peer is noticed, and it rejoins with the same id and port."""

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm.transport import PeerConnected, PeerDisconnected

pytestmark = pytest.mark.network
PEER = Path(__file__).with_name("libp2p_peer.py")
TOPIC = "/shoal/test/announce/0"


@asynccontextmanager
async def peer_process(*arguments: str):
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER), *arguments, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_kill_and_rejoin(libp2p, read, wait_until):
    (a,) = await libp2p.start(1)
    seen = read(a)
    await a.subscribe(TOPIC)
    async with peer_process("other", "/ip4/127.0.0.1/tcp/0", a.addresses()[0]) as (process, address):
        listen, _, peer = address.partition("/p2p/")
        await seen.saw(PeerConnected(peer), timeout=20)
        assert await a.request(peer, "/shoal/echo/1.0.0", b"hello", max_bytes=10, timeout=10) == b"hello"
        process.kill()
        begin = time.monotonic()
        await seen.saw(PeerDisconnected(peer))
        assert time.monotonic() - begin < 5
        assert a.peers() == ()
    async with peer_process("other", listen, a.addresses()[0]) as (process, address):
        assert address == f"{listen}/p2p/{peer}"
        await wait_until(lambda: seen.events.count(PeerConnected(peer)) == 2, timeout=20)
        assert await a.request(peer, "/shoal/echo/1.0.0", b"again", max_bytes=10, timeout=10) == b"again"
        await wait_until(lambda: b"seen by other" in seen.messages)


async def test_a_lost_peer_is_redialled_where_it_was(libp2p, wait_until):
    """The side that stays knows the address only from identify, and dials it."""
    from swarm.peers import Discovery

    (a,) = await libp2p.start(1)
    service = asyncio.create_task(Discovery(a, [], b"rendezvous" * 3, clock=time.monotonic, tick=0.1).run())
    async with peer_process("third", "/ip4/127.0.0.1/tcp/0", a.addresses()[0]) as (process, address):
        listen, _, peer = address.partition("/p2p/")
        await wait_until(lambda: a.peers() == (peer,), timeout=20)
        await asyncio.sleep(1)
        process.kill()
        await wait_until(lambda: a.peers() == ())
    async with peer_process("third", listen) as (process, address):
        assert address == f"{listen}/p2p/{peer}", "it tells nobody that it is back"
        await wait_until(lambda: a.peers() == (peer,), timeout=20)
        assert await a.request(peer, "/shoal/echo/1.0.0", b"again", max_bytes=10, timeout=10) == b"again"
    assert not service.done()
    service.cancel()
