"""One streaming completion request: bytes and times, nothing interpreted that can wait.

Promise: every read is stamped before it is looked at; while a stream runs no more is done per token
than cutting it into events (JSON is parsed up to the first token only, the rest after the window);
a request always ends, by one of its time limits at the latest, and says how.
Limit: a fresh connection for each request, its set-up inside the time to the first token, alike for
all requests.  llama-server closes kept connections on its own, and a request that meets such a
close looks like a failed server.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from board.agent.load_config import LoadConfig
from board.agent.sse import Event, SseLimitError, SseReader

Clock = Callable[[], int]  # nanoseconds from any origin, never backwards

DONE = b"[DONE]"
_BODY_LIMIT_BYTES = 64 * 1024  # of an answer that is not an event stream
_CLOSE_LIMIT_NS = 1_000_000_000  # how long the end of the answer may take after [DONE]

_HEADERS = {
    "Accept": "text/event-stream",
    "Accept-Encoding": "identity",
    "Connection": "close",
    "Content-Type": "application/json",
}


@dataclass
class Reply:
    """What came back for one request; times are clock readings in ns, None if it never happened."""

    t_send_ns: int
    t_end_ns: int | None = None  # [DONE] was read, or the stream ended, or was given up
    http_status: int | None = None
    events: list[Event] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)  # what came while there was no event
    done: bool = False
    failure: tuple[str, str] | None = None  # status class and one line


def open_session(config: LoadConfig) -> aiohttp.ClientSession:
    """Return a session without pooling, proxies, cookies or a limit on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class _Watchdog:
    """Ends the request's scope when a limit is reached; pings do not put it off.

    It is looked at when a limit could have been reached, not at each token: the limits move, the
    timer does not have to.
    """

    def __init__(self, config: LoadConfig, clock: Clock, reply: Reply, scope: asyncio.Timeout):
        self._clock = clock
        self._reply = reply
        self._scope = scope
        self._total_ns = reply.t_send_ns + _ns(config.total_timeout_s)
        self._stall_ns = _ns(config.stall_timeout_s)
        self._first_ns = reply.t_send_ns + _ns(config.first_token_timeout_s)
        self.first_text_seen = False
        self.last_event_ns = reply.t_send_ns
        self.expired: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _deadline(self) -> tuple[int, str]:
        if self._reply.t_end_ns is not None:
            return self._reply.t_end_ns + _CLOSE_LIMIT_NS, "close"
        if self.first_text_seen:
            limit = (self.last_event_ns + self._stall_ns, "timeout_stall")
        else:
            limit = (self._first_ns, "timeout_first_token")
        return min(limit, (self._total_ns, "timeout_total"))

    def _look(self) -> None:
        now = self._clock()
        deadline, name = self._deadline()
        if now >= deadline:
            self.expired = name
            self._scope.reschedule(asyncio.get_running_loop().time())
            return
        delay_s = (deadline - now) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def hurry(self) -> None:
        """Look again now: the next limit is nearer than the timer."""
        self.stop()
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


async def complete(
    session: aiohttp.ClientSession, config: LoadConfig, clock: Clock, body: bytes, keep: list[Reply]
) -> Reply:
    """Send one request, read its stream to the end, and return what came; never raises for it.

    The reply is in `keep` from the moment of sending, so that it survives being cancelled, which is
    the one thing that is passed on.
    """
    url = config.url.rstrip("/") + "/v1/completions"
    reply = Reply(t_send_ns=clock())
    keep.append(reply)
    watchdog: _Watchdog | None = None
    try:
        async with asyncio.timeout(None) as scope:
            watchdog = _Watchdog(config, clock, reply, scope)
            async with session.post(
                url, data=body, headers=_HEADERS, allow_redirects=False
            ) as response:
                reply.http_status = response.status
                await _read(response, clock, reply, watchdog)
    except asyncio.CancelledError:
        if not reply.done:
            reply.failure = ("cancelled", "the run was stopped while the request was in flight")
        raise
    except (TimeoutError, aiohttp.ClientError, OSError, SseLimitError) as error:
        if not reply.done:
            reply.failure = _failure(error, watchdog, reply)
    finally:
        if watchdog is not None:
            watchdog.stop()
        if reply.t_end_ns is None:
            reply.t_end_ns = clock()
    return reply


async def _read(
    response: aiohttp.ClientResponse, clock: Clock, reply: Reply, watchdog: _Watchdog
) -> None:
    reader = SseReader()
    streaming = response.status == 200
    async for data in response.content.iter_any():
        t_ns = clock()
        if reply.done:
            continue  # only the end of the answer is waited for
        events = reader.feed(data, t_ns) if streaming else []
        if not events and not reply.events:
            reply.body += data[: _BODY_LIMIT_BYTES - len(reply.body)]
        for event in events:
            if event.data == DONE:
                reply.done = True
                reply.t_end_ns = t_ns
                watchdog.hurry()
                break
            watchdog.last_event_ns = t_ns
            reply.events.append(event)
            if not watchdog.first_text_seen and _has_text(event):
                watchdog.first_text_seen = True
                watchdog.hurry()


def _has_text(event: Event) -> bool:
    try:
        return bool(json.loads(event.data)["choices"][0]["text"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _failure(error: Exception, watchdog: _Watchdog | None, reply: Reply) -> tuple[str, str]:
    text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    if isinstance(error, aiohttp.ServerTimeoutError):
        return "timeout_connect", text
    if isinstance(error, TimeoutError) and watchdog is not None and watchdog.expired:
        return watchdog.expired, f"{watchdog.expired} after {len(reply.events)} event(s)"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect_error", text
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | OSError):
        return "stream_broken", text
    return "parse_error", text
