"""Checks of what binds this node to particular others: the swarm's coordinators, the leader it follows, averagers."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from node.client import DaemonUnreachable, RequestRefused, connect
from node.doctor.finding import PROBE_SECONDS, Finding, Subject, fail, failed, ok, warn
from node.doctor.network import parts, unreachable
from node.home import HomeError
from node.view_coordinator import kept
from swarm.database import StoreError

SILENT_SECONDS = 120.0
"""A coordinator is asked every 30 s, a leader every few seconds."""
OLD_SECONDS = 6 * 3600.0
"""A leader that trains publishes more often."""


def coordinator(subject: Subject) -> list[Finding]:
    """Whether somebody paces the swarm, and takes this node for a member. Nothing to say where none is named."""
    try:
        manifest = subject.home.manifest() if subject.initialised else None
        if manifest is None or not manifest.coordinators:
            return []
        if subject.status is None:
            return [_from_disk(kept(subject.home, manifest))]
        told = connect(subject.home, PROBE_SECONDS).get("swarm").get("coordinator")
    except (HomeError, StoreError, DaemonUnreachable, RequestRefused) as error:
        return [failed("coordinator", error)]
    if not told:
        return [ok("coordinator", "not known yet: the node is starting")]
    return _coordinators(told, time.time())


def _from_disk(shown: Mapping[str, Any] | None) -> Finding:
    if shown is None or shown["round"] is None:
        return warn("coordinator", "no round is known here yet", "start the node: it asks the coordinators")
    record = shown["round"]
    return ok("coordinator", f"round {record['number']} was {record['state']} when this node last ran")


def _coordinators(told: Mapping[str, Any], now: float) -> list[Finding]:
    found = [
        warn(
            "coordinator",
            f"{short(fault['coordinator'])} is not followed any more: {fault['reason']}, {fault['detail']}",
            "tell who runs it; the swarm goes on with a standby, or by the clock",
        )
        for fault in told["faults"]
    ]
    leader, heard = told["leader"], told["heard"]
    faulty = {fault["coordinator"] for fault in told["faults"]}
    spare = [one for one in told["coordinators"] if one != leader and one not in faulty]
    if leader is None:
        return [*found, warn("coordinator", "nobody leads: rounds stand still", "training goes on by the clock")]
    if not told["leading"] and not told["listed"]:
        found.append(_unlisted(told))
    record = told["round"]
    words = f"round {record['number']} is {record['state']}" if record else "no round has begun"
    words += f", {told['members']} members"
    if told["leading"]:
        found.append(ok("coordinator", f"this one leads: {words}"))
        return [*found, *_standbys(spare, heard, now)]
    at = heard.get(leader)
    if at is None or now - at > SILENT_SECONDS:
        fix = "see that it is up; an address of it among network.bootstrap helps to find it. Training goes on meanwhile"
        return [*found, warn("coordinator", f"{short(leader)} leads, and {silent(at, now)}; {words}", fix)]
    return [*found, ok("coordinator", f"{short(leader)} leads, and answered {ago(at, now)}: {words}")]


def _unlisted(told: Mapping[str, Any]) -> Finding:
    if told["said"]:
        fix = "have an invite made on its machine (coordinator invite), and join with it: shoal join INVITE"
        return fail("coordinator", f"this node is no member: {told['said']}", fix)
    if not told["heard"]:
        fix = "see that it is up; an address of it among network.bootstrap helps to find it"
        return fail("coordinator", "this node is no member: no coordinator has answered yet", fix)
    said = "this node is on no member list that is known here: a coordinator answers, and did not refuse it"
    fix = "set the clocks of both machines right (a list is not taken from one that is 30 s ahead), or wait a minute"
    return fail("coordinator", said, fix)


def _standbys(spare: list[str], heard: Mapping[str, float], now: float) -> list[Finding]:
    if not spare:
        return [ok("coordinator", "no standby is named: if this one dies, rounds stand still until it is back")]
    return [
        ok("coordinator", f"{short(one)} stands by, and was heard of {ago(heard[one], now)}")
        if now - heard.get(one, 0.0) <= SILENT_SECONDS
        else warn(
            "coordinator",
            f"{short(one)} is to stand by, and {silent(heard.get(one), now)}",
            "start it, in its own home: coordinator up",
        )
        for one in spare
    ]


def federation(subject: Subject) -> list[Finding]:
    """The policy that is published, or followed: how new it is, and whether its leader is there."""
    settings = subject.config.federation
    if not settings.publish and not settings.follow:
        return []
    if subject.status is None:
        said = f"it follows {short(settings.follow)}" if settings.follow else "it publishes its policy"
        return [ok("federation", f"{said}; what of it is new is known while the node runs")]
    have = subject.status.get("policy_version")
    if settings.publish:
        if have is None:
            return [warn("federation", "no version is published yet", "the first one comes with the first step")]
        return [ok("federation", f"version {have} of the policy is published")]
    followed = subject.status.get("followed")
    if followed is None:
        return [ok("federation", "not known yet: the node is starting")]
    return _followed(followed, have, time.time())


def _followed(followed: Mapping[str, Any], have: int | None, now: float) -> list[Finding]:
    leader, newest = short(followed["leader"]), followed["newest"]
    if followed["problem"]:
        what, _, fix = followed["problem"].partition("; ")
        return [warn("federation", f"the policy of {leader}: {what}", fix or "see `shoal logs`")]
    answered = followed["answered"]
    words = f"version {have} is here"
    if newest is not None:
        words += f", the newest known is {newest}, signed {ago(followed['issued'], now)}"
    if answered is None or now - answered > SILENT_SECONDS:
        return [
            warn(
                "federation",
                f"the leader {leader} {silent(answered, now)}; {words}",
                "see that it is up, has federation.publish set, and is among shoal peers",
            )
        ]
    if newest is not None and now - followed["issued"] > OLD_SECONDS:
        return [warn("federation", f"{leader} answers; {words}", "see whether it is paused, or its training is stuck")]
    return [ok("federation", f"{leader} answered {ago(answered, now)}: {words}")]


def averaging(subject: Subject) -> list[Finding]:
    """Whether what averages is installed, and the averagers of others can be dialled."""
    settings = subject.config.averaging
    if settings.method == "none":
        return []
    if find_spec("hivemind") is None:
        fix = ".venv/bin/pip install -e '.[averaging]', or set averaging.method to none"
        return [fail("averaging", "hivemind is not installed", fix)]
    if not settings.peers:
        said = "averaging.peers names nobody: others must name this node (its address is in the events)"
        if _is_closed(subject):
            said = "members of the swarm tell each other where their averagers are"
        return [ok("averaging", f"hivemind is installed; {said}")]
    with ThreadPoolExecutor(len(settings.peers)) as pool:
        faults = list(pool.map(lambda address: unreachable(*parts(address)), settings.peers))
    if not any(faults):
        return [ok("averaging", f"hivemind is installed; all {len(faults)} of averaging.peers answer")]
    fix = "averagers' addresses change with every start: take the new one from that node's events"
    return [
        warn("averaging", f"{address.partition('/p2p/')[0]}: {fault}", fix)
        for address, fault in zip(settings.peers, faults, strict=True)
        if fault
    ]


def _is_closed(subject: Subject) -> bool:
    """Whether averagers are found through the swarm (node/averaging.py)."""
    try:
        return subject.home.is_closed()
    except HomeError:  # in no swarm yet, or a file that another check is about
        return False


def short(peer: str) -> str:
    return f"…{peer[-8:]}"


def silent(at: float | None, now: float) -> str:
    return "has not answered since the start" if at is None else f"answered last {ago(at, now)}"


def ago(at: float, now: float) -> str:
    seconds = max(0.0, now - at)
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
