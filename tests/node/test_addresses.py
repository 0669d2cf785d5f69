from pathlib import Path

import pytest

from node import addresses
from node.addresses import caution, interface_addresses, reachable


def test_unspecified_addresses_become_real_ones() -> None:
    own = interface_addresses(4)
    assert own[-1] == "127.0.0.1"
    assert reachable(["/ip4/0.0.0.0/tcp/1/p2p/x"]) == tuple(f"/ip4/{address}/tcp/1/p2p/x" for address in own)
    kept = ["/ip4/192.0.2.7/tcp/1/p2p/x", "/dns4/node.example/tcp/1/p2p/x"]
    assert reachable([*kept, kept[0]]) == tuple(kept)


def test_who_may_not_be_able_to_use_an_invite_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setattr(addresses, "CONTAINER_MARKS", (str(mark),))
    lan, loopback = "/ip4/172.17.0.2/tcp/7946/p2p/x", "/ip4/127.0.0.1/tcp/7946/p2p/x"
    assert caution((lan, loopback), ()) == caution((), ()) == ""
    assert "of this machine only" in caution((loopback, "/ip6/::1/tcp/7946/p2p/x"), ())
    mark.touch()
    assert "SHOAL_NETWORK_ANNOUNCE" in caution((lan, loopback), ())
    assert caution((lan,), ("/dns4/node.example/tcp/7946",)) == ""
