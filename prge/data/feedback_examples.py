"""Builds examples from single rows of feedback; a row that can't be used doesn't affect other rows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from prge.data.example_building import build_examples
from prge.data.forms.feedback_rows import has_positive_answer, rows_from_feedback
from prge.data.options import BuildOptions
from prge.data.readers.feedback import Fields, find_feedback_problem
from prge.data.readers.files import Row
from prge.data.tokenization.tokenizer import Tokenizer, compile_chat_template
from prge.errors import BundleError, DataError, as_clause, printable
from prge.model_spec import ModelSpec
from prge.objectives.examples import Example
from prge.objectives.preferences import PREFERENCES, ObjectiveName

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate


class UnlearnableError(DataError):
    """A row of feedback can't become an example; `problem` says why."""

    def __init__(self, problem: str, *, code: str) -> None:
        super().__init__(f"the feedback can't be trained on: {problem}", [], code=code)
        self.problem = problem


class FeedbackExamples:
    """Builds the examples of single rows of feedback; not thread-safe.

    The chat template runs in a child process that is forked here, so create this object before an engine
    computes. If a row ends the child by taking too much time or memory, the next row starts a new one.

    Args:
        tokenizer: A tokenizer that nothing else uses.
        model: specification of the bundle's model.
        options: options for building examples. With the objective of ratings, all examples are rated
            answers; otherwise the objective follows from the row.

    Raises:
        BundleError: the tokenizer's chat template is damaged.
        DataError: there is a chat template, and jinja2 isn't installed.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelSpec, options: BuildOptions | None = None) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._options = options or BuildOptions(overflow="auto")
        self._chat = self._compile()

    def build(self, row: Fields, number: int = 1) -> list[Example]:
        """Return the examples of a row: a completion to learn, or a bad answer as a disliked one.

        With an objective of ratings, they are a liked or disliked answer, and of a correction both: it is
        liked, and the answer that it replaces is disliked, unless that can't be trained on.

        Args:
            row: A row of feedback, which is untrusted.
            number: row number of the examples.

        Raises:
            UnlearnableError: the row can't become an example.
        """
        if problem := find_feedback_problem(row):
            raise UnlearnableError(problem, code="feedback-unsound")
        is_rated = self._options.objective in PREFERENCES or not has_positive_answer(row)
        objective: ObjectiveName = "grpo" if is_rated else "completion"
        (first, *replaced), _ = rows_from_feedback([Row(number, row)], objective)
        examples = self._build(Row(number, first.fields), objective)
        for each in replaced:
            with suppress(UnlearnableError):
                examples += self._build(Row(number, each.fields), objective)
        return examples

    def _build(self, row: Row, objective: ObjectiveName) -> list[Example]:
        """Return the examples of a row for training; raises UnlearnableError."""
        options = replace(self._options, objective=objective, skip_unusable=False)
        if objective in PREFERENCES and options.overflow == "split":
            options = replace(options, overflow="truncate")
        try:
            self._chat = self._chat or self._compile()
            examples, _ = build_examples(
                [row], self._tokenizer, self._model, None, options, source="feedback", chat=self._chat
            )
        except BundleError as error:
            self._chat = None
            raise UnlearnableError(printable(as_clause(error.what)), code=error.code) from None
        except DataError as error:
            problems = [problem.removeprefix(f"row {row.number}: ") for problem in error.problems]
            raise UnlearnableError(
                printable("; ".join(problems) or as_clause(error.what)), code=error.code
            ) from None
        if not examples:
            raise UnlearnableError("the chat template renders nothing to train on", code="nothing-to-learn")
        return examples

    def _compile(self) -> ChatTemplate | None:
        return compile_chat_template(self._tokenizer, self._options.date)
