"""The site finder: every save and restore of the real kernel, and each kernel it must refuse.

Promise: the pinned kernel's sites are compared with a second decoder (binutils); missing, half and
unknown code is planted into a copy of the real Image and must be named.
Limit: one compiler's output.  Another kernel is tried where the second kernel is booted.
"""

import re
import struct
from collections import Counter
from pathlib import Path

import pytest

import schemas
from kernel import sites
from kernel.btf import Btf
from kernel.sites import Kernel, Site
from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.inside import run_inside
from toolchain.recipe import build

pytestmark = pytest.mark.boot  # the kernel must be built

NOP = 0x00000013


@pytest.fixture(scope="module")
def image() -> Path:
    return build("kernel/image")


@pytest.fixture(scope="module")
def kernel(image: Path) -> Kernel:
    return sites.from_image(image / "Image", image / "System.map")


@pytest.fixture(scope="module")
def found(kernel: Kernel) -> list[Site]:
    return sites.find(kernel)


def test_the_known_sites_are_there(found: list[Site]) -> None:
    counted = Counter((site.kind, site.role, site.state) for site in found)
    assert counted == {
        ("save", "context-switch", "user"): 1,
        ("save", "context-switch", "kernel"): 1,
        ("save", "kernel-vector", "user"): 2,
        ("save", "kernel-vector", "kernel"): 1,
        ("save", "signal", "user"): 1,
        ("save", "ptrace", "user"): 1,
        ("restore", "exit-to-user", "user"): 3,
        ("restore", "kernel-vector-resume", "kernel"): 1,
    }
    assert {site.symbol for site in found if site.noinstr} == {
        "syscall_exit_to_user_mode",
        "irqentry_exit_to_user_mode",
    }


def test_a_second_decoder_finds_the_same(image: Path, found: list[Site]) -> None:
    listing = run_inside(
        ["riscv64-linux-gnu-objdump", "-d", "--section=.text", "/kernel/vmlinux"],
        what="disassemble the kernel",
        binds={"/kernel": image},
    ).stdout
    lines = re.findall(r"^([0-9a-f]{16}):\t[0-9a-f]+ +\t(\S+)\t?(.*)", listing, re.MULTILINE)
    moves = [
        (int(address, 16), name, operands)
        for address, name, operands in lines
        if name in ("vse8.v", "vle8.v") or (name == "vsetvli" and ",zero,e8,m8,ta,ma" in operands)
    ]
    names = {"save": "vse8.v", "restore": "vle8.v"}
    expected = []
    for index, (address, name, _) in enumerate(moves):
        after = [move[1] for move in moves[index + 1 : index + 5]]
        if name == "vsetvli" and len(set(after)) == 1 and after[0] in names.values():
            expected.append((address, after[0]))
    assert [
        (int(site.address, 16) + site.vsetvli_offset_bytes, names[site.kind]) for site in found
    ] == expected
    words = {int(address, 16): name for address, name, _ in lines}
    for site in found:
        start = int(site.address, 16)
        # What a kprobe may not sit on: arch/riscv/kernel/probes/decode-insn.c.
        for offset in (site.first_offset_bytes, site.end_offset_bytes):
            assert not words[start + offset].startswith(("csr", "fence", "ebreak", "ecall"))
        inside = [
            words[address]
            for address in range(start + site.first_offset_bytes, start + site.end_offset_bytes, 2)
            if address in words
        ]
        assert "csrc" in inside[-2:], "the vector unit is off again at the end"
        if site.kind == "save":
            assert inside.count("csrr") == 5, "vstart, vtype, vl, vcsr, vlenb"


def test_vmlinux_and_image_tell_the_same(image: Path, kernel: Kernel) -> None:
    document = sites.document(kernel)
    assert sites.document(sites.from_vmlinux(image / "vmlinux")) == document
    schemas.check(document, "sites")
    assert document["release"].startswith("6.12.")


def test_the_running_kernel_tells_the_same(image: Path, kernel: Kernel, tmp_path: Path) -> None:
    """/proc/kcore is made here as the kernel makes it: our board's kernel is built without it."""
    start, end = kernel.need("_stext"), kernel.need("_etext")
    text = kernel.read(start, end - start)
    identity = b"\x7fELF\x02\x01\x01"
    sizes = (64, 56, 2, 0, 0, 0)  # of the header, of a program header, their number, no sections
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 4, 243, 1, 0, 64, 0, 0, *sizes)
    entries = [(4, 0, 0, 0, 0, 0, 0, 0), (1, 7, 4096, start, 0, len(text), len(text), 0)]
    (tmp_path / "kcore").write_bytes(
        (header + b"".join(struct.pack("<IIQQQQQQ", *e) for e in entries)).ljust(4096, b"\0") + text
    )
    (tmp_path / "kallsyms").write_text(
        (image / "System.map").read_text() + "ffffffff00000000 t __schedule\t[other]\n"
    )
    (tmp_path / "notes").write_bytes(
        b"\4\0\0\0\24\0\0\0\3\0\0\0GNU\0" + bytes.fromhex(kernel.build_id)
    )
    (tmp_path / "btf").mkdir()
    (tmp_path / "btf" / "vmlinux").write_bytes((image / "vmlinux.btf").read_bytes())
    running = sites.from_running(tmp_path, tmp_path, release=kernel.release)
    assert sites.document(running) == sites.document(kernel)

    hidden = re.sub(r"^[0-9a-f]{16}", "0" * 16, (tmp_path / "kallsyms").read_text(), flags=re.M)
    (tmp_path / "kallsyms").write_text(hidden)
    with pytest.raises(EnvironmentUnfit, match=r"kptr_restrict"):
        sites.from_running(tmp_path, tmp_path)
    (tmp_path / "kcore").unlink()
    (tmp_path / "kallsyms").write_text((image / "System.map").read_text())
    with pytest.raises(EnvironmentUnfit, match=r"kcore: No such file.*CONFIG_PROC_KCORE"):
        sites.from_running(tmp_path, tmp_path)


def planted(image: Path, folder: Path, changes: dict[int, int]) -> Kernel:
    """Return the kernel with words (by address) changed."""
    data = bytearray((image / "Image").read_bytes())
    base = sites.from_image(image / "Image", image / "System.map").need("_start")
    for address, word in changes.items():
        struct.pack_into("<I", data, address - base, word)
    (folder / "Image").write_bytes(data)
    return sites.from_image(folder / "Image", image / "System.map")


def accesses(site: Site) -> list[int]:
    return [int(site.address, 16) + offset for offset in site.access_offsets_bytes]


def switch(found: list[Site]) -> Site:
    return next(s for s in found if s.symbol == "__schedule" and s.state == "user")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_half_a_site_is_an_error(
    image: Path, found: list[Site], tmp_path: Path, missing: int
) -> None:
    site = switch(found)
    changed = planted(image, tmp_path, {accesses(site)[missing]: NOP})
    register = 8 * missing
    with pytest.raises(InvalidData, match=rf"v0 is saved .* v{register} does not follow: half"):
        sites.find(changed)


def test_another_pointer_is_no_site(image: Path, found: list[Site], tmp_path: Path) -> None:
    address = accesses(switch(found))[2]
    changed = planted(image, tmp_path, {address: 0x02000027 | 16 << 7 | 31 << 15})
    with pytest.raises(InvalidData, match="half a site"):
        sites.find(changed)


def test_a_kernel_without_saves_is_refused(image: Path, found: list[Site], tmp_path: Path) -> None:
    saves = [site for site in found if site.kind == "save"]
    changed = planted(image, tmp_path, {accesses(site)[0]: NOP for site in saves})
    with pytest.raises(InvalidData, match="saves no vector registers: built without CONFIG_RISCV"):
        sites.find(changed)


def test_a_hidden_pointer_makes_the_state_unknown(
    image: Path, found: list[Site], tmp_path: Path
) -> None:
    site = switch(found)
    start = int(site.address, 16) + site.first_offset_bytes
    loads = {
        address: NOP
        for address in range(start - 32, start, 2)
        if struct.unpack("<I", kernel_word(image, address))[0] & 0x707F == 0x3003
    }
    changed = sites.find(planted(image, tmp_path, loads))
    assert [s.state for s in changed if s.vsetvli_offset_bytes == site.vsetvli_offset_bytes] == [
        "unknown"
    ]


def kernel_word(image: Path, address: int) -> bytes:
    return sites.from_image(image / "Image", image / "System.map").read(address, 4)


def test_names_that_exist_twice_get_an_anchor(image: Path, tmp_path: Path) -> None:
    symbols = (image / "System.map").read_text()
    twice = tmp_path / "System.map"
    twice.write_text(symbols + "ffffffff80002000 t riscv_vr_get\n")
    (site,) = (
        s for s in sites.find(sites.from_image(image / "Image", twice)) if s.role == "ptrace"
    )
    assert site.symbol == "riscv_vr_get" != site.anchor
    kernel = sites.from_image(image / "Image", image / "System.map")
    assert kernel.need(site.anchor) + site.anchor_offset_bytes == int(site.address, 16)


def assembled(image: Path, *, callers: list[str], joined: bool) -> list[Site]:
    """Return the sites of a made-up kernel whose save is a function of its own, twice by name."""
    base = 0xFFFFFFFF80000000
    # auipc ra, 0; jalr ra, 128 or 64(ra); ret
    calls = [[0x00000097, offset << 20 | 0x000080E7, 0x00008067] for offset in (128, 64)]
    save = [0x0C3077D7, 0x02058027]  # vsetvli a5, zero, e8, m8; vse8.v v0, (a1)
    for register in (8, 16, 24):
        save += [0x00F585B3, 0x02058027 | register << 7]  # add a1, a1, a5; vse8.v
    save += [NOP, 0x1007B073, NOP, 0x00008067]  # csrc sstatus, a5; nop; ret
    if joined:
        save += [0xFE0008E3]  # beq zero, zero, .-16: control joins right after the last store
    words = [word for part in (*calls, save) for word in (part + [NOP] * 16)[:16]]
    code = struct.pack("<48I", *words)
    symbols = [sites.Symbol(base + 64 * n, "t", name) for n, name in enumerate(callers)]
    symbols += [
        sites.Symbol(base, "T", "_stext"),
        sites.Symbol(base + 128, "t", "__riscv_v_vstate_save"),
        sites.Symbol(base + 192, "t", "__riscv_v_vstate_save"),
        sites.Symbol(base + 192, "T", "_etext"),
        sites.Symbol(base + 192, "T", "__noinstr_text_start"),
        sites.Symbol(base + 192, "T", "__noinstr_text_end"),
    ]
    notes = b"\4\0\0\0\24\0\0\0\3\0\0\0GNU\0" + bytes(20)
    btf = (image / "vmlinux.btf").read_bytes()
    return sites.find(Kernel(symbols, [(base, code)], release="7", notes=notes, btf=btf))


@pytest.mark.parametrize(
    ("callers", "role"),
    [
        (["__schedule", "some_function"], "context-switch"),
        (["some_function", "kernel_vector_begin"], "kernel-vector"),
        (["__schedule", "kernel_vector_begin"], "other"),
        (["some_function", "another"], "other"),
    ],
)
def test_a_save_of_its_own_is_for_what_calls_it(image: Path, callers: list[str], role: str) -> None:
    (site,) = assembled(image, callers=callers, joined=False)
    assert (site.role, site.state, site.symbol) == (role, "unknown", "__riscv_v_vstate_save")
    assert (site.anchor, site.anchor_offset_bytes) == (callers[1], 64)
    assert site.first_offset_bytes == site.vsetvli_offset_bytes == 0
    assert site.end_offset_bytes == 40, "the instruction after csrc"


def test_where_control_joins_the_end_stays_near(image: Path) -> None:
    (site,) = assembled(image, callers=["__schedule", "x"], joined=True)
    assert site.end_offset_bytes == site.access_offsets_bytes[3] + 4


def test_files_that_are_none(image: Path, tmp_path: Path) -> None:
    symbols = image / "System.map"
    bad = tmp_path / "bad"
    bad.write_bytes(b"MZ" + bytes(200))
    with pytest.raises(InvalidData, match="not an uncompressed RISC-V Image"):
        sites.from_image(bad, symbols)
    with pytest.raises(InvalidData, match=r"bad: not an ELF file"):
        sites.from_vmlinux(bad)
    with pytest.raises(InvalidData, match=r"none: cannot be read: No such file"):
        sites.from_vmlinux(tmp_path / "none")
    bad.write_text("ffffffff80000000 T _start\nnonsense\n")
    with pytest.raises(InvalidData, match=r"bad:2: 'nonsense' is not 'address type name'"):
        sites.from_image(image / "Image", bad)
    bad.write_text("ffffffff80000000 T main\n")
    with pytest.raises(InvalidData, match=r"no _start among 1 symbols"):
        sites.from_image(image / "Image", bad)
    bad.write_text("ffffffff80000000 T _start\n")
    with pytest.raises(InvalidData, match=r"symbols have no _stext"):
        sites.find(sites.from_image(image / "Image", bad))


def test_the_command_line(image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sites.json"
    asked = ["--image", f"{image / 'Image'}", "--symbols", f"{image / 'System.map'}"]
    assert sites.main([*asked, "--out", f"{out}"]) == 0
    schemas.read(out, "sites")
    assert sites.main(["--vmlinux", f"{tmp_path / 'none'}"]) == 4
    assert capsys.readouterr().err.startswith("sites: ")
    assert sites.main([*asked, "--out", "/proc/sites.json"]) == 3
    with pytest.raises(SystemExit) as left:
        sites.main(["--image", "x"])
    assert left.value.code == 2


def test_members_are_found_in_the_types(image: Path) -> None:
    data = (image / "vmlinux.btf").read_bytes()
    btf = Btf(data)
    assert btf.offset_bytes("list_head", "prev") == 8
    assert btf.offset_bytes("pt_regs", "status") == 32 * 8
    assert btf.offset_bytes("pt_regs", "cause") == 34 * 8
    user = btf.offset_bytes("task_struct", "thread.vstate.datap")
    kernel = btf.offset_bytes("task_struct", "thread.kernel_vstate.datap")
    assert kernel - user == btf.offset_bytes("thread_struct", "kernel_vstate") - (
        btf.offset_bytes("thread_struct", "vstate")
    )
    for structure, path, why in (
        ("no_such", "x", "has no struct no_such"),
        ("task_struct", "thread.nothing", r"has no thread\.nothing \(at nothing\)"),
        ("task_struct", "sched_remote_wakeup", "is a bit field"),
    ):
        with pytest.raises(InvalidData, match=why):
            btf.offset_bytes(structure, path)
    for broken, why in (
        (b"", "too few"),
        (b"\0" * 64, "starts with 0x0"),
        (data[:4096], "damaged at type"),
    ):
        with pytest.raises(InvalidData, match=why):
            Btf(broken)
