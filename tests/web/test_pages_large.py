"""How soon the pages of a node stand that has 100,000 steps, 1,000 peers and 5,000 groups in its real tables.

The daemon is made and asked, and not run: it has no connections and does not train meanwhile.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.daemon import Daemon
from node.home import Home
from node.settings import load
from node.view import DaemonView
from tests.web.browsing import CHROMIUM, CONTENT, PAGES, make_server, sign_in, signed_in
from tests.web.fixture_view import TOKEN
from tests.web.long_home import make_long_home

pytest.importorskip("playwright", reason="needs playwright from the dev dependencies")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]
BOUND_MS = 3000.0
"""On a machine with other work; the aim is 1,000."""
TRIES = 3
PAINT = 'performance.getEntriesByName("first-contentful-paint")'
WATCH = """
const content = %s;
const seen = () => {
    const wanted = content[location.hash.slice(2) || "overview"];
    if (window.stood === undefined && document.querySelector(wanted)) window.stood = performance.now();
};
new MutationObserver(seen).observe(document, { subtree: true, childList: true, attributes: true });
"""


@pytest.fixture
def daemon(tmp_path: Path, no_variables: None) -> Iterator[Daemon]:
    home = Home(tmp_path / "home")
    make_long_home(home, time.time)
    made = Daemon(home, load(home, {}), clock=time.time)
    made.manifest = home.manifest()
    made.progress.say("TRAINING", "with nobody")
    yield made
    for part in (made.device, made.trained, made.history, made.store):
        part.close()


async def test_the_pages_of_a_long_run_stand_soon(daemon: Daemon) -> None:
    server = make_server(DaemonView(daemon))
    await server.start()
    try:
        async with signed_in(await sign_in(server.url, TOKEN)) as tab:
            assert "Step\n100,000" in await tab.text(".hero .figures")
            await tab.page.add_init_script(WATCH % CONTENT)
            for page in PAGES:
                await tab.go(page)
                times = []
                for _ in range(TRIES):
                    await tab.page.reload()
                    await tab.until(lambda: tab.page.evaluate(f"window.stood && {PAINT}.length"))
                    times.append(await tab.page.evaluate(f"[{PAINT}[0].startTime, window.stood]"))
                paint, stood = map(min, zip(*times, strict=True))
                print(f"{page}: first paint after {paint:.0f} ms, its numbers after {stood:.0f} ms")  # noqa: T201
                assert max(paint, stood) < BOUND_MS
            await tab.go("groups")
            assert await tab.count("tbody tr") == 50
            await tab.go("peers")
            assert await tab.text(".pager span") == "1 to 50 of 1,000 peers"
            assert await tab.count(".graph circle") == 200
            assert tab.complaints == []
    finally:
        await server.stop()
