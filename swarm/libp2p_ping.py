"""Whether and how soon a peer answers: one that vanished without closing its connection shows in no other way."""

import logging
import secrets

from libp2p.abc import IHost, INetStream
from libp2p.host.ping import ID as PING_PROTOCOL
from libp2p.host.ping import PING_LENGTH
from libp2p.peer.id import ID

from swarm.libp2p_streams import Runtime

PING_TIMEOUT = 20.0

log = logging.getLogger(__name__)


async def ping(host: IHost, runtime: Runtime, peer: str) -> float | None:
    """Seconds that the answer of a connected peer took, once a stream was open; None where it did not answer.

    On a stream of its own: the library's PingService breaks when two overlap.
    """
    payload, echo = secrets.token_bytes(PING_LENGTH), b""
    stream: INetStream | None = None
    sent = took = 0.0
    try:
        with runtime.deadline(PING_TIMEOUT):
            stream = await host.new_stream(ID.from_base58(peer), [PING_PROTOCOL])
            sent = runtime.now()
            await stream.write(payload)
            while len(echo) < PING_LENGTH:
                piece = await stream.read(PING_LENGTH - len(echo))
                if not piece:
                    break
                echo += piece
            took = runtime.now() - sent
    except runtime.errors as error:
        log.debug("ping of %s: %r", peer, error)
    finally:
        if stream is not None:
            await runtime.finish(stream, echo == payload)
    return took if echo == payload else None
