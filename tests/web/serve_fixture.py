"""The dashboard over made-up data, to look at: python -m tests.web.serve_fixture [PORT]

Prints a sign-in link; `--hostile` fills every text with what a hostile peer might send, `--empty` is a node's first
minute.
"""

import argparse
import asyncio

from tests.web.browsing import make_server, sign_in
from tests.web.fixture_view import TOKEN, FixtureView


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", nargs="?", type=int, default=8420)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--state", default="TRAINING")
    options = parser.parse_args()
    node = FixtureView(steps=0, peers=0, groups=0) if options.empty else FixtureView(hostile=options.hostile)
    node.state["state"] = options.state
    server = make_server(node, options.port)
    await server.start()
    print(await sign_in(server.url, TOKEN), flush=True)  # noqa: T201
    while True:
        await asyncio.sleep(12)
        if node.state["state"] == "TRAINING" and not options.empty:
            node.step()


if __name__ == "__main__":
    asyncio.run(main())
