"""The node's side of averaging: starts the averager process, watches it, and asks it for the weights of a round.

hivemind cannot live in a process with libp2p (both register the same protobuf names), and what strangers send it must
not hurt the node: so it is a process without the node's variables, confined by `program`, which serves what is in
swarm/averaging_worker.py, and is killed when it is silent.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import site
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarm.averaging_wire import (
    LENGTH,
    MAX_FRAME,
    MAX_GROUP,
    Beat,
    Gathered,
    Meet,
    NoRound,
    Ready,
    Reply,
    Round,
    Setup,
    file_of,
    frame,
)
from swarm.backing_off import pause_after
from swarm.child import open_log, scratch_directory

log = logging.getLogger(__name__)

START_SECONDS = 180.0
"""For the first word of the process: importing hivemind takes half a minute on a busy machine."""
SILENT_SECONDS = 60.0
"""Without a beat, of which there is one a second."""
SLACK_SECONDS = 10.0
"""Over the deadlines that the process itself keeps."""
LONGEST_PAUSE = 300.0
ROOT = Path(__file__).parents[1]
PASSED_ON = ("PATH", "LANG", "LC_", "LD_LIBRARY_PATH", "TZ")
"""Beginnings of the variables that the process gets of the node's: it reads what strangers send."""


class NotAveraged(Exception):
    """There was no round; the message says why. The next one may work."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Somebody's weights in a round."""

    peer: str
    """Id of the averager, which is not that of the node."""
    path: Path
    """Float32 numbers, little-endian."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """What a round brought, in an order that is the same on all nodes."""

    all: tuple[Contribution, ...]
    own: int
    """Which of them is this node's."""
    lost: tuple[str, ...]
    """Who was in the round and whose weights did not come, with why."""


class Averager:
    """One averager process at a time. Used from one asyncio loop; `run` is the service that has it running."""

    def __init__(
        self, setup: Setup, log_path: Path, program: str, *, say: Callable[[str, str], None], pause: float = 2.0
    ) -> None:
        """`program`: the module that is the process; `say(level, message)` takes what a person should read; `pause`:
        seconds before a first restart."""
        self._program, self._setup, self._log_path = program, setup, log_path
        self._say, self._pause = say, pause
        self._directory = Path(setup.directory)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asked: asyncio.Future[Gathered] | None = None
        self._number = 0
        self._why_not = "the averager has not started yet"
        self._others: tuple[str, ...] = ()
        """Averagers that were found."""
        self.addresses: tuple[str, ...] = ()
        """Where other averagers reach this one; empty while it does not run."""

    @property
    def rounds(self) -> str:
        """Name of the rounds that it takes part in."""
        return self._setup.prefix

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Have the process running, for ever: one that ends is started again, after pauses that grow."""
        failures = 0
        try:
            while True:
                why = await self._life()
                failures = 0 if self.addresses else failures + 1
                self.addresses, self._why_not = (), why
                if self._asked is not None and not self._asked.done():
                    self._asked.set_exception(NotAveraged(why))
                pause = pause_after(failures + 1, self._pause, LONGEST_PAUSE)
                self._say("warning", f"{why}; it is started again in {pause:.0f} s (log: {self._log_path})")
                await asyncio.sleep(pause)
        finally:
            self.kill()

    async def _life(self) -> str:
        """One process from start to end; why it ended."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(theirs)
                shutil.rmtree(self._directory, ignore_errors=True)  # weights of a process that was killed
                self._directory.mkdir(mode=0o700, parents=True)
                scratch = scratch_directory(self._directory)
                held.callback(shutil.rmtree, scratch, ignore_errors=True)
                self._process = await self._launch(theirs, str(scratch))
                theirs.close()
                reader, self._writer = await asyncio.open_connection(sock=ours)
            except OSError as error:
                ours.close()
                return f"the averager cannot be started: {error}"
            try:
                self._writer.write(frame(self._setup))
                return await self._listen(reader)
            finally:
                self._writer.close()
                self._writer = None
                self.kill()

    async def _launch(self, theirs: socket.socket, scratch: str) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "WARNING"}
        # packages of the user are below the home that it does not get
        variables |= {"HOME": scratch, "TMPDIR": scratch, "PYTHONUSERBASE": site.getuserbase()}
        with open_log(self._log_path) as output:
            # -P: a `torch.py` in the directory where the node was started is not torch
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                self._program,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )

    async def _listen(self, reader: asyncio.StreamReader) -> str:
        """Take what the process says until it ends, is silent, or says what it may not; why that is the end."""
        decoder, patience, pid = msgspec.msgpack.Decoder(Reply), START_SECONDS, self.pid
        while True:
            try:
                async with asyncio.timeout(patience):
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    if length > MAX_FRAME:
                        return f"the averager sent a message of {length} bytes"
                    message = decoder.decode(await reader.readexactly(length))
            except TimeoutError:
                return f"the averager has not been heard of for {patience:.0f} s"
            except (asyncio.IncompleteReadError, ConnectionError):
                return f"the averager (process {pid}) has ended"
            except msgspec.DecodeError as error:
                return f"the averager sent what is no message: {error}"
            patience = SILENT_SECONDS
            match message:
                case Beat():
                    continue
                case Ready(addresses):
                    self.addresses = addresses
                    self.meet(self._others)
                    self._say(
                        "info", f"averaging listens at {' '.join(addresses)} (for averaging.peers of other nodes)"
                    )
                case Gathered(number) | NoRound(number):
                    if self._asked is None or self._asked.done() or number != self._number:
                        continue  # too late
                    if isinstance(message, NoRound):
                        self._asked.set_exception(NotAveraged(message.why))
                    else:
                        self._asked.set_result(message)

    def kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None  # its number may be another's from now on

    def meet(self, addresses: tuple[str, ...]) -> None:
        """Have it dial these averagers, and a process that is started later, too."""
        self._others = addresses
        if self._writer is not None and self.addresses and addresses:
            self._writer.write(frame(Meet(addresses)))

    # -- rounds ----------------------------------------------------------------------------------------------

    async def round(self, own: Path, digest: bytes, seconds: float) -> Contributions:
        """Everybody's weights, of whoever comes together within half of `seconds`. Raises NotAveraged.

        `own`: this node's weights, and `digest` their SHA-256; others fetch the file until the next round.
        """
        if self._writer is None or not self.addresses:
            raise NotAveraged(self._why_not)
        self._number += 1
        self._asked = asyncio.get_running_loop().create_future()
        self._writer.write(frame(Round(self._number, str(own), digest, seconds / 2, seconds / 2)))
        try:
            async with asyncio.timeout(seconds + SLACK_SECONDS):
                gathered = await self._asked
        except TimeoutError:
            self.kill()  # it keeps no deadline: what answers next must be another one
            raise NotAveraged(f"the averager did not answer within {seconds:.0f} s and is started again") from None
        return self._checked(gathered, own)

    def _checked(self, gathered: Gathered, own: Path) -> Contributions:
        """The process may have been taken over by a peer: nothing that it says names a path. Raises NotAveraged."""
        peers = gathered.peers
        if not 0 <= gathered.own < len(peers) <= MAX_GROUP or len(set(peers)) < len(peers):
            raise NotAveraged("the averager's answer makes no sense")
        paths = [own if at == gathered.own else file_of(self._directory, at) for at in range(len(peers))]
        for peer, path in zip(peers, paths, strict=True):
            try:
                if path.is_symlink() or path.stat().st_size != self._setup.size:
                    raise NotAveraged(f"the weights of {peer[:64]} are not of {self._setup.size} bytes")
            except OSError as error:
                raise NotAveraged(f"the weights of {peer[:64]} cannot be read: {error}") from error
        return Contributions(
            tuple(Contribution(peer[:64], path) for peer, path in zip(peers, paths, strict=True)),
            gathered.own,
            tuple(text[:200] for text in gathered.lost[:MAX_GROUP]),
        )
