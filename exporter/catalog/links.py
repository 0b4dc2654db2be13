"""The card's links: PCIe to the host, and those to other cards."""

from __future__ import annotations

from exporter.catalog.family import Family, reading

LINKS: dict[str, Family] = {
    "pcie_generation": reading(
        "gpu_pcie_link_generation",
        "PCIe generation of the card's link now; many cards lower it while idle.",
        nvidia="sysfs's current_link_speed",
        amd="sysfs's current_link_speed, of the card's own switch where it has one",
        intel="sysfs's current_link_speed, of the card's own switch where it has one",
    ),
    "pcie_generation_maximum": reading(
        "gpu_pcie_link_generation_max",
        "Highest PCIe generation of the card's side of the link.",
        nvidia="sysfs's max_link_speed",
        amd="sysfs's max_link_speed",
        intel="sysfs's max_link_speed",
    ),
    "pcie_width": reading(
        "gpu_pcie_link_width_lanes",
        "Lanes of the card's PCIe link that are in use.",
        nvidia="sysfs's current_link_width",
        amd="sysfs's current_link_width",
        intel="sysfs's current_link_width",
    ),
    "pcie_width_maximum": reading(
        "gpu_pcie_link_width_max_lanes",
        "Lanes that the card's side of the PCIe link has.",
        nvidia="sysfs's max_link_width",
        amd="sysfs's max_link_width",
        intel="sysfs's max_link_width",
    ),
    "pcie_replays": reading(
        "gpu_pcie_replays_total",
        "PCIe packets that were sent again.",
        nvidia="nvmlDeviceGetFieldValues",
        amd="amdgpu's pcie_replay_count",
    ),
    "pcie_errors": reading(
        "gpu_pcie_errors_total",
        "Errors that the card's PCIe ports have found since the host found the card: correctable, nonfatal or fatal.",
        own=("severity",),
        nvidia="sysfs's aer_dev_correctable, aer_dev_nonfatal and aer_dev_fatal",
        amd="sysfs's aer_dev_correctable, aer_dev_nonfatal and aer_dev_fatal, with those of the card's own switch",
        intel="sysfs's aer_dev_correctable, aer_dev_nonfatal and aer_dev_fatal, with those of the card's own switch",
    ),
    "pcie_transmitted": reading(
        "gpu_pcie_transmit_bytes_total",
        "Bytes that the card has sent over PCIe.",
        nvidia="nvmlDeviceGetFieldValues, since Blackwell or driver 565",
    ),
    "pcie_received": reading(
        "gpu_pcie_receive_bytes_total",
        "Bytes that the card has received over PCIe.",
        nvidia="nvmlDeviceGetFieldValues, since Blackwell or driver 565",
    ),
    "pcie_transmit_rate": reading(
        "gpu_pcie_transmit_bytes_per_second",
        "Rate at which the card sends over PCIe, in the time that the reading takes.",
        costly="each reading takes 20 milliseconds, of some vendors' cards a second",
        nvidia="nvmlDeviceGetPcieThroughput",
        amd="amdgpu's pcie_bw, which takes a second: messages times the largest payload, so the most that it can be",
    ),
    "pcie_receive_rate": reading(
        "gpu_pcie_receive_bytes_per_second",
        "Rate at which the card receives over PCIe, in the time that the reading takes.",
        costly="each reading takes 20 milliseconds, of some vendors' cards a second",
        nvidia="nvmlDeviceGetPcieThroughput",
        amd="amdgpu's pcie_bw, which takes a second: messages times the largest payload, so the most that it can be",
    ),
    "link_up": reading(
        "gpu_interconnect_link_up",
        "1 while a link to other cards is up (NVLink, XGMI), 0 while it is not.",
        own=("link",),
        nvidia="nvmlDeviceGetFieldValues",
    ),
    "link_transmitted": reading(
        "gpu_interconnect_transmit_bytes_total",
        "Bytes that were sent over a link to other cards.",
        own=("link",),
        nvidia="nvmlDeviceGetFieldValues",
    ),
    "link_received": reading(
        "gpu_interconnect_receive_bytes_total",
        "Bytes that were received over a link to other cards.",
        own=("link",),
        nvidia="nvmlDeviceGetFieldValues",
    ),
    "link_errors": reading(
        "gpu_interconnect_errors_total",
        "Errors of a link to other cards, by kind.",
        own=("link", "error"),
        nvidia="nvmlDeviceGetFieldValues",
        amd="amdgpu's ras/xgmi_wafl_err_count, of all links together",
    ),
}
