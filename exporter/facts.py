"""What may be stated of a workload that its environment does not say; a fact's name is a field of ``model.Context``."""

from __future__ import annotations

FACTS: dict[str, dict[str, str | bool]] = {
    "api": {"hip": "hip", "hsa": "hsa", "opencl": "opencl"},
    "backend": {"level_zero": "level_zero", "opencl": "opencl"},
    "driver": {"current": "current", "old": "old"},
    "frontend": {"none": "none", "llama.cpp": "llama.cpp"},
    "multi_driver_library": {"yes": True, "no": False},
    "opencl": {"yes": True, "no": False},
    "probe": {"same_env": "same_env", "clean_env": "clean_env"},
    "space": {"enumeration": "enumeration", "mask_index": "mask_index"},
}
"""A fact's values as they are written, and what each means."""
