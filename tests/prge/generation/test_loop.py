"""Continuous batching: each completion is the same as alone, whatever other requests there are or were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import BoolArray
from prge.errors import ConfigError, DataError, EngineError
from prge.formats.adapter import Adapter
from prge.generation.loop import (
    MAX_PREFILL_TOKENS,
    MAX_SCORED_TOKENS,
    MIN_COPIED,
    Completion,
    GenerationSettings,
    Generator,
    Request,
    Sharing,
)
from prge.generation.prompts import Prompt
from prge.generation.sampling import SamplingSettings, TokenSampler
from prge.generation.text_stream import TextStream
from tests.numpy_generation_engine import NumpyGenerationEngine, make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)
PLAIN = make_adapter()
TUNED = make_adapter(1)


def make_request(
    tokens: Sequence[int] = (1, 5, 6), adapter: Adapter = PLAIN, max_tokens: int = 12, **given: Any
) -> Request:
    prompt = Prompt(tuple(tokens), **{name: given.pop(name) for name in ("ends",) if name in given})
    return Request(prompt, adapter, GenerationSettings(max_tokens, **given))


def alone(request: Request, **engine: Any) -> list[int]:
    """Return the tokens of a completion by definition: one token after the other, in a new sequence."""
    model = NumpyGenerationEngine(**{"context": 4096, **engine})
    sequence = model.open(request.adapter)
    choice = TokenSampler(request.settings.sampling)
    history = list(request.prompt.tokens)
    logits = model.feed(sequence, history)
    tokens: list[int] = []
    while len(tokens) < request.settings.max_tokens:
        token = choice.sample(logits, history)
        if token == TOKENIZER.eos_id:
            break
        tokens.append(token)
        history.append(token)
        logits = model.feed(sequence, [token])
    return tokens


def finished(generator: Generator) -> None:
    while generator.work():
        pass


def test_a_completion_has_the_engine_s_tokens_and_their_text() -> None:
    request = make_request()
    (answer,) = Generator(NumpyGenerationEngine(), TOKENIZER).generate([request])
    assert list(answer.tokens) == alone(request)
    stream = TextStream(TOKENIZER, before=request.prompt.tokens)
    assert answer.text == "".join([*map(stream.push, answer.tokens), stream.finish()])
    assert (answer.reason, answer.prompt_tokens, answer.fed_tokens, answer.cut_tokens) == ("length", 3, 3, 0)
    assert answer.steps == 11
    assert answer.tokens_per_second and answer.prefill_tokens_per_second


@given(
    requests=st.lists(
        st.builds(
            make_request,
            tokens=st.lists(st.integers(1, 12), min_size=1, max_size=12),
            adapter=st.sampled_from([PLAIN, TUNED]),
            max_tokens=st.integers(1, 20),
            sampling=st.builds(SamplingSettings, st.sampled_from([0.0, 1.0]), seed=st.integers(0, 3)),
        ),
        min_size=1,
        max_size=9,
    ),
    slots=st.integers(1, 4),
)
@settings(max_examples=60)
def test_completions_in_a_batch_equal_those_of_each_request_alone(
    requests: list[Request], slots: int
) -> None:
    engine = NumpyGenerationEngine(slots=slots)
    answers = Generator(engine, TOKENIZER).generate(requests)
    assert [list(answer.tokens) for answer in answers] == [alone(request) for request in requests]
    assert engine.open_count <= slots


def test_the_adapter_changes_the_completion() -> None:
    answers = Generator(NumpyGenerationEngine(), TOKENIZER).generate(
        [make_request(), make_request(adapter=TUNED)]
    )
    assert answers[0].tokens != answers[1].tokens


def test_every_round_steps_all_completions_together() -> None:
    engine = NumpyGenerationEngine(slots=3)
    Generator(engine, TOKENIZER).generate([make_request([1, each]) for each in (5, 6, 7)])
    assert engine.calls == [[1, 5], [1, 6], [1, 7], *[[1, 2, 3]] * 11]


def test_a_request_that_comes_later_joins_the_others() -> None:
    engine = NumpyGenerationEngine()
    generator = Generator(engine, TOKENIZER)
    first = generator.submit(make_request())
    for _ in range(4):
        assert generator.work()
    second = generator.submit(make_request([1, 9]))
    finished(generator)
    assert list(first.wait(0).tokens) == alone(first.request)
    assert list(second.wait(0).tokens) == alone(second.request)
    assert [1, 2] in engine.calls


def test_a_long_prompt_is_prefilled_in_chunks_while_others_continue() -> None:
    engine = NumpyGenerationEngine(context=4096)
    generator = Generator(engine, TOKENIZER)
    short = generator.submit(make_request(max_tokens=50))
    generator.work()
    long = generator.submit(make_request([1, *[7] * (2 * MAX_PREFILL_TOKENS)]))
    finished(generator)
    lengths = [len(call) for call in engine.calls]
    assert lengths[:7] == [3, MAX_PREFILL_TOKENS, 1, MAX_PREFILL_TOKENS, 1, 1, 1]
    assert list(long.wait(0).tokens) == alone(long.request)
    assert list(short.wait(0).tokens) == alone(short.request)


def test_text_comes_in_chunks_and_then_the_end() -> None:
    message: list[Any] = []
    generator = Generator(NumpyGenerationEngine(), TOKENIZER)
    ticket = generator.submit(make_request(max_tokens=30), message.append, message.append)
    finished(generator)
    assert message.pop() is ticket
    assert "".join(message) == ticket.wait(0).text != ""
    assert len(message) > 5


def test_an_end_token_ends_the_completion_and_is_not_part_of_it() -> None:
    tokens = alone(make_request())
    for ends, stop in ((frozenset({tokens[3]}), ()), (frozenset(), ())):
        tokenizer = TOKENIZER if ends else Tokenizer(byte_level_backend(), eos_id=2, stop_ids=[tokens[3]])
        (answer,) = Generator(NumpyGenerationEngine(), tokenizer).generate(
            [make_request(ends=ends, stop=stop)]
        )
        assert (list(answer.tokens), answer.reason) == (tokens[: tokens.index(tokens[3])], "stop")


def test_a_stop_word_ends_the_completion_before_it() -> None:
    whole = Generator(NumpyGenerationEngine(), TOKENIZER).generate([make_request()])[0].text
    word = whole[4:7]
    (answer,) = Generator(NumpyGenerationEngine(), TOKENIZER).generate([make_request(stop=(word,))])
    assert (answer.text, answer.reason) == (whole.partition(word)[0], "stop")
    assert len(answer.tokens) < 12
    prompt = Prompt((1, 5, 6), stop=(word,))
    assert (
        Generator(NumpyGenerationEngine(), TOKENIZER).generate([Request(prompt, PLAIN)])[0].tokens
        == answer.tokens
    )


def test_a_control_token_as_a_stop_word_ends_the_completion_at_that_token() -> None:
    engine = NumpyGenerationEngine()
    engine.head[:, 4] = 100 * engine.head[:, 4]
    generator = Generator(engine, TOKENIZER)
    plain, stopped = generator.generate([make_request(), make_request(stop=("<|im_end|>",))])
    assert 4 in plain.tokens
    assert stopped.reason == "stop"
    assert stopped.tokens == plain.tokens[: plain.tokens.index(4)]


def test_prompt_and_completion_fill_the_context_and_no_more() -> None:
    (answer,) = Generator(NumpyGenerationEngine(context=10), TOKENIZER).generate(
        [make_request(max_tokens=99)]
    )
    assert (len(answer.tokens), answer.reason) == (7, "context")


def test_a_prompt_without_room_for_a_completion_names_both_lengths() -> None:
    generator = Generator(NumpyGenerationEngine(context=10), TOKENIZER)
    with raises(DataError, "prompt-too-long", containing="10"):
        generator.submit(make_request([1] * 10))
    assert not generator.work()


def test_truncation_keeps_both_ends_of_the_prompt_and_leaves_room_for_the_completion() -> None:
    engine = NumpyGenerationEngine(context=20)
    long = make_request([1, *range(5, 35)], max_tokens=6, overflow="truncate")
    (answer,) = Generator(engine, TOKENIZER).generate([long])
    assert engine.calls[0] == [1, *range(22, 35)]
    assert (answer.prompt_tokens, answer.cut_tokens, answer.reason) == (14, 17, "length")
    longer = make_request([1, *range(5, 35)], max_tokens=60, overflow="truncate")
    (answer,) = Generator(engine, TOKENIZER).generate([longer])
    assert (answer.prompt_tokens, len(answer.tokens), answer.reason) == (10, 10, "context")


@pytest.mark.parametrize(
    ("tokens", "code", "value"), [((), "prompt-empty", ""), ((1, 500), "token-unknown", "500")]
)
def test_prompts_that_no_model_takes_are_refused(tokens: tuple[int, ...], code: str, value: str) -> None:
    with raises(DataError, code, containing=value):
        Generator(NumpyGenerationEngine(), TOKENIZER).submit(make_request(tokens))


def test_settings_that_make_no_sense_are_refused() -> None:
    with raises(ConfigError, "settings-unusable", containing="--max-tokens"):
        GenerationSettings(0)
    with raises(ConfigError, "settings-unusable", containing="--stop"):
        GenerationSettings(stop=("",))


def test_the_next_turn_computes_only_its_new_tokens() -> None:
    engine = NumpyGenerationEngine()
    generator = Generator(engine, TOKENIZER)
    (first,) = generator.generate([make_request([1, 5, 6], max_tokens=4)])
    engine.calls.clear()
    turn = [1, 5, 6, *first.tokens, 9, 10]
    request = make_request(turn, max_tokens=4)
    (second,) = generator.generate([request])
    assert engine.calls[0] == [first.tokens[-1], 9, 10]
    assert (second.prompt_tokens, second.fed_tokens) == (9, 3)
    assert list(second.tokens) == alone(request)


def test_an_edited_turn_is_rewound_to_the_common_prefix() -> None:
    engine = NumpyGenerationEngine()
    generator = Generator(engine, TOKENIZER)
    generator.generate([make_request([1, *range(5, 25)], max_tokens=4)])
    engine.calls.clear()
    request = make_request([1, *range(5, 20), 40, 41], max_tokens=4)
    (answer,) = generator.generate([request])
    assert engine.calls[0] == [40, 41]
    assert list(answer.tokens) == alone(request)


def test_the_same_prompt_again_feeds_its_last_token_alone() -> None:
    engine = NumpyGenerationEngine()
    generator = Generator(engine, TOKENIZER)
    first = generator.generate([make_request()])[0]
    engine.calls.clear()
    again = generator.generate([make_request()])[0]
    assert engine.calls[0] == [6]
    assert again.tokens == first.tokens


def test_completions_of_one_prompt_compute_it_once() -> None:
    prompt = [1, *range(5, 25)]
    requests = [make_request(prompt, sampling=SamplingSettings(temperature=1.0, seed=n)) for n in range(3)]
    requests[2] = replace(requests[2], prompt=Prompt((*prompt[:-3], 40, 41)))
    engine = NumpyGenerationEngine()
    completions = Generator(engine, TOKENIZER).generate(requests)
    assert engine.calls[:3] == [prompt, prompt[-1:], [40, 41]]
    assert [each.fed_tokens for each in completions] == [21, 1, 2]
    assert [[*each.tokens] for each in completions] == [alone(request) for request in requests]


@pytest.mark.parametrize("common", [MIN_COPIED - 1, MIN_COPIED])
def test_short_beginnings_other_groups_and_other_adapters_are_not_copied(common: int) -> None:
    begin, engine = [1, *range(5, 4 + common)], NumpyGenerationEngine()
    ends = [[*range(100, 120)], [*range(200, 220)], [*range(300, 320)]]
    requests = [make_request([*begin, *end]) for end in ends]
    assert [each.fed_tokens for each in Generator(engine, TOKENIZER).generate(requests)] == (
        [common + 20] * 3 if common < MIN_COPIED else [common + 20, 20, 20]
    )
    others = [
        requests[0],
        replace(requests[1], sharing=Sharing("another")),
        replace(requests[2], adapter=TUNED),
    ]
    completions = Generator(NumpyGenerationEngine(), TOKENIZER).generate(others)
    assert [each.fed_tokens for each in completions] == [common + 20] * 3


def test_nothing_is_shared_between_groups() -> None:
    generator = Generator(NumpyGenerationEngine(slots=2), TOKENIZER)
    for group, fed in (("a", 3), ("b", 3), ("a", 1), ("b", 1), ("c", 3), ("", 3)):
        request = replace(make_request(), sharing=Sharing(group))
        (answer,) = generator.generate([request])
        assert (answer.fed_tokens, [*answer.tokens]) == (fed, alone(request))


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 20])
def test_with_needs_answer_only_a_request_that_repeats_the_completion_shares_its_prefix(
    max_tokens: int,
) -> None:
    prompt = [1, *range(5, 25)]
    sharing = Sharing(needs_answer=True)

    def fed(tokens: Sequence[int], generator: Generator) -> int:
        request = replace(make_request(tokens, max_tokens=max_tokens), sharing=sharing)
        (answer,) = generator.generate([request])
        assert [*answer.tokens] == alone(request)
        return answer.fed_tokens

    first = Generator(NumpyGenerationEngine(slots=1), TOKENIZER)
    (answer,) = first.generate([replace(make_request(prompt, max_tokens=max_tokens), sharing=sharing)])
    # The sequence doesn't hold the last token that was sampled.
    held = len(answer.tokens) - 1
    needed = max(held // 2, min(held, 8))
    for repeated in range(len(answer.tokens)):
        generator = Generator(NumpyGenerationEngine(slots=1), TOKENIZER)
        fed(prompt, generator)
        requested = [*prompt, *answer.tokens[:repeated], 400, 401]
        is_known = repeated >= needed > 0
        assert fed(requested, generator) == (2 if is_known else len(requested)), (repeated, needed)
    assert fed(prompt, first) == len(prompt) and fed(prompt[:-1], first) == len(prompt) - 1


@pytest.mark.parametrize(
    ("repeat", "is_known"),
    [
        (lambda text: text, True),
        (lambda text: f" {text}\n", True),
        (lambda text: text.strip()[-20:].strip(), True),
        (lambda text: text.strip()[-8:], False),
        (lambda text: text.strip()[:20], False),
        (lambda text: text.strip()[:-1], False),
        (lambda text: "", False),
        (lambda text: " ", False),
        (lambda text: f"{text}.", False),
        (lambda text: "guess", False),
        (lambda text: f"end:{text:.3}", False),
    ],
    ids=[
        *("whole", "spaced", "its end", "a short end", "its beginning", "all but its end"),
        *("nothing", "space", "more", "another", "another and its beginning"),
    ],
)
def test_a_completion_that_is_repeated_as_text_is_recognized(
    repeat: Callable[[str], str], is_known: bool
) -> None:
    """A client may send back other tokens of the same text, or leave out the reasoning at its beginning."""
    prompt = [1, *range(5, 25)]
    generator = Generator(NumpyGenerationEngine(slots=1, context=128), TOKENIZER)
    sharing = Sharing(needs_answer=True)
    (answer,) = generator.generate([replace(make_request(prompt, max_tokens=60), sharing=sharing)])
    assert len(answer.text.strip()[-20:].strip()) >= 16 and len(answer.text.strip()) > 25
    sharing = replace(sharing, answers=("no", repeat(answer.text)))
    request = replace(make_request([*prompt, 400, 401]), sharing=sharing)
    assert generator.generate([request])[0].fed_tokens == (2 if is_known else len(prompt) + 2)


def test_nothing_is_shared_between_adapters() -> None:
    engine = NumpyGenerationEngine()
    generator = Generator(engine, TOKENIZER)
    generator.generate([make_request()])
    (answer,) = generator.generate([make_request(adapter=TUNED)])
    assert answer.fed_tokens == 3
    assert list(answer.tokens) == alone(make_request(adapter=TUNED))


def test_alternating_conversations_keep_their_sequences() -> None:
    generator = Generator(NumpyGenerationEngine(slots=2), TOKENIZER)
    first, second = [1, *range(5, 15)], [1, *range(40, 50)]
    for _ in range(3):
        for turn in (first, second):
            (answer,) = generator.generate([make_request(turn, max_tokens=3)])
            turn += [*answer.tokens, 9]
    assert answer.fed_tokens == 2


def test_cancelling_ends_one_completion_with_the_text_so_far() -> None:
    generator = Generator(NumpyGenerationEngine(slots=1), TOKENIZER)
    running, waiting, last = (generator.submit(make_request([1, each])) for each in (5, 6, 7))
    for _ in range(4):
        generator.work()
    generator.cancel(running)
    generator.cancel(waiting)
    finished(generator)
    assert running.wait(0).reason == waiting.wait(0).reason == "cancelled"
    assert list(running.wait(0).tokens) == alone(running.request)[:4]
    assert waiting.wait(0).tokens == ()
    assert list(last.wait(0).tokens) == alone(last.request)
    generator.cancel(last)
    assert not generator.work()
    assert last.wait(0).reason == "length"


def test_an_engine_error_ends_one_completion_only() -> None:
    engine = NumpyGenerationEngine()
    engine.failing = {77}
    generator = Generator(engine, TOKENIZER)
    bad, good = generator.submit(make_request([1, 77])), generator.submit(make_request())
    finished(generator)
    assert list(good.wait(0).tokens) == alone(good.request)
    assert isinstance(bad.error, EngineError)
    with raises(EngineError, "token-refused", containing="77"):
        bad.wait(0)
    assert engine.open_count == 1
    with raises(EngineError, "token-refused", containing="77"):
        generator.generate([make_request([1, 77])])


def test_logits_that_are_nan_end_the_completion() -> None:
    engine = NumpyGenerationEngine()
    engine.embedding[5] = float("nan")
    with raises(EngineError, "logits-not-finite", containing="nan"):
        Generator(engine, TOKENIZER).generate([make_request()])


def test_a_callback_that_raises_loses_nothing() -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    generator = Generator(NumpyGenerationEngine(), TOKENIZER)
    ended: list[Any] = []
    one = generator.submit(make_request(max_tokens=2), broken, ended.append)
    other = generator.submit(make_request([1, 9]), None, ended.append)
    while True:
        try:
            if not generator.work():
                break
        except BrokenPipeError:
            continue
    assert ended == [one, other]
    assert list(other.wait(0).tokens) == alone(other.request)


def test_close_closes_idle_sequences() -> None:
    engine = NumpyGenerationEngine()
    generator = Generator(engine, TOKENIZER)
    generator.generate([make_request()])
    assert engine.open_count == 1
    generator.close()
    assert engine.open_count == 0


def test_threads_submit_and_cancel_while_one_works() -> None:
    generator = Generator(NumpyGenerationEngine(slots=4), TOKENIZER)
    answers: dict[int, Completion] = {}
    done = threading.Event()

    def ask(number: int) -> None:
        ticket = generator.submit(make_request([1, 5 + number], max_tokens=20))
        if number % 3 == 0:
            generator.cancel(ticket)
        answers[number] = ticket.wait(60)

    def serve() -> None:
        while not done.is_set():
            generator.work()

    server = threading.Thread(target=serve)
    server.start()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    server.join()
    for number, answer in answers.items():
        expected = alone(make_request([1, 5 + number], max_tokens=20))
        if answer.reason == "cancelled":
            assert number % 3 == 0
            assert list(answer.tokens) == expected[: len(answer.tokens)]
        else:
            assert list(answer.tokens) == expected
    assert len(answers) == 30


def test_waiting_for_a_completion_can_time_out() -> None:
    ticket = Generator(NumpyGenerationEngine(), TOKENIZER).submit(make_request())
    with pytest.raises(TimeoutError):
        ticket.wait(0.01)


# Drafts


@given(
    st.lists(st.integers(3, 9), min_size=1, max_size=24),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.7]),
    st.integers(30, 60),
)
@settings(max_examples=60)
def test_drafts_change_no_token(prompt: list[int], max_tokens: int, temperature: float, context: int) -> None:
    choice = SamplingSettings(temperature, seed=3)
    small: dict[str, Any] = {"vocabulary_size": 10, "context": context}
    answers = []
    for draft in ("off", "lookup"):
        engine = NumpyGenerationEngine(**small)
        generator = Generator(engine, TOKENIZER)
        request = make_request(prompt, max_tokens=max_tokens, sampling=choice, draft=draft)
        answers += generator.generate([request, request][:1])
        # The sequence holds the completion: a request that continues it gets the same tokens as in a new one.
        following = make_request([*prompt, *answers[-1].tokens, 3], max_tokens=4, sampling=choice)
        if len(following.prompt.tokens) < context:
            (more,) = generator.generate([following])
            assert [*more.tokens] == alone(following, vocabulary_size=10)[: len(more.tokens)]
    plain, drafted = answers
    assert (plain.tokens, plain.reason, plain.text) == (drafted.tokens, drafted.reason, drafted.text)
    assert plain.steps == drafted.steps
    assert plain.drafted == 0


def test_a_text_that_repeats_itself_takes_fewer_calls() -> None:
    engine = NumpyGenerationEngine(vocabulary_size=10)
    (answer,) = Generator(engine, TOKENIZER).generate(
        [make_request([3, 4, 5] * 4, max_tokens=40, draft="lookup")]
    )
    assert answer.drafted > 10
    assert len(engine.calls) == 1 + answer.steps - answer.drafted


def test_an_engine_that_cannot_rewind_gets_no_drafts() -> None:
    engine = NumpyGenerationEngine(vocabulary_size=10)
    engine.max_checked = 0
    request = make_request([3, 4, 5] * 4, max_tokens=40, draft="lookup")
    (answer,) = Generator(engine, TOKENIZER).generate([request])
    assert answer.drafted == 0


def test_several_completions_get_no_drafts() -> None:
    engine = NumpyGenerationEngine(vocabulary_size=10)
    requests = [make_request([3, 4, 5] * 4, max_tokens=40, draft="lookup")] * 2
    assert [answer.drafted for answer in Generator(engine, TOKENIZER).generate(requests)] == [0, 0]


def test_an_engine_error_at_a_draft_ends_the_completion() -> None:
    engine = NumpyGenerationEngine(vocabulary_size=10)
    generator = Generator(engine, TOKENIZER)
    request = make_request([3, 4, 5] * 4, max_tokens=40, draft="lookup")
    ticket = generator.submit(request)
    generator.work()
    engine.failing = set(range(10))
    finished(generator)
    with raises(EngineError, "token-refused"):
        ticket.wait(0)
    assert engine.open_count == 0


class Spelled:
    """A constraint to one of the given lists of tokens, after which the completion may end."""

    def __init__(self, *allowed: list[int], failing: int | None = None) -> None:
        self._allowed = allowed
        self._failing = failing
        self._tokens: list[int] = []

    def _rests(self) -> list[list[int]]:
        size = len(self._tokens)
        return [tokens[size:] for tokens in self._allowed if tokens[:size] == self._tokens]

    def allowed(self, ends: Collection[int]) -> BoolArray:
        if len(self._tokens) == self._failing:
            raise EngineError("no token is allowed", code="grammar-without-token")
        mask = np.zeros(TOKENIZER.vocabulary_size, bool)
        for rest in self._rests():
            mask[rest[:1] or list(ends)] = True
        return mask

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        assert self._rests()

    @property
    def is_finished(self) -> bool:
        return self._rests() == [[]]


def test_a_constrained_completion_ends_where_nothing_may_follow() -> None:
    spelled = [[40, 41, 42], [40, 41, 42, 43, 44], [50, 51]]
    request = replace(make_request(), constraint=lambda: Spelled(*spelled))
    generator = Generator(NumpyGenerationEngine(), TOKENIZER)
    answers = generator.generate([request, request, make_request()])
    assert {list(answer.tokens) in spelled for answer in answers[:2]} == {True}
    assert [answer.reason for answer in answers] == ["stop", "stop", "length"]
    assert list(answers[2].tokens) == alone(make_request())
    # The end token is allowed only where the completion may end.
    short = replace(make_request(), constraint=lambda: Spelled([40, 41], [40, 41, 42, 43, 44]))
    seeds = [replace(short, settings=GenerationSettings(9, sampling=SamplingSettings(9.0, min_p=0, seed=n)))
             for n in range(20)]  # fmt: skip
    results = {answer.tokens for answer in generator.generate(seeds)}
    assert results == {(40, 41), (40, 41, 42, 43, 44)}


def test_a_constraint_applies_before_filters_and_to_drafts() -> None:
    spelled = [40, 41, 42] * 8
    for choice in (SamplingSettings(), SamplingSettings(1.0, top_k=1), SamplingSettings(1.0, top_p=0.1)):
        request = make_request([40, 41, 42] * 4, max_tokens=30, sampling=choice, draft="lookup")
        request = replace(request, constraint=lambda: Spelled(spelled))
        (answer,) = Generator(NumpyGenerationEngine(), TOKENIZER).generate([request])
        assert list(answer.tokens) == spelled and answer.reason == "stop" and answer.drafted > 5


def test_max_tokens_and_stop_words_end_a_constrained_completion() -> None:
    words = TOKENIZER.encode(" the film was bad")
    request = replace(make_request(max_tokens=2), constraint=lambda: Spelled(words))
    stopped = make_request(stop=(" was",))
    stopped = replace(stopped, constraint=lambda: Spelled(words))
    answers = Generator(NumpyGenerationEngine(), TOKENIZER).generate([request, stopped])
    assert [answer.reason for answer in answers] == ["length", "stop"]
    assert list(answers[0].tokens) == words[:2] and answers[1].text == " the film"


def test_a_constraint_that_fails_ends_only_its_request() -> None:
    failing = replace(make_request(), constraint=lambda: Spelled([40] * 9, failing=3))
    generator = Generator(engine := NumpyGenerationEngine(), TOKENIZER)
    tickets = [generator.submit(failing), generator.submit(make_request())]
    finished(generator)
    with raises(EngineError, "grammar-without-token"):
        tickets[0].wait(0)
    assert list(tickets[1].wait(0).tokens) == alone(make_request())
    assert engine.open_count == 1


def logprobs_of(tokens: Sequence[int]) -> list[Any]:
    """Return the log-probabilities after each token, f64 [vocabulary], by definition."""
    engine = NumpyGenerationEngine(context=4096)
    sequence = engine.open(PLAIN)
    logits = [engine.feed(sequence, [token]).astype(np.float64) for token in tokens]
    return [each - np.log(np.exp(each - each.max()).sum()) - each.max() for each in logits]


@pytest.mark.parametrize("ends", [frozenset[int](), frozenset(range(420))])
def test_logprobs_are_the_model_s_for_every_token_and_the_one_that_ends(ends: frozenset[int]) -> None:
    choice = SamplingSettings(1.0, seed=3, repetition_penalty=2.0)
    request = make_request(ends=ends, sampling=choice)
    (answer,) = Generator(NumpyGenerationEngine(), TOKENIZER).generate([replace(request, logprobs=2)])
    assert len(answer.logprobs) == (1 if ends else 12)
    if not ends:
        assert [each.token for each in answer.logprobs] == list(answer.tokens)
    expected = logprobs_of([*request.prompt.tokens, *answer.tokens])[2:]
    for each, row in zip(answer.logprobs, expected, strict=False):
        assert each.logprob == pytest.approx(row[each.token], abs=1e-5)
        assert [token for token, _ in each.top] == np.argsort(-row)[:2].tolist()
        assert [value for _, value in each.top] == pytest.approx(np.sort(row)[::-1][:2].tolist(), abs=1e-5)
    (plain,) = Generator(NumpyGenerationEngine(), TOKENIZER).generate([request])
    assert plain.logprobs == () and plain.tokens == answer.tokens


@pytest.mark.parametrize("length", [1, 2, 30, 2 * MAX_SCORED_TOKENS + 1])
def test_logprobs_of_a_prompt_are_computed_whatever_is_cached(length: int) -> None:
    prompt = [1 + number % 11 for number in range(length)]
    generator = Generator(NumpyGenerationEngine(context=200), TOKENIZER)
    request = make_request(prompt, max_tokens=2)
    (plain,) = generator.generate([request])
    (answer,) = generator.generate([replace(request, logprobs=0, prompt_logprobs=True)])
    assert answer.tokens == plain.tokens and answer.fed_tokens == length
    tokens = [*prompt, *answer.tokens]
    assert [each.token for each in answer.logprobs] == tokens[1:]
    rows = logprobs_of(tokens[:-1])
    values = [row[token] for row, token in zip(rows, tokens[1:], strict=True)]
    assert [each.logprob for each in answer.logprobs] == pytest.approx(values, abs=1e-5)
