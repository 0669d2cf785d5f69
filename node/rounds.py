"""A node in a swarm with coordinators: follows their rounds, practises their mix, answers their held-out tasks.

A round steers which of its assigned slots a node takes; what is admitted goes by the clock's epochs as ever. With no
coordinator to follow, the mix is the manifest's and nothing is answered.
"""

import asyncio
import hashlib
import logging
import struct
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from node.config import Config
from node.engines.requests import RequestTooLong
from node.rollouts import sample, sampling_seed
from node.scorer import ScorerError
from protocol.assignment import round_task
from protocol.manifest import Manifest
from protocol.messages import MAX_TRAINED, ReportRequest, Trained
from protocol.rollout import TaskRef
from protocol.rounds import Round, State
from swarm.coordination.access import Access
from swarm.coordination.chain import Chain
from swarm.coordination.entering import Entering, send_report
from swarm.coordination.evaluation import within_bounds
from swarm.coordination.log_sync import LogSync
from swarm.coordination.round_log import RoundLog
from swarm.transport import Transport, TransportError

if TYPE_CHECKING:
    from node.history import History
    from node.home import Home
    from node.parts import Parts

log = logging.getLogger(__name__)

SEND_SECONDS = 3.0
"""Between two tries to hand in answers."""
LEAST_SECONDS = 2.0
"""With less time left, answers are not begun."""
SHARE = 0.25
"""Of a node's time that answers may take in the long run, however fast rounds follow each other; at once, a stage's."""


class Rounds:
    """Made once the manifest is known; `run` is a service, `answer` is for the loop between two steps."""

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        log: RoundLog,
        token: bytes | None,
        clock: Callable[[], float],
        *,
        request_timeout: float,
        seed: int,
        on_event: Callable[[str, str], None],
    ) -> None:
        self.manifest, self._transport, self._clock = manifest, transport, clock
        self._timeout, self._on_event = request_timeout, on_event
        self.chain = Chain(log, manifest, clock, me=transport.peer_id, on_event=on_event)
        self.sync = LogSync(transport, self.chain, clock, request_timeout=request_timeout, seed=seed, on_event=on_event)
        self.access = Access(transport, manifest, clock, on_event=on_event)
        self.chain.on_members = self.access.take
        if self.chain.members is not None:
            self.access.take(self.chain.members)
        self.entering = Entering(transport, self.sync, token, request_timeout=request_timeout, on_event=on_event)
        self.trained: Counter[str] = Counter()
        """Foreign groups trained on since the last report, by producer."""
        self._report: ReportRequest | None = None
        self._seed = b""
        """Of the tasks that the report answers."""
        self._spent, self._spent_at = 0.0, clock()
        """Seconds that answers took and that are not made up for yet."""
        self._put_off = 0
        """The last round whose answers had to wait for that."""
        self._told: tuple[int, str] | None = None
        """Round and coordinator that the last report went to."""

    # -- what to practise ------------------------------------------------------------------------------------

    def takes(self, ref: TaskRef) -> bool:
        """Whether a task is one that the round's mix asks this node to practise; the same answer every time.

        The mix is of environments; tasks come by the manifest's weights, so each is taken with the chance that makes
        one of the other. The environment that the mix favours most is always taken.
        """
        record = self.chain.round
        if record is None:
            return True
        specs = self.manifest.environments
        ratios = {spec.name: weight / spec.weight for spec, weight in zip(specs, record.mix, strict=True)}
        drawn = hashlib.sha256(b"shoal/mix\n" + struct.pack(">QQ", ref.seed, ref.index)).digest()
        return int.from_bytes(drawn[:8], "big") / 2**64 < ratios.get(ref.environment, 0.0) / max(ratios.values())

    # -- held-out answers ------------------------------------------------------------------------------------

    async def answer(self, parts: "Parts") -> None:
        """Sample a closing round's held-out tasks with the present policy, once a round. Never waits for the network:
        `run` hands them in. Failing costs the answers, not the node."""
        record = self.chain.round
        if record is None or record.state is not State.closing or not self._is_wanted(record):
            return
        # how much is asked for, and how often, is the coordinator's word: it must not keep a node from training
        most = parts.config.limits.stage_seconds
        left = most - self._owed()
        if left < most / 2:
            if self._put_off != record.number:
                self._put_off = record.number
                said = f"answers took more than {SHARE:.0%} of the time lately"
                self._on_event("round", f"round {record.number} is not answered yet: {said}")
            return
        refs = [
            round_task(self.manifest, record.seed, spec.name, index)
            for spec in self.manifest.environments
            for index in range(record.tasks)
        ]
        seeds = [sampling_seed(parts.config.node.seed, "round", ref.environment, ref.seed, ref.index) for ref in refs]
        began = self._clock()
        seconds = min(record.answers_by - began, left)
        rollouts = []
        async with parts.progress.during("evaluate"):
            try:
                async with asyncio.timeout(seconds):
                    rollouts = await sample(
                        parts.engine, parts.bundle, parts.scorer, parts.config, refs, seeds, record.samples
                    )
            except TimeoutError:
                said = f"its {len(refs)} tasks were not done within {seconds:.0f} s"
                self._on_event("round", f"round {record.number} is not answered: {said}")
            except (ScorerError, RequestTooLong) as error:
                self._on_event("round", f"round {record.number} is not answered: {error}")
        self._spent += max(0.0, min(seconds, self._clock() - began))
        self._seed, self._report = record.seed, None
        if not rollouts:
            return
        counts, self.trained = self.trained, Counter()
        report = ReportRequest(
            self.manifest.digest,
            record.number,
            tuple(text for rollout in rollouts for text in rollout.texts),
            tuple(Trained(peer, groups) for peer, groups in counts.most_common(MAX_TRAINED)),
        )
        self._report, left_out = within_bounds(self.manifest, report)
        if left_out:
            said = f"{left_out} of its {len(report.answers)} answers are too long to be handed in, and score 0"
            self._on_event("round", f"round {record.number}: {said}")

    def _owed(self) -> float:
        """Seconds of answering that training has not made up for: with SHARE of the time that passes they are."""
        now = self._clock()
        self._spent = max(0.0, self._spent - SHARE * max(0.0, now - self._spent_at))
        self._spent_at = now
        return self._spent

    def _is_wanted(self, record: Round) -> bool:
        """Whether there is time for this node's answers, and they were not made yet."""
        in_time = self._clock() < record.answers_by - LEAST_SECONDS
        return in_time and self._seed != record.seed and self.entering.role == "member"

    async def run(self) -> None:
        """Enter the swarm, and hand answers in, again to whoever takes a round over."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.entering.run(), name="rounds: enter")
            tasks.create_task(self._send(), name="rounds: report")

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(SEND_SECONDS)
            report, record, leader = self._report, self.chain.round, self.chain.leader
            if report is None or record is None or leader is None:
                continue
            if record.state is not State.closing or record.seed != self._seed or self._told == (record.number, leader):
                continue
            try:
                answer = await send_report(self._transport, leader, report, self._timeout)
            except TransportError as error:
                log.info("answers of round %d not handed in yet: %s", record.number, error)
                continue
            self._told = record.number, leader
            said = "were taken" if answer.taken else f"were not taken: {answer.detail}"
            self._on_event("round", f"answers to round {record.number} {said}")


def make_rounds(
    manifest: Manifest,
    home: "Home",
    transport: Transport,
    clock: Callable[[], float],
    history: "History",
    config: Config,
) -> Rounds | None:
    """The rounds of this swarm; None where its manifest names no coordinator."""
    if not manifest.coordinators:
        return None
    return Rounds(
        manifest,
        transport,
        RoundLog(home.database, manifest.digest),
        home.swarm().token,
        clock,
        request_timeout=config.network.request_timeout,
        seed=config.node.seed,
        on_event=lambda kind, message: history.event("error" if kind == "coordinator_fault" else "info", kind, message),
    )
