"""A small view that tests change, a server over it, and its clients."""

from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from tests.web.fixture_view import TOKEN, FixtureView
from web.server import WebServer


@pytest.fixture
def view(clock: Callable[[], float]) -> FixtureView:
    """A node at step 42 with two peers that are there and one that is gone."""
    return FixtureView(steps=42, peers=3, connected=2, groups=40, events=7, now=clock)


@pytest.fixture
async def server(view: FixtureView, clock: Callable[[], float]) -> AsyncIterator[WebServer]:
    made = WebServer(view, host="127.0.0.1", port=0, token=TOKEN, allowed_hosts=("reef.lan",), clock=clock)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def anyone(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A client without credentials; keeps cookies, also for 127.0.0.1."""
    async with aiohttp.ClientSession(server.url, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


@pytest.fixture
async def client(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    """The command line: a client with the token."""
    async with aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield session
