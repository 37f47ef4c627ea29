"""The socket that the server listens on. It is bound before the model is loaded: a port that is in
use is told at once.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from server.settings import ServerConfig

BACKLOG = 2048


class ListenError(Exception):
    """The address cannot be listened on; says why and what to do."""


@dataclass(frozen=True)
class Listener:
    """A bound socket, and how to reach it."""

    socket: socket.socket
    url: str
    is_local: bool
    """Only this machine can reach it."""
    path: str | None = None
    """Of a Unix socket."""

    def close(self) -> None:
        """Close it, and remove the file of a Unix socket. Idempotent."""
        self.socket.close()
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)


def listen(settings: ServerConfig) -> Listener:
    """Bind and listen. Raises `ListenError`."""
    if settings.uds is not None:
        return _listen_unix(settings.uds)
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenError(f"--host {host}: {getattr(error, 'strerror', error)}.") from error
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    # With the protocol named: without it asyncio leaves Nagle's algorithm on, and chunks of a
    # stream wait some 40 ms for the client's acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port of which a closed connection still lingers is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # :: takes IPv4 too
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ListenError(_why(host, port, error)) from error
    bound.setblocking(False)
    scheme = "http" if settings.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{bound.getsockname()[1]}"
    return Listener(bound, url, is_local=_is_local(host))


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{host}:{port} is in use by another program. Stop that, or choose another --port; 0 "
            "takes a free one."
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges (it is below 1024?); choose another --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; 0.0.0.0 is all of them."
    return f"cannot listen on {host}:{port}: {error.strerror}."


def _listen_unix(path: str) -> Listener:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        bound.bind(path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "another server listens on it, or it is no socket"
        raise ListenError(f"--uds {path}: {why}.") from error
    bound.setblocking(False)
    return Listener(bound, f"unix:{path}", is_local=True, path=path)


def _remove_stale(path: str) -> None:
    """Remove the socket that a server left which was killed."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
