import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from click.testing import Result

from node.cli import joining
from node.cli.joining import NoSuchSwarm, ask, choose
from node.home import Home
from protocol.identity import Identity
from protocol.manifest import Manifest, embedded_manifest
from swarm.directory import Found
from swarm.libp2p_transport import Libp2pTransport
from swarm.peers import Discovery

Run = Callable[..., Result]
PEER = "12D3KooWGRUVh8Bh4iYtCpBKwQAeJYjJNmEUEFSoVJ1gkMq7CEYv"
ADDRESS = f"/ip4/192.0.2.1/tcp/7946/p2p/{PEER}"


def found(name: str, genesis: float = 1e9, members: int = 2) -> Found:
    return Found(embedded_manifest(name, genesis), [ADDRESS], members)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the directory answers; whom it was asked through comes first."""
    seen: list[Any] = [None, [found("reef"), found("lagoon", members=1)]]

    async def ask(ways: Sequence[str]) -> tuple[list[Found], list[str]]:
        seen[0] = list(ways)
        return seen[1], ["12D3KooWx: no answer"]

    monkeypatch.setattr(joining, "ask", ask)
    return seen


def test_a_swarm_is_chosen_by_name_or_digest() -> None:
    reef, lagoon, twin = found("reef"), found("lagoon"), found("reef", genesis=2e9)
    digest = twin.manifest.digest.hex()
    assert choose(" lagoon ", [reef, lagoon]) is lagoon
    assert choose(digest[:12].upper(), [reef, lagoon, twin]) is twin
    with pytest.raises(NoSuchSwarm, match=f"2 swarms are called 'reef' ; join one by its whole digest: .*{digest}"):
        choose("reef", [reef, lagoon, twin])
    with pytest.raises(NoSuchSwarm, match=r"no public swarm is called 'bay' \(found: reef, lagoon\)"):
        choose("bay", [reef, lagoon])
    with pytest.raises(NoSuchSwarm, match="none was found"):
        choose(digest[:3], [])


def test_a_digest_that_another_swarm_is_named_after_is_never_that_swarm() -> None:
    reef = found("reef")
    digest = reef.manifest.digest.hex()
    assert choose(digest, [found(digest), reef]) is reef
    with pytest.raises(NoSuchSwarm, match=f"join one by its whole digest: .*{digest} "):
        choose(digest[:12], [found(digest[:12]), reef])
    named = found(digest[:4])  # and a name is not taken by who makes a digest that begins so
    with pytest.raises(NoSuchSwarm, match=f"2 swarms are called '{digest[:4]}'"):
        choose(digest[:4], [named, reef])


def test_discover_and_join_by_name(run: Run, home: Home, directory: list[Any]) -> None:
    listed = json.loads(run("--home", home.path, "swarm", "discover", "--via", ADDRESS, "--json").stdout)
    assert directory[0] == [ADDRESS]
    assert [(one["name"], one["members"], one["listed_by"]) for one in listed["swarms"]] == [
        ("reef", 2, 1), ("lagoon", 1, 1),
    ]  # fmt: skip
    assert listed["problems"] == ["12D3KooWx: no answer"]
    shown = run("--home", home.path, "swarm", "discover", "--via", ADDRESS)
    assert "letter_counting, chain_sum" in shown.stdout
    assert "no answer" in shown.stderr
    joined = run("--home", home.path, "join", "reef", "--via", ADDRESS)
    assert joined.exit_code == 0, joined.stderr
    assert "Joined swarm reef" in joined.stdout
    assert home.swarm().bootstrap == (ADDRESS,)
    assert home.manifest() == found("reef").manifest


def test_a_way_in_is_needed_and_must_be_one(run: Run, home: Home, directory: list[Any]) -> None:
    nobody = run("--home", home.path, "swarm", "discover")
    assert (nobody.exit_code, "--via" in nobody.stderr) == (1, True)
    bad = run("--home", home.path, "swarm", "discover", "--via", "/ip4/192.0.2.1")
    assert (bad.exit_code, "/p2p/PEER_ID" in bad.stderr) == (2, True)
    run("--home", home.path, "config", "set", "network.bootstrap", ADDRESS)
    assert run("--home", home.path, "swarm", "discover").exit_code == 0
    assert directory[0] == [ADDRESS]


def test_only_the_swarm_that_was_meant_is_listed(run: Run, home: Home) -> None:
    made = json.loads(run("--home", home.path, "swarm", "create", "reef", "--public", "--json").stdout)
    assert made["public"]
    assert home.is_listed()
    run("--home", home.path, "swarm", "publish", "--off")
    assert not home.is_listed()
    assert "is listed" in run("--home", home.path, "swarm", "publish").stdout
    home.leave()
    assert not home.listed_path.exists()
    home.found(embedded_manifest("another", time.time()))
    assert not home.is_listed()


def test_a_private_swarm_is_never_listed(run: Run, home: Home) -> None:
    both = run("--home", home.path, "swarm", "create", "reef", "--public", "--private")
    assert (both.exit_code, "not both" in both.stderr) == (2, True)
    assert run("--home", home.path, "swarm", "create", "reef", "--private").exit_code == 0
    refused = run("--home", home.path, "swarm", "publish")
    assert (refused.exit_code, "is private" in refused.stderr) == (1, True)
    manifest = home.manifest()
    assert isinstance(manifest, Manifest)
    home.listed_path.write_bytes(manifest.digest.hex().encode())
    assert not home.is_listed()


@pytest.mark.network
async def test_who_only_asked_is_not_dialled_when_it_is_gone() -> None:
    node = Libp2pTransport(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"])
    await node.start()
    discovery = Discovery(node, [], bytes(32), clock=time.monotonic, tick=0.05)
    service = asyncio.create_task(discovery.run())
    try:
        asked = asyncio.create_task(ask(node.addresses()))
        async with asyncio.timeout(60):
            while not discovery._known:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
            await asked
            while discovery._known:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        service.cancel()
        await node.stop()
