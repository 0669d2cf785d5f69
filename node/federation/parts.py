"""Makes what a leader and a follower have besides other nodes, from the settings."""

import asyncio
import functools

from node.config_types import PEER
from node.federation.followed import FollowedPolicy
from node.federation.followers import Followers
from node.federation.following import Following
from node.federation.leading import Leading
from node.federation.publishing import Publisher
from node.federation.spot_check import SpotCheck
from node.federation.teaching import PeerTeacher, Teaching
from node.home import Home
from node.limits import NoRoom
from node.parts import Parts, dtype_of, model_mark
from protocol.identity import Identity
from swarm.policies import PolicyServing, PolicyStore
from swarm.policy_pulling import PolicyPuller
from swarm.teaching import TeachServing


class FederationError(Exception):
    """The settings ask for a federation that cannot work."""


LEAST_BUDGET = 2048
"""Tokens of a teacher's pass: it keeps nothing for a way back."""
TEACHER_SHARE = 0.5
"""Of a stage's deadline that a step waits for a teacher among peers: without an answer it goes on."""
SPARE_BYTES = 64 << 20
"""Of records and headers."""


def make_leading(parts: Parts, identity: Identity, home: Home) -> Leading | None:
    """What publishes the policy, serving from now on; None where it is not published."""
    p, settings = parts, parts.config.federation
    if not settings.publish:
        return None
    _check_type(p)
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


def make_following(parts: Parts, home: Home, unpaused: asyncio.Event, no_room: NoRoom) -> Following | None:
    """What follows a leader, and serves others that do; None where nobody is followed."""
    p, settings = parts, parts.config.federation
    if not settings.follow:
        return None
    _check_type(p)
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
        unpaused,
        no_room,
    )
    _serve(store, settings.follow, p)
    return following


def make_teaching(parts: Parts) -> TeachServing | None:
    """What answers other nodes' questions about tokens, serving from now on; None where that is not asked for."""
    p, settings = parts, parts.config.federation
    if not settings.teach:
        return None
    budget = max(LEAST_BUDGET, p.config.train.tokens_per_micro_batch)
    teaching = Teaching(p.bundle, p.device, lambda: p.trainer.step, budget)
    serving = TeachServing(
        teaching.answer,
        p.exchange.accounts,
        p.clock,
        swarm=p.manifest.digest,
        tokens_a_minute=settings.teach_tokens,
        refused=p.refuses,
    )
    serving.serve_on(p.exchange.transport)
    return serving


def peer_teacher(parts: Parts) -> PeerTeacher | None:
    """The teacher of `train.distill_teacher` where that is another node."""
    p, name = parts, parts.config.train.distill_teacher
    if not name.startswith(PEER):
        return None
    return PeerTeacher(
        name.removeprefix(PEER),
        p.bundle,
        p.exchange.transport,
        p.exchange.accounts,
        p.clock,
        swarm=p.manifest.digest,
        seconds=lambda: TEACHER_SHARE * p.config.limits.stage_seconds,
        tell=lambda message: p.history.event("warning", "teacher", message),
    )


def _serve(store: PolicyStore, leader: str, p: Parts) -> None:
    """Give the policy to whoever may have it."""
    PolicyServing(store, leader, p.exchange.accounts, p.clock, refused=p.refuses).serve_on(p.exchange.transport)


def _check_type(p: Parts) -> None:
    """Raises FederationError: log-probabilities of rounded weights would be held to the tolerance of exact ones."""
    dtype, computed = p.config.federation.dtype, dtype_of(p.bundle)
    if dtype == "float32" != computed:
        raise FederationError(
            f"federation.dtype is float32, and this node computes in {computed} (model.dtype is "
            f"{p.config.model.dtype}) ; set federation.dtype to bfloat16, at leader and followers, "
            "or model.dtype to float32"
        )
