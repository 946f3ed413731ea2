"""artifact/policies.toml: what each policy, in which scope and variant, sets.

Promise: what comes out is complete (every knob of the scheduler has a value); what does not go
together (a scope for the kernel's own scheduler, a variant of another policy) is refused with one
line before anything is built.
Limit: whether a setting does what its name says is for the guest to prove (board/agent).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from toolchain.errors import InvalidData, UsageError
from toolchain.paths import REPO

POLICIES = REPO / "artifact" / "policies.toml"


@dataclass(frozen=True)
class Policies:
    """The file, read and checked."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path = POLICIES) -> "Policies":
        """Read it; raises InvalidData when it is not as its schema says or names no such knob."""
        content = schemas.read_toml(path, "policies")
        policies, variants = content["policies"].items(), content["variants"].items()
        sets = [
            (f"policies.{n}.scheduler", p["scheduler"]) for n, p in policies if "scheduler" in p
        ]
        sets += [(f"variants.{n}", variant) for n, variant in variants]
        known = content["scheduler"]["knobs"]
        for place, one in sets:
            if unknown := one["knobs"].keys() - known.keys():
                raise InvalidData(
                    f"{path}: at {place}.knobs: no such knob {min(unknown)!r}; "
                    f"known: {', '.join(known)}"
                )
        return cls(content)

    def known(self, policy: str) -> str:
        """Return `policy`; raises UsageError when there is no such one."""
        known = self.content["policies"]
        if policy not in known:
            raise UsageError(f"--policy {policy}: no such policy; known: {', '.join(known)}")
        return policy

    def has_scope(self, policy: str) -> bool:
        """Whether the policy has a scheduler of its own, which schedules the server or all."""
        return "scheduler" in self.content["policies"][policy]

    def scope(self, policy: str, scope: str | None, default: str) -> str | None:
        """The scope of a run: as typed, else the default, None where the policy has none."""
        if not self.has_scope(policy):
            if scope is not None:
                raise UsageError(
                    f"--scope {scope}: {policy} is the kernel's own scheduler, which has no scope"
                )
            return None
        if scope is None:
            return default
        choices = schemas.schema("scheduler")["properties"]["scope"]["enum"]
        if scope not in choices:
            raise UsageError(f"--scope {scope}: expected {' or '.join(choices)}")
        return scope

    def variants_of(self, policy: str) -> list[str]:
        """The names of the policy's variants."""
        return [n for n, one in self.content["variants"].items() if policy in one["policies"]]

    def variant(self, policy: str, variant: str | None) -> str | None:
        """Return `variant`; raises UsageError when the policy has no such one."""
        if variant is not None and variant not in (known := self.variants_of(policy)):
            raise UsageError(
                f"--variant {variant}: {policy} has no such variant; "
                + (f"known: {', '.join(known)}" if known else "it has none")
            )
        return variant

    def scheduling(self, policy: str, scope: str | None, variant: str | None) -> dict[str, Any]:
        """The cell's `scheduling`: all that the policy sets, the server's flags apart."""
        one = self.content["policies"][policy]
        return {
            "scheduler": self._scheduler(one["scheduler"], scope, variant) if scope else None,
            "base_slice_ns": one.get("base_slice_ns"),
            "cpuset": one.get("cpuset"),
            "pinned_threads": one.get("pinned_threads", 0),
            "harts_first": one.get("harts_first", False),
            "environment": dict(one.get("environment", {})),
        }

    def flags(self, policy: str, flags: Mapping[str, str | bool]) -> dict[str, str | bool]:
        """The server's flags under the policy: `flags` with the policy's in their places."""
        return {**flags, **self.content["policies"][policy].get("flags", {})}

    def _scheduler(self, own: Mapping[str, Any], scope: str, variant: str | None) -> dict[str, Any]:
        common = self.content["scheduler"]
        change = self.content["variants"][variant] if variant else {}
        rule = change.get("rules", {}).get(own["policy"])
        return {
            "policy": own["policy"],
            "mode": change.get("mode", common["mode"]),
            "scope": scope,
            "knobs": {
                **common["knobs"],
                **own["knobs"],
                **change.get("knobs", {}),
                **({"rule": rule} if rule else {}),
            },
        }
