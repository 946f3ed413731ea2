"""artifact/claims.toml as objects: claims, and the cells that each of their points compares.

Promise: what is returned refers only to metrics, experiments, families and platforms that exist;
the first that does not is named.  Nothing here looks at a run.
Limit: whether a claim says what the report says is a matter of reading both.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
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
    """Which runs: those of one policy, concurrency, model and VLEN; None leaves it open.

    scope: of the policies that have one.  Policies as they are, with nothing beside the server.
    """

    policy: str
    concurrency: int | None
    model: str
    vlen_bits: int | None
    scope: str

    @property
    def label(self) -> str:
        """The cell in a few words."""
        words = [self.policy, *([self.scope] if self.policy in with_scheduler() else [])]
        words.append(self.model)
        if self.concurrency is not None:
            words.append(f"c={self.concurrency}")
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
    models: Sequence[str] = rules["models"]
    vlen = rules["vlen_bits"] or None

    def cell(policy: str, concurrency: int | None, model: str = models[0]) -> Cell:
        return Cell(policy, concurrency, model, vlen, rules["scope"])

    match contrast["kind"]:
        case "policies":
            several = len(contrast["controls"]) > 1
            return [
                Point(
                    f"c={c}, against {control}" if several else f"c={c}",
                    ((1.0, cell(contrast["treatment"], c)), (-1.0, cell(control, c))),
                )
                for control in contrast["controls"]
                for c in contrast["concurrencies"]
            ]
        case "growth":
            return [
                Point(
                    f"c={low} to {high}",
                    ((1.0, cell(contrast["policy"], high)), (-1.0, cell(contrast["policy"], low))),
                )
                for low, high in itertools.pairwise(contrast["concurrencies"])
            ]
        case "growth-to":
            low, high = contrast["concurrencies"]
            policy = contrast["policy"]
            return [
                Point(
                    f"c={low} to {high}",
                    ((1.0, cell(policy, high)), (-1.0, cell(policy, low))),
                    target=contrast["value"],
                )
            ]
        case "gain-growth":
            low, high = contrast["concurrencies"]
            treatment, control = contrast["treatment"], contrast["control"]
            return [
                Point(
                    f"gain at c={high} over gain at c={low}",
                    (
                        (1.0, cell(treatment, high)),
                        (-1.0, cell(control, high)),
                        (-1.0, cell(treatment, low)),
                        (1.0, cell(control, low)),
                    ),
                )
            ]
        case "models":
            return [
                Point(
                    f"{small} to {large}, c={c}",
                    (
                        (1.0, cell(contrast["policy"], c, large)),
                        (-1.0, cell(contrast["policy"], c, small)),
                    ),
                )
                for small, large in itertools.pairwise(models)
                for c in contrast["concurrencies"]
            ]
        case "explains":
            return [
                Point(
                    f"c={c}",
                    ((1.0, cell(contrast["control"], c)), (-1.0, cell(contrast["treatment"], c))),
                )
                for c in contrast["concurrencies"]
            ]
    return [
        Point(
            f"VLEN {point['vlen_bits']}, over {point['divisor']:g} B"
            if point["divisor"] != 1
            else f"VLEN {point['vlen_bits']}",
            ((1.0, Cell(contrast["policy"], None, models[0], point["vlen_bits"], rules["scope"])),),
            point["divisor"],
            point["value"],
        )
        for point in contrast["points"]
    ]
