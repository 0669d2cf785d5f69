"""What the Swarm page shows of a manifest, on every kind of node."""

from collections.abc import Mapping
from typing import Any

from node.home import Home
from node.manifest_words import in_sentences
from protocol.manifest import Manifest

BY_COORDINATOR = (
    "it lets in who is a member already; others need an invite of the coordinator (shoal coordinator invite)"
)


def swarm_facts(
    home: Home,
    manifest: Manifest,
    now: float,
    *,
    members: int,
    invite: str,
    invite_caution: str,
    coordinator: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """JSON values; see `web.view.NodeView.swarm`."""
    epoch, private = manifest.epoch_at(now), home.swarm().psk is not None
    return {
        **manifest.describe(),
        "epoch": {"number": epoch, "ends_in": manifest.epoch_ends(epoch) - now},
        "epochs": {
            "seconds": manifest.epoch_seconds,
            "genesis": manifest.genesis,
            "own_tasks": manifest.slots_per_epoch,
            "shared_tasks": manifest.shared_slots,
        },
        "words": in_sentences(manifest, private=private),
        "private": private,
        "listed": home.is_listed(),
        "members": members,
        "coordinator": coordinator,
        "invite": invite,
        "invite_caution": BY_COORDINATOR if manifest.listed_only else invite_caution,
    }
