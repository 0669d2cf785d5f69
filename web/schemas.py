"""JSON Schemas of the API's answers, for openapi.json. Answers may have more fields than are named here."""

from typing import Any

from web.probes import EXCHANGE_TROUBLE

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def array(of: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": of, **limits}


def mapping(to: Schema) -> Schema:
    return {"type": "object", "additionalProperties": to}


def obj(optional: dict[str, Schema] | None = None, **required: Schema) -> Schema:
    """An object with these fields, of which the `optional` ones may be missing."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def maybe(schema: Schema) -> Schema:
    return (
        {"anyOf": [schema, {"type": "null"}]} if "type" not in schema else {**schema, "type": [schema["type"], "null"]}
    )


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_MEANS = array(maybe(NUMBER))

STEP_NUMBERS = (
    "own_groups",
    "foreign_groups",
    "own_informative",
    "foreign_informative",
    "tokens_per_second",
    "seconds",
    "loss",
    "kl_behaviour",
    "entropy",
    "clip_fraction",
    "ess",
    "grad_norm",
    "max_mismatch",
    "completion_tokens",
    "unparsed",
    "own_reward",
    "foreign_reward",
)
"""What charts show of steps, in the order of its columns on disk: node/series.py writes rows by position."""

SCHEMAS: dict[str, Schema] = {
    "Error": obj(error={**TEXT, "description": "what is wrong"}, fix={**TEXT, "description": "what to do about it"}),
    "Status": obj(
        state={
            **TEXT,
            "enum": ["STARTING", "RESUMING", "TRAINING", "WAITING", "PAUSED", "IDLE", "STOPPING", "FAILED"],
        },
        reason=TEXT,
        next={**TEXT, "description": "what a person should do, or empty"},
        step=INTEGER,
        reward={**maybe(NUMBER), "description": "mean of the last step"},
        reward_start=maybe(NUMBER),
        held_out=maybe(NUMBER),
        held_out_start=maybe(NUMBER),
        held_out_best=maybe(NUMBER),
        held_out_steps={**maybe(array(INTEGER, minItems=2, maxItems=2)), "description": "first and latest"},
        tokens_per_second=NUMBER,
        own_groups={**INTEGER, "description": "of the last step, as foreign_groups"},
        foreign_groups=INTEGER,
        peers=INTEGER,
        peer_id=TEXT,
        name=TEXT,
        swarm=TEXT,
        stage=TEXT,
        stage_seconds=NUMBER,
        stage_count={
            **maybe(array(INTEGER, minItems=2, maxItems=2)),
            "description": "parts of the stage done, and of how many",
        },
        stages={**mapping(NUMBER), "description": "seconds of each stage of the current step"},
        last_step_age={
            **maybe(NUMBER),
            "description": "seconds since the last step or, if that is later, the end of a pause",
        },
        step_deadline={**NUMBER, "description": "seconds after which a missing step is a fault"},
        rss_mb=NUMBER,
        peak_rss_mb=NUMBER,
        memory={**mapping(INTEGER), "description": "bytes of the trainer by kind, as of the last update"},
        uptime=NUMBER,
        version=TEXT,
        model=TEXT,
        engine={**TEXT, "description": "which one samples, and why"},
        groups=obj(
            {
                "published": INTEGER,
                "fetched": INTEGER,
                "admitted": INTEGER,
                "rejected": mapping(INTEGER),
                **dict.fromkeys(EXCHANGE_TROUBLE, INTEGER),
                "trained_followers": {**INTEGER, "description": "of the node's whole life, as trained_foreign"},
            },
            trained_foreign=INTEGER,
        ),
        optional={
            "held_by": {"enum": ["person", "quiet_hours", "hours_per_day", "disk", None]},
            "resumes_at": {**maybe(NUMBER), "description": "unix seconds at which it goes on by itself"},
            "trained_today_seconds": NUMBER,
            "policy_version": {**maybe(INTEGER), "description": "of the policy that is published, or followed"},
            "followed": maybe(
                obj(
                    leader=TEXT,
                    newest={**maybe(INTEGER), "description": "version known"},
                    issued=maybe(NUMBER),
                    answered={**maybe(NUMBER), "description": "when the leader answered last"},
                    problem=TEXT,
                )
            ),
        },
    ),
    "Step": obj({"at": NUMBER, "reward": maybe(NUMBER)}, step=INTEGER),
    "Evaluation": obj(step=INTEGER, at=NUMBER, mean=NUMBER, scores=mapping(NUMBER)),
    "Series": obj(
        dict.fromkeys(STEP_NUMBERS, _MEANS),
        first=maybe(INTEGER),
        last=maybe(INTEGER),
        width={**INTEGER, "minimum": 1, "description": "steps a point"},
        step={**array(INTEGER), "description": "the last one of each point"},
        reward=_MEANS,
        reward_low={**_MEANS, "description": "of the steps' means"},
        reward_high=_MEANS,
        environments=mapping(_MEANS),
        evaluations=obj(step=array(INTEGER), mean=_MEANS, scores=mapping(_MEANS)),
    ),
    "GroupSummary": obj(
        {"model": TEXT, "claimed": array(NUMBER), "size": INTEGER, "uses": INTEGER},
        row=INTEGER,
        id={**TEXT, "pattern": "^[0-9a-f]{64}$"},
        origin={**TEXT, "enum": ["own", "foreign"]},
        producer=TEXT,
        environment=TEXT,
        epoch=INTEGER,
        rewards=array(NUMBER),
        verdict=TEXT,
        detail=TEXT,
        at=NUMBER,
    ),
    "Group": {
        "allOf": [
            ref("GroupSummary"),
            obj(
                prompt=array(obj(role=TEXT, content=TEXT)),
                completions=array(ref("Completion")),
                task=obj(
                    environment=TEXT,
                    version=TEXT,
                    seed={**TEXT, "pattern": "^[0-9]{1,19}$", "description": "63 bits: too long for a JSON number"},
                    index=INTEGER,
                ),
                shared={**FLAG, "description": "a task that every node of the swarm has"},
                siblings=array(ref("GroupSummary"), maxItems=32),
            ),
        ]
    },
    "Completion": obj(
        {"parts": mapping(NUMBER)},
        text=TEXT,
        finish={**TEXT, "enum": ["stop", "length", "aborted"]},
        tokens=INTEGER,
        claimed=NUMBER,
        reward=maybe(NUMBER),
        pieces=maybe(array(obj(text=TEXT, logprob=maybe(NUMBER)))),
    ),
    "Peers": obj(
        total={**INTEGER, "description": "of those searched for"},
        connected={**INTEGER, "description": "of all"},
        peers=array(ref("Peer"), maxItems=500),
    ),
    "Peer": obj(
        peer_id=TEXT,
        connected=FLAG,
        direction=maybe({**TEXT, "enum": ["inbound", "outbound", None]}),
        latency_ms={**maybe(NUMBER), "description": "round trip of the last ping"},
        model=TEXT,
        reputation=SHARE,
        banned=FLAG,
        published=INTEGER,
        admitted=INTEGER,
        rejected=mapping(INTEGER),
        trained={**INTEGER, "description": "uses of its groups in updates"},
        followed={**INTEGER, "description": "of them, of groups that were sampled with this node's policy"},
        last_seen=NUMBER,
    ),
    "PeerGraph": obj(
        nodes=array(
            obj(
                {"connected": FLAG, "reputation": maybe(SHARE), "model": TEXT, "admitted": INTEGER},
                peer_id=TEXT,
                self=FLAG,
            ),
            maxItems=200,
        ),
        edges=array(
            obj({"from": TEXT}, to=TEXT, kind={**TEXT, "enum": ["connection", "groups"]}, weight=NUMBER), maxItems=400
        ),
    ),
    "Swarm": {
        "type": "object",
        "description": "empty while the node knows no manifest",
        "properties": {
            "name": TEXT,
            "digest": TEXT,
            "epoch": obj(number=INTEGER, ends_in=NUMBER),
            "epochs": mapping(NUMBER),
            "words": {**array(TEXT), "description": "the manifest in sentences"},
            "private": FLAG,
            "listed": {**FLAG, "description": "in the public directory"},
            "members": {**INTEGER, "description": "seen in the last day"},
            "invite": TEXT,
            "invite_caution": {**TEXT, "description": "why others may not be able to use it, or empty"},
            "coordinator": {"anyOf": [ref("Coordination"), {"type": "null"}]},
        },
    },
    "Coordination": obj(
        coordinators=array(TEXT),
        leader=maybe(TEXT),
        leading=FLAG,
        heard={**mapping(NUMBER), "description": "when each coordinator last answered or signed something new"},
        listed_only=FLAG,
        listed={**FLAG, "description": "whether this node is a member"},
        said={**TEXT, "description": "why the coordinator does not let this node in, or empty"},
        members=INTEGER,
        faults=array(obj(coordinator=TEXT, reason=TEXT, detail=TEXT)),
        round=maybe(
            obj(
                number=INTEGER,
                state={**TEXT, "enum": ["waiting", "open", "closing", "evaluated"]},
                term=INTEGER,
                opened=maybe(NUMBER),
                closes=maybe(NUMBER),
                answers_by=maybe(NUMBER),
                mix=mapping(SHARE),
            )
        ),
        board=maybe(
            obj(
                number=INTEGER,
                of=INTEGER,
                standings=array(
                    obj(
                        peer=TEXT,
                        mean={**maybe(NUMBER), "description": "null: absent"},
                        best=maybe(NUMBER),
                        credit=NUMBER,
                        scores=array(maybe(NUMBER)),
                    ),
                    maxItems=100,
                ),
            )
        ),
    ),
    "Event": obj(
        id=INTEGER, at=NUMBER, level={**TEXT, "enum": ["debug", "info", "warning", "error"]}, kind=TEXT, message=TEXT
    ),
    "Setting": obj(
        {"pending": {"description": "its value from the next start on, where that is another one"}},
        value={},
        source=TEXT,
        default={},
        help=TEXT,
        applies={**TEXT, "enum": ["now", "restart"]},
        type={**TEXT, "enum": ["int", "float", "bool", "str", "choice", "list"]},
        choices=maybe(array(TEXT)),
        secret=FLAG,
    ),
    "Config": mapping(ref("Setting")),
    "Changed": obj(
        applied={**array(TEXT), "description": "keys in force now"},
        restart={**array(TEXT), "description": "keys in force from the next start"},
        restart_by={**TEXT, "description": "what a person does for it"},
        config=mapping(ref("Setting")),
    ),
    "Code": obj(code=TEXT, path=TEXT, expires_in=NUMBER),
    "Nothing": {"type": "object", "maxProperties": 0},
}
