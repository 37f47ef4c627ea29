"""The socket that a server listens on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from server.listen import ListenError, listen
from server.settings import ServerConfig


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_it_listens_at_once_and_says_where(host: str, is_local: bool) -> None:
    listener = listen(ServerConfig(host=host, port=0))
    try:
        port = listener.socket.getsockname()[1]
        assert listener.url == f"http://{host}:{port}"
        assert listener.is_local == is_local
        # asyncio sends small chunks at once only where it sees that this is TCP.
        assert listener.socket.proto == socket.IPPROTO_TCP
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
        with pytest.raises(ListenError, match="is in use by another program"):
            listen(ServerConfig(host=host, port=port))
    finally:
        listener.close()
    listener.close()  # idempotent
    listen(ServerConfig(host=host, port=port)).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_takes_ipv4_too() -> None:
    try:
        listener = listen(ServerConfig(host="::", port=0))
    except ListenError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        port = listener.socket.getsockname()[1]
        assert listener.url == f"http://[::]:{port}"
        assert not listener.is_local
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
    finally:
        listener.close()


def test_a_file_is_not_removed_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ListenError, match="it is no socket"):
        listen(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"
