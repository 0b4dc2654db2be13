"""The messages between the parent and a vendor's worker: MessagePack in frames of a four-byte length.

The parent asks for one cycle at a time; the worker answers each ask once, with the ask's own number, so that an answer
that comes too late is recognised and dropped.
"""

from __future__ import annotations

import struct

import msgspec

from exporter.model import Fault, VendorSample

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 16 * 1024 * 1024


class Ask(msgspec.Struct, frozen=True):
    """Read every device once and answer by ``until`` with whatever arrived.

    ``until`` is a reading of ``CLOCK_MONOTONIC``, which parent and worker share, so that a worker's own start counts.
    The same cycle asked for again, with an earlier ``until``, shortens it.
    """

    cycle: int
    until: float


class Answer(msgspec.Struct, frozen=True):
    """The answer to the ask of the same number: a sample, or the fault that prevents one.

    ``final`` says that the worker ends after this answer, so that the next ask needs a fresh process.
    """

    cycle: int
    sample: VendorSample | None = None
    fault: Fault | None = None
    final: bool = False


_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def frame(message: Ask | Answer) -> bytes:
    """The message as it goes over the socket."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_ask(body: bytes) -> Ask:
    """Raises ``msgspec.DecodeError`` on anything that is not an ask."""
    return _ask_decoder.decode(body)


def decode_answer(body: bytes) -> Answer:
    """Raises ``msgspec.DecodeError`` on anything that is not an answer."""
    return _answer_decoder.decode(body)
