"""Rows of a data file to the examples of one bundle: what is context, what is learnt, what had to be cut.

    text                  every token after the first is learnt; `begin` is context
    prompt, completion    the completion is learnt, with the end-of-sequence token after it
    messages              what the assistant wrote is learnt
    Alpaca, ShareGPT      become one of the two above (forms.py)
    a task's candidates   one-token candidates share a sequence, a slot each at the prompt's last token;
                          longer ones have a sequence each, weights 1 / tokens
    a task's answers      the first answer is learnt; an evaluation searches the passage (spans.py)
    a task, encoder       one sequence without slots, and a class

What doesn't fit a bundle is cut, split or refused as `overflow` says, and told in a `DataReport`:
a prompt loses its beginning, as in MeZO (arXiv 2305.17333); a candidate is never cut; a chat is split between
turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from prge.contract import Contract
from prge.errors import BundleError, DataError
from prge.learning.examples import Example, Slot, TokenSequence
from prge.rows.forms import TEXT, Form, column_names, columns_text, find_form, present_columns
from prge.rows.readers import Row, Selection, select_rows
from prge.rows.report import ENCODER_CUT, END_CUT, PROMPT_CUT, SPLIT, TURNS_CUT, TURNS_SPLIT, DataReport
from prge.rows.sources import Source, read_source
from prge.rows.task import RowError, Task
from prge.rows.tokenizer import Ids, Pair, Tokenizer

if TYPE_CHECKING:
    from prge.rows.chat import ChatTemplate, Message

Overflow = Literal["auto", "error", "truncate", "split"]
Mask = NDArray[np.bool_]

INEXACT = "completions encoded apart, a token would straddle the end of the prompt"
TURN_INEXACT = "assistant turns learnt with their header, the generation prompt differs from it"
CONTROL = "messages with control tokens written in them, read as such"
SPELLED = 8


@dataclass(frozen=True)
class BuildOptions:
    """How rows become examples."""

    overflow: Overflow = "error"
    """What is too long for the bundle: `error`, `truncate`, or `split` (not candidates) it; `auto`: split
    texts and chats, truncate all else."""
    append_eos: bool = True
    """Learn an end-of-sequence token after completions and answers, where the model has one."""
    max_dropped: float | None = None
    """Largest share of target tokens that may be left out; None: any."""
    control_tokens: bool = False
    """Read control tokens written in texts, such as </s>, as such."""
    skip_unusable: bool = False
    """Leave out rows that can't be used, as long as there are others; the report has them."""


def load_examples(
    source: Source | Path | str,
    tokenizer: Tokenizer,
    contract: Contract,
    task: Task | None = None,
    selection: Selection | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
) -> tuple[list[Example], DataReport]:
    """Select rows of a source, by default all, and build their examples; a path is read as training rows."""
    if not isinstance(source, Source):
        source = read_source(source)
    chosen = select_rows(source.rows, selection or Selection())
    return build_examples(
        chosen,
        tokenizer,
        contract,
        task,
        options,
        training=training,
        source=source.name,
        renamed=source.renamed,
    )


def build_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    contract: Contract,
    task: Task | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
    source: str = "the data",
    renamed: Mapping[str, str] | None = None,
) -> tuple[list[Example], DataReport]:
    """Tokenize rows for a bundle.

    Args:
        training: build a task of objective `completion` with its right candidate alone; an evaluation
            (false) compares all candidates, in any number of sequences.
        source: names the data in errors.
        renamed: columns that have other names in the file, with these.

    Raises:
        DataError: rows that lack a column, hold an unknown label, nothing to learn, or don't fit; all named.
    """
    builder = _Builder(tokenizer, contract, task, options or BuildOptions(), training)
    return builder.build(rows, source, renamed or {})


class _Builder:
    """Examples and report of one file; a row's problem is raised as RowError, collected with its number."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        contract: Contract,
        task: Task | None,
        options: BuildOptions,
        training: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.contract = contract
        self.task = task
        self.options = options
        self.training = training
        self.length = contract.sequence_length
        self.overflow: Overflow = self.options.overflow
        self.report = DataReport("", self.length)
        self.chat: ChatTemplate | None = None

    def build(
        self, rows: Sequence[Row], source: str, renamed: Mapping[str, str]
    ) -> tuple[list[Example], DataReport]:
        if not rows:
            raise DataError(f"{source} can't be used", ["it has no rows"])
        present = present_columns(rows)
        if self.task is None:
            form = self.form(rows, source, renamed)
            read = (*form.columns, *form.optional)
            how = ", as messages" if form.chat == "takes" and self.chat is not None else ""
            self.report.kind = f"{source} ({form.name}{how})"
        else:
            form, read = None, self.task.needed_columns(self.contract.is_encoder)
            self.check_task(self.task, read, present, source)
            self.report.kind = f"{source} (task {self.task.name})"
        self.report.columns = columns_text(read, present, renamed)
        if self.overflow == "auto":
            self.overflow = "split" if form is TEXT or self.chat is not None else "truncate"
        examples: list[Example] = []
        unusable = self.report.unusable
        for row in rows:
            try:
                made = self.examples(form, row)
                cut = self.report.was_cut(row.number)
                examples += [replace(each, cut=True) for each in made] if cut else made
            except RowError as problem:
                unusable[row.number] = str(problem)
            except DataError as error:
                headline = error.what.partition("\n")[0]
                unusable[row.number] = f"{headline}: {'; '.join(error.problems)}"
        if unusable and not (self.options.skip_unusable and examples):
            raise DataError(
                f"{source} has rows that can't be used",
                [f"row {number}: {problem}" for number, problem in unusable.items()],
                remedy="correct or remove these rows",
            )
        self.report.rows = len(rows) - len(unusable)
        self.report.examples = len(examples)
        for example in examples:
            for sequence in example.sequences:
                self.report.lengths.append(len(sequence.tokens))
                self.report.slots.append(len(sequence.slots))
        self.check_dropped(source)
        return examples, self.report

    def check_dropped(self, source: str) -> None:
        """Raise DataError if more target tokens would be left out than the options allow."""
        share, limit = self.report.dropped_share, self.options.max_dropped
        if limit is not None and share > limit:
            targets = self.report.dropped + sum(self.report.slots)
            raise DataError(
                f"{source} would lose {share:.0%} of its target tokens",
                [
                    f"{self.report.dropped} of {targets} don't fit rows of {self.length} tokens; "
                    f"--max-dropped is {limit:g}"
                ],
                remedy="keep them all with --overflow split, or export with a larger --sequence-length; or "
                "leave them out with a larger --max-dropped",
            )

    def form(self, rows: Sequence[Row], source: str, renamed: Mapping[str, str]) -> Form:
        """The form of rows without a task."""
        what = f"{source} can't be used"
        if self.contract.readout != "logprobs":
            raise DataError(
                what,
                [f"the bundle's readout is {self.contract.readout}: it compares classes, learns no texts"],
                remedy="give a task (a name or a task file)",
            )
        form = find_form(rows, source, renamed)
        template = self.tokenizer.chat_template
        if form.chat and template is not None:
            self.chat = self.chat_template(template)
        elif form.chat == "needs":
            raise DataError(
                what,
                ["its rows are messages and the model has no chat template"],
                remedy="export with --chat-template plain, take a chat model, or prompts and completions",
            )
        return form

    def chat_template(self, source: str) -> ChatTemplate:
        """The compiled chat template; only rows of messages need jinja2."""
        try:
            from prge.rows.chat import ChatTemplate
        except ImportError:
            raise DataError(
                "rows of messages need the package jinja2", [], remedy="pip install jinja2"
            ) from None
        return ChatTemplate(source, self.tokenizer.special_tokens)

    def check_task(self, task: Task, needed: Sequence[str], present: Sequence[str], source: str) -> None:
        """What a task asks of a bundle and of a file as a whole, whatever single rows are."""
        if lacking := [column for column in needed if column not in present]:
            names = column_names(present)
            raise DataError(
                f"{source} can't be used",
                [f"no row has the column {column!r}; its columns are {names}" for column in lacking],
                remedy=f"give the data set of the task {task.name}, a task file, or --columns "
                f"{lacking[0]}=NAME with the name that the column has",
            )
        problems = []
        if self.contract.is_encoder and not task.classes:
            problems.append(f"an encoder knows classes only; the task {task.name} has no label_words")
        if self.overflow == "split" and not task.is_completion:
            problems.append(
                "overflow split is for texts, completions and messages: a prompt with candidates is one"
            )
        if problems:
            raise DataError(f"the task {task.name} doesn't fit the bundle", problems)

    def examples(self, form: Form | None, row: Row) -> list[Example]:
        if form is None:
            assert self.task is not None
            return self.task_examples(self.task, row)
        row = form.row(row, chat=self.chat is not None)
        if "messages" in row.fields:
            return self.messages(row)
        if form is TEXT:
            begin = self.tokenizer.begin
            tokens = self.tokenizer.ids(
                _string(row, "text"), control=self.options.control_tokens, before=begin
            )
            return self.learnt(row, tokens, _learnt_after(len(begin), len(tokens)), len(begin))
        return self.completion(row, _string(row, "prompt"), _string(row, "completion"))

    def messages(self, row: Row) -> list[Example]:
        from prge.rows.chat import check_messages

        try:
            messages = check_messages(row.fields["messages"])
        except ValueError as error:
            raise RowError(str(error)) from None
        whole = self.conversation(row, messages)
        mask = whole[1]
        if self.overflow == "error" or self.fits(mask) or not mask[1:].any():
            return self.learnt(row, *whole)
        try:
            parts = [self.conversation(row, part) for part in self.parts(row, messages)]
        except DataError:  # a template that wants conversations whole
            return self.learnt(row, *whole)
        if len(parts) > 1:
            self.report.note(TURNS_CUT if self.overflow == "truncate" else TURNS_SPLIT, row.number)
        if self.overflow == "truncate":
            parts = parts[-1:]
            self.report.dropped += int(np.count_nonzero(mask[1:]) - np.count_nonzero(parts[0][1][1:]))
        return [example for part in parts for example in self.learnt(row, *part)]

    def parts(self, row: Row, messages: Sequence[Message]) -> list[list[Message]]:
        """A chat between its turns: parts that fit, the newest the longest, the system's message before each.

        A part begins with what the assistant was asked. One that doesn't fit has a single question.
        """
        roles = [message["role"] for message in messages]
        first = int(roles[0] == "system")
        starts = [
            index
            for index in range(first, len(roles))
            if index == first or (roles[index] != "assistant" and roles[index - 1] == "assistant")
        ]
        end = len(roles) - roles[::-1].index("assistant")
        starts = [start for start in starts if start < end]
        parts: list[list[Message]] = []
        while starts:
            start = starts.pop()
            part = [*messages[:first], *messages[start:end]]
            while starts:
                longer = [*messages[:first], *messages[starts[-1] : end]]
                if not self.fits(self.conversation(row, longer)[1]):
                    break
                start, part = starts.pop(), longer
            parts.insert(0, part)
            end = start
        return parts

    def fits(self, mask: Mask) -> bool:
        """Whether the bundle takes a sequence up to its last target."""
        end = int(np.flatnonzero(mask).max(initial=-1)) + 1
        return end <= self.length and int(np.count_nonzero(mask[1:])) <= self.contract.positions

    def conversation(self, row: Row, messages: Sequence[Message]) -> tuple[Ids, Mask, int]:
        """Tokens of messages by the template, which are learnt, and how many of them begin every text."""
        assert self.chat is not None
        try:
            text, spans, exact = self.chat.assistant_spans(messages)
        except BundleError as error:
            raise BundleError(f"{error.what} (row {row.number})", remedy=error.remedy) from None
        if not exact:
            self.report.note(TURN_INEXACT, row.number)
        if any(
            token in message["content"] for message in messages for token in self.tokenizer.control_tokens
        ):
            self.report.note(CONTROL, row.number)
        # The template writes the special tokens itself, `begin` among them.
        first, last = np.array(spans, np.int64).reshape(-1, 2).T
        tokens, learnt = array("i"), bytearray()
        for part in self.tokenizer.parts(text, control=True):
            start, end = part[:, 1], part[:, 2]
            turn = np.searchsorted(first, start, side="right")
            inside = (turn > 0) & (end <= last[turn - 1]) & (end > start)
            straddles = (turn < len(first)) & (end > first[np.minimum(turn, len(first) - 1)])
            if straddles.any():
                self.report.note(INEXACT, row.number)
            tokens.frombytes(np.ascontiguousarray(part[:, 0]).tobytes())
            learnt += inside.tobytes()
        begin = 1 if tokens[:1].tolist() == [self.tokenizer.bos_id] else 0
        return np.frombuffer(tokens, np.int32), np.frombuffer(learnt, np.bool_), begin

    def completion(
        self, row: Row, prompt: str, completion: str, answers: tuple[str, ...] = (), passage: str = ""
    ) -> list[Example]:
        """Examples that learn a completion, the end-of-sequence token after it."""
        pair = self.tokenizer.encode_pair(prompt, completion, control=self.options.control_tokens)
        if not len(pair.completion):
            raise RowError("its completion is empty: there is nothing to learn from")
        if not pair.exact:
            self.report.note(INEXACT, row.number)
        eos = self.tokenizer.eos_id
        ends = self.options.append_eos and eos is not None and pair.completion[-1] != eos
        learnt = pair.completion
        if self.overflow == "truncate":
            # What lies further on is never learnt.
            learnt = learnt[: self.length + 1]
        after = np.array([eos] if ends else [], np.int32)
        # What lies further back than the longest row is never read.
        begin = len(self.tokenizer.begin)
        dropped = max(len(pair.prompt) - begin - self.length, 0)
        before = [pair.prompt[:begin], pair.prompt[begin + dropped :]]
        tokens = np.concatenate([*before, learnt, after])
        mask = _learnt_after(len(pair.prompt) - dropped, len(tokens))
        examples = self.learnt(row, tokens, mask, begin, dropped)
        self.report.dropped += len(pair.completion) - len(learnt)
        return [replace(each, answers=answers, choices=(passage,) if passage else ()) for each in examples]

    def learnt(self, row: Row, tokens: Ids, mask: Mask, begin: int, dropped: int = 0) -> list[Example]:
        """Examples of a sequence whose masked tokens are learnt, cut or split to fit the bundle.

        `begin` is how many tokens every example keeps, `dropped` how many were left out after them.
        """
        self.check_vocabulary(tokens)
        # Nothing precedes the first token, so nothing predicts it.
        if not mask[1:].any():
            raise RowError(f"has {len(tokens)} tokens and none to learn from")
        examples = []
        for start, chosen in self.windows(row, mask, begin, dropped):
            shift = start - begin
            kept = [*tokens[:begin].tolist(), *tokens[start : chosen[-1] + 1].tolist()]
            self.count_unknown(tokens[chosen])
            weight = 1 / len(chosen)
            slots = [Slot(index - shift - 1, kept[index - shift], weight, 0) for index in chosen]
            examples.append(Example(row.number, (TokenSequence(tuple(kept), tuple(slots)),), 1, None))
        return examples

    def windows(self, row: Row, mask: Mask, begin: int, dropped: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Where the tokens of each example start, `begin` aside, and the targets that it has and ends with.

        Every target is in at most one window and keeps at least the token before it. A cut completion leaves
        its prompt up to half of the bundle; a split text is learnt entirely.
        """
        room, limit = self.length, self.contract.positions
        count, end = int(np.count_nonzero(mask[1:])), len(mask) - int(mask[::-1].argmax())
        if self.fits(mask):
            yield begin, (1 + np.flatnonzero(mask[1:])).tolist()
            return
        if self.overflow == "error":
            raise RowError(
                f"has {end + dropped} tokens, the bundle takes {room}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate or split"
            )
        done, first, windows = 0, 1, 0
        while done < count and not (windows and self.overflow == "truncate"):
            first += int(mask[first:].argmax())
            context = min(first, max(begin + 1, room // 2 if self.overflow == "truncate" else 0))
            chosen = (first + np.flatnonzero(mask[first : first + room - context])[:limit]).tolist()
            if not chosen:
                raise RowError(
                    f"the bundle takes {room} tokens, too few to learn anything: export a longer one"
                )
            start = max(begin, chosen[-1] + 1 - (room - begin))
            if not windows and (start > begin or dropped):
                self.report.note(PROMPT_CUT, row.number)
            yield start, chosen
            done, first, windows = done + len(chosen), chosen[-1] + 1, windows + 1
        if windows > 1:
            self.report.note(SPLIT, row.number)
        if done < count:
            self.report.note(END_CUT, row.number)
            self.report.dropped += count - done

    def task_examples(self, task: Task, row: Row) -> list[Example]:
        if self.contract.is_encoder:
            return [self.encoder_example(task, row)]
        prompt = task.prompt(row.fields)
        if task.is_completion:
            answers = task.answers(row.fields)
            return self.completion(
                row, prompt, task.join(prompt, answers[0]), answers, task.passage(row.fields)
            )
        candidates = task.candidates(row.fields)
        label = task.label(row.fields)
        answers = task.answers(row.fields) or (candidates[label],)
        alone = self.training and task.objective == "completion"
        texts = [task.candidate_text(prompt, candidate, row.fields) for candidate in candidates]
        pairs = [
            self.tokenizer.encode_pair(prompt, text, control=self.options.control_tokens)
            for text in ([texts[label]] if alone else texts)
        ]
        if not all(pair.exact for pair in pairs):
            self.report.note(INEXACT, row.number)
        if task.classes:
            self.report.classes[task.classes[label]] += 1
        sequences = self.candidate_sequences(row, texts, pairs)
        if alone:
            return [Example(row.number, sequences, 1, None, answers, candidates)]
        return [Example(row.number, sequences, len(pairs), label, answers, candidates)]

    def candidate_sequences(
        self, row: Row, texts: Sequence[str], pairs: Sequence[Pair]
    ) -> tuple[TokenSequence, ...]:
        """Sequences of candidates after one prompt, which is cut alike for all of them."""
        if not all(len(pair.completion) for pair in pairs):
            raise RowError("has an empty candidate")
        for pair in pairs:
            self.count_unknown(pair.completion)
        longest = max(len(pair.completion) for pair in pairs)
        single = longest == 1
        prompt = self.cut_prompt(row, pairs[0].prompt, 0 if single else longest)
        at = len(prompt) - 1
        if single:
            tokens = [int(pair.completion[0]) for pair in pairs]
            if len(set(tokens)) < len(tokens):
                raise RowError(f"has two candidates that are one token: {self.spelled(texts, pairs)}")
            self.check_vocabulary([*prompt, *tokens])
            slots = [Slot(at, token, 1.0, index) for index, token in enumerate(tokens)]
            size = self.contract.positions
            return tuple(
                TokenSequence(prompt, tuple(slots[i : i + size])) for i in range(0, len(slots), size)
            )
        sequences = []
        for index, pair in enumerate(pairs):
            self.check_vocabulary([*prompt, *pair.completion])
            weight = 1 / len(pair.completion)
            tokens = pair.completion.tolist()
            slots = [Slot(at + k, token, weight, index) for k, token in enumerate(tokens)]
            sequences.append(TokenSequence((*prompt, *tokens), tuple(slots)))
        return tuple(sequences)

    def cut_prompt(self, row: Row, prompt: Ids, after: int) -> tuple[int, ...]:
        """The prompt without as much of its beginning as leaves room for `after` tokens; `begin` stays."""
        if not len(prompt):
            raise RowError("has an empty prompt: nothing predicts its candidates")
        room = self.length - after
        if len(prompt) <= room:
            return tuple(prompt.tolist())
        begin = self.tokenizer.begin
        if self.overflow == "error":
            raise RowError(
                f"has a prompt of {len(prompt)} tokens and {after} after it, "
                f"the bundle takes {self.length}: "
                "shorten it, export with a larger --sequence-length, or set overflow to truncate"
            )
        kept = room - len(begin)
        if kept < 1:
            raise RowError(
                f"has a candidate of {after} tokens, the bundle takes {self.length}: "
                "export with a larger --sequence-length"
            )
        self.report.note(PROMPT_CUT, row.number)
        return (*begin, *prompt[-kept:].tolist())

    def spelled(self, texts: Sequence[str], pairs: Sequence[Pair]) -> str:
        """Words with their pieces, for an error."""
        return ", ".join(
            f"{text!r} = "
            + " + ".join(repr(self.tokenizer.token(token)) for token in pair.completion[:SPELLED].tolist())
            for text, pair in zip(texts, pairs, strict=True)
        )

    def check_vocabulary(self, tokens: Ids | Sequence[int]) -> None:
        largest = int(np.max(tokens, initial=0))
        if largest >= self.contract.vocabulary_size:
            raise RowError(
                f"has the token {self.tokenizer.token(largest)!r} ({largest}), "
                f"the bundle knows {self.contract.vocabulary_size}: the tokenizer is not this bundle's"
            )

    def count_unknown(self, targets: Ids) -> None:
        if self.tokenizer.unknown_id is not None:
            self.report.unknown += int(np.count_nonzero(targets == self.tokenizer.unknown_id))

    def encoder_example(self, task: Task, row: Row) -> Example:
        text = task.encoder_text(row.fields)
        if not text.strip():
            raise RowError("has an empty text: there is nothing to learn from")
        label = task.label(row.fields)
        begin, end = self.tokenizer.begin, self.tokenizer.end
        tokens = self.tokenizer.ids(text, control=self.options.control_tokens)
        room = self.length - len(begin) - len(end)
        if room < 1:
            raise RowError(
                f"the bundle takes {self.length} tokens, too few for any text: export a longer one"
            )
        if len(tokens) > room:
            if self.overflow != "truncate":
                raise RowError(
                    f"has {len(begin) + len(tokens) + len(end)} tokens, the bundle takes {self.length}: "
                    "shorten it, export with a larger --sequence-length, or set overflow to truncate"
                )
            self.report.note(ENCODER_CUT, row.number)
            tokens = tokens[:room]
        self.check_vocabulary(tokens)
        self.report.classes[task.classes[label]] += 1
        candidates = task.candidates(row.fields)
        sequence = TokenSequence((*begin, *tokens.tolist(), *end))
        return Example(row.number, (sequence,), len(candidates), label, (candidates[label],), candidates)


def _learnt_after(context: int, count: int) -> Mask:
    """A mask of `count` tokens that learns all but the first ones."""
    mask = np.ones(count, np.bool_)
    mask[:context] = False
    return mask


def _string(row: Row, column: str) -> str:
    value = row.fields.get(column)
    if not isinstance(value, str):
        raise RowError(
            f"column {column!r} is {'missing' if value is None else type(value).__name__}, must be a text"
        )
    return value
