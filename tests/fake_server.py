"""A scripted llama-server on raw sockets, and an event loop whose time is not real.

Promise: the server writes exactly the bytes of its script, one write per entry, at the scripted
times after the request came in, and frames HTTP/1.1 itself, so that no library hides the framing.
On a `VirtualLoop` time passes only while nothing else can happen, so the times a client measures
are exact and do not depend on the machine's speed.
Limit: one request per connection, no request framing but Content-Length; a virtual loop that waits
for something outside itself (a thread, another process) would let time pass meanwhile.
"""

import asyncio
import contextlib
import json
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import schemas
from board.agent.load_config import LoadConfig
from board.agent.loadgen import run_load

# How long to look for bytes that are on their way through the loopback device before concluding
# that nothing can happen until the next timer.
_GRACE_S = 0.004
_HUNG_S = 20.0

T = TypeVar("T")


class _VirtualSelector(selectors.BaseSelector):
    """A selector that lets time jump to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now_ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        ready = self._inner.select(_HUNG_S if timeout is None else _GRACE_S)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is scheduled and nothing comes: the test hangs")
            self.now_ns += max(1, round(timeout * 1e9))
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with real sockets and virtual time, which starts at 0."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_ns / 1e9

    def clock_ns(self) -> int:
        return self._virtual.now_ns

    def be_busy(self, milliseconds: float) -> None:
        """Let time pass without running anything, as a computation in the loop does."""
        self._virtual.now_ns += round(milliseconds * 1e6)


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop)` on a new virtual loop and return what it returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))


# -- what llama-server sends


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(string: str, **more: Any) -> bytes:
    """T(x): a chunk with text."""
    choice = {"index": 0, "text": string, "finish_reason": None}
    return event({"choices": [choice], "object": "text_completion", **more})


def fin(
    n: int, *, reason: str = "length", prompt: int = 5, cache: int = 0, **timings: Any
) -> bytes:
    """FIN(n): the final chunk, with usage and timings beside choices that are not empty."""
    return event(
        {
            "choices": [{"index": 0, "text": "", "finish_reason": reason}],
            "object": "text_completion",
            "usage": {
                "completion_tokens": n,
                "prompt_tokens": prompt,
                "total_tokens": n + prompt,
            },
            "timings": {
                "cache_n": cache,
                "prompt_n": prompt - cache,
                "predicted_n": n,
                **timings,
            },
        }
    )


DONE = b"data: [DONE]\n\n"
PING = b":\n\n"
RESET = "reset"  # in place of bytes: the connection is reset
CUT = "cut"  # the connection is closed without the last chunk of the body
STAY = "stay"  # the connection stays open and silent

Step = tuple[float, bytes | str]


@dataclass(frozen=True)
class Answer:
    """What to send: steps of (ms after the request came in, bytes or one of the words above)."""

    steps: Sequence[Step] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    raw: bool = False  # the steps are everything, status line included


def stream(*steps: Step) -> Answer:
    return Answer(steps)


def plain(content: Any, status: int = 200) -> Answer:
    """A JSON answer at once."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Answer([(0, body)], status, "application/json; charset=utf-8")


def error(status: int, message: str) -> Answer:
    return plain({"error": {"code": status, "message": message, "type": "x"}}, status)


def tokens(n: int, first_ms: float = 10, gap_ms: float = 10, **more: Any) -> Answer:
    """A good completion of n one-token chunks."""
    times = [first_ms + i * gap_ms for i in range(n)]
    steps: list[Step] = [(t, text(f"w{i} ")) for i, t in enumerate(times)]
    return stream(*steps, (times[-1], fin(n, **more)), (times[-1], DONE))


def props(slots: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "total_slots": slots,
        "build_info": "b1-fake",
        "model_path": "/model.gguf",
        "media_marker": "<one>",
        "default_generation_settings": {"n_ctx": 512},
        **more,
    }


def slots(n: int = 4, n_ctx: int = 512, busy: int = 0) -> list[dict[str, Any]]:
    return [{"id": i, "n_ctx": n_ctx, "is_processing": i < busy} for i in range(n)]


Rule = Answer | Sequence[Answer] | Callable[["Request"], Answer]


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]
    body: Any
    number: int  # of this path, from 0


@dataclass
class FakeServer:
    """Answers by path: always the same, one after another (the last one again), or by function."""

    rules: dict[str, Rule]
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def bodies(self, path: str = "/v1/completions") -> list[Any]:
        return [request.body for request in self.requests if request.path == path]

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0)
            await server.wait_closed()
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, v in (x.split(": ", 1) for x in head[1:] if x)}
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            path = head[0].split(" ")[1]
            number = sum(request.path == path for request in self.requests)
            request = Request(path, headers, json.loads(raw) if raw else None, number)
            self.requests.append(request)
            await self._play(self._answer(request), writer, reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, request: Request) -> Answer:
        rule = self.rules.get(request.path)
        if rule is None:
            return error(404, "File Not Found")
        if isinstance(rule, Answer):
            return rule
        if callable(rule):
            return rule(request)
        return rule[min(request.number, len(rule) - 1)]

    async def _play(
        self, answer: Answer, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if not answer.raw:
            writer.write(
                f"HTTP/1.1 {answer.status} X\r\nContent-Type: {answer.content_type}\r\n"
                "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
            )
        for t_ms, what in answer.steps:
            delay_s = start_s + t_ms / 1e3 - loop.time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            if what == RESET:
                # Not before the other side has read what was sent, which a reset would discard.
                await asyncio.sleep(0.001)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return
            if what == CUT:
                return
            if what == STAY:
                await reader.read()  # until the client goes away
                return
            assert isinstance(what, bytes)
            writer.write(what if answer.raw else b"%x\r\n%b\r\n" % (len(what), what))
            await writer.drain()
        if not answer.raw:
            writer.write(b"0\r\n\r\n")


@contextlib.contextmanager
def in_thread(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server in real time in a thread, for a client in another process."""
    started, stopped = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        stop = asyncio.Event()
        async with server.running():
            thread_stop.append(lambda: loop.call_soon_threadsafe(stop.set))
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()
            stopped.set()

    thread_stop: list[Callable[[], object]] = []
    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        thread_stop[0]()
        thread.join()


def load(
    rule: Rule,
    *,
    others: dict[str, Rule] | None = None,
    hook: Callable[[VirtualLoop], None] | None = None,
    stop_after_s: float | None = None,
    clock_costs_ms: float = 0,
    **settings: Any,
) -> tuple[dict[str, Any], FakeServer]:
    """Run a load against a server whose completions follow `rule`; the result fits its schema."""
    server = FakeServer({"/v1/completions": rule, **(others or {})})
    chosen = {"requests": 1, "preflight": False, "heartbeat_ms": 0, "prompt_words": 5} | settings

    async def main(loop: VirtualLoop) -> dict[str, Any]:
        def clock() -> int:
            loop.be_busy(clock_costs_ms)
            return loop.clock_ns()

        async with server.running():
            config = LoadConfig(url=server.url, **chosen)
            stop = asyncio.Event()
            if hook is not None:
                hook(loop)
            if stop_after_s is not None:
                loop.call_later(stop_after_s, stop.set)
            return await run_load(config, clock, stop)

    result = run_virtual(main)
    schemas.check(result, "loadgen")
    return result, server
