"""Signs rounds: the leader of a swarm's coordinators, and the standby that follows its log and takes over.

It paces and evaluates. It has no model, decides nothing about admission, and believes no member about itself: it counts
the groups that it hears announced, scores held-out answers itself, and lets nobody in without an invite of its own
where the swarm is listed. What it signed and was handed in is on disk first, so a kill at any instant loses none of it.
"""

import asyncio
import math
from collections.abc import Callable

import msgspec

from protocol.board import MemberList, list_bytes, pass_rates
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import (
    ENTER_PROTOCOL,
    MAX_REPORT_BYTES,
    REPORT_PROTOCOL,
    EnterRequest,
    EnterResponse,
    ReportRequest,
    ReportResponse,
    announce_topic,
    rounds_topic,
)
from protocol.rejection import Reason, Rejected
from protocol.rounds import (
    Facts,
    Pace,
    Round,
    State,
    advance,
    first,
    leader_of,
    measured_mix,
    scaled,
    seal_round,
    seed_for,
    take_over,
)
from protocol.rules import check_announcement
from swarm.allowance import Allowance
from swarm.coordination.access import Access
from swarm.coordination.attendance import PRESENT_SECONDS, Attendance
from swarm.coordination.complaints import Complaints
from swarm.coordination.evaluation import LATE_SECONDS, Evaluation, Score, ScoringUnavailable, most_bytes
from swarm.coordination.log_sync import LogSync
from swarm.coordination.membership import Membership, NotAdmitted
from swarm.coordination.reception import IDLE_ROUNDS, Reception
from swarm.coordination.reports import Reports
from swarm.coordination.succession import Succession
from swarm.database import StoreError
from swarm.gate import AnnouncementGate
from swarm.requests import charge, decoded
from swarm.transport import Busy, Message, OversizeRequest, PeerConnected, Transport

TICK_SECONDS = 0.5
SETTLE_SECONDS = 5.0
"""After a start: whoever took over meanwhile is heard of before anything is signed."""
STEP_SECONDS = 10.0
"""Between two looks at the clock; after more the machine slept, or its clock was set: it is like a start."""
MAX_SHARDS = 64
ASK_RATE, ASK_BURST = 0.5, 8.0
"""Requests to enter, or reports, a second from one peer, and at once."""
REVISE_SECONDS = 5.0
"""Between two member lists, but for a kick: each is pulled by every member."""
MAX_WAITING = 256 << 20
"""Bytes of answers that wait to be scored; who comes later is asked to come again."""
BUSY_SECONDS = 5.0


class Coordinator:
    """`run` until cancelled. `patience`: seconds without a sign of the leader after which a standby takes over.
    `from_network`: new members an hour, and at once, that one network may bring without invites; 0: any number.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        manifest: Manifest,
        sync: LogSync,
        membership: Membership,
        reports: Reports,
        score: Score,
        clock: Callable[[], float],
        pace: Pace,
        *,
        patience: float = 30.0,
        measured: bool = True,
        from_network: int = 16,
        settle: float = SETTLE_SECONDS,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
    ) -> None:
        self._transport, self._identity, self.manifest = transport, identity, manifest
        self.chain, self.sync, self.membership, self.reports = sync.chain, sync, membership, reports
        self._clock, self.pace, self._patience = clock, pace, patience
        self._evaluation = Evaluation(
            manifest, self.chain, membership, reports, score, clock, on_event, pace.answer_seconds
        )
        self._measured, self._settle, self._on_event = measured, settle, on_event
        self._started = clock()
        """Or when the clock was set."""
        self._looked = self._started
        """At the clock."""
        self._led_since = self._started
        """When it last did not lead, or its clock was set."""
        self._failing_since = math.inf
        """Since when nothing can be written; inf: it can."""
        self._asks = Allowance(ASK_RATE, ASK_BURST, clock)
        self.access = Access(transport, manifest, clock, on_event=on_event)
        self._complaints = Complaints(self.access.bans, manifest.coordinators, clock, on_event)
        self._succession = Succession(transport, sync, self._complaints, patience)
        self._attendance = Attendance(reports, self.access, manifest.coordinators, clock)
        self._reception = Reception(
            transport, manifest, self.chain, membership, reports, self._attendance, clock, pace,
            from_network=from_network,
        )  # fmt: skip
        self._gate = AnnouncementGate(manifest, clock, banned=self.access.barred)
        self._number = 0
        """Of the round that is counted for."""
        self._members: MemberList | None = None
        """The list as records name it."""
        self._revised = -math.inf
        self.chain.on_members = self.access.take
        sync.on_asked = self._asked
        sync.on_offence = self._complaints.note
        if self.chain.members is not None:
            self.access.take(self.chain.members)

    @property
    def leading(self) -> bool:
        """Whether this coordinator signs the rounds now."""
        me, record = self._identity.peer_id, self.chain.round
        # before the first record it is the primary
        return me not in self.chain.faults and leader_of(self.manifest, record.term if record else 0) == me

    def present(self) -> set[str]:
        """Members that were heard of lately."""
        for peer in self._transport.peers():
            self._attendance.saw(peer)
        return self._attendance.present(self._members_listed())

    def heard(self) -> dict[str, float]:
        """When each other coordinator was last heard of: it answered, signed, or asked for the log."""
        heard = self.chain.heard()
        for one in self.manifest.coordinators:
            last = max(heard.get(one, -math.inf), self._attendance.last_seen(one))
            if last > -math.inf:
                heard[one] = last
        return heard

    # -- the service -----------------------------------------------------------------------------------------

    def serve_on(self, transport: Transport) -> None:
        self.sync.serve_on(transport)
        transport.serve(ENTER_PROTOCOL, self._enter, max_request=1024)
        transport.serve(REPORT_PROTOCOL, self._report, max_request=MAX_REPORT_BYTES)

    async def run(self) -> None:
        """Follow, lead, evaluate. The transport has been started."""
        self.serve_on(self._transport)
        for shard in range(min(self.manifest.shards, MAX_SHARDS)):
            await self._transport.subscribe(announce_topic(self.manifest.digest, shard), self._gate.check)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sync.run(), name="coordinator: follow")
            tasks.create_task(self._listen(), name="coordinator: listen")
            tasks.create_task(self.access.run(), name="coordinator: access")
            tasks.create_task(self._tick(), name="coordinator: tick")
            tasks.create_task(self._evaluate(), name="coordinator: evaluate")

    async def _listen(self) -> None:
        topic = rounds_topic(self.manifest.digest)
        async for event in self._transport.events():
            if isinstance(event, Message) and event.topic == topic:
                try:
                    self.sync.hear(event.data, event.forwarder)
                except StoreError as error:  # it is asked for again
                    self._complaints.trouble("store", str(error))
            elif isinstance(event, Message):
                self._heard_group(event.data)
            elif isinstance(event, PeerConnected):
                self._attendance.saw(event.peer)
                self.sync.met(event.peer)
            elif isinstance(event, OversizeRequest):
                if event.protocol == REPORT_PROTOCOL and self.access.takes_part(event.peer):
                    continue  # a member's answers are as long as its model makes them
                self._complaints.note(Rejected(Reason.too_large, f"a request on {event.protocol}"), event.peer)
            await asyncio.sleep(0)

    def _heard_group(self, sealed: bytes) -> None:
        """Count an announcement that the gate let through, once for each group of a round."""
        try:
            opened, announcement = check_announcement(sealed, self.manifest, self._clock(), banned=self.access.barred)
        except Rejected:
            return
        self._attendance.announced(opened.producer, announcement.group)

    # -- pacing ----------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self.step()
                self._complaints.over("store")
                self._failing_since = math.inf
            except StoreError as error:  # a full disk may be emptied; nothing is signed meanwhile
                self._failing_since = min(self._failing_since, self._clock())
                self._complaints.trouble("store", str(error))

    async def step(self) -> None:
        """Look at the clock, the members and the other coordinators once, and sign what is to be signed."""
        now, head = self._clock(), self.chain.head
        if not 0 <= now - self._looked <= STEP_SECONDS:
            self._start_anew(now)
        self._looked = now
        if now - self._started < self._settle:
            return
        if head is not None:
            self._attendance.write(head.record.number)
            self._follow_round(head.record.number)
        if not self.leading:
            self._led_since = now
            await self._stand_by(now)
            return
        facts = self._facts()
        if head is None:
            record: Round | None = first(self.manifest, facts, self.pace)
        else:
            record = advance(head.record, head.digest, now, facts, self.pace, self._seed_of(head.record.term))
        if record is not None:
            await self._sign(record, now)

    def _start_anew(self, now: float) -> None:
        """Nothing that was noted by the clock before says how long ago it was."""
        self._started = self._led_since = now
        self._revised, self._failing_since = -math.inf, math.inf
        self._attendance.set_clock(now)

    def _follow_round(self, number: int) -> None:
        """Forget what is of rounds long ago, whoever signs the present one."""
        if number != self._number:
            self._attendance.begin_round()
            self.reports.forget_before(number - 1, heard=number - IDLE_ROUNDS)
            self._number = number

    async def _stand_by(self, now: float) -> None:
        due = self._succession.due(now, self._started)
        if due is None:
            return
        last, term, members = due
        self.membership.adopt(members)
        record = take_over(last.record, last.digest, term, now, self.pace, self._seed_of(term))
        await self._sign(record, now)
        self._on_event("coordinator", f"took over from {last.coordinator}, term {term}")

    def _seed_of(self, term: int) -> Callable[[int], bytes]:
        return lambda number: seed_for(self._identity, self.manifest.digest, number, term)

    async def _sign(self, record: Round, now: float) -> None:
        before = self.chain.round
        await self.sync.publish(seal_round(self._identity, record, now))
        self._looked = self._clock()  # gossip may have taken its time
        if before is None or (before.number, before.state) != (record.number, record.state):
            self._on_event("round", f"round {record.number} is {record.state.name}")

    def _facts(self) -> Facts:
        record, present = self.chain.round, self.present()
        number = record.number if record else 1
        awaited = self._awaited(present)
        through = self.reports.heard(number, number) if self.pace.groups else {}
        return Facts(
            members=self._list_digest(),
            present=len(present),
            awaited=len(awaited),
            through=sum(through.get(peer, 0) >= self.pace.groups for peer in awaited),
            board=self._evaluation.board(record, awaited) if record and record.state is State.closing else b"",
            mix=self._mix(),
        )

    def _awaited(self, present: set[str]) -> set[str]:
        """Members without whom a round does not end before its time: those that are present. Who leads since lately
        cannot know who they are, and must not take those that came back first for all."""
        if self._clock() - self._led_since > PRESENT_SECONDS:
            return present
        return self._members_listed()

    def _members_listed(self) -> set[str]:
        return {one.peer for one in self.membership.members() if one.role == "member"}

    def _list_digest(self) -> bytes:
        """Digest of the member list for the next record, kept where members ask for it."""
        if self._members is None or self._list_is_due(self._members):
            self._members, self._revised = self.membership.signed_list(), self._clock()
            self.chain.keep_list(*list_bytes(self._members))
        return list_bytes(self._members)[0]

    def _list_is_due(self, signed: MemberList) -> bool:
        wanted = self.membership.signed_list()
        due = self._clock() - self._revised >= REVISE_SECONDS
        return wanted.kicked != signed.kicked or (due and wanted != signed)

    def _mix(self) -> tuple[int, ...]:
        board = self.chain.board
        if board is None or not self._measured:
            return scaled([spec.weight for spec in self.manifest.environments])
        return measured_mix(self.manifest, pass_rates(board, [spec.name for spec in self.manifest.environments]))

    async def _evaluate(self) -> None:
        """Score what is handed in, some answers at a time."""
        while True:
            record, busy = self.chain.round, False
            try:
                if self.leading and record is not None and record.state is State.closing:
                    busy = await self._evaluation.score_next(record)
                    self._complaints.over("evaluate")
            except (ScoringUnavailable, StoreError) as error:
                self._complaints.trouble("evaluate", f"answers wait to be scored: {error}")
            # answers that are all too long are done without a wait, and must not keep the loop
            await asyncio.sleep(0.0 if busy else TICK_SECONDS)

    # -- what members ask ------------------------------------------------------------------------------------

    def _asked(self, peer: str) -> None:
        """For the log. A leader that cannot write must be silent to its standby: only that one can go on."""
        self._attendance.saw(peer)
        failing = self.leading and self._clock() - self._failing_since > self._patience
        if failing and peer in self.manifest.coordinators:
            raise Busy(BUSY_SECONDS)

    async def _enter(self, peer: str, data: bytes) -> bytes:
        charge(self._asks, peer, 1)
        request = decoded(data, EnterRequest, peer, self._complaints.note)
        if request.swarm != self.manifest.digest:
            raise Rejected(Reason.wrong_swarm, f"asked about swarm {request.swarm.hex()[:12]}")
        if not self.leading:
            answer = EnterResponse("", f"{self.chain.leader or 'nobody'} leads now")
        else:
            try:
                role = self._reception.let_in(peer, request.token)
                answer = EnterResponse(role, "")
                self.access.admit(peer, role)
                self._attendance.saw(peer)
                if self._members is not None and self._list_is_due(self._members):
                    await self.step()  # a standby that takes over right now is to know of the new member
            except NotAdmitted as refused:
                answer = EnterResponse("", str(refused))
        return msgspec.msgpack.encode(answer)

    async def _report(self, peer: str, data: bytes) -> bytes:
        if self.access.barred(peer):
            raise Rejected(Reason.banned, f"{peer} is no member")
        charge(self._asks, peer, 1)
        request = decoded(data, ReportRequest, peer, self._complaints.note)
        if request.swarm != self.manifest.digest:
            raise Rejected(Reason.wrong_swarm, f"asked about swarm {request.swarm.hex()[:12]}")
        self._attendance.saw(peer)
        refused = self._refusal(peer, request)
        if not refused and self.reports.waiting_bytes + len(data) > MAX_WAITING:
            raise Busy(BUSY_SECONDS)
        if refused:
            return msgspec.msgpack.encode(ReportResponse(False, refused))
        # one whose answer was lost on the way is asked again
        said = "" if self.reports.add(peer, request, data) else "handed in before; the first ones count"
        return msgspec.msgpack.encode(ReportResponse(True, said))

    def _refusal(self, peer: str, request: ReportRequest) -> str:
        """Why a report is not taken; empty: it is."""
        record = self.chain.round
        if not self.leading or record is None:
            return "this coordinator does not lead now"
        if record.state is not State.closing or record.number != request.number:
            return f"round {record.number} is {record.state.name}"
        if self._clock() > record.answers_by + LATE_SECONDS:
            return "the time for answers is over"
        if self.membership.role_of(peer) != "member":
            return "only members are evaluated"
        wanted = len(self.manifest.environments) * record.tasks * record.samples
        if len(request.answers) != wanted:
            return f"{len(request.answers)} answers, {wanted} were asked for"
        room = record.tasks * record.samples * sum(map(most_bytes, self.manifest.environments))
        if sum(len(answer.encode()) for answer in request.answers if answer) > room:
            return f"the answers are longer than {room} bytes together"
        return ""
