"""Drawn answers by `min_p`: how much of them is junk of rare tokens, and how much they still differ.

    python scripts/studies/drawn.py --models STORIES260K BABYLLAMA --texts wikitext.json train.tsv

Transformers computes the logits and prge's own choice takes the tokens, 32 answers to each of four openings.
Words are known where one of the texts has them; greedy answers say which share of good ones isn't known.
Prints a row for each model, way to draw and `min_p`, in percent but for the perplexity:

    rare          tokens that have less than a thousandth of the model's own distribution
    perplexity    of the tokens, by that distribution
    unknown       words that no text has; at the end: of the last quarter of the answers
    different     pairs of words among all answers' pairs that are there once

    python scripts/studies/drawn.py --bundle BUNDLE --runs RUN ... --rows train.jsonl

draws from adapters that learnt answers by heart, and prints the percentage of answers that are one of the
rows' to the letter: what follows where an answer should end is junk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from verbs import answers

from prge.text.choice import Choice, ChoiceSettings

OPENINGS = ("Once upon a time", "One day, a girl named Lily", "The old man", "Tom and his dog")
ANSWERS, TOKENS, RARE = 32, 200, 1e-3
WAYS = {
    "greedy": ChoiceSettings(min_p=0.0),
    "chat, temperature 0.7, top p 0.95": ChoiceSettings(0.7, top_p=0.95),
    "temperature 1": ChoiceSettings(1.0),
}
MIN_P = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
_BEGIN = 1


def main() -> None:
    """Draw and count; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, nargs="+", default=[])
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="where known words come from")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="of the bundle")
    parser.add_argument("--rows", type=Path, help="messages that the runs learnt")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    known = set(_words(path.read_text() for path in given.texts))
    rows = []
    for source, (way, settings) in itertools.product([*given.models, *given.runs], WAYS.items()):
        for min_p in MIN_P if settings.temperature else (0.0,):
            chosen = replace(settings, min_p=min_p)
            row = {"source": source.name, "way": way, "min_p": min_p}
            if source in given.models:
                row |= measure(source, chosen, known)
            else:
                row["whole"] = whole(given.bundle, source, given.rows, chosen)
            rows.append(row)
            cells = (f"{each:.3g}" if isinstance(each, float) else str(each) for each in row.values())
            print(" | ".join(cells), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(folder: Path, settings: ChoiceSettings, known: set[str]) -> dict[str, Any]:
    """The figures of one way to draw from one model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = ANSWERS if settings.temperature else 1
    tokens: list[list[int]] = []
    logs: list[float] = []
    for opening in OPENINGS:
        prompt = [_BEGIN, *tokenizer.encode(opening, add_special_tokens=False).ids]
        for answer, likely in draw(model, prompt, settings, count):
            tokens.append(answer)
            logs += likely
    texts = [tokenizer.decode(answer) for answer in tokens]
    words = [list(_words([text])) for text in texts]
    ends = [each[-len(each) // 4 :] for each in words]
    pairs = Counter(pair for each in words for pair in itertools.pairwise(each))
    values = np.array(logs)
    return {
        "rare": 100 * float(np.mean(values < np.log(RARE))),
        "perplexity": float(np.exp(-values.mean())),
        "unknown": _unknown(words, known),
        "unknown_at_end": _unknown(ends, known),
        "different": 100 * sum(n == 1 for n in pairs.values()) / max(1, sum(pairs.values())),
    }


def whole(bundle: Path, run: Path, rows: Path, settings: ChoiceSettings) -> float:
    """The percentage of answers that are the rows' own, or another row's."""
    learnt = {json.loads(line)["messages"][-1]["content"] for line in rows.read_text().splitlines()}
    how = {"temperature": settings.temperature, "top_p": settings.top_p, "min_p": settings.min_p}
    (found,) = answers(bundle=bundle, adapter=f"run={run}", data=rows, max_tokens=64, **how).values()
    return 100 * sum(each["text"].strip() in learnt for each in found) / len(found)


def draw(
    model: Any, prompt: Sequence[int], settings: ChoiceSettings, count: int
) -> Iterable[tuple[list[int], list[float]]]:
    """Answers with the logarithms of their tokens' probabilities, without a temperature or filters."""
    choices = [Choice(replace(settings, seed=seed)) for seed in range(count)]
    answers: list[list[int]] = [[] for _ in choices]
    likely: list[list[float]] = [[] for _ in choices]
    fed, cache = torch.tensor([list(prompt)] * count), None
    with torch.no_grad():
        for _ in range(TOKENS):
            out = model(fed, past_key_values=cache, use_cache=True)
            cache, last = out.past_key_values, out.logits[:, -1]
            own = torch.log_softmax(last, -1).numpy()
            logits = last.numpy()
            for index, choice in enumerate(choices):
                token = choice.choose(logits[index], answers[index])
                answers[index].append(token)
                likely[index].append(float(own[index, token]))
            fed = torch.tensor([[answer[-1]] for answer in answers])
    for answer, own_logs in zip(answers, likely, strict=True):
        ends = [at for at, token in enumerate(answer) if token in (_BEGIN, _BEGIN + 1)]
        end = ends[0] if ends else len(answer)
        yield answer[:end], own_logs[:end]


def _words(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        yield from re.findall(r"[a-z]+", text.lower().replace("'", ""))


def _unknown(words: Sequence[Sequence[str]], known: set[str]) -> float:
    every = [word for each in words for word in each]
    return 100 * sum(word not in known for word in every) / max(1, len(every))


if __name__ == "__main__":
    main()
