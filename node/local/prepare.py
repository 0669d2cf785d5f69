"""The homes of a swarm on this machine: one a process, all in the swarm that the first one founded."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from node.coordinator.at_rest import begin, members_of
from node.home import Home, NoSwarm, models_dir
from node.local.member import Member, Role, free_port
from node.settings import load
from protocol.invite import Invite
from protocol.manifest import embedded_manifest

FIRST_PAGE = 8420
SHARDS = 2
"""Worker processes of a large node."""
INVITE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Swarm:
    """What runs."""

    nodes: int
    coordinator: bool = False
    large: int = 0
    """Nodes whose trainer is divided between processes, and whose policy the others follow."""
    others: int = 0
    """The last so many of `nodes` have another model, and train it."""
    other_model: str = ""
    """Its directory; empty: the embedded one with fewer layers."""

    @property
    def processes(self) -> int:
        """Supervised ones: those of a divided trainer are its node's."""
        return self.coordinator + self.large + self.nodes


def prepare(root: Path, swarm: Swarm, overrides: Mapping[str, str]) -> list[Member]:
    """Make (or find) the homes under `root`. `overrides`: settings of all of them.

    Raises HomeLocked when one of them runs already; ConfigError where one could not start with these settings.
    """
    with ExitStack() as held:
        members = _homes(root, swarm, held)
        first = members[0]
        try:
            founded = first.home.swarm()
        except NoSwarm:
            if swarm.coordinator:
                begin(first.home, first.home.identity().peer_id, "local", public=False)
            else:
                first.home.found(embedded_manifest("local", time.time()))
            founded = first.home.swarm()
        way_in = f"/ip4/127.0.0.1/tcp/{first.port}/p2p/{first.home.identity().peer_id}"
        for member in members[1:]:
            token = _token(first.home, member.home) if swarm.coordinator else None
            member.home.join(Invite(founded.manifest_digest, (way_in,), founded.psk, founded.name, token))
    for member in members:
        flags = dict(setting.split("=", 1) for setting in member.settings)
        load(member.home, {**overrides, **flags})
    return members


def _homes(root: Path, swarm: Swarm, held: ExitStack) -> list[Member]:
    names: list[tuple[str, Role]] = [("coordinator", "coordinator")] if swarm.coordinator else []
    names += [(f"large-{number}", "large") for number in range(1, swarm.large + 1)]
    followers = swarm.nodes - swarm.others if swarm.large else 0
    names += [(f"node-{number + 1}", "follower" if number < followers else "node") for number in range(swarm.nodes)]
    members: list[Member] = []
    for name, role in names:
        home = Home(root / name)
        home.init()
        held.enter_context(home.lock())  # of a swarm that runs already neither ports nor invite may change
        port = free_port([home.listen_port()], held)
        home.keep_listen_port(port)
        members.append(Member(name, home, port, FIRST_PAGE + len(members), role))
    leaders = [member.home.identity().peer_id for member in members if member.role == "large"]
    other_model = (swarm.other_model or _smaller()) if swarm.others else ""
    for number, member in enumerate(members):
        match member.role:
            case "large":
                member.settings = (f"train.shards={SHARDS}", "federation.publish=true")
            case "follower":
                member.settings = (f"federation.follow={leaders[number % len(leaders)]}",)
            case "node" if number >= len(members) - swarm.others:
                member.settings = (f"model.path={other_model}",)
    return members


def _smaller() -> str:
    from node.smaller import smaller_model  # imports torch, which a process that only supervises can do without

    return str(smaller_model(models_dir()))


def _token(coordinator: Home, member: Home) -> bytes | None:
    """What lets a member in: the one that it came in with, or a new one."""
    manifest = coordinator.manifest()
    assert manifest is not None
    membership = members_of(coordinator, manifest)
    try:
        if membership.role_of(member.identity().peer_id) is not None:
            return member.swarm().token
        return membership.invite(uses=1, expires=time.time() + INVITE_SECONDS, role="member")
    finally:
        membership.close()
