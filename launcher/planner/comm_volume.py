"""Counts the bytes that ranks exchange in an optimizer step from a run's settings. Torch-free.

Bytes are those of ring algorithms: an all-reduce of n bytes over p ranks sends 2 n (p - 1) / p from each rank, an all-gather
n (p - 1) / p. Exchanges of a few numbers (counts, norms, flags) are left out. If a gradient passes through several segments, States
are sent once per boundary, because a segment that runs again uses the State that it has stored. Tensor ranks repeat all
collectives of a forward pass that runs again.
"""

from collections import Counter
from dataclasses import dataclass

from baton.launcher.planner.memory import Arithmetic
from baton.launcher.planner.parameters import DTYPE_BYTES


@dataclass(frozen=True)
class Exchange:
    """Bytes that each rank sends per optimizer step for one purpose.

    members, stride: size of the group, and the distance between its ranks.
    pairs: each rank sends to its neighbour; false: a ring collective.
    once: once per step; false: in every pass.
    survey: in no-grad forward passes over segments.
    """

    bytes: int
    members: int
    stride: int
    pairs: bool = False
    once: bool = False
    survey: bool = False


def exchanges(one: Arithmetic) -> dict[str, Exchange]:
    """The exchanges of a rank of a stage, by purpose; of the rank that sends most if they differ."""
    return {**_over_data(one), **_over_tensor(one), **_over_sequence(one), **_of_stages(one), **_of_readers(one)}


def _over_data(one: Arithmetic) -> dict[str, Exchange]:
    shards, p, n = one.shards, one.tensor, 4 * one.local_count
    if shards == 1:
        return {}
    # DeepSpeed's ZeRO-0 and ZeRO-1 all-reduce the gradients whole; ZeRO-2 reduces each piece to its owner
    if one.layout.zero == 2:
        found = {"gradients: reduce to owners over data": Exchange(ring(n, shards), shards, p, once=True)}
    else:
        found = {"gradients: all-reduce over data": Exchange(ring(2 * n, shards), shards, p, once=True)}
    if one.layout.zero:
        found["parameters: all-gather over data"] = Exchange(ring(n, shards), shards, p, once=True)
    return found


def _over_tensor(one: Arithmetic) -> dict[str, Exchange]:
    p = one.tensor
    if p == 1:
        return {}
    partial = 4 * sum(parameter.numel for parameter in (*one.parameters, *one.tied_replicas) if parameter.partial)
    volumes = {("partial gradients", "all-reduce"): partial, **tensor_volumes(one)}
    return {
        f"{purpose}: {collective} over tensor": Exchange(
            ring((2 if collective == "all-reduce" else 1) * volume, p),
            p,
            1,
            once=purpose == "partial gradients",
            survey=purpose == _SURVEYS,
        )
        for (purpose, collective), volume in volumes.items()
        if volume
    }


_SURVEYS = "surveyed segments"


def tensor_volumes(one: Arithmetic) -> dict[tuple[str, str], int]:
    """Bytes of the whole tensors that are all-reduced, all-gathered or reduce-scattered over the tensor group per optimizer step.

    By purpose and collective.
    """
    found = {name: volume * one.passes for name, volume in _volumes_of_a_pass(one).items()}
    found |= {(_SURVEYS, collective): volume * one.surveys for collective, volume in _volumes_of_a_survey(one).items()}
    return {name: volume for name, volume in found.items() if volume}


def _volumes_of_a_pass(one: Arithmetic) -> Counter[tuple[str, str]]:
    work, shared, again = one.work, one.work.sequence_parallel, int(one.training.recompute == "full")
    vectors, both, found = _vectors(one), ("all-gather", "reduce-scatter"), Counter[tuple[str, str]]()
    for layer, n in one.alike.items():
        for all_reduce in (all_reduce for block in one.of_layer(layer) for all_reduce in block.all_reduces):
            if not (shared and all_reduce.residual):
                volume = n * work.tokens * all_reduce.width * work.itemsize(all_reduce.dtype)
                runs = 1 + again * (all_reduce.direction == "forward")
                found[f"layers {all_reduce.direction}", "all-reduce"] += runs * volume
        # a sub-block's mixers read the same gathered tokens, and each of them sums what it returns
        gathered, summed = len(layer), sum(map(len, layer))
        for collective, forward, backward in (*zip(both, (gathered, summed), (summed, gathered), strict=True),) if shared else ():
            found["layers forward", collective] += (1 + again) * n * forward * vectors
            found["layers backward", collective] += n * backward * vectors
        # recomputation ends with the last tensor that backward needs, which goes into the layer's last sum
        found["layers forward", "reduce-scatter" if shared else "all-reduce"] -= again * n * vectors
    if one.stage.first:
        for collective in both if shared else ("all-reduce",):
            found["embedding", collective] += _stream(one)
    if one.stage.last:
        # largest logit, own logit and sum of exponentials
        found["loss", "all-reduce"] += 3 * 4 * work.tokens
        for collective in both if shared else ("all-reduce",):
            found["loss", collective] += vectors
    return found


def _volumes_of_a_survey(one: Arithmetic) -> Counter[str]:
    """Of the forward pass alone, by collective; the stream that the loss would read is made, and gathered where it is shared."""
    work, shared, found = one.work, one.work.sequence_parallel, Counter[str]()
    for block, n in one.block_counts:
        for all_reduce in block.all_reduces:
            if all_reduce.direction == "forward" and not (shared and all_reduce.residual):
                found["all-reduce"] += n * work.tokens * all_reduce.width * work.itemsize(all_reduce.dtype)
        found["reduce-scatter"] += n * shared * _vectors(one)
    found["all-gather"] += shared * sum(map(len, one.layers)) * _vectors(one)
    if one.stage.first:
        found["reduce-scatter" if shared else "all-reduce"] += _stream(one)
    if one.stage.last and shared:
        found["all-gather"] += _vectors(one)
    return found


def _vectors(one: Arithmetic) -> int:
    """Bytes of d_model numbers per token in the compute type."""
    work = one.work
    return one.model.d_model * work.compute_bytes * (work.stream_tokens * one.tensor if work.sequence_parallel else work.tokens)


def _stream(one: Arithmetic) -> int:
    """The same in the residual stream's."""
    return _vectors(one) * DTYPE_BYTES[one.training.residual_dtype] // one.work.compute_bytes


def _over_sequence(one: Arithmetic) -> dict[str, Exchange]:
    found: dict[str, Exchange] = {}
    ranks, p, work = one.layout.context, one.tensor, one.work
    if ranks == 1:
        return found
    recurrences = [(recurrence, n) for block, n in one.block_counts for recurrence in block.recurrences]
    gathers = one.layout.gathers_states(one.together)
    gathered = [(recurrence, n) for recurrence, n in recurrences if recurrence.transition and gathers]
    passed_on = [(recurrence, n) for recurrence, n in recurrences if not (recurrence.transition and gathers)]
    for name, backward in (("States: to the next rank", False), ("cotangents: to the rank before", True)):
        sent = sum(n * recurrence.message_bytes(work, backward=backward) for recurrence, n in passed_on)
        if sent:
            found[name] = Exchange(sent * one.passes, ranks, p, pairs=True)
    if gathered:
        for name, backward in (("States: all-gather over context", False), ("cotangents: all-gather over context", True)):
            effects = sum(n * recurrence.transition_bytes(work, backward=backward) for recurrence, n in gathered)
            found[name] = Exchange((ranks - 1) * effects * one.passes, ranks, p)
    found |= _of_full_attention(one)
    whole = sum(n * block.message_bytes(work) for block, n in one.block_counts)
    if one.training.carries_lane_states and whole:
        found["States of lanes: to the first rank"] = Exchange(whole * one.passes // one.together, ranks, p, pairs=True)
    return found


def _of_full_attention(one: Arithmetic) -> dict[str, Exchange]:
    """Keys and values are gathered in every pass and once more backwards, and their gradients return to their owners; in segments,
    those of all segments so far. Queries go to other ranks and outputs come back, and so do their gradients."""
    ranks, p, work = one.layout.context, one.tensor, one.work
    keys = sum(n * block.key_bytes(work) for block, n in one.block_counts)
    if not keys:
        return {}
    queries = sum(n * block.query_bytes(work) for block, n in one.block_counts)
    again = int(one.training.recompute == "full")
    forward, so_far = (1 + again) * one.passes + one.surveys, (one.together + 1) / 2
    return {
        "keys and values: all-gather over context": Exchange(int((ranks - 1) * keys * so_far * (forward + one.passes)), ranks, p),
        "gradients of keys and values: all-to-all over context": Exchange(int((ranks - 1) * keys * so_far * one.passes), ranks, p),
        "queries and outputs: all-to-all over context": Exchange(2 * queries * (forward + one.passes), ranks, p),
    }


def _of_stages(one: Arithmetic) -> dict[str, Exchange]:
    found: dict[str, Exchange] = {}
    layout, stage = one.layout, one.stage
    between = one.tensor * layout.context * layout.data
    hidden = Exchange(one.hidden_bytes * one.passes, stage.count, between, pairs=True)
    if not stage.last:
        found["hidden vectors: to the next stage"] = hidden
    if not stage.first:
        found["gradients of hidden vectors: to the stage before"] = hidden
    if one.model.tie_embeddings and stage.first != stage.last:
        name = "tied embedding: values to the last stage" if stage.first else "tied embedding: gradient to the first stage"
        found[name] = Exchange(4 * one.head_count, 2, (stage.count - 1) * between, pairs=True, once=True)
    if (volume := 4 * one.shared_count) and stage.count > 1:
        sent = "values to the other stages" if stage.first else "gradient to the first stage"
        found[f"blocks that layers share: {sent}"] = Exchange(volume, stage.count, between, once=True)
    return found


def _of_readers(one: Arithmetic) -> dict[str, Exchange]:
    layout = one.layout
    readers = one.tensor * layout.context * layout.pipeline
    if readers == 1:
        return {}
    tokens = 3 * 8 * one.work.batch * one.training.sequence_length
    # with stages the readers of a lane are as far apart as the ranks that read others
    stride = 1 if layout.pipeline == 1 else layout.data
    return {"tokens: broadcast to all that need them": Exchange(tokens * one.micro_batches, readers, stride)}


def ring(volume: int, members: int) -> int:
    """volume (members - 1) / members, in whole bytes."""
    return volume * (members - 1) // members
