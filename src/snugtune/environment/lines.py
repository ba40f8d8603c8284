"""Commands that can be pasted, as the shell of a system wants them: sh, or PowerShell on Windows."""

from __future__ import annotations

from snugtune import facts
from snugtune.environment.builds import Capability, Place, architecture_of
from snugtune.environment.install import InstallLine, bitsandbytes_line, tensorflow_line, torch_line
from snugtune.environment.stated import Stated, latest
from snugtune.hardware import Machine

Reasoned = tuple[str | None, str | None]

_DRIVERS = "https://www.nvidia.com/drivers"


def then(place: Place, *commands: str) -> str:
    """Commands after each other: sh stops at a failure; PowerShell before 7 knows no "&&"."""
    return ("; " if place.system == "windows" else " && ").join(commands)


def set_variable(name: str, value: str, place: Place) -> str:
    """Set a variable for what is started from this shell."""
    return f'$env:{name} = "{value}"' if place.system == "windows" else f"export {name}={value}"


def unset_variable(name: str, place: Place) -> str:
    """Remove a variable for what is started from this shell."""
    return f"Remove-Item Env:{name}" if place.system == "windows" else f"unset {name}"


def install_driver(capability: Capability | None, place: Place) -> str:
    """How to get the newest driver that sees a card."""
    row = architecture_of(capability)
    branch = row["driver_last"] if row is not None and "driver_last" in row else "580"
    last = row is not None and "driver_last" in row
    if place.drivers == "windows":
        where = "in Windows, not inside WSL" if place.system == "wsl" else "in PowerShell"
        which = f"choose branch {branch}, the last for this card" if last else f"{branch} or later"
        return f"start {_DRIVERS}   # {where}: {which}"
    which = "the last branch for this card, with the proprietary module; " if last else ""
    return f"sudo apt install nvidia-driver-{branch}   # {which}elsewhere {_DRIVERS}"


def torch_command(line: InstallLine, stated: Stated, *, uninstall: bool) -> str:
    """The line for PyTorch, with what has to go before, and torchvision where it is there.

    Args:
        line: The line for PyTorch.
        stated: What is known of the machine.
        uninstall: Whether a PyTorch is there: pip would take another build of the same version for satisfied.
    """
    words = list(line.command)
    old = ["torch"]
    if latest(stated.packages, "torchvision") and line.build is not None:
        pair = torchvision_for(line.build.version)
        if pair:
            words.insert(1, f"torchvision=={pair}.*")
        old.append("torchvision")
    if latest(stated.packages, "torchaudio"):
        old.append("torchaudio")
    install = str(InstallLine(command=tuple(words), because=line.because, source=line.source))
    return then(stated.place, f"pip uninstall -y {' '.join(old)}", install) if uninstall else install


def torchvision_for(torch: str) -> str | None:
    """'2.8.0' -> '0.23'; None for a version of torch that the table does not have."""
    table = facts.read("builds")["torchvision"]
    pairs = dict(zip(table["torch"], table["torchvision"], strict=True))
    return pairs.get(".".join(torch.split("+", maxsplit=1)[0].split(".")[:2]))


def install_lines(stated: Stated, *, broken: bool, mirror: str | None = None) -> dict[str, Reasoned]:
    """The line for each package that has code for the cards here, and why; None where none has.

    Without a card, the line for PyTorch is that for the CPU on this machine, and None for another.

    Args:
        stated: What is known of the machine.
        broken: Whether the PyTorch that is there must go.
        mirror: Address that stands for that of PyTorch's index.
    """
    machine, place = Machine(tuple(stated.gpus), stated.place.driver, None), stated.place
    torch = torch_line(machine, place, mirror=mirror) if machine.gpus or stated.live else None
    unseen = broken and stated.torch is not None and not machine.gpus
    if torch is not None and torch.build is None and (machine.gpus or unseen):
        torch = None  # a PyTorch that works is not replaced by one for the CPU because a driver is silent
    kept = stated.torch.cuda if stated.torch is not None and not broken else None
    tensorflow = tensorflow_line(machine, place)
    bitsandbytes = bitsandbytes_line(machine, place, kept)
    command = torch_command(torch, stated, uninstall=broken and stated.has_torch) if torch else None
    return {
        "torch": (command, torch.because if torch else None),
        "tensorflow": (str(tensorflow), tensorflow.because) if tensorflow else (None, None),
        "bitsandbytes": (str(bitsandbytes), bitsandbytes.because) if bitsandbytes else (None, None),
    }
