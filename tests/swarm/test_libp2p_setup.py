from types import SimpleNamespace

from multiaddr import Multiaddr

from swarm.libp2p_setup import ADDRESS_SECONDS, _remembered


def test_own_addresses_are_asked_for_when_they_may_have_changed():
    now, listeners, asked = 0.0, {"tcp": object()}, []

    def get_addrs():
        asked.append(now)
        return [Multiaddr("/ip4/127.0.0.1/tcp/1")]

    host = SimpleNamespace(get_addrs=get_addrs, get_network=lambda: SimpleNamespace(listeners=listeners))
    remembered = _remembered(host, lambda: now)
    for _ in range(3):
        found = remembered()
        assert found == [Multiaddr("/ip4/127.0.0.1/tcp/1")]
        found.clear()  # what a caller does to its list is nobody else's
    assert asked == [0.0]
    now = ADDRESS_SECONDS + 1
    remembered()
    listeners["other"] = object()
    remembered()
    assert asked == [0.0, now, now]
