"""`./inv build --kernel-src DIR`: what a board's own kernel needs, built against its owner's tree.

    state/kernel/vstate_profiler.ko   the module, for the kernel that runs on the board
    state/kernel/vmlinux.h            the board's types as a C header, from its BTF
    state/kernel/vmlinux.btf          the BTF itself

Promise: the configuration is compared with kernel/config/board.fragment first, a line per
difference; the module is tied to the build-id of the kernel that runs on the board; all three are
replaced together or not at all.
Limit: the tree must be the board's (same release, its Module.symvers) and prepared for a build on
this machine; which of its binaries the owner boots is checked by build-id only when it is loaded.
"""

import shutil
import tempfile
from pathlib import Path

from board.boards import SshSettings
from board.ssh.payload import check_release
from board.ssh.session import Session
from kernel import lint
from toolchain.errors import InvalidData, UsageError, cannot_write
from toolchain.inside import run_inside
from toolchain.paths import REPO
from toolchain.say import say

ROOM = REPO / "kernel" / "vstate_profiler"
FRAGMENT = REPO / "kernel" / "config" / "board.fragment"
NEEDED = ("Makefile", ".config", "Module.symvers", "include/generated/autoconf.h", "scripts/basic")
RELEASE = Path("include", "config", "kernel.release")


def build_for_board(source: Path, settings: SshSettings) -> Path:
    """Build for the kernel that runs on the board; returns the folder with what was built.

    Raises UsageError (DIR is no prepared kernel tree), InvalidData (it is of another kernel),
    EnvironmentUnfit (the board is out of reach, the build failed).
    """
    for name in NEEDED:
        if not (source / name).exists():
            raise UsageError(
                f"--kernel-src {source}: has no {name}: expected a kernel tree in which `make "
                "ARCH=riscv CROSS_COMPILE=riscv64-linux-gnu- modules_prepare` ran, with the "
                "Module.symvers of the board's kernel"
            )
    release = (source / RELEASE).read_text().strip() if (source / RELEASE).exists() else "?"
    for line in config_faults(source / ".config"):
        say(f"{source}/.config: {line}")
    kept = settings.state / "kernel"
    with tempfile.TemporaryDirectory(prefix="bananaos-kernel-") as scratch:
        out, work = Path(scratch, "out"), Path(scratch, "work")
        out.mkdir()
        work.mkdir()
        with Session(settings, yes=False) as session:
            session.hello()
            facts = session.facts()
            check_release(settings, f"--kernel-src {source}", release, facts)
            btf = session.ask("btf")
            target = out / "vmlinux.btf"
            session.link.get(btf["name"], session.directory, target, btf["size_bytes"])
            session.ask("forget", name=btf["name"])
        log = settings.state / "kernel-build.log"
        binds = {
            "/kernel": source,
            "/btf": target,
            "/recipe/external.sh": ROOM / "external.sh",
            "/recipe/vstate_profiler.c": ROOM / "vstate_profiler.c",
            "/recipe/Makefile": ROOM / "Makefile",
        }
        run_inside(
            ["sh", "-eu", "/recipe/external.sh", facts["build_id"]],
            what=f"build the profiler module against {source}",
            binds=binds,
            writable={"/build": work, "/out": out},
            log=log,
        )
        fresh = kept.with_name(f".{kept.name}.new")
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(out, fresh)
            shutil.rmtree(kept, ignore_errors=True)
            fresh.replace(kept)
        except OSError as error:
            raise cannot_write(kept, error, "XDG_STATE_HOME") from error
    say(f"board {settings.name}: module, types and header for {release}: {kept}")
    return kept


def config_faults(config: Path) -> list[str]:
    """How a kernel's configuration differs from what a board needs, a line each."""
    try:
        wanted = lint.read_config(FRAGMENT)
        return lint.find_faults(wanted, lint.read_config(config), {}, wanted.keys())
    except lint.BadFile as error:
        raise InvalidData(str(error)) from error
