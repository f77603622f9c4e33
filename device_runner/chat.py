"""`prge chat`: a conversation in the terminal with a bundle's model and its adapters."""

from __future__ import annotations

import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from device_runner.session.generation import (
    BASE,
    ChatSettings,
    open_generative_bundle,
    open_generator,
    print_note,
    read_adapter,
    read_adapters,
)
from device_runner.session.memory import watched_memory
from prge.cli.settings import parse_settings
from prge.data.feedback_examples import FeedbackExamples
from prge.data.forms.form import CONTROL_TOKENS
from prge.data.readers.feedback import (
    AnswerRecord,
    Fields,
    adapter_digest,
    append_feedback,
    check_feedback,
    conversation_fields,
    with_leading_space,
)
from prge.data.tokenization.inputs import decode_utf8
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import DataError, PrgeError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.generation.loop import Generator, Request, Ticket
from prge.generation.prompts import Prompt, Prompts
from prge.system.interrupts import handle_signals
from prge.system.terminal import write_text

HELP = """\
/adapter NAME|PATH  continue with another adapter; without a name, list the loaded ones
/base               continue with the model without an adapter
/reset              forget the conversation
/good, /bad         save your rating of the last answer (--feedback FILE)
/better TEXT        save a better answer; the conversation continues from it
/help               show this help
/quit               quit, as does Ctrl-D. Ctrl-C stops an answer
A line that starts with // is sent with one /."""
NO_TEMPLATE = (
    "the model has no chat template: it continues the text of all lines instead of answering; an export "
    "with --chat-template plain adds one"
)
# The current adapter and one that it is compared with keep their caches.
SLOTS = 2


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge chat --help`."""
    settings = parse_settings(ChatSettings, argv, "prge chat", ["bundle"])
    if settings.feedback is not None:
        check_feedback(settings.feedback)
    bundle = open_generative_bundle(settings.bundle)
    tokenizer = load_bundle_tokenizer(bundle)
    prompts = Prompts(tokenizer, control_tokens="text")
    is_chat = prompts.chat is not None  # forks a child, so before the engine starts
    examples = None
    if settings.feedback is not None:  # forks a child too
        examples = FeedbackExamples(tokenizer, bundle.chain.model)
    adapters = read_adapters(settings, bundle)
    generator = open_generator(bundle, tokenizer, settings, SLOTS)
    if not is_chat:
        print_note(NO_TEMPLATE)
    with watched_memory(settings.memory, print_note), _interruptible() as interrupts:
        Chat(settings, bundle, prompts, adapters, generator, interrupts, settings.feedback, examples).run()
    return 0


class Interrupts:
    """Lets Ctrl-C cancel the current answer; without an answer, Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.generator: Generator | None = None
        self.ticket: Ticket | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.generator is None or self.ticket is None:
            raise KeyboardInterrupt
        self.generator.cancel(self.ticket)


@contextmanager
def _interruptible() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    with handle_signals(interrupts.handle, [signal.SIGINT]):
        yield interrupts


class Chat:
    """A conversation: alternating messages of user and assistant, or one growing text without a template."""

    def __init__(
        self,
        settings: ChatSettings,
        bundle: Bundle,
        prompts: Prompts,
        adapters: dict[str, Adapter],
        generator: Generator,
        interrupts: Interrupts,
        feedback: Path | None = None,
        examples: FeedbackExamples | None = None,
    ) -> None:
        self._settings = settings
        self._bundle = bundle
        self._prompts = prompts
        self._adapters = adapters
        self._generator = generator
        self._interrupts = interrupts
        self._name = next(iter(adapters))
        self._turns: list[tuple[str, str]] = []
        self._text = ""
        self._feedback = feedback
        self._examples = examples
        # The last answer, until it is rated.
        self._last_answer: AnswerRecord | None = None

    def run(self) -> None:
        """Read lines from standard input until it ends or a line is /quit."""
        for line in self._lines():
            if line.startswith("/") and not line.startswith("//"):
                if line.split()[0] == "/quit":
                    return
                self._command(line)
            elif line.strip():
                self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _lines(self) -> Iterator[str]:
        """Yield lines of a terminal, with a prompt and line editing, or of a pipe."""
        if not sys.stdin.isatty():
            for line in getattr(sys.stdin, "buffer", sys.stdin):
                try:
                    text = decode_utf8(line, "the line") if isinstance(line, bytes) else line
                except DataError as error:
                    print_note(f"error: {error}")
                else:
                    yield text.rstrip("\r\n")
            return
        with suppress(ImportError):
            import readline  # noqa: F401, input uses it once it is imported
        while True:
            try:
                yield input(f"{self._name}> ")
            except KeyboardInterrupt:
                print_note("\n/quit or Ctrl-D quits, /help shows all commands")
            except UnicodeDecodeError:
                print_note("error: the line is not UTF-8")
            except EOFError:
                print()
                return

    def _command(self, line: str) -> None:
        command, _, word = line.partition(" ")
        word = word.strip()
        if command == "/reset":
            self._turns, self._text, self._last_answer = [], "", None
            print_note("the conversation was cleared")
        elif command in ("/good", "/bad"):
            self._rate(rating=command.removeprefix("/"))
        elif command == "/better":
            self._rate(correction=word)
        elif command == "/base":
            self._switch(BASE)
        elif command == "/adapter" and word:
            self._switch(word)
        elif command == "/adapter":
            print_note(
                ", ".join(f"{name} (speaks)" if name == self._name else name for name in self._adapters)
            )
        else:
            print_note(HELP if command == "/help" else f"unknown command {command}\n{HELP}")

    def _rate(self, rating: str | None = None, correction: str | None = None) -> None:
        """Save the user's rating or correction of the last answer."""
        if self._feedback is None or self._examples is None:
            print_note("feedback is not saved: start with --feedback FILE")
            return
        if self._last_answer is None:
            print_note("there is no answer that you haven't rated yet")
            return
        try:
            row = self._last_answer.to_feedback(rating, correction)
            self._examples.build(row)
            append_feedback(self._feedback, [row])
        except (ValueError, PrgeError) as error:
            print_note(f"not saved: {error}")
            return
        if correction is not None and self._prompts.chat is None:
            self._text = self._last_answer.prompt_fields["prompt"] + with_leading_space(
                correction, self._last_answer.answer
            )
        elif correction is not None:
            self._turns[-1:] = [(self._turns[-1][0], correction)] if self._turns else []
        self._last_answer = None
        print_note(f"saved in {self._feedback}")

    def _switch(self, word: str) -> None:
        """Continue with another adapter, which keeps its name until the end."""
        if word not in self._adapters:
            try:
                name, adapter = read_adapter(self._bundle, word)
            except PrgeError as error:
                print_note(f"error: {error}")
                return
            self._adapters[name] = adapter
            word = name
        self._name = word
        print_note(f"the conversation continues with {word}")

    def _answer(self, line: str) -> None:
        """Let the model answer a line, and remember both."""
        self._last_answer = None
        try:
            prompt = self._prompt(line)
            request = Request(prompt, self._adapters[self._name], self._settings.generation())
            ticket = self._generator.submit(request, lambda text: write_text(sys.stdout, text))
            self._interrupts.generator, self._interrupts.ticket = self._generator, ticket
            try:
                while self._generator.work():
                    pass
            finally:
                self._interrupts.ticket = None
            answer = ticket.wait(0)
        except PrgeError as error:
            print_note(f"error: {error}")
            return
        write_text(sys.stdout, "\n")
        if answer.reason == "context":
            print_note(f"the answer filled the context of {self._generator.engine.context} tokens")
        elif answer.reason == "length":
            print_note(f"the answer stopped after --max-tokens {self._settings.max_tokens}")
        self._remember(line, answer.text)
        if self._prompts.chat is None:
            self._text = f"{self._extended_text(line)}{answer.text}"
        elif answer.text.strip():
            self._turns.append((line, answer.text))

    def _remember(self, line: str, text: str) -> None:
        """Remember an answer for a later rating."""
        if self._feedback is None or not text.strip():
            return
        prompt_fields: Fields = conversation_fields(self._messages(line), self._settings.variables)
        if self._prompts.chat is None:
            prompt_fields = {"prompt": self._extended_text(line), CONTROL_TOKENS: "text"}
        name, settings = self._name, self._settings.generation()
        digest = adapter_digest(self._adapters[name])
        self._last_answer = AnswerRecord(
            f"chat-{uuid.uuid4().hex}", name, digest, prompt_fields, text, settings.facts()
        )

    def _prompt(self, line: str) -> Prompt:
        """Return the prompt after a line; drop the oldest turns that don't fit, if --overflow allows it."""
        if self._prompts.chat is None:
            return self._prompts.encode_text(self._extended_text(line))
        context = self._generator.engine.context
        room = context - min(self._settings.max_tokens, context // 2)
        dropped = 0
        while True:
            prompt = self._prompts.encode_messages(self._messages(line), self._settings.variables)
            if len(prompt.tokens) <= room or self._settings.overflow == "error" or not self._turns:
                break
            self._turns.pop(0)
            dropped += 1
        if dropped:
            print_note(f"dropped {dropped} turns that no longer fit the context of {context} tokens")
        return prompt

    def _messages(self, line: str) -> list[dict[str, str]]:
        system = self._settings.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        for user, assistant in self._turns:
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": assistant})
        return [*messages, {"role": "user", "content": line}]

    def _extended_text(self, line: str) -> str:
        return f"{self._text}\n{line}" if self._text else line
