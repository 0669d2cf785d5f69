"""Questions to a teacher among peers, and its answers: what is taken and what is not."""

import struct
from typing import Any

import msgspec
import pytest

from protocol.rejection import Rejected
from protocol.teaching import (
    MAX_TEACH_REQUEST,
    MAX_TEACH_TOKENS,
    AskedGroup,
    TeachAnswer,
    TeachRequest,
    answer_of,
    check_answer,
    check_request,
)

SWARM, TOKENIZER = b"s" * 32, b"t" * 32
ASKED = TeachRequest(SWARM, TOKENIZER, (AskedGroup((1, 2, 3), ((4, 5), (), (6,))), AskedGroup((1,), ((7,),))))
encode = msgspec.msgpack.encode


def test_a_question_and_its_answer_come_through() -> None:
    request = check_request(encode(ASKED), SWARM)
    assert (request, request.answered, request.tokens) == (ASKED, 4, 8)
    answer, logprobs = check_answer(encode(answer_of("m" * 99, 7, (-0.5, 0.25, -1e9, -3.0))), ASKED)
    assert (answer.model, answer.version, answer.refusal) == ("m" * 64, 7, "")
    assert logprobs == (-0.5, 0.0, -65504.0, -3.0)
    refused, none = check_answer(encode(TeachAnswer("m", 7, b"", "another tokenizer")), ASKED)
    assert (refused.refusal, none) == ("another tokenizer", ())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x91" * 5000, "malformed"),
        (encode((SWARM, TOKENIZER, ())), "malformed"),
        (encode((SWARM, TOKENIZER[:-1], ASKED.groups)), "malformed"),
        (encode((SWARM, TOKENIZER, (((), ((1,),)),))), "malformed"),
        (encode((SWARM, TOKENIZER, (((1,), ((-1,),)),))), "malformed"),
        (encode((SWARM, TOKENIZER, (((1,), ((2**31,),)),))), "malformed"),
        (encode((SWARM, TOKENIZER, ASKED.groups, 1)), "malformed"),
        (encode(msgspec.structs.replace(ASKED, swarm=b"x" * 32)), "wrong_swarm"),
        (encode((SWARM, TOKENIZER, (((1,) * MAX_TEACH_TOKENS, ((1,),)),))), "too_large"),
    ],
)
def test_bad_questions(data: bytes, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        check_request(data, SWARM)
    assert caught.value.reason == reason


def test_the_largest_question_fits_the_wire() -> None:
    groups = (AskedGroup((2**31 - 1,) * (MAX_TEACH_TOKENS - 64), ((2**31 - 1,),) * 64),)
    assert len(encode(TeachRequest(SWARM, TOKENIZER, groups))) < MAX_TEACH_REQUEST


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        encode(("m", 1, b"\0" * 6)),
        encode(("m", 1, b"\0" * 9)),
        encode(("m", -1, b"\0" * 8)),
        encode(("m", 1, struct.pack("<4e", -1, -1, -1, float("nan")))),
        encode(("m", 1, struct.pack("<4e", -1, -1, -1, float("-inf")))),
        encode(("m", 1, struct.pack("<4e", -1, -1, -1, 0.5))),
        encode(("m", 1, b"\0" * 8, "x" * 301)),
    ],
)
def test_bad_answers(answer: Any) -> None:
    with pytest.raises(Rejected, match="malformed"):
        check_answer(answer, ASKED)
