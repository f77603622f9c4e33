"""Rows of six classes, in the manner of TREC: what kind of thing does a question ask for?

Questions are made of patterns and words. No two splits share a word of a pattern's gaps; an eighth of the
patterns is new in development rows, and another eighth in test rows. Columns and labels are those of the
task `trec`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

# By label: 0 abbreviation, 1 entity, 2 description, 3 human, 4 location, 5 number.
PATTERNS: Sequence[Sequence[str]] = (
    (
        "What does {letters} stand for ?",
        "What is the full form of {letters} ?",
        "What do the letters {letters} mean ?",
        "How is {letters} written out ?",
        "What is {thing} association called for short ?",
        "Which words are behind {letters} ?",
        "What is the acronym of the {place} {thing} union ?",
        "Can you expand {letters} ?",
    ),
    (
        "What {thing} did the people of {place} eat ?",
        "Which animal lives near {place} ?",
        "What color is a {thing} from {place} ?",
        "What language is spoken in {place} ?",
        "What disease comes from a {thing} ?",
        "Which kind of {thing} is the most loved one ?",
        "What sport is played with a {thing} ?",
        "What does {person} keep in the {thing} ?",
    ),
    (
        "What is a {thing} ?",
        "How does a {thing} work ?",
        "Why did {person} leave {place} ?",
        "What is the origin of the word {thing} ?",
        "What happened after {person} found the {thing} ?",
        "How do you make a {thing} ?",
        "What are the effects of a {thing} ?",
        "Why is the {thing} of {place} famous ?",
    ),
    (
        "Who invented the {thing} ?",
        "Who was the first woman in {place} ?",
        "What is the name of the man that sold a {thing} ?",
        "Which company makes the {thing} ?",
        "Whose {thing} was lost in {place} ?",
        "What team won the {thing} of {place} ?",
        "Name the singer who came from {place} .",
        "What actor played {person} ?",
    ),
    (
        "Where is {place} ?",
        "Where did {person} buy the {thing} ?",
        "What city has the oldest {thing} ?",
        "In which country is {place} ?",
        "What river flows through {place} ?",
        "Where do most {thing}s come from ?",
        "Which state was {person} born in ?",
        "What is the highest mountain of {place} ?",
    ),
    (
        "How many people live in {place} ?",
        "When did {person} see a {thing} ?",
        "How much does a {thing} cost ?",
        "What year was {place} founded ?",
        "How far is it from here to {place} ?",
        "How old was {person} ?",
        "What is the weight of a {thing} ?",
        "How long does a {thing} last ?",
    ),
)
WORDS: Mapping[str, str] = {
    "thing": "kettle lantern bridge saddle piano hammer ladder barrel candle mirror basket anchor whistle "
    "violin clock wagon pillow carpet helmet ribbon trumpet rocket needle bottle engine magnet compass",
    "place": "Lisbon Oslo Nairobi Lima Quebec Hanoi Cairo Dublin Prague Havana Bergen Kyoto Tunis Riga Perth "
    "Bogota Seville Zagreb Malta Geneva Austin Denver Samoa Cyprus",
    "person": "Miller Garcia Schmidt Rossi Novak Tanaka Silva Jensen Kowalski Dubois Haddad Okafor Larsen "
    "Moreau Petrov Fischer Santos Nguyen Walker Bauer",
    "letters": "NTRO KPLC BAFS UDWG IRTE LOMC SVEA PQA HNDR WTC OBIS CRLU YTF MAEG DSPO EFTN GHA RNIS",
}
ROWS = {"dev": 100, "test": 300, "train": 300}
# Patterns of a class that a split has: all have those below the first number, and one more of their own.
_COMMON, _OWN = 6, {"dev": (6,), "test": (7,), "train": ()}


def make_questions(counts: Mapping[str, int] = ROWS) -> dict[str, list[dict[str, str | int]]]:
    """Rows by split, the same every time.

    Args:
        counts: rows of `dev`, `test` and `train`, in this order.
    """
    chance = random.Random(0)
    words = {name: text.split() for name, text in WORDS.items()}
    for each in words.values():
        chance.shuffle(each)
    found = {}
    for place, (split, count) in enumerate(counts.items()):
        own = {name: each[place :: len(counts)] for name, each in words.items()}
        rows: list[dict[str, str | int]] = []
        for number in range(count):
            label = number % len(PATTERNS)
            patterns = [PATTERNS[label][at] for at in (*range(_COMMON), *_OWN[split])]
            gaps = {name: chance.choice(each) for name, each in own.items()}
            rows.append({"text": chance.choice(patterns).format(**gaps), "coarse_label": label})
        chance.shuffle(rows)
        found[split] = rows
    return found
