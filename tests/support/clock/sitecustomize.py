"""A sitecustomize with a system clock that jumps by up to days every few readings; monotonic clocks are not changed."""

import random
import time

_true, _rng, _state = time.time, random.Random(), {"offset": 0.0, "left": 0}


def _jumping() -> float:
    if not _state["left"]:
        _state.update(offset=_rng.uniform(-3e5, 3e5), left=_rng.randint(1, 20))
    _state["left"] -= 1
    return _true() + _state["offset"]


time.time = _jumping
