"""What an averager process does, which swarm/averaging.py starts. Only this file imports hivemind.

hivemind's DHT and DecentralizedAverager bring a group together: everybody is told the others' ids and the SHA-256 of
their weights. Its all-reduce would return a mean that any one of them can set to anything (the sender says how much its
part weighs, and whoever adds a part up says what the sum is). So only one number goes through the all-reduce, and the
weights go from node to node over streams of hivemind's libp2p, each checked against the hash that its owner gave.
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from swarm.averaging_wire import (
    BEAT_SECONDS,
    LENGTH,
    MAX_FRAME,
    MAX_GROUP,
    Beat,
    Command,
    Gathered,
    Meet,
    NoRound,
    Ready,
    Round,
    Setup,
    file_of,
    frame,
)

log = logging.getLogger(__name__)

STREAM = "shoal-averaging-1"
"""Request: a SHA-256. Answer: the weights that have it, and the end of the stream; nothing where there are no such."""
CHUNK = 1 << 18
STALL_SECONDS = 20.0
"""Within which one chunk, or a request, must come or go."""
SERVED_AT_ONCE = 2 * MAX_GROUP
MEET_SECONDS = 15.0
"""How often addresses that were given are dialled while nobody of them is known."""
GATHER_SECONDS = 5.0
"""How long a group waits for more to join it, once there is one."""
FREE_MARGIN = 64 << 20
PR_SET_PDEATHSIG = 1


class Fault(Exception):
    """Why a peer's weights did not come."""


def main(descriptor: int, confine: Callable[[Setup], tuple[str, ...]]) -> None:
    """Serve one node. Ends with it, and ends all that it started.

    `confine` takes the powers away that the process does not need, and says which measures hold.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection = socket.socket(fileno=descriptor)
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    setup = msgspec.msgpack.decode(_exactly(connection, min(length, MAX_FRAME)), type=Command)
    assert isinstance(setup, Setup)
    log.info("confined: %s", " ".join(confine(setup)))

    def in_child() -> None:
        # hivemind forks: what it forks ends with this process, and does not hold the node's connection open
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        connection.close()  # not its number, which is another file's in what these fork in turn

    os.register_at_fork(after_in_child=in_child)
    code = 1
    try:
        dht, averager = _hivemind(setup)
        asyncio.run(Worker(setup, connection, dht, averager).serve())
        code = 0
    except Exception:
        log.exception("the averager fails")
    end(code)


def end(code: int) -> None:
    """End this process and all that it started: the daemon of hivemind would outlive it."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            os._exit(1)  # the node is gone
        data += more
    return data


def _hivemind(setup: Setup) -> tuple[Any, Any]:
    """A DHT that knows nobody yet, and an averager of one number: it brings groups together."""
    import torch  # hivemind's tensors; a few at most
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.p2p import P2P

    torch.set_num_threads(1)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"  # it has /tmp, where they would stay
    dht = DHT(
        host_maddrs=[setup.listen],
        start=True,
        use_relay=False,
        use_auto_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )
    averager = DecentralizedAverager(
        [torch.zeros(1)],
        dht,
        start=True,
        prefix=setup.prefix,
        target_group_size=MAX_GROUP,
        min_group_size=setup.min_peers,
        min_matchmaking_time=GATHER_SECONDS,
        request_timeout=GATHER_SECONDS - 2,
        allreduce_timeout=STALL_SECONDS,
        sender_timeout=STALL_SECONDS / 4,
        reducer_timeout=STALL_SECONDS / 2,
        allow_state_sharing=False,
    )
    return dht, averager


async def _meet(_dht: Any, node: Any, address: str) -> str:
    """In the process of the DHT: get to know the averager at an address; why not where not."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    where, _, peer = address.rpartition("/p2p/")
    try:
        peer_id = PeerID.from_base58(peer)
        async with asyncio.timeout(STALL_SECONDS):
            await node.p2p._client.connect(peer_id, [Multiaddr(where)])
            return "" if await node.protocol.call_ping(peer_id) is not None else "it does not answer"
    except Exception as error:  # noqa: BLE001 - of hivemind's daemon, which has many; the next try may work
        return repr(error)[:150]


class Worker:
    """The process once hivemind runs: one task reads, one beats, one looks for peers, and rounds are made."""

    def __init__(self, setup: Setup, connection: socket.socket, dht: Any, averager: Any) -> None:
        self.setup, self.connection, self.dht, self.averager = setup, connection, dht, averager
        self.directory = Path(setup.directory)
        self.p2p: Any = None
        self.current: tuple[bytes, Path] | None = None
        """The own weights that others may fetch."""
        self.serving = asyncio.Semaphore(SERVED_AT_ONCE)
        self.others: tuple[str, ...] = ()
        """Addresses that the node has found."""
        self.news = asyncio.Event()

    async def serve(self) -> None:
        self.p2p = await self.dht.replicate_p2p()
        await self.p2p.add_binary_stream_handler(STREAM, self.hand_out)
        reader, self.writer = await asyncio.open_connection(sock=self.connection)
        found = await asyncio.to_thread(self.dht.get_visible_maddrs)
        self.say(Ready(tuple(str(address) for address in found)[:16]))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.beat())
            tasks.create_task(self.keep_meeting())
            await self.obey(reader)

    def say(self, message: msgspec.Struct) -> None:
        self.writer.write(frame(message))

    async def obey(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(Command)
        task: asyncio.Task[None] | None = None
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MAX_FRAME:
                    raise RuntimeError(f"the node sent a message of {length} bytes; at most {MAX_FRAME} are read")
                command = decoder.decode(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                log.info("the node is gone")
                end(0)
            if isinstance(command, Meet):
                self.others = command.peers
                self.news.set()
            elif isinstance(command, Round):
                if task is not None:
                    task.cancel()  # the node waits for the newest one only
                task = asyncio.create_task(self.answer(command))

    async def beat(self) -> None:
        while True:
            if not (self.dht.is_alive() and self.averager.is_alive()):
                raise RuntimeError("a process of hivemind has ended")
            self.say(Beat())
            await asyncio.sleep(BEAT_SECONDS)

    async def keep_meeting(self) -> None:
        """Dial the given addresses again and again: who is there may have been started anew since."""
        known: dict[str, str] = {}
        while True:
            self.news.clear()
            addresses = tuple(dict.fromkeys((*self.setup.peers, *self.others)))
            reasons = await asyncio.gather(*map(self.dial, addresses))
            for address, why in zip(addresses, reasons, strict=True):
                if known.get(address) != why:
                    log.info("%s: %s", address, why or "there")
            known = dict(zip(addresses, reasons, strict=True))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MEET_SECONDS):
                    await self.news.wait()

    async def dial(self, address: str) -> str:
        future = self.dht.run_coroutine(functools.partial(_meet, address=address), return_future=True)
        try:
            return str(await asyncio.to_thread(future.result, 2 * STALL_SECONDS))
        except Exception as error:  # noqa: BLE001 - of hivemind's process, which may be starved; the next try may work
            return repr(error)[:150]

    # -- a round ---------------------------------------------------------------------------------------------

    async def answer(self, command: Round) -> None:
        """Do a round and tell the node what came of it."""
        try:
            self.say(await self.round(command))
        except Fault as fault:
            self.say(NoRound(command.number, str(fault)))

    async def round(self, command: Round) -> Gathered:
        self.current = (command.digest, Path(command.path))
        group = {str(peer): (peer, said) for peer, said in (await self.find(command)).items()}
        own = str(self.averager.peer_id)
        # a group's leader may be hostile, and bring as many as it likes
        names = sorted([own, *sorted(group.keys() - {own})[: MAX_GROUP - 1]])
        if shutil.disk_usage(self.directory).free < len(names) * self.setup.size + FREE_MARGIN:
            raise Fault(f"the disk has no room for the weights of {len(names)} nodes")
        fetches = {
            name: asyncio.create_task(self.fetch(*group[name], at)) for at, name in enumerate(names) if name != own
        }
        if fetches:
            await asyncio.wait(fetches.values(), timeout=command.fetch_seconds)
        lost = {}
        for name, task in fetches.items():
            if not task.done():
                task.cancel()
                lost[name] = f"its weights did not come within {command.fetch_seconds:.0f} s"
            elif why := task.result():
                lost[name] = why
        there = [name for name in names if name not in lost]
        for at, name in enumerate(there):  # files are numbered as those are now whose weights there are
            if name != own and names.index(name) != at:
                file_of(self.directory, names.index(name)).replace(file_of(self.directory, at))
        told = tuple(f"{name}: {why}" for name, why in lost.items())
        return Gathered(command.number, tuple(there), there.index(own), told)

    async def find(self, command: Round) -> dict[Any, Any]:
        """Come together with others: id of each and what it says of its weights, the own ones among them."""
        said = {"digest": command.digest, "size": self.setup.size}
        step = self.averager.step(gather=said, timeout=command.find_seconds, wait=False)
        try:
            async with asyncio.timeout(command.find_seconds + GATHER_SECONDS):
                gathered = await asyncio.to_thread(step.result, command.find_seconds + GATHER_SECONDS)
        except Exception as error:
            step.cancel()
            log.info("no group: %r", error)
            raise Fault(f"nobody else came within {command.find_seconds:.0f} s") from error
        return dict(gathered)

    async def fetch(self, peer: Any, said: Any, at: int) -> str:
        """Have the weights of one peer in a file; why not where not."""
        try:
            if not isinstance(said, dict) or said.get("size") != self.setup.size:
                raise Fault("its weights are of another size")
            digest = said.get("digest")
            if not isinstance(digest, bytes) or len(digest) != hashlib.sha256().digest_size:
                raise Fault("it says no hash of its weights")
            await self.receive(peer, digest, file_of(self.directory, at))
        except Fault as fault:
            return str(fault)
        except TimeoutError:
            return f"nothing came for {STALL_SECONDS:.0f} s"
        except Exception as error:  # noqa: BLE001 - of hivemind's daemon, which has many; the others' weights count
            return repr(error)[:150]
        return ""

    async def receive(self, peer: Any, digest: bytes, path: Path) -> None:
        writer = None
        hashed, missing = hashlib.sha256(), self.setup.size
        try:
            async with asyncio.timeout(STALL_SECONDS):
                _, reader, writer = await self.p2p.call_binary_stream_handler(peer, STREAM)
                writer.write(digest)
                await writer.drain()
            with path.open("wb") as file:
                while missing:
                    async with asyncio.timeout(STALL_SECONDS):
                        chunk = await reader.read(min(CHUNK, missing))
                    if not chunk:
                        raise Fault(f"it closed with {missing} bytes missing")
                    hashed.update(chunk)
                    file.write(chunk)
                    missing -= len(chunk)
        finally:
            if writer is not None:
                writer.close()
        if not secrets.compare_digest(hashed.digest(), digest):
            raise Fault("its weights do not have the hash that it gave")

    async def hand_out(self, _info: Any, reader: Any, writer: Any) -> None:
        """Serve the own weights to whoever knows their hash: that is, to the round."""
        try:
            async with self.serving:
                async with asyncio.timeout(STALL_SECONDS):
                    asked = await reader.readexactly(hashlib.sha256().digest_size)
                if self.current is None or not secrets.compare_digest(asked, self.current[0]):
                    return
                with self.current[1].open("rb") as file:
                    while chunk := file.read(CHUNK):
                        writer.write(chunk)
                        async with asyncio.timeout(STALL_SECONDS):
                            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("a peer did not take the weights: %r", error)
        finally:
            writer.close()
