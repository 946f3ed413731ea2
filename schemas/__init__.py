"""The schemas, and the only way JSON and TOML of this project are read and written.

Promise: what passes here is complete, closed (no unknown key), finite (no NaN, no Infinity), free
of duplicate keys, of the schema version this code knows, and with its formats (date-time) checked;
what does not pass is refused with one line that names the file, the place, what was found and what
is expected.  Files are replaced whole or left as they were.
Limit: a schema cannot see whether a number is true, only whether it can be.
"""

import contextlib
import difflib
import functools
import itertools
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry, Resource

from schemas.quick import Compiler
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError

_DIRECTORY = Path(__file__).resolve().parent
_UNKNOWN_KEY = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_SHOWN_CHARACTERS = 80
_temporary_number = itertools.count()


class OtherVersion(InvalidData):
    """The document was written by a version of this project with another schema."""


def _is_integer(_checker: Any, value: object) -> bool:
    # JSON Schema lets 1.0 pass as an integer; two spellings of one cell would have two hashes.
    return isinstance(value, int) and not isinstance(value, bool)


_Validator = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


@functools.cache
def schema(name: str) -> Mapping[str, Any]:
    """The schema called `name`: the content of schemas/<name>.schema.json."""
    text = (_DIRECTORY / f"{name}.schema.json").read_text(encoding="utf-8")
    content: Mapping[str, Any] = json.loads(text)
    return content


_quick = Compiler(schema)


def names() -> list[str]:
    """The names of all schemas, sorted."""
    suffix = ".schema.json"
    return sorted(path.name.removesuffix(suffix) for path in _DIRECTORY.glob(f"*{suffix}"))


def check(document: object, name: str) -> None:
    """Raise InvalidData unless `document` is what the schema called `name` describes."""
    _check(document, name, name)


def read(path: Path, name: str) -> Any:
    """Read a JSON file and check it against the schema called `name`.

    Raises InvalidData (missing, unreadable, not JSON, not as the schema says) and OtherVersion.
    """
    text = read_text(path)
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidData(f"{path}: nested too deeply to be {_article(name)} file") from None
    except ValueError as error:
        raise InvalidData(f"{path}: not the JSON of {_article(name)} file: {error}") from None
    _check(document, name, str(path))
    return document


def read_toml(path: Path, name: str) -> Any:
    """Read a TOML file and check it against the schema called `name`; raises like `read`."""
    text = read_text(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{path}: not the TOML of {_article(name)} file: {error}") from None
    _check(document, name, str(path))
    return document


def write(path: Path, document: object, name: str) -> None:
    """Check `document` and write it as JSON: sorted keys, indent 1, a newline at the end.

    The file is replaced at once or not at all.  Raises InvalidData (the document is not as the
    schema says: nothing is written), UsageError (`path` is a folder) and EnvironmentUnfit (the disk
    is full, read-only, ...).
    """
    _check(document, name, str(path))
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
    replace_text(path, text + "\n")


def require_file_name(path: Path) -> None:
    """Raise UsageError when `path` is a folder's."""
    if not path.name or path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder, expected the name of a file")


def replace_text(path: Path, text: str) -> None:
    """Make `text` the content of `path` at once, or leave `path` as it was.

    Raises UsageError for the name of a folder and EnvironmentUnfit when the file system refuses.
    """
    require_file_name(path)
    # A number of its own per thread and process: two writers must not share a temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_temporary_number)}")
    try:
        try:
            with temporary.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {path}: {error.strerror}; nothing was changed: "
            "free some space or choose a folder that can be written, then run the same again"
        ) from error


def canonical(document: object) -> bytes:
    """The one spelling of a document that hashes and comparisons use: sorted, no spaces, ASCII."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def _check(document: object, name: str, where: str) -> None:
    expected = schema(name)
    version = expected.get("properties", {}).get("schema_version", {}).get("const")
    if version is not None and isinstance(document, dict):
        found = document.get("schema_version")
        if found is not None and found != version:
            raise OtherVersion(
                f"{where}: schema_version is {_show(found)}, but this version of the project "
                f"reads and writes {_show(version)}"
            )
    if problem := _not_json(document, "$"):
        raise InvalidData(f"{where}: {problem}")
    if _quick.accepts(name, document):
        return
    errors = list(_validator(name).iter_errors(document))
    if errors:
        # A misspelt key is both unknown and missing: the unknown one says more.
        worst = min(errors, key=lambda bad: (bad.validator not in _UNKNOWN_KEY, bad.json_path))
        raise InvalidData(f"{where}: {_explain(worst)}")


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    resources = (Resource.from_contents(schema(other)) for other in names())
    registry: Registry[Any] = Registry().with_resources(
        (str(resource.id()), resource) for resource in resources
    )
    validator: Draft202012Validator = _Validator(
        schema(name), registry=registry, format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    return validator


def _explain(error: ValidationError) -> str:
    place, value = error.json_path, error.instance
    limit: Any = error.validator_value
    meaning = error.schema.get("description") if isinstance(error.schema, Mapping) else None
    note = f" ({meaning})" if meaning and error.validator not in _UNKNOWN_KEY else ""
    match error.validator:
        case "additionalProperties" | "unevaluatedProperties":
            return f"at {place}: {_explain_unknown(error)}"
        case "propertyNames":
            return f"at {place}: {error.message}"
        case "required":
            present: Any = value
            missing = ", ".join(_show(key) for key in limit if key not in present)
            return f"at {place}: missing {missing}"
        case "type":
            kinds = [limit] if isinstance(limit, str) else limit
            return f"at {place}: found {_show(value)}, expected {' or '.join(kinds)}{note}"
        case "const":
            return f"at {place}: found {_show(value)}, expected {_show(limit)}{note}"
        case "enum":
            choices = ", ".join(_show(choice) for choice in limit)
            return f"at {place}: found {_show(value)}, expected one of {choices}{note}"
        case "format":
            return f"at {place}: found {_show(value)}, expected a {limit}{note}"
        case "pattern":
            return f"at {place}: found {_show(value)}, expected text of the form {limit}{note}"
        case _:
            return f"at {place}: found {_show(value)}: {error.message[:200]}{note}"


def _explain_unknown(error: ValidationError) -> str:
    rules: Any = error.schema
    properties = rules.get("properties", {})
    if not properties and "patternProperties" in rules:
        return error.message
    instance: Any = error.instance
    unknown = sorted(key for key in instance if key not in properties)
    hints = []
    for key in unknown:
        close = difflib.get_close_matches(key, properties, n=1)
        hints.append(_show(key) + (f" (did you mean {_show(close[0])}?)" if close else ""))
    known = ", ".join(sorted(properties))
    return f"unknown key {', '.join(hints)}; known here: {known or 'none'}"


def _not_json(value: object, place: str) -> str | None:
    """What of `value` JSON cannot say, or None; JSON Schema itself lets NaN pass any limit."""
    match value:
        case None | bool() | int() | str():
            return None
        case float():
            if math.isfinite(value):
                return None
            return f"at {place}: found {value}, expected a finite number"
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    return f"at {place}: found the key {key!r}, expected text"
                if problem := _not_json(item, f"{place}.{key}"):
                    return problem
            return None
        case list():
            for index, item in enumerate(value):
                if problem := _not_json(item, f"{place}[{index}]"):
                    return problem
            return None
        case _:
            return f"at {place}: found {value!r} ({type(value).__name__}), which JSON cannot hold"


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {_show(key)} stands twice in one object")
        result[key] = value
    return result


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"found {word}, expected a finite number")


def read_text(path: Path) -> str:
    """The text of a file of this project; raises InvalidData when there is none to read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidData(f"{path}: not UTF-8 text: byte {error.start} cannot be decoded") from None
    except OSError as error:
        raise InvalidData(f"{path}: cannot be read: {error.strerror}") from error


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
