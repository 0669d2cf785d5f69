"""Who is at the other end of a connection between machines: both sides prove that they know a secret that Ray carried.

The listener sends a nonce; who dials sends one too, its name, and HMAC-SHA256 of both under the secret; the listener
answers with another one. After that the bytes are plain: the network between the machines of a cluster is taken to be
private, as NCCL and gloo take it to be (docs/operations.md).
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import time

NONCE_BYTES = MAC_BYTES = SECRET_BYTES = 32
MAX_NAME = 64
DIAL, ANSWER = b"shoal dials", b"shoal answers"


class Stranger(Exception):
    """The other side does not know the secret, says too little in time, or is gone."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def proof(secret: bytes, role: bytes, theirs: bytes, ours: bytes, name: bytes) -> bytes:
    """What shows that one side knows the secret. `theirs`: the listener's nonce; `ours`: that of who dials."""
    return hmac.digest(secret, b"\0".join((role, theirs + ours, name)), hashlib.sha256)


def dial(host: str, port: int, secret: bytes, name: str, seconds: float) -> socket.socket:
    """A connection to who listens with this secret. Raises Stranger, OSError."""
    until = time.monotonic() + seconds
    connection = socket.create_connection((host, port), timeout=seconds)
    try:
        nonce, called = secrets.token_bytes(NONCE_BYTES), name.encode()
        theirs = _receive(connection, NONCE_BYTES, until)
        connection.sendall(nonce + bytes([len(called)]) + called + proof(secret, DIAL, theirs, nonce, called))
        answer = _receive(connection, MAC_BYTES, until)
        if not hmac.compare_digest(answer, proof(secret, ANSWER, theirs, nonce, called)):
            raise Stranger(f"what listens at {host}:{port} does not know the secret")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket, secret: bytes, seconds: float) -> str:
    """Who dialled, by the name it gave. Raises Stranger, OSError; the caller closes the connection."""
    until = time.monotonic() + seconds
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(seconds)
    connection.sendall(ours)
    theirs = _receive(connection, NONCE_BYTES, until)
    (length,) = _receive(connection, 1, until)
    name = _receive(connection, _checked(length), until)
    mac = _receive(connection, MAC_BYTES, until)
    reply, called = _judge(secret, ours, theirs, name, mac)
    connection.sendall(reply)
    connection.settimeout(None)
    return called


async def answer_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, seconds: float
) -> str:
    """The same as `answer`, in asyncio."""
    ours = secrets.token_bytes(NONCE_BYTES)
    try:
        async with asyncio.timeout(seconds):
            writer.write(ours)
            theirs = await reader.readexactly(NONCE_BYTES)
            (length,) = await reader.readexactly(1)
            name = await reader.readexactly(_checked(length))
            reply, called = _judge(secret, ours, theirs, name, await reader.readexactly(MAC_BYTES))
            writer.write(reply)
            await writer.drain()
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise Stranger("it did not say who it is") from error
    return called


def _checked(length: int) -> int:
    if length > MAX_NAME:
        raise Stranger(f"a name of {length} bytes")
    return length


def _judge(secret: bytes, ours: bytes, theirs: bytes, name: bytes, mac: bytes) -> tuple[bytes, str]:
    if not hmac.compare_digest(mac, proof(secret, DIAL, ours, theirs, name)):
        raise Stranger("it does not know the secret")
    return proof(secret, ANSWER, ours, theirs, name), name.decode(errors="replace")


def _receive(connection: socket.socket, count: int, until: float) -> bytes:
    """Exactly so many bytes, by a time on the monotonic clock: a byte now and then gains nothing."""
    received = b""
    while len(received) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise Stranger("it did not say who it is")
        connection.settimeout(left)
        try:
            more = connection.recv(count - len(received))
        except TimeoutError as error:
            raise Stranger("it did not say who it is") from error
        if not more:
            raise Stranger("it hung up")
        received += more
    return received
