"""A peer in a process of its own, for test_libp2p_processes: `python libp2p_peer.py SEED LISTEN [BOOTSTRAP]`.

Prints its address, then one line for each event.
"""

import asyncio
import hashlib
import sys
import time

from protocol.identity import Identity
from swarm.libp2p_transport import Libp2pTransport
from swarm.peers import Discovery

TOPIC = "/shoal/test/announce/0"


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main(seed: str, listen: str, *bootstrap: str) -> None:
    transport = Libp2pTransport(Identity.from_seed(hashlib.sha256(seed.encode()).digest()), [listen])

    async def echo(peer: str, data: bytes) -> bytes:
        return data

    transport.serve("/shoal/echo/1.0.0", echo, max_request=100)
    await transport.start()
    await transport.subscribe(TOPIC)
    say(transport.addresses()[0])
    discovery = Discovery(transport, bootstrap, b"rendezvous" * 3, clock=time.monotonic, tick=0.1)
    async with asyncio.TaskGroup() as services:
        services.create_task(discovery.run())
        async for event in transport.events():
            say(event)
            await transport.publish(TOPIC, f"seen by {seed}".encode())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
