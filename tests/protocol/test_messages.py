import msgspec
import pytest

from protocol.messages import Announcement, GroupRequest, LiveRequest, LiveResponse, ManifestRequest, announce_topic


def test_the_topic_names_swarm_and_shard() -> None:
    assert announce_topic(bytes(range(32)), 3) == "/shoal/000102030405060708090a0b0c0d0e0f/announce/3"


def test_requests_are_arrays_in_field_order() -> None:
    assert msgspec.msgpack.encode(GroupRequest(bytes(32), 5)) == b"\x92\xc4\x20" + bytes(32) + b"\x05"
    assert msgspec.msgpack.encode(ManifestRequest(bytes(32))) == b"\x91\xc4\x20" + bytes(32)
    assert msgspec.msgpack.encode(LiveRequest(bytes(32), (), 5)) == b"\x93\xc4\x20" + bytes(32) + b"\x90\x05"
    assert msgspec.msgpack.decode(b"\x92\xc4\x20" + bytes(32) + b"\x90", type=LiveRequest).settled == 0
    assert msgspec.msgpack.encode(LiveResponse((b"ab",))) == b"\x91\x91\xc4\x02ab"


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        (GroupRequest, [bytes(31), 0]),
        (GroupRequest, [bytes(32), -1]),
        (GroupRequest, [bytes(32), 0, 0]),
        (ManifestRequest, ["x" * 32]),
        (LiveRequest, [bytes(32), [bytes(32)] * 1025]),
        (LiveResponse, [[b""] * 65]),
        (Announcement, [bytes(32)]),
    ],
)
def test_limits_are_in_the_types(type_: type, fields: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=type_)
