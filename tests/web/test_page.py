"""The page in a real browser: signs in, shows the node, and shows what a hostile peer wrote as text."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-port=0 --remote-allow-origins=*"
)
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202egnp.exe"

pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]


class Browser:
    """One tab, over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.calls, self.complaints = socket, 0, []

    async def call(self, method: str, **parameters):
        self.calls += 1
        await self.socket.send_json({"id": self.calls, "method": method, "params": parameters})
        async with asyncio.timeout(20):
            while True:
                said = await self.socket.receive_json()
                if said.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.complaints.append(said["params"])
                if said.get("id") == self.calls:
                    return said["result"]

    async def value(self, expression: str):
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return said["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(20):
            while not await self.value(expression):  # noqa: ASYNC110 - the page tells nobody when it has drawn
                await asyncio.sleep(0.05)


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={tmp_path}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = tmp_path / "DevToolsActivePort"
        async with asyncio.timeout(30):
            while not (port_file.exists() and port_file.read_text().count("\n")):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/json") as answer:
                tab = next(tab for tab in json.loads(await answer.text()) if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                made = Browser(socket)
                for domain in ("Log", "Runtime", "Page"):
                    await made.call(f"{domain}.enable")
                yield made
    finally:
        process.terminate()
        await process.wait()


async def test_a_browser_signs_in_pauses_and_signs_out(browser, server, client, view):
    await browser.call("Page.navigate", url=server.url)
    await browser.until("!document.getElementById('signin').hidden")
    assert "shoal open" in await browser.value("document.getElementById('signin').innerText")
    path = (await (await client.post("/api/v1/login", json={})).json())["path"]
    browser.complaints.clear()
    await browser.call("Page.navigate", url=server.url + path)
    await browser.until("document.querySelectorAll('#groups tr').length === 15")
    assert await browser.value("location.pathname + location.search") == "/"
    assert await browser.value("document.getElementById('state-word').textContent") == "TRAINING"
    assert await browser.value("document.getElementById('held-out').textContent") == "0.39"
    assert await browser.value("document.querySelectorAll('#peers tr').length") == 3
    view.say("warning", "share", "something new")
    await browser.until("document.querySelector('#events li.warning .message').textContent === 'something new'")
    await browser.value("document.getElementById('pause').click()")
    await browser.until("document.getElementById('state-word').textContent === 'PAUSED'")
    assert view.calls == [("pause", "asked for on the status page")]
    await browser.value("document.getElementById('pause').click()")
    await browser.until("document.getElementById('state-word').textContent === 'TRAINING'")
    assert browser.complaints == []
    await browser.value("document.getElementById('signout').click()")
    await browser.until("!document.getElementById('signin').hidden && document.getElementById('node').hidden")


async def test_what_a_hostile_peer_writes_is_text(browser, server, client, view):
    for row in [*view.peer_rows, *view.group_rows, *view.event_rows]:
        row.update(
            {key: HOSTILE for key in ("model", "producer", "environment", "verdict", "detail", "message") if key in row}
        )
    view.peer_rows[0] |= {"model": HOSTILE * 10_000, "rejected": {HOSTILE: 1}}
    view.state |= {"reason": HOSTILE, "next": HOSTILE, "name": HOSTILE, "swarm": HOSTILE, "model": HOSTILE}
    path = (await (await client.post("/api/v1/login", json={})).json())["path"]
    await browser.call("Page.navigate", url=server.url + path)
    await browser.until("document.querySelectorAll('#groups tr').length === 15")
    await browser.value("document.querySelector('[data-group]').click()")
    await browser.until("document.getElementById('group').open")
    assert await browser.value("document.querySelectorAll('script').length") == 1
    assert await browser.value("document.querySelectorAll('img[src=\"x\"], [onerror]').length") == 0
    assert await browser.value("document.title.startsWith('0.4')")
    assert not await browser.value("document.documentElement.textContent.includes('\\u202e')")
    assert await browser.value("document.getElementById('state-reason').textContent.includes('\\\\u202egnp.exe')")
    assert await browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints == []
