"""The virtual board's machine: its data, and the QEMU command line that is it.

Promise: the command line is a pure function of the machine and the seed; everything that could
differ between two hosts (clock, network, disk, entropy, display) is absent or fixed.
Limit: that holds for deterministic(); interactive() is for looking at the board and for reaching it
over SSH: all harts at once, in real time, never the same twice.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import schemas
from toolchain.errors import InvalidData, UsageError

MACHINE = Path(__file__).with_name("machine.toml")
PATIENT = "rcupdate.rcu_cpu_stall_timeout=300"


@dataclass(frozen=True)
class Machine:
    """One virtual machine; field meanings and reasons stand in machine.toml."""

    harts: int
    parked_harts: int
    vlen_bits: int
    memory_mib: int
    icount_shift: int
    quantum_us: int
    cpu: str
    append: str

    def as_cell(self) -> dict[str, Any]:
        """Return the machine as the `machine` object of a cell."""
        return asdict(self)

    def cpu_argument(self) -> str:
        """Return QEMU's -cpu argument."""
        return self.cpu.format(vlen_bits=self.vlen_bits)


def default_machine(overrides: Mapping[str, int] | None = None) -> Machine:
    """Return machine.toml's machine with integer fields overridden.

    Raises UsageError for a field that may not be overridden and for a value that QEMU would refuse
    (the ranges are those of machine.schema.json), InvalidData for a damaged machine.toml.
    """
    data = schemas.read_toml(MACHINE, "machine")
    for name, value in (overrides or {}).items():
        # Only numbers may be overridden: the CPU and the command line are part of what is tested.
        if not isinstance(data["machine"].get(name), int):
            raise UsageError(f"machine has no number {name!r} to override")
        allowed = data["limits"].get(name)
        if allowed and value not in allowed:
            raise UsageError(f"{name}={value}: expected one of {', '.join(map(str, allowed))}")
        data["machine"][name] = value
        try:
            schemas.check(data, "machine")
        except InvalidData as error:
            # The file itself passed: what is wrong is the value.
            why = str(error).removeprefix("machine: at $.machine.")
            raise UsageError(f"the machine's {why}") from error
    return Machine(**data["machine"])


def typed(options: Mapping[str, str]) -> dict[str, int]:
    """The numbers that were typed for fields of the machine; "" is none.  Raises UsageError."""
    for name, text in options.items():
        if text and not text.removeprefix("-").isdecimal():
            raise UsageError(f"the machine's {name}: got {text!r}, expected an integer")
    return {name: int(text) for name, text in options.items() if text}


def vlens() -> list[int]:
    """Return the VLENs, in bits, that the virtual board can have."""
    return list(schemas.read_toml(MACHINE, "machine")["limits"]["vlen_bits"])


def firmware_and_cpu(machine: Machine) -> list[str]:
    """Return the part of the command line that every mode shares."""
    return [
        "qemu-system-riscv64",
        *("-machine", "virt"),
        *("-cpu", machine.cpu_argument()),
        *("-smp", str(machine.harts + machine.parked_harts)),
        *("-m", f"{machine.memory_mib}M"),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        *("-kernel", "/in/kernel/image/Image"),
        *("-initrd", "/build/initrd"),
    ]


def interactive(machine: Machine) -> list[str]:
    """Return the command line of a machine whose harts run side by side, idle ones at rest.

    maxcpus=1 and nohlt (machine.toml) are for virtual time: here every hart starts at boot, and one
    that polled would only take the host's time.  A busy host keeps a hart waiting for longer than
    the 21 s after which the kernel calls it a stall, and panics: here that takes the most it knows.
    """
    append = machine.append.format(harts=machine.harts) + f" {PATIENT}"
    for word in ("maxcpus=1", "nohlt"):
        append = append.replace(f" {word}", "")
    return [*firmware_and_cpu(machine), "-accel", "tcg,thread=multi", "-append", append]


def deterministic(machine: Machine, seed: int) -> list[str]:
    """Return the command line of a run whose every number follows from machine and seed.

    -icount with sleep=off: virtual time is instructions, idle time costs nothing.  The pair of
    hub port and filter-buffer moves no packet: its release timer runs on the virtual clock, and
    icount never lets the harts run past the next virtual timer, so it bounds the round-robin
    quantum (QEMU: net/filter-buffer.c, accel/tcg/tcg-accel-ops-icount.c).

    ioeventfd=off: else a guest's notification of a virtio device is an event that QEMU's main loop
    takes up when the host lets it, while the guest spins for the answer (hw/virtio/virtio-mmio.c
    switches it off by itself only for record/replay).
    """
    return [
        *firmware_and_cpu(machine),
        *("-icount", f"shift={machine.icount_shift},sleep=off"),
        *("-seed", str(seed)),
        *("-rtc", "base=2026-01-01T00:00:00,clock=vm"),
        *("-append", machine.append.format(harts=machine.harts)),
        *("-chardev", "file,id=console,path=/out/console.log"),
        *("-serial", "chardev:console"),
        *("-global", "virtio-mmio.ioeventfd=off"),
        *("-device", "virtio-serial-device"),
        *("-chardev", "file,id=results,path=/out/results.tar"),
        *("-device", "virtserialport,chardev=results,name=results"),
        *("-netdev", "hubport,id=quantum,hubid=0"),
        "-object",
        f"filter-buffer,id=timer,netdev=quantum,queue=all,interval={machine.quantum_us}",
    ]
