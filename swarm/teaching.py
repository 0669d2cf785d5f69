"""A teacher among peers: takes questions, has them answered one after another, and gives the answers out.

Computing waits for the model, which may be in an update for minutes, and no stream is held open for that: who asks is
told to come back, and finds the answer then. Everything that is kept is bounded, and each peer's share of it.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from protocol.rejection import Reason, Rejected
from protocol.teaching import (
    MAX_TEACH_ANSWER,
    MAX_TEACH_REQUEST,
    MAX_TEACH_TOKENS,
    TEACH_PROTOCOL,
    TeachAnswer,
    TeachRequest,
    check_answer,
    check_request,
)
from swarm.accounts import Accounts
from swarm.allowance import Allowance
from swarm.requests import REQUEST_COST, charge
from swarm.transport import Busy, Transport, TransportError

MAX_QUESTIONS, MAX_OF_ONE = 32, 4
"""Questions that are kept, answered or not; of one peer that wait for an answer."""
KEPT_SECONDS = 300.0
"""How long an answer is kept at most: one that was lost on its way is asked for again."""
COME_BACK_SECONDS = 2.0
TRY_SECONDS = 20.0
"""Deadline of one request: a stream is answered at once."""
REQUESTS_RATE, REQUESTS_BURST = 64 * 1024.0, 4 * 1024.0 * 1024.0
"""Bytes a second that one peer may send us in the long run: asking again is a whole request."""

Compute = Callable[[TeachRequest], Awaitable[TeachAnswer]]


class NotTaught(Exception):
    """The teacher did not answer, or refuses; the message says why."""


@dataclass(slots=True)
class _Question:
    peer: str
    request: TeachRequest
    since: float
    answer: bytes = b""


class TeachServing:
    """A service: `serve_on` a transport, and `run` until cancelled. `compute` answers; a refusal is an answer, too."""

    def __init__(
        self,
        compute: Compute,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        swarm: bytes,
        tokens_a_minute: int,
        refused: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        """`tokens_a_minute`: that one peer may ask about in the long run."""
        self._compute, self._accounts, self._clock = compute, accounts, clock
        self._swarm, self._refused = swarm, refused
        self._requests = Allowance(REQUESTS_RATE, REQUESTS_BURST, clock)
        self._tokens = Allowance(tokens_a_minute / 60, max(tokens_a_minute, MAX_TEACH_TOKENS), clock)
        self._questions: dict[bytes, _Question] = {}
        self._news = asyncio.Event()

    def serve_on(self, transport: Transport) -> None:
        transport.serve(TEACH_PROTOCOL, self.asked, max_request=MAX_TEACH_REQUEST)

    async def asked(self, peer: str, data: bytes) -> bytes:
        """The answer, if it is there. Raises Busy: come back for it; Rejected."""
        if self._refused(peer):
            raise Rejected(Reason.banned, f"{peer} is not on the coordinator's member list")
        charge(self._requests, peer, REQUEST_COST + len(data))
        key = hashlib.sha256(peer.encode() + b"\n" + data).digest()
        question = self._questions.get(key)
        if question is None:
            self._take(key, peer, data)
        elif question.answer:
            return question.answer
        raise Busy(COME_BACK_SECONDS)

    def _take(self, key: bytes, peer: str, data: bytes) -> None:
        try:
            request = check_request(data, self._swarm)
        except Rejected as rejected:
            self._accounts.offence(rejected, peer)
            raise
        now = self._clock()
        answered = [old for old, kept in self._questions.items() if kept.answer]
        for number, old in enumerate(answered):
            surplus = number < len(self._questions) - MAX_QUESTIONS + 1
            if surplus or now - self._questions[old].since > KEPT_SECONDS:
                del self._questions[old]
        waiting = [kept.peer for kept in self._questions.values() if not kept.answer]
        if len(waiting) >= MAX_QUESTIONS or waiting.count(peer) >= MAX_OF_ONE:
            raise Busy(COME_BACK_SECONDS)
        charge(self._tokens, peer, request.tokens)
        self._questions[key] = _Question(peer, request, now)
        self._news.set()

    async def run(self) -> None:
        """Answer what was asked, the oldest first."""
        while True:
            await self._news.wait()
            question = next((one for one in self._questions.values() if not one.answer), None)
            if question is None:
                self._news.clear()
                continue
            answer = await self._compute(question.request)
            question.answer, question.since = msgspec.msgpack.encode(answer), self._clock()


async def ask(
    transport: Transport,
    accounts: Accounts,
    teacher: str,
    request: TeachRequest,
    *,
    seconds: float,
    clock: Callable[[], float],
) -> tuple[TeachAnswer, tuple[float, ...]]:
    """The log-probability of each answer's tokens, in order. Raises NotTaught, after `seconds` at the latest."""
    data, until, problem = msgspec.msgpack.encode(request), clock() + seconds, "there was no time left"
    while (left := until - clock()) > 0:
        try:
            answered = await transport.request(
                teacher, TEACH_PROTOCOL, data, max_bytes=MAX_TEACH_ANSWER, timeout=min(TRY_SECONDS, left)
            )
        except Busy as busy:
            problem = "it is busy"
            await asyncio.sleep(min(busy.seconds, left))
            continue
        except TransportError as error:
            problem = str(error)
            await asyncio.sleep(min(COME_BACK_SECONDS, left))
            continue
        try:
            answer, logprobs = check_answer(answered, request)
        except Rejected as rejected:
            accounts.note(rejected, teacher)
            raise NotTaught(rejected.detail) from rejected
        if answer.refusal:
            raise NotTaught(answer.refusal)
        return answer, logprobs
    raise NotTaught(f"no answer in time: {problem}")
