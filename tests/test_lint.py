"""The checks of form, over every file of the checkout that .gitignore does not name.

Promise: each check is a function from a root directory to findings; the first test wants none for
the checkout, the second plants a fault for each check and wants it found, so no check passes by
looking at nothing.  The tools are the pinned ones of this environment, its settings the checkout's.
Limit: form only.  Needs no git, so it works in an unpacked archive, too.
"""

import ast
import fnmatch
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import jsonschema
import pytest

from toolchain.command import run

REPO = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SIZE_LIMIT_BYTES = 512 * 1024
LARGE_FILES = {"toolchain/debian.lock"}
OF_A_TREE = {"bcc"}  # imported in a container, where the pinned tree x86 has it
# Spelled so that neither pattern matches this file.
REGISTRY = re.compile(
    r"\b(?:py[p]i|test\.py[p]i|python[h]osted|np[m]js|crates|rubygems|proxy\.golang|index\.docker|ghcr|quay"
    r"|huggingface|(?:deb|ftp|http|security|snapshot|archive)\.debian|archive\.ubuntu)"
    r"\.(?:org|io|com|co)\b"
)
HOME = re.compile(r"(?<![\w.*])/(?:home/\w|Users/\w|root/)")


def files(root: Path) -> Iterator[Path]:
    """Every file that .gitignore's names do not exclude (at any depth), in order."""
    lines = (REPO / ".gitignore").read_text().split()
    ignored = [line.strip("/") for line in lines if not line.startswith("#")] + [".git"]

    def kept(names: list[str]) -> list[str]:
        return sorted(n for n in names if not any(fnmatch.fnmatch(n, i) for i in ignored))

    for directory, directories, names in os.walk(root):
        directories[:] = kept(directories)
        yield from (Path(directory, name) for name in kept(names))


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(200).decode(errors="replace")


def python_files(root: Path) -> list[Path]:
    return [p for p in files(root) if p.suffix == ".py" or re.match(r"#!.*python", _first_line(p))]


def shell_scripts(root: Path) -> list[Path]:
    shebang = re.compile(r"#!.*\b(?:sh|bash|dash)\b")
    return [p for p in files(root) if p.suffix == ".sh" or shebang.match(_first_line(p))]


def c_files(root: Path) -> list[Path]:
    return [p for p in files(root) if p.suffix in (".c", ".cpp", ".h")]


def _tool(root: Path, paths: list[Path], *command: str | Path) -> list[str]:
    """What the tool says about `paths` (nothing when it is content with them)."""
    if not paths:
        return []
    relative = [path.relative_to(root) for path in paths]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log")
        done = run([*command, *relative], what="linting", cwd=root, log=log, check=False)
        return [] if done.returncode == 0 else log.read_text().splitlines()[1:]


def ruff_check(root: Path) -> list[str]:
    command = (BIN / "ruff", "check", "--quiet", "--no-cache", "--output-format=concise")
    return _tool(root, python_files(root), *command, "--config", REPO / "pyproject.toml")


def ruff_format(root: Path) -> list[str]:
    command = (BIN / "ruff", "format", "--check", "--no-cache")
    return _tool(root, python_files(root), *command, "--config", REPO / "pyproject.toml")


def mypy(root: Path) -> list[str]:
    command = (BIN / "mypy", "--no-error-summary", "--config-file", REPO / "pyproject.toml")
    return _tool(root, python_files(root), *command)


def shellcheck(root: Path) -> list[str]:
    return _tool(root, shell_scripts(root), BIN / "shellcheck", "--format=gcc")


def clang_format(root: Path) -> list[str]:
    style = f"--style=file:{REPO / '.clang-format'}"
    return _tool(root, c_files(root), BIN / "clang-format", "--dry-run", "-Werror", style)


def _lines_with(root: Path, pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in files(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()[:120]}")
    return found


def registry_hosts(root: Path) -> list[str]:
    return _lines_with(root, REGISTRY)


def home_directories(root: Path) -> list[str]:
    return _lines_with(root, HOME)


def sizes(root: Path) -> list[str]:
    sized = ((str(path.relative_to(root)), path.stat().st_size) for path in files(root))
    return [
        f"{name}: {size} bytes, at most {SIZE_LIMIT_BYTES}"
        for name, size in sized
        if size > SIZE_LIMIT_BYTES and name not in LARGE_FILES
    ]


def docstrings(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: no module docstring"
        for path in python_files(root)
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))
    ]


def imports(root: Path) -> list[str]:
    """Imports of packages that requirements.in does not name; one it draws in may go any day."""
    paths = python_files(root)
    own = {path.stem for path in paths} | {path.parent.name for path in paths}
    own |= {path.relative_to(root).parts[0] for path in paths}
    lines = (REPO / "requirements.in").read_text().splitlines()
    locked = {re.split(r"[\s\[]", line)[0] for line in lines if line and line[0] != "#"}
    distributions = packages_distributions()
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for package in {name.partition(".")[0] for name in names}:
                if package in own | sys.stdlib_module_names | OF_A_TREE:
                    continue
                if not locked & {name.lower() for name in distributions.get(package, [])}:
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    found.append(f"{where}: {package} is not in requirements.in")
    return found


def lock_is_whole(root: Path) -> list[str]:
    """Names in requirements.in that requirements.txt does not pin."""
    wanted, pinned = root / "requirements.in", root / "requirements.txt"
    if not wanted.exists():
        return []
    names = (re.split(r"[\s\[]", line)[0] for line in wanted.read_text().splitlines())
    text = pinned.read_text()
    return [f"requirements.txt: no {n}" for n in names if n.strip("#") and f"\n{n}==" not in text]


def schema_files(root: Path) -> list[str]:
    found = []
    for path in files(root):
        if path.name.endswith(".schema.json"):
            name = path.relative_to(root)
            schema = json.loads(path.read_text())
            draft = "https://json-schema.org/draft/2020-12/schema"
            if schema.get("$schema") != draft:
                found.append(f"{name}: $schema is {schema.get('$schema')!r}, expected {draft!r}")
            try:
                jsonschema.Draft202012Validator.check_schema(schema)
            except jsonschema.SchemaError as error:
                found.append(f"{name}: {error.json_path}: {error.message}")
    return found


def data_files(root: Path) -> list[str]:
    parsers: dict[str, Callable[[str], object]] = {".json": json.loads, ".toml": tomllib.loads}
    found = []
    for path in files(root):
        if path.suffix in parsers:
            try:
                parsers[path.suffix](path.read_text())
            except ValueError as error:
                found.append(f"{path.relative_to(root)}: {error}")
    return found


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    check.__name__: check
    for check in (
        ruff_check,
        ruff_format,
        mypy,
        shellcheck,
        clang_format,
        registry_hosts,
        home_directories,
        sizes,
        docstrings,
        imports,
        lock_is_whole,
        schema_files,
        data_files,
    )
}
DRAFT = "https://json-schema.org/draft/2020-12/schema"
# check, file, its content with the fault, part of the finding
FAULTS = [
    ("ruff_check", "a.py", '"""A."""\nimport os\n', "a.py:2:8: F401"),
    ("ruff_check", "script", '#!/usr/bin/env python3\n"""A."""\nimport os\n', "script:3:8: F401"),
    ("ruff_format", "a.py", '"""A."""\nx = [1,2]\n', "a.py"),
    ("mypy", "a.py", '"""A."""\n\n\ndef f(x):\n    return x\n', "a.py:4: error: Function is miss"),
    ("mypy", "dotted.dir/a.py", '"""A."""\nx: int = ""\n', "dotted.dir/a.py:2: error: Incompat"),
    ("shellcheck", "a.sh", "#!/bin/sh\necho $1\n", "a.sh:2:6: note: Double quote"),
    ("shellcheck", "tool", "#!/usr/bin/env bash\necho $1\n", "tool:2:6: note: Double quote"),
    ("shellcheck", ".ci/run", "#!/bin/sh\n[[ a ]]\n", ".ci/run:2:1: warning: In POSIX sh"),
    ("clang_format", "a.c", "int f(void) {\n  return 1;\n}\n", "a.c:1:12: error: code should be"),
    ("clang_format", "x/a.bpf.c", "int  a;\n", "x/a.bpf.c:1:4: error: code should be"),
    ("clang_format", "a.h", "int  a;\n", "a.h:1:4: error: code should be"),
    ("registry_hosts", "a.md", "see\nfiles.python" + "hosted.org\n", "a.md:2: files"),
    ("registry_hosts", "docker/a", "deb http://deb.debian" + ".org/debian x\n", "docker/a:1: deb"),
    ("home_directories", "a.toml", 'x = "/home' + '/ann/x"\n', 'a.toml:1: x = "/ho'),
    ("home_directories", "a", "cd /root" + "/x\n", "a:1: cd /ro"),
    ("sizes", "a.bin", "x" * (SIZE_LIMIT_BYTES + 1), "a.bin: 524289 bytes, at most 524288"),
    ("docstrings", "a.py", "x = 1\n", "a.py: no module docstring"),
    ("imports", "a.py", "import yaml\n", "a.py:1: yaml is not in requirements.in"),
    ("imports", "x/a.py", "from debain import a\n", "x/a.py:1: debain is not in requirements.in"),
    ("schema_files", "a.schema.json", f'{{"$schema": "{DRAFT}", "type": "int"}}', "$.type: 'int'"),
    ("schema_files", "a.schema.json", '{"type": "object"}', "$schema is None"),
    ("data_files", "a.json", '{"a": }', "a.json: Expecting value"),
    ("data_files", "a.toml", "a = \n", "a.toml: Invalid value"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_the_checkout_has_no_findings(name: str) -> None:
    findings = CHECKS[name](REPO)
    if findings:
        pytest.fail("\n".join([f"{name}: {len(findings)} lines", *findings]), pytrace=False)


@pytest.mark.parametrize(("name", "file", "content", "finding"), FAULTS)
def test_a_planted_fault_is_found(
    name: str, file: str, content: str, finding: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert finding in "\n".join(CHECKS[name](tmp_path))


def test_a_lock_that_was_not_made_anew_is_found(tmp_path: Path) -> None:
    (tmp_path / "requirements.in").write_text("# what\nnumpy  # why\nnew[extra]\n")
    (tmp_path / "requirements.txt").write_text("\nnumpy==1 \\\n    --hash=sha256:0\n")
    assert lock_is_whole(tmp_path) == ["requirements.txt: no new"]


def test_every_check_has_a_planted_fault() -> None:
    assert {name for name, *_ in FAULTS} == set(CHECKS) - {"lock_is_whole"}


@pytest.mark.parametrize("place", [".venv/lib/a.py", "__pycache__/a.py", "results/a.py"])
def test_what_is_ignored_is_not_looked_at(place: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("x=1\n")
    assert [finding for check in CHECKS.values() for finding in check(tmp_path)] == []


def test_the_checks_see_the_files_they_are_for() -> None:
    def names(paths: list[Path]) -> set[str]:
        return {str(path.relative_to(REPO)) for path in paths}

    assert {"toolchain/command.py", "llama.cpp/make_model.py"} <= names(python_files(REPO))
    assert {"inv", ".ci/run", "kernel/build.sh"} <= names(shell_scripts(REPO))
