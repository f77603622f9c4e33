"""Builds examples from single rows of feedback; a row that can't be used doesn't affect other rows."""

from __future__ import annotations

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
from prge.objectives.preferences import ObjectiveName

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate


class UnlearnableError(DataError):
    """A row of feedback can't become an example; `problem` says why."""

    def __init__(self, problem: str, *, code: str) -> None:
        super().__init__(f"the feedback can't be learnt: {problem}", [], code=code)
        self.problem = problem


class FeedbackExamples:
    """Builds the examples of single rows of feedback; not thread-safe.

    The chat template runs in a child process that is forked here, so create this object before an engine
    computes. If a row ends the child by taking too much time or memory, the next row starts a new one.

    Args:
        tokenizer: A tokenizer that nothing else uses.
        model: specification of the bundle's model.
        options: how rows become examples; the objective follows from the row.

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

        Args:
            row: A row of feedback, which is untrusted.
            number: row number of the examples.

        Raises:
            UnlearnableError: the row can't become an example.
        """
        if problem := find_feedback_problem(row):
            raise UnlearnableError(problem, code="feedback-unsound")
        objective: ObjectiveName = "completion" if has_positive_answer(row) else "kto"
        rows, _ = rows_from_feedback([Row(number, row)], objective)
        options = replace(self._options, objective=objective, skip_unusable=False)
        try:
            self._chat = self._chat or self._compile()
            examples, _ = build_examples(
                rows, self._tokenizer, self._model, None, options, source="feedback", chat=self._chat
            )
        except BundleError as error:
            self._chat = None
            raise UnlearnableError(printable(as_clause(error.what)), code=error.code) from None
        except DataError as error:
            problems = [problem.removeprefix(f"row {rows[0].number}: ") for problem in error.problems]
            raise UnlearnableError(
                printable("; ".join(problems) or as_clause(error.what)), code=error.code
            ) from None
        if not examples:
            raise UnlearnableError("the chat template renders nothing to train on", code="nothing-to-learn")
        return examples

    def _compile(self) -> ChatTemplate | None:
        return compile_chat_template(self._tokenizer, self._options.date)
