"""What a node has that leads others."""

from dataclasses import dataclass

from node.federation.followers import Followers
from node.federation.publishing import Publisher


@dataclass(frozen=True, slots=True)
class Leading:
    publisher: Publisher
    """Weights out."""
    followers: Followers
    """Groups in."""
