"""The parameters and fields of every endpoint under /api/v1, in the one place that handlers and openapi.json read."""

from collections.abc import Mapping

from protocol.rejection import Reason
from web.queries import MAX_ROW, Choice, Number, Parameter, Text
from web.schemas import Schema

VERDICTS = ("admitted", *(str(reason) for reason in Reason))
PEER_ORDERS = ("last_seen", "reputation", "admitted", "rejected", "peer_id")
MAX_OFFSET = 1_000_000
MAX_REASON = 200

STEP = "steps after this one"
QUERIES: Mapping[str, Mapping[str, Parameter]] = {
    "status": {},
    "steps": {"after": Number(0, 0, MAX_ROW, STEP), "limit": Number(100, 1, 10_000, "at most so many")},
    "series": {
        "points": Number(400, 50, 2000, "buckets to make of the steps, about"),
        "from": Number(None, 0, MAX_ROW, "from this step on"),
        "to": Number(None, 0, MAX_ROW, "up to this step"),
    },
    "evaluations": {
        "after": Number(-1, 0, MAX_ROW, f"{STEP}; without it from the initial model's on, which is step 0"),
        "limit": Number(1000, 1, 10_000, "at most so many"),
    },
    "groups": {
        "before": Number(None, 1, MAX_ROW, "groups with a smaller row"),
        "limit": Number(50, 1, 500, "at most so many"),
        "origin": Choice(None, ("own", "foreign"), "made by this node, or by a peer"),
        "verdict": Choice(None, VERDICTS, "what was thought of it"),
        "environment": Text(64, r"[A-Za-z0-9._/+-]", "name of the environment"),
        "producer": Text(128, r"[A-Za-z0-9]", "peer id of whoever made it"),
    },
    "groups/{id}": {},
    "peers": {
        "offset": Number(0, 0, MAX_OFFSET, "leave out so many"),
        "limit": Number(100, 1, 500, "at most so many"),
        "sort": Choice("last_seen", PEER_ORDERS, "in this order"),
        "descending": Choice("1", ("0", "1"), "1: from the largest"),
        "search": Text(128, r"[^\x00-\x1f\x7f]", "peers whose id or model has this in it"),
    },
    "peers/graph": {},
    "swarm": {},
    "swarm/invite.svg": {},
    "events": {
        "after": Number(None, 0, MAX_ROW, "events after this id; without it the newest ones"),
        "limit": Number(100, 1, 500, "at most so many"),
    },
    "events/stream": {"after": Number(None, 0, MAX_ROW, "events after this id; without it what happens from now on")},
    "config": {},
    "openapi.json": {},
}

_REASON: Schema = {"type": "string", "maxLength": MAX_REASON, "description": "one line; the status shows it"}
BODIES: Mapping[str, Mapping[str, Schema] | None] = {
    "pause": {"reason": _REASON},
    "resume": {},
    "config": None,
    "stop": {},
    "login": {},
    "logout": {},
}
"""The fields that a POST takes; None: those that the node has settings for."""
