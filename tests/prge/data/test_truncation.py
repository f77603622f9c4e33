"""Truncation of texts and candidates that are too long for the bundle."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prge.data.columns import RowError
from prge.data.encoding import EncodedText, encode
from prge.data.row_report import END_CUT, PROMPT_CUT, SPLIT
from prge.data.segments import Candidates, Segment, SegmentedText, Segmenter, Texts
from prge.data.tokenization.tokenizer import Tokenizer
from prge.data.truncation import FittedSequences, SequenceFitter
from tests.prge.data.tiny_tokenizers import byte_level_backend, encoder_backend
from tests.refusals import raises

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, pad_id=0, prepend_bos=True)
ENCODER = Tokenizer(encoder_backend(), pad_id=0)
SEGMENTER = Segmenter(TOKENIZER)
SEGMENTS = st.lists(
    st.tuples(st.integers(1, 12).map(lambda size: " film" * size), st.booleans()), min_size=1, max_size=6
).map(lambda parts: tuple(Segment(*part) for part in parts))
LENGTHS = st.integers(6, 40)


def targets(sequences: tuple[EncodedText, ...]) -> list[int]:
    return [token for each in sequences for token in each.ids[each.targets].tolist()]


def numbered(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return segments of distinct words, so that each token identifies its position."""
    count = iter(range(1000))
    return tuple(
        Segment("".join(f" {next(count)}" for _ in each.text.split()), each.is_trained) for each in segments
    )


def candidate_texts(prompt: int, *answers: int) -> list[SegmentedText]:
    """Return answers with the given numbers of words to one prompt."""
    return [
        SegmentedText(SEGMENTER.prompt_and_completion(" film" * prompt, " was" * answer, "candidate"))
        for answer in answers
    ]


@given(segments=SEGMENTS.map(numbered), length=LENGTHS)
def test_splitting_loses_no_trained_token_and_repeats_none(
    segments: tuple[Segment, ...], length: int
) -> None:
    text = SegmentedText(segments, "untrained", "none")
    encoded = encode(text, TOKENIZER)
    if not len(encoded.targets):
        return
    fitted = SequenceFitter(TOKENIZER, length, "split").fit(Texts((text,)))
    assert targets(fitted.sequences) == targets((encoded,)) and not fitted.dropped
    assert all(len(each.ids) <= length for each in fitted.sequences)
    assert (SPLIT in fitted.events) == (len(fitted.sequences) > 1)
    whole = encoded.ids.tolist()
    for each in fitted.sequences:
        # A sequence is a contiguous part of the text, so every target keeps its predecessor.
        ids = each.ids.tolist()
        assert any(whole[start : start + len(ids)] == ids for start in range(len(whole)))
        assert each.is_trained[-1] and not each.is_trained[0]


@given(segments=SEGMENTS, length=LENGTHS)
def test_dropped_tokens_are_counted(segments: tuple[Segment, ...], length: int) -> None:
    text = SegmentedText(segments, "untrained", "none")
    encoded = encode(text, TOKENIZER)
    if not len(encoded.targets):
        return
    fitted = SequenceFitter(TOKENIZER, length, "truncate").fit(Texts((text,)))
    (cut,) = fitted.sequences
    assert len(cut.targets) + fitted.dropped == len(encoded.targets)
    assert (END_CUT in fitted.events) == bool(fitted.dropped)
    assert len(cut.ids) <= length


@given(segments=SEGMENTS, length=LENGTHS)
def test_fitting_texts_are_unchanged(segments: tuple[Segment, ...], length: int) -> None:
    text = SegmentedText(segments, "untrained", "none")
    encoded = encode(text, TOKENIZER)
    if not len(encoded.targets):
        return
    last = int(encoded.targets[-1])
    for overflow in ("error", "truncate", "split"):
        fitter = SequenceFitter(TOKENIZER, length, overflow)  # type: ignore[arg-type]
        if last < length:
            (kept,) = fitter.fit(Texts((text,))).sequences
            assert kept.ids.tolist() == encoded.ids[: last + 1].tolist()
        elif overflow == "error":
            with raises(RowError, "row-too-long", containing=str(last + 1)):
                fitter.fit(Texts((text,)))


@given(prompt=st.integers(1, 40), answers=st.lists(st.integers(1, 9), min_size=1, max_size=4), length=LENGTHS)
def test_choices_are_whole_after_the_end_of_their_prompt(
    prompt: int, answers: list[int], length: int
) -> None:
    row = Candidates(tuple(candidate_texts(prompt, *answers)), "choices", 0)
    fitter = SequenceFitter(TOKENIZER, length, "truncate")
    after = 0 if max(answers) == 1 else max(answers)
    if 1 + 1 + after > length:
        with raises(RowError, "candidate-too-long", containing=str(after)):
            fitter.fit(row)
        return
    fitted = fitter.fit(row)
    kept = min(prompt, length - 1 - after)
    assert [len(each.ids) for each in fitted.sequences] == [1 + kept + answer for answer in answers]
    assert [len(each.targets) for each in fitted.sequences] == answers
    assert (PROMPT_CUT in fitted.events) == (kept < prompt)


@given(
    prompt=st.integers(1, 60), answers=st.lists(st.integers(1, 40), min_size=2, max_size=2), length=LENGTHS
)
def test_answers_keep_one_prompt_and_lose_their_ends_where_it_is_half(
    prompt: int, answers: list[int], length: int
) -> None:
    row = Candidates(tuple(candidate_texts(prompt, *answers)), "answers", 0)
    fitted = SequenceFitter(TOKENIZER, length, "truncate").fit(row)
    contexts = {each.ids[: each.targets[0]].tobytes() for each in fitted.sequences}
    assert len(contexts) == 1 or PROMPT_CUT in fitted.events
    target_counts = [len(each.targets) for each in fitted.sequences]
    assert sum(target_counts) + fitted.dropped == sum(answers)
    assert all(len(each.ids) <= length for each in fitted.sequences)
    if fitted.dropped:
        assert END_CUT in fitted.events and max(target_counts) >= length // 2 - 1


@given(words=st.integers(1, 30), length=st.integers(3, 20))
def test_an_encoders_text_loses_its_end_and_keeps_its_special_tokens(words: int, length: int) -> None:
    text = SegmentedText((Segment(" film" * words, False),), special_tokens="begin and end")
    row = Candidates((text,), "classes", 0, choices=("bad", "good"))
    (fitted,) = SequenceFitter(ENCODER, length, "truncate").fit(row).sequences
    whole = encode(text, ENCODER).ids
    kept = min(len(whole), length)
    expected = np.concatenate([whole[: kept - len(ENCODER.end)], whole[len(whole) - len(ENCODER.end) :]])
    assert np.array_equal(fitted.ids, expected) and not fitted.is_trained.any()
    assert row.count == 2


def test_a_text_that_is_divided_by_itself_keeps_that_division() -> None:
    """The newest turns form the longest part; the fitter decides what fits."""
    turns = [Segment(" film was good" * 3, True) for _ in range(4)]

    def of(*segments: Segment) -> SegmentedText:
        return SegmentedText((Segment("It", False), *segments), "untrained", "none")

    fit_results: list[bool] = []

    def divide(fits: object) -> list[SegmentedText]:
        assert callable(fits)
        fit_results.append(fits(of(*turns)))
        return [of(*turns[:2]), of(*turns[2:])]

    text = SegmentedText(of(*turns).segments, "untrained", "none", divide=divide)
    fitted: FittedSequences = SequenceFitter(TOKENIZER, 20, "split").fit(Texts((text,)))
    assert fit_results == [False] and len(fitted.sequences) == 2
    assert fitted.events == ("chats longer than the bundle takes, split between turns into several examples",)
