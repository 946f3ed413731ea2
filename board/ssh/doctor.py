"""`./inv doctor`: is a board fit for runs?

Promise: every check is a line with what was found, what is expected and how to mend it, the same
for a person and, schema-checked, for a program; nothing is changed on the board; what cannot be
looked at is said, not passed over.
Limit: a fit board can still be slow, hot or noisy in the middle of a run; the record says so then.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import schemas
from board.boards import SshSettings
from board.cell import Definitions
from board.models import model as model_file
from board.onboard.changes import GOVERNOR
from board.ssh.link import LinkLost
from board.ssh.session import Session
from toolchain.errors import ArtifactError, EnvironmentUnfit
from toolchain.say import say

MIB = 1 << 20
CLOCK_S = 300.0
"""More than this between the board's clock and ours is a wrong clock."""
LOAD = 0.5
AIOHTTP = (3, 8)
STOCK = (
    "sched_ext is off in stock Armbian kernels (and in Debian's 6.12 for riscv64): only the "
    "policies baseline, baseline-long and affinity run there; a kernel with "
    "kernel/config/board.fragment has it (docs/board.md, `A kernel with sched_ext`)"
)


@dataclass(frozen=True)
class Check:
    """One line.  level: ok, warning (a run goes on without it), error (no run)."""

    name: str
    level: str
    got: str
    expected: str
    fix: str


def doctor(settings: SshSettings, json_file: Path | None, model: str | None = None) -> None:
    """Look, show, write; raises EnvironmentUnfit when the board is not fit.

    model: must fit into the board's memory and disk, too; raises UsageError for an unknown one.
    """
    model_mib = 0
    if model is not None:
        Definitions.read().require_model(model)
        model_mib = math.ceil(model_file(model).stat().st_size / MIB)
    checks = examine(settings, model_mib)
    for check in checks:
        mark = {"ok": "ok", "warning": "note", "error": "BAD"}[check.level]
        print(f"{mark:4}  {check.name}: got {check.got}; expected {check.expected}")
        if check.level != "ok":
            print(f"      -> {check.fix}")
    bad = [check for check in checks if check.level == "error"]
    if json_file is not None:
        document = {
            "schema_version": "1",
            "board": settings.name,
            "fit": not bad,
            "checks": [asdict(check) for check in checks],
        }
        schemas.write(json_file, document, "doctor")
    notes = sum(check.level == "warning" for check in checks)
    if bad:
        raise EnvironmentUnfit(
            f"board {settings.name}: {len(bad)} of {len(checks)} checks failed: "
            f"{', '.join(check.name for check in bad)}"
        )
    say(f"board {settings.name}: fit for runs; {len(checks)} checks, {notes} notes")


def examine(settings: SshSettings, model_mib: int = 0) -> list[Check]:
    """All checks; a board that cannot be reached is one failed check."""
    with Session(settings, yes=False) as session:
        try:
            hello = session.hello()
        except ArtifactError as error:
            return [
                Check(
                    "reach",
                    "error",
                    str(error),
                    "a login and python3",
                    "see the line itself; docs/board.md, `Reaching it`",
                )
            ]
        off_s = hello["time_s"] - time.time()
        try:
            facts = session.facts()
        except LinkLost as error:
            return [Check("reach", "error", str(error), "an answer", "the cable, the board's log")]
        key = session.link.host_key
        lock = _lock(session)
    where = f"{hello['user']} at {settings.destination}, host key {key}"
    checks = [Check("reach", "ok", where, "a login and python3", "")]
    if lock is not None:
        checks.append(lock)
    checks += _checks(settings, facts, off_s, model_mib)
    return checks


def _lock(session: Session) -> Check | None:
    """Whether another driver is at work; asked only where the directory is there already."""
    with contextlib.suppress(LinkLost):
        holder = session.ask("holder")["owner"]
        return _check(
            "other drivers",
            holder or "none",
            "none",
            not holder,
            "wait for it, or end it with ./inv unflash",
        )
    return None


def _check(
    name: str, got: object, expected: str, good: bool, fix: str, *, note: bool = False
) -> Check:
    level = "ok" if good else "warning" if note else "error"
    return Check(name, level, "nothing" if got in (None, "", []) else str(got), expected, fix)


def _checks(
    settings: SshSettings, facts: Mapping[str, Any], off_s: float, model_mib: int
) -> Iterator[Check]:
    yield _check(
        "root",
        facts["sudo"] or "root",
        "root, or sudo without a password",
        facts["sudo"] is None,
        "a line in /etc/sudoers.d; docs/board.md, `Reaching it`",
    )
    yield from hardware(settings, facts)
    yield from _kernel(facts)
    yield from _steadiness(settings, facts)
    yield from _room(settings, facts, model_mib)
    yield from _clock(facts, off_s)
    yield from _cleanliness(facts)


def hardware(settings: SshSettings, facts: Mapping[str, Any]) -> Iterator[Check]:
    """Whether it is the board that boards.toml says; facts: board/onboard/facts.py's."""
    other = "name the board you mean, or correct its table in boards.toml"
    yield _check(
        "architecture", facts["architecture"], "riscv64", facts["architecture"] == "riscv64", other
    )
    yield _check(
        "SoC",
        ", ".join(facts["soc"]),
        settings.soc,
        any(settings.soc in name for name in facts["soc"]),
        other,
    )
    yield _check(
        "harts", facts["harts"], str(settings.harts), facts["harts"] == settings.harts, other
    )
    missing = facts["missing_extensions"]
    yield _check(
        "ISA string",
        f"{facts['isa']}" + (f" without {' '.join(missing)}" if missing else ""),
        "v zfh zvfh zba zbb zbs in it",
        not missing,
        "llama-server is compiled for these and would die of SIGILL",
    )
    bits = facts["vlen"]["bits"]
    yield _check(
        "VLEN",
        f"{bits} bits" if bits else facts["vlen"]["why"],
        f"{settings.vlen_bits} bits, read by rvv_probe",
        bits == settings.vlen_bits,
        other,
    )


def _kernel(facts: Mapping[str, Any]) -> Iterator[Check]:
    config = facts["config"]
    shown = "from /proc/config.gz or /boot" if config else "its configuration is not shown"
    yield _check(
        "kernel",
        f"{facts['kernel_release']}, {shown}",
        "6.12 or later",
        _version(facts["kernel_release"]) >= (6, 12),
        "install a newer kernel",
    )
    ext = facts["sched_ext"]
    state = f"/sys/kernel/sched_ext, {ext['state']}" if ext else "no /sys/kernel/sched_ext"
    yield _check(
        "sched_ext",
        state,
        "there, and disabled until a run enables it",
        bool(ext) and ext["state"] == "disabled",
        STOCK if not ext else "another scheduler is loaded: end it",
        note=not ext,
    )
    yield _check(
        "BTF",
        "there" if facts["btf"] else None,
        "/sys/kernel/btf/vmlinux",
        facts["btf"],
        "a kernel with CONFIG_DEBUG_INFO_BTF (kernel/config/board.fragment)",
    )
    on = facts["kprobes_enabled"]
    built_in = config["KPROBES"] if config else None
    yield _check(
        "kprobes",
        {"1": "enabled", "0": "disabled"}.get(on or "", f"CONFIG_KPROBES={built_in or '?'}"),
        "enabled",
        on != "0" and built_in != "n",
        "echo 1 into debugfs kprobes/enabled; without them leave the profiler out",
        note=True,
    )
    yield _check(
        "BPF JIT",
        facts["bpf_jit"],
        "1 or 2",
        facts["bpf_jit"] in ("1", "2"),
        "flash and run switch it on (net.core.bpf_jit_enable) and off again",
        note=True,
    )
    kinds = set(facts["mounts"].values())
    for kind, place in (("debugfs", "/sys/kernel/debug"), ("bpf", "/sys/fs/bpf")):
        possible = kind in facts["file_systems"]
        yield _check(
            kind,
            "mounted" if kind in kinds else "not mounted" if possible else "not in the kernel",
            f"mounted at {place}",
            kind in kinds,
            "flash and run mount it, and unmount it again"
            if possible
            else "a kernel with it (kernel/config/board.fragment)",
            note=possible,
        )
    yield _check(
        "tracefs",
        "mounted" if "tracefs" in kinds else "not mounted",
        "mounted, for a look",
        "tracefs" in kinds,
        "no run needs it; it comes with debugfs",
        note=True,
    )
    yield _check(
        "cgroup v2",
        "mounted" if facts["mounts"].get("/sys/fs/cgroup") == "cgroup2" else None,
        "mounted at /sys/fs/cgroup",
        facts["mounts"].get("/sys/fs/cgroup") == "cgroup2",
        "boot with systemd.unified_cgroup_hierarchy=1",
    )
    enforced = facts["module_signatures"] == "Y"
    yield _check(
        "module signatures",
        "enforced" if enforced else "not enforced",
        "not enforced",
        not enforced,
        "vstate_profiler.ko is not signed: leave the profiler out",
        note=True,
    )
    yield _check(
        "kernel's own code",
        {True: "/proc/kcore", False: "/proc/kcore, not for this user", None: "no /proc/kcore"}[
            facts["kcore"]
        ],
        "/proc/kcore, to find the save sites",
        bool(facts["kcore"]),
        "needed where the kernel was not built here: CONFIG_PROC_KCORE, or a vmlinux",
        note=True,
    )
    yield _check(
        "perf_event_paranoid",
        facts["perf_event_paranoid"],
        "2 or less (root may anyway)",
        facts["perf_event_paranoid"] in ("-1", "0", "1", "2"),
        "sysctl kernel.perf_event_paranoid=2, for rvv_probe's counters",
        note=True,
    )
    yield _check(
        "perf_user_access",
        facts["perf_user_access"] or "not in this kernel",
        "2, for rvv_probe to read cycles itself",
        facts["perf_user_access"] in (None, "2"),
        "sysctl kernel.perf_user_access=2; without it rvv_probe asks perf",
        note=True,
    )


def _steadiness(settings: SshSettings, facts: Mapping[str, Any]) -> Iterator[Check]:
    rows = facts["frequencies"]
    if not rows:
        yield _check(
            "governor",
            "no frequency policy",
            GOVERNOR,
            False,
            f"nothing to set at {settings.governors}: a fixed clock, or the wrong pattern",
            note=True,
        )
    for row in rows:
        mhz = f", {row['khz'] // 1000} MHz" if row["khz"] else ""
        top = f", up to {row['max_khz'] // 1000} MHz" if row["max_khz"] else ""
        yield _check(
            f"governor of {Path(row['path']).parent.name}",
            f"{row['governor']}{mhz}{top}",
            GOVERNOR,
            row["governor"] == GOVERNOR,
            "flash and run set it, and put it back",
            note=True,
        )
    now_c = facts["temperature_c"]
    yield _check(
        "temperature",
        f"{now_c:.1f} degrees C" if now_c is not None else "no sensor",
        f"at most {settings.temperature_c}",
        now_c is None or now_c <= settings.temperature_c,
        "a run waits for it; a fan helps",
        note=True,
    )
    yield _check(
        "throttling",
        ", ".join(facts["throttled"]) or "none",
        "none",
        not facts["throttled"],
        "cool the board",
    )
    yield _check(
        "other load",
        f"{facts['load_1min']:.2f} runnable in the last minute",
        f"below {LOAD}",
        facts["load_1min"] < LOAD,
        "end what runs there; a board that has just booted calms down",
        note=True,
    )
    yield _check(
        "RT throttling",
        f"{facts['rt_runtime_us']} us of a second",
        "950000",
        facts["rt_runtime_us"] == "950000",
        "sysctl kernel.sched_rt_runtime_us=950000",
        note=True,
    )


def _room(settings: SshSettings, facts: Mapping[str, Any], model_mib: int) -> Iterator[Check]:
    of_model = f" ({model_mib} of them for the model)" if model_mib else ""
    free, wanted = facts["memory_available_mib"], settings.memory_mib + model_mib
    yield _check(
        "memory",
        f"{free} MiB available",
        f"{wanted} MiB or more{of_model}",
        bool(free) and free >= wanted,
        "end what uses it, or take a smaller model",
    )
    swap = facts["swap_used_mib"]
    yield _check(
        "swap",
        f"{swap} MiB in use" if swap else "none in use",
        "none in use",
        not swap,
        "swapoff -a: a run that swaps measures the disk",
        note=True,
    )
    wanted = settings.disk_mib + model_mib
    yield _check(
        "disk",
        f"{facts['disk_free_mib']} MiB free",
        f"{wanted} MiB or more{of_model}",
        facts["disk_free_mib"] >= wanted,
        "free some space",
    )
    yield _check(
        "directory",
        "writable" if facts["directory_writable"] else "cannot be written",
        "writable",
        facts["directory_writable"],
        "read-only file system, or of another user: see `mount`; or set ssh.directory",
    )


def _clock(facts: Mapping[str, Any], off_s: float) -> Iterator[Check]:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() + off_s))
    yield _check(
        "clock",
        f"{when}, {abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}",
        f"within {CLOCK_S:.0f} s of this host",
        abs(off_s) <= CLOCK_S,
        "set it (date -u -s, or timesyncd): times in its logs would be wrong",
    )
    yield _check(
        "clock synchronised",
        {True: "yes", False: "no", None: "not known"}[facts["clock_synchronised"]],
        "yes",
        facts["clock_synchronised"] is True,
        "systemd-timesyncd or chrony; runs use the monotonic clock",
        note=True,
    )


def _cleanliness(facts: Mapping[str, Any]) -> Iterator[Check]:
    left = [*facts["leftover_processes"], *facts["leftover_modules"]]
    yield _check(
        "leftovers",
        "; ".join(left) or "none",
        "none",
        not left,
        "./inv unflash ends what is this project's",
    )
    yield _check(
        "Python",
        facts["python"],
        "3.11 or later",
        _version(facts["python"]) >= (3, 11),
        "install a newer python3",
    )
    found = facts["aiohttp"]
    yield _check(
        "aiohttp",
        found,
        f"{'.'.join(map(str, AIOHTTP))} or later",
        bool(found) and _version(found) >= AIOHTTP,
        "apt install python3-aiohttp",
    )
    missing = [name for name, path in facts["programs"].items() if path is None]
    yield _check(
        "programs",
        "all" if not missing else f"no {', '.join(missing)}",
        ", ".join(facts["programs"]),
        not missing,
        "apt install kmod mount",
    )
    errors = facts["kernel_errors"]
    got = "not readable" if errors is None else errors[-1][:100] if errors else "no errors"
    count = f" (the last of {len(errors)})" if errors else ""
    yield _check(
        "dmesg",
        got + count,
        "no errors since boot",
        errors == [],
        "read it (dmesg -l err,crit,alert,emerg); many boards log harmless ones",
        note=True,
    )


def _version(text: str) -> tuple[int, ...]:
    numbers = []
    for word in text.replace("-", ".").split("."):
        if not word.isdecimal():
            break
        numbers.append(int(word))
    return tuple(numbers)
