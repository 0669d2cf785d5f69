"""Averagers as real processes on loopback: rounds, one that dies in the middle, and one that lies."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
import pytest

from swarm.averaging import Averager, Contributions, NotAveraged
from swarm.averaging_wire import LENGTH, MAX_FRAME, Gathered, Setup, file_of
from swarm.averaging_worker import Worker

PROGRAM = "node.averager_process"
SIZE = 1 << 20
SECONDS = 60.0

needs_hivemind = pytest.mark.skipif(find_spec("hivemind") is None, reason="needs shoal[averaging]")


def setup(directory: Path, peers: tuple[str, ...] = ()) -> Setup:
    return Setup("shoaltest", "/ip4/127.0.0.1/tcp/0", peers, str(directory / "averaging"), SIZE, 2)


@asynccontextmanager
async def running(place: Path, peers: tuple[str, ...] = ()) -> AsyncIterator[Averager]:
    averager = Averager(
        setup(place, peers), place / "averaging.log", PROGRAM, say=lambda level, message: None, pause=0.5
    )
    service = asyncio.create_task(averager.run())
    try:
        yield averager
    finally:
        service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await service


async def until(what: Callable[[], object], seconds: float = 240.0) -> None:
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110 - another process has it happen
            await asyncio.sleep(0.1)


def weights(averager: Averager, seed: int) -> tuple[Path, bytes]:
    data = random.Random(seed).randbytes(SIZE)
    path = averager._directory / "own.bin"
    path.write_bytes(data)
    return path, hashlib.sha256(data).digest()


async def tried(averager: Averager, seed: int) -> Contributions | str:
    try:
        return await averager.round(*weights(averager, seed), SECONDS)
    except NotAveraged as why:
        return str(why)


def contents(found: Contributions | str) -> list[str]:
    assert isinstance(found, Contributions), found
    return [hashlib.sha256(one.path.read_bytes()).hexdigest() for one in found.all]


@needs_hivemind
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.averaging
async def test_rounds_of_three_and_what_a_killed_or_lying_one_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PASSPHRASE", "of the node")
    async with running(tmp_path / "a") as a:
        await until(lambda: a.addresses)
        way_in = a.addresses[:1]
        async with running(tmp_path / "b", way_in) as b, running(tmp_path / "c", way_in) as c:
            await until(lambda: b.addresses and c.addresses)
            assert a.pid is not None
            assert not any(name.startswith("SHOAL_") for name in psutil.Process(a.pid).environ())
            all_three = [a, b, c]

            # together: everybody has the same weights in the same order, and its own among them
            for attempt in range(4):  # groups of two come about where one is late
                found = await asyncio.gather(*(tried(one, 10 * attempt + at) for at, one in enumerate(all_three)))
                if all(isinstance(one, Contributions) and len(one.all) == 3 for one in found):
                    break
            listed = [contents(one) for one in found]
            assert listed[0] == listed[1] == listed[2]
            assert len(set(listed[0])) == 3
            assert len({one.own for one in found if isinstance(one, Contributions)}) == 3
            for at, one in enumerate(found):
                assert isinstance(one, Contributions)
                assert listed[0][one.own] == weights(all_three[at], 10 * attempt + at)[1].hex()

            # one dies in the middle: the others have a round, and it is there again for a later one
            async def killed() -> str:
                asked = asyncio.create_task(tried(c, 102))
                await asyncio.sleep(2)
                assert c.pid is not None
                os.kill(c.pid, signal.SIGKILL)
                return str(await asked)

            first, second, third = await asyncio.gather(tried(a, 100), tried(b, 101), killed())
            assert "has ended" in third
            assert set(contents(first)) == set(contents(second)) >= {weights(a, 100)[1].hex(), weights(b, 101)[1].hex()}
            await until(lambda: c.addresses)

            # one gives a hash that its weights do not have: left out by name, and no reason for the others to stop
            async def lying() -> object:
                path, _ = weights(c, 202)
                try:
                    return await c.round(path, b"\1" * 32, SECONDS)
                except NotAveraged as why:
                    return why

            for _ in range(4):
                first, second, _ = await asyncio.gather(tried(a, 200), tried(b, 201), lying())
                if isinstance(first, Contributions) and first.lost:
                    break
            assert isinstance(first, Contributions)
            assert "hash" in first.lost[0] or "missing" in first.lost[0]
            assert weights(c, 202)[1].hex() not in contents(first)

            # alone: nobody comes
            with pytest.raises(NotAveraged, match="nobody else came"):
                await a.round(*weights(a, 300), 24.0)
            group = [process for one in all_three for process in psutil.Process(one.pid).children(recursive=True)]
            assert len(group) >= 6
    _, alive = psutil.wait_procs(group, timeout=20)
    assert not alive


async def test_what_cannot_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    averager = Averager(
        setup(tmp_path / "file"), tmp_path / "log", PROGRAM, say=lambda level, message: said.append(message), pause=60.0
    )
    service = asyncio.create_task(averager.run())
    await until(lambda: said)
    with pytest.raises(NotAveraged, match="cannot be started"):
        await averager.round(tmp_path / "own.bin", b"", 1.0)
    service.cancel()


async def test_the_process_gets_few_variables_and_a_home_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tells.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    for name in ("SHOAL_PASSPHRASE", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "KUBECONFIG"):
        monkeypatch.setenv(name, "of the user")
    averager = Averager(setup(tmp_path), tmp_path / "log", "tells", say=lambda level, message: None)
    assert "has ended" in await averager._life()
    variables = json.loads((tmp_path / "log").read_text())
    assert variables["HOME"] == variables["TMPDIR"] != os.environ["HOME"]
    assert variables["LC_ALL"] == "C.UTF-8"
    assert "of the user" not in variables.values()


@pytest.mark.parametrize(
    ("gathered", "problem"),
    [
        (Gathered(1, ("a", "b"), 2, ()), "makes no sense"),
        (Gathered(1, ("a", "a"), 0, ()), "makes no sense"),
        (Gathered(1, tuple("abcdefghi"), 0, ()), "makes no sense"),
        (Gathered(1, ("a", "b"), 0, ()), "not of"),
        (Gathered(1, ("a", "b", "c"), 0, ()), "cannot be read"),
    ],
)
async def test_an_averager_that_was_taken_over_is_not_believed(
    tmp_path: Path, gathered: Gathered, problem: str
) -> None:
    averager = Averager(setup(tmp_path), tmp_path / "log", PROGRAM, say=lambda level, message: None)
    averager._directory.mkdir()
    own = averager._directory / "own.bin"
    own.write_bytes(bytes(SIZE))
    file_of(averager._directory, 1).write_bytes(bytes(SIZE + 1))
    file_of(averager._directory, 2).symlink_to("/nowhere")
    if len(gathered.peers) == 3:
        file_of(averager._directory, 1).write_bytes(bytes(SIZE))
        file_of(averager._directory, 2).unlink()
    with pytest.raises(NotAveraged, match=problem):
        averager._checked(gathered, own)


async def test_the_process_reads_no_message_longer_than_the_node_may_send(tmp_path: Path) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(LENGTH.pack(MAX_FRAME + 1))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RuntimeError, match=f"a message of {MAX_FRAME + 1} bytes"):
        async with asyncio.timeout(5.0):
            await Worker(setup(tmp_path), theirs, None, None).obey(reader)


def test_messages_keep_their_form() -> None:
    assert msgspec.msgpack.encode(Setup("p", "l", ("q",), "d", 4, 2)) == msgspec.msgpack.encode(
        ["Setup", "p", "l", ["q"], "d", 4, 2]
    )
