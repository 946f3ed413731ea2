"""`./inv verify` finds what it is there to find, names it, and says why a file is expected.

Negative controls build with the real tree in a small checkout of their own; those about packages
and the lock use packages of a few bytes from a mirror of their own.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toolchain_checkout import (
    Checkout,
    Ended,
    Mirror,
    add_rooms,
    eventually,
    instead,
    make_checkout,
    names,
    processes_with,
    small_deb,
)

import schemas
from artifact import binaries, verify
from artifact.explain import explain
from toolchain import lock
from toolchain.docker_driver import image_digests
from toolchain.inside import DIRECTORY, run_inside
from toolchain.paths import REPO, cache_dir
from toolchain.recipe import recipes
from toolchain.rootfs import rootfs
from toolchain.sources import source

ROWS = ("verdict", "driver", "artifact", "file")
FAULTS = {
    # The clock of a verify is a year ahead; gcc itself would take SOURCE_DATE_EPOCH.
    "date": """
        echo 'const char *when = __DATE__;' >date.c
        env -u SOURCE_DATE_EPOCH gcc -c date.c -o /out/out
        """,
    "path-in-bpf": """
        echo '__attribute__((section("xdp"))) int f(void *c) { return 2; }' >prog.bpf.c
        clang -O2 -g -target bpf -c "$PWD/prog.bpf.c" -o prog.unlinked.o
        bpftool gen object /out/out prog.unlinked.o
        """,
    "native": """
        echo 'void f(float *a, float *b) { for (int i = 0; i < 999; i++) a[i] += b[i]; }' >f.c
        gcc -O3 -march=native -c f.c -o /out/out
        """,
    # pahole 1.30 keeps the order of compilation units whatever -j says; here, as in older ones, a
    # unit's place depends on the thread that got it.
    "btf-order": """
        i=0
        while [ $i -lt 12 ]; do
            echo "struct s$i { int a[$i + 1]; }; int f$i(struct s$i *p) { return p->a[0]; }" >u$i.c
            echo "$((i % JOBS)) u$i.o" >>order
            i=$((i + 1))
        done
        gcc -g -c u*.c
        gcc -r -o /out/out $(sort -s -n -k1,1 order | cut -d' ' -f2)
        pahole -J -j"$JOBS" /out/out
        strip --strip-debug /out/out
        """,
    # The real one: a part of ggml's CPU backend, configured as nobody should.
    "ggml-native": """
        mkdir source
        tar --extract --gzip --file /src/llama-cpp --strip-components=3 --directory source \
            --wildcards '*/vendor/llama.cpp'
        cmake -S source -B out -G Ninja -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
            -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DGGML_OPENMP=OFF >configure.log
        object=ggml/src/CMakeFiles/ggml-cpu.dir/ggml-cpu/vec.cpp.o
        ninja -C out $object
        cp out/$object /out/out
        """,
    "checkout-mode": "stat -c '%a' /recipe/checkout-mode.sh >/out/out\n",
    "cpio-time": "mkdir d; echo x >d/f; touch d/g; find d | cpio --quiet -o -H newc >/out/out\n",
}
GOOD = """
    { echo 'const char *when = __DATE__, *where = __FILE__;'; } >good.c
    gcc -g -O2 -ffile-prefix-map="$PWD"=. -c "$PWD/good.c" -o /out/out
    """


# --- the real expectations ---------------------------------------------------------------------


def test_binaries_json_is_about_the_inputs_of_this_checkout() -> None:
    """No build: what an artifact needs is taken to be as expected."""
    expected = binaries.read()
    assert set(expected["artifacts"]) == set(binaries.artifacts()), verify.ACCEPT
    for artifact, entry in expected["artifacts"].items():
        needs = recipes()[artifact].needs if artifact in recipes() else ()
        files = {
            need: {
                name: file["sha256"]
                for name, file in expected["artifacts"][need]["files"].items()
                if not name.endswith(binaries.EMBEDDED)
            }
            for need in needs
        }
        changed = binaries.changes(entry["inputs"], binaries.inputs(artifact, files))
        assert changed == [], f"{artifact}: if that is meant: {verify.ACCEPT}"
        if artifact in recipes():
            named = {name for name in entry["files"] if not name.endswith(binaries.EMBEDDED)}
            assert named == set(recipes()[artifact].outputs)


def test_what_ships_is_in_binaries_json() -> None:
    entries = binaries.read()["artifacts"]
    for artifact, name in {
        "kernel/image": "Image",
        "kernel/vstate-profiler": "vstate_profiler.ko",
        "kernel/vstate-observer": "vstate_observer!bpf.o",
        "kernel/truth": "truth.so",
        "kernel/rvv-probe": "rvv_probe",
        "sched_ext/scx-vstate": "scx_vstate!bpf.o",
        "llama.cpp/server-riscv64": "llama-server",
        "llama.cpp/server-x86-64": "llama-server",
        "board/initramfs": "initramfs.cpio",
        "model/banana-tiny": "model.gguf",
    }.items():
        assert name in entries[artifact]["files"]
    assert "vmlinux.btf" in entries["kernel/image"]["files"]
    assert "mark" in entries["kernel/truth"]["files"]


@pytest.mark.boot
def test_what_was_built_here_has_the_expected_bytes() -> None:
    """Kernel and llama-server among them, whichever driver this machine built them with."""
    expected = binaries.read()
    for artifact, entry in expected["artifacts"].items():
        found = binaries.files(binaries.ordinary(artifact))
        assert {name: vars(file) for name, file in found.items()} == entry["files"], artifact


@pytest.mark.boot
def test_the_cheap_ones_are_rebuilt_alike_under_hostile_conditions(tmp_path: Path) -> None:
    """All but the trees, which `./inv verify` unpacks anew: a minute and 2 GB."""
    cheap = [name for name in binaries.artifacts() if not _is_dear(name)]
    rows = verify.verify([], only=cheap, json_file=tmp_path / "rows.json")
    assert {row.verdict for row in rows} == {"MATCH"}
    assert {row.artifact for row in rows} == set(cheap)
    assert len(schemas.read(tmp_path / "rows.json", "verify")["rows"]) == len(rows)


def _is_dear(artifact: str) -> bool:
    return artifact in recipes() and recipes()[artifact].minutes > verify.CHEAP_MINUTES


@pytest.mark.boot
def test_objects_of_llama_server_do_not_tell_where_they_were_made(tmp_path: Path) -> None:
    """The whole of it is for --full, which once found that assertions carried absolute paths."""
    own = recipes()["llama.cpp/server-riscv64"]
    made = "common/CMakeFiles/llama-common.dir/log.cpp.o"
    script = f"""sed '/^cmake --build/,$d' /recipe/{own.script} >configure.sh
        sh -eu configure.sh {own.name}
        ninja -C out {made}
        cp out/{made} /out/log.o"""
    objects: list[bytes] = []
    for directory in (DIRECTORY, verify.hostile()[0].directory):
        place = tmp_path / str(len(objects))
        (place / "build").mkdir(parents=True)
        (place / "out").mkdir()
        run_inside(
            ["sh", "-euc", script],
            what="build an object of llama-server",
            binds={f"/recipe/{name}": path for name, path in own.files().items()}
            | {f"/src/{name}": source(name) for name in own.sources},
            writable={directory: place / "build", "/out": place / "out"},
            scratch=[directory],
            directory=directory,
        )
        objects.append((place / "out" / "log.o").read_bytes())
    assert b"/build/common/log.cpp" in objects[0], "nothing to be told"
    assert objects[0] == objects[1]


@pytest.mark.long
def test_all_of_verify_with_each_driver(
    docker_host: str, nix_bin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    monkeypatch.setenv("PATH", f"{nix_bin}:{os.environ['PATH']}")
    drivers = ["userns", "docker", "nix"]
    rows = verify.verify(drivers, full=True)
    assert {row.verdict for row in rows} == {"MATCH"}
    built = {row.artifact for row in rows if row.artifact in recipes()}
    for driver in drivers:
        assert {row.artifact for row in rows if row.driver == driver} >= built


# --- negative controls, with the real tree -----------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout of all rooms whose recipes are the controls; it shares unpacked trees."""
    for tree in ("build", "hostile"):
        rootfs(tree)
    image_digests("build")
    place = tmp_path_factory.mktemp("workshop")
    served = Mirror()
    try:
        made = make_checkout(place / "checkout", place / "home", served)
        add_rooms(made)
        shutil.copy(lock.LOCK, made.root / "toolchain" / "debian.lock")
        shutil.copy(REPO / "toolchain" / "sources.toml", made.root / "toolchain")
        (made.cache / "artifacts").mkdir(parents=True)
        for name in ("rootfs", "downloads"):
            (made.cache / name).symlink_to(cache_dir() / name)
        for entry in (cache_dir() / "artifacts").glob("image-build-*"):
            shutil.copytree(entry, made.cache / "artifacts" / entry.name)
        for name, script in {"good": GOOD, **FAULTS}.items():
            made.add_recipe(name, script)
            if "/src/llama-cpp" in script:
                with (made.root / "kernel" / "recipe.toml").open("a") as recipe:
                    recipe.write('sources = ["llama-cpp"]\n')
        done = made.run("verify", "--accept")
        assert done.code == 0, done.err
        yield made
    finally:
        served.stop()


def _rows(done: Ended) -> list[dict[str, str]]:
    """The rows that were printed; what lies in parentheses is the reason."""
    rows = []
    for line in done.out.splitlines():
        words, _, reason = line.partition("  (")
        if words.split()[:1] and words.split()[0] in verify.VERDICTS:
            rows.append(
                {**dict(zip(ROWS, words.split(), strict=False)), "reason": reason.rstrip(")")}
            )
    return rows


@pytest.fixture(scope="module")
def controls(workshop: Checkout) -> tuple[Ended, dict[str, dict[str, str]]]:
    chosen = [word for name in ("good", *FAULTS) for word in ("--artifact", f"kernel/{name}")]
    programs = workshop.home / "bin"
    programs.mkdir()
    (programs / "diffoscope").write_text('#!/bin/sh\necho "$3 and $4" >"$2"\nexit 1\n')
    (programs / "diffoscope").chmod(0o755)
    path = f"{programs}:{workshop.environment()['PATH']}"
    done = workshop.run("verify", *chosen, env={"BANANAOS_DRIVER": "", "PATH": path})
    return done, {row["artifact"].partition("/")[2]: row for row in _rows(done)}


@pytest.mark.boot
@pytest.mark.parametrize(
    ("fault", "component"),
    [
        ("date", "sections .rodata"),
        ("path-in-bpf", ".BTF"),
        ("native", ".text"),
        ("ggml-native", ".text"),
        ("btf-order", ".BTF"),
        ("checkout-mode", "first at byte 1"),
        ("cpio-time", "d/f (mode, owner, time)"),
    ],
)
def test_a_fault_of_a_build_is_found_and_the_component_named(
    controls: tuple[Ended, dict[str, dict[str, str]]], fault: str, component: str
) -> None:
    done, rows = controls
    assert done.code == 1
    assert f"kernel/{fault}" in done.error
    assert rows[fault]["verdict"] == "DIFFER"
    assert component in rows[fault]["reason"]
    assert "rebuilt file: /" in rows[fault]["reason"]
    kept = Path(rows[fault]["reason"].partition("rebuilt file: ")[2].partition(";")[0])
    assert kept.is_file(), "to be looked at"
    report = Path(rows[fault]["reason"].partition("diffoscope: ")[2])
    ordinary, rebuilt = report.read_text().split(" and ")
    assert Path(rebuilt.strip()) == kept
    assert Path(ordinary).name == kept.name and "/artifacts/" in ordinary


@pytest.mark.boot
def test_what_is_reproducible_matches_beside_the_faults(
    controls: tuple[Ended, dict[str, dict[str, str]]],
) -> None:
    done, rows = controls
    assert rows["good"]["verdict"] == "MATCH"
    assert "kernel/good" not in done.error


@pytest.mark.boot
def test_accept_refuses_other_bytes_of_the_same_inputs(workshop: Checkout) -> None:
    path = workshop.root / "artifact" / "expected" / "binaries.json"
    before = path.read_text()
    document = json.loads(before)
    file = document["artifacts"]["kernel/good"]["files"]["out"]
    file["sha256"] = file["sha256"][::-1]
    path.write_text(json.dumps(document))
    done = workshop.run("verify", "--accept")
    assert done.code == 1
    assert "kernel/good: other bytes from the same inputs: the build is not reproduc" in done.error
    assert json.loads(path.read_text()) == document, "nothing was accepted"
    done = workshop.run("verify", "--artifact", "kernel/good")
    assert done.code == 1
    assert "and so does the ordinary build" in done.out
    path.write_text(before)


@pytest.mark.boot
def test_accept_tells_what_changed_and_why(workshop: Checkout) -> None:
    script = workshop.root / "kernel" / "good.sh"
    before = script.read_text()
    script.write_text(before.replace("-O2", "-O1") + "# changed\n")
    done = workshop.run("verify", "--artifact", "kernel/good")
    assert done.code == 1
    assert "other inputs than those of binaries.json: files good.sh changed" in done.error
    assert [row["verdict"] for row in _rows(done)] == ["SKIPPED"]
    done = workshop.run("verify", "--accept")
    assert done.code == 0, done.err
    assert "kernel/good: out changed; because files good.sh changed" in done.out.splitlines()
    assert workshop.run("verify", "--artifact", "kernel/good").code == 0
    script.write_text(before)
    assert workshop.run("verify", "--accept").code == 0


@pytest.mark.boot
def test_a_damaged_cache_does_not_deceive(workshop: Checkout) -> None:
    """The cache's own manifest forged, too: verify rebuilds, and finds the ordinary build wrong."""
    entry = Path(workshop.run("build", "--artifact", "kernel/good").out.split()[-1])
    kept = {path.name: path.read_bytes() for path in entry.iterdir()}
    (entry / "out").write_bytes(b"evil")
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["files"]["out"] = binaries.files(entry)["out"].sha256
    (entry / "manifest.json").write_text(json.dumps(manifest))
    done = workshop.run("verify", "--artifact", "kernel/good")
    assert (done.code, [row["verdict"] for row in _rows(done)]) == (0, ["MATCH"])
    done = workshop.run("verify", "--accept")
    assert done.code == 1
    assert "kernel/good: other bytes from the same inputs" in done.error
    for name, content in kept.items():
        (entry / name).write_bytes(content)


@pytest.mark.boot
def test_a_build_that_fails_is_not_a_match(workshop: Checkout) -> None:
    script = workshop.root / "kernel" / "good.sh"
    before = script.read_text()
    script.write_text('[ "$USER" = root ] || { echo "only root" >&2; exit 7; }\n' + before)
    assert workshop.run("verify", "--accept").code == 0
    done = workshop.run("verify", "--artifact", "kernel/good")
    assert done.code == 3
    assert "kernel/good: could not be rebuilt" in done.error
    (row,) = _rows(done)
    assert row["verdict"] == "NOT-BUILT"
    assert "ended with exit code 7" in row["reason"]
    script.write_text(before)
    assert workshop.run("verify", "--accept").code == 0


@pytest.mark.boot
def test_a_driver_that_does_not_work_here_is_skipped_with_the_reason(workshop: Checkout) -> None:
    done = workshop.run(
        *("verify", "--driver", "docker", "--driver", "nix", "--artifact", "kernel/good"),
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert done.code == 3, "somebody who named a driver is not told that all is well"
    assert "nothing was rebuilt with docker: no Docker engine at" in done.error
    assert "; nix: no Nix" in done.error
    rows = _rows(done)
    assert [row["driver"] for row in rows] == ["docker", "nix"]
    assert rows[0]["verdict"] == "SKIPPED"
    assert "no Docker engine at unix:///nonexistent/docker.sock" in rows[0]["reason"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--driver", "podman"), "--driver podman: expected one of userns, chroot, docker, nix"),
        (("--artifact", "kernel/none"), "--artifact kernel/none: expected one of "),
        (("--accept", "--json", "x"), "--accept takes all"),
        (("--rebuild",), "--rebuild goes with --accept only"),
        (("--json", "none/x"), "--json none/x: no directory none: make it first"),
    ],
)
@pytest.mark.boot
def test_wrong_usage(workshop: Checkout, words: tuple[str, ...], why: str) -> None:
    done = workshop.run("verify", *words)
    assert done.code == 2
    assert why in done.error


# --- packages and the lock ---------------------------------------------------------------------


@pytest.mark.boot
def test_one_flipped_byte_in_a_package(small: Checkout) -> None:
    row = next(row for row in small.rows if row[1] == "first")
    path = small.downloads / row[-1]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    done = small.run("verify")
    assert done.code == 0
    assert "first 1.0 all: the download in the cache is damaged; fetching it anew" in done.err
    # With a mirror that has the package altered, too, nothing gets into a tree.
    small.mirror.answers[row[5]] = instead(bytes(flipped))
    path.write_bytes(flipped)
    shutil.rmtree(small.cache / "rootfs")
    done = small.run("verify")
    assert done.code == 4
    assert "first 1.0 all" in done.error
    assert "altered or damaged on the way" in done.error
    assert not any(name.startswith("build-") for name in names(small.cache / "rootfs"))
    assert not path.exists(), "nothing altered is kept"
    del small.mirror.answers[row[5]]
    assert small.run("verify").code == 0


@pytest.mark.boot
def test_a_tampered_lock(small: Checkout) -> None:
    """Whoever changes lock and mirror together is still told by binaries.json, by name."""
    (row,) = (row for row in small.rows if row[1] == "first")
    small.rows.remove(row)
    small.add_package("first", small_deb("first", b"two"))
    done = small.run("verify")
    assert done.code == 1
    assert "other inputs than those of binaries.json: package first:all changed" in done.error
    # The lock alone: the mirror's file has another sum.
    small.mirror.files[row[5]] = small_deb("first", b"one")
    shutil.rmtree(small.cache / "rootfs")
    (small.downloads / small.rows[-1][-1]).unlink()
    done = small.run("verify")
    assert done.code == 4
    assert "first 1.0 all" in done.error


@pytest.mark.boot
@pytest.mark.parametrize("tree", ["build", "hostile"])
def test_the_tree_that_all_was_built_in_is_not_trusted(small: Checkout, tree: str) -> None:
    """Other bytes of the same size and time: what a look at names, sizes and times cannot see."""
    content = b"one" if tree == "build" else b"\0"
    small.add_package("more", small_deb("more", content), tree=tree)
    assert small.run("verify", "--accept").code == 0
    (path,) = (small.cache / "rootfs").glob(f"{tree}-*/usr/share/more")
    status = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"eno" if tree == "build" else b"1")
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    done = small.run("verify")
    assert done.code == 1
    assert f"tree/{tree}: not the expected bytes" in done.error
    reasons = {
        row["file"]: row["reason"] for row in _rows(done) if row["artifact"] == f"tree/{tree}"
    }
    assert reasons["layer.tar"] == (
        "the tree in the cache, in which all was built, differs in usr/share/more: remove "
        f"{path.parents[2]}"
    )
    assert reasons["config.json"] == ""
    # Nor is it accepted: what is to become the expected digest is that of the packages.
    expected = small.root / "artifact" / "expected" / "binaries.json"
    document = json.loads(expected.read_text())
    document["trees"][tree]["inputs"]["fixups"] = "0" * 64
    expected.write_text(json.dumps(document))
    done = small.run("verify", "--accept", "--rebuild")
    assert done.code == 1
    assert "differs in usr/share/more" in done.out
    assert json.loads(expected.read_text()) == document
    shutil.rmtree(path.parents[2])
    assert small.run("verify", "--accept", "--rebuild").code == 0


@pytest.mark.boot
def test_a_tree_that_is_not_the_expected_one(small: Checkout) -> None:
    expected = small.root / "artifact" / "expected" / "binaries.json"
    document = json.loads(expected.read_text())
    document["trees"]["build"]["layer_sha256"] = "0" * 64
    expected.write_text(json.dumps(document))
    done = small.run("verify")
    assert done.code == 1
    (row,) = (row for row in _rows(done) if row["verdict"] == "DIFFER")
    assert (row["artifact"], row["file"]) == ("tree/build", "layer.tar")
    assert row["reason"] == (
        "unpacked anew it has another digest, and the tree in the cache is the same, so none shows "
        "where"
    )


@pytest.mark.boot
def test_what_cannot_be_built_takes_only_those_along_that_need_it(small: Checkout) -> None:
    small.add_recipe("needed", "echo made >/out/out\n", minutes=9)
    for name in ("one", "two"):
        small.add_recipe(name, "cat /in/kernel/needed/out >/out/out\n")
        with (small.root / "kernel" / "recipe.toml").open("a") as recipe:
            recipe.write('needs = ["kernel/needed"]\n')
    small.add_recipe("other", "echo made >/out/out\n")
    assert small.run("verify", "--accept").code == 0
    shutil.rmtree(small.cache / "artifacts")
    (small.root / "kernel" / "needed.sh").write_text("exit 5\n")
    for words in ((), ("--full",)):
        done = small.run("verify", *words)
        rows = {row["artifact"]: row for row in _rows(done)}
        assert rows["kernel/other"]["verdict"] == "MATCH"
        for name in ("one", "two"):
            assert rows[f"kernel/{name}"]["verdict"] == "NOT-BUILT"
            assert rows[f"kernel/{name}"]["reason"].startswith("it needs kernel/needed: ")
        assert "tree/build" in rows
        assert done.code == 1, "other inputs than the accepted ones"
        assert "files needed.sh changed" in done.error
        assert done.err.count("build: kernel/needed (about") == 1, "tried once"


@pytest.mark.boot
def test_a_full_disk_while_verifying(small: Checkout) -> None:
    """A row, the rest goes on, and one line at the end."""
    small.add_recipe("big", "busybox dd if=/dev/zero of=/out/out bs=1M count=1 2>/dev/null\n")
    script = f"""
        "$@" >/dev/null 2>&1
        mount -t tmpfs -o size=64k tmpfs {small.cache}/verify || exit 77
        "$@"; echo "code $?"
    """
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    assert small.run("verify", "--accept").code == 0
    done = small.run("verify", prefix=prefix)
    if done.code == 77 or "unshare: unshare failed" in done.err:
        pytest.skip(f"needs user namespaces: {done.err}")
    assert done.out.splitlines()[-1] == "code 3"
    rows = {row["artifact"]: row for row in _rows(done)}
    for artifact in ("kernel/big", "tree/build"):
        assert rows[artifact]["verdict"] == "NOT-BUILT"
        assert "No space left on device; free some space" in rows[artifact]["reason"]
    assert "could not be rebuilt, see above" in done.error
    assert "Traceback" not in done.err


@pytest.mark.boot
def test_accept_after_a_rebuild_only(small: Checkout) -> None:
    """With --rebuild nothing is accepted that another user would build differently."""
    small.add_recipe("x", "echo made >/out/out\n")
    done = small.run("verify", "--accept", "--rebuild")
    assert done.code == 0, done.err
    assert "kernel/x: new" in done.out.splitlines()
    accepted = (small.root / "artifact/expected/binaries.json").read_text()
    (small.root / "kernel" / "x.sh").write_text("echo $USER >/out/out\n")
    done = small.run("verify", "--accept", "--rebuild")
    assert done.code == 1
    assert "kernel/x: not the expected bytes" in done.error
    assert (small.root / "artifact/expected/binaries.json").read_text() == accepted


@pytest.mark.boot
def test_what_takes_long_is_rebuilt_and_accepted_with_full_only(small: Checkout) -> None:
    """On an empty cache the default set neither builds it nor says that it was compared."""
    small.add_recipe("dear", "echo made >/out/out\n", minutes=9)
    small.add_recipe("cheap", "echo made >/out/out\n")
    accepted = (small.root / "artifact/expected/binaries.json").read_text()
    done = small.run("verify", "--accept", "--rebuild")
    assert done.code == 2
    assert "--rebuild: kernel/dear changed, which only --full rebuilds: add it" in done.error
    assert (small.root / "artifact/expected/binaries.json").read_text() == accepted
    assert small.run("verify", "--accept", "--rebuild", "--full").code == 0

    shutil.rmtree(small.cache / "artifacts")
    done = small.run("verify")
    assert done.code == 0, done.err
    (row,) = (row for row in _rows(done) if row["artifact"] == "kernel/dear")
    assert (row["verdict"], row["reason"]) == (
        "SKIPPED",
        "not in this cache: --full builds it and compares",
    )
    assert not list((small.cache / "artifacts").glob("kernel-dear-*"))
    done = small.run("verify", "--full")
    assert {row["verdict"] for row in _rows(done)} == {"MATCH"}
    assert not list((small.cache / "artifacts").glob("kernel-dear-*")), "built once, not twice"
    (recipes_file := small.root / "kernel" / "recipe.toml").write_text(
        recipes_file.read_text().replace("[cheap]", '[cheap]\nneeds = ["kernel/dear"]')
    )
    done = small.run("verify", "--artifact", "kernel/cheap")
    assert "about 0 min each on 2 cores, after about 9 min for what these need" in done.err


@pytest.mark.boot
def test_full_goes_on_where_it_was_interrupted(small: Checkout) -> None:
    """What was rebuilt alike is not rebuilt again, unless its inputs are others now."""
    marker = f"6{os.getpid()}44"
    small.add_recipe("a", "echo made >/out/out\n")
    small.add_recipe("b", f'[ "$USER" = root ] || sleep {marker}; echo made >/out/out\n')
    assert small.run("verify", "--accept").code == 0
    said = []
    for _ in range(2):
        running = small.start("verify", "--full")
        eventually(lambda: processes_with(marker), running)
        ended = running.interrupt()
        assert ended.code == 130
        assert processes_with(marker) == []
        said.append(ended.err)
    assert "verify: kernel/a (userns)" in said[0]
    assert "verify: going on after 1 artifacts of an earlier --full" in said[1]
    assert "verify: kernel/a" not in said[1]
    assert "verify: kernel/b (userns)" in said[1]
    assert small.run("verify", "--full", "--artifact", "kernel/a").code == 0
    assert (small.cache / "verify" / "progress.json").exists(), "one is not all of them"
    (small.root / "kernel" / "b.sh").write_text("echo made >/out/out\n")
    assert small.run("verify", "--accept").code == 0
    done = small.run("verify", "--full")
    assert done.code == 0, done.err
    kept = small.cache / "verify" / "progress.json"
    assert not kept.exists(), "nothing to go on with"
    assert {row["verdict"] for row in _rows(done)} == {"MATCH"}
    earlier = [row["artifact"] for row in _rows(done) if row["reason"] == verify.EARLIER]
    assert earlier == ["kernel/a"], "what was not rebuilt now says so"
    # One that is not alike leaves what the next --full goes on with; another form is no fault.
    kept.write_text("[]")
    (small.root / "kernel" / "b.sh").write_text(
        '[ "$USER" = root ] || exit 5; echo made >/out/out\n'
    )
    assert small.run("verify", "--accept").code == 0
    done = small.run("verify", "--full")
    assert done.code == 3
    assert len(json.loads(kept.read_text())) == 1


# --- where files differ ------------------------------------------------------------------------


def test_explain_names_members_and_sections_however_deep(tmp_path: Path) -> None:
    from toolchain.image import Digest, tree_entries, write_layer

    def tar(content: bytes) -> bytes:
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / "f").write_bytes(content)
        os.utime(tmp_path / "d" / "f", (1, 1))
        os.utime(tmp_path / "d", (1, 1))
        with (tmp_path / "tar").open("wb") as out:
            write_layer(Digest(out), tree_entries(tmp_path / "d"))
        return (tmp_path / "tar").read_bytes()

    assert explain(b"abc", b"abc") == ""
    assert explain(b"abc", b"abd") == "first at byte 2 (3 bytes expected, 3 found)"
    assert explain(b"abc", b"ab") == "first at byte 2 (3 bytes expected, 2 found)"
    assert explain(tar(b"x"), tar(b"y")) == "members f"
    assert explain(tar(tar(b"x")), tar(tar(b"y"))) == "members f: members f"
    program = Path("/bin/sh").resolve().read_bytes()
    at = program.find(b"GNU\0") + 8
    damaged = program[:at] + bytes([program[at] ^ 1]) + program[at + 1 :]
    assert explain(program, damaged).startswith("sections .note")
    assert explain(program, b"\x7fELF").startswith("first at byte 4")


def test_a_loader_without_a_bpf_object_has_none_nor_has_an_archive() -> None:
    program = Path("/bin/sh").resolve().read_bytes()
    assert binaries.bpf_object(program) is None
    bpf = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    bpf[18:20] = (247).to_bytes(2, "little")
    bpf[40:48] = (64).to_bytes(8, "little")
    assert binaries.bpf_object(program + bytes(bpf) + b"rest") == bytes(bpf)
    assert binaries.bpf_object(b"070701" + bytes(bpf)) is None
    document: dict[str, Any] = {"a": {"b": "1"}, "artifact": "x", "l": ["m", "n"]}
    assert dict(binaries._flat(document)) == {"a b": "1", "l": "m, n"}
