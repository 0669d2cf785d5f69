"""Makes what a leader and a follower have besides other nodes, from the settings."""

import functools

from node.federation.followed import FollowedPolicy
from node.federation.followers import Followers
from node.federation.following import Following
from node.federation.leading import Leading
from node.federation.publishing import Publisher
from node.federation.spot_check import SpotCheck
from node.home import Home
from node.loop import Parts, model_mark
from protocol.identity import Identity
from swarm.policies import PolicyServing, PolicyStore
from swarm.policy_pulling import PolicyPuller

SPARE_BYTES = 64 << 20
"""Of records and headers."""


def make_leading(parts: Parts, identity: Identity, home: Home) -> Leading | None:
    """What publishes the policy, serving from now on; None where it is not published."""
    p, settings = parts, parts.config.federation
    if not settings.publish:
        return None
    store = PolicyStore(home.policies / identity.peer_id)
    publisher = Publisher(
        store,
        identity,
        swarm=p.manifest.digest,
        model=model_mark(p.bundle),
        dtype=settings.dtype,
        every=settings.publish_every,
        whole_every=settings.whole_every,
        staleness=lambda: p.config.federation.staleness,
        clock=p.clock,
        tell=lambda level, message: p.history.event(level, "policy", message),
    )
    _serve(store, identity.peer_id, p)
    return Leading(publisher, Followers(p, publisher, SpotCheck(publisher, p.bundle, identity)))


def make_following(parts: Parts, home: Home) -> Following | None:
    """What follows a leader, and serves others that do; None where nobody is followed."""
    p, settings = parts, parts.config.federation
    if not settings.follow:
        return None
    assert isinstance(p.trainer, FollowedPolicy)
    store = PolicyStore(home.policies / settings.follow)
    size = sum(weight.numel() for weight in p.bundle.model.parameters())
    make_puller = functools.partial(
        PolicyPuller,
        p.exchange.transport,
        store,
        p.exchange.accounts,
        p.clock,
        leader=settings.follow,
        swarm=p.manifest.digest,
        model=model_mark(p.bundle),
        dtype=settings.dtype,
        max_bytes=3 * 4 * size + SPARE_BYTES,
        request_timeout=p.config.network.request_timeout,
        poll_seconds=settings.poll_seconds,
    )
    following = Following(
        store,
        p.trainer,
        settings.dtype,
        home.path / "following.json",
        lambda arrived, may_take: make_puller(arrived=arrived, may_take=may_take),
    )
    _serve(store, settings.follow, p)
    return following


def _serve(store: PolicyStore, leader: str, p: Parts) -> None:
    """Give the policy to whoever may have it."""
    refused = p.rounds.access.refused if p.rounds else lambda peer: False
    PolicyServing(store, leader, p.exchange.accounts, p.clock, refused=refused).serve_on(p.exchange.transport)
