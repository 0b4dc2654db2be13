"""Where fleets come from: the settings, live processes, else the daemon's own environment, else the host as it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from exporter.config import FleetSettings, Settings
from exporter.facts import FACTS
from exporter.fleets.watch import Watch, is_live
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES
from exporter.model import Fleet

__all__ = ["HOST", "Fleets", "from_settings", "is_live"]

HOST = Fleet(name="host", runtimes=("host",))


def from_settings(settings: Settings, environ: Mapping[str, str], vendors: tuple[str, ...]) -> tuple[Fleet, ...]:
    """The fleets that are no processes'; ``vendors`` are those whose backends may serve.

    Settings without fleets mean one: ``host``. If the daemon's own environment sets a mask or an order variable, that
    is taken for the operator's wish: ``default`` is inverted from it for the vendors whose runtime reads the variable,
    and the other vendors' cards are in ``host``.
    """
    if settings.fleets:
        return tuple(_from_entry(entry) for entry in settings.fleets if not is_live(entry))
    masked = tuple(name for name in DEFAULT_RUNTIMES if any(variable in environ for variable in RUNTIMES[name].masks))
    if not masked:
        return (HOST,)
    numbered = {vendor for name in masked for vendor in RUNTIMES[name].vendors}
    read = {variable for name in masked for variable in RUNTIMES[name].variables}
    env = {variable: environ[variable] for variable in sorted(read & environ.keys())}
    others = tuple(vendor for vendor in vendors if vendor not in numbered)
    default = Fleet(name="default", runtimes=masked, env=env)
    return (default, Fleet(name="host", runtimes=("host",), vendors=others)) if others else (default,)


def _from_entry(entry: FleetSettings) -> Fleet:
    runtimes = DEFAULT_RUNTIMES if entry.runtime is None else (entry.runtime,)
    known = {name: FACTS[name][value] for name, value in entry.known.items()}
    return Fleet(name=entry.name, runtimes=runtimes, env=entry.env, reach=entry.reach, known=known)


class Fleets:
    """All fleets of some settings: those that are no processes', and those that a watch follows."""

    def __init__(self, stated: tuple[Fleet, ...], watch: Watch | None) -> None:
        self._stated, self._watch = stated, watch
        self._names = frozenset(fleet.name for fleet in stated)
        self._hidden = 0

    def live_on(self, vendor: str) -> bool:
        """Whether a fleet of processes may have devices of the vendor."""
        stated = (runtime for fleet in self._stated if fleet.live is not None for runtime in fleet.runtimes)
        watched = () if self._watch is None else self._watch.runtimes
        served = (RUNTIMES[runtime].vendors for runtime in {*stated, *watched})
        return any(not vendors or vendor in vendors for vendors in served)

    @property
    def left_out(self) -> int:
        """How many fleets of processes there are beyond those that are shown."""
        return 0 if self._watch is None else self._watch.left_out + self._hidden

    def now(self, using: Mapping[int, float] = MappingProxyType({})) -> tuple[Fleet, ...]:
        """The fleets that live now, with those of their processes that are among ``using``. Where processes fill in a
        name that the settings have, that one is the settings'.
        """
        if self._watch is None:
            return self._stated
        found = self._watch.fleets(using)
        shown = [fleet for fleet in found if fleet.name not in self._names]
        self._hidden = len(found) - len(shown)
        return (*self._stated, *shown)

    @property
    def watch(self) -> Watch | None:
        """What follows the processes."""
        return self._watch

    def start(self) -> None:
        """Look for processes from now on; returns after the first look."""
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.stop()
