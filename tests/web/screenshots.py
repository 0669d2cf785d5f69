"""Draws every page of the dashboard, light, dark and on a phone: python -m tests.web.screenshots DIRECTORY

Over made-up data; with --link LINK, as `shoal open --no-browser` prints it, over that node. Nothing is checked here:
the pictures are for the documents, and to be looked at.
"""

import argparse
import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.web.browsing import PAGES, PHONE, Browser, browser, signed_in
from tests.web.fixture_view import FixtureView

DESK = {"width": 1280, "height": 900}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESK, "color_scheme": "light"},
    "dark": {"viewport": DESK, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
}
SHOWN = (*PAGES, "group-detail")
SETTLE_SECONDS = 1.5
"""For charts to be drawn."""


def opened(link: str | None, **options: Any) -> AbstractAsyncContextManager[Browser]:
    return signed_in(link, **options) if link else browser(FixtureView(), **options)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--link")
    parser.add_argument("--pages", nargs="*", default=SHOWN, choices=SHOWN)
    parser.add_argument("--looks", nargs="*", default=[*LOOKS], choices=[*LOOKS])
    options = parser.parse_args()
    for look in options.looks:
        async with opened(options.link, **LOOKS[look]) as tab:
            for page in options.pages:
                await tab.go(page.replace("group-detail", "groups"))
                if page == "group-detail":
                    newest = await tab.page.locator("tbody a").first.get_attribute("href")
                    await tab.go(newest.removeprefix("#/"))
                await asyncio.sleep(SETTLE_SECONDS)
                # of long lists the beginning tells enough
                height = min(await tab.page.evaluate("document.documentElement.scrollHeight"), 1600)
                await tab.page.set_viewport_size(
                    {"width": LOOKS[look]["viewport"]["width"], "height": max(height, 600)}
                )
                await asyncio.sleep(SETTLE_SECONDS)
                await tab.page.screenshot(path=options.directory / f"{page}-{look}.png")
                await tab.page.set_viewport_size(LOOKS[look]["viewport"])


if __name__ == "__main__":
    asyncio.run(main())
