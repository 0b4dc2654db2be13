"""What i915 and xe publish of a card for operators: hwmon's sensors, and the clocks of each GT."""

from __future__ import annotations

from collections.abc import Collection, Mapping

REASONS = ("pl1", "pl2", "pl4", "thermal", "prochot", "ratl", "vr_thermalert", "vr_tdc")
"""The drivers' words for what holds clocks down."""


def monitor(driver: str, more: int, sensors: Collection[int]) -> Mapping[str, object]:
    """Watts, volts, joules, revolutions and thresholds, each ``more`` than another card's, in the units of hwmon.

    The numbers of temperature ``sensors`` are xe's, of which the second is the package's. Xe tells the card's power as
    the first and the package's as the second, i915 has one.
    """
    power = {
        "energy1_input": (5 + more) * 1_000_000,
        "power1_max": (190 + more) * 1_000_000,
        "power1_rated_max": (200 + more) * 1_000_000,
    }
    if driver != "xe":
        return {**power, "in0_input": 700 + more, "fan1_input": 1100 + more}
    package = {
        "energy2_input": (3 + more) * 1_000_000,
        "power2_max": (90 + more) * 1_000_000,
        "power2_rated_max": (100 + more) * 1_000_000,
        **{
            f"{kind}{number}_label": label
            for kind in ("energy", "power")
            for number, label in ((1, "card"), (2, "pkg"))
        },
    }
    limits: dict[str, object] = {}
    for number in sensors:
        limits |= {
            f"temp{number}_crit": (90 + number + more) * 1000,
            f"temp{number}_emergency": (100 + number + more) * 1000,
        }
    if 2 in sensors:
        limits["temp2_max"] = (80 + more) * 1000
    others = {"in1_input": 800 + more, "in1_label": "pkg", "fan1_input": 1200 + more, "fan2_input": 1300 + more}
    return {**power, **package, **limits, **others}


def gt(
    driver: str, number: int, more: int, *, media: bool, held: Collection[str]
) -> Mapping[str, Mapping[str, object]]:
    """The files of one GT, by the folder below its own: graphics at ``1500 + more`` of ``2400 + more`` MHz, media at
    400 less. A GT for media is held down by nothing.
    """
    actual, highest = (1100 + more, 2000 + more) if media else (1500 + more, 2400 + more)
    flags = {reason: int(reason in held and not media) for reason in REASONS}
    status = int(any(flags.values()))
    if driver == "xe":
        return {
            "/gtidle": {
                "name": f"gt{number}-{'mc' if media else 'rc'}",
                "idle_status": "gt-c0",
                "idle_residency_ms": 9,
            },
            "/freq0": {"act_freq": actual, "cur_freq": highest, "max_freq": highest, "rp0_freq": highest},
            "/freq0/throttle": {"status": status, **{f"reason_{name}": flag for name, flag in flags.items()}},
        }
    throttle = {f"throttle_reason_{name}": flag for name, flag in {"status": status, **flags}.items()}
    return {"": {"id": number, "rps_act_freq_mhz": actual, "rps_RP0_freq_mhz": highest, "rc6_enable": 1, **throttle}}
