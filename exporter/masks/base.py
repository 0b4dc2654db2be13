"""What a runtime is to the registry, and how it refuses. No parsing here: no two runtimes read their masks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from exporter.inventory import Inventory
from exporter.model import Context, Inversion, Layer, Refusal

MISSING_AT_MOST = 64
"""How many cards an inventory that is not whole may be short of, when a mask is tried against all that there may be."""

MOST_DEVICES = 1024
"""Of one fleet, where a mask may repeat devices: more would be a page of nothing else."""

Invert = Callable[[Mapping[str, str], Inventory, Context], Inversion | Refusal]


class Runtime(NamedTuple):
    """One runtime's numbering.

    ``vendors`` are those whose devices it numbers (empty: every vendor's). ``masks`` are the variables that choose or
    order devices; ``variables`` are all that its inversion reads. ``default`` runtimes serve a fleet that names none.
    ``prefixes`` are beginnings of names of which any variable counts, too.
    ``moving`` runtimes follow the inventory of each cycle; the others are bound once, when the settings are loaded.
    A ``joint`` runtime numbers the devices of all vendors in one list.
    ``choosing`` are those of the masks that choose devices: a process that has one set means to use some, or none.
    ``told_to_drivers`` are the variables that the runtime's own driver may be asked under, in a process with the
    exporter's rights: none that names a file, a program or a server. None where there is no driver to ask.
    """

    name: str
    vendors: tuple[str, ...]
    masks: tuple[str, ...]
    variables: tuple[str, ...]
    default: bool
    moving: bool
    invert: Invert
    joint: bool = False
    choosing: tuple[str, ...] = ()
    told_to_drivers: tuple[str, ...] | None = None
    prefixes: tuple[str, ...] = ()

    def reads(self, name: str) -> bool:
        """Whether the inversion looks at the variable of this name."""
        return name in self.variables or name.startswith(self.prefixes)


class RefusedError(Exception):
    """The mask is refused with this code; caught where the inversion ends. ``layers`` are those before it, if known."""

    def __init__(self, code: str, detail: str, layers: tuple[Layer, ...] = ()) -> None:
        self.code, self.detail, self.layers = code, _clipped(detail), layers
        super().__init__(code)

    def behind(self, *layers: Layer) -> RefusedError:
        """The same with its layers, where it has none yet."""
        return RefusedError(self.code, self.detail, self.layers or layers)


def _clipped(text: str) -> str:
    """A mask may be long: its begin, and the reason at the end."""
    return text if len(text) <= 500 else f"{text[:250]}...{text[-240:]}"
