"""When halves that share adapters step: all whose turn it is, and not before."""

from atlas_fl.client.split_server import SharedAdapterGroup


class Stub:
    """A client's half while it trains, as far as the others see it."""

    def __init__(self, *, steps: int, is_sound: bool = True) -> None:
        self.steps, self.is_sound, self.moved, self.told = steps, is_sound, list[int](), list[object]()

    def transform_gradients(self, done: int, *, norms: object) -> bool:
        assert done >= 0
        self.told.append(norms)
        return self.is_sound

    def optimizer_step(self, done: int) -> None:
        self.moved.append(done)


class Set:
    """What they share, which writes down who moved it."""

    def __init__(self) -> None:
        self.steps = list[tuple[int, dict[Stub, int]]]()

    def step(self, done: int, moving: dict[Stub, int]) -> None:
        self.steps.append((done, dict(moving)))


def together(**members: Stub) -> tuple[SharedAdapterGroup, Set]:
    found, shared = SharedAdapterGroup([], None), Set()
    found.members, found._sets = dict(members), [shared]
    return found, shared


def test_a_step_is_taken_when_the_last_whose_turn_it_is_has_told_and_once() -> None:
    one, other = Stub(steps=2), Stub(steps=1)
    found, shared = together(a=one, b=other)
    found.tell(one, 3, norms="x")
    assert (found.done, shared.steps, one.moved, one.told) == (0, [], [], ["x"])
    found.tell(other, 1, norms=None)
    assert (found.done, found.is_over) == (1, False)
    found.tell(one, 2, norms=None)
    assert (found.done, found.is_over) == (2, True)
    assert shared.steps == [(0, {one: 3, other: 1}), (1, {one: 2})]
    assert (one.moved, other.moved) == ([0, 1], [0])


def test_who_is_not_to_move_is_waited_for_and_moves_nothing() -> None:
    one, broken = Stub(steps=1), Stub(steps=1, is_sound=False)
    found, shared = together(a=one, b=broken)
    found.tell(broken, 5, norms=None)
    assert found.done == 0
    found.tell(one, 3, norms=None)
    assert shared.steps == [(0, {one: 3})]
    assert (one.moved, broken.moved, found.is_over) == ([0], [], True)
