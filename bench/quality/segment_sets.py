"""`SegmentSets`: documents with questions, made by seeds, of the help topics that every Python has.

The documents of a set are consecutive pieces of one topic, so they depend on each other: the hard case for segments.
Each has a title, and a made-up fact in its middle. One fact lies on a border: a name at the end of a document, its
number at the beginning of the next one.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

__all__ = ["SegmentQuestion", "SegmentSet", "SegmentSets"]

_PLACES = (
    "Alder", "Birch", "Cedar", "Hazel", "Juniper", "Maple", "Rowan", "Willow", "Aspen", "Laurel", "Poplar",
    "Chestnut", "Elm", "Holly", "Linden", "Myrtle",
)
_TITLES = (
    "Falcon", "Harbour", "Lantern", "Meadow", "Orchid", "Pepper", "Saddle", "Thunder", "Velvet", "Walnut",
    "Anchor", "Bridge", "Copper", "Dragon",
)
_NAMES = ("Marta", "Oscar", "Helen", "Victor", "Diana", "Bruno", "Clara", "Simon")
_HEAD = (
    "<|im_start|>system\nYou answer questions about the documents that the user gives, in a few words, with what the "
    "documents say.<|im_end|>\n<|im_start|>user\n"
)
_ABOUT = "Say in one sentence what the documents are about."
_IS_ABOUT = (
    "The documents describe how special methods, attributes and types of the Python language are defined and used."
)
_PRIMER = "with"  # the topic that heads are made longer with
_AHEAD, _CONTINUED = 60, 32  # tokens behind the documents, and those of them that are scored


class _Fact(NamedTuple):
    """A kind of facts: the sentence in a document, the question, and what the answer begins with."""

    said: str
    asked: str
    begun: str


_FACTS = (
    _Fact("The access code of the {p} depot is {c}.", "What is the access code of the {p} depot?",
          "The access code of the {p} depot is"),
    _Fact("Invoice {c} was sent to Mr {p} last week.", "Which invoice was sent to Mr {p} last week?",
          "The invoice that was sent to Mr {p} last week is number"),
    _Fact("Mount {p} rises {c} feet above the sea.", "How high is Mount {p}?",
          "Mount {p} rises to a height in feet of"),
    _Fact("The museum in {p} was founded in the year {c}.", "When was the museum in {p} founded?",
          "The museum in {p} was founded in the year"),
    _Fact("A ticket to {p} costs {c} crowns.", "How much is a ticket to {p}?",
          "The price in crowns of a ticket to {p} is"),
    _Fact("The library of {p} has {c} books.", "How many books has the library of {p}?",
          "The number of books in the library of {p} is"),
    _Fact("The parcel for {p} has the weight {c} grams.", "How heavy is the parcel for {p}?",
          "The weight in grams of the parcel for {p} is"),
    _Fact("Captain {p} was born on farm {c}.", "On which farm was Captain {p} born?",
          "Captain {p} was born on farm number"),
)


class SegmentQuestion(NamedTuple):
    """A question about documents, as token ids.

    Attributes:
        kind: "fact", "which", "border", "about", or "continued", a text that goes on behind the documents.
        prompt: what follows the documents.
        answer: what follows that.
        choices: the first tokens of the possible answers; empty: any.
    """

    kind: str
    prompt: list[int]
    answer: list[int]
    choices: list[int]


class SegmentSet(NamedTuple):
    """A head and documents, as token ids, and questions about them."""

    head: list[int]
    documents: list[list[int]]
    questions: list[SegmentQuestion]


class SegmentSets:
    """Makes sets.

    Args:
        tokenizer: of a network whose chats are in the words of ChatML.
        documents: of each set.
        one_kind: whether all facts are of one kind.
        example: whether the head has a fact of that kind.
        head: the least tokens of it.
    """

    def __init__(
        self, tokenizer: Any, documents: int = 4, *, one_kind: bool = False, example: bool = False, head: int = 0
    ) -> None:
        from pydoc_data.topics import topics

        self._tokenizer, self._count, self._one_kind = tokenizer, documents, one_kind
        found = {name: text for name, text in sorted(topics.items()) if len(text) > 9000 * max(1, documents // 4)}
        primer = found.pop(_PRIMER, topics[_PRIMER])
        self._topics = [self._ids(text) for text in found.values()]
        self.head = self._ids(_HEAD)
        if example:
            record = _FACTS[0].said.format(p="Sorrel", c="6192")
            self.head += self._ids(f'Document "Primer":\n{primer[:160]}\n{record}\n\n')
        if (missing := head - len(self.head)) > 0:
            self.head += self._ids(f'Document "Primer":\n{primer}\n\n')[-missing:]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _question(self, asked: str, begun: str) -> list[int]:
        return self._ids(f"Question: {asked}<|im_end|>\n<|im_start|>assistant\n{begun}")

    def make(self, seed: int) -> SegmentSet:
        """The set of a seed."""
        rng, count = random.Random(seed), self._count
        lengths = [rng.randint(200, 320) for _ in range(count)]
        text = rng.choice([ids for ids in self._topics if len(ids) > sum(lengths) + _AHEAD])
        start = rng.randint(0, len(text) - sum(lengths) - _AHEAD)
        places, titles, name = rng.sample(_PLACES, count), rng.sample(_TITLES, count), rng.choice(_NAMES)
        facts = [_FACTS[0]] * count if self._one_kind else rng.sample(_FACTS, count)
        codes = ["".join(rng.choice("123456789") for _ in range(4)) for _ in range(count + 1)]
        border, documents = rng.randint(0, count - 2), []
        for number in range(count):
            before = self._ids(f'Document "{titles[number]}":\n')
            before += self._ids(f"The number is {codes[count]}.\n") if number == border + 1 else []
            fact = self._ids(f"\n{facts[number].said.format(p=places[number], c=codes[number])}\n")
            behind = self._ids(f"\nNow the personal number of {name}, the keeper, follows." if number == border else "")
            behind += self._ids("\n\n")
            size = lengths[number] - len(before) - len(fact) - len(behind)
            body, cut = text[start : start + size], int(size * rng.uniform(0.2, 0.8))
            documents.append(before + body[:cut] + fact + body[cut:] + behind)
            start += size
        questions = [
            SegmentQuestion("fact", self._question(fact.asked.format(p=place), fact.begun.format(p=place)),
                            self._ids(f" {code}"), [])
            for fact, place, code in zip(facts, places, codes, strict=False)
        ]
        begins = [self._ids(title)[0] for title in titles]
        questions += [
            SegmentQuestion("which", self._question(f"Which document mentions {place}?", 'It is the document "'),
                            [begin], begins)
            for place, begin in zip(places, begins, strict=True)
        ]
        asked, begun = f"What is the personal number of {name}, the keeper?", f"The personal number of {name} is"
        questions.append(SegmentQuestion("border", self._question(asked, begun), self._ids(f" {codes[count]}"), []))
        questions.append(SegmentQuestion("about", self._question(_ABOUT, ""), self._ids(_IS_ABOUT), []))
        goes_on = self._ids(f'Document "{titles[-1]}" (continued):\n')
        questions.append(SegmentQuestion("continued", goes_on, text[start : start + _CONTINUED], []))
        return SegmentSet(self.head, documents, questions)
