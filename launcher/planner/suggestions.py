"""Finds settings with which a run that does not fit in memory fits, by trying legal changes in order of cost. Torch-free.

Exact segments are the only change that makes memory independent of the sequence length. They also recompute less than full
recomputation does: of k segments, k - 1 run forward twice. Therefore, with one sequence per micro-batch, segments are tried before
recomputation. With several pipeline stages the order is reversed, because segments of one sequence cannot fill the pipeline as
micro-batches do.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from baton.launcher.config import RunConfig
from baton.launcher.devices import Kind
from baton.launcher.planner import automatic
from baton.launcher.planner.host_memory import Node
from baton.launcher.planner.memory import Arithmetic, of_stages
from baton.parallel.config import divisors
from baton.training.config import BpttConfig, TrainingConfig

LEAST_PASS = 4096
"""Tokens of a rank in one pass below which segments are a last resort. With every pass a rank reads its weights' compute copies
three times and makes and adds a gradient, 18 bytes a parameter, for 6 operations a token: at 4096 tokens a tenth of the time of
these on an H200 and a sixth on an H100, and more with fewer tokens."""

Savings = dict[str, Any]
"""Settings of training that save memory on the same ranks."""


def first_that_fits(
    config: RunConfig, capacity: int, largest_tensor: int, on_host: Callable[[Sequence[Arithmetic]], bool] = lambda stages: True
) -> tuple[str, ...]:
    """key=value words of the first change whose ranks all stay within `capacity` bytes; () where none does.

    largest_tensor: ranks of a tensor group to go up to. on_host: whether a run's stages fit the memory of the nodes' hosts. What is
    `auto` needs no advice: it is chosen as is needed.
    """
    if config.training.recompute == "auto":
        explicit = config.model_copy(update={"training": config.training.model_copy(update={"recompute": "none"})})
        words = first_that_fits(explicit, capacity, largest_tensor, on_host)
        return tuple(word for word in words if not word.startswith("training.recompute="))
    training, cuts = config.training, list(_segments(config))
    long, short = ([cut for cut, tokens in cuts if (tokens >= LEAST_PASS) is enough] for enough in (True, False))
    for ranks in (*_ranks(config, largest_tensor), None):
        one = config.model_copy(update={"layout": config.layout.model_copy(update=ranks or {})})
        # nothing that training saves helps where the weights alone are too much
        if any(stage.memory().weights > capacity for stage in of_stages(one)):
            continue
        for saving in _savings(one, long) if ranks is not None else _with_recomputation(one, short):
            candidate = one.model_copy(update={"training": training.model_copy(update=saving)})
            if candidate.is_legal() and any(
                all(stage.memory().peak <= capacity for stage in stages) and on_host(stages)
                for stages in map(of_stages, _places(candidate))
            ):
                return (*_words(training, saving), *(f"layout.{name}={value}" for name, value in (ranks or {}).items()))
    return ()


def _places(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with what training.offload_kv may be chosen to be; where it is `auto`, first the one that saves most."""
    training = config.training
    for offload in (True, False) if training.offload_kv == "auto" else (training.offload_kv,):
        yield config.model_copy(update={"training": training.model_copy(update={"offload_kv": offload})})


def larger_micro_batches(
    config: RunConfig, capacity: int, kind: Kind | None = None, node: Node | None = None
) -> Iterator[RunConfig]:
    """The configuration with larger micro-batches that fit, the largest first, with what is `auto` chosen as it is for the present
    size or faster: no advice costs more recomputation. kind: of device; node: its host; as in automatic.resolve."""
    training = config.training
    now = automatic.rank_by_speed(automatic.resolve(config, capacity, kind, node=node)[0])
    for n in reversed(divisors(training.sequences_per_step // config.layout.data)):
        if n <= training.micro_batch_size:
            return
        candidate = config.model_copy(update={"training": training.model_copy(update={"micro_batch_size": n})})
        if not candidate.is_legal():
            continue
        resolved, _ = automatic.resolve(candidate, capacity, kind, node=node)
        peak = automatic.planned_peak(resolved)
        if peak is not None and peak <= capacity and automatic.rank_by_speed(resolved) <= now:
            yield resolved


def _ranks(config: RunConfig, largest_tensor: int) -> Iterator[dict[str, int]]:
    """Changes of the layout: none, ZeRO-1 where there is none, more data ranks (each then has less of the optimizer), more tensor
    ranks, more stages."""
    training, layout = config.training, config.layout
    # without ZeRO more data ranks save nothing
    zero = {"zero": 1} if layout.zero == 0 else {}
    yield {}
    if zero:
        yield zero
    yield from ({"data": n, **zero} for n in divisors(training.sequences_per_step) if n > layout.data)
    yield from ({"tensor": layout.tensor * n} for n in range(2, largest_tensor // layout.tensor + 1))
    yield from ({"pipeline": layout.pipeline << n} for n in range(1, (config.model.n_layers // layout.pipeline).bit_length()))


def _savings(config: RunConfig, segments: list[Savings]) -> list[Savings]:
    """Nothing; recomputation, smaller micro-batches, both; segments, and these with recomputation. On one stage segments come
    before what recomputes one sequence at a time."""
    training = config.training
    again: list[Savings] = [] if training.recompute == "full" else [{"recompute": "full"}]
    if training.recompute == "none":
        again.insert(0, {"recompute": "states"})
    smaller: list[Savings] = [
        {"micro_batch_size": n} for n in reversed(divisors(training.micro_batch_size)) if n < training.micro_batch_size
    ]
    if config.keeps_kv and training.offload_kv is False:
        again.insert(0, {"offload_kv": True})
    both, shorter = _with_recomputation(config, smaller)[len(smaller) :], _with_recomputation(config, segments)[len(segments) :]
    if config.layout.pipeline > 1:
        return [{}, *again, *smaller, *both, *segments, *shorter]
    if smaller:
        return [{}, *again, *smaller, *segments, *both, *shorter]
    return [{}, *segments, *again, *shorter]


def _with_recomputation(config: RunConfig, savings: list[Savings]) -> list[Savings]:
    """All of them, then, where it is not there yet, with recomputation."""
    return savings + ([] if config.training.recompute == "full" else [{"recompute": "full", **saving} for saving in savings])


def _segments(config: RunConfig) -> Iterator[tuple[Savings, int]]:
    """Of one sequence at a time, in segments shorter than now, the longest first, and a rank's tokens of each. Gradients go as far
    back as they do now: through the whole sequence, or through as many more segments as these are shorter."""
    training = config.training
    now, through = training.segment, None if training.bptt is None else training.bptt.gradient_segments
    fewer: Savings = {"micro_batch_size": 1} if training.micro_batch_size > 1 else {}
    mode = "exact" if training.bptt is None else training.bptt.mode
    for n in reversed(divisors(training.sequence_length if through is None else now)):
        if n < now:
            bptt = BpttConfig(mode=mode, segment=n, gradient_segments=None if through is None else through * (now // n))
            yield {"bptt": bptt, **fewer}, n // config.layout.context


def _words(training: TrainingConfig, saving: Savings) -> Iterator[str]:
    for name, value in saving.items():
        if not isinstance(value, BpttConfig):
            yield f"training.{name}={str(value).lower()}"
        elif training.bptt is None:
            yield f"training.bptt={{mode: {value.mode}, segment: {value.segment}}}"
        else:
            yield f"training.bptt.segment={value.segment}"
            if value.gradient_segments is not None:
                yield f"training.bptt.gradient_segments={value.gradient_segments}"
