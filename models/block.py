"""A layer: sub-blocks x + mixer(norm(x)) one after the other, around a residual stream.

The one thing to know: what a sub-block gives is added by the next norm, which reads the stream anyway. Where tensor ranks share
the residual stream, both its parts are this rank's part of the tokens (baton.parallel.tensor), and the normalised tokens are
gathered in front of the mixer, in the compute type.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from baton.kernels.protocol import State, StateSpec
from baton.models.config import ModelConfig
from baton.models.mixer import Mixer, build_mixer, need_final_state
from baton.models.mixer_context import MixerContext
from baton.models.norm import RMSNorm, Stream, summed
from baton.models.settings.declarations import sub_block_norm
from baton.parallel.context_parallel import ContextLink
from baton.parallel.tensor import gather_tokens


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


class SubBlock(nn.Module):
    """Stream [B, T, d_model] (or this rank's part [tokens_per_rank(B T), d_model]), pos [B, T], State or None -> stream, State.

    The stream's first part is in the residual stream's type, the second in the compute type. state_wanted: whether the State that
    leaves will be taken; else it is not made, and what stands in its place refuses (baton.kernels.protocol.absent_state).
    """

    mixer: Mixer

    def __init__(self, name: str, config: ModelConfig, context: MixerContext) -> None:
        super().__init__()
        self._split, self._compute_dtype = context.sequence_parallel, context.compute_dtype
        self.norm = RMSNorm(sub_block_norm(config.d_model), context)
        self.mixer = build_mixer(config.mixers[name], context)

    def forward(self, stream: Stream, pos: Tensor, state: State | None, state_wanted: bool = True) -> tuple[Stream, State]:
        # every projection would cast it anyway, each for itself
        x, normed = self.norm(stream, self._compute_dtype)
        if self._split:
            normed = gather_tokens(normed, pos.shape)
        with need_final_state(state_wanted):
            y, state = self.mixer(normed, pos, state)
        return (x, y), state


class Layer(nn.ModuleDict):
    """Sub-blocks by name; the State's leaves are called NAME.LEAF."""

    def __init__(self, names: tuple[str, ...], config: ModelConfig, context: MixerContext) -> None:
        super().__init__({name: SubBlock(name, config, context) for name in names})

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """What the layer carries per sequence."""
        found = []
        for name, block in self.items():
            found += [dataclasses.replace(leaf, name=f"{name}.{leaf.name}") for leaf in cast(SubBlock, block).mixer.state_specs]
        return tuple(found)

    def forward(self, stream: Stream, pos: Tensor, state: State | None, state_wanted: bool = True) -> tuple[Stream, State]:
        leaves: State = {}
        for name, block in self.items():
            prefix = f"{name}."
            entering = None
            if state is not None:
                entering = {key.removeprefix(prefix): leaf for key, leaf in state.items() if key.startswith(prefix)}
            stream, own = block(stream, pos, entering, state_wanted)
            leaves.update({f"{prefix}{key}": leaf for key, leaf in own.items()})
        return stream, leaves

    def whole(self, x: Tensor, pos: Tensor, state: State | None, state_wanted: bool = True) -> tuple[Tensor, State]:
        """The same from and to a stream of one part."""
        stream, leaves = self((x, None), pos, state, state_wanted)
        return summed(stream), leaves


class _Kept(TorchDispatchMode):
    """Within it results of operators are taken from `kept`, or added to it while there is none.

    Not torch's own selective checkpointing: that notes every operator that is called, a hundred bytes each, and a segment's are
    kept until it is run again.
    """

    def __init__(self, operators: Set[Any], kept: list[Any], again: bool) -> None:
        super().__init__()
        self._operators, self._kept, self._again, self._taken = operators, kept, again, iter(())

    def __enter__(self) -> Any:
        self._taken = iter(self._kept)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._operators:
            return func(*args, **(kwargs or {}))
        if not self._again:
            self._kept.append(func(*args, **(kwargs or {})))
            return self._kept[-1]
        return next(self._taken)


def recomputation(layers: Iterable[nn.Module], link: ContextLink | None) -> Any:
    """Contexts of a first forward pass through layers and of its recomputation, as torch's checkpoint takes them."""
    exchanges = noop_context_fn() if link is None else link.recomputation()
    blocks = [cast(SubBlock, block) for layer in layers for block in cast(Layer, layer).values()]
    operators = {operator for block in blocks for operator in block.mixer.kept_operators}
    kept: list[Any] = []
    if not operators:
        return exchanges
    return tuple(_both(pass_, _Kept(operators, kept, again)) for pass_, again in zip(exchanges, (False, True), strict=True))
