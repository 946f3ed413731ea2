"""What `./inv check-published` does.

Promise: nothing is written before everything was read and audited.  Limit: see result.py.
"""

from pathlib import Path

from rich.console import Console

import schemas
from analysis.audit.result import EXPECTED, as_expected, audit, read_expected
from analysis.audit.show import show
from analysis.published import PUBLISHED, read
from toolchain.errors import Differs, UsageError
from toolchain.paths import REPO


def check(json_file: Path | None, tables: Path | None, accept: bool) -> None:
    """Audit the tables of a folder, print, and write the result where asked.

    Raises UsageError (no such folder), InvalidData (a file is broken) and Differs (a verdict is not
    the expected one); with `accept` the verdicts found become the expected ones instead.
    """
    if tables is not None and not tables.is_dir():
        raise UsageError(
            f"--tables {tables}: no such folder, expected one with the files of "
            f"{PUBLISHED.relative_to(REPO)}"
        )
    published = read(tables or PUBLISHED)
    expected = None if accept else read_expected()
    document = audit(published, expected)
    if json_file:
        schemas.write(json_file, document, "audit")
    show(document, Console())
    if accept:
        schemas.write(EXPECTED, as_expected(document), "audit-expected")
    if expected and expected["inputs"] != document["inputs"]:
        changed = [
            name
            for name, digest in document["inputs"].items()
            if expected["inputs"].get(name) != digest
        ]
        print(f"the expected verdicts belong to another content of {', '.join(changed)}")
    if document["unexpected"]:
        names = [item["id"] for item in document["unexpected"]]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise Differs(
            f"check-published: {names[0]}{more}: not the expected verdict; see the lines above, "
            "or --accept when the change is meant"
        )
