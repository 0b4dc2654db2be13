"""The messages between the parent and a vendor's worker: MessagePack in frames of a four-byte length.

The parent asks for one cycle at a time; the worker answers each ask once, with the ask's own number, so that an answer
that comes too late is recognised and dropped.

A process that asks a driver says one thing, once: a line of JSON, a :class:`DriverAnswer`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from exporter.model import Fault, VendorSample, VulkanDevice

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 16 * 1024 * 1024


class Ask(msgspec.Struct, frozen=True):
    """Read every device once and answer by ``until`` with whatever arrived.

    ``until`` is a reading of ``CLOCK_MONOTONIC``, which parent and worker share, so that a worker's own start counts.
    The same cycle asked for again, with an earlier ``until``, shortens it. ``users``: tell also who computes on what.
    """

    cycle: int
    until: float
    users: bool = False


class Answer(msgspec.Struct, frozen=True):
    """The answer to the ask of the same number: a sample, or the fault that prevents one.

    ``final`` says that the worker ends after this answer, so that the next ask needs a fresh process.
    """

    cycle: int
    sample: VendorSample | None = None
    fault: Fault | None = None
    final: bool = False


class DriverDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device as a runtime's own driver library shows it.

    ``pci_bus_id`` is as sysfs spells it. ``uuid`` is as the vendor's masks spell it: ``GPU-`` or ``MIG-`` and the UUID
    for CUDA, ``GPU-`` and 16 hex digits for HIP, never for Level Zero. Both are empty where the driver does not say.
    ``tile`` is which tile of its card this device is, ``tiles`` are the numbers of a card's sub-devices: Level Zero
    alone. With neither it is a card without tiles, or the one tile of its card that the mask left, which Level Zero
    gives the number 0, or one of its own, in different releases.
    """

    pci_bus_id: str = ""
    uuid: str = ""
    name: str = ""
    tile: int | None = None
    tiles: tuple[int, ...] = ()


class DriverAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runtime's driver library shows under the environment of the process that asked it.

    ``file`` is the library as it was named when it was loaded, ``version`` what it calls itself, each empty where that
    is not known. ``devices`` are in the order of the runtime's ordinals. ``vulkan`` is the raw enumeration, for Vulkan,
    which has no ``devices``. ``fault`` is a sentence that says which library is missing, or which call answered what;
    with it there is neither.
    """

    file: str = ""
    version: str = ""
    devices: tuple[DriverDevice, ...] = ()
    vulkan: tuple[VulkanDevice, ...] | None = None
    fault: str = ""


_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def frame(message: Ask | Answer) -> bytes:
    """The message as it goes over the socket."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def frames(received: bytearray) -> Iterator[bytes]:
    """The bodies of the messages that have come whole, taken off what was received.

    Raises ``msgspec.DecodeError`` on a length that no message has.
    """
    while len(received) >= HEADER.size:
        (length,) = HEADER.unpack_from(received)
        if length > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        end = HEADER.size + length
        if len(received) < end:
            return
        body = bytes(received[HEADER.size : end])
        del received[:end]
        yield body


def decode_ask(body: bytes) -> Ask:
    """Raises ``msgspec.DecodeError`` on anything that is not an ask."""
    return _ask_decoder.decode(body)


def decode_answer(body: bytes) -> Answer:
    """Raises ``msgspec.DecodeError`` on anything that is not an answer."""
    return _answer_decoder.decode(body)


def driver_line(answer: DriverAnswer) -> bytes:
    """The answer as it is printed."""
    return msgspec.json.encode(answer) + b"\n"


def decode_driver_line(line: bytes) -> DriverAnswer:
    """Raises ``msgspec.DecodeError`` on anything that is not an answer, such as what was printed before a crash."""
    return msgspec.json.decode(line, type=DriverAnswer)
