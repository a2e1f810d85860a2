"""Questions about long texts: what is asked can be answered from the prompt alone, and prompts are as long as they shall be."""

import random
import re
from collections import Counter

import pytest

from baton.training.evaluation.long_context_tasks import BY_DEPTH, TASKS, Haystack, found_share, make_sample

TEXT = "\n".join(
    f"Sentence {n} of the running text says little, and costs {n}.{n % 10} coins! Does anybody ask? No: nobody does."
    for n in range(90)
)
LINES_WITHOUT_ENDS = "word " * 4000


def count(text):
    return len(re.findall(r"\w+|[^\w\s]", text))


def solve(prompt):
    """The answers, by reading the prompt."""
    text, _, question = prompt.rpartition("\n")
    if found := re.fullmatch(r"The number of the (.+) is", question):
        return re.findall(rf"^The number of the {found[1]} is (\d+)\.$", text, re.MULTILINE)
    if found := re.fullmatch(r"All numbers of the (.+), separated by commas, are", question):
        return re.findall(rf"^A number of the {found[1]} is (\d+)\.$", text, re.MULTILINE)
    if found := re.fullmatch(r"All variables whose value is (\d+), separated by commas, are", question):
        values = {}
        for name, value in re.findall(r"^([A-Z]{5}) = (\w+)$", text, re.MULTILINE):
            values[name] = values.get(value, value)  # what it is handed on from was set before
        return [name for name, value in values.items() if value == found[1]]
    if found := re.fullmatch(r"The (\d+) words that occur most often in this list are", question):
        ordered = Counter(text.split()).most_common()
        most = int(found[1])
        assert ordered[most - 1][1] > ordered[most][1], "which words occur most often is beyond doubt"
        return [word for word, _ in ordered[:most]]
    at, has = {}, {}
    for line in re.findall(r"^(?:[A-Z][a-z]+ went to the \w+\.(?: [A-Z][a-z]+ took the \w+\.)?)$", text, re.MULTILINE):
        for who, verb, what in re.findall(r"(\w+) (went to|took) the (\w+)\.", line):
            if verb == "took":
                has[what] = who
            else:
                at[who] = what
    if found := re.fullmatch(r"The (\w+) is now in the", question):
        return [at[has[found[1]]]]
    return [at[re.fullmatch(r"(\w+) is now in the", question)[1]]]


@pytest.mark.parametrize("length", [250, 1000, 9000])
@pytest.mark.parametrize("task", TASKS)
def test_a_reader_of_the_prompt_answers_all(task, length):
    """9000 tokens are more than the text has, which then begins again."""
    hay, seen = Haystack(TEXT, count), set()
    for depth in (0.0, 0.4, 1.0):
        for n in range(3):
            sample = make_sample(task, hay, count, length, depth, f"0 {n}")
            assert sorted(solve(sample.prompt)) == sorted(sample.answers)
            assert length - 60 - length // 50 <= count(sample.prompt) <= length
            assert found_share(" " + ", ".join(sample.answers), sample.answers) == 1.0
            assert make_sample(task, hay, count, length, depth, f"0 {n}") == sample
            seen.add(sample.prompt)
            if task in BY_DEPTH:
                place = sample.prompt.index(f"is {sample.answers[0]}.") / len(sample.prompt)
                assert abs(place - depth) < (0.3 if length == 250 else 0.12)
            else:
                assert sample.depth is None
    assert len(seen) == 9


def test_running_text_is_the_texts_own():
    for text in (TEXT, LINES_WITHOUT_ENDS):
        hay = Haystack(text, count)
        prompt = hay.around([(0.5, "HERE")], "\nQ", 500, random.Random(1))
        before, _, after = prompt.removesuffix("\nQ").partition("\nHERE\n")
        joined = re.sub(r"\s+", "", before + after)
        twice = re.sub(r"\s+", "", text * 2)
        assert joined in twice
        assert min(count(before), count(after)) > 180


@pytest.mark.parametrize("task", TASKS)
def test_a_length_without_room_is_said(task):
    with pytest.raises(ValueError, match="a length of 12 tokens has no room for"):
        make_sample(task, Haystack(TEXT, count), count, 12, 0.5, "0")


def test_a_text_without_words_is_said():
    with pytest.raises(ValueError, match="no text in it"):
        Haystack(" \n\n ", count)


def test_answers_are_whole_words():
    assert found_share(" 123, 45678 and more", ("45678", "123")) == 1.0
    assert found_share(" 1234, 45678 and more", ("45678", "123")) == 0.5
    assert found_share(" the kitchenette", ("kitchen",)) == 0.0
