"""Questions about what was said somewhere in a long text: single and several needles, variables, frequent words, facts. Torch-free.

A prompt is running text of a chosen number of tokens, which ends in a question that the next words answer. Everything but the text
is drawn from a seed. The tasks are those of RULER (Hsieh et al. 2024) and the first two of BABILong (Kuratov et al. 2024), in words
of our own: results compare models with each other, not with published numbers.

- niah_single: one statement, at a given depth.
- niah_multikey: four statements about other keys besides.
- niah_multivalue: four statements about one key, all of which are asked for.
- variable_tracking: a value that is handed on from variable to variable, all of which are asked for.
- common_words: the words of a list that occur most often. It has no running text.
- qa1, qa2: where a person is who has gone from place to place; where a thing is that a person has taken along.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

Count = Callable[[str], int]
"""Number of tokens of a text."""

_LONGEST_PIECE = 400
_STATEMENTS = 4
_COMMON, _TIMES = 10, 10

_ADJECTIVES = (
    "amber", "brisk", "calm", "dusty", "early", "faint", "gentle", "hollow", "icy", "jolly", "keen", "lively", "mellow", "narrow",
    "odd", "pale", "quiet", "rapid", "silver", "tender", "upper", "vivid", "warm", "young",
)  # fmt: skip
_NOUNS = (
    "anchor", "basket", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle", "ladder",
    "mirror", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "tunnel", "valley", "window", "yard", "zebra",
)  # fmt: skip
_PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix")
_PLACES = ("attic", "bathroom", "cellar", "garage", "hallway", "kitchen", "library", "office")
_THINGS = ("apple", "book", "coin", "lamp", "map", "spoon")


@dataclass(frozen=True)
class Sample:
    """A prompt, and the answers that text going on from it must contain. depth: of what is asked for, from 0 to 1; None
    if there is not one."""

    prompt: str
    answers: tuple[str, ...]
    depth: float | None


class Haystack:
    """Running text, cut at the ends of sentences or lines, with the number of tokens of each piece.

    Raises ValueError for a text without any.
    """

    def __init__(self, text: str, count: Count) -> None:
        ended = re.findall(r"[^.!?\n]*(?:[.!?]+\s*|\n\s*|$)", text)
        self._pieces = [piece[at : at + _LONGEST_PIECE] for piece in ended for at in range(0, len(piece), _LONGEST_PIECE)]
        if not any(piece.strip() for piece in self._pieces):
            raise ValueError("no text in it")
        self._count = count
        self._ends = list(accumulate(max(1, count(piece)) for piece in self._pieces))

    def around(self, statements: Sequence[tuple[float, str]], question: str, length: int, draw: random.Random) -> str:
        """A text of at most `length` tokens that ends in the question. It begins at a random place of the running text, and again
        at the beginning of that after its end.

        statements: each one's depth in the running text, 0 to 1, and itself. Raises ValueError where they do not fit.
        """
        said = sum(self._count(f"{text}\n") for _, text in statements) + self._count(question)
        first, room = draw.randrange(len(self._pieces)), length - said
        while True:
            if room < 0:
                raise ValueError(f"a length of {length} tokens has no room for what is asked, which takes {said}")
            chosen = self._from(first, room)
            prompt = _with_statements(chosen, statements) + question
            excess = self._count(prompt) - length
            if excess <= 0:
                return prompt
            room = min(room - excess, room - 1)  # tokens of the whole are not quite those of its pieces

    def _from(self, first: int, room: int) -> list[str]:
        """Pieces of at most `room` tokens together."""
        found: list[str] = []
        number = first
        while True:
            before = self._ends[number - 1] if number else 0
            room -= self._ends[number] - before
            if room < 0:
                return found
            found.append(self._pieces[number])
            number = (number + 1) % len(self._pieces)


def _with_statements(pieces: list[str], statements: Sequence[tuple[float, str]]) -> str:
    """Each statement on a line of its own, in front of the piece at its depth by characters; of equal depths in their order."""
    starts = [0, *accumulate(map(len, pieces))]
    found, done = [], 0
    for depth, text in sorted(statements, key=lambda statement: statement[0]):
        end = min(range(len(starts)), key=lambda n: abs(starts[n] - depth * starts[-1]))
        found += ["".join(pieces[done : max(end, done)]).rstrip(), f"\n{text}\n"]
        done = max(end, done)
    return "".join([*found, "".join(pieces[done:]).rstrip()])


Make = Callable[[Haystack, Count, int, float, random.Random], Sample]


def _keys(draw: random.Random, count: int) -> list[str]:
    return draw.sample([f"{a} {n}" for a in _ADJECTIVES for n in _NOUNS], count)


def _numbers(draw: random.Random, count: int) -> list[str]:
    return [str(n) for n in draw.sample(range(10_000, 100_000), count)]


def needle_statements(draw: random.Random, count: int) -> list[str]:
    """Statements as in niah_single and niah_multikey, each about another key, for text to learn from."""
    return [_statement(key, number) for key, number in zip(_keys(draw, count), _numbers(draw, count), strict=True)]


def _statement(key: str, number: str) -> str:
    return f"The number of the {key} is {number}."


def _needle(hay: Haystack, count: Count, length: int, depth: float, draw: random.Random, others: int) -> Sample:
    keys, numbers = _keys(draw, 1 + others), _numbers(draw, 1 + others)
    said = [_statement(key, number) for key, number in zip(keys, numbers, strict=True)]
    depths = [depth, *(draw.random() for _ in range(others))]
    prompt = hay.around(list(zip(depths, said, strict=True)), f"\nThe number of the {keys[0]} is", length, draw)
    return Sample(prompt, (numbers[0],), depth)


def _multivalue(hay: Haystack, count: Count, length: int, depth: float, draw: random.Random) -> Sample:
    (key,), numbers = _keys(draw, 1), _numbers(draw, _STATEMENTS)
    said = [(draw.random(), f"A number of the {key} is {number}.") for number in numbers]
    return Sample(hay.around(said, f"\nAll numbers of the {key}, separated by commas, are", length, draw), tuple(numbers), None)


def _variables(hay: Haystack, count: Count, length: int, depth: float, draw: random.Random) -> Sample:
    names = ["".join(letters) for letters in zip(*(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=24) for _ in range(5)), strict=True)]
    names = list(dict.fromkeys(names))
    chain, distractor = names[: _STATEMENTS + 1], names[_STATEMENTS + 1 : 2 * _STATEMENTS + 2]
    numbers = _numbers(draw, 2)
    said = []
    for own, number in zip((chain, distractor), numbers, strict=True):
        depths = sorted(draw.random() for _ in own)  # a variable is set before it is handed on
        values = [number, *own[:-1]]
        said += [(at, f"{name} = {value}") for at, name, value in zip(depths, own, values, strict=True)]
    question = f"\nAll variables whose value is {numbers[0]}, separated by commas, are"
    return Sample(hay.around(said, question, length, draw), tuple(chain), None)


def _common_words(hay: Haystack, count: Count, length: int, depth: float, draw: random.Random) -> Sample:
    words = [key.replace(" ", "-") for key in _keys(draw, len(_ADJECTIVES) * len(_NOUNS))]
    common, rare = words[:_COMMON], words[_COMMON:]
    question = f"\nThe {_COMMON} words that occur most often in this list are"
    room, sizes = length - count(question), {word: count(f"{word} ") for word in words}
    of_common = sum(sizes[word] for word in common)
    few = max(1, room // (_TIMES * of_common + sum(sizes[word] for word in rare)))
    often = max(2, min(_TIMES * few, room // (2 * of_common)))
    used = [word for word in common for _ in range(often)]
    room -= often * of_common
    for more in (few, *[1] * (often - few - 1)):  # the rest of the room too, with every word less often than the common ones
        for word in rare:
            if room >= more * sizes[word]:
                used += [word] * more
                room -= more * sizes[word]
    draw.shuffle(used)
    while (excess := count(" ".join(used) + question) - length) > 0:
        left_out = [n for n, word in enumerate(used) if word not in common][-excess:]
        if not left_out:
            raise ValueError(f"a length of {length} tokens has no room for a list of words")
        used = [word for n, word in enumerate(used) if n not in set(left_out)]
    return Sample(" ".join(used) + question, tuple(common), None)


def _facts(hay: Haystack, count: Count, length: int, depth: float, draw: random.Random, carried: bool) -> Sample:
    person, *others = draw.sample(_PEOPLE, 3)
    depths = sorted(draw.random() for _ in range(6))
    said: list[str] = []
    at: dict[str, str] = {}
    for n, who in enumerate((person, others[0], person, others[1], person, others[0])):
        at[who] = draw.choice([place for place in _PLACES if place != at.get(who)])
        said.append(f"{who} went to the {at[who]}.")
        if carried and n == 0:
            thing = draw.choice(_THINGS)
            said[-1] += f" {who} took the {thing}."
    asked = f"\nThe {thing} is now in the" if carried else f"\n{person} is now in the"
    return Sample(hay.around(list(zip(depths, said, strict=True)), asked, length, draw), (at[person],), None)


TASKS: dict[str, Make] = {
    "niah_single": partial(_needle, others=0),
    "niah_multikey": partial(_needle, others=_STATEMENTS),
    "niah_multivalue": _multivalue,
    "variable_tracking": _variables,
    "common_words": _common_words,
    "qa1": partial(_facts, carried=False),
    "qa2": partial(_facts, carried=True),
}
BY_DEPTH = ("niah_single", "niah_multikey")
"""Tasks whose answer is at one depth, which is chosen."""


def make_sample(task: str, hay: Haystack, count: Count, length: int, depth: float, seed: str) -> Sample:
    """A sample of a task in `length` tokens at most, the same for the same seed. Raises ValueError where the length has no room."""
    return TASKS[task](hay, count, length, depth, random.Random(f"{seed} {task} {length} {depth}"))


def found_share(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in a text as whole words."""
    return sum(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None for answer in answers) / len(answers)
