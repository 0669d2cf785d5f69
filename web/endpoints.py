"""What every endpoint under /api/v1 takes and answers, in the one place that handlers and openapi.json read."""

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.rejection import Reason
from web.queries import MAX_ROW, Choice, Number, Parameter, Text
from web.schemas import TEXT, Schema, array, ref

VERDICTS = ("admitted", *(str(reason) for reason in Reason))
PEER_ORDERS = ("last_seen", "reputation", "admitted", "rejected", "peer_id")
MAX_OFFSET = 1_000_000
MAX_REASON = 200

STEP = "steps after this one"


@dataclass(frozen=True, slots=True)
class Get:
    parameters: Mapping[str, Parameter]
    """In the order in which the view takes their values."""
    says: str
    schema: Schema
    kind: str = "application/json"


GET: Mapping[str, Get] = {
    "status": Get({}, "what the node does, why, and what to do about it", ref("Status")),
    "steps": Get(
        {"after": Number(0, 0, MAX_ROW, STEP), "limit": Number(100, 1, 10_000, "at most so many")},
        "records of steps, oldest first",
        array(ref("Step")),
    ),
    "series": Get(
        {
            "points": Number(400, 50, 2000, "buckets to make of the steps, about"),
            "from": Number(None, 0, MAX_ROW, "from this step on"),
            "to": Number(None, 0, MAX_ROW, "up to this step"),
        },
        "steps and held-out scores for charts, in buckets",
        ref("Series"),
    ),
    "evaluations": Get(
        {
            "after": Number(-1, 0, MAX_ROW, f"{STEP}; without it from the initial model's on, which is step 0"),
            "limit": Number(1000, 1, 10_000, "at most so many"),
        },
        "held-out scores, oldest first",
        array(ref("Evaluation")),
    ),
    "groups": Get(
        {
            "before": Number(None, 1, MAX_ROW, "groups with a smaller row"),
            "limit": Number(50, 1, 500, "at most so many"),
            "origin": Choice(None, ("own", "foreign"), "made by this node, or by a peer"),
            "verdict": Choice(None, VERDICTS, "what was thought of it"),
            "environment": Text(64, r"[A-Za-z0-9._/+-]", "name of the environment"),
            "producer": Text(128, r"[A-Za-z0-9]", "peer id of whoever made it"),
        },
        "rollout groups, newest first",
        array(ref("GroupSummary"), maxItems=500),
    ),
    "groups/{id}": Get({}, "one group whole, with its prompt and completions", ref("Group")),
    "peers": Get(
        {
            "offset": Number(0, 0, MAX_OFFSET, "leave out so many"),
            "limit": Number(100, 1, 500, "at most so many"),
            "sort": Choice("last_seen", PEER_ORDERS, "in this order"),
            "descending": Choice("1", ("0", "1"), "1: from the largest"),
            "search": Text(128, r"[^\x00-\x1f\x7f]", "peers whose id or model has this in it"),
        },
        "the peers met, with what was thought of their groups",
        ref("Peers"),
    ),
    "peers/graph": Get({}, "this node's connections and whose groups it learned from", ref("PeerGraph")),
    "swarm": Get({}, "manifest, epoch and invite (a secret where the swarm is private)", ref("Swarm")),
    "swarm/invite.svg": Get({}, "the invite as a QR code", TEXT, "image/svg+xml"),
    "events": Get(
        {
            "after": Number(None, 0, MAX_ROW, "events after this id; without it the newest ones"),
            "limit": Number(100, 1, 500, "at most so many"),
        },
        "what happened, oldest first",
        array(ref("Event"), maxItems=500),
    ),
    "events/stream": Get(
        {"after": Number(None, 0, MAX_ROW, "events after this id; without it what happens from now on")},
        "server-sent events: log events with ids, `status` snapshots, and `gap` where events were missed for good",
        TEXT,
        "text/event-stream",
    ),
    "config": Get({}, "every setting with its value and where that comes from", ref("Config")),
    "openapi.json": Get({}, "this document", {"type": "object"}),
}


@dataclass(frozen=True, slots=True)
class Post:
    fields: Mapping[str, Schema] | None
    """Of the body; None: those that the node has settings for."""
    says: str
    schema: Schema
    status: int = 200


_REASON: Schema = {"type": "string", "maxLength": MAX_REASON, "description": "one line; the status shows it"}
POST: Mapping[str, Post] = {
    "pause": Post({"reason": _REASON}, "pause after the step in progress", ref("Status"), 202),
    "resume": Post({}, "go on", ref("Status"), 202),
    "config": Post(None, "change settings: all that are named, or none where one is not good", ref("Changed")),
    "stop": Post({}, "save and end the daemon", ref("Nothing"), 202),
    "login": Post({}, "a one-time code that signs a browser in (token only)", ref("Code")),
    "logout": Post({}, "end the session of the cookie", ref("Nothing")),
}
