"""What a handler does before it answers: the peer pays, and answers for a request that does not decode."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from protocol.rejection import Reason, Rejected
from swarm.allowance import Allowance
from swarm.transport import Busy

REQUEST_COST = 256.0
"""Bytes that any request counts for besides its answer's, so that empty answers are not free."""

Request = TypeVar("Request")


def charge(allowance: Allowance, peer: str, cost: float = REQUEST_COST) -> None:
    """Take the price of a request. Raises Busy when the peer has had its share."""
    if wait := allowance.wait(peer):
        raise Busy(wait)
    allowance.spend(peer, cost)


def decoded(data: bytes, kind: type[Request], peer: str, on_offence: Callable[[Rejected, str], object]) -> Request:
    """The request; no honest peer sends one that cannot be read. Raises Rejected, and whatever `on_offence` does."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        rejected = Rejected(Reason.malformed, f"{kind.__name__}: {error}")
        on_offence(rejected, peer)
        raise rejected from error
