"""Git asked of the checkout: no answer is None, never an error."""

import re
import shutil
from pathlib import Path

import pytest

from toolchain.git import git_output
from toolchain.paths import REPO


def test_no_git_and_a_refusal_are_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert git_output(["no-such-verb"]) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_output(["rev-parse", "HEAD"]) is None


@pytest.mark.skipif(
    shutil.which("git") is None or not (REPO / ".git").exists(), reason="needs a clone, and Git"
)
def test_the_answer_has_no_line_end() -> None:
    assert re.fullmatch("[0-9a-f]{40}", git_output(["rev-parse", "HEAD"]) or "")
