"""Scatter-add of rows by id in Triton: sums over runs of equal ids among the sorted tokens.

Each program handles one chunk of sorted tokens, whatever the lengths of the runs, so that many programs share a frequent token's
rows. A run inside one chunk is added to its row directly. For a run that crosses chunk borders each chunk stores a partial sum:
parts[0, chunk] for the run that began before the chunk, parts[1, chunk] for the run that begins in it. A second kernel adds these.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import pack_bits, unpack_bits


@triton.jit
def id_at(ids, t, tokens):
    """The id of token t; -1, which has no row, where there is no token."""
    return tl.load(ids + t, mask=(t >= 0) & (t < tokens), other=-1)


@triton.jit
def embedding_sum_runs_kernel(
    ids, order, rows, into, parts, tokens, vocabulary,
    D: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """into [V, D] += rows[order[t]] of whole runs, t of C sorted tokens; and parts [2, chunks, D] of the others."""
    chunk, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    inside, end = d < D, (chunk + 1) * C
    before = id_at(ids, chunk * C - 1, tokens)
    total = tl.zeros([BD], tl.float32)
    for t in range(chunk * C, end, STEPS):
        own, loaded, added_to = (), (), ()
        for s in tl.static_range(STEPS + 1):
            own += (id_at(ids, t + s, tokens),)
        for s in tl.static_range(STEPS):
            here = (own[s] >= 0) & (own[s] < vocabulary)
            row = tl.load(order + t + s, mask=t + s < tokens, other=0)  # does not wait for the id
            loaded += (pack_bits(tl.load(rows + row * D + d, mask=here & inside, other=0.0)),)
            whole = here & (own[s] != before) & (own[s] != own[s + 1])
            added_to += (tl.load(into + own[s].to(tl.int64) * D + d, mask=whole & inside, other=0.0),)
        for s in tl.static_range(STEPS):
            here = (own[s] >= 0) & (own[s] < vocabulary)
            arrived, ends, last = own[s] == before, own[s] != own[s + 1], t + s == end - 1
            total += unpack_bits(loaded[s], rows)
            whole = here & ends & (own[s] != before)
            tl.store(into + own[s].to(tl.int64) * D + d, added_to[s] + total, mask=whole & inside)
            part = here & ((arrived & (ends | last)) | (last & (own[s] == own[s + 1])))
            kept = parts + (tl.where(arrived, 0, tl.num_programs(0)) + chunk).to(tl.int64) * D
            tl.store(kept + d, total, mask=part & inside)
            total = tl.where(ends, 0.0, total)


@triton.jit
def parts_from(ids, chunk, own, tokens, C: tl.constexpr):
    """In how many chunks, from this one on, the run of `own` goes on."""
    LOOKED_AT: tl.constexpr = 128  # at once
    count, found = 0, LOOKED_AT
    while found == LOOKED_AT:
        begin = (chunk + count + tl.arange(0, LOOKED_AT)) * C
        found = tl.sum((id_at(ids, begin, tokens) == own).to(tl.int32))
        count += found
    return count


@triton.jit
def embedding_sum_borders_kernel(
    ids, into, parts, tokens, vocabulary, D: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """into [V, D] += all parts of the run that begins in this program's chunk and goes on behind it, if there is one."""
    chunk, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    inside, after = d < D, chunk + 1
    own = id_at(ids, after * C - 1, tokens)
    goes_on = (own == id_at(ids, after * C, tokens)) & (own != id_at(ids, chunk * C - 1, tokens))
    if goes_on & (own >= 0) & (own < vocabulary):
        at = into + own.to(tl.int64) * D + d
        own_part = parts + (tl.num_programs(0) + chunk).to(tl.int64) * D + d
        begun = tl.load(at, mask=inside, other=0.0) + tl.load(own_part, mask=inside, other=0.0)
        total = tl.zeros([BP, BD], tl.float32)
        end = after + parts_from(ids, after, own, tokens, C)
        for first in range(after, end, BP):
            p = first + tl.arange(0, BP)
            mask = (p < end)[:, None] & inside[None, :]
            total += tl.load(parts + p[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)
        tl.store(at, begun + tl.sum(total, 0), mask=inside)
