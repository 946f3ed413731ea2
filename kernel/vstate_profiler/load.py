"""Load, drive, read and unload vstate_profiler.ko on the machine it runs on.

Promise: a module or a site list of another kernel is refused before insmod, by vermagic and
build-id; a refusal by the module itself is repeated here with the module's own reason; `read`
writes one JSON document (profiler.schema.json) whole or not at all; `unload` may be repeated.
Limit: the standard library, insmod and rmmod, root, and a mounted debugfs; what a module refuses is
read from /dev/kmsg.

    load.py load --module FILE.ko --sites FILE.json [--target TGID]
    load.py start [--target TGID] | stop | reset | unload
    load.py read --out FILE.json
Exit codes: 0 done, 2 usage, 3 this machine is unfit, 4 the files are not of this kernel or broken.
"""

import argparse
import csv
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "vstate_profiler"
DEBUGFS = Path("/sys/kernel/debug") / NAME
MODULE = Path("/sys/module") / NAME
NOTES = Path("/sys/kernel/notes")
_GNU_BUILD_ID = b"\x04\x00\x00\x00\x14\x00\x00\x00\x03\x00\x00\x00GNU\x00"
_SITE = re.compile(
    r"site (?P<index>\d+) (?P<kind>save|restore) (?P<role>\S+) (?P<state>\S+) "
    r"(?P<symbol>\S+)\+0x(?P<offset>[0-9a-f]+) begin_missed (?P<begin_missed>\d+) "
    r"end_missed (?P<end_missed>\d+) orphan_ends (?P<orphan_ends>\d+) (?P<why>.*)"
)
SCOPES = ("system", "target")


class Refused(Exception):
    """One line for the user, and the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def running_build_id(notes: Path = NOTES) -> str:
    """Return the running kernel's GNU build-id in hex."""
    try:
        data = notes.read_bytes()
    except OSError as exc:
        raise Refused(3, f"{notes}: {exc.strerror}: the kernel does not tell its build-id") from exc
    at = data.find(_GNU_BUILD_ID)
    if at < 0:
        raise Refused(3, f"{notes}: holds no GNU build-id; the kernel was linked without one")
    return data[at + 16 : at + 36].hex()


def modinfo(module: Path) -> dict[str, str]:
    """Return the fields `vermagic` and `kernel_build_id` of a module file."""
    try:
        data = module.read_bytes()
    except OSError as exc:
        raise Refused(4, f"{module}: cannot be read: {exc.strerror}") from exc
    fields = {}
    for name in ("vermagic", "kernel_build_id"):
        found = re.search(rb"\0" + name.encode() + rb"=([^\0]*)\0", data)
        if data[:4] != b"\x7fELF" or not found:
            raise Refused(4, f"{module}: not a {NAME} module: it has no {name}")
        fields[name] = found[1].decode()
    return fields


def read_sites(path: Path) -> dict[str, Any]:
    """Return the document that kernel/sites.py wrote."""
    try:
        document = json.loads(path.read_text())
        found = dict(document)
        if found["schema_version"] != "1" or not isinstance(found["sites"], list):
            raise ValueError(f"schema_version {found['schema_version']!r}")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise Refused(4, f"{path}: no site list of kernel/sites.py: {exc!r}") from exc
    return found


def check_kernel(module: Path, sites_file: Path, sites: Mapping[str, Any]) -> None:
    """Refuse what was not made for the running kernel."""
    build_id, release = running_build_id(), os.uname().release
    fields = modinfo(module)
    made_for = fields["vermagic"].split(" ")[0]
    if made_for != release:
        raise Refused(4, f"{module}: built for kernel {made_for}, this is {release}; not loaded")
    for path, found in ((module, fields["kernel_build_id"]), (sites_file, sites["build_id"])):
        if found != build_id:
            raise Refused(
                4,
                f"{path}: of the kernel with build-id {found}, this one has {build_id}; not loaded",
            )


def site_argument(sites: Sequence[Mapping[str, Any]]) -> str:
    """Return the module's `site` parameter."""
    texts = []
    for site in sites:
        offsets = [site[f"{name}_offset_bytes"] for name in ("anchor", "first", "vsetvli", "end")]
        # The module counts from the function, which need not bear a name that exists once.
        numbers = ":".join(f"{offset:#x}" for offset in offsets)
        texts.append(f"{site['kind']}:{site['role']}:{site['state']}:{site['anchor']}:{numbers}")
    return "site=" + ",".join(texts)


def _kernel_messages(kmsg: int | None) -> Iterator[str]:
    """Yield what the module has said in the kernel's log since kmsg was opened."""
    while kmsg is not None:
        try:
            record = os.read(kmsg, 8192).decode(errors="replace")
        except OSError as exc:
            if exc.errno == errno.EPIPE:  # records were overwritten: go on with the oldest
                continue
            return
        text = record.partition(";")[2].splitlines()[0]
        if text.startswith(f"{NAME}: error: "):
            yield text.removeprefix(f"{NAME}: error: ")


def _open_kmsg() -> int | None:
    try:
        kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(kmsg, 0, os.SEEK_END)
    return kmsg


def load(module: Path, sites_file: Path, target: int) -> None:
    """Check, then insert the module."""
    if MODULE.exists():
        raise Refused(3, f"{NAME} is loaded already; `load.py unload` first")
    sites = read_sites(sites_file)
    check_kernel(module, sites_file, sites)
    if not DEBUGFS.parent.is_dir() or not os.access(DEBUGFS.parent, os.W_OK):
        raise Refused(3, f"{DEBUGFS.parent}: no debugfs there for this user: mount it, be root")
    kmsg = _open_kmsg()
    try:
        done = subprocess.run(
            [
                "insmod", os.fspath(module), site_argument(sites["sites"]), f"target_tgid={target}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            reasons = list(_kernel_messages(kmsg)) or [done.stderr.strip()]
            raise Refused(3, f"insmod refused {module}: " + "; ".join(reasons))
    except FileNotFoundError as exc:
        raise Refused(3, "insmod is not installed (package kmod)") from exc
    finally:
        if kmsg is not None:
            os.close(kmsg)


def control(word: str, target: int | None = None) -> None:
    """Write a word to the module's control file; target is set before."""
    reasons = {
        errno.EBUSY: "it has been started already; stop it first",
        errno.EALREADY: "it was not started",
        errno.ENXIO: "its probes are not armed: are kprobes disabled (debugfs kprobes/enabled)?",
        errno.ESRCH: "there is no target process of that number",
        errno.ENOENT: f"{NAME} is not loaded",
    }
    try:
        if target is not None:
            (MODULE / "parameters" / "target_tgid").write_text(str(target))
        (DEBUGFS / "control").write_text(word)
    except OSError as exc:
        reason = reasons.get(exc.errno or 0, exc.strerror or str(exc))
        raise Refused(3, f"{word}: {reason}") from exc


def read(out: Path) -> None:
    """Write everything the module knows as one document."""
    try:
        stats = (DEBUGFS / "stats").read_text()
        rows = list(csv.DictReader((DEBUGFS / "csv").read_text().splitlines()))
    except FileNotFoundError as exc:
        raise Refused(3, f"{NAME} is not loaded") from exc
    except OSError as exc:
        raise Refused(3, f"{exc.filename}: {exc.strerror}; be root") from exc
    text = json.dumps(document(stats, rows, os.uname().release, running_build_id()), indent=1)
    temporary = out.with_name(f".{out.name}.new")
    try:
        try:
            temporary.write_text(text + "\n")
            temporary.replace(out)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise Refused(3, f"{out}: cannot write: {exc.strerror}; nothing was changed") from exc


def document(
    stats: str, rows: Sequence[Mapping[str, str]], release: str, build_id: str
) -> dict[str, Any]:
    """Return the document of profiler.schema.json for the module's two reports."""
    lines = stats.splitlines()
    number = {
        key: int(value)
        for key, _, value in (line.partition(" ") for line in lines if line[:5] != "site ")
    }
    sites = [_site(line, rows) for line in lines if line[:5] == "site "]
    pairs = number["empty_pair_count"]
    ppm = {scope: number.get(f"vstate_cpu_capacity_ppm_{scope}", 0) for scope in SCOPES}
    return {
        "schema_version": "1",
        "release": release,
        "build_id": build_id,
        "active": bool(number["active"]),
        "target_tgid": number["target_tgid"],
        "window": {
            key: number[key]
            for key in (
                "windows", "window_ns", "window_start_ns", "window_stop_ns",
                "online_cpus_at_start", "online_cpus_at_stop",
            )
        },
        "vlen_bits": number["vlen_bits"],
        "register_file_bytes": number["register_file_bytes"],
        "timebase_hz": number["timebase_hz"],
        "resolution_ns": number["resolution_ns"],
        "empty_pair": {
            "count": pairs,
            "mean_ns": number["empty_pair_total_ns"] / pairs,
            "min_ns": number["empty_pair_min_ns"],
            "max_ns": number["empty_pair_max_ns"],
        },
        "saves": _sums(number, "save"),
        # Where a way back to user mode cannot be probed, a sum over the others would be a lie.
        "restores": None if _blind(sites) else _sums(number, "restore"),
        "missed_saves": sum(s["begin_missed"] for s in sites if s["kind"] == "save"),
        "vstate_cpu_capacity_ppm": ppm,
        "sites": sites,
        "problems": _problems(number, sites),
    }  # fmt: skip


def _sums(number: Mapping[str, int], kind: str) -> dict[str, dict[str, int]]:
    return {
        scope: {key: number[f"{kind}_{scope}_{key}"] for key in ("count", "timed", "total_ns")}
        for scope in SCOPES
    }


def _site(line: str, rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    found = _SITE.fullmatch(line)
    if not found:
        raise Refused(4, f"the module's stats have a line of another form: {line!r}")
    live = found["why"] == "live"
    site: dict[str, Any] = {
        "kind": found["kind"],
        "role": found["role"],
        "state": found["state"],
        "symbol": found["symbol"],
        "offset_bytes": int(found["offset"], 16),
        "live": live,
        "why_not_live": None if live else found["why"],
        "begin_missed": int(found["begin_missed"]),
        "end_missed": int(found["end_missed"]),
        "orphan_ends": int(found["orphan_ends"]),
    }
    for scope in SCOPES:
        own = [row for row in rows if row["site"] == found["index"] and row["scope"] == scope]
        timed = [row for row in own if int(row["timed"])]
        buckets = [key for key in rows[0] if key.startswith("from_")]
        counts = {key: sum(int(row[key]) for row in own) for key in buckets}
        site[scope] = {
            "count": sum(int(row["count"]) for row in own),
            "timed": sum(int(row["timed"]) for row in own),
            "total_ns": sum(int(row["total_ns"]) for row in own),
            "min_ns": min((int(row["min_ns"]) for row in timed), default=None),
            "max_ns": max((int(row["max_ns"]) for row in timed), default=None),
            "histogram": [
                {"from_ns": int(key.split("_")[1]), "count": counts[key]}
                for key in buckets
                if counts[key]
            ],
            "cpus": [
                {"cpu": int(row["cpu"]), "count": int(row["count"])}
                for row in own
                if int(row["count"])
            ],
        }
    return site


def _blind(sites: Sequence[Mapping[str, Any]]) -> bool:
    return any(site["role"] == "exit-to-user" and not site["live"] for site in sites)


def _problems(number: Mapping[str, int], sites: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    if number["active"]:
        problems.append("the window is still open")
    elif not number["windows"]:
        problems.append("the window was never opened")
    if number["target_exited"]:
        problems.append("the target process ended in the window")
    if number["online_cpus_at_start"] != number["online_cpus_at_stop"] and not number["active"]:
        problems.append("CPUs went on or off line in the window")
    problems += [
        f"save site {site['symbol']}+{site['offset_bytes']:#x} is not live: {site['why_not_live']}"
        for site in sites
        if site["kind"] == "save" and not site["live"]
    ]
    return problems


def unload() -> None:
    """Remove the module if it is loaded."""
    if MODULE.exists():
        done = subprocess.run(["rmmod", NAME], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(3, f"rmmod {NAME}: {done.stderr.strip()}")


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="load.py", description="drive vstate_profiler.ko")
    verbs = parser.add_subparsers(dest="verb", required=True)
    loading = verbs.add_parser("load")
    loading.add_argument("--module", type=Path, required=True)
    loading.add_argument("--sites", type=Path, required=True)
    loading.add_argument("--target", type=int, default=0)
    verbs.add_parser("start").add_argument("--target", type=int)
    verbs.add_parser("read").add_argument("--out", type=Path, required=True)
    for verb in ("stop", "reset", "unload"):
        verbs.add_parser(verb)
    asked = parser.parse_args(arguments)
    try:
        match asked.verb:
            case "load":
                load(asked.module, asked.sites, asked.target)
            case "start":
                control("start", asked.target)
            case "read":
                read(asked.out)
            case "unload":
                unload()
            case word:
                control(word)
    except Refused as exc:
        print(f"{NAME}: {exc}", file=sys.stderr)
        return exc.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
