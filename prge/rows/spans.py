"""Answers from a passage by constrained greedy decoding, for SQuAD and DROP.

A program returns log-probabilities of given targets and nothing else, so a search must know which tokens to
ask about. Here these are the tokens that continue some span of the passage: at first the first token of every
span, then the tokens after the spans that match so far, or a token that ends the answer. The search takes a
callable and needs no engine. It can't find answers that are no span, such as the numbers that DROP computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from prge.learning.examples import Example
from prge.rows.tokenizer import Tokenizer

Question = tuple[Sequence[int], int, int]
Score = Callable[[Sequence[Question]], Sequence[float]]
"""Log-probabilities of (tokens, position, target): of `target` after tokens[: position + 1]."""

SPAN_START = re.compile(r"\w+|[^\w\s]")
CHARACTERS_PER_TOKEN = 12


def stop_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer: end of sequence, where the model has it, and a line break."""
    line_break = tokenizer.encode_continuation("a\n")[len(tokenizer.encode_continuation("a")) :]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return tuple(dict.fromkeys([*eos, *line_break[:1]]))


def spans_of(
    passage: str, tokenizer: Tokenizer, max_tokens: int, separator: str = " "
) -> list[tuple[int, ...]]:
    """For every word or sign of a passage, the tokens from there on as they would follow a prompt."""
    spans = set()
    for match in SPAN_START.finditer(passage):
        text = passage[match.start() : match.start() + CHARACTERS_PER_TOKEN * max_tokens]
        spans.add(tuple(tokenizer.encode_continuation(separator + text)[:max_tokens]))
    return sorted(spans)


def greedy_span(
    prompt: Sequence[int], spans: Sequence[Sequence[int]], stop: Sequence[int], score: Score, max_tokens: int
) -> list[int]:
    """The answer's tokens: at each step the likeliest that some span allows, until a stop token is likelier.

    Args:
        prompt: tokens before the answer, at least one.
        spans: allowed answers; every beginning of one is allowed too.
        stop: tokens that end the answer, allowed from the second step on.
        score: log-probabilities of (tokens, position, target) triples.
    """
    answer: list[int] = []
    matching = [span for span in spans if span]
    while matching and len(answer) < max_tokens:
        at = len(answer)
        allowed = sorted({span[at] for span in matching})
        tokens = (*prompt, *answer)
        targets = [*allowed, *(stop if answer else ())]
        logprobs = list(score([(tokens, len(tokens) - 1, target) for target in targets]))
        best = max(range(len(targets)), key=logprobs.__getitem__)
        if best >= len(allowed):
            break
        answer.append(targets[best])
        matching = [span for span in matching if span[at] == answer[-1] and len(span) > at + 1]
    return answer


def answer_by_span(
    example: Example,
    tokenizer: Tokenizer,
    score: Score,
    sequence_length: int,
    *,
    max_tokens: int = 16,
    separator: str = " ",
) -> str:
    """Answer text for a question whose passage is `example.choices[0]`.

    Args:
        example: a built row of a task with `answers` and `passage`; the gold answer in it is left out.
        sequence_length: the bundle's; a longer prompt loses its beginning.

    Raises:
        ValueError: the example names no passage.
    """
    if not example.choices or not example.sequences[0].slots:
        raise ValueError(f"row {example.row} names no passage to find an answer in")
    prompt, room = example.prompt, sequence_length - max_tokens
    if len(prompt) > room:
        begin = tokenizer.begin
        prompt = (*begin, *prompt[-max(room - len(begin), 1) :])
    spans = spans_of(example.choices[0], tokenizer, max_tokens, separator)
    answer = greedy_span(
        prompt, spans, stop_tokens(tokenizer), score, min(max_tokens, sequence_length - len(prompt) + 1)
    )
    return tokenizer.decode(answer, special=False).strip()
