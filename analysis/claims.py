"""artifact/claims.toml as objects: claims, and the cells that each of their points compares.

Promise: what is returned refers only to metrics, experiments, families and platforms that exist;
the first that does not is named.  Nothing here looks at a run.
Limit: whether a claim says what the report says is a matter of reading both.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from analysis.collect import with_scheduler
from toolchain.errors import InvalidData
from toolchain.paths import REPO

CLAIMS = REPO / "artifact" / "claims.toml"


@dataclass(frozen=True)
class Cell:
    """Which runs: those of one policy, concurrency, model and VLEN; a VLEN of None is any.

    scope: of the policies that have one.  Policies as they are, with nothing beside the server.
    """

    policy: str
    concurrency: int
    model: str
    vlen_bits: int | None
    scope: str

    @property
    def label(self) -> str:
        """The cell in a few words."""
        words = [self.policy, *([self.scope] if self.policy in with_scheduler() else [])]
        words += [self.model, f"c={self.concurrency}"]
        if self.vlen_bits is not None:
            words.append(f"VLEN {self.vlen_bits}")
        return " ".join(words)


@dataclass(frozen=True)
class Point:
    """One comparison: a weighted sum of the logarithms of its cells.

    divisor and value: of an exact point, which has one cell; None else.  target: the ratio that is
    claimed, of a `growth-to` point.
    """

    label: str
    terms: tuple[tuple[float, Cell], ...]
    divisor: float | None = None
    value: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Claim:
    """One claim on one platform; the fields are those of claims.schema.json."""

    id: str
    statement: str
    section: tuple[str, ...]
    metric: str
    contrast: Mapping[str, Any]
    relation: str
    tolerance: float
    minimum_n: int
    family: str
    platform: str
    group: str
    words: str
    experiment: str
    command: str
    minutes: float
    disk_mib: float
    points: tuple[Point, ...]

    @property
    def row_id(self) -> str:
        """The name of its verdict: `V/saves-fall`."""
        where = self.group if self.platform != "container-x86" else f"{self.group}-x86"
        return f"{where}/{self.id}"

    @property
    def wanted(self) -> str:
        """The relation in words."""
        percent = f"{100 * self.tolerance:g} %"
        match self.relation, self.contrast["kind"]:
            case _, "growth-to":
                return f"{self.contrast['value']:g} times, within {percent}"
            case _, "explains":
                return f"saves avoided explain at least {100 * self.contrast['share']:g} % of it"
            case "below", _:
                return f"lower by more than {percent}" if self.tolerance else "lower"
            case "above", _:
                return f"higher by more than {percent}" if self.tolerance else "higher"
            case "not-above", _:
                return f"not higher by more than {percent}"
            case "not-below", _:
                return f"not lower by more than {percent}"
        return f"equal within {self.tolerance:g}" if self.tolerance else "equal"


@dataclass(frozen=True)
class Claims:
    """The file: its claims, one per platform, and the hash that verdicts carry."""

    claims: tuple[Claim, ...]
    sha256: str


def read_claims(path: Path = CLAIMS) -> Claims:
    """Read and check the file; raises InvalidData that names the place."""
    content = schemas.read_toml(path, "claims")
    claims: list[Claim] = []
    seen: set[str] = set()
    for number, one in enumerate(content["claims"]):
        place = f"{path}: at $.claims[{number}] ({one['id']})"
        if one["id"] in seen:
            raise InvalidData(f"{place}: the id stands twice; expected another")
        seen.add(one["id"])
        _check(one, content, place)
        for platform, experiment in one["where"].items():
            rules = content["platforms"][platform]
            cost = content["experiments"][experiment][platform]
            claims.append(
                Claim(
                    **{key: value for key, value in one.items() if key not in ("where", "section")},
                    section=tuple(one["section"]),
                    platform=platform,
                    group=rules["group"],
                    words=rules["words"],
                    experiment=experiment,
                    **cost,
                    points=tuple(_points(one["contrast"], rules)),
                )
            )
    return Claims(tuple(claims), hashlib.sha256(schemas.canonical(content)).hexdigest())


def _check(one: Mapping[str, Any], content: Mapping[str, Any], place: str) -> None:
    columns = schemas.schema("summary-row")
    metrics = {
        name
        for name, rule in columns["properties"].items()
        if rule.get("$ref", "") in ("#/$defs/amount", "#/$defs/count")
    }
    exact = one["contrast"]["kind"] in ("exact", "growth-to")
    for what, found, known in (
        ("metric", one["metric"], metrics),
        ("family", one["family"], content["families"]),
        *(("platform", name, content["platforms"]) for name in one["where"]),
        *(("experiment", name, content["experiments"]) for name in one["where"].values()),
    ):
        if found not in known:
            raise InvalidData(
                f"{place}: no such {what} {found!r}; known: {', '.join(sorted(known))}"
            )
    for platform, experiment in one["where"].items():
        if platform not in content["experiments"][experiment]:
            raise InvalidData(
                f"{place}: where says {experiment} decides it on {platform}, but "
                f"experiments.{experiment} has no {platform}"
            )
        if (
            one["contrast"]["kind"] == "models"
            and len(content["platforms"][platform]["models"]) < 2
        ):
            raise InvalidData(f"{place}: compares models, but {platform} has only one")
    if (one["relation"] == "equal") is not exact:
        raise InvalidData(
            f"{place}: relation {one['relation']!r} with contrast {one['contrast']['kind']!r}; "
            "expected 'equal' with 'exact' and 'growth-to' and only there"
        )


def _points(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> list[Point]:
    """The points of a claim: one function below for each kind of contrast."""
    return list(_KINDS[contrast["kind"]](contrast, rules))


def _cell(
    rules: Mapping[str, Any], policy: str, concurrency: int, model: str | None = None
) -> Cell:
    model = model or rules["models"][0]
    return Cell(policy, concurrency, model, rules["vlen_bits"] or None, rules["scope"])


def _over(label: str, upper: Cell, lower: Cell, target: float | None = None) -> Point:
    """The ratio of one cell to another."""
    return Point(label, ((1.0, upper), (-1.0, lower)), target=target)


def _policies(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Point]:
    several = len(contrast["controls"]) > 1
    for control in contrast["controls"]:
        for c in contrast["concurrencies"]:
            label = f"c={c}, against {control}" if several else f"c={c}"
            yield _over(label, _cell(rules, contrast["treatment"], c), _cell(rules, control, c))


def _growth(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Point]:
    """From one concurrency to the next; with a `value`, which "growth-to" has, as its target."""
    policy = contrast["policy"]
    for low, high in itertools.pairwise(contrast["concurrencies"]):
        yield _over(
            f"c={low} to {high}",
            _cell(rules, policy, high),
            _cell(rules, policy, low),
            contrast.get("value"),
        )


def _gain_growth(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Point]:
    low, high = contrast["concurrencies"]
    treatment, control = contrast["treatment"], contrast["control"]
    yield Point(
        f"gain at c={high} over gain at c={low}",
        (
            (1.0, _cell(rules, treatment, high)),
            (-1.0, _cell(rules, control, high)),
            (-1.0, _cell(rules, treatment, low)),
            (1.0, _cell(rules, control, low)),
        ),
    )


def _models(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Point]:
    policy = contrast["policy"]
    for small, large in itertools.pairwise(rules["models"]):
        for c in contrast["concurrencies"]:
            yield _over(
                f"{small} to {large}, c={c}",
                _cell(rules, policy, c, large),
                _cell(rules, policy, c, small),
            )


def _explains(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Point]:
    for c in contrast["concurrencies"]:
        yield _over(
            f"c={c}",
            _cell(rules, contrast["control"], c),
            _cell(rules, contrast["treatment"], c),
        )


def _exact(contrast: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Point]:
    for point in contrast["points"]:
        bits, divisor = point["vlen_bits"], point["divisor"]
        label = f"VLEN {bits}" if divisor == 1 else f"VLEN {bits}, over {divisor:g} B"
        for c in contrast["concurrencies"]:
            cell = Cell(contrast["policy"], c, rules["models"][0], bits, rules["scope"])
            yield Point(f"{label}, c={c}", ((1.0, cell),), divisor, point["value"])


_KINDS = {
    "policies": _policies,
    "growth": _growth,
    "growth-to": _growth,
    "gain-growth": _gain_growth,
    "models": _models,
    "explains": _explains,
    "exact": _exact,
}
