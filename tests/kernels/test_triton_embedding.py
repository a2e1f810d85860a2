"""The embedding's gradient in Triton compared with float64; on a CPU the kernels are interpreted."""

import pytest
import torch
from support.compare import relative_error
from support.long_form import some
from support.recurrences import seeded

from baton.kernels.embedding import add_rows
from baton.kernels.embedding.triton_launch import add_rows_triton
from baton.kernels.errors import KernelError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMIT = 1e-6
"""For both dtypes of rows; sums are float32."""
VOCABULARY = 50


def ids_of(kind, tokens):
    """Ids for a vocabulary of 50, some of them outside of this rank's rows."""
    g = seeded(1)
    if kind == "distinct":
        return torch.randperm(VOCABULARY, generator=g)[:tokens]
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=g)
    frequent = torch.rand(tokens, generator=g)
    if kind == "equal":
        ids[:] = 7
    elif kind == "frequent":  # one is most of the tokens, another has a few chunks
        ids[frequent < 0.6], ids[frequent > 0.8] = 17, 49
    elif kind == "elsewhere":
        ids[frequent < 0.3], ids[frequent > 0.7] = -1, VOCABULARY
        ids[:4] = torch.tensor([2**40 + 3, -(2**40) + 3, 2**32 + 5, 0])
    elif kind == "nowhere":
        ids[:] = -1
    return ids


def compare(run, ids, width, dtype, vocabulary=VOCABULARY, *, fresh=False):
    """Added to existing gradients or to zeros, twice with the same bits. Gradient rows for ids without a row are NaN: they are not
    read."""
    g = seeded(0)
    rows = torch.randn(len(ids), width, generator=g).to(dtype)
    before = torch.zeros(vocabulary, width) if fresh else torch.randn(vocabulary, width, generator=g)
    here = (ids >= 0) & (ids < vocabulary)
    expected = before.double().index_add(0, ids[here], rows[here].double())
    rows[~here] = torch.nan
    found = []
    for _ in range(2):
        into = before.clone().to(DEVICE)
        run(into, ids.to(DEVICE), rows.to(DEVICE))
        found.append(into.cpu())
    assert relative_error(found[0], expected) <= LIMIT
    untouched = torch.ones(vocabulary, dtype=torch.bool).index_fill(0, ids[here], False)
    assert torch.equal(found[0][untouched], before[untouched])
    assert torch.equal(*found)


KINDS = ("uniform", "frequent", "equal", "distinct", "elsewhere", "nowhere")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((torch.float32, kind) for kind in ("uniform", "equal", "elsewhere", "nowhere")),
        (torch.bfloat16, "frequent"),
        *(pytest.param(torch.float32, kind, marks=pytest.mark.long) for kind in ("frequent", "distinct")),
        *(pytest.param(torch.bfloat16, kind, marks=pytest.mark.long) for kind in KINDS if kind != "frequent"),
        *(pytest.param(torch.float16, kind, marks=pytest.mark.long) for kind in KINDS),
    ],
    ids=str,
)
def test_rows_of_equal_ids_are_summed(dtype, kind):
    """Runs over many chunks, several and none; a last chunk with less to do; odd widths, several blocks of columns."""
    run = lambda *args: add_rows_triton(*args, chunk=8)  # noqa: E731
    compare(run, ids_of(kind, 107), 37, dtype)
    compare(run, ids_of(kind, 48), 600, dtype, fresh=True)
    compare(add_rows_triton, ids_of(kind, 100), 48, dtype)


@pytest.mark.parametrize(
    "lengths", [(8, 8), (7, 2, 7), (3, 21, 8), (1, 30, 1), (8, 16, 8), (9, 7, 1), (1,), (16, 1), (24, 24)], ids=str
)
def test_runs_of_all_lengths_at_all_borders(lengths):
    """Of chunks of 8: that end at one, begin at one, fill one, and fill several."""
    ids = torch.repeat_interleave(torch.tensor([3, 5, 11])[: len(lengths)], torch.tensor(lengths))
    ids = ids[torch.randperm(len(ids), generator=seeded(2))]
    for first in (0, -4):  # ids 3 and 5 of no row, or 3 alone: what is left out comes before
        compare(lambda *args: add_rows_triton(*args, chunk=8), ids + first, 20, torch.float32)


@pytest.mark.parametrize("chunks", some([40, 129, 150], [129]))
def test_more_parts_than_are_loaded_at_once(chunks):
    """Nor are their ids looked at all at once."""
    ids = torch.cat([torch.full((chunks * 2,), 4), torch.arange(4), torch.arange(5, 20)])
    compare(lambda *args: add_rows_triton(*args, chunk=2), ids, 5, torch.float32)


def test_ids_of_32_bits_and_rows_with_gaps():
    def run(into, ids, rows):
        add_rows_triton(into, ids.to(torch.int32), torch.stack((rows, rows), -1)[..., 0], chunk=8)

    compare(run, ids_of("frequent", 60), 12, torch.float32)


@pytest.mark.parametrize("kind", ["frequent", "elsewhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_public_function(dtype, kind):
    compare(add_rows, ids_of(kind, 100), 24, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sizes_of_runs(dtype):
    """A vocabulary as Zipf has it: the most frequent token is a tenth of all."""
    weights = 1.0 / torch.arange(1, 50281)
    ids = torch.multinomial(weights, 16384, replacement=True, generator=seeded(3))
    compare(add_rows, ids, 2048, dtype, vocabulary=50280)


@pytest.mark.gpu
def test_a_graph_repeats_it_for_other_ids():
    """The result does not depend on which ids are present."""
    ids, rows, into = torch.zeros(5000, dtype=torch.int64).cuda(), torch.randn(5000, 96).cuda(), torch.zeros(300, 96).cuda()
    add_rows(into, ids, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_rows(into, ids, rows)
    for seed in range(2):
        ids.copy_(torch.randint(-5, 305, (5000,), generator=seeded(seed)) if seed else torch.full((5000,), 9))
        into.zero_()
        graph.replay()
        here = (ids >= 0) & (ids < 300)
        expected = torch.zeros_like(into).double().index_add(0, ids[here], rows[here].double())
        assert relative_error(into, expected) <= LIMIT


def test_what_does_not_fit_is_refused():
    into, ids, rows = torch.zeros(5, 4), torch.tensor([0, 1]), torch.zeros(2, 4)
    with pytest.raises(KernelError, match=r"add_rows: into is no contiguous tensor of shape \(V, d\)"):
        add_rows(into.mT, ids, rows)
    with pytest.raises(KernelError, match=r"add_rows: rows has shape \(2, 3\), expected \(N, d\) = \(2, 4\)"):
        add_rows(into, ids, rows[:, :3])
    with pytest.raises(KernelError, match="add_rows: ids has dtype float32"):
        add_rows(into, ids.float(), rows)
