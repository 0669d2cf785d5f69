"""What settings are made of: the base of a section, and texts that are checked as they are read."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from node.limits import quiet_spans
from protocol.identity import IdentityError, public_key_of
from protocol.invite import check_address, check_peer_address


def split_commas(value: object) -> object:
    """Environment variables and flags are text: `a,b` means two entries."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def split_arguments(value: object) -> object:
    """The same, but for the commas of JSON, which is what some arguments of vLLM are."""
    if not isinstance(value, str):
        return value
    parts = [""]
    for piece in value.split(","):
        inside = sum(map(parts[-1].count, "{[")) > sum(map(parts[-1].count, "}]"))
        parts[-1:] = [f"{parts[-1]},{piece}"] if inside else [parts[-1], piece]
    return tuple(part.strip() for part in parts if part.strip())


Texts = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
Arguments = Annotated[tuple[str, ...], BeforeValidator(split_arguments)]


def listened(address: str) -> str:
    """A multiaddr to listen on, if it is one; its port may be 0."""
    if not address.startswith(("/ip4/", "/ip6/")):
        raise ValueError(f"{address!r} does not look like /ip4/0.0.0.0/tcp/0 or /ip6/::/tcp/0")
    check_address(address, least_port=0)
    return address


def signing_peer(peer: str) -> str:
    """A peer id whose key can be read from it, or nothing."""
    try:
        if peer:
            public_key_of(peer)
    except IdentityError as error:
        raise ValueError(str(error)) from error
    return peer


PEER = "peer:"
"""What a teacher begins with that is another node."""


def teacher(name: str) -> str:
    """A directory, a server's URL, or PEER and a peer id."""
    if name.startswith(PEER):
        if name == PEER:
            raise ValueError("peer: names no node; write peer:PEER_ID, which `shoal id` prints there")
        signing_peer(name.removeprefix(PEER))
    return name


def announced(address: str) -> str:
    check_address(address.partition("/p2p/")[0])
    return address


def dialled(address: str) -> str:
    check_peer_address(address)
    return address


def averager(address: str) -> str:
    """A multiaddr of hivemind's libp2p, whose peer ids may be of another kind than a node's."""
    where, _, peer_id = address.rpartition("/p2p/")
    if not where or not 40 <= len(peer_id) <= 64 or not (peer_id.isascii() and peer_id.isalnum()):
        raise ValueError(f"{address!r} does not look like /ip4/203.0.113.7/tcp/4711/p2p/PEER_ID")
    check_address(where)
    return address


def quiet(hours: str) -> str:
    quiet_spans(hours)
    return hours


def enough(kbps: int) -> int:
    if 0 < kbps < LEAST_KBPS:
        raise ValueError(f"{kbps} kbit/s would bring no group within its deadline: at least {LEAST_KBPS}, or 0")
    return kbps


LEAST_KBPS = 64
Kbps = Annotated[int, Field(ge=0, le=100_000_000), AfterValidator(enough)]
Multiaddrs = Annotated[tuple[Annotated[str, AfterValidator(announced)], ...], BeforeValidator(split_commas)]
Peers = Annotated[tuple[Annotated[str, AfterValidator(dialled)], ...], BeforeValidator(split_commas)]
Averagers = Annotated[tuple[Annotated[str, AfterValidator(averager)], ...], BeforeValidator(split_commas)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
