"""What the server says about itself: ready or not, slots, context, words, idle again.

Promise: waiting for the server happens before anything is measured; a server that lacks an endpoint
(other than completions) is used without what that endpoint would have told, and the record shows
null for it.
Limit: /props does not change when a server of the same build is restarted with the same options,
except for llama-server's random media marker; that is what tells such a restart.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from board.agent.load_client import Clock
from board.agent.load_config import LoadConfig
from board.agent.prompts import whole_words

_POLL_S = 0.25
_DRAIN_POLL_S = 0.05
_ANSWER_LIMIT_S = 60.0
_HOUSEKEEPING = {"Connection": "close"}


class NotReady(Exception):
    """The server did not become ready in time; str() is one line."""


@dataclass
class ServerFacts:
    """What was found out before the run; None where the server does not tell."""

    props: dict[str, Any] | None = None
    slot_ids: list[int] | None = None
    slot_n_ctx: list[int] | None = None
    words: list[str] = field(default_factory=list)  # those of the list to make prompts of
    special_tokens: int | None = None  # per prompt, added by the tokenizer; None: words are cut

    @property
    def total_slots(self) -> int | None:
        slots = (self.props or {}).get("total_slots")
        if isinstance(slots, int):
            return slots
        return None if self.slot_ids is None else len(self.slot_ids)

    @property
    def smallest_n_ctx(self) -> int | None:
        if self.slot_n_ctx:
            return min(self.slot_n_ctx)
        n_ctx = ((self.props or {}).get("default_generation_settings") or {}).get("n_ctx")
        return n_ctx if isinstance(n_ctx, int) else None


class Server:
    """The side channels of one server; nothing here is used while a phase is running."""

    def __init__(self, session: aiohttp.ClientSession, config: LoadConfig, clock: Clock) -> None:
        self._session = session
        self._base = config.url.rstrip("/")
        self._clock = clock
        self._deadline_ns = clock() + round(config.ready_timeout_s * 1e9)
        self._ready_timeout_s = config.ready_timeout_s

    async def pause_until_ready(self, why: str) -> None:
        """Wait a little before trying again; NotReady, with `why`, when there is no time left."""
        if self._clock() >= self._deadline_ns:
            raise NotReady(f"not ready within {self._ready_timeout_s:g} s: {why}")
        await asyncio.sleep(_POLL_S)

    async def wait_healthy(self) -> None:
        """Return when /health is 200, or when there is no such path; NotReady if never."""
        while True:
            status, answer = await self._ask("GET", "/health")
            if status in (200, 404):
                return
            await self.pause_until_ready(f"/health: {_said(status, answer)}")

    async def facts(self, words: Sequence[str], *, count_words: bool) -> ServerFacts:
        """Ask /props, /slots and, if `count_words`, /tokenize."""
        facts = ServerFacts(props=await self._props(), words=list(words))
        slots = await self._slots()
        if slots is not None:
            facts.slot_ids = [slot["id"] for slot in slots]
            facts.slot_n_ctx = [slot["n_ctx"] for slot in slots if isinstance(slot["n_ctx"], int)]
        if count_words:
            await self._count_words(facts)
        return facts

    async def _props(self) -> dict[str, Any] | None:
        while True:
            status, answer = await self._ask("GET", "/props")
            if status == 200 and isinstance(answer, dict):
                return answer
            if status != 503:
                return None
            # A short while after /health says 200 the rest may still be loading.
            await self.pause_until_ready(f"/props: {_said(status, answer)}")

    async def _slots(self) -> list[dict[str, Any]] | None:
        status, answer = await self._ask("GET", "/slots")
        if status != 200 or not isinstance(answer, list) or not answer:
            return None
        keys = ("id", "n_ctx", "is_processing")
        if not all(isinstance(slot, dict) and isinstance(slot.get("id"), int) for slot in answer):
            return None
        return [{key: slot.get(key) for key in keys} for slot in answer]

    async def _count_words(self, facts: ServerFacts) -> None:
        content = "".join(f" {word}" for word in facts.words)
        whole: list[str] = []
        status, answer = await self._ask(
            "POST", "/tokenize", {"content": content, "add_special": False, "with_pieces": True}
        )
        if status == 200 and isinstance(answer, dict) and isinstance(answer.get("tokens"), list):
            tokens = [token for token in answer["tokens"] if isinstance(token, dict)]
            whole = whole_words(facts.words, tokens)
        # Half the list is plenty; with less, something else is wrong with this vocabulary.
        if len(whole) * 2 < len(facts.words):
            return
        status, answer = await self._ask(
            "POST", "/tokenize", {"content": "", "add_special": True, "with_pieces": False}
        )
        if status == 200 and isinstance(answer, dict) and isinstance(answer.get("tokens"), list):
            facts.words = whole
            facts.special_tokens = len(answer["tokens"])

    async def changed_since(self, facts: ServerFacts) -> str | None:
        """Return what differs in /props from `facts`, None if nothing or if it never told."""
        if facts.props is None:
            return None
        status, answer = await self._ask("GET", "/props")
        if status != 200 or not isinstance(answer, dict):
            return f"/props: {_said(status, answer)}"
        names = sorted(
            name
            for name in facts.props.keys() | answer.keys()
            if name != "is_sleeping" and facts.props.get(name) != answer.get(name)
        )
        return f"/props: {', '.join(names)} changed during the run" if names else None

    async def drain(self, timeout_s: float) -> str | None:
        """Wait until no slot is busy; return None, or one line if one still is after `timeout_s`.

        A server may go on generating for a client that has gone away.
        """
        deadline_ns = self._clock() + round(timeout_s * 1e9)
        while True:
            slots = await self._slots()
            busy = [slot["id"] for slot in slots or [] if slot["is_processing"]]
            if not busy:
                return None
            if self._clock() >= deadline_ns:
                return f"slots {busy} still busy {timeout_s:g} s after the last request"
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, Any]:
        """Return the HTTP status and the JSON of the answer; status 0 and a line if none came."""
        try:
            async with (
                asyncio.timeout(_ANSWER_LIMIT_S),
                self._session.request(
                    method, self._base + path, json=body, headers=_HOUSEKEEPING
                ) as response,
            ):
                text = await response.text()
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            return 0, f"{type(error).__name__}: {error}"
        try:
            return status, json.loads(text)
        except (ValueError, RecursionError):
            return status, text


def _said(status: int, answer: Any) -> str:
    shown = answer if isinstance(answer, str) else json.dumps(answer)
    return f"HTTP {status} {shown[:200]}" if status else shown[:200]
