"""xstate_probe says what other sources say, and measures the states that it names.

Promise: sizes, offsets and masks equal the `cpuid` tool's, the kernel's own and, where it can be
read, its boot log; every measurement is of the state it names, by the processor's own word.
Limit: x86-64; the processors that the tests run on decide which components are looked at.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import schemas
from board.agent.system import kernel_log
from board.x86.board import require_processor
from board.x86.job import container
from toolchain.command import Completed, run
from toolchain.errors import EnvironmentUnfit
from toolchain.inside import entering
from toolchain.recipe import build

pytestmark = pytest.mark.boot
LEAF = 0xD
X87, SSE, AVX, PKRU = 0, 1, 2, 9


def inside(directory: Path, *argv: str) -> Completed:
    """Run a command in the tree x86, the probe in /probe, `directory` as /out."""
    command = entering(
        ["sh", "-c", 'exec "$@" 2>&1', "sh", *argv],
        {"/probe": build("kernel/xstate-probe")},
        {"/out": directory},
        directory / "mounts",
        name=container()["tree"],
    )
    return run(command, what="xstate_probe", env=container()["environment"], check=False)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        require_processor()
    except EnvironmentUnfit as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("xstate")
    argv = ("/probe/xstate_probe", "--out", "/out/xstate.json", "--passes", "100", "--repeats", "5")
    done = inside(directory, *argv)
    assert (done.returncode, done.stdout) == (0, "")
    return schemas.read(directory / "xstate.json", "xstate")


@pytest.fixture(scope="module")
def leaves(probe: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, int]]:
    """CPUID leaf 0xD by subleaf, as Debian's cpuid tool reads it on one CPU."""
    text = inside(tmp_path_factory.mktemp("cpuid"), "cpuid", "-1", "-r").stdout
    found = {}
    line = r"0x([0-9a-f]{8}) 0x([0-9a-f]{2}): (eax=.*)"
    for leaf, subleaf, rest in re.findall(line, text):
        if int(leaf, 16) == LEAF:
            pairs = (word.split("=") for word in rest.split())
            found[int(subleaf, 16)] = {name: int(value, 16) for name, value in pairs}
    return found


def test_sizes_are_the_cpuid_tools(probe: Any, leaves: dict[int, dict[str, int]]) -> None:
    main, more = leaves[0], leaves[1]
    assert int(probe["user_components"], 16) == main["eax"] | main["edx"] << 32
    assert probe["enabled_standard_bytes"] == main["ebx"]
    assert probe["supported_standard_bytes"] == main["ecx"]
    assert int(probe["supervisor_components"], 16) == more["ecx"] | more["edx"] << 32
    assert probe["enabled_compacted_bytes"] == (more["ebx"] if more["eax"] & 2 else None)
    names = ("xsaveopt", "xsavec", "xgetbv1", "xsaves")
    assert [probe["instructions"][name] for name in names] == [
        bool(more["eax"] >> bit & 1) for bit in range(4)
    ]
    extended = {one["number"]: one for one in probe["components"] if one["number"] >= AVX}
    assert extended.keys() == leaves.keys() - {0, 1}
    for number, one in extended.items():
        leaf = leaves[number]
        assert one["bytes"] == leaf["eax"]
        assert one["supervisor"] == bool(leaf["ecx"] & 1)
        assert one["aligned"] == bool(leaf["ecx"] & 2)
        assert one["offset"] == (None if one["supervisor"] else leaf["ebx"])


def test_the_kernel_sees_the_same(probe: Any) -> None:
    kernel = probe["kernel"]
    assert kernel["area_components"] == probe["xcr0"]
    # With AMX the area grows when a process asks for it.
    assert kernel["area_bytes"] <= probe["enabled_standard_bytes"]
    if int(probe["xcr0"], 16) < 1 << 17:
        assert kernel["area_bytes"] == probe["enabled_standard_bytes"]
    for answer in (kernel["supported"], kernel["permitted"]):
        assert answer is None or int(answer, 16) & ~int(probe["xcr0"], 16) == 0


def test_the_boot_log_says_the_same(probe: Any) -> None:
    log = "\n".join(line for _, _, line in kernel_log())
    enabled = re.search(r"Enabled xstate features (0x[0-9a-f]+), context size is (\d+)", log)
    if enabled is None:
        pytest.skip("the kernel's log cannot be read here, or has lost its beginning")
    user, supervisor = (int(probe[f"{kind}_components"], 16) for kind in ("user", "supervisor"))
    assert int(probe["xcr0"], 16) == int(enabled.group(1), 16) & user
    assert int(enabled.group(1), 16) & ~(user | supervisor) == 0
    if "using 'compacted' format" in log:
        assert probe["enabled_compacted_bytes"] == int(enabled.group(2))
    else:
        assert probe["enabled_standard_bytes"] == int(enabled.group(2))
    sizes = dict(re.findall(r"xstate_sizes\[ ?(\d+)\]: +(\d+)", log))
    here = {str(one["number"]): str(one["bytes"]) for one in probe["components"]}
    assert sizes and all(here[number] == size for number, size in sizes.items())


def test_each_state_is_the_one_it_is_called(probe: Any) -> None:
    rows = [row for row in probe["measurements"] if row["operation"] != "memcpy"]
    assert rows
    for row in rows:
        assert row["fault"] is None
        components = int(row["components"], 16) & ~(1 << PKRU)
        if row["in_use"] is None:
            continue
        in_use = int(row["in_use"], 16) & components
        assert in_use == (0 if row["state"] == "init" else components), row


def test_all_is_measured_that_there_is(probe: Any) -> None:
    enabled = int(probe["measured_components"], 16)
    numbers = [number for number in range(63) if enabled >> number & 1]
    alone = {1 << number for number in numbers}
    larger = {sum(1 << number for number in numbers[: n + 1]) for n in range(len(numbers))}
    rows = probe["measurements"]
    assert {int(row["components"], 16) for row in rows} == alone | larger
    operations = {"xsave", "xrstor", "memcpy"}
    operations |= {"xsaveopt"} if probe["instructions"]["xsaveopt"] else set()
    if probe["instructions"]["xsavec"]:
        operations |= {"xsavec", "xrstor-compacted"}
    assert {row["operation"] for row in rows} == operations
    assert {row["memory"] for row in rows} == {"hot", "cold"}
    for row in rows:
        order = ("min", "lower_quartile", "median", "upper_quartile", "max")
        for spread in (row["ns"], row["tsc_ticks"]):
            assert [spread[name] for name in order] == sorted(spread[name] for name in order)


def test_areas_end_where_their_last_component_does(probe: Any) -> None:
    sizes = {one["number"]: one for one in probe["components"]}
    for row in probe["measurements"]:
        components = int(row["components"], 16)
        numbers = [number for number in sizes if components >> number & 1]
        assert row["payload_bytes"] == sum(sizes[number]["bytes"] for number in numbers)
        if row["operation"] in ("xsave", "xsaveopt", "xrstor"):
            ends = [sizes[n]["offset"] + sizes[n]["bytes"] for n in numbers if n >= AVX]
            assert row["area_bytes"] == max([576, *ends])


REFUSED = [
    (("--passes", "0"), "--passes: got '0', expected an integer of 1..1000000"),
    (("--repeats", "x"), "--repeats: got 'x', expected an integer of 1..1001"),
    (("word",), "'word': expected options only; see --help"),
    ((), "--out is missing; see --help"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_wrong_options_are_named(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = inside(tmp_path, "/probe/xstate_probe", *options)
    assert (done.returncode, done.stdout) == (2, f"xstate_probe: {message}\n")


def test_a_folder_that_is_not_there_is_named(probe: Any, tmp_path: Path) -> None:
    argv = ("/probe/xstate_probe", "--passes", "1", "--repeats", "1", "--out", "/out/none/x.json")
    done = inside(tmp_path, *argv)
    assert done.returncode == 3
    assert "/out/none/x.json: cannot write: No such file or directory" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"mounts"}
