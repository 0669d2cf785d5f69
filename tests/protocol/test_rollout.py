import msgspec
import pytest

from protocol.rollout import (
    Completion,
    TaskRef,
    Turn,
    pack_logprobs,
    pack_token_ids,
    unpack_logprobs,
    unpack_token_ids,
)


def test_token_ids_are_little_endian_uint32() -> None:
    assert pack_token_ids([1, 258, 2**32 - 1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"
    assert unpack_token_ids(pack_token_ids([1, 258, 2**32 - 1])) == (1, 258, 2**32 - 1)
    assert unpack_token_ids(b"") == ()
    with pytest.raises(ValueError, match="4 bytes each, got 5"):
        unpack_token_ids(bytes(5))


def test_logprobs_are_float16_and_clamped() -> None:
    assert pack_logprobs([-1.0]) == b"\x00\xbc"
    assert unpack_logprobs(pack_logprobs([-0.5, -1e9, 0.25, float("-inf")])) == (-0.5, -65504.0, 0.0, -65504.0)
    (rounded,) = unpack_logprobs(pack_logprobs([-2.3456]))
    assert rounded == pytest.approx(-2.3456, abs=1e-3)
    with pytest.raises(ValueError, match="2 bytes each, got 3"):
        unpack_logprobs(bytes(3))


def test_text_is_what_the_policy_said() -> None:
    turns = (Turn("assistant", "a"), Turn("tool", "42"), Turn("assistant", "b"))
    assert Completion(turns, "stop", 2, 0.0).text == "ab"


@pytest.mark.parametrize("name", ["", "a b", "-x", "../x", "a" * 65, "a\n", "é"])
def test_names_are_plain(name: str) -> None:
    raw = msgspec.msgpack.encode([name, "1", 0, 0])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=TaskRef)


@pytest.mark.parametrize(
    "fields", [["a", "1", -1, 0], ["a", "1", 2**63, 0], ["a", "1", 0], ["a", "1", 0, 0, 0], {"a": 1}]
)
def test_task_refs_are_strict(fields: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=TaskRef)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(["a", "1", 2**63 - 1, 0]), type=TaskRef).seed == 2**63 - 1
