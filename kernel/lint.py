"""Compare a kernel config fragment with the configuration that Kconfig made of it.

Promise: every option of the fragment has the wanted value in the resolved `.config`; no option
of the forbidden list is on or asked for; every name in both files exists in the kernel's
Kconfig files. One line per fault on standard error, all faults in one go.
Limit: says nothing of options that neither file names, nor whether the kernel works.

Runs in the pinned tree during the kernel build, so it needs nothing but the standard library.
Exit codes: 0 no fault, 1 faults, 2 usage, 4 a file is missing or cannot be parsed.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FAULTS = 1
INVALID_DATA = 4

_ASSIGNMENT = re.compile(r"CONFIG_(?P<name>[A-Z0-9a-z_]+)=(?P<value>.+)")
_NOT_SET = re.compile(r"# CONFIG_(?P<name>[A-Z0-9a-z_]+) is not set")
_LOOKS_NOT_SET = re.compile(r"#.*\bCONFIG_\w+.*\bnot set\b")
_VALUE = re.compile(r'[ymn]|-?[0-9]+|0[xX][0-9a-fA-F]+|"[^"]*"')
_DEFINITION = re.compile(r"^[ \t]*(?:menu)?config[ \t]+(?P<name>\w+)[ \t]*(?:#.*)?$", re.MULTILINE)


class BadFile(Exception):
    """A file is missing or malformed; str() is the one line for the user."""


@dataclass(frozen=True)
class Option:
    """One assignment: `value` as Kconfig writes it ("n" for "is not set"), `line` from 1."""

    value: str
    line: int


def read_config(path: Path) -> dict[str, Option]:
    """Option name without CONFIG_ -> assignment, of a fragment or a `.config`.

    Raises BadFile for a missing file, a line that is neither comment nor assignment, a value
    that Kconfig could not have written, and a name that is assigned twice.
    """
    options: dict[str, Option] = {}
    for number, raw in enumerate(_read_text(path).splitlines(), start=1):
        line = raw.strip()
        if match := _NOT_SET.fullmatch(line):
            name, value = match["name"], "n"
        elif not line or (line.startswith("#") and not _LOOKS_NOT_SET.match(line)):
            continue
        elif (match := _ASSIGNMENT.fullmatch(line)) and _VALUE.fullmatch(match["value"]):
            name, value = match["name"], match["value"]
        else:
            raise BadFile(
                f'{path}:{number}: got "{line}", expected CONFIG_NAME=value (y, m, n, a number or'
                f' a quoted string), "# CONFIG_NAME is not set" or a comment; correct the line'
            )
        if name in options:
            raise BadFile(
                f"{path}:{number}: CONFIG_{name} is assigned again (first in line"
                f" {options[name].line}); keep one of the two"
            )
        options[name] = Option(value, number)
    return options


def read_forbidden(path: Path) -> dict[str, str]:
    """Option name without CONFIG_ -> reason, of a TOML file of tables `name = "reason"`.

    Raises BadFile for a missing or malformed file, an empty reason, a name listed twice.
    """
    try:
        tables = tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{path}: not valid TOML: {error}") from None
    reasons: dict[str, str] = {}
    for table, entries in tables.items():
        if not isinstance(entries, dict):
            raise BadFile(f"{path}: {table} stands outside a table; move it into one")
        for name, reason in entries.items():
            if not isinstance(reason, str) or not reason.strip():
                raise BadFile(f"{path}: {table}.{name} has no reason; write one as a string")
            if name in reasons:
                raise BadFile(f"{path}: {name} is listed twice; keep one of the two")
            reasons[name] = reason
    return reasons


def read_known_names(source: Path) -> frozenset[str]:
    """All option names defined in the Kconfig files under a kernel source tree.

    Raises BadFile when there are none: the directory is no kernel source.
    """
    names: set[str] = set()
    for path in source.rglob("Kconfig*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            names.update(match["name"] for match in _DEFINITION.finditer(text))
    if not names:
        raise BadFile(f"{source}: no Kconfig file defines an option; give the kernel source tree")
    return frozenset(names)


def find_faults(
    wanted: Mapping[str, Option],
    resolved: Mapping[str, Option],
    forbidden: Mapping[str, str],
    known: Collection[str],
) -> list[str]:
    """One line per fault, in the order of the fragment, then of the forbidden list."""
    faults: list[str] = []
    for name, option in wanted.items():
        where = f"CONFIG_{name} (fragment line {option.line})"
        got = resolved[name].value if name in resolved else "n"
        if name in forbidden and _is_on(option.value):
            faults.append(f"{where}: asked for, but forbidden: {forbidden[name]}; remove the line")
        if name not in known:
            faults.append(
                f"{where}: no Kconfig file of this kernel defines it; correct the name or remove it"
            )
        elif got != option.value:
            faults.append(
                f"{where}: wanted {option.value}, got {got} in the resolved configuration;"
                f" look at its dependencies in the Kconfig files"
            )
    for name, reason in forbidden.items():
        if name not in known:
            faults.append(
                f"CONFIG_{name} (forbidden list): no Kconfig file of this kernel defines it;"
                f" correct the name or remove it"
            )
        elif name in resolved and _is_on(resolved[name].value):
            faults.append(
                f"CONFIG_{name}: is {resolved[name].value} in the resolved configuration, but"
                f" forbidden: {reason}; find what selects it"
            )
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="check a resolved kernel configuration")
    parser.add_argument("--fragment", type=Path, required=True)
    parser.add_argument("--forbidden", type=Path, required=True, help="TOML, name = reason")
    parser.add_argument("--config", type=Path, required=True, help="the resolved .config")
    parser.add_argument("--source", type=Path, required=True, help="the kernel source tree")
    arguments = parser.parse_args(argv)
    try:
        wanted = read_config(arguments.fragment)
        faults = find_faults(
            wanted,
            read_config(arguments.config),
            read_forbidden(arguments.forbidden),
            read_known_names(arguments.source),
        )
    except BadFile as error:
        print(f"kernel config: {error}", file=sys.stderr)
        return INVALID_DATA
    for fault in faults:
        print(f"kernel config: {fault}", file=sys.stderr)
    if faults:
        return FAULTS
    print(f"kernel config: {len(wanted)} wanted options set, nothing forbidden is on")
    return 0


def _is_on(value: str) -> bool:
    return value not in ("n", '""')


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFile(f"{path}: cannot be read: {reason}") from None


if __name__ == "__main__":
    sys.exit(main())
