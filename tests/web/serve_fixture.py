"""The status page over the fixture view, to look at: python tests/web/serve_fixture.py [PORT]

Prints a sign-in link; `--hostile` fills every text with what a hostile peer might send.
"""

import argparse
import asyncio
import time
import urllib.request

from conftest import TOKEN, FixtureView

from web.server import WebServer

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\u202egnp.exe\u0000" + "A" * 3000


def make_hostile(view: FixtureView) -> None:
    for row in [*view.peer_rows, *view.group_rows, *view.event_rows]:
        row.update({key: HOSTILE for key in ("model", "environment", "detail", "message", "kind") if key in row})
    view.state |= {"reason": HOSTILE, "next": HOSTILE, "name": HOSTILE, "swarm": HOSTILE}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", nargs="?", type=int, default=8420)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--state", default="TRAINING")
    options = parser.parse_args()
    view = FixtureView(now=time.time())
    view.state["state"] = options.state
    if options.hostile:
        make_hostile(view)
    server = WebServer(view, host="127.0.0.1", port=options.port, token=TOKEN, allowed_hosts=(), clock=time.time)
    await server.start()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/api/v1/login", b"{}", headers)
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=5).read().decode())
    print(server.url + answer.partition('"path":"')[2].partition('"')[0], flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
