"""Whole messages through a socket in the file system: how a SuperNode's ClientApp reaches its worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from cafcor_jax.errors import UserError

# Nobody who connects and says nothing, or too much, keeps the others waiting.
_SECONDS = 60.0
_LONGEST = 2**34


def serve(handle: Callable[[bytes], bytes], path: str | os.PathLike[str]) -> None:
    """Answers whoever connects, one after the other, for ever.

    Args:
      handle: from a message to its answer.
      path: of the socket; only its owner can connect.

    Raises:
      UserError: if there can be no socket.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.umask(0o177)
        try:
            Path(path).unlink(missing_ok=True)
            listening.bind(str(path))
            listening.listen()
        except OSError as error:  # A path of more than about 100 characters is one reason.
            raise UserError(f"socket={str(path)!r} cannot be made: {error.strerror or error}.") from None
        finally:
            os.umask(before)
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(_SECONDS)
                try:
                    _send(connection, handle(_receive(connection)))
                except OSError:
                    continue  # Whoever asked has gone; the worker has stored its answer.


def ask(path: str | os.PathLike[str], content: bytes) -> bytes:
    """Sends a message to whoever serves at a socket, and returns the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        _send(connection, content)
        return _receive(connection)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(8, "big") + content)


def _receive(connection: socket.socket) -> bytes:
    length = int.from_bytes(_exactly(connection, 8), "big")
    if length > _LONGEST:
        raise ConnectionError(f"a message of {length} bytes is longer than any may be")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = connection.recv(min(count - len(content), 2**20))
        if not part:
            raise ConnectionError("the connection ended in the middle of a message")
        content += part
    return bytes(content)
