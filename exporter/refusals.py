"""Why a mask may not be inverted: the closed list of codes, what each means, where to look, and what to do."""

from __future__ import annotations

from typing import NamedTuple


class RefusalCode(NamedTuple):
    """``meaning`` completes "refused because ..."; ``check`` is what to look at on the host, with commands between
    backticks; ``advice`` is a sentence on what to do.
    """

    meaning: str
    check: str
    advice: str


_CARDS = r"`lspci -nn | grep -E '\[(03|12)..\]:'`"
_ENVIRON = r"`tr '\0' '\n' </proc/PID/environ`"
_USE_UUIDS = "Name the cards by UUID in the mask: a UUID mask needs neither order nor numbering."

REFUSALS: dict[str, RefusalCode] = {
    "backend-down": RefusalCode(
        "the vendor's backend gives no inventory now",
        "`gpu-fleet-exporter inventory` says of each vendor that is expected here, and down, why. A fleet whose "
        f"runtime no card of this host has is refused with this too: {_CARDS} shows the cards.",
        "See gpu_exporter_backend_fault_info and the log for the reason; the mask is inverted as soon as the "
        "backend is up.",
    ),
    "contradicted": RefusalCode(
        "two ways of knowing name different cards",
        "The line `found:` of `explain` names both sides. Compare `nvidia-smi --query-compute-apps=pid,gpu_uuid "
        f"--format=csv`, or on AMD the processes in /sys/class/kfd/kfd/proc, with the masks of {_ENVIRON}.",
        "The workload computes on a card that its masks, as it was started with them, hide; or the driver names other "
        "cards than the masks say. A framework that sets masks in its own process (Ray, launchers of torch) hides "
        "them from view: give each worker its mask before it starts, or state env: in the fleet's settings.",
    ),
    "doc-conflict": RefusalCode(
        "AMD's manual and its source disagree about GPU_DEVICE_ORDINAL, and that makes a difference",
        "`GPU_DEVICE_ORDINAL` is in the fleet's env or in /proc/PID/environ; the lines above `refused:` of `explain` "
        "show what the other masks leave without it.",
        "Unset GPU_DEVICE_ORDINAL for the workload, and in the fleet's env: HIP_VISIBLE_DEVICES does all that it does.",
    ),
    "driver-order-unknown": RefusalCode(
        "the order in which Level Zero's drivers list these cards is not known",
        "The line `found:` of `explain` says whether it is the driver's age, or what the cards are. `dpkg -l | grep "
        f"-E 'libze|level-zero'` shows the driver's version where the workload runs, and {_CARDS} the cards.",
        "Where the workload's driver is of 2024 or later state known: {driver: current} in the fleet's settings. Where "
        "all cards are of one model set ZE_ENABLE_PCI_ID_DEVICE_ORDER=1 for the workload, and in the fleet's env. "
        "Otherwise let it open one card, and state that as reach:.",
    ),
    "environment-overwritten": RefusalCode(
        "the process has written over the environment that it was started with",
        f"{_ENVIRON} shows a title, or pieces of one, where lines of NAME=VALUE belong, and `ps -o args= -p PID` a "
        "title that is not the command that was run.",
        "Set SPT_NOENV=1 for a Python program that sets its title; or state env: in the fleet's settings.",
    ),
    "evidence-not-accepted": RefusalCode(
        "the answer's grade of evidence is not in mapping.accept",
        "The line `found:` of `explain` has the answer's grade, and what mapping.accept lists. Where a driver was "
        "asked and did not prove more, the log's line `driver gives no answer` says why.",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the workload, or add the grade to mapping.accept.",
    ),
    "frontend-order": RefusalCode(
        "llama.cpp numbers devices of its own over the runtime's",
        "Look for GGML_CUDA_DEVICES in the fleet's env and in /proc/PID/environ, and for names that begin with "
        "GGML_SYCL_ in the fleet's env; `tr '\\0' ' ' </proc/PID/cmdline` tells whether the program is llama.cpp.",
        "Unset GGML_CUDA_DEVICES, or the GGML_SYCL_ variables of a workload that is not llama.cpp; for one that "
        "is, name a single device, or use a fleet of runtime host.",
    ),
    "hierarchy-unknown": RefusalCode(
        "whether Level Zero shows a card or each of its tiles as one device is not known",
        "The line `found:` of `explain` says whether it is the hierarchy or a card's number of tiles. `lspci -nn -d "
        "8086:` names the product, and `ls -d /sys/bus/pci/devices/ADDRESS/tile*` has the tiles where the driver is "
        "xe.",
        "Set ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE, in capitals, for the workload and in the fleet's env, and name "
        "whole cards.",
    ),
    "integer-wrap": RefusalCode(
        "a number in the mask overflows the runtime's integer type",
        "`explain` prints the mask as the workload has it: look for a number of ten digits or more, or of eight or "
        "more hexadecimal ones.",
        "Correct the number in the mask.",
    ),
    "inventory-incomplete": RefusalCode(
        "the host's cards were not all known when the workload's index space was fixed",
        "`gpu-fleet-exporter inventory` says whether a card could not be identified and which ones sleep, and "
        f"{_CARDS} how many there should be. Of live processes it may also be a card that came or left while they "
        "were started: `journalctl -k` says when.",
        "Bring back or wake the missing card; or name the cards by full UUID, which CUDA and ROCm can.",
    ),
    "isa-drop": RefusalCode(
        "ROCr may drop a card whose instruction set it does not know, and later cards would move up",
        "HSA_OVERRIDE_GFX_VERSION is in the environment, and a row of the saved inventory has `hsa_isa_ok: false`; "
        "`rocminfo`, run under the workload's variables, lists the cards that ROCr keeps.",
        "Unset HSA_OVERRIDE_GFX_VERSION, or leave that card out with ROCR_VISIBLE_DEVICES.",
    ),
    "kfd-order-unknown": RefusalCode(
        "ROCm numbers the cards in the order of KFD nodes, which is not known",
        "`grep . /sys/class/kfd/kfd/topology/nodes/*/gpu_id` has a number other than 0 for each card. There is no "
        "such folder where the kernel has no KFD, and reading fails where a device cgroup keeps a card from the "
        "exporter.",
        "Let the exporter read /sys/class/kfd, or name the cards by UUID in ROCR_VISIBLE_DEVICES.",
    ),
    "layer-reorder": RefusalCode(
        "a variable makes the Vulkan loader or a layer order the devices otherwise than they were enumerated",
        "The line `found:` of `explain` names the variable; `vulkaninfo --summary` with it and without it shows both "
        "orders.",
        "Unset that variable for the workload, or let the devices be enumerated under it.",
    ),
    "legacy-selector": RefusalCode(
        "a legacy SYCL variable is set whose effect depends on the release",
        "`tr '\\0' '\\n' </proc/PID/environ | grep ^SYCL_` shows SYCL_DEVICE_FILTER, SYCL_DEVICE_ALLOWLIST or "
        "SYCL_CONFIG_FILE_NAME; one that is set and empty counts too.",
        "Select devices with ONEAPI_DEVICE_SELECTOR instead.",
    ),
    "mig-driver-unknown": RefusalCode(
        "the mask names several MIG instances and the driver branch, which decides how many are visible, is not known",
        "`cat /proc/driver/nvidia/version` has the version, which `gpu_info` shows as driver_version where the "
        "exporter could read it; over a saved inventory `--driver-version` states it.",
        "Name one MIG instance a process, or let the exporter read the driver version.",
    ),
    "mig-mixed": RefusalCode(
        "whole GPUs and MIG instances would be visible together, whose order is not established",
        "`nvidia-smi -L` lists each card with its MIG instances under it: compare that with the mask that `explain` "
        "prints. A card with one instance stands for that instance.",
        "Name either whole GPUs or MIG instances in one mask.",
    ),
    "mig-multiplicity": RefusalCode(
        "a GPU in MIG mode stands for an instance that nothing specifies",
        "`nvidia-smi -L` shows the instances: the mask names a card in MIG mode with none or several of them, two "
        "compute instances of one GPU instance, or more than 64 instances.",
        "Name the MIG instance by its MIG- UUID in the mask.",
    ),
    "mps": RefusalCode(
        "an MPS server may number the cards differently for its clients",
        "`pgrep -af nvidia-cuda-mps` shows the server, and CUDA_MPS_PIPE_DIRECTORY in /proc/PID/environ that the "
        "workload is its client; clients count the cards that the server's own CUDA_VISIBLE_DEVICES leaves.",
        _USE_UUIDS,
    ),
    "multiple-driver-libraries": RefusalCode(
        "several Level Zero driver libraries may be installed, and each applies the mask to its own devices",
        "`ldconfig -p | grep libze_intel_gpu`, in the workload's container where it has one, lists the driver "
        "libraries: libze_intel_gpu.so.1 is the current one, libze_intel_gpu_legacy1.so.1 the other.",
        "Where the workload has one library state known: {multi_driver_library: no} in the fleet's settings. Otherwise "
        "let it open cards of one model only, and state them as reach:.",
    ),
    "no-permission": RefusalCode(
        "the exporter may not see the workload's processes, or not read the environment of them",
        "The log's line `masks refused` says what could not be seen; root's `explain` sees it. `systemctl show -p "
        "ProtectProc -p AmbientCapabilities gpu-fleet-exporter` shows which rights the service has.",
        "Where systemd runs the exporter enable its drop-in process-fleets.conf: docs/installation.md says how. "
        "Otherwise run it as the workload's user, or give it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH. Or state env: in "
        "the fleet's settings.",
    ),
    "opencl-order-unknown": RefusalCode(
        "the cards are visible through OpenCL only, whose order is not established",
        "`sycl-ls`, run under the workload's variables, shows the cards as opencl:gpu alone; `ls "
        "/etc/OpenCL/vendors` whether there is an OpenCL platform at all.",
        "Select them through Level Zero: ONEAPI_DEVICE_SELECTOR=level_zero:...",
    ),
    "order-unknown": RefusalCode(
        "CUDA numbers unequal cards in an order that cannot be known from outside",
        "`nvidia-smi -L` shows whether the cards are of one model, and the line `found:` of `explain` what "
        "CUDA_DEVICE_ORDER is. Where libcuda was asked and did not settle it, the log's line `driver gives no "
        "answer` says why.",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the workload (and in the fleet's env), or name the cards by UUID.",
    ),
    "over-the-cap": RefusalCode(
        "the mask repeats devices more often than a fleet may have them",
        "`explain` prints the mask: count what it names, each repetition and each device behind a * too. 1,024 are "
        "the most.",
        "Name each device once.",
    ),
    "process-gone": RefusalCode(
        "no process of the workload is running",
        "The line `found:` of `explain` says what was looked for: `systemctl status UNIT` or `cat PIDFILE` shows "
        "whether it is there. A pid file that is older than its process (`ls -l PIDFILE`, `ps -o lstart= -p PID`) is "
        "not believed.",
        "Nothing, if it is meant to be stopped; else see that pid_file, systemd_unit, process or cgroup finds it. The "
        "installed service sees no homes and has a /tmp of its own: a pid file belongs elsewhere.",
    ),
    "process-hangs": RefusalCode(
        "the kernel does not answer what is asked of the process",
        "`ps -o stat,wchan:32,comm -p PID` shows the state D, and where in the kernel it waits. Do not ask for its "
        "arguments or its environment: whoever does may hang as well.",
        "The process hangs in the kernel, often in a GPU driver: see the kernel's log.",
    ),
    "raw-order-unknown": RefusalCode(
        "the raw order of the Vulkan devices can only be enumerated, and was not",
        "The log's line `driver gives no answer` says why the list that `vulkaninfo --summary` shows was not taken. "
        "Nobody is asked under variables that name files, layers or displays, such as VK_DRIVER_FILES or DISPLAY: "
        "see /proc/PID/environ.",
        "Watch the workload's cards through its CUDA, ROCm or Level Zero runtime, or through a fleet of runtime host.",
    ),
    "reach-unknown": RefusalCode(
        "which cards the process can open is not known, so neither is its numbering",
        "`nsenter -t PID -m ls -l /dev /dev/dri` shows what the workload has, and "
        "`systemctl show -p DevicePolicy -p DeviceAllow UNIT` what a unit may open of it. Where the settings state "
        "the reach compare it with `gpu-fleet-exporter inventory`.",
        "State reach: in the fleet's settings with cards that this host has; or name the cards by UUID, which CUDA "
        "and ROCm can.",
    ),
    "runtime-init-fails": RefusalCode(
        "the runtime fails to initialise on this value",
        "The line `found:` of `explain` names the entry: for ROCr an empty one, for Level Zero one that is no number "
        "or has too many parts. `journalctl -u UNIT` has how the workload's start failed.",
        "Correct the mask: the workload does not start with it, or sees no device.",
    ),
    "selector-invalid": RefusalCode(
        "ONEAPI_DEVICE_SELECTOR does not parse, and the program ends with an exception",
        "The line `found:` of `explain` names the term; `sycl-ls`, run under the workload's variables, ends with an "
        "exception too.",
        "Write BACKEND:DEVICE[,DEVICE...], several separated by semicolons, such as level_zero:0,2; unset it for all.",
    ),
    "token-dialect": RefusalCode(
        "the known readings of this mask disagree",
        "The line `found:` of `explain` says what is read in more than one way. `tr '\\0' '\\n' "
        "</proc/PID/environ | grep -aE 'VISIBLE|MASK|SELECTOR' | cat -A` shows blanks, signs and characters that a "
        "terminal hides.",
        "Write plain decimal numbers, or, for CUDA and ROCm, whole UUIDs as the vendor's tool prints them, and "
        "nothing else.",
    ),
    "windows-order": RefusalCode(
        "the numbering of devices on Windows is not modelled",
        "`uname -s` says Linux wherever the exporter reads a workload, in WSL2 too: nothing can state another system "
        "today, so nothing is refused with this.",
        "Run the exporter on the host that has the cards.",
    ),
}
