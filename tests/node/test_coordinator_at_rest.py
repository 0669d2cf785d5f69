"""A coordinated swarm is founded whole or not at all, wherever a kill comes."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import node.home
from node.coordinator.at_rest import begin, members_of
from node.home import Home, HomeError, NoSwarm
from tests.swarm.world import who

ANNA = who("anna").peer_id


class Killed(BaseException):
    """Where the process would end."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "lead")
    home.init()
    return home


def found(home: Home) -> None:
    begin(home, home.identity().peer_id, "lab", public=True, allowed=(ANNA,))


def test_a_kill_while_a_swarm_is_founded_leaves_all_of_it_or_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = node.home.write_atomic, 0

    def dying(*arguments: Any) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        write(*arguments)

    monkeypatch.setattr("node.home.write_atomic", dying)
    for files in range(4):
        left = files
        try:
            found(home)
        except Killed:
            with pytest.raises(NoSwarm):
                home.swarm()
            continue
        break
    assert files == 3  # manifest, listing, invite
    manifest = home.manifest()
    assert manifest is not None
    assert manifest.digest == home.swarm().manifest_digest
    assert home.is_listed()
    with closing(members_of(home, manifest)) as members:
        assert members.role_of(ANNA) == "member"


def test_a_home_that_is_in_a_swarm_keeps_its_members(home: Home) -> None:
    found(home)
    manifest = home.manifest()
    assert manifest is not None
    with pytest.raises(HomeError, match="is in swarm 'lab' already"):
        begin(home, home.identity().peer_id, "another", public=False, allowed=(who("bert").peer_id,))
    with closing(members_of(home, manifest)) as members:
        assert [one.peer for one in members.members()] == [ANNA]
