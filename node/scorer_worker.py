"""The scorer process: `python -m node.scorer_worker`, started and fed by `node.scorer.Scorer` over its pipes.

It loads the environments and never sees an answer itself: it forks a child that gives up its powers
(`node.isolation`), and then scores. Answers are foreign text that a careless scorer may evaluate, so whatever
happens in the child, the process here only sees that it ended, says so and forks the next one, which takes
milliseconds where loading the environments takes seconds.
"""

import gc
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import msgspec

import node
import protocol
from node.environments.known import EnvironmentUnknown, SettingsRefused, build
from node.interfaces import Environment
from node.isolation import bound_memory, die_with_parent, isolate
from node.scorer_wire import LENGTH, Chunk, Died, Done, Job, Ready, Refused, Setup, frame

Environments = Mapping[tuple[str, str], Environment]


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
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    gc.freeze()  # keeps the collector from touching, and so copying, the pages shared with children
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _serve(incoming, outgoing, setup, environments)
                code = 0
            finally:
                os._exit(code)  # whatever was raised, SystemExit included, must not run on in this function
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return  # the daemon closed the pipe
        os.write(outgoing, frame(Died(_how(status, setup.deadline))))


def _serve(incoming: int, outgoing: int, setup: Setup, environments: Environments) -> None:
    """In the child: confine it, then work on chunks until the pipe ends."""
    die_with_parent()
    # the default action of SIGALRM ends the process even inside a long C call, where no Python handler would run
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    readable = [Path(entry) for entry in sys.path if entry] + [_directory(node), _directory(protocol)]
    os.write(outgoing, frame(Ready(isolate(setup.memory_mb, readable))))
    decoder = msgspec.msgpack.Decoder(Chunk)
    while (raw := _receive(incoming)) is not None:
        for index, job in enumerate(decoder.decode(raw).jobs):
            signal.setitimer(signal.ITIMER_REAL, setup.deadline)
            done = frame(_work(environments, index, job))
            os.write(outgoing, done)
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
    """One message's bytes, None at the end of the pipe. Reads no byte more: the next child reads on from here."""
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


def _how(status: int, deadline: float) -> str:
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGALRM:
        return f"missed its deadline of {deadline:g} s"
    return f"killed by {signal.Signals(number).name}"


def _directory(package: ModuleType) -> Path:
    return Path(package.__path__[0])


if __name__ == "__main__":
    main()
