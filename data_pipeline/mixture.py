"""Several sources with weights: which of them a lane's next unit comes from.

The one thing to know: the choice is a hash of (seed, lane, unit number) cut by the weights that hold at the step in which the unit
is opened. New weights therefore begin at a step's border, in every lane with its next unit, and change nothing before.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from baton.data_pipeline.errors import DataError

#: How far from 1 the weights' sum may be: what decimals with a few digits leave.
TOLERANCE = 1e-6


class Mixture:
    """Sources by their number, in the order of `unit_bytes`.

    schedule: (first step, {source: weight}) in the order of the steps, the first from step 0 on; weights are shares of the text's
    bytes. unit_bytes: {source: mean UTF-8 bytes of a unit}: of sources with larger units fewer units are taken.
    Raises DataError: what `check_weights` refuses.
    """

    def __init__(self, seed: int, schedule: Sequence[tuple[int, Mapping[str, float]]], unit_bytes: Mapping[str, float]) -> None:
        self._seed, self.count = seed, len(unit_bytes)
        if self.count > 1:
            check_weights(schedule, list(unit_bytes))
        self._firsts = [first for first, _ in schedule]
        self._bounds = []
        for _, weights in schedule:
            rates = [weights[name] / size for name, size in unit_bytes.items()]
            total = sum(rates)
            self._bounds.append(list(accumulate(rate / total for rate in rates)))

    def source(self, lane: int, k: int, step: int) -> int:
        """Of lane `lane`'s unit number k, which is opened in step `step`."""
        if self.count == 1:
            return 0
        bounds = self._bounds[bisect_right(self._firsts, step) - 1]
        digest = hashlib.blake2b(f"source\n{self._seed}\n{lane}\n{k}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little") / 2.0**64
        last = max(n for n, bound in enumerate(bounds) if n == 0 or bound > bounds[n - 1])  # rounding must not draw beyond it
        return min(bisect_right(bounds, drawn), last)


def check_weights(schedule: Sequence[tuple[int, Mapping[str, float]]], sources: Sequence[str]) -> None:
    """Raises DataError unless the weights begin at step 0, go forward, name every source and sum to 1."""
    firsts = [first for first, _ in schedule]
    if firsts[:1] != [0] or any(a >= b for a, b in pairwise(firsts)):
        raise DataError(f"data.mixture begins at steps {firsts}; give weights from step 0 on, and later ones in order")
    for first, weights in schedule:
        where = f"data.mixture from step {first}"
        wrong = sorted(set(weights) ^ set(sources))
        if wrong:
            raise DataError(f"{where}: weights and data.sources disagree about {', '.join(wrong)}; give each source one weight")
        negative = [name for name, weight in weights.items() if weight < 0]
        if negative:
            raise DataError(f"{where}: the weight of {negative[0]} is negative; use 0 to leave a source out")
        total = sum(weights.values())
        if abs(total - 1) > TOLERANCE:
            raise DataError(
                f"{where}: the weights sum to {total:g}, not 1; they are shares, such as "
                + ", ".join(f"{name}: {weight / total if total else 1 / len(weights):.4g}" for name, weight in weights.items())
            )
