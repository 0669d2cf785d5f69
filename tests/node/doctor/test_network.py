"""Clock, ports, reachability and bootstrap peers, on sockets of this machine."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.config import Config
from node.doctor import network
from node.doctor.examination import subject
from node.doctor.finding import Subject
from node.home import Home
from protocol.identity import Identity
from protocol.invite import Invite
from tests.node.doctor.test_examination import STATUS

pytestmark = pytest.mark.network


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return port_of(server)


def of(home: Home, status: dict[str, Any] | None = None, **sections: Any) -> Subject:
    node = subject(home, {})
    return replace(node, config=Config.model_validate(sections), status=status, known={"pid": os.getpid()})


def test_the_kernel_is_asked_whether_the_clock_is_synchronised() -> None:
    told = network.kernel_clock()
    assert told is None or (told[0] in (True, False) and told[1] >= 0)


@pytest.mark.parametrize(
    ("kernel", "verdict", "words"),
    [((True, 0.004), "ok", "to 0.004 s"), ((False, 16.0), "warn", "not synchronised"), (None, "ok", "not checked")],
)
def test_clock(home: Home, monkeypatch: pytest.MonkeyPatch, kernel: Any, verdict: str, words: str) -> None:
    monkeypatch.setattr(network, "kernel_clock", lambda: kernel)
    (found,) = network.clock(of(home))
    assert (found.verdict, words in found.said) == (verdict, True)
    ahead = network.clock(of(home, {**STATUS, "groups": {"rejected": {"from_future": 7}}}))
    assert (ahead[1].verdict, ahead[1].said.startswith("7 records of peers")) == ("warn", True)


def test_ports_free_taken_and_held_by_the_node(home: Home, listening: socket.socket) -> None:
    taken, free = port_of(listening), free_port()
    sections: dict[str, Any] = {"network": {"listen": f"/ip4/127.0.0.1/tcp/{taken}"}, "web": {"port": free}}
    swarm, page = network.ports(of(home, **sections))
    assert (swarm.verdict, swarm.said) == ("fail", f"swarm port 127.0.0.1:{taken}: another program holds it")
    assert (page.verdict, page.said) == ("ok", f"dashboard {free} is free")
    swarm, _ = network.ports(of(home, STATUS, **sections))  # this process is the node
    assert (swarm.verdict, swarm.said) == ("ok", f"swarm port {taken} is held by the running node")
    chosen, busy = network.ports(of(home, web={"port": taken}))
    assert (chosen.verdict, "a free one is chosen" in chosen.said) == ("ok", True)
    assert busy.verdict == "warn"  # the page takes another one
    home.keep_listen_port(taken)
    assert network.ports(of(home))[0].verdict == "fail"
    elsewhere = of(home, network={"listen": "/ip4/192.0.2.1/tcp/7946"})
    assert "assign requested address" in network.ports(elsewhere)[0].said


def test_reachability(home: Home, monkeypatch: pytest.MonkeyPatch, listening: socket.socket) -> None:
    loopback = of(home, network={"listen": "/ip4/127.0.0.1/tcp/7946"})
    (local,) = network.reachability(loopback)
    assert (local.verdict, "only this machine" in local.said) == ("warn", True)

    everywhere = of(home, STATUS, network={"listen": "/ip4/0.0.0.0/tcp/7946"})
    monkeypatch.setattr(network, "interface_addresses", lambda version: ["192.168.1.5", "127.0.0.1"])
    (behind,) = network.reachability(everywhere)
    assert (behind.verdict, "forward TCP port 7946" in behind.fix) == ("warn", True)

    def connected(*hosts: str) -> None:
        made = [SimpleNamespace(status="ESTABLISHED", laddr=SimpleNamespace(port=7946), raddr=SimpleNamespace(ip=host))
                for host in hosts]  # fmt: skip
        monkeypatch.setattr(network, "connections", lambda pid: made)

    connected("192.168.1.9", "192.168.1.5")  # somebody of the same network, and this machine itself
    lan, still = network.reachability(everywhere)
    assert (lan.verdict, lan.said, still.verdict) == ("ok", "dialled by 1 peers now: 192.168.1.9", "warn")
    connected("9.9.9.9", "::ffff:192.168.1.9")
    (dialled,) = network.reachability(everywhere)
    assert (dialled.verdict, dialled.said) == ("ok", "dialled by 2 peers now: 192.168.1.9, 9.9.9.9")
    connected()
    monkeypatch.setattr(network, "interface_addresses", lambda version: ["9.9.9.9"])
    (public,) = network.reachability(everywhere)
    assert (public.verdict, "firewall" in public.said) == ("ok", True)

    announced = {
        "network": {"announce": [f"/ip4/127.0.0.1/tcp/{port_of(listening)}", f"/ip4/127.0.0.1/tcp/{free_port()}"]}
    }
    answers, silent = network.reachability(of(home, **announced))
    assert (answers.verdict, silent.verdict) == ("ok", "warn")


def test_connections_of_a_real_process(listening: socket.socket) -> None:
    """What the operating system tells of this process: its listening port, and who has connected to it."""
    port = port_of(listening)
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = listening.accept()
        with accepted:
            assert port in network.listened(os.getpid())
            inside = [c for c in network.connections(os.getpid()) if c.laddr.port == port and c.raddr]
            assert [c.raddr.ip for c in inside] == ["127.0.0.1"]
            assert network.incoming(os.getpid(), port) == []  # this machine's own do not count
    assert network.connections(2**22 + 1) == []


def test_bootstrap(home: Home, listening: socket.socket) -> None:
    assert network.bootstrap(of(home))[0].said.startswith("no peer to dial")
    peer = Identity.generate().peer_id
    there, gone = f"/ip4/127.0.0.1/tcp/{port_of(listening)}/p2p/{peer}", f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer}"
    home.join(Invite(b"d" * 32, (there, gone), None, "s"))
    (one,) = network.bootstrap(of(home))
    assert (one.verdict, "refused" in one.said.lower()) == ("warn", True)
    home.join(Invite(b"d" * 32, (gone,), None, "s"))
    assert network.bootstrap(of(home))[0].verdict == "fail"
    assert network.bootstrap(of(home, STATUS))[0].verdict == "warn"  # it has found another way in
    home.join(Invite(b"d" * 32, (there,), None, "s"))
    assert network.bootstrap(of(home))[0].verdict == "ok"


def test_a_host_that_does_not_answer_costs_the_deadline_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PROBE_SECONDS", 0.2)
    with socket.socket() as full:  # a backlog that is full drops what comes
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert network.unreachable("127.0.0.1", port_of(full)) == "no answer within 0 s"
        for one in held:
            one.close()
