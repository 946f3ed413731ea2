"""toolchain.nix_driver, artifacts.nix and flake.nix with a real Nix, whose store starts empty.

The tree is a small one but where the real one is meant.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from toolchain_checkout import (
    Checkout,
    add_rooms,
    eventually,
    names,
    processes_with,
    small_deb,
)

from artifact import binaries, verify
from toolchain import inside
from toolchain.paths import REPO
from toolchain.recipe import Recipe, recipes
from toolchain.sources import source

pytestmark = pytest.mark.boot

BUILD = ("build", "--artifact", "kernel/x")
FLAKES = ("--extra-experimental-features", "nix-command flakes", "--option", "substitute", "false")
SEEN = """
    { env | sort; umask; pwd; hostname; id -u; id -g; touch f; mkdir d; stat -c '%a %u %n' f d
    grep -o lo: /proc/net/dev; ip addr show lo | grep -o 127.0.0.1; ip route
    ls / /usr/bin; ls /nix/store 2>/dev/null || true; cat /recipe/x.sh | grep -c .
    touch /usr/x 2>/dev/null && echo writable || true
    } >/out/out
    """


@pytest.fixture
def env(nix_bin: Path) -> Mapping[str, str]:
    path = f"{nix_bin}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"BANANAOS_DRIVER": "nix", "PATH": path}


def test_a_build_sees_what_it_sees_with_namespaces(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    """In Nix's sandbox, with no network, nothing of the store but the tree."""
    checkout.add_recipe("x", SEEN)
    first, second = (
        checkout.run(*BUILD, env={**chosen, "XDG_CACHE_HOME": f"{checkout.home}/{n}"}).built / "out"
        for n, chosen in enumerate(({}, env))
    )
    assert second.read_text() == first.read_text()
    assert "127.0.0.1" in second.read_text()
    assert "writable" not in second.read_text()
    assert first.stat().st_mode == second.stat().st_mode


def test_needs_trees_and_modes(checkout: Checkout, env: Mapping[str, str]) -> None:
    """A store keeps no modes; a tree that is looked into has its own all the same."""
    checkout.add_package("of-guest", small_deb("of-guest", b"g"), tree="guest")
    checkout.add_recipe("a", "echo 1 >/out/out; chmod 755 /out/out\n")
    checkout.add_recipe(
        "x",
        "cat /in/kernel/a/out /trees/guest/usr/share/of-guest >/out/out\n"
        "cd /trees/guest; stat -c '%a %Y %n' . usr/share/of-guest etc/passwd >>/out/out\n"
        "cat /recipe/d/one.c /recipe/d/two.h >>/out/out\n",
    )
    (checkout.root / "kernel" / "d").mkdir()
    for name in ("one.c", "two.h", "three.x"):
        (checkout.root / "kernel" / "d" / name).write_text(f"{name}\n")
    with (checkout.root / "kernel" / "recipe.toml").open("a") as recipe:
        recipe.write('needs = ["kernel/a"]\ntrees = ["guest"]\ninputs = ["d/*.[ch]"]\n')
    first, second = (
        checkout.run(*BUILD, env={**chosen, "XDG_CACHE_HOME": f"{checkout.home}/{n}"}).built / "out"
        for n, chosen in enumerate(({}, env))
    )
    kept = [[line for line in out.read_text().splitlines() if not line.endswith(" .")]
            for out in (first, second)]  # fmt: skip
    assert kept[0] == kept[1]
    assert "644 1700000000 usr/share/of-guest" in kept[1]


def test_a_checkout_whose_name_is_no_path_of_the_language(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    odd = checkout.root.with_name('a ~b@ "${c}')
    checkout.root.rename(odd)
    checkout.root = odd
    assert (checkout.run(*BUILD, env=env).built / "out").read_text() == "made\n"


def test_a_failing_script_keeps_its_log_and_names_it(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    checkout.add_recipe("x", "echo first; echo last words >&2; exit 9\n")
    done = checkout.run(*BUILD, env=env)
    assert done.code == 3
    log = checkout.cache / "logs" / "kernel-x.log"
    assert f"log: {log}" in done.error
    assert "last words" in log.read_text()
    assert not any(name.startswith("kernel-x") for name in names(checkout.cache / "artifacts"))


def test_other_outputs_than_promised(checkout: Checkout, env: Mapping[str, str]) -> None:
    checkout.add_recipe("x", "mkdir /out/out\n")
    done = checkout.run(*BUILD, env=env)
    assert done.code == 4
    assert "output out is not a plain file" in done.error


def test_an_interrupt_leaves_nothing_and_the_next_run_works(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    marker = f"7{os.getpid()}55"
    checkout.add_recipe("x", f"sleep {marker}\n")
    running = checkout.start(*BUILD, env=env)
    eventually(lambda: processes_with(marker), running)
    assert running.interrupt().code == 130
    assert processes_with(marker) == []
    assert names(checkout.cache / "build") == set()
    (checkout.root / "kernel" / "x.sh").write_text("echo made >/out/out\n")
    assert (checkout.run(*BUILD, env=env).built / "out").read_text() == "made\n"


def test_what_the_store_lacks_is_named_with_the_command_that_adds_it(
    checkout: Checkout, env: Mapping[str, str], nix_bin: Path
) -> None:
    """flake.nix, then `./inv fetch --nix`, then flake.nix again."""
    add_rooms(checkout)
    shutil.copy(REPO / "flake.nix", checkout.root)
    shutil.copy(REPO / "toolchain" / "sources.toml", checkout.root / "toolchain")
    checkout.downloads.mkdir(parents=True)
    for name in ("smollm2", "llama-cpp", "qemu"):
        wanted = source(name)
        (checkout.downloads / wanted.name).symlink_to(wanted)
    checkout.add_package("only-here", small_deb("only-here", os.urandom(8)))
    checkout.add_package("of-guest", small_deb("of-guest", b"g"), tree="guest")
    checkout.add_recipe("x", "echo made >/out/out\n")
    assert checkout.run("verify", "--accept").code == 0
    flake = f"path:{checkout.root}#"
    argv = [os.fspath(nix_bin / "nix"), *FLAKES, "build", "--no-link", "--print-out-paths"]
    argv.append(f'{flake}"kernel/x"')
    lacking = checkout.run_command(argv, env=env)
    assert lacking.code != 0
    # Whichever of the two is looked for first.
    assert re.search(r"bananaos-(busybox|tree-build\.tar) is not in the Nix store: run "
                     r"\./inv fetch --nix", lacking.err)  # fmt: skip
    done = checkout.run("fetch", "--nix", env=env)
    assert done.code == 0, done.err
    built = checkout.run_command(argv, env=env)
    assert built.code == 0, built.err
    shown = checkout.run_command(
        [os.fspath(nix_bin / "nix"), *FLAKES, "store", "cat", f"{built.out.strip()}/out"], env=env
    )
    assert shown.out == "made\n"
    assert "adding" not in checkout.run("fetch", "--nix", env=env).err, "once is enough"
    checkout.add_package("more", small_deb("more", b"more"))
    done = checkout.run("fetch", "--nix", env=env)
    assert done.code == 1
    assert "tree build: the store has what this checkout's lock says, flake.nix asks for" in (
        done.error
    )


def test_without_flakes_the_driver_works_and_nix_names_the_feature(
    checkout: Checkout, env: Mapping[str, str], nix_bin: Path
) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    assert (checkout.run(*BUILD, env=env).built / "out").read_text() == "made\n"
    done = subprocess.run(
        [nix_bin / "nix", "build", f"path:{REPO}#kernel"], capture_output=True, text=True
    )
    assert "experimental" in done.stderr and "'nix-command' is disabled" in done.stderr


@pytest.mark.parametrize(
    ("version", "why"),
    [("2.3.16", "Nix is too old: got 'nix-build (Nix) 2.3.16', needed is 2.4"), (None, "no Nix")],
)
def test_no_nix_of_use(checkout: Checkout, tmp_path: Path, version: str | None, why: str) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    for name in ("nix-build", "nix-store") if version else ():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} (Nix) {version}"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = checkout.run(*BUILD, env={"BANANAOS_DRIVER": "nix", "PATH": path})
    assert done.code == 3
    assert why in done.error
    done = checkout.run("fetch", "--nix", env={"PATH": path})
    assert (done.code, why in done.error) == (3, True)
    assert checkout.mirror.requests == [], "said before anything is downloaded"


def test_what_must_run_needs_another_driver(checkout: Checkout, env: Mapping[str, str]) -> None:
    code = (
        "import sys; sys.path[0] = sys.argv[1]\n"
        "from toolchain.inside import run_inside\n"
        "from toolchain.errors import EnvironmentUnfit\n"
        "try:\n    run_inside(['true'], what='run')\n"
        "except EnvironmentUnfit as exc:\n    print(exc)\n"
    )
    done = checkout.run_command([sys.executable, "-c", code, os.fspath(checkout.root)], env=env)
    assert "the driver nix cannot run this, only userns and chroot can; docker can" in done.out


# --- the real recipes and the real tree --------------------------------------------------------


def test_nix_finds_the_files_that_the_recipes_name(nix_bin: Path) -> None:
    """Patterns, other rooms' files, sources, needs: the same names inside as with other drivers."""
    expression = (
        "let all = import ./toolchain/artifacts.nix { root = ./.; trees = builtins.mapAttrs "
        "(_: t: t.layer_sha256) e.trees; busybox = e.busybox_nar_sha256; }; "
        "e = builtins.fromJSON (builtins.readFile ./artifact/expected/binaries.json); in "
        "builtins.mapAttrs (_: a: a.mounts) (builtins.intersectAttrs e.artifacts all)"
    )
    done = subprocess.run(
        [nix_bin / "nix-instantiate", "--eval", "--strict", "--json", "--expr", expression],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    seen: dict[str, str] = json.loads(done.stdout)
    wanted = {name: recipe for name, recipe in recipes().items() if not recipe.on_demand}
    assert set(seen) == set(wanted)
    for name, mounts in seen.items():
        inside_names = {line.split("\t")[2] for line in mounts.splitlines()}
        assert inside_names == _expected(wanted[name]), name


def _expected(recipe: Recipe) -> set[str]:
    """A file of another room, ../ROOM/FILE, is at /ROOM/FILE."""
    files = {os.path.normpath(f"/recipe/{name}") for name in recipe.files()}
    sources = {f"/src/{name}" for name in recipe.sources}
    return files | sources | {f"/in/{name}" for name in recipe.needs}


@pytest.mark.turn("nix")
def test_the_real_tree_gives_the_expected_bytes(
    nix_bin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{nix_bin}:{os.environ['PATH']}")
    monkeypatch.setenv(inside.VARIABLE, "nix")
    inside.refusal.cache_clear()
    inside.driver.cache_clear()
    try:
        rows = verify.verify(["nix"], only=["kernel/vstate-observer", "kernel/rvv-probe"])
        assert {(row.driver, row.verdict) for row in rows} == {("nix", "MATCH")}
    finally:
        inside.refusal.cache_clear()
        inside.driver.cache_clear()


@pytest.mark.long
def test_the_flake_builds_the_expected_bytes(nix_bin: Path, tmp_path: Path) -> None:
    """All of it: kernel and llama-server, too; an hour."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", REPO, clone], check=True)
    path = f"{nix_bin}:{os.environ['PATH']}"
    subprocess.run(
        ["./inv", "fetch", "--nix"], cwd=REPO, env={**os.environ, "PATH": path}, check=True
    )
    nix = [os.fspath(nix_bin / "nix"), *FLAKES]
    subprocess.run([*nix, "flake", "check"], cwd=clone, check=True)
    expected = binaries.read()["artifacts"]
    for name, artifact, file in (
        ("kernel", "kernel/image", "Image"),
        ("vstate-profiler", "kernel/vstate-profiler", "vstate_profiler.ko"),
        ("scx-vstate", "sched_ext/scx-vstate", "scx_vstate"),
        ("vstate-observer", "kernel/vstate-observer", "vstate_observer"),
        ("llama-server", "llama.cpp/server-riscv64", "llama-server"),
        ("llama-server-x86", "llama.cpp/server-x86-64", "llama-server"),
    ):
        done = subprocess.run(
            [*nix, "build", "--no-link", "--print-out-paths", f".#{name}"],
            cwd=clone, check=True, capture_output=True, text=True,
        )  # fmt: skip
        shown = subprocess.run(
            [*nix, "hash", "file", "--base16", f"{done.stdout.strip()}/{file}"],
            cwd=clone, check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert shown.stdout.strip() == expected[artifact]["files"][file]["sha256"], name
    subprocess.run([*nix, "build", "--no-link", ".#board-artifacts"], cwd=clone, check=True)
