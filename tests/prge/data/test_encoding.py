"""Tokenizing segments: the ids are those of the text, and the mask covers exactly the trained segments."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from prge.data.columns import RowError
from prge.data.encoding import encode
from prge.data.segments import Segment, SegmentedText, Segmenter
from prge.data.tokenization.tokenizer import Tokenizer
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, pad_id=0, prepend_bos=True)
BARE_TOKENIZER = Tokenizer(byte_level_backend())
WORDS = st.sampled_from(["the film", " was", " ", "good", "\n", "é", "x1", "", "Answer:", " terrible", "漢"])


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Return a text that is split anywhere, even inside words of one token."""
    text = "".join(draw(st.lists(WORDS, max_size=12)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    return tuple(
        Segment(text[start:end], draw(st.booleans())) for start, end in pairwise([0, *cuts, len(text)])
    )


SEGMENTS = cut_texts()
TEXTS = st.lists(WORDS, min_size=1, max_size=8).map("".join).filter(bool)
Boundary = Literal["untrained", "trained"]


@given(segments=SEGMENTS)
def test_ids_of_segments_are_those_of_the_joined_text(segments: tuple[Segment, ...]) -> None:
    encoded = encode(SegmentedText(segments, "untrained", "none"), BARE_TOKENIZER)
    assert encoded.ids.tolist() == BARE_TOKENIZER.encode("".join(each.text for each in segments))


@given(segments=SEGMENTS, boundary=st.sampled_from(["untrained", "trained"]))
def test_the_mask_covers_the_tokens_of_trained_segments(
    segments: tuple[Segment, ...], boundary: Boundary
) -> None:
    """`boundary` decides about a token of two segments; a token without characters is never trained on."""
    encoded = encode(SegmentedText(segments, boundary, "none"), BARE_TOKENIZER)
    text = "".join(each.text for each in segments)
    is_trained = [each.is_trained for each in segments for _ in each.text]
    enough = all if boundary == "untrained" else any
    edges = {*accumulate((len(each.text) for each in segments), initial=0)}
    for part in BARE_TOKENIZER.parts(text):
        for index, (_, start, end) in enumerate(part.tolist()):
            # A token across two adjacent trained segments, such as two turns, is not trained on.
            crosses = boundary == "untrained" and any(start < edge < end for edge in edges)
            expected = end > start and enough(is_trained[start:end]) and not crosses
            assert encoded.is_trained[index] == expected


@given(prompt=TEXTS, completion=TEXTS, append_eos=st.booleans())
def test_a_completion_is_trained_on_and_the_prompt_keeps_its_ids(
    prompt: str, completion: str, append_eos: bool
) -> None:
    segmenter = Segmenter(TOKENIZER, append_eos)
    encoded = encode(segmenter.trained_text(*segmenter.prompt_and_completion(prompt, completion)), TOKENIZER)
    alone = [*TOKENIZER.begin, *TOKENIZER.encode(prompt)]
    assert encoded.ids[: len(alone)].tolist() == alone
    assert encoded.is_trained.tolist() == [index >= len(alone) for index in range(len(encoded.ids))]
    whole = encoded.ids[: len(encoded.ids) - encoded.end].tolist()
    assert TOKENIZER.decode(whole, special=False) == prompt + completion
    assert encoded.ids[len(whole) :].tolist() == ([2] if append_eos else [])


@given(text=TEXTS)
def test_a_text_is_trained_on_without_its_begin_tokens(text: str) -> None:
    segmenter = Segmenter(TOKENIZER)
    encoded = encode(segmenter.trained_text(segmenter.text(text)), TOKENIZER)
    assert encoded.ids.tolist() == [*TOKENIZER.begin, *TOKENIZER.encode(text), 2]
    assert encoded.targets.tolist() == [*range(1, len(encoded.ids))]


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["a", "<s>", "</s>", "<|im_end|> b", " the film"]), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_control_tokens_are_read_as_segments_specify(parts: list[tuple[str, bool]]) -> None:
    segments = tuple(Segment(text, False, control) for text, control in parts)
    ids = encode(SegmentedText(segments, "untrained", "none"), BARE_TOKENIZER).ids.tolist()
    read = sum(BARE_TOKENIZER.count_control(text).total() for text, control in parts if control)
    assert sum(token in BARE_TOKENIZER.special_ids for token in ids) == read
    assert BARE_TOKENIZER.decode(ids) == "".join(text for text, _ in parts)


def test_the_end_of_sequence_token_is_appended_once() -> None:
    text = Segmenter(TOKENIZER).trained_text(Segment("the film</s>", True, True))
    assert encode(text, TOKENIZER).ids.tolist().count(2) == 1


def test_an_empty_trained_segment_inside_of_a_token_trains_nothing() -> None:
    segments = (Segment("t", False), Segment("", True), Segment("he film", False))
    assert not encode(SegmentedText(segments, "trained", "none"), BARE_TOKENIZER).is_trained.any()


def test_a_trained_segment_without_tokens_is_refused_by_its_name() -> None:
    segmenter = Segmenter(TOKENIZER)
    with raises(RowError, "answer-empty", containing="answer"):
        encode(segmenter.trained_text(*segmenter.prompt_and_completion("the film", "", "answer")), TOKENIZER)
