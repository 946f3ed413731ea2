"""The instruments on the board: started, stopped and read around a window, the target frozen.

Promise: the target process stands still (board/agent/group.py) while a window is opened and while
it is closed, so that no instrument sees a switch of it that another one misses; whatever happens,
the target goes on, the observers have ended and the module is unloaded when the block is left.
Limit: counts of the whole system are not aligned, only the target's are.  An instrument that cannot
be used is a reason, never a silent gap.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from board.agent.group import Group
from board.agent.held import Held

OWN_TOOLS = {"observer", "spin", "profiler", "mark", "switches", "stop"}
_PLACE = re.compile(r"JIT 0x([0-9a-f]+)-0x([0-9a-f]+)")


class Instruments:
    """The instruments of one run.

    tools: what the board was given (any of the keys may be missing): observer (program), spin (list
    of START-END for it), profiler (module, sites, loader), mark (program that tells the emulator),
    switches (command line of the program that counts context switches), stop (true: the target
    stands still at the window's edges, even if nothing else is there).
    group: the target's.
    reasons: why the run does not count on their account, filled as it happens.
    """

    def __init__(
        self,
        tools: Mapping[str, Any],
        group: Group,
        pid: int,
        out: Path,
        reasons: list[str],
        say: Callable[[str], None],
    ) -> None:
        self._tools = {key: tool for key, tool in tools.items() if key in OWN_TOOLS}
        self._group = group
        self._pid = pid
        self._out = out
        self._reasons = reasons
        self._say = say
        self._observers: dict[str, Held] = {}
        self._loader = _load_by_path(tools["profiler"]["loader"]) if "profiler" in tools else None
        self._profiling = False

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare what takes long, then run the block; afterwards nothing of them is left."""
        if not self._tools:
            yield
            return
        with self._may_fail("freezer"):
            self._group.make()
        self._load_observer()
        self._load_switches()
        if self._loader:
            profiler = self._tools["profiler"]
            with self._may_fail("profiler"):
                self._loader.load(Path(profiler["module"]), Path(profiler["sites"]), self._pid)
                self._profiling = True
        try:
            yield
        finally:
            self._end_observers()
            self._freeze(False)
            # Each by itself: what cannot be written does not keep the module loaded; and one that
            # was loaded before is somebody else's.
            if self._loader and self._profiling:
                with self._may_fail("profiler"):
                    self._loader.read(self._out / "profiler.json")
                with self._may_fail("profiler"):
                    self._loader.unload()

    @contextlib.contextmanager
    def window(
        self, opens: Callable[[], None] | None = None, closes: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Open the window, run the block, close it; the target stands still at both edges.

        opens and closes are called there, to read what nobody else must change meanwhile.
        """
        self._freeze(True)
        if opens:
            opens()
        self._start_observers()
        self._control("start")
        self._mark("open", str(self._pid))
        self._freeze(False)
        try:
            yield
        finally:
            self._freeze(True)
            self._mark("close")
            self._control("stop")
            self._end_observers()
            if closes:
                closes()
            self._freeze(False)

    # -- the target

    def _freeze(self, frozen: bool) -> None:
        if self._tools:
            with self._may_fail("freezer"):
                self._group.freeze(frozen)

    # -- the observers

    def _load_observer(self) -> None:
        """Do all that takes long: it takes eight times as long once all harts poll."""
        if "observer" not in self._tools:
            return
        with self._may_fail("observer"):
            words = [word for spin in self._tools["spin"] for word in ("--spin", spin)]
            observer = self._hold("observer", [self._tools["observer"]], words)
            places = _PLACE.findall("".join(observer.said))
            for number, (start, end) in enumerate(places):
                self._mark("range", str(number), start, end)

    def _load_switches(self) -> None:
        if "switches" in self._tools:
            with self._may_fail("switches"):
                self._hold("switches", self._tools["switches"], [])

    def _hold(self, name: str, program: Sequence[str], words: Sequence[str]) -> Held:
        """Start an observer that waits for its window."""
        argv = [*program, "--pid", str(self._pid), *words]
        observer = Held([*argv, "--out", os.fspath(self._out / f"{name}.json")])
        self._observers[name] = observer
        return observer

    def _start_observers(self) -> None:
        for name, observer in self._observers.items():
            with self._may_fail(name):
                observer.begin()

    def _end_observers(self) -> None:
        for name in list(self._observers):
            with self._may_fail(name):
                self._observers.pop(name).end()

    # -- the profiler, and the emulator

    def _control(self, word: str) -> None:
        if self._loader and self._profiling:
            with self._may_fail("profiler"):
                self._loader.control(word)

    def _mark(self, *words: str) -> None:
        if "mark" in self._tools:
            with self._may_fail("mark"):
                subprocess.run([self._tools["mark"], *words], check=True)

    @contextlib.contextmanager
    def _may_fail(self, name: str) -> Iterator[None]:
        """Turn a failure of an instrument into a reason; the load goes on."""
        try:
            yield
        except Exception as error:  # whatever it is, the target must be thawed and the run ended
            reason = f"{name}-failed"
            if reason not in self._reasons:
                self._reasons.append(reason)
            self._say(f"{name}: {error}")


def _load_by_path(path: str) -> ModuleType:
    """Import a file: it comes with the module it drives and not with the agent."""
    spec = importlib.util.spec_from_file_location("vstate_profiler_loader", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
