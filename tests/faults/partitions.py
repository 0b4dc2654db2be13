"""Cards that are divided anew while the daemon runs: MIG devices of NVIDIA's, partitions of AMD's."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.expectation import WELL, Expect
from tests.faults.matrix import Act, Row
from tests.truth import FLEETS, SETTINGS, Host
from tests.truth_cards import A0, A1, I0, I1, N0, N1, N2, UTILIZATION, Pretend, amd, mig, nvidia, partition

BOARD = nvidia(9, 0x81, mig=True)
ONE, TWO = mig(61, BOARD, "1/0"), mig(62, BOARD, "2/0")
THREE = mig(63, BOARD, "13/0")
DIVIDED = replace(BOARD, parts=(ONE, TWO))
MIG_HOST = Host(cards=(N0, N1, N2, DIVIDED, A0, A1, I0, I1))
MIG_SETTINGS = f"{SETTINGS}  - {{name: tenant, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: {TWO.uuid}}}}}\n"
MIG_FLEETS = {"tenant": {"nvidia": (TWO,)}, "train": FLEETS["train"], "infer": FLEETS["infer"]}
# With a MIG device on the host, CUDA has either whole cards or one MIG device: numbers cannot be told.
MIG_SETTINGS = MIG_SETTINGS.replace(
    'CUDA_VISIBLE_DEVICES: "2,0", CUDA_DEVICE_ORDER: PCI_BUS_ID', 'CUDA_VISIBLE_DEVICES: ""'
)


def _parts(*parts: Pretend, on: bool = True) -> Act:
    """The board has these MIG devices; without ``on`` it is a whole card."""
    return lambda scene: scene.truth.alter(BOARD, parts=parts, mig=on)


def _mig(name: str, inflict: Act, during: Expect = WELL) -> Row:
    return Row(
        name=f"MIG: {name}",
        host=MIG_HOST,
        settings=MIG_SETTINGS,
        fleets={**MIG_FLEETS, "chat": {"nvidia": ()}},
        inflict=inflict,
        heal=_parts(ONE, TWO),
        at_once=during,
        later=during,
    )


MIG = [
    _mig("an instance is destroyed, and made again", _parts(ONE), Expect(states={TWO: "gone"})),
    _mig("an instance is made", _parts(ONE, TWO, THREE)),
    _mig("an instance is destroyed, and another made in its place", _parts(ONE, replace(THREE, partition="2/0"))),
    _mig("an instance's UUID is found elsewhere on the board", _parts(ONE, replace(TWO, partition="7/0"))),
    _mig("instances change places", _parts(TWO, ONE)),
    _mig("the mode is switched off, and on", _parts(on=False), Expect(states={ONE: "gone", TWO: "gone"})),
    _mig("all instances are destroyed", _parts(), Expect(states={ONE: "gone", TWO: "gone"})),
    Row(
        name="MIG: the mode is switched on, and off",
        # A card that has the mode says so while it is off.
        host=Host(cards=(N0, N1, N2, replace(BOARD, parts=(ONE, TWO), mig=False), A0, A1, I0, I1)),
        inflict=_parts(ONE, TWO),
        heal=_parts(ONE, TWO, on=False),
    ),
]

WHOLE = amd(80, 0xA3, node=3)
DPX = replace(WHOLE, parts=tuple(partition(70 + place, WHOLE, place) for place in range(2)))
CPX = replace(WHOLE, parts=tuple(partition(72 + place, WHOLE, place) for place in range(4)))


def _divide(card: Pretend) -> Act:
    return lambda scene: scene.truth.alter(WHOLE, parts=card.parts)


def _amd_host(card: Pretend) -> Host:
    return Host(cards=(N0, N1, N2, A0, card, A1, I0, I1))


def _amd(name: str, before: Pretend, after: Pretend) -> Row:
    """While a new worker starts AMD's library anew, which finds cards once, the backend may be down."""
    parts = dict.fromkeys((*before.parts, *after.parts), (UTILIZATION,))
    return Row(
        name=f"AMD: {name}",
        host=_amd_host(before),
        inflict=_divide(after),
        heal=_divide(before),
        at_once=Expect(down={"amd": "driver-mismatch|up"}, maybe=parts),
        touches=("amd",),
    )


AMD = [
    _amd("SPX becomes CPX, and SPX again", WHOLE, CPX),
    _amd("DPX becomes CPX, and DPX again", DPX, CPX),
    _amd("CPX becomes SPX, and CPX again", CPX, WHOLE),
]

ROWS = [*MIG, *AMD]
