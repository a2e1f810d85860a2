"""`baton plan` for segments: compared with measurements of what running models save and send, and its advice."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from support import measured_costs
from support.long_form import some
from support.measured_costs import (
    BPTT,
    CUT_SEQUENCE_LENGTH,
    KEYS,
    LANES,
    LONG_OVER_RANKS,
    OFFLOADED,
    OFFLOADED_OFTEN,
    OTHERWISE_OFTEN,
    OVER_RANKS_OFTEN,
    SEGMENTED,
    SEGMENTED_OFTEN,
    SEGMENTED_OVER_RANKS,
    SEGMENTED_OVER_TENSOR,
    SEGMENTED_OVER_TENSOR_OFTEN,
    SHARED_BY,
    STAGES,
    run_of,
)

from baton.launcher.cli import main
from baton.launcher.cluster import load_cluster
from baton.launcher.config import load
from baton.launcher.planner.comm_volume import exchanges, tensor_volumes
from baton.launcher.planner.memory import of_stages
from baton.launcher.planner.plan import make_plan
from baton.launcher.planner.suggestions import LEAST_PASS

RUN = Path(str(files("baton.configs"))) / "runs" / "papers" / "mamba-1.4b-pile.yaml"
LONG = 1 << 20


@pytest.fixture
def measured(request):
    return measured_costs.measured("long" if request.node.get_closest_marker("long") else "quick")["segments"]


def long_run(*words, sequence_length=LONG, sequences=1):
    """A run of a few long sequences on one rank, which recomputes nothing unless words say so."""
    tokens = [f"training.sequence_length={sequence_length}", f"training.global_batch_tokens={sequence_length * sequences}"]
    words = ("training.recompute=none", "training.cuda_graphs=false", *words)
    return load(RUN, ["layout.data=1", "training.micro_batch_size=1", *tokens, *words])


# ----------------------------------------------------------------------------------------------------------- against running models


def arithmetic(variant, bptt, **settings):
    """Of the run's last stage."""
    return of_stages(run_of(variant, sequence_length=CUT_SEQUENCE_LENGTH, bptt=bptt, **settings))[-1]


def assert_kept(one, seen, rel=0.03):
    """Fingerprints of States and the like are not counted. In one process the State that the last survey left waits there;
    between processes it has been sent."""
    memory, waiting = one.memory(), one.entering if one.layout.context == 1 else 0
    if one.together > 1:
        assert memory.borders + memory.inputs + waiting == pytest.approx(seen["forward_no_grad"], rel=rel)
    kept = memory.borders + memory.inputs + one.activations(full_recompute=one.training.recompute == "full")
    # the loss has made the head's gradient
    kept += 4 * one.head_count * one.stage.last
    assert kept == pytest.approx(seen["forward"], rel=rel)


@pytest.mark.parametrize(
    ("variant", "bptt"),
    [
        pytest.param(variant, bptt, marks=[] if (variant, bptt) in SEGMENTED_OFTEN else pytest.mark.long)
        for bptt in BPTT
        for variant in SEGMENTED
    ],
)
def test_segments_keep_what_is_counted(variant, bptt):
    form = "quick" if (variant, bptt) in SEGMENTED_OFTEN else "long"
    one, seen = arithmetic(variant, bptt), measured_costs.measured(form)["segments"][f"{variant} {bptt}"]
    assert one.work.length == BPTT[bptt]["segment"] < CUT_SEQUENCE_LENGTH
    assert_kept(one, seen)
    # six lanes of which a micro-batch reads two
    assert seen["lanes"] == one.memory().lanes == (0 if bptt == "exact" else LANES // 2 * one.states)
    run = run_of(variant, sequence_length=CUT_SEQUENCE_LENGTH, bptt=bptt)
    with_graphs = run.model_copy(update={"training": run.training.model_copy(update={"cuda_graphs": True})})
    fixed = of_stages(with_graphs)[-1].memory()
    assert fixed.borders == pytest.approx(seen["fixed"], rel=0.03)
    assert fixed.recorded == fixed.activations + fixed.borders + max(fixed.in_hand, fixed.loss)
    # a micro-batch of the step's two has run, in up to four groups of segments: its lanes as they were, once
    assert one.micro_batches * seen["before"] == one.memory().before == (0 if bptt == "exact" else 2 * one.states)


@pytest.mark.parametrize(("offload_kv", "recompute"), some(OFFLOADED, OFFLOADED_OFTEN))
def test_keys_are_kept_or_offloaded_and_fetched_as_counted(measured, offload_kv, recompute):
    one, seen = arithmetic(KEYS, "exact", offload_kv=offload_kv, recompute=recompute), measured[f"keys {offload_kv} {recompute}"]
    assert one.earlier_keys > 0
    assert one.offloaded == seen["host"] == (one.earlier_keys if offload_kv else 0)
    on_gpu = arithmetic(KEYS, "exact", offload_kv=offload_kv, recompute=recompute, device="auto")
    assert on_gpu.fetched == one.micro_batches * seen["fetched"]
    assert (on_gpu.fetched > 0) is offload_kv
    assert one.fetched == 0
    kept = arithmetic(KEYS, "exact", recompute=recompute, device="auto")
    assert kept.memory().borders - on_gpu.memory().borders == one.offloaded
    # half a kilobyte: fingerprints of States, and the sum of the losses
    activations = one.activations(full_recompute=recompute == "full") + 4 * one.head_count
    rows = 0 if offload_kv else (one.together - 1) * sum(n * block.key_bytes(one.work) for block, n in one.block_counts)
    assert seen["forward_no_grad"] == pytest.approx(rows, abs=512)
    if offload_kv:
        assert seen["forward"] == pytest.approx(activations, rel=0.03, abs=512)


@pytest.mark.parametrize("bptt", some(BPTT, OTHERWISE_OFTEN))
def test_recomputed_segments_and_those_of_later_stages_keep_what_is_counted(measured, bptt):
    assert_kept(arithmetic("gla", bptt, recompute="full"), measured[f"gla {bptt} again"])
    last = arithmetic("gla", bptt, pipeline=STAGES)
    assert_kept(last, measured[f"gla {bptt} stage"])
    assert last.memory().inputs == (last.together - 1) * last.hidden_bytes
    # hidden vectors come once, their gradients go back once, however often a segment runs
    assert (
        exchanges(last)["gradients of hidden vectors: to the stage before"].bytes
        == 2 * measured[f"gla {bptt} stage"]["sent"]["send"]
    )


@pytest.mark.parametrize(
    ("variant", "bptt"), some([case for case in SEGMENTED_OVER_RANKS if case not in LONG_OVER_RANKS], OVER_RANKS_OFTEN)
)
def test_segments_over_sequence_ranks_keep_and_send_what_is_counted(measured, variant, bptt):
    """The two ends differ: the first rank sends nothing to the left of a group, the last one hands on what leaves it as a whole."""
    assert_kept_and_sent_over_ranks(measured, variant, bptt)


@pytest.mark.long
@pytest.mark.parametrize(("variant", "bptt"), LONG_OVER_RANKS)
def test_longer_ones_over_sequence_ranks_keep_and_send_what_is_counted(variant, bptt):
    assert_kept_and_sent_over_ranks(measured_costs.measured("long")["segments"], variant, bptt)


def assert_kept_and_sent_over_ranks(measured, variant, bptt):
    one = arithmetic(variant, bptt, context=2)
    first, last = (measured[f"{variant} {bptt} rank {rank}"] for rank in (0, 1))
    assert_kept(one, last)
    assert first["lanes"] == one.memory().lanes
    assert last["lanes"] == last["before"] == 0
    assert one.micro_batches * first["before"] == one.memory().before
    sent = {name: exchange.bytes // 2 for name, exchange in exchanges(one).items()}
    assert sent["States: to the next rank"] == first["handed on"]["right"]
    assert sent["cotangents: to the rank before"] == last["handed on"]["left"]
    assert sent.get("States of lanes: to the first rank", 0) == last["handed on"].get("around", 0)
    groups = one.passes // one.together
    assert last["handed on"].get("right", 0) * one.passes == first["handed on"]["right"] * (one.passes - groups)
    assert ("around" in last["handed on"]) is one.training.carries_lane_states


@pytest.mark.parametrize(("bptt", "how", "recompute"), some(SEGMENTED_OVER_TENSOR, SEGMENTED_OVER_TENSOR_OFTEN))
def test_tensor_ranks_exchange_surveys_too(measured, bptt, recompute, how):
    layout = {"tensor": 2} if how == "tensor" else SHARED_BY
    one = arithmetic("mamba", bptt, recompute=recompute, **layout)
    seen = measured[f"mamba {bptt} {how} {recompute}"]
    assert_kept(one, seen, rel=0.06)
    counted = dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), 0)
    for (_, collective), volume in tensor_volumes(one).items():
        counted[collective] += volume // one.micro_batches
    names = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
    assert {name: n for name, n in counted.items() if n} == {names[name]: n for name, n in seen["sent"].items()}
    assert ("surveyed segments", "all-reduce") in tensor_volumes(one) or one.together == 1


def test_states_are_gathered_only_where_no_gradient_goes_from_segment_to_segment():
    for bptt in BPTT:
        names = exchanges(arithmetic("gla", bptt, context=2, context_comm="all_gather"))
        assert any("all-gather over context" in name for name in names) is (bptt == "cut")


# ------------------------------------------------------------------------------------------------------------- against the schedule


def makespan(stages, micro_batches, segments, together, seconds):
    """Of the operations of all stages: one begins when its stage is free and what it needs from a neighbour is there."""
    from baton.parallel.pipeline import StepSchedule

    lists = [StepSchedule(segments, together).operations(n, stages, micro_batches) for n in range(stages)]
    free, ended, at = [0.0] * stages, {}, [0] * stages
    while any(n < len(found) for n, found in zip(at, lists, strict=True)):
        for stage, found in enumerate(lists):
            if at[stage] == len(found):
                continue
            one = found[at[stage]]
            unit = (one.micro_batch, one.segment)
            backward = one.kind == "backward"
            there = stages - 1 if backward else 0
            needs = (backward, stage + 1 if backward else stage - 1, unit)
            if stage != there and needs not in ended:
                continue
            start = max(free[stage], 0.0 if stage == there else ended[needs])
            free[stage] = start + seconds[backward]
            # of two runs forwards the first one's result is what is sent
            ended.setdefault((backward, stage, unit), free[stage])
            at[stage] += 1
    return max(free)


@pytest.mark.parametrize(("sequences", "segments", "through"), [(3, 8, None), (1, 32, None), (2, 8, 1), (5, 1, None), (2, 16, 4)])
def test_the_bubble_is_the_schedules(sequences, segments, through):
    mode = f"truncated, gradient_segments: {through}" if through else "exact"
    bptt = f"training.bptt={{mode: {mode}, segment: {LONG // segments}}}"
    # layers without a head and a loss, so that stages are equal and a pass backwards takes a forward one's time three times
    config = long_run(bptt, "layout.pipeline=4", sequences=sequences)
    plan = make_plan(config)
    one = of_stages(config)[1]
    forward = one.surveying().cost / one.surveys * one.passes if one.surveys else one.operations().cost / 4
    seconds = forward / one.passes, (one.operations().cost - forward) / one.passes
    took = makespan(4, sequences, segments, one.together, seconds)
    own = one.operations().cost + one.surveying().cost
    assert plan.bubble == pytest.approx(1 - own / took, abs=0.01)
    most = max(kept_at_once(stage, 4, sequences, segments, one.together) for stage in range(4))
    assert [stage.in_flight for stage in plan.stages] == [kept_at_once(n, 4, sequences, segments, one.together) for n in range(4)]
    assert most == (1 if one.together > 1 else 4)


def kept_at_once(stage, stages, micro_batches, segments, together):
    """Passes whose activations the schedule has at most."""
    from baton.parallel.pipeline import StepSchedule

    kept = most = 0
    for operation in StepSchedule(segments, together).operations(stage, stages, micro_batches):
        kept += {"forward_no_grad": 0, "forward": 1, "backward": -1}[operation.kind]
        most = max(most, kept)
    return most


# ----------------------------------------------------------------------------------------------------------- a million tokens


def test_a_million_tokens_in_segments_are_as_much_as_one_and_the_states_between():
    """Mamba 1.4B, 48 layers: a State of 13.1 MiB (4096 x 16 numbers in float32, 3 x 4096 in bfloat16), 62 of them kept."""
    state = 48 * (4 * 4096 * 16 + 2 * 3 * 4096)
    assert state / 2**20 == pytest.approx(13.1, abs=0.05)
    segment = make_plan(long_run("training.bptt={mode: exact, segment: 16384}", sequence_length=16384)).memory
    found = make_plan(long_run("training.bptt={mode: exact, segment: 16384}")).memory
    assert segment.borders == 0
    assert found.borders == (64 - 2) * state
    tokens = 28 * (LONG - 16384)
    assert found.peak - segment.peak == found.borders + tokens
    assert found.activations == segment.activations
    # on sequence ranks the first segment is entered too, and a rank has its part of the tokens
    ranks = make_plan(long_run("training.bptt={mode: exact, segment: 131072}", "layout.context=8")).memory
    assert (ranks.borders, ranks.activations, 8 * ranks.tokens) == ((8 - 1) * state, found.activations, found.tokens)
    truncated = make_plan(long_run("training.bptt={mode: truncated, segment: 16384, gradient_segments: 2}", "training.lanes=5"))
    assert (truncated.memory.borders, truncated.memory.lanes) == (state, 5 * state)


@pytest.mark.parametrize(
    ("model", "mib"),
    [("mamba-1.4b", 13.1), ("longhorn-1.3b", 13.1), ("gsa-1.3b", 24.0), ("lattice-1.3b", 12.3), ("bmojo-1.4b", 94.4)],
)
def test_a_states_size_is_what_the_page_on_long_contexts_says(model, mib):
    (one,) = of_stages(long_run(f"model={model}", sequence_length=16384))
    assert one.states / 2**20 == pytest.approx(mib, abs=0.051)


def test_segments_run_forwards_once_more_but_for_the_last():
    cluster = load_cluster("h200")
    plain, whole, cut, one = (
        make_plan(long_run(*words), cluster).speed
        for words in (
            (),
            ("training.recompute=full",),
            ("training.bptt={mode: exact, segment: 16384}",),
            ("training.bptt={mode: truncated, segment: 16384, gradient_segments: 1}",),
        )
    )
    assert one.matrix == pytest.approx(plain.matrix)
    # recomputation runs all of the layers again, segments 63 of 64
    assert (cut.matrix - plain.matrix) / (whole.matrix - plain.matrix) == pytest.approx(63 / 64, rel=0.01)
    assert cut.utilisation < plain.utilisation
    assert cut.exchange == 0


@pytest.mark.parametrize(
    ("words", "memory", "advice"),
    [
        ((), 136, ("training.bptt={mode: exact, segment: 32768}",)),
        (("layout.context=8",), 136, ("training.bptt={mode: exact, segment: 262144}",)),
        (("training.micro_batch_size=4", "training.global_batch_tokens=4194304"), 136,
         ("training.bptt={mode: exact, segment: 32768}", "training.micro_batch_size=1")),
        # both, where one of them is not enough
        ((), 36, ("training.recompute=full", "training.bptt={mode: exact, segment: 16384}")),
        # stages rather recompute what fits so
        (("layout.pipeline=4", "training.sequence_length=65536"), 100, ("training.recompute=full",)),
        (("layout.pipeline=4",), 100, ("training.bptt={mode: exact, segment: 65536}",)),
        # what has segments gets shorter ones, and gradients go as far back as they did
        (("training.bptt={mode: exact, segment: 131072}",), 136, ("training.bptt.segment=32768",)),
        (("training.bptt={mode: truncated, segment: 65536, gradient_segments: 2}",), 136,
         ("training.bptt.segment=32768", "training.bptt.gradient_segments=4")),
        # the last resort: segments so short that the weights' own traffic is felt
        (("training.sequence_length=12288", "training.global_batch_tokens=12288", "layout.context=3", "layout.tensor=8",
          "model.n_layers=1"), 0.37, ("training.bptt={mode: exact, segment: 6144}",)),
    ],
)  # fmt: skip
def test_advice_of_segments_is_the_first_that_fits_and_does_fit(words, memory, advice):
    config = long_run(*words)
    found = make_plan(config, memory_gib=memory)
    assert not found.fits
    assert found.advice == advice
    tokens = [
        "layout.data=1",
        "training.recompute=none",
        "training.cuda_graphs=false",
        "training.micro_batch_size=1",
        f"training.sequence_length={LONG}",
        f"training.global_batch_tokens={LONG}",
    ]
    again = load(RUN, [*tokens, *words, *advice])
    assert make_plan(again, memory_gib=memory).fits
    # the next longer segments do not fit
    segment, sizes = (
        again.training.segment,
        [n for n in range(1, again.training.sequence_length + 1) if again.training.sequence_length % n == 0],
    )
    longer = next((n for n in sizes if n > segment), None)
    if segment < again.training.sequence_length and longer < config.training.segment:
        bptt = again.training.bptt.model_copy(update={"segment": longer, "gradient_segments": None})
        training = again.training.model_copy(update={"bptt": bptt})
        assert not make_plan(again.model_copy(update={"training": training}), memory_gib=memory).fits


def test_advised_segments_are_legal():
    """Multiples of the sequence ranks that divide the context, and not shorter than a window's tail on any rank."""
    words = ["model=bmojo-1.4b", "layout.context=3"]
    config = long_run(*words, sequence_length=1_179_648)
    found = make_plan(config, memory_gib=60)
    (advice,) = [word for word in found.advice if "bptt" in word]
    tokens = ["training.sequence_length=1179648", "training.global_batch_tokens=1179648"]
    alone = ["layout.data=1", "training.micro_batch_size=1", "training.recompute=none"]
    segment = load(RUN, [*tokens, *alone, *words, *found.advice]).training.segment
    assert advice == f"training.bptt={{mode: exact, segment: {segment}}}"
    assert 1_179_648 % segment == segment % 3 == 0
    assert segment // 3 >= LEAST_PASS > config.model.mixers["bmojo"].longest_tail
    # keys of full attention are kept through exact segments, which are what is advised
    full = make_plan(long_run("model=transformer-1.3b", sequence_length=131072), memory_gib=56)
    assert any(word.startswith("training.bptt={mode: exact") for word in full.advice)


def test_the_command_says_how_sequences_are_cut(capsys):
    tokens = [
        "layout.data=1",
        "training.recompute=none",
        "training.cuda_graphs=false",
        "training.micro_batch_size=1",
        f"training.sequence_length={LONG}",
        f"training.global_batch_tokens={LONG}",
    ]
    status = main(["plan", str(RUN), *tokens, "training.bptt={mode: exact, segment: 16384}", "--cluster", "h200"])
    out = capsys.readouterr().out
    assert status == 0
    assert "exact backpropagation through time: 64 segments of 16384 tokens a sequence, a gradient through 64 of them" in out
    assert "States at segment borders" in out
    assert "activations of a segment" in out
    status = main(["plan", str(RUN), *tokens, "--cluster", "h200"])
    out = capsys.readouterr().out
    assert status == 2
    # as a shell takes it
    assert out.splitlines()[-1].endswith("fits with 'training.bptt={mode: exact, segment: 32768}'")
    words = ["training.bptt={mode: truncated, segment: 16384, gradient_segments: 2}", "layout.pipeline=4", "--json"]
    main(["plan", str(RUN), *tokens, *words])
    values = json.loads(capsys.readouterr().out)
    assert values["bptt"] == {"mode": "truncated", "segment": 16384, "segments": 64, "gradient_segments": 2}
    assert values["memory"]["lanes"] > 0
    assert any(note.startswith("note: 2 segments that a gradient goes through together do not fill") for note in values["notes"])


def test_what_is_not_gathered_is_planned_as_the_ring():
    """Where a gradient goes through several segments, `all_gather` computes no transitions."""
    for bptt, like in (("exact", "ring"), ("truncated", "ring"), ("cut", "early")):
        found, expected = (arithmetic("gla", bptt, context=2, context_comm=how) for how in ("all_gather", like))
        assert found.activations(full_recompute=False) == expected.activations(full_recompute=False), bptt
        assert (found.work.rerun, found.layout.gathers_states(found.together)) == (like == "early", like == "early")
