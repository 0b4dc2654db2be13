"""Devices found by every name they have, and inventories saved and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from msgspec.structs import replace

from exporter.errors import InventoryFileError
from exporter.inventory import Inventory, narrowed
from exporter.model import Device, DeviceKey, VulkanDevice
from exporter.saved_inventory import Row, from_rows, read_rows, to_rows
from tests import test_level_zero_masks, test_rocm_masks
from tests.strategies import GIB, Case, asleep, board, card, cards, cases

HOST = Inventory((*board("a", (1, 0), (2, 1)), card("b"), asleep(card("c"))))
A, B, C = (card(letter).key for letter in "abc")
A_ADDRESS, C_ADDRESS = card("a").pci_bus_id, card("c").pci_bus_id


def amd(address: str, index: int = 0) -> Device:
    return Device(key=DeviceKey("amd", address), physical_index=index, pci_bus_id=address, name="AMD Instinct MI210")


PARTITIONS = test_rocm_masks.partitions("b", "GPU-0001", "GPU-0001", "GPU-0003")
MAX = test_level_zero_masks.cards("ab", tiles=2, **test_level_zero_masks.MAX)
TILES = tuple(device for each in MAX for device in (each, narrowed(each, (0,)), narrowed(each, (1,))))
RAW = tuple(
    VulkanDevice(raw_position=place, kind=kind, driver=driver, vendor="nvidia", uuid=uuid, pci_bus_id=address)
    for place, (kind, driver, uuid, address) in enumerate(
        (("cpu", "llvmpipe", "s", ""), ("discrete", "nvidia", "a", A_ADDRESS), ("discrete", "nvk", "a", A_ADDRESS))
    )
)
ODD_NAMES = ("null", "~", "no", "4090", "17:00.0")


# --- finding


def test_find_by_key() -> None:
    """A key finds its device, card or instance; a key of no device finds none."""
    instance = HOST.parts(A)[1]
    assert HOST.find(A) == HOST.devices[0]
    assert HOST.find(instance.key) == instance
    assert HOST.find(card("d").key) is None
    assert HOST.find(DeviceKey("amd", A.identity)) is None


def test_find_by_the_address_of_a_card_that_slept() -> None:
    """The key of a placeholder finds the placeholder, and the card itself once it has told its UUID."""
    key = asleep(card("c")).key
    assert HOST.find(key) == asleep(card("c"))
    assert Inventory((card("b"), card("c"))).find(key) == card("c")
    assert Inventory((card("b"),)).find(key) is None
    assert Inventory((msgspec.structs.replace(card("c"), key=DeviceKey("amd", "x")),)).find(key) is None


def test_an_address_finds_the_board_and_no_part() -> None:
    """The address of a board in MIG mode, which its instances share, finds the board."""
    woken = Inventory((*HOST.parts(A), HOST.devices[0]))
    assert woken.find(DeviceKey("nvidia", A_ADDRESS)) == HOST.devices[0]


def test_tiles_of_a_card_are_found() -> None:
    """Some of a card's tiles are found on it, where it has that many."""
    inventory = Inventory((MAX[0], replace(MAX[1], tiles=4)))
    found = inventory.find(DeviceKey("intel", "0000:20:00.0/t1+t3"))
    assert found is not None
    assert (found.partition, found.parent, found.physical_index, found.name) == ("1+3", MAX[1].key, 1, MAX[1].name)
    for text in ("0000:20:00.0/t4", "0000:10:00.0/t0+t2", "0000:20:00.0/t", "0000:20:00.0/t1+", "0000:99:00.0/t0"):
        assert inventory.find(DeviceKey("intel", text)) is None


def test_an_address_names_partitions_where_there_is_no_card() -> None:
    """And the card alone where there is one; a shared UUID names all that have it."""
    assert Inventory(PARTITIONS).named("0000:20:00.0") == PARTITIONS
    whole = test_rocm_masks.card("b")
    assert Inventory((*PARTITIONS, whole)).named("20:00.0") == (whole,)
    assert Inventory(PARTITIONS).named("GPU-0001") == PARTITIONS[:2]
    assert Inventory(PARTITIONS).named("") == ()


@pytest.mark.parametrize("text", ["0000:a1:00.0/xcp1", "0000:a1:00.0/t0", "", "N/A"])
def test_an_address_with_a_part_is_no_placeholder(text: str) -> None:
    """The key of a partition or a tile finds nothing but itself."""
    assert Inventory((amd("0000:a1:00.0"),)).find(DeviceKey("amd", text)) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *((A.identity, A), (A_ADDRESS, A), (A_ADDRESS.upper(), A), (f"0000{A_ADDRESS}", A), (A_ADDRESS[5:], A)),
        *((C_ADDRESS, asleep(card("c")).key), (HOST.devices[1].uuid, HOST.devices[1].key)),
        *((A.identity[:12], None), (A.identity.lower(), None), (C.identity, None), ("0000:ff:00.0", None), ("0", None)),
    ],
)
def test_named(text: str, key: DeviceKey | None) -> None:
    """A full UUID names a device and an address in any spelling names a card; a shortened UUID and an index do not."""
    found = HOST.named(text)
    assert [device.key for device in found] == ([key] if key else [])


def test_boards_are_in_the_order_of_their_addresses() -> None:
    """Whole cards come by ascending address, compared as numbers; parts are not among them."""
    addresses = ["0000:09:00.0", "0000:0a:00.0", "0000:0a:01.0", "0001:00:00.0", "ffff:00:00.0", "10000:00:00.0"]
    inventory = Inventory(tuple(amd(address) for address in reversed(addresses)))
    assert [device.pci_bus_id for device in inventory.boards()] == addresses
    assert [device.key for device in HOST.boards()] == [A, B, asleep(card("c")).key]


def test_parts_and_vendors() -> None:
    """The parts of a card come in the library's order, and one vendor's devices can be had alone."""
    assert [device.partition for device in HOST.parts(A)] == ["1/0", "2/1"]
    assert HOST.parts(B) == ()
    both = Inventory((card("a"), amd("0000:03:00.0")), whole=False)
    assert both.of("amd") == Inventory((amd("0000:03:00.0"),), whole=False)


# --- saving and reading back


def there_and_back(inventory: Inventory, directory: Path) -> Inventory:
    """The inventory written to a file and read from it."""
    path = directory / "inventory.yaml"
    path.write_text(yaml.safe_dump(to_rows(inventory)), encoding="utf-8")
    read, reach = from_rows(read_rows(str(path)), "nvidia")
    assert reach is None
    return read


@pytest.mark.parametrize(
    "inventory",
    [
        Inventory(),
        Inventory(cards("abcd")),
        Inventory((card("a", minor_number=3, mig_mode=False), card("b", name="", memory_total_bytes=None))),
        HOST,
        Inventory((*board("a"), *board("b", (7, 0)))),
        Inventory((amd("0000:03:00.0"), card("e", name="\u00e4\u2122: #'\""), amd("10000:63:00.0", 1))),
        Inventory(tuple(card(letter, name=name) for letter, name in zip("abcde", ODD_NAMES, strict=True))),
        Inventory((test_rocm_masks.card("a", hsa_isa_ok=False, hip_ok=True), *PARTITIONS)),
        Inventory((*TILES, test_level_zero_masks.B580)),
        Inventory(cards("ab"), vulkan=RAW),
    ],
    ids=[
        *("empty", "equal", "details", "mig-and-sleeping", "mig", "amd-and-odd-text", "names-that-mean-something"),
        *("partitions", "tiles", "vulkan"),
    ],
)
def test_rows_there_and_back(inventory: Inventory, tmp_path: Path) -> None:
    """A saved inventory reads back as it was: cards, instances, placeholders, other vendors."""
    assert there_and_back(inventory, tmp_path) == inventory


@given(cases(mig=True))
def test_any_rows_there_and_back(case: Case) -> None:
    """Any inventory comes back from its rows with the same devices, cards in the order of their addresses."""
    inventory = case.rack.put_to_sleep([device for device in case.chosen if not device.mig_mode])
    read, _ = from_rows(msgspec.convert(to_rows(inventory), list[Row]), "nvidia")
    assert read.by_key == inventory.by_key
    assert read.boards() == inventory.boards()


def test_what_only_vulkan_shows_is_no_card() -> None:
    """Other runtimes may not see it; and the raw list is in the order of its positions, wherever its rows stand."""
    rows = msgspec.convert(to_rows(Inventory(vulkan=RAW)), list[Row])
    inventory, reach = from_rows(rows[::-1], "nvidia")
    assert inventory == Inventory(vulkan=RAW)
    assert reach is None


def test_rows_are_plain_data() -> None:
    """A row has an identity, the vendor and the parts, and nothing that is not known."""
    (row,) = to_rows(Inventory((asleep(card("c", name="")),)))
    assert row == {"mig": [], "index": None, "uuid": None, "pci": C_ADDRESS, "vendor": "nvidia"}
    (row,) = to_rows(Inventory(board("a", (2, 1))))
    assert row["mig"] == [
        {"index": 0, "uuid": HOST.parts(A)[0].uuid, "gi": 2, "ci": 1}
        | {"name": "NVIDIA H100 MIG 1g.10gb", "memory_total_bytes": 10 * GIB}
    ]


def row(**changes: Any) -> Row:
    facts: dict[str, Any] = {"index": 0, "uuid": A.identity, "pci": "21:00.0"}
    return msgspec.convert(facts | changes, Row)


def test_identities_of_vendors() -> None:
    """An NVIDIA card is its UUID and else its address; another vendor's is its address, with its partition."""
    rows = [row(), row(uuid=None), row(vendor="amd"), row(vendor="amd", xcp=3), row(vendor="intel", uuid=None)]
    inventory, _ = from_rows(rows, "nvidia")
    assert [device.key for device in inventory.devices] == [
        A,
        DeviceKey("nvidia", "0000:21:00.0"),
        DeviceKey("amd", "0000:21:00.0"),
        DeviceKey("amd", "0000:21:00.0/xcp3"),
        DeviceKey("intel", "0000:21:00.0"),
    ]


def test_partitions_are_rows_beside_their_card() -> None:
    """AMD's card and its partitions are saved and read back; an Intel card's tiles follow from their number."""
    board = DeviceKey("amd", "0000:83:00.0")
    parts = [
        Device(
            key=DeviceKey("amd", f"0000:83:00.0/xcp{part}"),
            physical_index=2 + part,
            pci_bus_id="0000:83:00.0",
            partition=str(part),
            parent=board,
            kfd_node=5 + part,
        )
        for part in range(2)
    ]
    intel = Device(
        key=DeviceKey("intel", "0000:03:00.0"),
        physical_index=0,
        pci_bus_id="0000:03:00.0",
        tiles=2,
        product_family_rank=1271,
        driver_library="current",
        driver_sorts=False,
    )
    tiles = [narrowed(intel, [tile]) for tile in range(2)]
    devices = (Device(key=board, physical_index=2, pci_bus_id="0000:83:00.0"), *parts, intel, *tiles)
    rows = [msgspec.convert(row, Row) for row in to_rows(Inventory(devices))]
    assert [(entry.pci, entry.xcp) for entry in rows] == [
        ("0000:03:00.0", None),
        ("0000:83:00.0", None),
        ("0000:83:00.0", 0),
        ("0000:83:00.0", 1),
    ]
    back, _ = from_rows(rows, "nvidia")
    assert set(back.devices) == set(devices)


def test_the_reach_that_rows_state() -> None:
    """Flags of accessibility make a reach, in which a card without a flag is; without any flag there is none."""
    rows = [row(), row(uuid=B.identity, accessible=False), row(uuid=C.identity, accessible=True)]
    assert from_rows(rows, "nvidia")[1] == frozenset((A, C))
    assert from_rows(rows[:1], "nvidia")[1] is None
    assert from_rows([row(accessible=False)], "nvidia")[1] == frozenset()


@pytest.mark.parametrize("mode", [None, True, False])
def test_instances_mean_mig_mode(mode: bool | None) -> None:
    """A row with instances is in MIG mode unless it says otherwise; one without says so itself."""
    part = {"index": 0, "uuid": "MIG-1", "gi": 1, "ci": 0}
    inventory, _ = from_rows([row(mig=[part], mig_mode=mode), row(uuid=B.identity, mig_mode=mode)], "nvidia")
    first, instance, second = inventory.devices
    assert (first.mig_mode, second.mig_mode) == (True if mode is None else mode, mode)
    assert (instance.parent, instance.partition, instance.pci_bus_id) == (A, "1/0", "0000:21:00.0")


# --- files


def complaint(path: Path) -> str:
    with pytest.raises(InventoryFileError) as caught:
        read_rows(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


GOOD = "{index: 0, uuid: GPU-a, pci: '0000:21:00.0'}"


@pytest.mark.parametrize(
    "text", [f"[{GOOD}]", f"devices: [{GOOD}]", f"- {GOOD}", '[{"index":null,"uuid":"GPU-a","pci":null}]']
)
def test_files_that_read(text: str, tmp_path: Path) -> None:
    """A list of cards, or a mapping with one, reads as YAML or JSON."""
    path = tmp_path / "cards"
    path.write_text(text, encoding="utf-8")
    (read,) = read_rows(str(path))
    assert read.uuid == "GPU-a"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that is missing, or is a folder, cannot be read, and this says which and why."""
    assert complaint(tmp_path / "none") == "cannot be read: No such file or directory"
    assert complaint(tmp_path) == "cannot be read: Is a directory"


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x89PNG\r\n\x1a\n\x00\xff", b"\xff\xfe[\x00]\x00", b"\x00", b"[", b"a: b: c", b"\t- x", b"- *unknown"),
        *(b"[" * 400, b"--- 1\n--- 2", b"'", b"- &a [*a]", b"? [a]\n: b", b"%YAML 9.9\n--- 1\n%"),
    ],
    ids=lambda data: ascii(data[:20].decode("latin-1"))[1:-1],
)
def test_files_that_are_not_yaml(data: bytes, tmp_path: Path) -> None:
    """Binary data and broken text are said not to be YAML."""
    path = tmp_path / "cards"
    path.write_bytes(data)
    assert complaint(path).startswith("not YAML: ")


@pytest.mark.parametrize(
    "text",
    [
        *("- !!python/object:os.system {}", "- !<tag> x", "- !!int x", "- !!bool x", "- !!timestamp x", "- !!int ''"),
        *("- !!binary '*'", "- 2020-99-99", f"- {{index: {'9' * 5000}, uuid: GPU-a, pci: null}}", "- null", "- - 1"),
        *("- !!null x", "- !!float x", "- !!set {a}", "- !!omap [a]", "- !!pairs x", "- ! x", "- <<: x"),
    ],
    ids=lambda text: text[:24],
)
def test_files_with_odd_values(text: str, tmp_path: Path) -> None:
    """Foreign tags and values of no type run nothing and raise nothing else: the row is said to be no card."""
    path = tmp_path / "cards"
    path.write_text(text, encoding="utf-8")
    assert "$[0]" in complaint(path)


def test_values_are_their_own_text(tmp_path: Path) -> None:
    """Addresses and names need no quotes, though YAML 1.1 takes some for numbers; null and empty are not known."""
    path = tmp_path / "cards"
    path.write_text(
        "- {index: 0, uuid: 0x1f, pci: 0000:17:00.0, name: 4090, mig_mode: true, memory_total_bytes: 51539607552}\n"
        "- {index: ~, uuid: , pci: 10000:21:00.0, name: no, mig_mode: null, minor: 8}\n",
        encoding="utf-8",
    )
    first, second = read_rows(str(path))
    assert (first.index, first.uuid, first.pci, first.name) == (0, "0x1f", "0000:17:00.0", "4090")
    assert (first.mig_mode, first.memory_total_bytes) == (True, 48 * GIB)
    assert (second.index, second.uuid, second.pci, second.name) == (None, None, "10000:21:00.0", "no")
    assert (second.mig_mode, second.minor) == (None, 8)


@pytest.mark.parametrize(
    "text", ["", "# only a comment", "text", "3", "{}", "{a: 1}", "devices:", "{devices: 3}", GOOD]
)
def test_files_without_a_list(text: str, tmp_path: Path) -> None:
    """YAML that is no list of cards is told what was expected."""
    path = tmp_path / "cards"
    path.write_text(text, encoding="utf-8")
    assert complaint(path) == "expected a list of cards, as `inventory --format yaml` prints it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {index: 0, uuid: GPU-a, pci: null, colour: red}", ["colour", "$[0]"]),
        (f"- {GOOD}\n- {{index: 0, uuid: GPU-b}}", ["pci", "$[1]"]),
        ("- {index: zero, uuid: GPU-a, pci: null}", ["index", "$[0]"]),
        ("- {index: 0, uuid: GPU-a, pci: null, mig_mode: perhaps}", ["mig_mode", "$[0]"]),
        ("- {index: 0, uuid: [GPU-a], pci: null}", ["uuid", "$[0]"]),
        ("- {index: 0, uuid: GPU-a, pci: null, mig: [{index: 0}]}", ["uuid", "$[0].mig[0]"]),
        ("- 3", ["$[0]"]),
        ("- {index: 0, uuid: null, pci: null}", ["card 0", "neither uuid nor pci"]),
        (f"- {GOOD}\n- {{index: 0, uuid: '', pci: ''}}", ["card 1", "neither uuid nor pci"]),
        ("- {index: 0, uuid: GPU-a, pci: slot 3}", ["card 0", "pci is 'slot 3'", "0000:17:00.0"]),
        (f"- {GOOD}\n- {GOOD}", ["card 1 repeats card 0", "GPU-a"]),
        ("- {index: 0, uuid: GPU-a, pci: null}\n" * 2, ["card 1 repeats card 0", "GPU-a"]),
        ("- {index: 0, uuid: null, pci: '17:00.0'}\n" * 2, ["card 1 repeats card 0", "17:00.0"]),
        (f"- {GOOD}\n- {{index: 1, uuid: GPU-a, pci: '21:00.0'}}", ["card 1 repeats card 0", "GPU-a"]),
        (f"- {GOOD}\n- {{index: 1, uuid: GPU-a, pci: '0000:41:00.0'}}", ["card 1 repeats card 0", "GPU-a"]),
    ],
    ids=[
        *("unknown-key", "missing-key", "index-is-text", "mode-is-text", "uuid-is-list", "mig", "no-mapping"),
        *("no-identity", "empty-identity", "bad-pci", "repeat", "repeat-by-uuid", "repeat-by-pci"),
        *("repeat-with-pci-spelled-otherwise", "repeat-with-another-pci"),
    ],
)
def test_rows_with_mistakes(text: str, words: list[str], tmp_path: Path) -> None:
    """A complaint about a row says which row and which key, what was found and what was expected."""
    path = tmp_path / "cards"
    path.write_text(text, encoding="utf-8")
    message = complaint(path)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {index: 1, uuid: a, pci: null, vk_type: cpu}", ["found index 1, expected 0 to 0 once each"]),
        ("- {index: null, uuid: a, pci: null, vk_type: cpu}", ["found index -1, expected 0 to 0 once each"]),
        (
            "- {index: 0, uuid: a, pci: null, vk_type: cpu}\n- {index: 0, uuid: b, pci: null, vk_type: cpu}",
            ["found index 0, 0, expected 0 to 1 once each"],
        ),
        ("- {index: 0, uuid: a, pci: null, vk_type: Discrete}", ["vk_type is 'Discrete'", "discrete, integrated"]),
        ("- {index: 0, uuid: a, pci: null, vendor: AMD}", ["card 0: vendor is 'AMD', expected such as nvidia or amd"]),
        ("- {index: 0, uuid: a, pci: null, tiles: 0}", ["tiles", "1"]),
        ("- {index: 0, uuid: a, pci: null, tiles: 65}", ["tiles", "64"]),
        ("- {index: 0, uuid: a, pci: null, xcp: -1}", ["xcp", "0"]),
        (
            "- {index: 0, uuid: GPU-1, pci: null, mig: [{index: 0, uuid: MIG-1, gi: 1, ci: 0}]}\n"
            "- {index: 1, uuid: GPU-2, pci: null, mig: [{index: 0, uuid: MIG-1, gi: 1, ci: 0}]}",
            ["card 1 repeats card 0 (MIG-1)"],
        ),
        (
            "- {index: 0, uuid: G, pci: null,\n"
            "   mig: [{index: 0, uuid: M, gi: 1, ci: 0}, {index: 1, uuid: M, gi: 2, ci: 0}]}",
            ["card 0 has a MIG device twice"],
        ),
    ],
)
def test_rows_that_would_name_a_wrong_device(text: str, words: list[str], tmp_path: Path) -> None:
    """Positions with holes, devices that are there twice, and words that nobody knows are complained about."""
    path = tmp_path / "cards"
    path.write_text(text, encoding="utf-8")
    message = complaint(path)
    assert all(word in message for word in words), message


def test_cards_without_an_address_are_their_uuids() -> None:
    """So that no two of them are one; only Intel's have tiles."""
    rows = [row(vendor="amd", uuid="GPU-1", pci=None), row(vendor="amd", uuid="GPU-2", pci=None, xcp=1, tiles=2)]
    inventory, _ = from_rows(rows, "nvidia")
    assert [device.key.identity for device in inventory.devices] == ["GPU-1", "GPU-2/xcp1"]


def test_partitions_of_one_card_are_no_repeats(tmp_path: Path) -> None:
    """AMD partitions share their card's address, and may share its UUID."""
    path = tmp_path / "cards"
    path.write_text(
        "".join(f"- {{index: {n}, uuid: GPU-5, pci: '05:00.0', xcp: {n}}}\n" for n in range(8)), encoding="utf-8"
    )
    inventory, _ = from_rows(read_rows(str(path)), "amd")
    assert len(inventory.by_key) == 8
