"""How nodes of one model tell each other where their averagers are: they are other processes, with ids of their own."""

from typing import Annotated

import msgspec

from protocol.messages import Digest

AVERAGER_PROTOCOL = "/shoal/averager/1.0.0"
"""AveragerRequest -> AveragerPlace; an empty answer: there is none for these rounds."""
MAX_PLACE_BYTES = 256


class AveragerRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Digest
    rounds: Digest
    """SHA-256 of the name of the rounds, which follows from model, swarm and the swarm's key."""


class AveragerPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the averager of the answering node listens. The host is the node's own: the asker is connected to it."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    peer: Annotated[str, msgspec.Meta(min_length=46, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+\Z")]
    """Peer id of the averager."""
