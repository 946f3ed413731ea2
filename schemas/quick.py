"""A quick yes or "perhaps not" for documents that are almost always right.

Promise: `accepts(name, document)` is true only for documents that jsonschema, the way
schemas/__init__.py sets it up, accepts too; of a schema with a keyword that is not known here it
accepts nothing, so no rule is ever passed over.  It is some eighty times faster, which is what lets
a thousand records be read in seconds.
Limit: false explains nothing: who gets it asks jsonschema, whose word is the last.
"""

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator

Check = Callable[[Any], bool]

_NOTES = frozenset({"$schema", "$id", "$defs", "title", "description"})
_FORMATS = Draft202012Validator.FORMAT_CHECKER
_TYPES: Mapping[str, Check] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


class _Unknown(Exception):
    """A keyword that is not known here."""


class Compiler:
    """Compiles the schemas of one set; `read(name)` gives a schema by its name."""

    def __init__(self, read: Callable[[str], Mapping[str, Any]]) -> None:
        self._read = read
        self._done: dict[str, Check] = {}
        self._roots: dict[str, Check | None] = {}
        self._compiling = threading.Lock()

    def knows(self, name: str) -> bool:
        """Whether all keywords of the schema called `name` are known here."""
        # Runs end in several threads: none may see, or put back, what another has half compiled.
        with self._compiling:
            if name not in self._roots:
                before = dict(self._done)
                try:
                    self._roots[name] = self._at(name, "")
                except _Unknown:
                    self._done = before
                    self._roots[name] = None
        return self._roots[name] is not None

    def accepts(self, name: str, document: object) -> bool:
        """Whether the document is certainly what the schema called `name` describes."""
        check = self._roots[name] if self.knows(name) else None
        return check is not None and check(document)

    def _at(self, name: str, pointer: str) -> Check:
        """The check of the subschema that `pointer` (/a/b) leads to; compiled once."""
        key = f"{name}#{pointer}"
        if key not in self._done:
            # A schema may refer to itself: until it is compiled its name stands for it.
            self._done[key] = lambda value: self._done[key](value)
            target: Any = self._read(name)
            for word in pointer.split("/")[1:]:
                target = target[word]
            self._done[key] = self._compile(target, name)
        return self._done[key]

    def _compile(self, schema: Any, name: str) -> Check:
        if schema is True or schema == {}:
            return lambda _: True
        if schema is False:
            return lambda _: False
        checks = [
            check
            for keyword in schema
            if keyword not in _NOTES and (check := self._keyword(keyword, schema, name)) is not None
        ]
        if len(checks) == 1:
            return checks[0]
        return lambda value: all(check(value) for check in checks)

    def _keyword(self, keyword: str, schema: Mapping[str, Any], name: str) -> Check | None:
        limit = schema[keyword]
        sub = functools.partial(self._compile, name=name)
        match keyword:
            case "$ref":
                whole, _, pointer = limit.partition("#")
                return self._at(whole.split(":")[2] if whole else name, pointer)
            case "type":
                return _type([limit] if isinstance(limit, str) else limit)
            case "const":
                return lambda v: _same(v, limit)
            case "enum":
                return lambda v: any(_same(v, choice) for choice in limit)
            case "properties":
                return _properties({key: sub(rule) for key, rule in limit.items()})
            case "required":
                wanted = frozenset(limit)
                return lambda v: not isinstance(v, dict) or wanted <= v.keys()
            case "additionalProperties":
                return _additional(schema, sub(limit))
            case "patternProperties":
                rules = [(re.compile(pattern), sub(rule)) for pattern, rule in limit.items()]
                return lambda v: (
                    not isinstance(v, dict)
                    or all(
                        rule(item) for key, item in v.items() for p, rule in rules if p.search(key)
                    )
                )
            case "propertyNames":
                names = sub(limit)
                return lambda v: not isinstance(v, dict) or all(names(key) for key in v)
            case "minProperties":
                return lambda v: not isinstance(v, dict) or len(v) >= limit
            case "maxProperties":
                return lambda v: not isinstance(v, dict) or len(v) <= limit
            case "items":
                each = sub(limit)
                return lambda v: not isinstance(v, list) or all(each(item) for item in v)
            case "minItems":
                return lambda v: not isinstance(v, list) or len(v) >= limit
            case "maxItems":
                return lambda v: not isinstance(v, list) or len(v) <= limit
            case "uniqueItems":
                return _unique
            case "minLength":
                return lambda v: not isinstance(v, str) or len(v) >= limit
            case "maxLength":
                return lambda v: not isinstance(v, str) or len(v) <= limit
            case "pattern":
                pattern = re.compile(limit)
                return lambda v: not isinstance(v, str) or pattern.search(v) is not None
            case "format":
                return lambda v: _FORMATS.conforms(v, limit)
            case "minimum":
                return lambda v: not _number(v) or v >= limit
            case "maximum":
                return lambda v: not _number(v) or v <= limit
            case "exclusiveMinimum":
                return lambda v: not _number(v) or v > limit
            case "exclusiveMaximum":
                return lambda v: not _number(v) or v < limit
            case "not":
                inner = sub(limit)
                return lambda v: not inner(v)
            case "allOf":
                parts = [sub(part) for part in limit]
                return lambda v: all(part(v) for part in parts)
            case "anyOf":
                parts = [sub(part) for part in limit]
                return lambda v: any(part(v) for part in parts)
            case "oneOf":
                parts = [sub(part) for part in limit]
                return lambda v: sum(part(v) for part in parts) == 1
            case "if":
                test = sub(limit)
                yes, no = sub(schema.get("then", True)), sub(schema.get("else", True))
                return lambda v: yes(v) if test(v) else no(v)
            case "then" | "else":
                return None  # with their "if"
        raise _Unknown(keyword)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(value: object, other: object) -> bool:
    """JSON Schema's equality of scalars: true is not 1, but 1.0 is."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _unique(value: object) -> bool:
    if not isinstance(value, list):
        return True
    try:
        return len(set(value)) == len(value)
    except TypeError:  # lists and objects cannot be put into a set
        return False


def _type(kinds: list[str]) -> Check:
    if len(kinds) == 1:
        return _TYPES[kinds[0]]
    choices = [_TYPES[kind] for kind in kinds]
    return lambda value: any(choice(value) for choice in choices)


def _properties(rules: Mapping[str, Check]) -> Check:
    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return True
        for key, item in value.items():
            rule = rules.get(key)
            if rule is not None and not rule(item):
                return False
        return True

    return check


def _additional(schema: Mapping[str, Any], rule: Check) -> Check:
    known = frozenset(schema.get("properties", ()))
    patterns = [re.compile(pattern) for pattern in schema.get("patternProperties", ())]
    if not patterns and schema["additionalProperties"] is False:
        return lambda value: not isinstance(value, dict) or known >= value.keys()
    return lambda value: (
        not isinstance(value, dict)
        or all(
            rule(item)
            for key, item in value.items()
            if key not in known and not any(pattern.search(key) for pattern in patterns)
        )
    )
