"""Examples of feedback, one row at a time: a row that can't be learnt says why, and holds up no other row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prge.errors import BundleError, DataError, printable
from prge.learning.examples import Example
from prge.learning.preferences import ObjectiveName
from prge.model_spec import ModelSpec
from prge.rows.build_options import BuildOptions
from prge.rows.example_building import build_examples
from prge.rows.forms.feedback_rows import can_be_learnt, rows_of_feedback
from prge.rows.readers.feedback import Fields, problem_of
from prge.rows.readers.files import Row
from prge.rows.tokenization.tokenizer import Tokenizer, compile_chat_template

if TYPE_CHECKING:
    from prge.rows.tokenization.chat import ChatTemplate


class UnlearnableError(DataError):
    """A row of feedback that can't become an example; `problem` says why."""

    def __init__(self, problem: str, *, code: str) -> None:
        super().__init__(f"the feedback can't be learnt: {problem}", [], code=code)
        self.problem = problem


class FeedbackExamples:
    """Builds the examples of single rows of feedback; used by one thread at a time.

    The chat template runs in a child process that is forked here, so create this before an engine computes. A
    row that ends the child, because its template takes too much time or memory, costs the next row a new one.

    Args:
        tokenizer: of this object alone.
        model: of the bundle.
        options: how rows become examples; the objective follows from the row.

    Raises:
        BundleError: the tokenizer's chat template is damaged.
        DataError: it has one, and jinja2 isn't installed.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelSpec, options: BuildOptions | None = None) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._options = options or BuildOptions(overflow="auto")
        self._chat = self._compiled()

    def of(self, row: Fields, number: int = 1) -> list[Example]:
        """The examples of a row: of what should be answered, or of a bad answer as one that is disliked.

        Args:
            row: of feedback, which anybody may have written.
            number: that the examples have.

        Raises:
            UnlearnableError: it can't be learnt.
        """
        if problem := problem_of(row):
            raise UnlearnableError(problem, code="feedback-unsound")
        objective: ObjectiveName = "completion" if can_be_learnt(row) else "kto"
        rows, _ = rows_of_feedback([Row(number, row)], objective)
        options = replace(self._options, objective=objective, skip_unusable=False)
        try:
            self._chat = self._chat or self._compiled()
            examples, _ = build_examples(
                rows, self._tokenizer, self._model, None, options, source="feedback", chat=self._chat
            )
        except BundleError as error:
            self._chat = None
            raise UnlearnableError(printable(error.what), code=error.code) from None
        except DataError as error:
            problems = [problem.removeprefix(f"row {rows[0].number}: ") for problem in error.problems]
            raise UnlearnableError(printable("; ".join(problems) or error.what), code=error.code) from None
        if not examples:
            raise UnlearnableError("nothing of it is learnt by the chat template", code="nothing-to-learn")
        return examples

    def _compiled(self) -> ChatTemplate | None:
        return compile_chat_template(self._tokenizer, self._options.date)
