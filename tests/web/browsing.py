"""A dashboard in a real browser: of any node by its sign-in link, or of a `FixtureView` behind the real server."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.web.fixture_view import TOKEN, FixtureView
from web.server import WebServer

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
AXE = Path(
    os.environ.get("AXE_CORE")
    or Path(__file__).parents[2] / ".cache" / "axe-core" / "node_modules" / "axe-core" / "axe.min.js"
)
"""axe.min.js of the npm package axe-core; .ci/install-axe puts it there."""
PAGES = ("overview", "training", "groups", "peers", "swarm", "logs", "settings")
PHONE = {"width": 390, "height": 844}
WAIT_MS = 45_000


@dataclass
class Browser:
    page: Any
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings in the console, refusals of the content security policy among them."""
    node: Any = None
    """The `FixtureView`, where it is one."""
    server: Any = None
    """The `WebServer`, where it runs in this process."""

    async def go(self, page: str) -> None:
        """Open a page by its address, and wait for its heading and its content."""
        await self.page.evaluate("hash => { location.hash = hash; }", f"#/{page}")
        name = page.partition("?")[0].partition("/")[0]
        await self.has(f'#nav a[data-page="{name}"][aria-current]')
        await self.has(CONTENT[name + "/" * ("/" in page)])

    async def count(self, selector: str) -> int:
        return await self.page.locator(selector).count()

    async def text(self, selector: str) -> str:
        return await self.page.locator(selector).first.inner_text()

    async def has(self, selector: str) -> None:
        """Wait for an element. Playwright's own waiting needs frames, which a busy machine draws few of."""
        await self.until(lambda: self.page.evaluate("wanted => document.querySelector(wanted) !== null", selector))

    async def sees(self, text: str, where: str = "body") -> None:
        """Wait for a text that is to be seen there."""
        said = """([text, where]) => {
            const found = document.querySelector(where);  // of what is hidden, innerText tells all the same
            return found !== null && found.checkVisibility() && found.innerText.includes(text);
        }"""
        await self.until(lambda: self.page.evaluate(said, [text, where]))

    async def until(self, holds: Callable[[], Awaitable[Any]]) -> None:
        """Wait until something on the page is so."""
        async with asyncio.timeout(WAIT_MS / 1000):
            while not await holds():  # noqa: ASYNC110 - the page tells nobody when it has drawn
                await asyncio.sleep(0.1)


CONTENT = {
    "overview": ".hero .figures",
    "training": ".small-multiple",
    "groups": "tbody tr, .empty:not([hidden])",
    "groups/": ".answer",
    "peers": ".graph, .graph-holder .empty",
    "swarm": ".sentences",
    "logs": ".log li, .empty:not([hidden])",
    "settings": ".setting",
}


@asynccontextmanager
async def browser(node: FixtureView, **options: Any) -> AsyncIterator[Browser]:
    """Signed in, on the overview. `options` of playwright's `new_context`."""
    server = make_server(node)
    await server.start()
    server.port = int(server.url.rpartition(":")[2])  # it may be stopped and started again, at the same address
    try:
        async with signed_in(await sign_in(server.url, TOKEN), **options) as tab:
            tab.node, tab.server = node, server
            try:
                yield tab
            finally:
                server = tab.server
    finally:
        await server.stop()


def make_server(view: Any, port: int = 0) -> WebServer:
    return WebServer(view, host="127.0.0.1", port=port, token=TOKEN, allowed_hosts=(), clock=time.time)


async def sign_in(url: str, token: str) -> str:
    """A sign-in link, made as `shoal open` does."""
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers) as client, client.post("/api/v1/login") as answer:
        return url + (await answer.json())["path"]


@asynccontextmanager
async def signed_in(link: str, **options: Any) -> AsyncIterator[Browser]:
    """Chromium after this sign-in link, on the overview."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        context = await chromium.new_context(**{"reduced_motion": "reduce", **options})
        page = await context.new_page()
        page.set_default_timeout(WAIT_MS)
        made = Browser(page)
        page.on("console", lambda said: said.type in ("error", "warning") and made.complaints.append(said.text))
        page.on("pageerror", lambda error: made.complaints.append(str(error)))
        await page.goto(link)
        await made.has(CONTENT["overview"])
        yield made
        await chromium.close()
