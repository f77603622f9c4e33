"""Turns completions into answers: separates calls of tools from the text, and describes log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from device_runner.serving.protocol import Answer, Finish, Json, ParsedRequest
from device_runner.serving.tool_calls import CallFormat
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import common_prefix
from prge.generation.logprobs import TokenLogprob
from prge.generation.loop import Completion, Reason

_FINISH: dict[Reason, Finish] = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}


def make_answer(
    parsed: ParsedRequest,
    index: int,
    completion: Completion,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    call_format: CallFormat | None,
) -> Answer:
    """Return a completion as its response has it.

    Args:
        parsed: the parsed request.
        index: index of the completion in the response.
        completion: the completion.
        prompt: tokens of its prompt.
        tokenizer: decodes tokens.
        call_format: how the model writes calls; None: it can't call tools.
    """
    answer = Answer(completion.text, _FINISH[completion.reason])
    if parsed.is_chat:
        if parsed.tools and call_format is not None:
            answer = _with_calls(answer, parsed, call_format)
        if parsed.logprobs is None:
            return answer
        return replace(answer, logprobs=_chat_logprobs(completion.logprobs, tokenizer))
    first: Sequence[int] = ()
    hidden = 0
    if parsed.echo:
        text = parsed.prompts[index // parsed.count]
        # Tokens that the tokenizer prepends, such as a begin-of-sequence token, aren't in the text.
        hidden = common_prefix(prompt, tokenizer.begin) if isinstance(text, str) else 0
        text = text if isinstance(text, str) else tokenizer.decode(text)
        answer, first = replace(answer, text=text + answer.text), prompt[:1]
    if parsed.logprobs is None:
        return answer
    logprobs = _text_logprobs(first, completion.logprobs, tokenizer)
    tokens = [*first, *(each.token for each in completion.logprobs)]
    offsets = _text_offsets(map(tokenizer.token_bytes, tokens), hidden, len(answer.text))
    return replace(answer, logprobs={**logprobs, "text_offset": offsets})


def _text_offsets(tokens: Iterable[bytes], hidden: int, longest: int) -> list[int]:
    """Return the index in a text of the first character of each token, at most `longest`.

    Args:
        tokens: bytes of the tokens.
        hidden: number of tokens at the beginning that aren't in the text.
        longest: length of the text.
    """
    offsets, begun = [], 0
    for position, encoded in enumerate(tokens):
        # Bytes from 80 to BF continue a character, which an earlier token has begun.
        offset = begun - 1 if encoded[:1] and 0x80 <= encoded[0] < 0xC0 else begun
        offsets.append(min(max(offset, 0), longest))
        begun += sum(not 0x80 <= byte < 0xC0 for byte in encoded) if position >= hidden else 0
    return offsets


def _with_calls(answer: Answer, parsed: ParsedRequest, call_format: CallFormat) -> Answer:
    """Return an answer with its calls separated from its text; unchanged if it has none."""
    # A completion that must be a call continues the head of the call.
    text = (call_format.head if parsed.required else "") + answer.text
    calls = call_format.calls(text, parsed.tools)
    if not calls:
        return answer
    calls = calls if parsed.is_parallel else calls[:1]
    return Answer(call_format.text_around(text).strip(), "tool_calls", tuple(calls))


def _chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Json:
    """Return log-probabilities as chat completions have them."""
    bytes_of = cache(tokenizer.token_bytes)

    def describe(token: int, logprob: float) -> Json:
        encoded = bytes_of(token)
        return {"token": _readable(encoded), "logprob": logprob, "bytes": [*encoded]}

    content = [
        {**describe(each.token, each.logprob), "top_logprobs": [describe(*pair) for pair in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _readable(encoded: bytes) -> str:
    """Return the text of a token; a byte of a part of a character as OpenAI writes it, such as `\\xe2`."""
    return encoded.decode(errors="backslashreplace")


def _text_logprobs(first: Sequence[int], logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Json:
    """Return log-probabilities in the form of completions.

    Args:
        first: the first token of the prompt if the response has the prompt; nothing predicts it.
        logprobs: log-probabilities of all tokens after it.
        tokenizer: decodes tokens.
    """

    @cache
    def text_of(token: int) -> str:
        return _readable(tokenizer.token_bytes(token))

    tops: list[dict[str, float] | None] = [None for _ in first]
    for each in logprobs:
        # Of two tokens with the same text, the more likely one counts. The token itself is always there.
        top = {text_of(token): logprob for token, logprob in reversed(each.top)}
        tops.append({**top, text_of(each.token): each.logprob})
    return {
        "tokens": [text_of(token) for token in (*first, *(each.token for each in logprobs))],
        "token_logprobs": [*(None for _ in first), *(each.logprob for each in logprobs)],
        "top_logprobs": tops,
    }
