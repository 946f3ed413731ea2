"""The kernel configuration and its lint: each kind of fault is planted and must be named.

Promise: no planted fault passes, every message says what, got and expected, and a good
configuration passes.
Limit: works on small made-up Kconfig trees; that the real fragment resolves on the real kernel is
checked by the same lint inside kernel/build.sh.
"""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel import lint

KERNEL = Path(lint.__file__).parent
FRAGMENT = KERNEL / "config" / "virtual.fragment"
FORBIDDEN = KERNEL / "config" / "forbidden.toml"

KCONFIG = """\
config PREEMPT
\tbool "full preemption"
config NR_CPUS
\tint "harts"
menuconfig MODULES
\tbool "modules"
config LKDTM
\ttristate "crash test"
config LOCALVERSION
\tstring "suffix"
config MODULE_SIG
\tbool "signing"
config IPV6
\ttristate "IPv6"
config BUILD_SALT
\tstring "salt"
"""
GOOD_FRAGMENT = """\
# comment
CONFIG_PREEMPT=y
CONFIG_NR_CPUS=64

CONFIG_LKDTM=m
CONFIG_LOCALVERSION="-x"
# CONFIG_IPV6 is not set
"""
GOOD_CONFIG = """\
# Linux/riscv Kernel Configuration
CONFIG_PREEMPT=y
CONFIG_NR_CPUS=64
CONFIG_LKDTM=m
CONFIG_LOCALVERSION="-x"
CONFIG_BUILD_SALT=""
# CONFIG_MODULE_SIG is not set
"""
GOOD_FORBIDDEN = """\
[reproducible]
MODULE_SIG = "made-up key"
BUILD_SALT = "varies"
[lean]
IPV6 = "not used"
"""

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Lint a good set of files in which the keyword arguments replace one or more."""

    def run_lint(**changed: str) -> int:
        files = {
            "fragment": GOOD_FRAGMENT,
            "config": GOOD_CONFIG,
            "forbidden": GOOD_FORBIDDEN,
            "kconfig": KCONFIG,
            **changed,
        }
        source = tmp_path / "source" / "init"
        source.mkdir(parents=True, exist_ok=True)
        (source / "Kconfig").write_text(files.pop("kconfig"))
        argv = ["--source", str(tmp_path / "source")]
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            argv += [f"--{name}", str(tmp_path / name)]
        return lint.main(argv)

    return run_lint


def test_a_good_configuration_passes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    streams = capsys.readouterr()
    assert streams.out == "kernel config: 5 wanted options set, nothing forbidden is on\n"
    assert streams.err == ""


PLANTED = {
    "dropped by Kconfig": (
        {"config": GOOD_CONFIG.replace("CONFIG_PREEMPT=y\n", "")},
        ["CONFIG_PREEMPT (fragment line 2): wanted y, got n in the resolved configuration"],
    ),
    "explicitly off": (
        {"config": GOOD_CONFIG.replace("CONFIG_PREEMPT=y", "# CONFIG_PREEMPT is not set")},
        ["CONFIG_PREEMPT (fragment line 2): wanted y, got n in the resolved configuration"],
    ),
    "clamped number": (
        {"config": GOOD_CONFIG.replace("=64", "=32")},
        ["CONFIG_NR_CPUS (fragment line 3): wanted 64, got 32 in the resolved configuration"],
    ),
    "built in instead of a module": (
        {"config": GOOD_CONFIG.replace("LKDTM=m", "LKDTM=y")},
        ["CONFIG_LKDTM (fragment line 5): wanted m, got y in the resolved configuration"],
    ),
    "other string": (
        {"config": GOOD_CONFIG.replace('"-x"', '""')},
        ['CONFIG_LOCALVERSION (fragment line 6): wanted "-x", got "" in the resolved'],
    ),
    "wanted off, and forbidden, but on": (
        {"config": GOOD_CONFIG + "CONFIG_IPV6=y\n"},
        [
            "CONFIG_IPV6 (fragment line 7): wanted n, got y in the resolved configuration",
            "CONFIG_IPV6: is y in the resolved configuration, but forbidden: not used",
        ],
    ),
    "forbidden and on": (
        {"config": GOOD_CONFIG.replace("# CONFIG_MODULE_SIG is not set", "CONFIG_MODULE_SIG=y")},
        ["CONFIG_MODULE_SIG: is y in the resolved configuration, but forbidden: made-up key"],
    ),
    "forbidden string": (
        {"config": GOOD_CONFIG.replace('BUILD_SALT=""', 'BUILD_SALT="now"')},
        ['CONFIG_BUILD_SALT: is "now" in the resolved configuration, but forbidden: varies'],
    ),
    "forbidden but asked for": (
        {
            "fragment": GOOD_FRAGMENT + "CONFIG_MODULE_SIG=y\n",
            "config": GOOD_CONFIG.replace("# CONFIG_MODULE_SIG is not set", "CONFIG_MODULE_SIG=y"),
        },
        [
            "CONFIG_MODULE_SIG (fragment line 8): asked for, but forbidden: made-up key",
            "CONFIG_MODULE_SIG: is y in the resolved configuration, but forbidden: made-up key",
        ],
    ),
    "misspelt wish": (
        {"fragment": GOOD_FRAGMENT + "CONFIG_PREMPT=y\n"},
        ["CONFIG_PREMPT (fragment line 8): no Kconfig file of this kernel defines it"],
    ),
    "misspelt wish to be off": (
        {"fragment": GOOD_FRAGMENT + "# CONFIG_IPV7 is not set\n"},
        ["CONFIG_IPV7 (fragment line 8): no Kconfig file of this kernel defines it"],
    ),
    "misspelt ban": (
        {"forbidden": GOOD_FORBIDDEN + 'IPV5 = "not used"\n'},
        ["CONFIG_IPV5 (forbidden list): no Kconfig file of this kernel defines it"],
    ),
}


@pytest.mark.parametrize(("changed", "expected"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_fault_is_one_line_and_exit_1(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, str],
    expected: list[str],
) -> None:
    assert run(**changed) == 1
    streams = capsys.readouterr()
    lines = streams.err.splitlines()
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(f"kernel config: {beginning}")
    assert streams.out == ""


def test_all_faults_are_told_at_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config="CONFIG_MODULE_SIG=y\n") == 1
    assert len(capsys.readouterr().err.splitlines()) == 5


MALFORMED = {
    "no value": ({"fragment": "CONFIG_PREEMPT\n"}, 'fragment:1: got "CONFIG_PREEMPT", expected'),
    "unquoted string": ({"fragment": "CONFIG_PREEMPT=yes\n"}, 'got "CONFIG_PREEMPT=yes"'),
    "trailing comment": ({"fragment": "CONFIG_PREEMPT=y # x\n"}, 'got "CONFIG_PREEMPT=y # x"'),
    "space around =": ({"fragment": "CONFIG_PREEMPT = y\n"}, 'got "CONFIG_PREEMPT = y"'),
    "name without prefix": ({"fragment": "PREEMPT=y\n"}, 'got "PREEMPT=y"'),
    "bad is-not-set": ({"fragment": "# CONFIG_IPV6 not set\n"}, 'got "# CONFIG_IPV6 not set"'),
    "assigned twice": (
        {"fragment": GOOD_FRAGMENT + "CONFIG_PREEMPT=y\n"},
        "fragment:8: CONFIG_PREEMPT is assigned again (first in line 2)",
    ),
    "broken .config": ({"config": "<<<<<<< HEAD\n"}, 'config:1: got "<<<<<<< HEAD"'),
    "bad TOML": ({"forbidden": "[a\n"}, "forbidden: not valid TOML:"),
    "ban without table": ({"forbidden": 'IPV6 = "x"\n'}, "IPV6 stands outside a table"),
    "ban without reason": ({"forbidden": '[a]\nIPV6 = " "\n'}, "a.IPV6 has no reason"),
    "ban listed twice": (
        {"forbidden": '[a]\nIPV6 = "x"\n[b]\nIPV6 = "y"\n'},
        "IPV6 is listed twice",
    ),
    "no kernel source": ({"kconfig": "# nothing\n"}, "no Kconfig file defines an option"),
}


@pytest.mark.parametrize(("changed", "expected"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_one_line_and_exit_4(
    run: Run, capsys: pytest.CaptureFixture[str], changed: dict[str, str], expected: str
) -> None:
    assert run(**changed) == 4
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.splitlines()) == 1


def test_a_missing_file_is_one_line_and_exit_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no such file")
    argv = ["--fragment", missing, "--forbidden", missing, "--config", missing]
    assert lint.main([*argv, "--source", str(tmp_path)]) == 4
    err = capsys.readouterr().err
    assert err == f"kernel config: {missing}: cannot be read: No such file or directory\n"


def test_the_lint_runs_alone_with_the_standard_library(tmp_path: Path) -> None:
    """build.sh starts it as a script, outside the repository, in isolated mode."""
    done = subprocess.run(
        [sys.executable, "-I", str(KERNEL / "lint.py"), "--fragment", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--forbidden" in done.stderr


# What the design stands on; a fragment without one of these would still pass its own lint.
PROMISED = {
    "PREEMPT": "y",
    "RISCV_ISA_V": "y",
    "RISCV_ISA_V_DEFAULT_ENABLE": "y",
    "RISCV_ISA_V_PREEMPTIVE": "y",
    "SMP": "y",
    "HZ_250": "y",
    "NO_HZ_IDLE": "y",
    "HIGH_RES_TIMERS": "y",
    "SCHED_CLASS_EXT": "y",
    "DEBUG_INFO_BTF": "y",
    "BPF_JIT_ALWAYS_ON": "y",
    "BPF_EVENTS": "y",
    "KPROBES": "y",
    "KALLSYMS_ALL": "y",
    "CPUSETS": "y",
    "FAIR_GROUP_SCHED": "y",
    "MODULE_UNLOAD": "y",
    "LKDTM": "m",
    "VIRTIO_CONSOLE": "y",
    "SERIAL_8250_CONSOLE": "y",
    "BLK_DEV_INITRD": "y",
}


def test_the_virtual_board_asks_for_what_the_design_promises() -> None:
    wanted = lint.read_config(FRAGMENT)
    assert {name: wanted[name].value for name in PROMISED if name in wanted} == PROMISED
    assert int(wanted["NR_CPUS"].value) >= 8


def test_the_fragment_asks_for_nothing_forbidden() -> None:
    forbidden = lint.read_forbidden(FORBIDDEN)
    on = {name for name, option in lint.read_config(FRAGMENT).items() if option.value != "n"}
    assert on.isdisjoint(forbidden)
    assert {"MODULE_SIG", "RANDSTRUCT", "GCC_PLUGINS", "RANDOMIZE_BASE", "IPV6"} <= set(forbidden)


def test_the_recipe_mounts_every_file_that_build_sh_reads() -> None:
    image = tomllib.loads((KERNEL / "recipe.toml").read_text())["image"]
    script = (KERNEL / image["script"]).read_text()
    for name in image["inputs"]:
        assert (KERNEL / name).is_file()
        assert f"$recipe/{name}" in script
