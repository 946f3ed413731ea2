"""The policy of a run: set when the harts are there, proved at both ends of the window, undone.

Promise: whatever happens, scx_vstate has ended and the base slice is what it was when the block is
left, so the machine is back on its default scheduler; what the policy asks for and the kernel does
not say it has is a reason by name.
Limit: needs root and, for a base slice, debugfs.  The state is read right outside the window's
edges; that nothing changed in between follows from the kernel's own count (enable_seq).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from board.agent import system
from board.agent.group import Group
from board.agent.held import Held

OPS = "vstate"
DISABLED = ("disabled", None)
POLICY_EXT = 7  # SCHED_EXT of linux/sched.h


class Scheduling:
    """What a cell's `scheduling` asks for, on one server.

    program: scx_vstate, needed if a scheduler is asked for.  reasons: why the run does not count
    on its account, filled as it happens.
    """

    def __init__(
        self,
        wanted: Mapping[str, Any],
        program: str | None,
        group: Group,
        pid: int,
        out: Path,
        reasons: list[str],
        say: Callable[[str], None],
    ) -> None:
        self._wanted = wanted
        self._program = program
        self._group = group
        self._pid = pid
        self._out = out
        self._reasons = reasons
        self._say = say
        self._loader: Held | None = None

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare what takes long: loading takes eight times as long once all harts poll."""
        if self._wanted["cpuset"] is not None:
            with self._may_fail("cpuset-failed"):
                self._group.keep_to(self._wanted["cpuset"])
        if self._wanted["scheduler"] is not None:
            with self._may_fail("scheduler-failed"):
                self._load(self._wanted["scheduler"])
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Put the policy in force for the block; enter when the harts are there.

        A hart that comes or goes ends a scheduler, and resets the base slice.
        """
        slice_ns, before_ns = self._wanted["base_slice_ns"], system.base_slice_ns()
        if slice_ns is not None:
            with self._may_fail("base-slice-failed"):
                system.BASE_SLICE.write_text(str(slice_ns))
        if self._loader is not None:
            with self._may_fail("scheduler-failed"):
                self._loader.begin()
                self._say("scheduler ready")
        try:
            yield
        finally:
            if self._loader is not None:
                if self._loader.ready and self._loader.has_ended():
                    self._add("scheduler-ended")
                self._end()
                self._say("scheduler ended")
            if slice_ns is not None:
                with self._may_fail("base-slice-left"):
                    system.BASE_SLICE.write_text(str(before_ns))

    def edge(self) -> dict[str, Any]:
        """What the kernel says at an edge of the window."""
        return {**system.scheduler_state(), "cpuset": self._group.harts()}

    # -- scx_vstate

    def _load(self, settings: Mapping[str, Any]) -> None:
        assert self._program is not None, "the board was given no scx_vstate"
        argv = [self._program, "--pid", str(self._pid), *arguments(settings)]
        self._loader = Held([*argv, "--out", os.fspath(self._out / "scheduler.json")])
        self._say("scheduler loaded")

    def _end(self) -> None:
        if self._loader is None:
            return
        loader, self._loader = self._loader, None
        with self._may_fail("scheduler-failed"):
            try:
                loader.end()
            finally:
                (self._out / "scheduler.log").write_text("".join(loader.said))

    def _add(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)

    @contextlib.contextmanager
    def _may_fail(self, reason: str) -> Iterator[None]:
        """Turn a failure into a reason; the load goes on."""
        try:
            yield
        except Exception as error:  # whatever it is, the scheduler must be ended and the run, too
            self._add(reason)
            self._say(f"{reason}: {error}")


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """The command line of scx_vstate for a cell's scheduling.scheduler, every knob explicit."""
    words = [f"--{name}={settings[name]}" for name in ("policy", "mode", "scope")]
    return words + [f"--{name.replace('_', '-')}={v}" for name, v in settings["knobs"].items()]


def objections(
    wanted: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any] | None],
    threads: Sequence[Mapping[str, Any]],
    *,
    one_hart: bool = False,
) -> list[str]:
    """Why the policy was not in force, by name; nothing if it was.

    states: what the kernel said `before` and `after` the run, and at the window's edges, `opened`
    and `closed`; None where it did not come to that.  threads: of the server, at both edges.
    one_hart: there is no other one, so that being there is no choice.
    """
    edges = [state for state in (states["opened"], states["closed"]) if state is not None]
    before, after = states["before"], states["after"]
    reasons: list[str] = []
    if wanted["scheduler"]:
        everyone = int(wanted["scheduler"]["scope"] == "all")
        for state in edges:
            if (state["state"], state["ops"], state["switch_all"]) != ("enabled", OPS, everyone):
                reasons.append("scheduler-not-active")
        if not all(_in_class(thread) for thread in threads):
            reasons.append("thread-not-in-class")
        same = edges
    else:
        known = [state for state in (before, *edges, after) if state is not None]
        if any(state["state"] not in DISABLED for state in known):
            reasons.append("scheduler-active")
        if any(_in_class(thread) for thread in threads):
            reasons.append("thread-in-class")
        same = known
    if len({state["enable_seq"] for state in same}) > 1:
        reasons.append("scheduler-changed")
    slice_ns = wanted["base_slice_ns"]
    if slice_ns is not None and any(state["base_slice_ns"] != slice_ns for state in edges):
        reasons.append("base-slice-not-set")
    if any(state["cpuset"] != wanted["cpuset"] for state in edges):
        reasons.append("cpuset-not-set")
    if edges and not one_hart and pinned(threads) != wanted["pinned_threads"]:
        reasons.append("affinity-not-set")
    if before is not None and after is not None:
        if after["state"] not in DISABLED:
            reasons.append("scheduler-left")
        # The kernel's own differs with the harts that are online; the asked one must be gone.
        if slice_ns is not None and after["base_slice_ns"] == slice_ns:
            reasons.append("base-slice-left")
    return list(dict.fromkeys(reasons))


def pinned(threads: Sequence[Mapping[str, Any]]) -> int:
    """How many harts have a thread of their own: one that may run there and nowhere else."""
    return len({thread["harts"] for thread in threads if thread["harts"].isdigit()})


def _in_class(thread: Mapping[str, Any]) -> bool:
    """Whether sched_ext runs a thread; by its policy where the kernel shows no more than that."""
    shown: bool | None = thread["in_sched_ext"]
    return thread["policy"] == POLICY_EXT if shown is None else shown
