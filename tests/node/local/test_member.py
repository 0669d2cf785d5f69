"""What a process of a swarm on this machine is started with."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from node.home import Home
from node.local.member import Member, start


def test_a_page_whose_port_is_taken_keeps_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], **_: Any) -> None:
        commands.append(command)

    monkeypatch.setattr(subprocess, "Popen", note)
    home = Home(tmp_path / "home")
    home.init()
    with socket.create_server(("127.0.0.1", 0)) as other:
        wanted = int(other.getsockname()[1])
        ports = []
        for _ in range(2):  # two runs of `shoal local`
            member = Member("node-1", home, 7946, wanted)
            start(member, 1, None, ())
            ports.append(member.web_port)
            assert f"web.port={member.web_port}" in commands[-1]
    assert ports == [home.page_port()] * 2 != [wanted] * 2
    member = Member("node-1", home, 7946, wanted)
    start(member, 1, None, ())
    assert member.web_port == wanted
