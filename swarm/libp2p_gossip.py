"""GossipSub as Shoal needs it: no library spam limit but our own, and delivery that does not drop.

py-libp2p 0.8.1 drops silently at 10 messages/s per forwarder (own ones included), at 32 queued RPCs per peer and
at 32 undelivered messages per subscription, and its heartbeat is 120 s.
"""

import logging
from collections.abc import Callable

from libp2p.abc import IHost
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub

from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from swarm.allowance import Allowance
from swarm.transport import Message

# Not 1.2: its IDONTWANT would take half of the 32 slots of a peer's queue, and our messages are small.
PROTOCOLS = [TProtocol("/meshsub/1.1.0"), TProtocol("/meshsub/1.0.0")]
FORWARDER_RATE, FORWARDER_BURST = 500.0, 1000.0
"""Messages/s, and at once, that are looked at from one forwarder; the rest is neither delivered nor relayed."""
MAX_RPC_BYTES = 256 * 1024
MESH_DEGREE = 6
"""Peers that a message is sent on to."""

log = logging.getLogger(__name__)


def new_pubsub(host: IHost) -> Pubsub:
    router = GossipSub(
        protocols=PROTOCOLS,
        degree=MESH_DEGREE,
        degree_low=4,
        degree_high=12,
        heartbeat_interval=1,
        adaptive_gossip_enabled=False,
        spam_protection_enabled=False,
        # It counts IP addresses: peers of one household or one machine would be pruned.
        eclipse_protection_enabled=False,
    )
    return Pubsub(host, router, max_inbound_rpc_size=MAX_RPC_BYTES)


class Inbox:
    """Decides which messages are delivered and relayed, and counts them."""

    def __init__(self, own: ID, deliver: Callable[[Message], None], clock: Callable[[], float]) -> None:
        self._own = own.to_bytes()
        self._deliver = deliver
        self._allowance = Allowance(FORWARDER_RATE, FORWARDER_BURST, clock)
        self.messages = 0
        self.bytes = 0

    def validator(
        self, topic: str, check: Callable[[str, bytes], bool] | None
    ) -> Callable[[ID, rpc_pb2.Message], bool]:
        """A synchronous topic validator that also delivers: the library's queue behind it would drop.

        (Its asynchronous validators deliver duplicates.) The library has checked the origin's signature and that
        the message is new.
        """

        def admit(forwarder: ID, message: rpc_pb2.Message) -> bool:
            if message.from_id == self._own:
                return forwarder.to_bytes() == self._own
            sender = str(forwarder)
            if len(message.data) > MAX_ANNOUNCEMENT_BYTES or not self._allowance.take(sender):
                return False
            if check is not None and not self._passes(check, sender, message.data):
                return False
            self.messages += 1
            self.bytes += len(message.data)
            self._deliver(Message(topic, sender, message.data))
            return True

        return admit

    def _passes(self, check: Callable[[str, bytes], bool], sender: str, data: bytes) -> bool:
        try:
            return check(sender, data)
        except Exception:
            # A fault of ours that a peer has found: it must cost the message, not the host.
            log.exception("the check of a message from %s failed", sender)
            return False

    def forget(self, forwarder: str) -> None:
        self._allowance.forget(forwarder)
