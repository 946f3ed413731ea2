"""`./inv reproduce --dask ADDRESS`: the virtual board's cells, run by a Dask scheduler's workers.

Promise: a cell goes to a worker whole and comes back as the files of its run; a worker whose
artifacts are others than the cell's inputs runs nothing; cells are deterministic, so the results
are those of one machine.  A worker that dies is not waited for: its cell goes to another one.
Limit: the virtual board only.  Workers see a checkout each, not this one, and no common file
system; the connection is as trusted as the network it runs through (docs/scale.md).
"""

import contextlib
import importlib
import logging
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from board import execute
from board.base import RunFailed, RunVoid
from board.cell import tools_of
from board.virtual.board import VirtualBoard
from toolchain.command import Cancelled
from toolchain.errors import ArtifactError, EnvironmentUnfit, UsageError
from toolchain.paths import REPO

CONNECT_S = 15.0
POLL_S = 0.5


def _distributed() -> Any:
    """The library: an optional extra, so nothing may need it to be read or checked."""
    try:
        return importlib.import_module("distributed")
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"--dask: the package {error.name} is not installed: "
            ".venv/bin/pip install --require-hashes -r requirements-dask.txt"
        ) from error


class DaskBoard(VirtualBoard):
    """The virtual board on the workers of `client`; see board.base.Board."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._stop = f"stop-{uuid.uuid4()}"

    @property
    def jobs(self) -> int:
        """One per thread of a worker."""
        return sum(self._client.nthreads().values())

    def run(
        self,
        cell: Mapping[str, Any],
        directory: Path,
        *,
        deadline_s: float,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        """Run the cell on a worker; raises as board.base.Board.run."""
        library = _distributed()
        future = self._client.submit(
            run_there, dict(cell), deadline_s, self._stop, pure=False, retries=0
        )
        while True:
            if cancel.is_set():
                library.Event(self._stop, client=self._client).set()
                future.cancel()
                raise Cancelled("the cell was taken back from the workers")
            try:
                answer: Mapping[str, Any] = future.result(timeout=POLL_S)
                break
            except (TimeoutError, library.TimeoutError):
                continue
            except library.KilledWorker as error:
                raise RunVoid("worker-lost", str(error)) from error
            except library.client.FutureCancelledError as error:
                raise EnvironmentUnfit(
                    f"--dask: the scheduler is gone: {error}; the same command goes on from here"
                ) from error
        if answer["refused"]:
            raise EnvironmentUnfit(answer["refused"])
        for name, content in answer["files"].items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if answer["failed"]:
            raise RunFailed(*answer["failed"])
        return dict(answer["facts"])


@contextlib.contextmanager
def dask_board(address: str) -> Iterator[DaskBoard]:
    """The virtual board on the workers of the scheduler at `address`, such as tcp://host:8786.

    Raises UsageError for what is no address, EnvironmentUnfit without library, scheduler or worker,
    and where these cannot import this checkout.
    """
    library = _distributed()
    # What its threads would say of a lost connection is said by the exceptions.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        client = library.Client(address, timeout=CONNECT_S, set_as_default=False)
    except ValueError as error:
        raise UsageError(
            f"--dask {address}: {error}; expected an address such as tcp://host:8786"
        ) from error
    except OSError as error:
        raise EnvironmentUnfit(
            f"--dask {address}: no scheduler answers within {CONNECT_S:g} s; "
            "start one: dask scheduler"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_S)
        except (TimeoutError, library.TimeoutError) as error:
            raise EnvironmentUnfit(
                f"--dask {address}: the scheduler has no worker; start some: dask worker {address}"
            ) from error
        try:
            client.submit(_here, pure=False).result()
        except Exception as error:  # Dask has no type of its own for it; the scheduler unpacks, too
            raise EnvironmentUnfit(
                f"--dask {address}: the scheduler or a worker cannot use this checkout: "
                f"{str(error).splitlines()[0]}; start both in a checkout, with PYTHONPATH=. "
                "(docs/scale.md)"
            ) from error
        yield DaskBoard(client)


def _here() -> str:
    """On a worker: where its checkout lies; found only where it has one."""
    return str(REPO)


def run_there(cell: Mapping[str, Any], deadline_s: float, stop: str) -> dict[str, Any]:
    """On a worker: run the cell; return its files, the host's facts, or why there are none.

    stop: the event that takes the cell back.
    """
    answer: dict[str, Any] = {"refused": None, "failed": None, "files": {}, "facts": {}}
    board = VirtualBoard()
    here = execute.host()
    try:
        inputs = board.prepare(cell["model"], tools_of(cell))
    except ArtifactError as error:
        return answer | {"refused": f"a worker cannot prepare the cell: {error}"}
    if differing := sorted(k for k, v in cell["inputs"].items() if inputs.get(k) != v):
        return answer | {
            "refused": f"a worker's {', '.join(differing)} is not the cell's (its commit is "
            f"{here['git_commit']}): check out the same commit there, and try again"
        }
    with (
        tempfile.TemporaryDirectory(prefix="bananaos-cell-") as name,
        _cancelled_by(stop) as cancel,
    ):
        try:
            facts = board.run(cell, Path(name), deadline_s=deadline_s, cancel=cancel)
            answer["facts"] = {**here, **facts}
        except RunFailed as error:
            answer["failed"] = (error.reason, error.detail, {**here, **error.facts})
        except ArtifactError as error:  # not raised: not all of them survive the way back
            return answer | {"refused": f"a worker cannot run the cell: {error}"}
        except Cancelled:
            return answer | {"refused": "taken back"}
        answer["files"] = _files(Path(name))
    return answer


@contextlib.contextmanager
def _cancelled_by(stop: str) -> Iterator[threading.Event]:
    """An event of this process that follows the one of all workers."""
    cancel, over = threading.Event(), threading.Event()
    everywhere = _distributed().Event(stop)

    def follow() -> None:
        while not over.is_set():
            if everywhere.wait(timeout=POLL_S):
                cancel.set()
                return

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield cancel
    finally:
        over.set()
        thread.join()


def _files(directory: Path) -> Mapping[str, bytes]:
    paths: Sequence[Path] = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}
