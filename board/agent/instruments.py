"""The instruments on the board: started, stopped and read around a window, the target frozen.

Promise: the target process is frozen (cgroup v2) while a window is opened and while it is closed,
so that no instrument sees a switch of it that another one misses; whatever happens, the target is
thawed, the observer has ended and the module is unloaded when the block is left.
Limit: needs root, and a cgroup v2 file system; counts of the whole system are not aligned, only the
target's are.  An instrument that cannot be used is a reason, never a silent gap.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from board.agent.group import Group

OBSERVER_TIMEOUT_S = 120.0
OBSERVER_INVALID = 4
"""vstate_observer's exit code for a document whose own invalid_reasons are not empty."""
OBSERVER_UNOPENED = 130
"""Its exit code when it is stopped before its window was opened: nothing was measured."""
OWN_TOOLS = {"observer", "spin", "profiler", "mark"}
_PLACE = re.compile(r"JIT 0x([0-9a-f]+)-0x([0-9a-f]+)")


class Instruments:
    """The instruments of one run.

    tools: what the board was given (any of the keys may be missing): observer (program), spin (list
    of START-END for it), profiler (module, sites, loader), mark (program that tells the emulator).
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
        self._observer: subprocess.Popen[str] | None = None
        self._loader = _load_by_path(tools["profiler"]["loader"]) if "profiler" in tools else None
        self._profiling = False
        self._opened = False

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare what takes long, then run the block; afterwards nothing of them is left."""
        if not self._tools:
            yield
            return
        with self._may_fail("freezer"):
            self._group.make()
        self._load_observer()
        if self._loader:
            profiler = self._tools["profiler"]
            with self._may_fail("profiler"):
                self._loader.load(Path(profiler["module"]), Path(profiler["sites"]), self._pid)
                self._profiling = True
        try:
            yield
        finally:
            self._end_observer()
            self._freeze(False)
            # Each by itself: what cannot be written does not keep the module loaded; and one that
            # was loaded before is somebody else's.
            if self._loader and self._profiling:
                with self._may_fail("profiler"):
                    self._loader.read(self._out / "profiler.json")
                with self._may_fail("profiler"):
                    self._loader.unload()

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Open the window, run the block, close it; the target stands still at both edges."""
        if not self._tools:
            yield
            return
        self._freeze(True)
        self._start_observer()
        self._control("start")
        self._mark("open", str(self._pid))
        self._freeze(False)
        try:
            yield
        finally:
            self._freeze(True)
            self._mark("close")
            self._control("stop")
            self._end_observer()
            self._freeze(False)

    # -- the target

    def _freeze(self, frozen: bool) -> None:
        with self._may_fail("freezer"):
            self._group.freeze(frozen)

    # -- the observer

    def _load_observer(self) -> None:
        """Do all that takes long: it takes eight times as long once all harts poll."""
        if "observer" not in self._tools:
            return
        with self._may_fail("observer"):
            argv = [self._tools["observer"], "--pid", str(self._pid), "--hold"]
            argv += ["--out", os.fspath(self._out / "observer.json")]
            argv += [word for spin in self._tools["spin"] for word in ("--spin", spin)]
            self._observer = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
            places = _PLACE.findall("".join(self._until("loaded")))
            for number, (start, end) in enumerate(places):
                self._mark("range", str(number), start, end)

    def _start_observer(self) -> None:
        if self._observer is None:
            return
        with self._may_fail("observer"):
            self._observer.send_signal(signal.SIGUSR1)
            self._until("ready")
            self._opened = True

    def _until(self, word: str) -> list[str]:
        """Return the observer's lines before the one that is `word`."""
        assert self._observer is not None and self._observer.stdout is not None
        lines: list[str] = []
        for line in self._observer.stdout:
            if line == f"{word}\n":
                return lines
            lines.append(line)
        code = self._observer.wait()
        self._observer = None
        raise RuntimeError(f"ended with {code} before it was {word}")

    def _end_observer(self) -> None:
        if self._observer is None:
            return
        observer, self._observer = self._observer, None
        with self._may_fail("observer"):
            observer.send_signal(signal.SIGINT)
            try:
                code = observer.wait(OBSERVER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                observer.kill()
                code = observer.wait()
            if code not in ((0, OBSERVER_INVALID) if self._opened else (OBSERVER_UNOPENED,)):
                raise RuntimeError(f"ended with {code}")

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
