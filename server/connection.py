"""uvicorn's side of one connection, for clients that say more than they should."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_AHEAD = 64 * 1024
"""Bytes of further requests that one connection may send before it has its answer."""


class Connection(H11Protocol):
    """Bytes after a request that is being answered neither hide that the client leaves, nor end the
    answer.
    """

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:
            return  # nothing can follow, and h11 takes whatever comes for a mistake
        if self.conn.their_state in (h11.DONE, h11.IDLE) and not self.conn.trailing_data[0]:
            # Some clients send a newline after the body; h11 wants none before a request.
            data = data.lstrip(b"\r\n")
        if data:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        # For the next request uvicorn stops reading, and then does not see the connection close.
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            ahead, _ = self.conn.trailing_data
            if len(ahead) <= _MOST_AHEAD:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # there is an answer already: of it, the end is all that can still be told
            self.transport.close()
