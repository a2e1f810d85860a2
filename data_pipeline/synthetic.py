"""Synthetic tasks: examples made from random words alone.

Example n of a lane is a pure function of (seed, the task's settings, lane, n). Each lane has a Philox stream, in which example n
owns the words n * W to (n + 1) * W; a task maps E examples' words [E, W] to their tokens and labels [E, length]. So nothing is
stored and nothing has to be skipped: a place in a lane is the number n.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.packing import IGNORE_INDEX
from baton.data_pipeline.task_config import (
    FuzzyRecallConfig,
    InductionConfig,
    MqarConfig,
    NoisyRecallConfig,
    SelectiveCopyConfig,
    TaskConfig,
)

Int64 = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

VERSION = 1  # part of every key: raise it when the same words make other examples
PHILOX_BLOCK = 4  # words that one step of Philox's counter makes


class Task(Protocol):
    """Maps words to examples. words: W, number of words of an example. asked: number of positions in an example that have a
    label; None: it differs from example to example."""

    words: int
    asked: int | None

    def make(self, words: Words) -> tuple[Int64, Int64]:
        """uint64 [E, W], uniform on all 64 bits -> tokens and labels int64 [E, length], label IGNORE_INDEX where nothing is asked.
        A label is what the model must say at that very place."""


class Examples:
    """The examples of a task, by number, in independent streams.

    asked: number of positions in an example that have a label; None: it differs from example to example.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._task = TASKS[type(config)](config)
        self.asked = self._task.asked
        self._stride = -(-self._task.words // PHILOX_BLOCK)
        self._settings = json.dumps([VERSION, config.deciding()], sort_keys=True)

    def take(self, wanted: Iterable[tuple[tuple[int | str, ...], int, int]]) -> tuple[Int64, Int64]:
        """Tokens and labels int64 [E, length] of runs of examples (key, number of the first, how many), one after the other.

        key: what tells a stream from others (its purpose, the seed, the lane); the task's settings are part of it in any case.
        """
        runs = []
        for key, first, count in wanted:
            text = "\n".join([self._settings, *map(str, key)])
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            philox = np.random.Philox(key=int.from_bytes(digest, "little"), counter=first * self._stride)
            runs.append(philox.random_raw(count * self._stride * PHILOX_BLOCK).reshape(count, -1))
        return self._task.make(np.concatenate(runs)[:, : self._task.words])


class Mqar:
    """Multi-query associative recall (Arora et al., "Zoology", appendix on the synthetic task, and the public benchmark).

    tokens: k1 v1 k2 v2 ... of `pairs` different keys, 1 to V/2 - 1, and as many different values, V/2 to V - 1; then slots of two
    places, some of which begin with a key again; the others, and every second place, hold the filler. Each key is asked for once;
    slot g = 1, 2, ... is drawn with probability proportional to g^(power - 1), without replacement. label at a key: its value.
    """

    def __init__(self, config: MqarConfig) -> None:
        self.config = config
        self._slots = (config.length - 2 * config.pairs) // 2
        self._rates = np.arange(1, self._slots + 1, dtype=np.float64) ** (config.power - 1)
        self._sizes = [config.pairs] * 4 + [self._slots, config.length if config.filler == "random" else 0]
        self.words, self.asked = sum(self._sizes), config.pairs

    def make(self, words: Words) -> tuple[Int64, Int64]:
        config, pairs, half = self.config, self.config.pairs, self.config.vocab_size // 2
        of_keys, key_order, of_values, value_order, of_slots, of_filler = np.split(words, np.cumsum(self._sizes)[:-1], axis=1)
        keys = 1 + shuffled(different(of_keys, half - 1), key_order)
        values = half + shuffled(different(of_values, config.vocab_size - half), value_order)
        if config.filler == "random":
            tokens = others(below(of_filler, config.vocab_size - pairs), keys, config.vocab_size)
        else:
            tokens = np.zeros((len(words), config.length), np.int64)
        labels = np.full_like(tokens, IGNORE_INDEX)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        # a race of exponential clocks: the order in which they ring is that of draws without replacement at these rates
        asked = 2 * pairs + 2 * np.argsort(exponential(of_slots) / self._rates, axis=1, kind="stable")[:, :pairs]
        np.put_along_axis(tokens, asked, keys, axis=1)
        np.put_along_axis(labels, asked, values, axis=1)
        return tokens, labels


class NoisyRecall:
    """Recall in noise (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures", and its public benchmark).

    tokens: places of two, each noise with the chance `noise`, two tokens uniform on the last `noise_vocab_size`, or else a key,
    uniform on 0 to K - 1, and its value. Every key has one value in an example, uniform on the tokens between keys and noise, so
    different keys may have the same. One place, drawn beforehand, is never noise; the last has one of the keys before it, all of
    them as likely. label at a key that was there before: its value.
    """

    asked = None

    def __init__(self, config: NoisyRecallConfig) -> None:
        self.config, self._places = config, config.length // 2
        self._sizes = [self._places] * 4 + [config.keys, 1, 1]
        self.words = sum(self._sizes)

    def make(self, words: Words) -> tuple[Int64, Int64]:
        config, count = self.config, self._places
        parts = np.split(words, np.cumsum(self._sizes)[:-1], axis=1)
        of_chance, of_keys, of_first, of_second, of_values, of_certain, of_last = parts
        rows, clean = np.arange(len(words)), config.vocab_size - config.noise_vocab_size
        values = config.keys + below(of_values, clean - config.keys)
        is_noise = (of_chance >> np.uint64(11)).astype(np.float64) * 2.0**-53 < config.noise
        is_noise[rows, below(of_certain, count - 1)[:, 0]] = False
        keys, repeated = below(of_keys, config.keys), np.zeros((len(words), count), bool)
        seen = np.zeros((len(words), config.keys), bool)
        for place in range(count - 1):
            key = keys[:, place]
            repeated[:, place] = seen[rows, key] & ~is_noise[:, place]
            seen[rows, key] |= ~is_noise[:, place]
        keys[:, -1] = one_of(seen, of_last[:, 0])
        repeated[:, -1], is_noise[:, -1] = True, False
        answers, labels = np.take_along_axis(values, keys, axis=1), np.full((len(words), config.length), IGNORE_INDEX)
        noise = [clean + below(part, config.noise_vocab_size) for part in (of_first, of_second)]
        tokens = np.empty_like(labels)
        tokens[:, ::2] = np.where(is_noise, noise[0], keys)
        tokens[:, 1::2] = np.where(is_noise, noise[1], answers)
        labels[:, ::2] = np.where(repeated, answers, IGNORE_INDEX)
        return tokens, labels


class FuzzyRecall:
    """Fuzzy recall (the same source): keys and values of one token up to several.

    tokens: blanks V - 1, then pairs of a key and its value as long as there is room, then one of those keys again, all of them as
    likely, and its value. A key has 1 to `key_tokens` different tokens of 0 to K - 1, in any order; a value as many as its key's
    first occurrence drew, of the tokens between keys and the blank. Each number of tokens is as likely, and then each order of each
    choice. label at the last token of a key that was there before, and at all but the last of its value: the value's next token.
    """

    asked = None

    def __init__(self, config: FuzzyRecallConfig) -> None:
        self.config, self._pairs = config, (config.length - config.key_tokens - config.value_tokens) // 2
        self._sizes = [self._pairs] * 2 + [2 * self._pairs * n for n in (config.key_tokens, config.value_tokens)] + [1]
        self.words = sum(self._sizes)

    def make(self, words: Words) -> tuple[Int64, Int64]:
        config, half, blank = self.config, self.config.key_vocabulary, self.config.vocab_size - 1
        of_key_sizes, of_value_sizes, of_keys, of_values, of_last = np.split(words, np.cumsum(self._sizes)[:-1], axis=1)
        examples, rows = len(words), np.arange(len(words))
        keys = _motifs(of_keys, of_key_sizes, config.key_tokens, half)
        values = _motifs(of_values, of_value_sizes, config.value_tokens, blank - half)
        values = np.where(values >= 0, values + half, -1)
        # pair i has the value of the first pair with its key
        first = np.empty((examples, self._pairs), np.int64)
        for pair in range(self._pairs):
            first[:, pair] = (keys[:, : pair + 1] == keys[:, pair, None]).all(-1).argmax(1)
        values = np.take_along_axis(values, first[:, :, None], axis=1)
        sizes = (keys >= 0).sum(-1) + (values >= 0).sum(-1)
        there = sizes.cumsum(1) <= config.length - config.key_tokens - config.value_tokens
        last = one_of(there & (first == np.arange(self._pairs)), of_last[:, 0])
        # the last pair asks as well
        pairs = np.concatenate((keys, values), axis=2)
        pairs = np.concatenate((np.where(there[:, :, None], pairs, -1), pairs[rows, last][:, None]), axis=1)
        asking = np.concatenate((first < np.arange(self._pairs), np.ones((examples, 1), bool)), axis=1)
        is_answer = np.zeros(pairs.shape, bool)
        is_answer[:, :, config.key_tokens :] = asking[:, :, None]
        tokens, answers = np.full((examples, config.length), blank), np.zeros((examples, config.length), bool)
        flat, wanted = pairs.reshape(examples, -1), is_answer.reshape(examples, -1)
        # the tokens of a row in their order, at its end
        row, column = (flat >= 0).nonzero()
        place = config.length - (flat >= 0).sum(1)[row] + (flat >= 0).cumsum(1)[row, column] - 1
        tokens[row, place], answers[row, place] = flat[row, column], wanted[row, column]
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[:, :-1] = np.where(answers[:, 1:], tokens[:, 1:], IGNORE_INDEX)
        return tokens, labels


class Induction:
    """Induction heads (Gu & Dao, "Mamba", section 4.1.2).

    tokens: uniform on 0 to V - 2, except the special token V - 1 at the end and at one place before, uniform among those that leave
    room for its successor. label at the end: that successor; nothing else is asked.
    """

    def __init__(self, config: InductionConfig) -> None:
        self.config = config
        self.words, self.asked = config.length + 1, 1

    def make(self, words: Words) -> tuple[Int64, Int64]:
        length, special = self.config.length, self.config.vocab_size - 1
        tokens = below(words[:, :length], special)
        place = below(words[:, length:], length - 2)
        np.put_along_axis(tokens, place, special, axis=1)
        tokens[:, -1] = special
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[:, -1] = np.take_along_axis(tokens, place + 1, axis=1)[:, 0]
        return tokens, labels


class SelectiveCopy:
    """Selective copying (Gu & Dao, "Mamba", section 4.1.1).

    tokens: blanks 0, among them `data_tokens` tokens uniform on 1 to V - 2 (they may repeat) at places drawn without replacement;
    then as many tokens V - 1. label at the i-th of those: the i-th data token.
    """

    def __init__(self, config: SelectiveCopyConfig) -> None:
        self.config = config
        self.words, self.asked = 2 * config.data_tokens, config.data_tokens

    def make(self, words: Words) -> tuple[Int64, Int64]:
        length, count, asking = self.config.length, self.config.data_tokens, self.config.vocab_size - 1
        data = 1 + below(words[:, :count], asking - 1)
        places = np.sort(different(words[:, count:], length - count), axis=1)
        tokens = np.zeros((len(words), length), np.int64)
        np.put_along_axis(tokens, places, data, axis=1)
        tokens[:, -count:] = asking
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[:, -count:] = data
        return tokens, labels


TASKS = {
    MqarConfig: Mqar,
    NoisyRecallConfig: NoisyRecall,
    FuzzyRecallConfig: FuzzyRecall,
    InductionConfig: Induction,
    SelectiveCopyConfig: SelectiveCopy,
}


def below(words: Words, bound: int) -> Int64:
    """Each word as an integer from 0 to bound - 1. From its upper 32 bits, so no value is likelier by more than bound / 2^32."""
    return ((words >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def one_of(allowed: npt.NDArray[np.bool_], words: Words) -> Int64:
    """int64 [E]: for each row of allowed [E, n] the place of one that is true, all as likely; one at least is. words: [E]."""
    count = allowed.sum(1).astype(np.uint64)
    rank = ((words >> np.uint64(32)) * count >> np.uint64(32)).astype(np.int64)
    return (allowed.cumsum(1) > rank[:, None]).argmax(1)


def _motifs(words: Words, of_sizes: Words, most: int, bound: int) -> Int64:
    """int64 [E, pairs, most]: 1 to `most` different integers from 0 to bound - 1 in random order, then -1. words [E, 2 pairs most],
    of_sizes [E, pairs]."""
    of_choice, of_order = (part.reshape(-1, most) for part in np.split(words, 2, axis=1))
    drawn = shuffled(different(of_choice, bound), of_order).reshape(*of_sizes.shape, most)
    return np.where(np.arange(most) <= below(of_sizes, most)[:, :, None], drawn, -1)


def exponential(words: Words) -> npt.NDArray[np.float64]:
    """Each word as a number of the exponential distribution with rate 1, from its upper 53 bits."""
    return -np.log(((words >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53)


def different(words: Words, bound: int) -> Int64:
    """int64 [E, k]: each row a uniform choice of k = words.shape[1] different integers from 0 to bound - 1, in no useful order.

    Floyd's choice: number i is drawn below bound - k + i + 1, and replaced by the largest of those if it was chosen already.
    Bentley & Floyd, "A sample of brilliance", 1987.
    """
    count = words.shape[1]
    chosen = np.empty((count, len(words)), np.int64)
    for i in range(count):
        largest = bound - count + i
        drawn = below(words[:, i], largest + 1)
        chosen[i] = np.where((chosen[:i] == drawn).any(axis=0), largest, drawn)
    return chosen.T


def shuffled(rows: Int64, words: Words) -> Int64:
    """Each row in the order of its words."""
    return np.take_along_axis(rows, np.argsort(words, axis=1, kind="stable"), axis=1)


def others(ranks: Int64, excluded: Int64, bound: int) -> Int64:
    """The integers of these ranks among those from 0 to bound - 1 that are not in the row's `excluded` (all different)."""
    # the i-th excluded one (from 0), e, has e - i others below it; in steps of `bound` all rows become one ascending sequence
    below_them = np.sort(excluded, axis=1) - np.arange(excluded.shape[1])
    row = np.arange(len(ranks))[:, None]
    passed = np.searchsorted((below_them + row * bound).ravel(), ranks + row * bound, side="right")
    return ranks + passed - row * excluded.shape[1]
