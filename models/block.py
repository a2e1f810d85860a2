"""A layer: a sequence of sub-blocks x + mixer(norm(x)) on the residual stream. Several mixers of one sub-block read the same norm,
and what they return is added in the compute dtype.

A sub-block returns the residual stream as (x, branch), whose sum is the stream: the next norm reads the stream anyway and adds the
branch in the same kernel. With sequence parallelism, both hold this rank's part of the tokens (baton.parallel.tensor_group), and
the normalized tokens are all-gathered before the mixer, in the compute dtype.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from baton.kernels.protocol import State, StateSpec
from baton.models.config import ModelConfig, SubBlocks, places
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer, build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.norm import RMSNorm, Stream, summed
from baton.models.settings.declarations import sub_block_norm
from baton.parallel.context_parallel import ContextLink
from baton.parallel.tensor_group import gather_tokens


@contextmanager
def _enter_both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


class SubBlock(nn.Module):
    """Stream [B, T, d_model] (or this rank's part [tokens_per_rank(B T), d_model]), pos [B, T], State or None -> stream, State.

    x of the stream is in the residual dtype, the branch in the compute type.
    """

    mixer: Mixer

    def __init__(self, name: str, config: ModelConfig, context: MixerContext) -> None:
        super().__init__()
        self._split, self._compute_dtype = context.sequence_parallel, context.compute_dtype
        self.norm = RMSNorm(sub_block_norm(config.d_model), context)
        self.mixer = build_mixer(config.mixers[name], context)

    def forward(
        self,
        stream: Stream,
        pos: Tensor,
        state: State | None,
        forward_context: ForwardContext = LOCAL,
        others: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> tuple[Stream, State]:
        """others: the sub-block's other mixers, from what the norm makes to what is added."""
        # cast once: each projection would cast it otherwise
        x, normed = self.norm(stream, self._compute_dtype)
        if self._split:
            normed = gather_tokens(normed, pos.shape)
        y, state = self.mixer(normed, pos, state, forward_context)
        for other in others:
            y = y + other(normed)
        return (x, y), state


class Branch(nn.Module):
    """Another mixer of a sub-block: it reads the norm of the first."""

    mixer: Mixer

    def __init__(self, name: str, config: ModelConfig, context: MixerContext) -> None:
        super().__init__()
        self.mixer = build_mixer(config.mixers[name], context)

    def forward(
        self, normed: Tensor, pos: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        """What the norm makes -> what is added to the stream, State."""
        y, state = self.mixer(normed, pos, state, forward_context)
        return y, cast(State, state)


def build_block(name: str, first: bool, config: ModelConfig, context: MixerContext) -> SubBlock | Branch:
    """The mixer of a name in the pattern. first: of its sub-block, which has the norm."""
    block = (SubBlock if first else Branch)(name, config, context)
    for inner, module in block.named_modules(prefix=name):
        if isinstance(module, Mixer):
            module.path = inner.replace(".mixer", "")
    return block


class Layer(nn.ModuleDict):
    """Mixers by name: a SubBlock with the norm for the first of each sub-block, a Branch for the others. The layer's State holds
    every mixer's tensors under NAME.TENSOR.

    shared: blocks that several layers use, by name. They are the model's, and no modules of this one.
    """

    def __init__(
        self, sub_blocks: SubBlocks, config: ModelConfig, context: MixerContext, shared: Mapping[str, nn.Module] | None = None
    ) -> None:
        self._sub_blocks = sub_blocks
        others = dict(shared or {})
        super().__init__(
            {name: build_block(name, first, config, context) for name, first in places(sub_blocks) if name not in others}
        )
        self.blocks = {name: cast(SubBlock | Branch, {**self, **others}[name]) for name, _ in places(sub_blocks)}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The State of a sequence in this layer."""
        specs = []
        for name, block in self.blocks.items():
            specs += [dataclasses.replace(spec, name=f"{name}.{spec.name}") for spec in block.mixer.state_specs]
        return tuple(specs)

    def forward(
        self, stream: Stream, pos: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Stream, State]:
        final: dict[str, State] = {}

        def run(name: str, x: Any, *others: Any) -> Any:
            """The module of this name, from and to its part of the layer's State."""
            initial, prefix = None, f"{name}."
            if state is not None:
                initial = {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}
            y, final[name] = self.blocks[name](x, pos, initial, forward_context, *others)
            return y

        for first, *others in self._sub_blocks:
            stream = run(first, stream, [partial(run, name) for name in others])
        return stream, {f"{name}.{key}": x for name in self.blocks for key, x in final[name].items()}

    def forward_summed(self, x: Tensor, pos: Tensor, state: State | None, forward_context: ForwardContext) -> tuple[Tensor, State]:
        """`forward` from and to a stream in one tensor, so that full recomputation saves one tensor per layer."""
        stream, final_state = self((x, None), pos, state, forward_context)
        return summed(stream), final_state


class _KeepOperatorResults(TorchDispatchMode):
    """Appends the results of the given operators to `results` in the first forward pass, and returns them in the recomputation.

    PyTorch's selective activation checkpointing would record every operator that is called, about a hundred bytes each, and a
    segment's records live until it is recomputed.
    """

    def __init__(self, operators: Set[Any], results: list[Any], recomputing: bool) -> None:
        super().__init__()
        self._operators, self._results, self._recomputing, self._remaining = operators, results, recomputing, iter(())

    def __enter__(self) -> Any:
        self._remaining = iter(self._results)
        return super().__enter__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; to tell Dynamo so at every operator takes the host longer than the operator's launch."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._operators:
            return func(*args, **(kwargs or {}))
        if not self._recomputing:
            self._results.append(func(*args, **(kwargs or {})))
            return self._results[-1]
        return next(self._remaining)


@dataclasses.dataclass(frozen=True)
class SavedForRecomputation:
    """What a first forward pass saves for its recomputation: initial States, and results of operators that do not run again."""

    states: list[State | None] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)


def recomputation(layers: Iterable[nn.Module], link: ContextLink | None, saved: SavedForRecomputation | None = None) -> Any:
    """Contexts of the first forward pass through layers and of its recomputation, for `context_fn` of torch.utils.checkpoint.

    saved: filled by the first and read by the second; None: a new one.
    """
    saved = saved or SavedForRecomputation()
    link_contexts = noop_context_fn() if link is None else link.recomputation(saved.states)
    blocks = (block for layer in layers for block in cast(Layer, layer).blocks.values())
    operators = {operator for block in blocks for operator in block.mixer.recompute_keeps}
    results = saved.results
    if not operators:
        return link_contexts
    first, again = link_contexts
    return (
        _enter_both(first, _KeepOperatorResults(operators, results, recomputing=False)),
        _enter_both(again, _KeepOperatorResults(operators, results, recomputing=True)),
    )
