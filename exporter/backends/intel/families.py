"""Which product family an Intel GPU is of, by its PCI device id, and what its Level Zero driver makes of that.

Facts read from Intel's compute-runtime, from its first table of device ids to that of early 2026 (commit 0c387789):
``shared/source/dll/devices/devices_base.inl`` (the ids, of dropped ones too; those of simulators are left out), the
capability table in each family's ``hw_info_*.cpp`` (integrated or not, served by Level Zero or not),
``documentation/LEGACY_PLATFORMS.md`` (which library), ``Device::groupDevices`` in ``shared/source/device/device.cpp``
(the order of driver handles), and the ``PRODUCT_FAMILY`` enumeration that it compares, in ``igfxfmid.h`` of Intel's
gmmlib and graphics compiler. A driver passes over cards whose ids it does not know; a newer one may know ids that are
not here.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Family(NamedTuple):
    """A product family of compute-runtime and the device ids of its cards.

    ``rank`` is its value in ``PRODUCT_FAMILY``: of two driver handles that are alike in having integrated or discrete
    devices, the one of the higher value comes first. ``hpc`` is Data Center GPU Max, whose tiles are devices where the
    environment says nothing. A card of a ``multi_tile`` family has one, two or four tiles, of any other family one.

    ``driver_library`` is where release 24.35 and later put it: Gen8, Gen9 and Gen11 are in the legacy library, from
    Gen12 on all are in the current one; earlier releases had one library for all. It is None where the driver itself
    says that Level Zero does not serve the family; such a card counts in the list that ``ZE_AFFINITY_MASK`` numbers in
    the library that knows its id, but is never enumerated.

    ``sorted`` says that every driver that knows the family orders its cards, discrete before integrated and by PCI
    address in each. The order came with commit 7f995ef5 in 2023: before it cards were sorted under
    ``ZE_ENABLE_PCI_ID_DEVICE_ORDER`` alone. Families first added in 2024 or later are later than it. So is Arrow Lake,
    of 2023: its first capability table (commit a3faf5da) is without the source level debugger's entry, and the tests
    of 7f995ef5 still have that debugger. For the others a driver older than the order exists, or may.
    """

    name: str
    rank: int
    device_ids: frozenset[int]
    integrated: bool = True
    hpc: bool = False
    driver_library: Literal["legacy1", "current"] | None = "current"
    sorted: bool = False
    multi_tile: bool = False


def _ids(text: str) -> frozenset[int]:
    return frozenset(int(device_id, 16) for device_id in text.split())


FAMILIES: Final = (
    # Gen8
    Family(
        "BDW",
        16,
        _ids("1602 1606 160a 160d 160e 1612 1616 161a 161d 161e 1622 1626 162a 162b 162d 162e"),
        driver_library=None,
    ),
    # Gen9
    Family(
        "SKL",
        18,
        _ids(
            "1902 1906 190a 190b 190e 1912 1913 1915 1916 1917 191a 191b 191d 191e 1921 1923 1926 1927 192a 192b 192d"
            " 1932 193a 193b 193d"
        ),
        driver_library="legacy1",
    ),
    Family(
        "KBL",
        19,
        _ids(
            "5902 5906 5908 590a 590b 590e 5912 5913 5915 5916 5917 591a 591b 591c 591d 591e 5921 5923 5926 5927 592a"
            " 592b 5932 593a 593b 593d"
        ),
        driver_library="legacy1",
    ),
    Family(  # and Comet Lake
        "CFL",
        20,
        _ids(
            "3e90 3e91 3e92 3e93 3e94 3e95 3e96 3e98 3e99 3e9a 3e9b 3ea0 3ea1 3ea2 3ea3 3ea4 3ea5 3ea6 3ea7 3ea8 3ea9"
            " 9b21 9b41 9ba0 9ba2 9ba4 9ba5 9ba8 9baa 9bab 9bac 9bc0 9bc2 9bc4 9bc5 9bc6 9bc8 9bca 9bcb 9bcc 9be6 9bf6"
        ),
        driver_library="legacy1",
    ),
    Family("BXT", 22, _ids("0a84 1a84 1a85 5a84 5a85"), driver_library=None),  # Apollo Lake
    Family("GLK", 23, _ids("3184 3185"), driver_library=None),
    # Gen11
    Family("ICLLP", 26, _ids("8a50 8a51 8a52 8a56 8a58 8a5a 8a5c"), driver_library="legacy1"),
    Family("LKF", 27, _ids("9840"), driver_library=None),
    Family("EHL", 28, _ids("4500 4541 4551 4555 4571 4e51 4e55 4e61 4e71"), driver_library=None),  # and Jasper Lake
    # Gen12
    Family("TGLLP", 29, _ids("9a40 9a49 9a59 9a60 9a68 9a70 9a78")),
    Family("RKL", 30, _ids("4c80 4c8a 4c8b 4c8c 4c90 4c9a")),
    Family(  # and Raptor Lake S
        "ADLS",
        31,
        _ids("4680 4682 4688 468a 468b 4690 4692 4693 a780 a781 a782 a783 a788 a789 a78a a78b"),
    ),
    Family(  # and Raptor Lake P
        "ADLP",
        32,
        _ids(
            "4626 4628 462a 46a0 46a1 46a2 46a3 46a6 46a8 46aa 46b0 46b1 46b2 46b3 46c0 46c1 46c2 46c3"
            " a720 a721 a7a0 a7a1 a7a8 a7a9 a7aa a7ab a7ac a7ad"
        ),
    ),
    Family("ADLN", 33, _ids("46d0 46d1 46d2 46d3 46d4")),
    Family("DG1", 1210, _ids("4905 4906 4907 4908 4909"), integrated=False),
    # Xe-HP, Xe-HPG, Xe-HPC
    Family(
        "XE_HP_SDV",
        1250,
        _ids("0201 0202 0203 0204 0205 0206 0207 0208 0209 020a 020b 020c 020d 020e 020f 0210"),
        integrated=False,
        multi_tile=True,
    ),
    Family(  # Arc A, Arc Pro A, Data Center GPU Flex
        "DG2",
        1270,
        _ids(
            "4f80 4f81 4f82 4f83 4f84 4f85 4f86 4f87 4f88 5690 5691 5692 5693 5694 5695 5696 5697 56a0 56a1 56a2 56a3"
            " 56a4 56a5 56a6 56af 56b0 56b1 56b2 56b3 56ba 56bb 56bc 56bd 56be 56bf 56c0 56c1 56c2"
        ),
        integrated=False,
    ),
    Family(  # Data Center GPU Max
        "PVC",
        1271,
        _ids("0b69 0b6e 0bd0 0bd1 0bd2 0bd4 0bd5 0bd6 0bd7 0bd8 0bd9 0bda 0bdb"),
        integrated=False,
        hpc=True,
        multi_tile=True,
    ),
    Family("MTL", 1272, _ids("7d40 7d45 7d55 7d60 7dd5")),
    Family("ARL", 1273, _ids("7d41 7d51 7d67 7dd1"), sorted=True),
    # Xe2
    Family(  # Arc B, Arc Pro B
        "BMG",
        1274,
        _ids("e202 e209 e20b e20c e20d e210 e211 e212 e215 e216 e220 e221 e222 e223"),
        integrated=False,
        sorted=True,
    ),
    Family("LNL", 1275, _ids("6420 64a0 64b0"), sorted=True),
    # Xe3, Xe3P
    Family(  # and Wildcat Lake
        "PTL",
        1300,
        _ids("b080 b081 b082 b083 b084 b085 b086 b087 b08f b090 b0a0 b0b0 fd80 fd81"),
        sorted=True,
    ),
    Family("NVLS", 1340, _ids("d740 d741 d742 d743 d744 d745"), sorted=True),
    Family("NVLP", 1360, _ids("d74a d74b d750 d751 d752 d753 d754 d755 d756 d757 d75f"), sorted=True),
    Family("CRI", 1380, _ids("674c"), integrated=False, sorted=True),
)

_BY_ID: Final = {device_id: family for family in FAMILIES for device_id in family.device_ids}


def family_of(device_id: int) -> Family | None:
    """The family of the card with this PCI device id, of vendor 0x8086; None where no stored table has the id."""
    return _BY_ID.get(device_id)
