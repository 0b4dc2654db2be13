"""How a card fares: temperatures, power, clocks, fans, and what holds it back."""

from __future__ import annotations

from exporter.catalog.family import Family, reading

CONDITION: dict[str, Family] = {
    "temperature": reading(
        "gpu_temperature_celsius",
        "Temperature of the GPU core or edge sensor; gpu_info says which.",
        nvidia="nvmlDeviceGetTemperatureV",
        amd="hwmon's edge sensor, else junction",
        intel="hwmon's package sensor (xe since Linux 6.15), else zesTemperatureGetState",
    ),
    "junction_temperature": reading(
        "gpu_junction_temperature_celsius",
        "Temperature of the hottest spot of the GPU die.",
        amd="hwmon's junction sensor, since Vega 20",
    ),
    "memory_temperature": reading(
        "gpu_memory_temperature_celsius",
        "Temperature of the device memory.",
        nvidia="nvmlDeviceGetFieldValues, of cards with HBM or such a sensor",
        amd="hwmon's mem sensor, since Vega 20",
        intel="hwmon's vram sensor (xe since Linux 6.15), else zesTemperatureGetState",
    ),
    "temperature_threshold": reading(
        "gpu_temperature_threshold_celsius",
        "Temperature at which something is done: slowdown (clocks are lowered), shutdown (the card is switched off), "
        "maximum (the highest that is meant for work), by the sensor that it holds for.",
        own=("sensor", "threshold"),
        nvidia="nvmlDeviceGetTemperatureThreshold; since Ada a driver may tell margins (T.Limit) in its place, which "
        "are no temperatures",
        amd="hwmon's crit (slowdown; critical before Vega 10 and of APUs) and emergency (shutdown) of the sensors edge "
        "(gpu), junction and mem (memory)",
        intel="newer xe's emergency (shutdown), max, and crit (critical: what is done there it does not say) in hwmon",
    ),
    "power": reading(
        "gpu_power_watts",
        "Power that the card draws.",
        nvidia="nvmlDeviceGetFieldValues, else nvmlDeviceGetPowerUsage",
        amd="hwmon's power1_average, else power1_input, of an APU that of the whole chip, its processor included; none "
        "above 2,500 W, which is another unit's, and none of 0",
        intel="the energy over the time since the scrape before, of discrete cards",
    ),
    "power_limit": reading(
        "gpu_power_limit_watts",
        "Power that the card is held to now.",
        nvidia="nvmlDeviceGetFieldValues, else nvmlDeviceGetEnforcedPowerLimit",
        amd="hwmon's power1_cap",
        intel="hwmon's power1_max (of the package power2_max) where it is switched on, else zesPowerGetLimitsExt",
    ),
    "power_limit_default": reading(
        "gpu_power_limit_default_watts",
        "Power limit that the card has when nobody has set another.",
        nvidia="nvmlDeviceGetFieldValues, else nvmlDeviceGetPowerManagementDefaultLimit",
        amd="hwmon's power1_cap_default",
        intel="hwmon's power1_rated_max or power2_rated_max, else zesPowerGetProperties",
    ),
    "power_limit_maximum": reading(
        "gpu_power_limit_max_watts",
        "Highest power limit that can be set.",
        nvidia="nvmlDeviceGetFieldValues, else nvmlDeviceGetPowerManagementLimitConstraints",
        amd="hwmon's power1_cap_max",
    ),
    "energy": reading(
        "gpu_energy_joules_total",
        "Energy that the card has used; the counter is the hardware's own, and starts anew with the driver or sooner.",
        nvidia="nvmlDeviceGetFieldValues, since Volta",
        amd="hwmon's energy1_input, else amdsmi_get_energy_count, in ticks of the size that it tells; RDNA 2 counts "
        "them in 32 bits, which start anew within minutes of full power",
        intel="hwmon's energy1_input, else of the package energy2_input, else zesPowerGetEnergyCounter",
    ),
    "clock": reading(
        "gpu_clock_hertz",
        "Clock of a part of the card now.",
        own=("clock",),
        nvidia="nvmlDeviceGetClockInfo: sm, memory",
        amd="hwmon's freq1_input (graphics) and freq2_input (memory)",
        intel="graphics and media: i915's rps_act_freq_mhz, xe's act_freq, else zesFrequencyGetState; 0 while powered "
        "down, of each tile where a card has several",
    ),
    "clock_maximum": reading(
        "gpu_clock_max_hertz",
        "Highest clock that a part of the card can have.",
        own=("clock",),
        nvidia="nvmlDeviceGetMaxClockInfo",
        amd="the highest level of pp_dpm_sclk (graphics) and pp_dpm_mclk (memory)",
        intel="likewise i915's rps_RP0_freq_mhz, xe's rp0_freq, else zesFrequencyGetProperties",
    ),
    "fan_speed": reading(
        "gpu_fan_speed_ratio",
        "Speed that a fan is told to have, as a share of its highest.",
        own=("fan",),
        nvidia="nvmlDeviceGetFanSpeed_v2",
        amd="hwmon's pwm1 over pwm1_max",
    ),
    "fan_rotation": reading(
        "gpu_fan_speed_rpm",
        "Revolutions per minute of a fan, as measured; Prometheus has no base unit for it.",
        own=("fan",),
        amd="hwmon's fan1_input",
        intel="hwmon's fan1_input and further ones (i915 since Linux 6.12, xe since 6.16: the mean since anybody last "
        "read it), else zesFanGetState",
    ),
    "voltage": reading(
        "gpu_voltage_volts",
        "Voltage of the GPU core.",
        amd="hwmon's in0_input",
        intel="hwmon's in0_input (i915), in1_input (xe); absent while the core has none",
    ),
    "performance_state": reading(
        "gpu_performance_state",
        "Performance state: 0 is the highest performance, 15 the lowest.",
        costly="one call more a card",
        nvidia="nvmlDeviceGetPerformanceState",
    ),
    "throttled": reading(
        "gpu_throttled",
        "1 for each reason that holds the clocks down now, 0 for each other that this card can tell.",
        own=("reason",),
        nvidia="nvmlDeviceGetCurrentClocksEventReasons, of the reasons of nvmlDeviceGetSupportedClocksEventReasons",
        amd="the status in amdgpu's gpu_metrics table, of versions 1.3 (cards up to MI200, and Radeon) and 2.2 to 2.4 "
        "(APUs); other versions have none, or ticks without a unit; of RDNA 3 and 4 nothing of thermal while it is the "
        "hottest spot's alone, which they tell at any temperature",
        intel="i915's throttle_reason_*, xe's throttle/reason_*, of any GT of the card or tile",
    ),
    "throttled_seconds": reading(
        "gpu_throttled_seconds_total",
        "Time during which a reason has held the clocks down.",
        own=("reason",),
        nvidia="nvmlDeviceGetFieldValues",
    ),
}
