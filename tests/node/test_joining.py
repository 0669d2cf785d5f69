"""The addresses that a process listens at, from one start to the next."""

import socket
from pathlib import Path

import pytest

from node.config import WebConfig
from node.home import Home, HomeError
from node.joining import keep_page_port, page_port


def test_a_page_that_may_take_any_port_takes_the_same_one_again(tmp_path: Path) -> None:
    home, any_port = Home(tmp_path), WebConfig(port=0)
    assert page_port(home, any_port) == 0
    with socket.create_server(("127.0.0.1", 0)) as mine:
        taken = int(mine.getsockname()[1])
        keep_page_port(home, any_port, f"http://127.0.0.1:{taken}")
        assert page_port(home, any_port) == 0, "somebody else has it now"
    assert page_port(home, any_port) == taken
    keep_page_port(home, WebConfig(port=8420), "http://127.0.0.1:8420")
    assert (page_port(home, any_port), page_port(home, WebConfig(port=8420))) == (taken, 8420)


def test_a_kept_port_that_is_damaged_is_named_where_it_is_needed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.keep_page_port(70000)
    assert page_port(home, WebConfig(port=8420)) == 8420
    with pytest.raises(HomeError, match=r"web\.port is damaged: there is no port 70000 ; delete it"):
        page_port(home, WebConfig(port=0))
