"""openapi.json: what /api/v1 takes and answers, for tools. It is made of web.endpoints, as the handlers are."""

from importlib.metadata import version
from typing import Any

from web.endpoints import GET, POST
from web.queries import Choice, Number, Parameter
from web.schemas import SCHEMAS, Schema, ref

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
    for name, get in GET.items():
        paths[f"/{name}"] = {
            "get": {
                "operationId": name,
                "summary": get.says,
                "parameters": [*_in_path(name), *(_parameter(*one) for one in get.parameters.items())],
                "responses": {
                    "200": _response(get.says, get.kind, get.schema),
                    **_refusals("400", "401", "403", "421", *_more(name)),
                },
            }
        }
    for name, post in POST.items():
        body = {"type": "object"} if post.fields is None else {**_FIELDS, "properties": post.fields}
        paths.setdefault(f"/{name}", {})["post"] = {
            "operationId": f"post {name}",
            "summary": post.says,
            "requestBody": {"content": {"application/json": {"schema": body}}},
            "responses": {
                str(post.status): _response(post.says, "application/json", post.schema),
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
