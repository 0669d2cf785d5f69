"""A dashboard in a real browser, over a `DashboardServer`."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.web.dashboard_fixture import Dashboard, DashboardServer

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
AXE = Path(os.environ.get("AXE_CORE", ""))
"""axe.min.js of the npm package axe-core."""
PAGES = ("overview", "training", "groups", "peers", "swarm", "logs", "settings")
PHONE = {"width": 390, "height": 844}
WAIT_MS = 45_000


@dataclass
class Browser:
    page: Any
    server: DashboardServer
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings in the console, refusals of the content security policy among them."""

    @property
    def node(self) -> Dashboard:
        return self.server.node

    async def go(self, page: str) -> None:
        """Open a page by its address, and wait for its heading and its content."""
        await self.page.evaluate("hash => { location.hash = hash; }", f"#/{page}")
        await self.has(f'#nav a[data-page="{page.split("/")[0]}"][aria-current]')
        await self.has(CONTENT[page.split("/")[0] + "/" * ("/" in page)])

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
async def browser(node: Dashboard, **options: Any) -> AsyncIterator[Browser]:
    """Signed in, on the overview. `options` of playwright's `new_context`."""
    from playwright.async_api import async_playwright

    server = DashboardServer(node)
    await server.start()
    try:
        async with async_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            context = await chromium.new_context(**{"reduced_motion": "reduce", **options})
            page = await context.new_page()
            page.set_default_timeout(WAIT_MS)
            made = Browser(page, server)
            page.on("console", lambda said: said.type in ("error", "warning") and made.complaints.append(said.text))
            page.on("pageerror", lambda error: made.complaints.append(str(error)))
            await page.goto(server.sign_in())
            await made.has(CONTENT["overview"])
            yield made
            await chromium.close()
    finally:
        await server.stop()
