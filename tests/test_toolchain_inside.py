"""toolchain.inside, enter.sh and recipe: what a build sees, and how it ends.

The tree is a small one: busybox from the real lock, and links to it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toolchain_checkout import (
    Checkout,
    Ended,
    eventually,
    names,
    processes_with,
)

from toolchain.rootfs import ENVIRONMENT

pytestmark = pytest.mark.boot  # needs a package of the real lock

BUILD = ("build", "--artifact")


def _built(done: Ended) -> Path:
    assert done.code == 0, done.err
    return Path(done.out.splitlines()[-1].partition(" ")[2])


def _output(checkout: Checkout, script: str, **env: str) -> str:
    checkout.add_recipe("x", script)
    return (_built(checkout.run(*BUILD, "kernel/x", env=env)) / "out").read_text()


def _left_in_build(checkout: Checkout) -> set[str]:
    return names(checkout.cache / "build")


# --- what a build sees ------------------------------------------------------------------------


def test_the_environment_is_the_same_from_everywhere(checkout: Checkout, tmp_path: Path) -> None:
    script = "{ env | sort; umask; pwd; hostname; id -u; id -g; ls /; touch f; mkdir d;\n"
    script += "stat -c '%a %n' f d; cat /etc/passwd; } >/out/out\n"
    first = _output(checkout, script)
    keys = {line.partition("=")[0] for line in first.splitlines() if "=" in line}
    assert keys - {"SHLVL"} == {*ENVIRONMENT, "JOBS", "PWD"}, "busybox's sh counts its level"
    assert "SOURCE_DATE_EPOCH=1767225600\n" in first
    assert "PWD=/build\n" in first
    assert "\nbananaos\n0\n0\n" in first, "host name, user and group"
    assert "644 f\n755 d\n" in first
    other = tmp_path / "else where"
    other.mkdir()
    second = checkout.run(
        *(*BUILD, "kernel/x"),
        prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"),
        cwd=other,
        env={
            "LC_ALL": "C",
            "TZ": "Asia/Tokyo",
            "USER": "me",
            "SECRET": "s",
            "TMPDIR": "/var/tmp",
            "SHLVL": "7",
            "OLDPWD": "/",
            "XDG_CACHE_HOME": os.fspath(other / "cache"),
        },
    )
    assert (_built(second) / "out").read_text() == first


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_host_whose_sh_is_bash_leaves_nothing_in_the_environment(checkout: Checkout) -> None:
    """bash sets SHLVL, OLDPWD and _ where dash does not."""
    code = (
        "import os, subprocess, sys; sys.path[0] = sys.argv[1]\n"
        "from pathlib import Path; from toolchain.inside import ENVIRONMENT, entering\n"
        "argv = entering(['env'], {}, {}, Path(sys.argv[2]) / 'mounts')\n"
        "argv[argv.index('sh')] = sys.argv[3]\n"
        "sys.exit(subprocess.run(argv, env=ENVIRONMENT).returncode)\n"
    )
    seen = []
    for shell in ("sh", "bash"):
        argv = [sys.executable, "-c", code, os.fspath(checkout.root), os.fspath(checkout.home)]
        done = checkout.run_command([*argv, shell])
        assert done.code == 0, done.err
        seen.append(sorted(done.out.splitlines()))
    assert seen[0] == seen[1]
    assert {line.partition("=")[0] for line in seen[0]} == {*ENVIRONMENT, "PWD"}


def test_no_network_but_a_working_loopback(checkout: Checkout) -> None:
    out = _output(
        checkout,
        "{ grep -c : /proc/net/dev; grep -o lo: /proc/net/dev\n"
        "ip addr show lo | grep -o 127.0.0.1\n"
        "echo hello | nc -l -p 4321 >/dev/null & sleep 1;\n"
        "nc 127.0.0.1 4321 </dev/null; ip route; } >/out/out\n",
    )
    assert out.splitlines()[:4] == ["1", "lo:", "127.0.0.1", "hello"]
    assert len(out.splitlines()) == 4, "no route to anywhere"


def test_the_tree_and_the_inputs_are_read_only(checkout: Checkout) -> None:
    out = _output(
        checkout,
        "for f in /x /usr/x /usr/bin/sh /recipe/x.sh /in/needed/f; do\n"
        "  if (echo bad >>$f) 2>/dev/null; then echo $f; fi\n"
        "done >/out/out; touch /tmp/a /build/b /out/out /dev/shm/c\n",
    )
    # Mount points lie on small file systems of their own, so names can be added beside them.
    assert out in ("", "/in/needed/f\n")
    tree = next((checkout.cache / "rootfs").glob("build-*[!s]"))
    assert not (tree / "x").exists()
    assert "bad" not in (checkout.root / "kernel" / "x.sh").read_text().splitlines()


def test_mounts_anywhere_leave_no_trace_in_the_tree(checkout: Checkout, tmp_path: Path) -> None:
    """The tree is everybody's: a mount point made in it would change it for all."""
    (tmp_path / "file").write_text("content")
    code = (
        "import sys; sys.path[0] = sys.argv[1]\n"
        "from pathlib import Path; from toolchain.inside import run_inside\n"
        "from toolchain.rootfs import rootfs\n"
        "def facts():\n"
        "    return sorted((str(p), p.lstat().st_mtime) for p in rootfs('build').rglob('*'))\n"
        "before = facts(); place = Path(sys.argv[2]); file = place / 'file'\n"
        "binds = {'/at/a/new/place': file, '/model.gguf': file, '/here': place, '/in/x/y': place}\n"
        "script = 'cat /at/a/new/place /model.gguf /here/file /in/x/y/file; echo no >/at/x'\n"
        "done = run_inside(['sh', '-c', script], what='look', binds=binds, check=False)\n"
        "assert done.stdout == 4 * 'content' and done.returncode != 0, done\n"
        "assert facts() == before\n"
    )
    done = checkout.run_command(
        [sys.executable, "-c", code, os.fspath(checkout.root), os.fspath(tmp_path)]
    )
    assert done.code == 0, done.err
    checkout.add_recipe("x", "echo made >/out/out\n")
    assert "set aside" not in checkout.run(*BUILD, "kernel/x").err


def test_only_the_programs_of_the_build_are_seen(checkout: Checkout) -> None:
    out = _output(checkout, "ls /proc | grep -c '^[0-9]' >/out/out\n")
    assert int(out) < 6


def test_devices_work(checkout: Checkout) -> None:
    out = _output(
        checkout,
        "echo x >/dev/null; dd if=/dev/zero bs=3 count=1 2>/dev/null | cat >/out/out\n"
        "dd if=/dev/urandom bs=3 count=1 2>/dev/null | grep -c . >/dev/null || true\n"
        "echo y | cat /dev/stdin >>/out/out; ls /dev/fd/0 >>/out/out\n",
    )
    assert out == "\0\0\0y\n/dev/fd/0\n"


# --- drivers ----------------------------------------------------------------------------------

# In a child user namespace, so that the machine's own setting is left alone.
NO_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'echo 0 >/proc/sys/user/max_user_namespaces || exit 77; exec "$@"',
    "sh",
)
ORDINARY_USER_WITHOUT = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    "echo 1 >/proc/sys/user/max_user_namespaces || exit 77; exec unshare --user "
    '--map-user=1000 "$@"',
    "sh",
)


def _run(checkout: Checkout, *prefix: str, **env: str) -> Ended:
    checkout.add_recipe("x", "echo made >/out/out\n")
    done = checkout.run(*BUILD, "kernel/x", prefix=prefix, env=env)
    if done.code == 77 or "unshare: unshare failed" in done.err.splitlines()[:1]:
        pytest.skip(f"needs user namespaces: {done.err}")
    return done


def test_root_without_user_namespaces_falls_back_to_chroot_and_says_so(
    checkout: Checkout,
) -> None:
    done = _run(checkout, *NO_NAMESPACES)
    assert (_built(done) / "out").read_text() == "made\n"
    assert done.err.count("forbids user namespaces") == 1
    assert "falling back to chroot" in done.err


def test_an_ordinary_user_without_user_namespaces(checkout: Checkout) -> None:
    done = _run(checkout, *ORDINARY_USER_WITHOUT)
    assert done.code == 3
    assert "this kernel forbids user namespaces to ordinary users (sysctl" in done.error
    assert checkout.mirror.requests == [], "said before anything is downloaded"
    done = checkout.run(
        *(*BUILD, "kernel/x"),
        prefix=ORDINARY_USER_WITHOUT,
        env={"BANANAOS_DRIVER": "chroot"},
    )
    assert done.code == 3
    assert "the chroot driver is for root" in done.error


def test_root_of_a_container_that_may_not_mount(checkout: Checkout) -> None:
    """No user namespaces and no CAP_SYS_ADMIN."""
    bound = ("setpriv", "--bounding-set=-sys_admin")
    done = _run(checkout, *NO_NAMESPACES, *bound)
    assert done.code == 3
    assert "root without the right to mount, as in a container" in done.error


def test_a_named_driver_is_taken_and_a_wrong_one_refused(checkout: Checkout) -> None:
    done = _run(checkout, BANANAOS_DRIVER="podman")
    assert done.code == 2
    assert "BANANAOS_DRIVER='podman': expected one of userns, chroot, docker, nix" in done.error
    done = checkout.run(*BUILD, "kernel/x", prefix=NO_NAMESPACES, env={"BANANAOS_DRIVER": "userns"})
    assert done.code == 3
    assert "BANANAOS_DRIVER=userns: cannot enter" in done.error
    done = checkout.run(*BUILD, "kernel/x", prefix=NO_NAMESPACES, env={"BANANAOS_DRIVER": "chroot"})
    assert "falling back" not in done.err
    _built(done)


def test_both_drivers_make_the_same_bytes(checkout: Checkout, tmp_path: Path) -> None:
    # Without /proc, whose link count is how many processes the whole machine has.
    listing = "ls -la / | sed '/ proc$/d'"
    checkout.add_recipe("y", f"{{ env | sort; {listing}; stat -c '%a %u %g' /out; }} >/out/out\n")
    outputs = []
    for number, prefix in enumerate(((), NO_NAMESPACES)):
        done = checkout.run(
            "build",
            "--artifact",
            "kernel/y",
            prefix=prefix,
            env={"XDG_CACHE_HOME": f"{tmp_path}/{number}"},
        )
        outputs.append((_built(done) / "out").read_text())
    drop = [[w for w in out.split() if ":" not in w] for out in outputs]
    assert drop[0] == drop[1]


def _as_nobody() -> list[str] | None:
    """A prefix that runs a Python with our libraries as another user, if that can be."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return None
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def test_an_ordinary_user_makes_the_same_tree_and_the_same_bytes(
    checkout: Checkout, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = _as_nobody()
    if prefix is None:
        pytest.skip("needs root, to be somebody else")
    checkout.add_recipe("x", "{ env | sort; ls -l / /bin/; id -u; } | grep -v ' proc$' >/out/out\n")
    home = checkout.home.parent / "nobody"
    home.mkdir()
    os.chown(home, 65534, 65534)
    libraries = checkout.home.parent / "libraries"
    shutil.copytree(Path(pytest.__file__).parents[1], libraries, symlinks=True)
    python = next(
        (
            candidate
            for candidate in (sys.executable, "/usr/bin/python3")
            if subprocess.run(
                [*prefix, candidate, "-c", "import aiohttp, debian, invoke"],
                env={"PYTHONPATH": os.fspath(libraries)},
                capture_output=True,
            ).returncode
            == 0
        ),
        None,
    )
    if python is None:
        pytest.skip("another user can run no Python with these libraries")
    root = checkout.run(*BUILD, "kernel/x")
    argv = [*prefix, python, *checkout.command(*BUILD, "kernel/x")[1:]]
    other = checkout.run_command(
        argv, env={"HOME": os.fspath(home), "PYTHONPATH": os.fspath(libraries)}
    )
    assert _built(other).name == _built(root).name
    drop = [
        [w for w in (_built(done) / "out").read_text().split() if ":" not in w]
        for done in (root, other)
    ]
    assert drop[0] == drop[1]
    trees = [next((place / ".cache/bananaos/rootfs").glob("*.census")) for place in (
        checkout.home, home)]  # fmt: skip
    assert trees[0].name == trees[1].name
    assert trees[0].read_text() == trees[1].read_text()


# --- places -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["nosuid,nodev", "nosuid,nodev,noatime"])
def test_a_cache_on_a_restricted_file_system(checkout: Checkout, options: str) -> None:
    """A nested user namespace may not drop these flags when it remounts read-only."""
    place = checkout.home / ".cache"
    place.mkdir()
    done = _run(
        checkout,
        *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
        f'mount -t tmpfs -o {options} tmpfs "$0" || exit 77; exec "$@"',
        os.fspath(place),
    )
    assert done.code == 0, done.err


def test_a_cache_mounted_noexec_is_told(checkout: Checkout) -> None:
    place = checkout.home / ".cache"
    place.mkdir()
    done = _run(
        checkout,
        *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
        'mount -t tmpfs -o noexec tmpfs "$0" || exit 77; exec "$@"',
        os.fspath(place),
    )
    assert done.code == 3
    assert "is mounted noexec" in done.error
    assert "XDG_CACHE_HOME" in done.error


@pytest.mark.parametrize("name", ["with  two spaces ", 'quote\'d "$HOME" `id` \\', "-o ro", "\xe4"])
def test_odd_names_of_the_caches_directory(checkout: Checkout, name: str) -> None:
    done = _run(checkout, XDG_CACHE_HOME=os.fspath(checkout.home / name))
    assert done.code == 0, done.err
    assert (checkout.home / name / "bananaos" / "artifacts").is_dir()


@pytest.mark.parametrize("name", ["tab\there", "line\nbreak"])
def test_a_path_that_cannot_be_mounted_is_refused(checkout: Checkout, name: str) -> None:
    done = _run(checkout, XDG_CACHE_HOME=os.fspath(checkout.home / name))
    assert done.code == 3
    assert "a path with a tab or a line break cannot be mounted" in done.error
    assert names(checkout.home / name / "bananaos" / "artifacts") == set()


def test_no_room_for_temporary_files(checkout: Checkout) -> None:
    done = _run(checkout, "sh", "-c", 'ulimit -f 0; exec "$@"', "sh")
    assert done.code == 3
    assert "TMPDIR" in done.error


# --- recipes ----------------------------------------------------------------------------------


def test_an_unknown_artifact(checkout: Checkout) -> None:
    checkout.add_recipe("x", "true\n")
    done = checkout.run(*BUILD, "kernel/y")
    assert done.code == 2
    assert "artifact 'kernel/y' is unknown; there are kernel/x" in done.error


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("true\n", r"left [] in /out, recipe.toml promises ['out']"),
        ("touch /out/out /out/more\n", "left ['more', 'out'] in /out"),
        ("mkdir /out/out\n", "output out is not a plain file"),
        ("ln -s /etc/passwd /out/out\n", "output out is not a plain file"),
    ],
)
def test_other_outputs_than_promised(checkout: Checkout, script: str, why: str) -> None:
    checkout.add_recipe("x", script)
    done = checkout.run(*BUILD, "kernel/x")
    assert done.code == 4
    assert why in done.error
    assert names(checkout.cache / "artifacts") == set()
    assert _left_in_build(checkout) == set()


def test_a_failing_script_keeps_its_log_and_names_it(checkout: Checkout) -> None:
    checkout.add_recipe("x", "echo first; mkdir -p a/b; chmod 500 a; echo last words >&2; exit 9\n")
    done = checkout.run(*BUILD, "kernel/x")
    assert done.code == 3
    log = checkout.cache / "logs" / "kernel-x.log"
    assert "build kernel/x: unshare ended with exit code 9; log: " + str(log) in done.error
    assert "  | last words" in done.err
    assert log.read_text().splitlines()[-2:] == ["first", "last words"]
    assert names(checkout.cache / "artifacts") == set()
    assert _left_in_build(checkout) == set(), "read-only directories go, too"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[x\n", "recipe.toml: not TOML"),
        ("x = 1\n", "[x]: 1 is not a table"),
        ('[x]\nscript = "x.sh"\n', "[x]: "),
        ('[x]\nscript = ["x.sh"]\noutputs = ["o"]\nminutes = 1\n', "script = ['x.sh'] has the wr"),
        ('[x]\nscript = "x.sh"\noutputs = "o"\nminutes = 1\n', "outputs = 'o' has the wrong type"),
        ('[x]\nscript = "x.sh"\noutputs = ["o"]\nminutes = 1\nmore = []\n', "'more'"),
        ('[x]\nscript = "x.sh"\noutputs = ["o"]\nminutes = 1\nneeds = ["a/b"]\n', "no 'a/b'"),
        ('[x]\nscript = "x.sh"\noutputs = ["o"]\nminutes = 1\nsources = ["s"]\n', "no 's'"),
        (
            '[x]\nscript = "x.sh"\noutputs = ["o"]\nminutes = 1\nneeds = ["kernel/x"]\n',
            "recipes that need one another: kernel/x",
        ),
        ('[x]\nscript = "none.sh"\noutputs = ["o"]\nminutes = 1\n', "none.sh: no such file"),
    ],
)
def test_a_damaged_recipe_is_named(checkout: Checkout, text: str, why: str) -> None:
    (checkout.root / "kernel" / "recipe.toml").write_text(text)
    (checkout.root / "kernel" / "x.sh").write_text("true\n")
    done = checkout.run(*BUILD, "kernel/x")
    assert done.code == 4
    assert why in done.error


def test_a_need_is_mounted_and_part_of_the_key(checkout: Checkout) -> None:
    checkout.add_recipe("a", "echo 1 >/out/out\n")
    checkout.add_recipe("b", "cat /in/kernel/a/out >/out/out\n")
    with (checkout.root / "kernel" / "recipe.toml").open("a") as recipes:
        recipes.write('needs = ["kernel/a"]\n')
    first = _built(checkout.run(*BUILD, "kernel/b"))
    assert (first / "out").read_text() == "1\n"
    (checkout.root / "kernel" / "a.sh").write_text("echo 2 >/out/out\n")
    second = _built(checkout.run(*BUILD, "kernel/b"))
    assert second != first
    assert (second / "out").read_text() == "2\n"


def test_a_damaged_output_is_built_anew(checkout: Checkout) -> None:
    checkout.add_recipe("x", "echo good >/out/out\n")
    directory = _built(checkout.run(*BUILD, "kernel/x"))
    (directory / "out").write_text("evil\n")
    done = checkout.run(*BUILD, "kernel/x")
    assert (_built(done) / "out").read_text() == "good\n"
    assert "damaged (out has other bytes); set aside as" in done.err


def test_two_processes_build_an_artifact_once(checkout: Checkout) -> None:
    checkout.add_recipe("x", "sleep 1; echo made >/out/out\n")
    runs = [checkout.start(*BUILD, "kernel/x") for _ in range(3)]
    ended = [run.end() for run in runs]
    assert [run.code for run in ended] == [0, 0, 0], ended
    assert "".join(run.err for run in ended).count("build: kernel/x (about") == 1


def test_a_full_disk_while_building(checkout: Checkout) -> None:
    """One line; nothing left; with space the next run goes on."""
    checkout.add_recipe("x", "dd if=/dev/zero of=/build/big bs=1M count=30; echo ok >/out/out\n")
    done = checkout.run_on_a_full_disk(
        *(*BUILD, "kernel/x"), sizes_mib=(12, 64), show=["build", "artifacts"]
    )
    assert done.out.splitlines()[0] == "code 3"
    assert done.out.splitlines()[-1] == "code 0"
    build, artifacts = (f"{checkout.cache}/{name}:" for name in ("build", "artifacts"))
    assert sorted(line for line in done.out.splitlines()[1:5] if line)[:2] == [artifacts, build]
    assert "cannot write: No space left on device; free some space" in done.error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_ended_build(checkout: Checkout, number: signal.Signals) -> None:
    marker = f"9{time.time_ns() % 10**8}"
    checkout.add_recipe("x", f"mkdir a; chmod 500 a; (sleep {marker}) & sleep {marker}; wait\n")
    running = checkout.start(*BUILD, "kernel/x")
    eventually(lambda: len(processes_with(marker)) >= 2, running)
    if number == signal.SIGINT:
        ended = running.interrupt()
        assert ended.code == 130
        assert _left_in_build(checkout) == set()
        assert names(checkout.cache / "artifacts") == set()
    else:
        running.process.send_signal(number)
        ended = running.end()
        assert ended.code == -number
    assert "Traceback" not in ended.err
    for _ in range(500):
        if not processes_with(marker):
            break
        time.sleep(0.02)
    assert processes_with(marker) == []
    (checkout.root / "kernel" / "x.sh").write_text("echo made >/out/out\n")
    assert (_built(checkout.run(*BUILD, "kernel/x")) / "out").read_text() == "made\n"


def test_a_killed_builds_scratch_directory_is_removed_by_the_next(checkout: Checkout) -> None:
    checkout.add_recipe(
        "x", "[ ! -e left ] || exit 5; mkdir a; chmod 500 a; touch left; sleep 600\n"
    )
    running = checkout.start(*BUILD, "kernel/x")
    eventually(lambda: any((checkout.cache / "build").glob("*/left")), running)
    running.kill()
    assert len(_left_in_build(checkout)) == 1
    again = checkout.start(*BUILD, "kernel/x")
    eventually(  # the line comes after the removal
        lambda: "build: kernel/x" in again.err and any((checkout.cache / "build").glob("*/left")),
        again,
    )
    again.interrupt()
    assert _left_in_build(checkout) == set()


# --- the real tree ----------------------------------------------------------------------------


def test_the_real_tree(tmp_path: Path) -> None:
    """dash, coreutils and the compilers where recipes expect them; nothing can be written."""
    from toolchain.inside import run_inside

    script = """
    env | sort
    busybox hostname
    busybox ip addr show lo | grep -c 'inet '
    touch /usr/x 2>/dev/null && echo writable
    printf 'int main(void) { return 0; }' >m.c && cc m.c && ./a.out && echo runs
    riscv64-linux-gnu-gcc m.c && file -b a.out | cut -d, -f2
    """
    done = run_inside(
        ["sh", "-c", script], what="look at the real tree", writable={"/build": tmp_path}
    )
    lines = done.stdout.splitlines()
    assert {line.partition("=")[0] for line in lines if "=" in line} == {*ENVIRONMENT, "PWD"}
    assert [line for line in lines if "=" not in line] == ["bananaos", "1", "runs", " UCB RISC-V"]
