"""What a load run is asked to do.

Promise: a LoadConfig that exists can be run; one that cannot is refused with a line that names the
option, what was got and what is expected.
Limit: whether the server can serve it is found out by the preflight, not here.
"""

import math
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["closed", "rounds", "open"]
Arrivals = Literal["poisson", "constant"]

# 2^32 - 1 is what llama-server takes for "random".
LARGEST_SEED = 2**32 - 2
LARGEST_TOKENS = 2**31 - 1


class ConfigError(ValueError):
    """A setting is not of the documented form; str() is the one line to show."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """The settings of a run; times in the unit of their name.  Raises ConfigError."""

    url: str
    concurrency: int = 1
    requests: int = 16
    max_tokens: int = 64
    prompt_words: int | None = 64
    prompt: str | None = None  # one literal prompt for every request; then prompt_words is None
    seed: int = 0
    mode: Mode = "closed"
    rate_rps: float | None = None  # open loop only
    arrivals: Arrivals | None = None  # open loop only
    warmup_requests: int = 0
    one_prompt: bool = False  # for all requests; the server may take it from its cache
    preflight: bool = True
    ready_timeout_s: float = 60.0
    connect_timeout_s: float = 30.0
    first_token_timeout_s: float = 600.0
    stall_timeout_s: float = 300.0
    total_timeout_s: float = 3600.0
    drain_timeout_s: float = 60.0
    heartbeat_ms: float = 10.0  # 0: no heartbeat, and nothing known about the loop's lag
    max_loop_lag_ms: float = 100.0
    max_start_spread_ms: float = 1000.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            usable = usable and parts.port != 0 and not parts.query and not parts.fragment
        except ValueError:  # urlsplit checks the port only when it is asked for
            usable = False
        if not usable:
            raise ConfigError(f"url: expected http://HOST[:PORT][/PATH], got {self.url!r}")
        _integer("concurrency", self.concurrency, 1)
        _integer("requests", self.requests, 1)
        _integer("max_tokens", self.max_tokens, 1, LARGEST_TOKENS)
        _integer("seed", self.seed, 0, LARGEST_SEED)
        _integer("warmup_requests", self.warmup_requests, 0)
        self._check_prompt()
        self._check_mode()
        for name in ("ready", "connect", "first_token", "stall", "total", "drain"):
            _number(f"{name}_timeout_s", getattr(self, f"{name}_timeout_s"), above_zero=True)
        _number("heartbeat_ms", self.heartbeat_ms)
        _number("max_loop_lag_ms", self.max_loop_lag_ms)
        _number("max_start_spread_ms", self.max_start_spread_ms)

    def _check_prompt(self) -> None:
        if self.prompt is None:
            if self.prompt_words is None:
                raise ConfigError("prompt_words: expected a number, got none, and no prompt either")
            _integer("prompt_words", self.prompt_words, 1)
        elif self.one_prompt:
            raise ConfigError("one_prompt: expected prompt_words beside it, not a literal prompt")
        elif self.prompt_words is not None:
            raise ConfigError("prompt_words: expected none beside a literal prompt")
        elif not self.prompt:
            raise ConfigError("prompt: expected some text, got an empty one")

    def _check_mode(self) -> None:
        if self.mode not in ("closed", "rounds", "open"):
            raise ConfigError(f"mode: expected closed, rounds or open, got {self.mode!r}")
        if self.mode == "rounds" and self.requests % self.concurrency:
            raise ConfigError(
                f"requests: expected a multiple of the concurrency, {self.concurrency}, because "
                f"every round sends that many, got {self.requests}"
            )
        if self.mode == "open":
            if self.rate_rps is None or self.arrivals is None:
                raise ConfigError("rate_rps, arrivals: the open loop needs both")
            _number("rate_rps", self.rate_rps, above_zero=True)
            if self.arrivals not in ("poisson", "constant"):
                raise ConfigError(f"arrivals: expected poisson or constant, got {self.arrivals!r}")
        elif self.rate_rps is not None or self.arrivals is not None:
            raise ConfigError(f"rate_rps, arrivals: mean nothing in mode {self.mode}")


def _integer(name: str, value: object, least: int, most: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and least <= value and (most is None or value <= most)):  # type: ignore[operator]
        limit = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}: expected a whole number {limit}, got {value!r}")


def _number(name: str, value: object, *, above_zero: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above_zero and value == 0):  # type: ignore[operator]
        limit = "above 0" if above_zero else "from 0 on"
        raise ConfigError(f"{name}: expected a number {limit}, got {value!r}")
