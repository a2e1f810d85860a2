"""States that a rank hands to its own next segment, and their gradients, which go the other way: a queue for each recurrence."""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping

from torch import Tensor

from baton.kernels.protocol import State

Key = tuple[str, Hashable, str, str]
"""Direction, the virtual rank that takes the State, the recurrence's name, the mixer's name."""
HandedOn = dict[tuple[str, str], list[State]]
"""What one segment hands to another in one direction, by recurrence and mixer."""


class LocalStates:
    """States that wait to be taken, in the order in which they were put."""

    def __init__(self) -> None:
        self._waiting: defaultdict[Key, deque[State]] = defaultdict(deque)

    def put(self, key: Key, state: State) -> None:
        """Hand on a State, in no more memory than it needs."""
        self._waiting[key].append({name: _compact(x) for name, x in state.items()})

    def take(self, key: Key) -> State | None:
        """The State that was put first; None: there is none."""
        return self._waiting[key].popleft() if self._waiting[key] else None

    def waiting(self) -> dict[Key, list[State]]:
        """What was put and not taken."""
        return {key: list(states) for key, states in self._waiting.items() if states}

    def give(self, direction: str, to: Hashable, states: Mapping[tuple[str, str], list[State]]) -> None:
        """Put these States for the virtual rank `to`, as they are."""
        for (name, where), of_recurrence in states.items():
            self._waiting[direction, to, name, where].extend(of_recurrence)

    def take_all(self) -> dict[str, HandedOn]:
        """All that waits by direction, in each for one virtual rank."""
        found: dict[str, HandedOn] = {}
        for (direction, _, name, where), states in self.waiting().items():
            found.setdefault(direction, {})[name, where] = states
        self._waiting.clear()
        return found


def _compact(x: Tensor) -> Tensor:
    """A tail is a view of the whole span, which would stay in memory with it."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
