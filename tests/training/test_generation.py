"""Prompts of unequal length in one batch: with every mixer, the States are those of each prompt alone."""

from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.long_form import alternating, some
from support.memory import MostBytes
from support.models import model_of
from support.recurrences import seeded

from baton.kernels.gated_linear_attention import triton_launch as gated_linear_attention
from baton.kernels.generalized_delta_rule import triton_launch as generalized_delta_rule
from baton.models.config import ModelConfig
from baton.models.library import language_model
from baton.models.settings import kinds
from baton.parallel.cast_weights import drop_cast_weights
from baton.training.errors import RunError
from baton.training.evaluation import generation
from baton.training.evaluation import prompts as prompts_module
from baton.training.evaluation.generation import Sampling, StepRecorder, generate
from baton.training.evaluation.prompts import Room, read_prompts, rows_of_tokens

LENGTHS = (5, 17, 1, 9, 17, 3)
MODELS = [*(kind for kind in kinds() if kind != "swiglu"), "full_attention", "whole"]
OFTEN = ("attention", "bmojo", "channel_mix", "gated_delta_net", "gla", "lattice", "mamba", "whole")
"""A model of each family of recurrences and of each kind of State."""


def prompts_of(lengths=LENGTHS):
    g = seeded(4)
    return [torch.randint(61, (length,), generator=g).tolist() for length in lengths]


@pytest.mark.parametrize("kind", MODELS)
def test_the_states_of_prompts_read_together_are_those_of_each_alone(kind):
    model, prompts = language_model(model_of(kind), seed=2), prompts_of()
    hidden, states = read_prompts(model, prompts)
    for row, prompt in enumerate(prompts):
        pos = torch.arange(len(prompt), dtype=torch.int32)[None]
        with torch.no_grad():
            alone, expected = model(torch.tensor([prompt]), pos)
        assert relative_error(hidden[row], alone[0, -1]) <= 1e-5
        for layer, state in expected.items():
            for name, leaf in state.items():
                found = states[layer][name][row]
                if rows_of_tokens(model).get((layer, name), 0) is None:  # a row for each token, the last ones
                    assert not found[: -len(prompt)].any()
                    found = found[-len(prompt) :]
                if leaf.is_floating_point():
                    assert relative_error(found, leaf[0]) <= 1e-5, (layer, name)
                else:
                    assert torch.equal(found, leaf[0])


@pytest.mark.parametrize("kind", MODELS)
def test_prompts_read_together_are_gone_on_with(kind):
    model, prompts = language_model(model_of(kind), seed=2), prompts_of()
    rest = torch.tensor(prompts_of((7,) * len(prompts)))
    with torch.no_grad():
        _, states = read_prompts(model, prompts)
        pos = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)[:, None] + torch.arange(7, dtype=torch.int32)
        for piece in (slice(4), slice(4, 7)):
            hidden, states = model(rest[:, piece], pos[:, piece], states)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([[*prompt, *rest[row].tolist()]])
            expected, _ = model(ids, torch.arange(ids.shape[1], dtype=torch.int32)[None])
            assert relative_error(hidden[row], expected[0, -3:]) <= 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_that_write_over_their_states_are_those_of_the_whole_sequence(kind):
    """A mixer that reads a State twice reads it before it is written."""
    model = language_model(model_of(kind), seed=2)
    tokens = torch.tensor(prompts_of((9, 9)))
    pos = torch.arange(9, dtype=torch.int32).expand(2, -1)
    with torch.no_grad():
        expected, _ = model(tokens, pos)
        _, states = model(tokens[:, :5], pos[:, :5])
        states = Room(rows_of_tokens(model), [5, 5], 5).of_prompts(states)
        for t in range(5, 9):
            context = replace(model.forward_context, overwrite_states=True)
            found, states = model.through_stages(tokens[:, t : t + 1], pos[:, t : t + 1], states, context)
            assert relative_error(found[:, 0], expected[:, t]) <= 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels are compiled, and the model is on a CPU")
@pytest.mark.parametrize("kind", some(["mamba2", "gsa", "kda", "rwkv7"], ["gsa", "rwkv7"]))
def test_kernels_of_one_token_go_on_with_the_states_of_a_prompt(kind, monkeypatch):
    """And leave each where it is."""
    model = language_model(model_of(kind), seed=2)
    tokens, pos = torch.tensor(prompts_of((7, 7))), torch.arange(7, dtype=torch.int32).expand(2, -1)
    context = replace(model.forward_context, overwrite_states=True)
    with torch.no_grad():
        expected, _ = model(tokens, pos)
        _, states = model(tokens[:, :5], pos[:, :5])
        for module in (gated_linear_attention, generalized_delta_rule):
            monkeypatch.setattr(module, "on_gpu", lambda x: True)
        for t in (5, 6):
            found, after = model.through_stages(tokens[:, t : t + 1], pos[:, t : t + 1], states, context)
            assert relative_error(found[:, 0], expected[:, t]) <= 1e-5
            for layer, state in after.items():
                assert all(leaf.data_ptr() == states[layer][name].data_ptr() for name, leaf in state.items())


def test_a_row_ends_where_it_is_told_to():
    model, prompts = language_model(model_of("mamba"), seed=2), prompts_of()
    words = {"tokens": 9, "vocab_size": 61, "stop": None, "sampling": Sampling(0)}
    whole = generate(model, prompts, **words)
    cut = generate(model, prompts, **words, ended=lambda row, ids: len(ids) == row + 1)
    assert cut == [ids[: row + 1] for row, ids in enumerate(whole)]


class Again:
    """Replays by running again: on a CPU memory is the same each time, as a graph's is."""

    def __init__(self, device):
        made.append(self)
        self.warmed = self.replays = 0
        self.held = False

    def warm_up(self, run):
        self.warmed += 1
        run()

    def record(self, run):
        self.held = True

        def replay():
            assert self.held
            self.replays += 1
            run()

        return replay

    def release(self):
        self.held = False


made = []


def comparing(model, words):
    """A recorder, and a function that writes with and without it and counts what has been recorded since."""
    made.clear()
    recorder = StepRecorder(Again)

    def writes(prompts, tokens, recordings):
        expected = generate(model, prompts, tokens=tokens, **words)
        assert generate(model, prompts, tokens=tokens, **words, recorder=recorder) == expected
        assert len(made) == recordings

    return recorder, writes


@pytest.mark.parametrize("kind", some(MODELS, OFTEN))
def test_recorded_steps_are_steps(kind):
    """Rows that have ended are carried along until half of them are left, for which steps are recorded anew."""
    model, prompts = language_model(model_of(kind), seed=2), prompts_of()
    words = {"tokens": 30, "vocab_size": 61, "stop": None, "sampling": Sampling(0.9), "seeds": range(6)}
    words["ended"] = lambda row, ids: len(ids) == (30, 5, 3, 12, 7, 18)[row]
    expected = generate(model, prompts, **words)
    assert [len(ids) for ids in expected] == [30, 5, 3, 12, 7, 18]
    made.clear()
    assert generate(model, prompts, **words, recorder=StepRecorder(Again)) == expected
    assert [(one.warmed, one.held) for one in made] == [(1, False)] * 2 + [(1, True)]
    assert sum(one.replays for one in made) == 29 - 3


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read():
    """And none behind the last token."""
    model, launched = language_model(model_of("mamba"), seed=2), []
    words = {"tokens": 12, "vocab_size": 61, "stop": None, "sampling": Sampling(0.9), "recorder": StepRecorder(Again)}
    made.clear()
    generate(model, prompts_of((4,)), **words, ended=lambda row, ids: launched.append(sum(one.replays for one in made)))
    # when a token is there: the first is the prompt's, the second that of the step that is recorded, the last is not asked about
    assert launched == list(range(11))


@pytest.mark.parametrize(
    ("window", "lengths"), alternating([1, 6, 16, 100, None, "full_attention"], [LENGTHS, (5, 17, 5, 9, 17, 6)]), ids=str
)
def test_attention_writes_what_reading_all_again_would(window, lengths, monkeypatch):
    """Room for all keys and values is used up three times, and rows end before that; windows are filled before, by, or behind
    prompts, or never."""
    monkeypatch.setattr(prompts_module, "_ROOM", 4)
    monkeypatch.setattr(prompts_module, "_ROWS", 3)
    config = model_of("full_attention" if window == "full_attention" else "attention")
    if window != "full_attention":
        settings = config.mixers["attention"].model_copy(update={"window": window})
        config = config.model_copy(update={"mixers": {"attention": settings}})
    model, prompts = language_model(config, seed=2), prompts_of(lengths)
    # all prompts at once: what stands behind a token does not change it
    rows, pos = torch.zeros(len(lengths), max(lengths) + 40, dtype=torch.int64), torch.arange(max(lengths) + 40, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = torch.tensor(prompt)
    every, ends = torch.arange(len(lengths)), torch.tensor(lengths)
    for n in range(40):
        longest = max(lengths) + n
        with torch.no_grad():
            hidden, _ = model(rows[:, :longest], pos[:longest].expand(len(lengths), -1))
            rows[every, ends + n] = model.logits(hidden[every, ends + n - 1])[:, :61].argmax(-1)
    expected = [row[end : end + 40].tolist() for row, end in zip(rows, lengths, strict=True)]
    words = {"tokens": 40, "vocab_size": 61, "stop": None, "sampling": Sampling(0)}
    for recorder, recordings in ((None, 0), (StepRecorder(Again), 3 if window in (None, "full_attention") else 1)):
        made.clear()
        assert generate(model, prompts, **words, recorder=recorder) == expected
        assert len(made) == recordings
        found = generate(model, prompts, **words, recorder=recorder, ended=lambda row, ids: len(ids) == (40, 5, 3, 12, 7, 18)[row])
        assert found == [ids[:n] for ids, n in zip(expected, (40, 5, 3, 12, 7, 18), strict=True)]


@pytest.mark.parametrize("kind", some(["full_attention", "whole"], ["whole"]))
def test_room_for_keys_is_used_again_by_a_batch_that_fits(kind, monkeypatch):
    monkeypatch.setattr(prompts_module, "_ROWS", 32)
    model, words = language_model(model_of(kind), seed=2), {"vocab_size": 61, "stop": None, "sampling": Sampling(0.9)}
    _, writes = comparing(model, words)
    writes(prompts_of((20, 3)), 20, 1)
    writes(prompts_of((2, 7)), 20, 1)
    writes(prompts_of((20, 50)), 20, 2)
    writes(prompts_of((1, 1)), 65, 2)
    writes(prompts_of((1, 1)), 150, 3)


def test_much_more_room_than_a_batch_needs_is_not_used_again():
    """Each step would read its free rows."""
    model, words = language_model(model_of("whole"), seed=2), {"vocab_size": 61, "stop": None, "sampling": Sampling(0)}
    made.clear()
    recorder = StepRecorder(Again)
    for lengths, recordings in (((600, 3), 1), ((300, 2), 1), ((220, 2), 2)):
        generate(model, prompts_of(lengths), tokens=30, **words, recorder=recorder)
        assert len(made) == recordings
    assert not made[0].held


def test_what_rows_that_have_ended_leave_behind_reaches_no_other():
    """They go on with recorded steps; their logits may be no numbers then, and so what they write."""
    model, prompts, calls = language_model(model_of("whole"), seed=2), prompts_of((9, 4, 6)), []
    words = {"tokens": 20, "vocab_size": 61, "stop": None, "sampling": Sampling(0)}
    words["ended"] = lambda row, ids: row == 2 and len(ids) == 5
    expected, logits = generate(model, prompts, **words), model.logits

    def broken(hidden):
        calls.append(len(hidden))
        found = logits(hidden)
        if len(calls) > 7:
            found[2] = torch.nan
        return found

    recorder, model.logits = StepRecorder(Again), broken
    assert generate(model, prompts, **words, recorder=recorder) == expected
    assert calls == [3] * 20
    held, model.logits = recorder._kept, logits
    for layer, name in rows_of_tokens(model):
        held._states[layer][name][:, 9:] = torch.nan
    assert generate(model, prompts, **words, recorder=recorder) == expected
    assert recorder._kept is held


def test_what_is_drawn_at_once_changes_no_sample(monkeypatch):
    """Nor does the number of tokens that there may be, and nothing is kept for all of them."""
    model, prompts = language_model(model_of("whole"), seed=2), prompts_of((9, 4, 6))
    words = {"vocab_size": 61, "stop": None, "sampling": Sampling(1.0), "seeds": (3, 1, 2)}
    words["ended"] = lambda row, ids: len(ids) == (30, 5, 17)[row]
    expected = generate(model, prompts, tokens=30, **words)
    monkeypatch.setattr(generation, "_DRAWN", 4)
    for recorder in (None, StepRecorder(Again)):
        with MostBytes() as memory:
            assert generate(model, prompts, tokens=10**8, **words, recorder=recorder) == expected
        assert memory.bytes < 10**8


@pytest.mark.parametrize(("lengths", "times"), some([((48,) * 8, 3), (tuple(range(41, 49)), 4)], [(tuple(range(41, 49)), 4)]))
def test_keys_of_prompts_are_not_in_memory_many_times(lengths, times):
    attention = {"head_dim": 32, "window": None}
    config = ModelConfig(d_model=64, n_layers=12, vocab_size=61, pattern=["attention"], mixers={"attention": attention})
    model = language_model(config)
    with MostBytes() as memory:
        generate(model, prompts_of(lengths), tokens=4, vocab_size=61, stop=None)
    assert memory.bytes < times * 12 * 2 * 64 * 4 * sum(lengths)


def test_a_recorded_step_is_used_again_by_a_batch_of_as_many_rows():
    """By no other batch, and not after the weights have changed; what has failed is not kept."""
    model, words = language_model(model_of("mamba"), seed=2), {"vocab_size": 61, "stop": None, "sampling": Sampling(0.9)}
    recorder, writes = comparing(model, words)
    writes(prompts_of(), 30, 1)
    writes(prompts_of((8, 2, 2, 30, 1, 7)), 20, 1)
    writes(prompts_of((8, 2)), 30, 2)
    assert not made[0].held
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    writes(prompts_of((8, 2)), 30, 3)
    with pytest.raises(ZeroDivisionError):
        generate(model, prompts_of((8, 2)), tokens=30, **words, ended=lambda row, ids: 1 / (20 - len(ids)) < 0, recorder=recorder)
    assert not made[2].held
    writes(prompts_of((8, 2)), 30, 4)
    with torch.inference_mode():
        writes(prompts_of((8, 2)), 30, 5)
    writes(prompts_of((8, 2)), 30, 6)
    recorder.release()
    assert [one.held for one in made] == [False] * 6


def test_a_batch_some_rows_of_which_have_ended_is_kept_with_the_others():
    model, prompts = language_model(model_of("mamba"), seed=2), prompts_of()
    words = {"tokens": 24, "vocab_size": 61, "stop": None, "sampling": Sampling(0.9)}
    made.clear()
    recorder = StepRecorder(Again)

    def writes(prompts, ended, recordings):
        expected = generate(model, prompts, **words, ended=ended)
        assert generate(model, prompts, **words, ended=ended, recorder=recorder) == expected
        assert len(made) == recordings

    writes(prompts, lambda row, ids: row != 1 and len(ids) == 4, 2)  # one row of six is left
    writes(prompts, lambda row, ids: row == 2, 3)  # before a step is recorded
    writes([prompts[1]], None, 4)
    writes(prompts, lambda row, ids: row == 2, 5)
    writes(prompts[1:], None, 5)
    recorder.release()
    assert not any(one.held for one in made)


def test_a_recorded_step_reads_the_weights_of_now():
    """Their copies in the compute dtype are other memory once they have been dropped."""
    model = language_model(model_of("mamba"), seed=2, dtype=torch.bfloat16)
    words = {"tokens": 12, "vocab_size": 61, "stop": None, "sampling": Sampling(0)}
    made.clear()
    recorder = StepRecorder(Again)
    for recordings in (1, 1):
        generate(model, prompts_of((4, 4)), **words, recorder=recorder)
        assert len(made) == recordings
    drop_cast_weights(model)
    generate(model, prompts_of((4, 4)), **words, recorder=recorder)
    assert len(made) == 2


def test_a_model_whose_logits_are_not_finite_says_so():
    model = language_model(model_of("mamba"), seed=2)
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="logits are not finite after 17 tokens of prompt 0"):
        generate(model, prompts_of()[1:3], tokens=3, vocab_size=61, stop=None)
