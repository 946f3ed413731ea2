"""Verbs that judge a word, or how another program ended: their line and their exit code.

Limit: nothing is built and no test is run; pytest's exit codes are played.
"""

import os
from pathlib import Path

import pytest

from toolchain import inside
from toolchain.cli import main

NO_TEST = "error: test: no test is selected by -k 'zz': expected a part of a test's name\n"


def test_a_driver_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(inside.VARIABLE, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["build", "--driver", "nope"])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said == "error: --driver nope: expected one of userns, chroot, docker, nix\n"
    assert inside.VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (pytest.ExitCode.OK, 0, ""),
        (pytest.ExitCode.TESTS_FAILED, 1, ""),
        (pytest.ExitCode.INTERRUPTED, 130, "interrupted\n"),
        (pytest.ExitCode.INTERNAL_ERROR, 1, ""),
        (pytest.ExitCode.USAGE_ERROR, 2, NO_TEST),
        (pytest.ExitCode.NO_TESTS_COLLECTED, 2, NO_TEST),
    ],
)
def test_how_the_tests_ended(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    theirs: pytest.ExitCode,
    ours: int,
    says: str,
) -> None:
    monkeypatch.chdir(".")  # the verb goes to the checkout; this takes us back
    monkeypatch.setattr(pytest, "main", lambda _arguments: theirs)
    with pytest.raises(SystemExit) as ended:
        main(["test", "-k", "zz"])
    assert ended.value.code == ours
    assert capfd.readouterr().err == says


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shift", "99"], "the machine's icount_shift: found 99: 99 is greater than the maximum"),
        (["--shift=-1"], "the machine's icount_shift: found -1: -1 is less than the minimum of 0"),
        (["--quantum=-5"], "the machine's quantum_us: found -5: -5 is less than the minimum of 1"),
        (["--vlen", "64"], "vlen_bits=64: expected one of 128, 256, 512, 1024"),
        (["--vlen", "0"], "vlen_bits=0: expected one of 128, 256, 512, 1024"),
        (["--quantum", "0"], "the machine's quantum_us: found 0: 0 is less than the minimum of 1"),
        (["--shift", "3x"], "the machine's icount_shift: got '3x', expected an integer"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    def build(_name: str) -> None:
        raise AssertionError("a build was begun")

    monkeypatch.setattr("toolchain.recipe.build", build)
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *words])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("check-published --json .", 2, "cannot write .: it is a folder, expected the name of a "),
        ("check-published --json no/a", 3, "cannot write no/a: No such file or directory; "),
        ("check-published --tables none", 2, "--tables none: no such folder, expected one with "),
        ("analyze --json .", 2, "cannot write .: it is a folder, expected the name of a file"),
    ],
)
def test_folders_that_do_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: str,
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == code
    out, err = capfd.readouterr()
    assert err.startswith(f"error: {says}") and err.count("\n") == 1
    assert not out and not list(tmp_path.iterdir())
