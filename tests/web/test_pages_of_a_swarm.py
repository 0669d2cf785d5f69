"""The seven pages of a node that trains for real: two nodes of `shoal local` with the embedded model, who learn from
each other, looked at in Chromium by the link that `shoal open` prints."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.client import Client, DaemonUnreachable, RequestRefused, connect
from node.home import Home, HomeError
from tests.web.browsing import CHROMIUM, Browser, signed_in

pytest.importorskip("playwright", reason="needs playwright from the dev dependencies")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.network,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]
DEADLINE = 900.0
"""For what a slow machine has to compute: a start, a step."""
SETTINGS = {
    "node.threads": 1,
    "rollout.group_size": 4,
    "swarm.own_groups": 2,
    "swarm.foreign_groups": 2,
    "swarm.max_group_uses": 10,
    "eval.tasks": 4,
    "network.heal_seconds": 1,
}


def shoal(home: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "node", "--home", str(home), *arguments]


@pytest.fixture
def swarm(tmp_path: Path, no_variables: None) -> Iterator[Path]:
    """The directory of the homes node-1 and node-2."""
    flags = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    process = subprocess.Popen(shoal(tmp_path, "local", "--nodes", "2", *flags), stdout=subprocess.DEVNULL)
    try:
        yield tmp_path
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def status(home: Home) -> dict[str, Any]:
    """What the node says, or nothing while it starts."""
    try:
        return dict(connect(home).get("status"))
    except (DaemonUnreachable, RequestRefused, HomeError):
        return {}


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline
        await asyncio.sleep(1)


def has_learned_from_the_other(home: Home) -> bool:
    return bool(status(home).get("groups", {}).get("trained_foreign"))


async def test_the_pages_of_a_node_that_learns_from_another(swarm: Path) -> None:
    homes = [Home(swarm / f"node-{number}") for number in (1, 2)]
    for home in homes:
        await until(lambda home=home: has_learned_from_the_other(home))
    link = await asyncio.to_thread(subprocess.check_output, shoal(homes[0].path, "open", "--no-browser"), text=True)
    async with signed_in(link.strip()) as tab:
        node, other = connect(homes[0]), homes[1].identity().peer_id
        await overview_has_the_status(tab, node)
        await charts_are_drawn(tab, node)
        await a_group_of_the_other_is_shown_whole(tab, node, other)
        await the_other_is_among_the_peers(tab, node, other)
        await the_invite_is_there(tab, node)
        await logs_and_settings_are_those_of_the_node(tab, node)
        await a_pause_from_the_page_pauses_the_node(tab, node)
        assert tab.complaints == []


async def overview_has_the_status(tab: Browser, node: Client) -> None:
    async def agrees() -> bool:
        """A step may end between the two: then once more."""
        now = node.get("status")
        figures, page, title = await tab.text(".hero .figures"), await tab.text("#body"), await tab.page.title()
        return (
            f"Step\n{now['step']:,}\n" in figures
            and title == f"Training {now['reward']:.2f} · node-1 · Shoal"
            and f"Learned from, in all\n{now['groups']['trained_foreign']:,} peers' groups" in page
            and f"{now['groups']['published']:,} groups given" in page
        )

    await tab.until(agrees)
    now = node.get("status")
    assert (await tab.text("#name"), await tab.text("#swarm")) == ("node-1", "local, 1 peer")
    for words in (now["model"], now["peer_id"], now["engine"]):
        await tab.sees(words)


async def charts_are_drawn(tab: Browser, node: Client) -> None:
    await tab.go("training")
    await tab.sees(f"Steps 1 to {node.get('status')['step']:,}.")
    for environment in node.get("series")["environments"]:
        await tab.sees(environment)
    await tab.until(lambda: tab.count(".js-plotly-plot .main-svg"))


async def a_group_of_the_other_is_shown_whole(tab: Browser, node: Client, other: str) -> None:
    await tab.go("groups?origin=foreign&verdict=admitted")
    await tab.has("tbody tr[data-key]")
    group = node.get("groups", await tab.page.get_attribute("tbody tr", "data-key"))
    assert (group["producer"], len(group["completions"])) == (other, SETTINGS["rollout.group_size"])
    await tab.page.click("tbody tr a")
    await tab.has(".answer")
    assert await tab.count(".answer") == len(group["completions"])
    said = await tab.text("#body")
    for text in (group["prompt"][-1]["content"], *(one["text"] for one in group["completions"])):
        assert " ".join(text.split()) in " ".join(said.split())
    await tab.page.check(".check input")
    assert await tab.count(".answer [class^=heat]") > 0


async def the_other_is_among_the_peers(tab: Browser, node: Client, other: str) -> None:
    await tab.go("peers")
    await tab.has(f'tbody tr[data-key="{other}"] .dot.on')
    await tab.has(f'.graph circle[data-peer="{other}"]')
    assert await tab.count(".graph line.wire") == await tab.count(".graph line.given") == 1
    (row,) = node.get("peers")["peers"]
    assert (row["connected"], row["model"]) == (True, node.get("status")["model"])
    assert row["model"] in await tab.text("tbody tr")


async def the_invite_is_there(tab: Browser, node: Client) -> None:
    await tab.go("swarm")
    invite = node.get("swarm")["invite"]
    assert invite.startswith("shoal:")
    assert await tab.page.input_value(".invite input") == invite
    await tab.until(lambda: tab.page.evaluate("document.querySelector('.qr').naturalWidth > 100"))


async def logs_and_settings_are_those_of_the_node(tab: Browser, node: Client) -> None:
    await tab.go("logs")
    for event in node.get("events", limit=3):
        await tab.sees(event["message"][:60])
    await tab.go("settings")
    assert await tab.page.input_value("#set-rollout-group_size") == str(SETTINGS["rollout.group_size"])
    assert await tab.page.is_disabled("#set-rollout-group_size")


async def a_pause_from_the_page_pauses_the_node(tab: Browser, node: Client) -> None:
    before = node.get("status")["step"]
    await tab.page.click("#pause")
    await tab.sees("Paused", "#state")
    # from then on without "(after the step in progress)"
    await until(lambda: node.get("status")["reason"] == "asked for on the dashboard")
    paused = node.get("status")
    assert (paused["state"], paused["held_by"]) == ("PAUSED", "person")
    assert before <= paused["step"] <= before + 1
    await asyncio.sleep(5)
    assert node.get("status")["step"] == paused["step"]
    assert node.get("steps", after=paused["step"]) == []
    await tab.page.click("#pause")
    await tab.sees("Training", "#state")
    await until(lambda: node.get("status")["step"] > paused["step"])
