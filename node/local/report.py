"""The report of `shoal local --json`: each node's history, and what its API said last.

Steps, rewards and `trained_foreign` are of all starts; the other counts of groups since the last one of their node.
"""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from node.history import History
from node.local.member import Member
from node.view_coordinator import kept

PAGE = 500
Json = dict[str, Any]


def report_of(members: Sequence[Member]) -> Json:
    """JSON values."""
    report: Json = {"nodes": [_node(member) for member in members if member.role != "coordinator"]}
    names = {member.home.identity().peer_id: member.name for member in members}
    for member in members:
        if member.role == "coordinator":
            report["coordinator"] = _coordinator(member, names)
    return report


def _node(member: Member) -> Json:
    status = member.status
    history = History(member.home.database, time.time)
    steps: list[Json] = []
    while page := history.steps(steps[-1]["step"] if steps else 0, PAGE):
        steps += page
    held_out, trained_foreign = [history.held_out_start(), history.held_out_latest()], history.trained_foreign()
    evaluations = history.evaluations(-1, PAGE)
    history.close()
    groups = status.get("groups", {})
    speeds = [step["tokens_per_second"] for step in steps]
    checkpoints = sorted(member.home.checkpoints.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    return {
        "name": member.name,
        "role": member.role,
        "model": status.get("model"),
        "peer_id": member.home.identity().peer_id,
        "steps": len(steps),
        "reward": [step["reward"] for step in steps],
        "held_out": held_out,
        "evaluations": [[one["step"], one["mean"]] for one in evaluations],
        "groups": {name: groups.get(name, 0) for name in ("published", "fetched", "admitted")}
        | {"rejected": groups.get("rejected", {}), "trained_foreign": trained_foreign},
        "mixed": [[step["own_groups"], step["foreign_groups"]] for step in steps],
        "tokens_per_second": sum(speeds) / len(speeds) if speeds else 0.0,
        "peak_rss_mb": status.get("peak_rss_mb"),
        "restarts": len(member.ends),
        "ended_by": member.ends,
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
        **({"policy": _led(steps, groups)} if member.role == "large" else {}),
        **({"policy": _followed(steps)} if member.role == "follower" else {}),
    }


def _led(steps: Sequence[Mapping[str, Any]], groups: Mapping[str, Any]) -> Json:
    """What versions of its policy cost a leader, and how old the ones were that its followers' groups came from."""
    published = [version for step in steps for version in step.get("published", ())]
    behind = Counter(behind for step in steps for behind in step.get("behind", ()))
    return {
        "versions": len(published),
        "whole_bytes": _spread([one["whole_bytes"] for one in published if one["whole_bytes"] is not None]),
        "change_bytes": _spread([one["change_bytes"] for one in published if one["change_bytes"] is not None]),
        "copy_seconds": _spread([one["copy_seconds"] for one in published]),
        "encode_seconds": _spread([one["encode_seconds"] for one in published]),
        "groups_trained": groups.get("trained_followers", 0),
        "groups_by_versions_behind": {str(count): behind[count] for count in sorted(behind)},
    }


def _followed(steps: Sequence[Mapping[str, Any]]) -> Json:
    """What versions of another's policy cost a follower: from the leader's signature to the model having it."""
    taken_up = [step["taken_up"] for step in steps if step.get("taken_up")]
    return {
        "versions": len(taken_up),
        "bytes": _spread([one["bytes"] for one in taken_up]),
        "pull_seconds": _spread([one["pull_seconds"] for one in taken_up]),
        "after_seconds": _spread([one["after_seconds"] for one in taken_up]),
    }


def _spread(values: Sequence[float]) -> Json | None:
    """None: there are none."""
    return {"least": min(values), "median": statistics.median(values), "most": max(values)} if values else None


def _coordinator(member: Member, names: Mapping[str, str]) -> Json:
    """Its rounds and its board. `names`: of the members, by peer id."""
    manifest = member.home.manifest()
    assert manifest is not None
    shown = kept(member.home, manifest)
    assert shown is not None  # its invites are in the database
    board = shown["board"] or {"number": None, "standings": []}
    return {
        "peer_id": member.home.identity().peer_id,
        "restarts": len(member.ends),
        "ended_by": member.ends,
        "members": shown["members"],
        "round": shown["round"] and shown["round"]["number"],
        "board": [{"name": names.get(one["peer"]), **one} for one in board["standings"]],
        "board_of_round": board["number"],
    }
