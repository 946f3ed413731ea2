"""A byte-exact reader of Server-Sent Events.

Promise: the same bytes give the same events however the network cuts them, LF, CRLF and CR all end
a line, an event ends at a blank line and carries the time of the read that completed it, and bytes
are handed on undecoded, so no character can be broken here.  Field rules are those of the WHATWG
HTML standard, section "Server-sent events"; the field name `error:`, which old llama-server builds
send instead of `data:`, is kept too.
Limit: an event that is still unfinished when the stream ends is never handed out, as the standard
says; `id:` and `retry:` are ignored, because nothing here reconnects.
"""

import re
from typing import NamedTuple

DEFAULT_LIMIT_BYTES = 16 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseLimitError(ValueError):
    """One event is larger than the reader may keep."""


class Event(NamedTuple):
    """One complete event.  `t_ns` is the clock reading at the read that completed it."""

    t_ns: int
    kind: bytes  # of the `event:` field; empty when there is none
    data: bytes  # the `data:` lines, joined with LF
    error: bytes  # the `error:` lines, joined with LF; empty when there are none


class SseReader:
    """Cuts a byte stream into events; holds at most `limit_bytes` of one unfinished event."""

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._line = bytearray()  # the unfinished line
        self._data: list[bytes] = []
        self._errors: list[bytes] = []
        self._kind = b""
        self._held_bytes = 0  # of the lines of the unfinished event
        self._after_cr = False
        self._at_start = True

    def feed(self, data: bytes, t_ns: int) -> list[Event]:
        """Return the events that `data`, read at `t_ns`, completes; SseLimitError if too large."""
        events: list[Event] = []
        if not data:
            return events
        # A CR ended its line at once, so that no event waits for the next read; an LF that
        # follows in the next read belongs to it.
        start = 1 if self._after_cr and data.startswith(b"\n") else 0
        for match in _LINE_END.finditer(data, start):
            line = data[start : match.start()]
            start = match.end()
            if self._line:
                line = bytes(self._line) + line
                self._line.clear()
            self._end_line(line, t_ns, events)
        self._after_cr = data.endswith(b"\r")
        self._line += data[start:]
        self._check_limit(len(self._line))
        return events

    def _end_line(self, line: bytes, t_ns: int, events: list[Event]) -> None:
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            if self._data or self._errors:
                data, errors = b"\n".join(self._data), b"\n".join(self._errors)
                events.append(Event(t_ns, self._kind, data, errors))
            self._data, self._errors, self._kind, self._held_bytes = [], [], b"", 0
            return
        self._check_limit(len(line))
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"error":
            self._errors.append(value)
        elif name == b"event":
            self._kind = value
        else:
            return  # a comment (a ping), id, retry, or something unknown: nothing is kept
        self._held_bytes += len(line)

    def _check_limit(self, more_bytes: int) -> None:
        if self._held_bytes + more_bytes > self._limit_bytes:
            raise SseLimitError(
                f"one event of the stream is larger than {self._limit_bytes} bytes; "
                "the server sends no blank line, or something that is not an event stream"
            )
