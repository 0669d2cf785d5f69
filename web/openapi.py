"""openapi.json: what /api/v1 takes and answers, for tools. Parameters come from web.endpoints, as the handlers' do."""

from importlib.metadata import version
from typing import Any

from web.endpoints import BODIES, QUERIES
from web.queries import Choice, Number, Parameter
from web.schemas import SCHEMAS, Schema, array, ref

GET: dict[str, tuple[str, Schema]] = {
    "status": ("what the node does, why, and what to do about it", ref("Status")),
    "steps": ("records of steps, oldest first", array(ref("Step"))),
    "series": ("steps and held-out scores for charts, in buckets", ref("Series")),
    "evaluations": ("held-out scores, oldest first", array(ref("Evaluation"))),
    "groups": ("rollout groups, newest first", array(ref("GroupSummary"), maxItems=500)),
    "groups/{id}": ("one group whole, with its prompt and completions", ref("Group")),
    "peers": ("the peers met, with what was thought of their groups", ref("Peers")),
    "peers/graph": ("this node's connections and whose groups it learned from", ref("PeerGraph")),
    "swarm": ("manifest, epoch and invite (a secret where the swarm is private)", ref("Swarm")),
    "events": ("what happened, oldest first", array(ref("Event"), maxItems=500)),
    "config": ("every setting with its value and where that comes from", ref("Config")),
    "openapi.json": ("this document", {"type": "object"}),
}
"""What a GET says, and its schema: all answers but these two are JSON."""
OTHER = {
    "swarm/invite.svg": ("the invite as a QR code", "image/svg+xml"),
    "events/stream": (
        "server-sent events: log events with ids, `status` snapshots, and `gap` where events were missed for good",
        "text/event-stream",
    ),
}
POST: dict[str, tuple[str, int, Schema]] = {
    "pause": ("pause after the step in progress", 202, ref("Status")),
    "resume": ("go on", 202, ref("Status")),
    "config": ("change settings: all that are named, or none where one is not good", 200, ref("Changed")),
    "stop": ("save and end the daemon", 202, ref("Nothing")),
    "login": ("a one-time code that signs a browser in (token only)", 200, ref("Code")),
    "logout": ("end the session of the cookie", 200, ref("Nothing")),
}
_FIELDS = {"type": "object", "additionalProperties": False}
REFUSALS = {
    "400": "something asked for makes no sense",
    "401": "not signed in",
    "403": "a page of another origin, or a session where the token is needed",
    "404": "no such thing",
    "408": "the body did not arrive in time",
    "409": "a flag or a variable overrides the setting, or a coordinator is to pause",
    "413": "the body is too long",
    "415": "the body is not application/json",
    "421": "the node does not answer as this host",
    "503": "too many event streams are open",
}


def document() -> dict[str, Any]:
    """The whole document, as JSON values."""
    paths: dict[str, dict[str, Any]] = {}
    for name, parameters in QUERIES.items():
        says, content = GET[name] if name in GET else (OTHER[name][0], None)
        kind, schema = ("application/json", content) if content else (OTHER[name][1], {"type": "string"})
        paths[f"/{name}"] = {
            "get": {
                "operationId": name,
                "summary": says,
                "parameters": [*_in_path(name), *(_parameter(*one) for one in parameters.items())],
                "responses": {
                    "200": _response(says, kind, schema),
                    **_refusals("400", "401", "403", "421", *_more(name)),
                },
            }
        }
    for name, (says, status, schema) in POST.items():
        fields = BODIES[name]
        body = {"type": "object"} if fields is None else {**_FIELDS, "properties": fields}
        paths.setdefault(f"/{name}", {})["post"] = {
            "operationId": f"post {name}",
            "summary": says,
            "requestBody": {"content": {"application/json": {"schema": body}}},
            "responses": {
                str(status): _response(says, "application/json", schema),
                **_refusals(
                    "400",
                    "401",
                    "403",
                    "408",
                    "413",
                    "415",
                    "421",
                    *(("409",) if name in ("config", "pause", "resume") else ()),
                ),
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "summary": "The local API of one node", "version": version("shoal")},
        "servers": [{"url": "/api/v1"}],
        "security": [{"token": []}, {"session": []}],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "from api.token of the node's home"},
                "session": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "shoal_session_8420",
                    "description": "shoal open",
                },
            },
        },
    }


def _in_path(name: str) -> list[dict[str, Any]]:
    schema = {"type": "string", "pattern": "^[0-9a-fA-F]{4,64}$"}
    says = "of a group: its first 4 or more hex digits will do"
    wanted = {"name": "id", "in": "path", "required": True, "description": says, "schema": schema}
    return [wanted] if "{id}" in name else []


def _more(name: str) -> tuple[str, ...]:
    return {"groups/{id}": ("404",), "swarm/invite.svg": ("404",), "events/stream": ("503",)}.get(name, ())


def _parameter(name: str, parameter: Parameter) -> dict[str, Any]:
    if isinstance(parameter, Number):
        schema: Schema = {"type": "integer", "minimum": parameter.low, "maximum": parameter.high}
    elif isinstance(parameter, Choice):
        schema = {"type": "string", "enum": list(parameter.among)}
    else:
        schema = {"type": "string", "pattern": parameter.pattern}
    if parameter.default is not None and parameter.default != -1:
        schema["default"] = parameter.default
    return {"name": name, "in": "query", "description": parameter.says, "schema": schema}


def _response(says: str, kind: str, schema: Schema) -> dict[str, Any]:
    return {"description": says, "content": {kind: {"schema": schema}}}


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: _response(REFUSALS[status], "application/json", ref("Error")) for status in sorted(statuses)}
