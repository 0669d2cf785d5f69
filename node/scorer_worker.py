"""The scorer process: `python -m node.scorer_worker`, started and fed by `node.scorer.Scorer` over its pipes.

It loads the environments and never looks at an answer itself: it forks children that give up their powers
(`node.isolation`) and score. Answers are foreign text that a careless scorer may evaluate, so whatever happens in a
child, the process here only sees that it ended, says so and forks the next one, which takes milliseconds where
loading the environments takes seconds.

A child has pipes to this process only, and lives on from chunk to chunk, except where an environment may evaluate
answers: there every chunk of answers gets a child of its own, which is killed with it. So no answer can change how
the answers of other chunks are scored, neither by what it leaves behind in the process nor by replies it prepares.
"""

import gc
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import msgspec

import node
import protocol
from node.environments.known import EnvironmentUnknown, SettingsRefused, build
from node.interfaces import Environment
from node.isolation import CONFINING, bound_cpu, bound_memory, die_with_parent, isolate
from node.scorer_wire import LENGTH, Chunk, Died, Done, Job, Overlong, Ready, Refused, Setup, end_of_frame, frame

Environments = Mapping[tuple[str, str], Environment]

BUILD_CPU_SECONDS = 45
"""Processor time for loading the environments: their settings come from a manifest."""
START_SECONDS = 30.0
"""Until a forked child has confined itself, on a busy machine."""
READ_BYTES = 64 * 1024
PATIENCE_SECONDS = 0.5
"""A child ends itself at the deadline of a job; this much later it is killed."""


def main() -> None:
    die_with_parent()
    # what environments print must neither reach the protocol's pipe nor a terminal
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    raw = _receive(incoming)
    if raw is None:
        return
    setup = msgspec.msgpack.decode(raw, type=Setup)
    bound_memory(setup.memory_mb)  # settings come from a manifest, and may ask for more than there is
    unbound = bound_cpu(BUILD_CPU_SECONDS)
    try:
        environments = {(e.name, e.version): build(e.name, e.version, e.settings) for e in setup.environments}
    except (EnvironmentUnknown, SettingsRefused) as error:
        os.write(outgoing, frame(Refused(str(error))))
        return
    except MemoryError:
        why = (
            f"the environments need more than {setup.memory_mb} MB to start: their settings in the manifest are too big"
        )
        os.write(outgoing, frame(Refused(why)))
        return
    resource.setrlimit(resource.RLIMIT_CPU, unbound)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    gc.freeze()  # keeps the collector from touching, and so copying, the pages shared with children
    _pass_on(incoming, outgoing, setup, environments)


def _pass_on(incoming: int, outgoing: int, setup: Setup, environments: Environments) -> None:
    """Give chunks to children and their replies to the daemon, until it closes the pipe."""
    signal.signal(signal.SIGALRM, _late)
    decoder = msgspec.msgpack.Decoder(Chunk)
    first = _Child(setup, environments)
    if not any(measure.startswith(CONFINING) for measure in first.isolation):
        evaluating = ", ".join(name for name, version in environments if _may_evaluate(environments, (name, version)))
        if evaluating:
            why = (
                f"{evaluating} may evaluate answers as code, and this system offers neither seccomp nor Landlock to "
                "confine what that does: use Linux, or a swarm without it"
            )
            os.write(outgoing, frame(Refused(why)))
            return
    os.write(outgoing, frame(Ready(first.isolation)))
    lasting: _Child | None = first
    while (raw := _receive(incoming)) is not None:
        chunk = decoder.decode(raw)
        jobs = chunk.jobs
        alone = any(
            job.answer is not None and _may_evaluate(environments, (job.ref.environment, job.ref.version))
            for job in jobs
        )
        child: _Child | None = None
        try:
            if alone:
                if chunk.prepare:
                    with suppress(_Late):
                        _prepare(environments, jobs, setup.deadline)
                child = _Child(setup, environments, cpu_seconds=math.ceil(len(jobs) * setup.deadline) + 1)
            else:
                child = lasting = lasting or _Child(setup, environments)
            for reply in child.replies_to(raw, len(jobs)):
                os.write(outgoing, reply)
        except _Ended as ended:
            os.write(outgoing, frame(Died(str(ended))))
            lasting = lasting if alone else None
        finally:
            if alone and child is not None:
                child.kill()


def _may_evaluate(environments: Environments, name: tuple[str, str]) -> bool:
    return getattr(environments.get(name), "evaluates", True)  # who does not say may


class _Late(BaseException):
    """Out of time; what third-party code raises and catches is another matter."""


def _late(*_: object) -> None:
    raise _Late


def _prepare(environments: Environments, jobs: Sequence[Job], seconds: float) -> None:
    """Make the tasks that environments keep, as far as that gets in `seconds`.

    What swallows _Late, or ends this process, costs it once: `node.scorer` then asks for no more of it. Raises _Late.
    """
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for ref in dict.fromkeys(job.ref for job in jobs):
            prepare = getattr(environments.get((ref.environment, ref.version)), "prepare", None)
            if prepare is not None:
                with suppress(Exception, SystemExit, KeyboardInterrupt):  # the child meets it again and reports it
                    prepare(ref.seed, ref.index)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Ended(Exception):
    """A child ended or was killed; says why."""


class _Child:
    """A confined process that scores. Raises _Ended when it cannot be had."""

    def __init__(self, setup: Setup, environments: Environments, cpu_seconds: int | None = None) -> None:
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        self._deadline = setup.deadline
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._unread = b""
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                _close_all_but(theirs_in, theirs_out)
                _serve(theirs_in, theirs_out, setup, environments, cpu_seconds)
                code = 0
            finally:
                os._exit(code)  # whatever was raised, SystemExit included, must not run on in this function
        os.close(theirs_in)
        os.close(theirs_out)
        self.isolation = msgspec.msgpack.decode(self._receive(START_SECONDS), type=Ready).isolation

    def replies_to(self, raw: bytes, jobs: int) -> Iterator[bytes]:
        """Give it a chunk; yields the frames of its replies as they come, one a job, together those that come together.

        Raises _Ended.
        """
        try:
            _write_all(self._requests, LENGTH.pack(len(raw)) + raw)
        except BrokenPipeError:
            raise _Ended(self._how()) from None
        whole = b""
        for index in range(jobs):
            if whole and not self._has_reply():
                yield whole
                whole = b""
            reply = self._receive(self._deadline + PATIENCE_SECONDS)
            try:
                done = msgspec.msgpack.decode(reply, type=Done)
            except (msgspec.DecodeError, RecursionError):  # what an answer made of the child may write anything
                done = None
            if done is None or done.index != index:
                if whole:
                    yield whole
                self.kill()
                raise _Ended("it talks nonsense")
            whole += LENGTH.pack(len(reply)) + reply
        yield whole

    def kill(self) -> int:
        """End it, whatever it is doing; returns how it ended, which this does not change if it had ended already."""
        status = 0
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
            os.close(self._requests)
            os.close(self._replies)
            self._pid = 0
        return status

    def _receive(self, seconds: float) -> bytes:
        """One message. Raises _Ended, having killed it, when it does not come, or not whole, in time."""
        until = time.monotonic() + seconds
        try:
            while (end := end_of_frame(self._unread)) is None:
                if not self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
                    self.kill()
                    raise _Ended(f"no answer within {seconds:g} s")
                part = os.read(self._replies, READ_BYTES)
                if not part:
                    raise _Ended(self._how())
                self._unread += part
        except Overlong as error:
            self.kill()
            raise _Ended(str(error)) from None
        reply, self._unread = self._unread[LENGTH.size : end], self._unread[end:]
        return reply

    def _has_reply(self) -> bool:
        """Whether a whole one has been read already."""
        try:
            return end_of_frame(self._unread) is not None
        except Overlong:
            return False  # `_receive` says so, after those before it were passed on

    def _how(self) -> str:
        """Why it is gone, its pipe being closed."""
        status = self.kill()
        if not os.WIFSIGNALED(status):
            return f"exited with code {os.WEXITSTATUS(status)}"
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            return f"missed its deadline of {self._deadline:g} s"
        return f"killed by {signal.Signals(number).name}"


def _close_all_but(*kept: int) -> None:
    """In a child: the daemon's pipes and those of other children are none of its business."""
    last = 2
    for descriptor in sorted(kept):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, 1024)


def _serve(incoming: int, outgoing: int, setup: Setup, environments: Environments, cpu_seconds: int | None) -> None:
    """In the child: confine it, then work on chunks until the pipe ends."""
    die_with_parent()
    # the default action of SIGALRM ends the process even inside a long C call, where no Python handler would run
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    readable = [Path(entry) for entry in sys.path if entry] + [_directory(node), _directory(protocol)]
    os.write(outgoing, frame(Ready(isolate(setup.memory_mb, readable, cpu_seconds))))
    decoder = msgspec.msgpack.Decoder(Chunk)
    while (raw := _receive(incoming)) is not None:
        for index, job in enumerate(decoder.decode(raw).jobs):
            signal.setitimer(signal.ITIMER_REAL, setup.deadline)
            _write_all(outgoing, frame(_work(environments, index, job)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _work(environments: Environments, index: int, job: Job) -> Done:
    environment = environments[job.ref.environment, job.ref.version]
    try:
        if job.gold:
            gold = getattr(environment, "gold", None)  # environments of before there was such a method have none
            return Done(index, gold=None if gold is None else gold(job.ref.seed, job.ref.index))
        if job.answer is None:
            return Done(index, task=environment.task(job.ref.seed, job.ref.index))
        return Done(index, score=environment.score(job.ref.seed, job.ref.index, job.answer))
    except Exception as error:  # noqa: BLE001 - foreign text in third-party code: any failure is this job's alone
        return Done(index, failure=f"{type(error).__name__}: {error}"[:200])


def _receive(descriptor: int) -> bytes | None:
    """One message's bytes, None at the end of the pipe."""
    head = _read_exactly(descriptor, LENGTH.size)
    return None if head is None else _read_exactly(descriptor, LENGTH.unpack(head)[0])


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(descriptor, count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _directory(package: ModuleType) -> Path:
    return Path(package.__path__[0])


if __name__ == "__main__":
    main()
