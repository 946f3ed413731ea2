"""Schemas are closed, known and used; bad files are refused by name, and nothing half-written."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import schemas
from board.boards import BOARDS
from board.cell import EXPERIMENTS, SERVER, SHAPES
from board.virtual.machine import MACHINE
from schemas.quick import Compiler
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.paths import REPO

EXPECTED = {
    "agent", "boards", "calibration", "cell", "environment", "experiments", "loadgen", "machine",
    "record", "results", "server", "shapes", "summary-row",
}  # fmt: skip
KEYWORDS = {
    "$defs", "$id", "$ref", "$schema", "additionalProperties", "allOf", "anyOf", "const",
    "dependentRequired", "description", "else", "enum", "exclusiveMaximum", "exclusiveMinimum",
    "format", "if", "items", "maxItems", "maxLength", "maximum", "minItems", "minLength",
    "maxProperties", "minProperties", "minimum", "not", "oneOf", "pattern", "patternProperties",
    "prefixItems",
    "properties", "propertyNames", "required", "then", "title", "type", "unevaluatedProperties",
    "uniqueItems",
}  # fmt: skip


def subschemas(content: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself included."""
    if not isinstance(content, dict):
        return
    yield content
    for key in ("properties", "$defs", "patternProperties"):
        for inner in content.get(key, {}).values():
            yield from subschemas(inner)
    for key in (
        "additionalProperties", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedProperties",
    ):  # fmt: skip
        yield from subschemas(content.get(key))
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        for inner in content.get(key, []):
            yield from subschemas(inner)


def test_all_schemas_are_there() -> None:
    assert set(schemas.names()) >= EXPECTED


@pytest.mark.parametrize("name", schemas.names())
def test_schema_is_sound(name: str) -> None:
    content = schemas.schema(name)
    Draft202012Validator.check_schema(content)
    assert content["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert content["$id"] == f"urn:bananaos:{name}:1"
    assert content["title"]
    assert content["description"]
    for inner in subschemas(content):
        unknown = inner.keys() - KEYWORDS
        assert not unknown, f"{name}: a misspelt keyword is no keyword: {unknown}"


@pytest.mark.parametrize("name", schemas.names())
def test_schema_is_closed(name: str) -> None:
    for inner in subschemas(schemas.schema(name)):
        kinds = inner.get("type", [])
        if "object" in ([kinds] if isinstance(kinds, str) else kinds):
            delegated = "properties" not in inner and {"then", "$ref"} & inner.keys()
            bare = inner.keys() <= {"type", "description"}  # narrows a schema that is closed itself
            assert (
                delegated
                or bare
                or "additionalProperties" in inner
                or inner.get("unevaluatedProperties") is False
            ), f"{name}: open: {inner}"
            assert inner.get("additionalProperties") is not True


@pytest.mark.parametrize("name", schemas.names())
def test_references_lead_somewhere(name: str) -> None:
    resources = [Resource.from_contents(schemas.schema(other)) for other in schemas.names()]
    registry: Registry[Any] = Registry().with_resources((str(r.id()), r) for r in resources)
    resolver = registry.resolver(base_uri=schemas.schema(name)["$id"])
    for inner in subschemas(schemas.schema(name)):
        if "$ref" in inner:
            assert resolver.lookup(inner["$ref"]).contents is not None


def test_formats_are_really_checked() -> None:
    # Without the library's optional parts an unknown format is silently accepted.
    assert "date-time" in Draft202012Validator.FORMAT_CHECKER.checkers


def test_own_files_pass() -> None:
    assert schemas.read_toml(BOARDS, "boards")["boards"]["virtual"]["platform"] == "virtual"
    assert schemas.read_toml(EXPERIMENTS, "experiments")["experiments"]["E0"]
    assert schemas.read_toml(SERVER, "server")["flags"]["--threads"] == "{threads}"
    assert schemas.read_toml(SHAPES, "shapes")["shapes"]["banana-tiny"]["layers"] == 4
    assert schemas.read_toml(MACHINE, "machine")["machine"]["harts"] == 8


ENVIRONMENT: dict[str, Any] = {
    "attempt": 1,
    "started_at": "2026-01-02T03:04:05+00:00",
    "ended_at": "2026-01-02T03:04:06.123Z",
    "argv": ["inv", "run"],
    "git_commit": None,
    "git_dirty": None,
    "python_version": "3.11.2",
    "host_kernel": "6.12",
    "host_architecture": "x86_64",
    "host_cpu_model": None,
    "host_cpus": 2,
    "jobs": 2,
    "disk_bytes": 0,
    "failure": None,
    "host_cpu_s": 1.5,
    "host_wall_s": 2.5,
}


def changed(old: str, new: str) -> str:
    text = json.dumps(ENVIRONMENT)
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed('"host_cpu_s": 1.5', '"host_cpu_s": NaN'), ["NaN", "finite"]),
        (changed('"host_cpu_s": 1.5', '"host_cpu_s": Infinity'), ["Infinity", "finite"]),
        (changed('"host_cpu_s": 1.5', '"host_cpu_s": -Infinity'), ["-Infinity", "finite"]),
        (changed('"host_cpu_s": 1.5', '"host_cpu_s": 1e999'), ["$.host_cpu_s", "inf", "finite"]),
        (changed('"jobs": 2', '"jobs": 2, "jobs": 3'), ['"jobs"', "twice"]),
        (changed('"jobs": 2', '"jobs": 2, "extra": 3'), ['unknown key "extra"', "known here"]),
        (changed('"host_cpus"', '"host_cpu"'), ['"host_cpu"', 'did you mean "host_cpu']),
        (changed('"jobs": 2, ', ""), ["at $", 'missing "jobs"']),
        (changed('"jobs": 2', '"jobs": "2"'), ["$.jobs", 'found "2"', "expected integer"]),
        (changed('"jobs": 2', '"jobs": 2.0'), ["$.jobs", "found 2.0", "expected integer"]),
        (changed('"jobs": 2', '"jobs": true'), ["$.jobs", "found true", "expected integer"]),
        (changed('"jobs": 2', '"jobs": 0'), ["$.jobs", "found 0", "minimum of 1"]),
        (changed("2026-01-02T03:04:05+00:00", "2026-01-02 03:04"), ["started_at", "date-time"]),
        (changed("2026-01-02T03:04:05+00:00", "2026-02-30T03:04:05Z"), ["date-time"]),
        (json.dumps(ENVIRONMENT)[:-1], ["not the JSON of an environment file"]),
        ("", ["not the JSON of an environment file"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("[]", ["at $", "found []", "expected object"]),
    ],
)
def test_bad_json_is_refused_by_name(tmp_path: Path, text: str, says: list[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidData) as caught:
        schemas.read(path, "environment")
    line = str(caught.value)
    for part in [str(path), *says]:
        assert part in line
    assert "\n" not in line
    assert caught.value.exit_code == 4


def test_good_json_passes(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    schemas.write(path, ENVIRONMENT, "environment")
    assert schemas.read(path, "environment") == ENVIRONMENT


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"absent.json: cannot be read: No such file"):
        schemas.read(tmp_path / "absent.json", "environment")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(InvalidData, match=r"latin.json: not UTF-8 text: byte 7"):
        schemas.read(tmp_path / "latin.json", "environment")


def test_other_version_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_text('{"schema_version": "0", "experiments": {}, "gone": 1}', encoding="utf-8")
    with pytest.raises(schemas.OtherVersion, match=r'schema_version is "0".*reads and writes "1"'):
        schemas.read(path, "results")
    path.write_text('{"experiments": {}}', encoding="utf-8")
    with pytest.raises(InvalidData, match='missing "schema_version"'):
        schemas.read(path, "results")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('schema_version = "1"\n[boards.x]\ntitle = "t"\nplatform = "vitrual"', "vitrual"),
        ('schema_version = "1"\n[boards.x]\ntitel = "t"\nplatform = "virtual"', '"title"'),
        ('schema_version = "1"\n[boards.x]\ntitle = nan\nplatform = "virtual"', "nan"),
        ('schema_version = "1"\n[boards.x]\ntitle = 2026-01-01\nplatform = "virtual"', "date"),
        ('schema_version = "1"\n[boards.x]\ntitle = "t"\ntitle = "t"', "not the TOML"),
        ('schema_version = "1"\n[boards."X y"]\ntitle = "t"\nplatform = "virtual"', "X y"),
        ('schema_version = "2"\n[boards.x]\ntitle = "t"\nplatform = "virtual"', "schema_version"),
    ],
)
def test_bad_toml_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "boards.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidData) as caught:
        schemas.read_toml(path, "boards")
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_written_form(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    schemas.write(path, {"schema_version": "1", "experiments": {}}, "results")
    assert path.read_text(encoding="utf-8") == '{\n "experiments": {},\n "schema_version": "1"\n}\n'
    assert schemas.canonical({"b": [1, 2.5], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2.5]}'


@pytest.mark.parametrize("bad", [{"host_cpu_s": float("nan")}, {"argv": ("a",)}, {1: 2}])
def test_bad_document_is_not_written(tmp_path: Path, bad: dict[Any, Any]) -> None:
    path = tmp_path / "environment.json"
    path.write_text("before", encoding="utf-8")
    with pytest.raises(InvalidData):
        schemas.write(path, ENVIRONMENT | bad, "environment")
    assert path.read_text(encoding="utf-8") == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["environment.json"]


def test_failing_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.json"
    path.write_text("before", encoding="utf-8")

    def no_space(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(EnvironmentUnfit, match=r"index.json: No space left on device.*free some"):
        schemas.write(path, {"schema_version": "1", "experiments": {}}, "results")
    assert path.read_text(encoding="utf-8") == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["index.json"]


@pytest.mark.parametrize("name", [".", "", "/", "..", "folder"])
def test_a_folder_is_no_file_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"^cannot write \S+: it is a folder, expected the name"):
        schemas.write(Path(name), {"schema_version": "1", "experiments": {}}, "results")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["folder"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match=r"none/a.json: No such file or directory; .*again$"):
        schemas.replace_text(tmp_path / "none" / "a.json", "")


def test_file_size_limit_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before", encoding="utf-8")
    program = (
        "import resource, sys, pathlib, schemas\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "schemas.replace_text(pathlib.Path(sys.argv[1]), 'x' * 10000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=REPO, capture_output=True, text=True
    )
    assert "EnvironmentUnfit" in done.stderr
    assert "File too large" in done.stderr
    assert path.read_text(encoding="utf-8") == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_schemas_are_compiled_by_one_thread_at_a_time() -> None:
    """Several runs may end at once, and each is checked in a thread of its own."""
    names = schemas.names()

    def ask(quick: Compiler, first: int) -> bool:
        document = {"schema_version": "1", "cell": {}}
        return any(quick.accepts(name, document) for name in [*names[first:], *names[:first]])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            quick = Compiler(schemas.schema)
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(ask, quick, first) for first in range(0, len(names), 4)]
                assert not any(answer.result() for answer in asked)
    finally:
        sys.setswitchinterval(before)
