"""Where fleets come from: the settings, else the daemon's own environment, else the host as it is."""

from __future__ import annotations

from collections.abc import Mapping

from exporter.config import FleetSettings, Settings
from exporter.facts import FACTS
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES
from exporter.model import Fleet

HOST = Fleet(name="host", runtimes=("host",))


def from_settings(settings: Settings, environ: Mapping[str, str], vendors: tuple[str, ...]) -> tuple[Fleet, ...]:
    """The fleets to watch; ``vendors`` are those whose backends may serve.

    Settings without fleets mean one: ``host``. If the daemon's own environment sets a mask or an order variable, that
    is taken for the operator's wish: ``default`` is inverted from it for the vendors whose runtime reads the variable,
    and the other vendors' cards are in ``host``.
    """
    if settings.fleets:
        return tuple(_from_entry(entry) for entry in settings.fleets)
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
