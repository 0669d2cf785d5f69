"""openapi.json says what the API does: schemathesis makes requests of it, and checks the answers against it."""

import asyncio
import threading
import time
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.web.fixture_view import TOKEN, FixtureView
from web.endpoints import GET
from web.openapi import document
from web.server import WebServer

schemathesis.checks.load_all_checks()
CHECKS = schemathesis.checks.CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)
ACCEPTED = schemathesis.checks.CHECKS.get_by_names(["positive_data_acceptance"])
API = schemathesis.openapi.from_dict(document())
OPERATIONS = [(method, path) for path, methods in document()["paths"].items() for method in methods]
ENDLESS = ("get", "/events/stream")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own: schemathesis asks from this one."""
    loop, started, found = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        server = WebServer(
            FixtureView(steps=42, peers=3, groups=40, events=7),
            host="127.0.0.1",
            port=0,
            token=TOKEN,
            allowed_hosts=(),
            clock=time.time,
        )
        await server.start()
        found.append((server, server.url))
        started.set()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop)
    assert started.wait(10)
    server, url = found[0]
    yield url
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), [operation for operation in OPERATIONS if operation != ENDLESS])
def test_answers_are_as_described(method: str, path: str, mode: GenerationMode, url: str) -> None:
    operation = API[path][method]
    # a schema cannot say that a reason is printable, and does not say which settings there are
    checks = CHECKS if (method, path) in (("post", "/pause"), ("post", "/config")) else [*CHECKS, *ACCEPTED]

    @hypothesis.settings(
        max_examples=8,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def asked(case: schemathesis.Case) -> None:
        case.call_and_validate(
            base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5, checks=checks
        )

    asked()


def test_every_route_of_the_api_is_in_it_and_nothing_else() -> None:
    server = WebServer(
        FixtureView(steps=42, peers=3, groups=40, events=7),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        allowed_hosts=(),
        clock=time.time,
    )
    there = {
        (route.method.lower(), route.resource.canonical.removeprefix("/api/v1"))
        for route in server.app.router.routes()
        if route.resource is not None and route.resource.canonical.startswith("/api/") and route.method != "HEAD"
    }
    assert there == {(method, path) for path, methods in document()["paths"].items() for method in methods}


def test_limits_are_those_of_the_handlers() -> None:
    described = {
        one["name"]: one["schema"]
        for one in document()["paths"]["/series"]["get"]["parameters"]
        if one["in"] == "query"
    }
    points = GET["series"].parameters["points"]
    assert described["points"] == {"type": "integer", "minimum": 50, "maximum": 2000, "default": points.default}
    assert set(described) == {"points", "from", "to"}
