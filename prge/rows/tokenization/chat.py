"""Chat templates: messages to the text that a model was trained on, and which characters are learnt.

A template comes with the model and is untrusted: it runs in jinja2's immutable sandbox, in the environment
that transformers documents for chat templates (trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, the `generation` tag), so that it renders the same text. It does so in a child process with
bounds of time and memory, because a template can loop, grow and nest without end, and without a right to
files, network and programs, because the sandbox may have a hole.

What a template renders depends on the messages, its variables and one date, never on the clock or on chance.
"""

from __future__ import annotations

import contextlib
import encodings.unicode_escape  # noqa: F401 (jinja2 asks for these once a template does: the child couldn't)
import json
import random
import textwrap  # noqa: F401
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, constants, debug, meta, nodes  # noqa: F401
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prge.errors import BundleError, DataError, shown
from prge.host.children import BoundedChild, LimitError
from prge.rows.tokenization.inputs import checked_json

ASSISTANT = "assistant"
# Of a row of up to a few kilobytes; longer ones have proportionally more.
SECONDS = 5.0
MEMORY = 256 << 20
MOST_SOURCE = 1_000_000
TEXT_PER_BYTE = 10
# What a template is always given; no column of a row may stand for it.
RESERVED = frozenset({"messages", "add_generation_prompt"})
# Keys of a message that say whether it is learnt; a template doesn't see them.
_FLAGS = ("weight", "train")
# Names under which data sets have what the assistant thought; templates read the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What an answer may have besides its content.
_OF_ANSWERS = ("tool_calls", *_REASONING)
# Noncharacters of Unicode: some that the request doesn't have stand around what a template generates.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_WORD = "word"
Message = Mapping[str, Any]
Variables = Mapping[str, Any]
NO_VARIABLES: Variables = MappingProxyType({})


@dataclass(frozen=True)
class Rendering:
    """A conversation as text.

    Attributes:
        text: of the messages up to the last one that is learnt.
        turns: indices of the messages that are learnt of this text.
        spans: characters [start, end) that are learnt, in order.
        is_tagged: whether the template's `generation` tag says what is learnt.
        is_exact: false where a turn as rendered doesn't begin with the generation prompt; what both have in
            common is not learnt then.
    """

    text: str
    turns: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    is_tagged: bool
    is_exact: bool


class Generation(Extension):
    """The `generation` tag around what the assistant writes: renders its body between two marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)
    marks = "", ""
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        """A block that calls `marked` with the statements up to `endgeneration`."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Any) -> str:
        """The body's text between the marks."""
        start, end = self.marks
        return f"{start}{caller()}{end}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes characters for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: in Jinja.
        special_tokens: those that it may name (`bos_token`, `eos_token`, ...).
        date: day that the template takes for today, at midnight, in ISO 8601; None: that on which it renders.

    Attributes:
        variables: names that the template reads beyond the messages, `tools` and `enable_thinking` say.

    Raises:
        BundleError: the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], date: str | None = None) -> None:
        if len(source) > MOST_SOURCE:
            problem = f"has {len(source)} characters, at most {MOST_SOURCE} are read"
            raise _refused(problem, "chat-template-too-large")
        self._date = date
        self._child = BoundedChild(_Renderer(), SECONDS, MEMORY)
        answer = self._ask(source=source, special_tokens=dict(special_tokens))
        self.variables = frozenset(answer["variables"])

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        variables: Variables = NO_VARIABLES,
    ) -> str:
        """Text of a conversation, up to where the assistant begins to write with `add_generation_prompt`.

        Raises:
            DataError: the template refuses the messages.
            BundleError: it takes more than the bounds of time, memory or text.
        """
        answer = self._ask(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            variables=dict(variables),
            date=self._today(),
        )
        return str(answer["text"])

    def renderings(
        self,
        messages: Sequence[Message],
        learnt: Collection[int] | None = None,
        variables: Variables = NO_VARIABLES,
    ) -> list[Rendering]:
        """A conversation as texts that are learnt: one, or several where turns are rendered in several ways.

        A turn is what the text of the messages up to it has beyond the text of the messages before it with
        the generation prompt, closing tokens included. Turns share a text as long as the template renders
        the earlier one as if nothing followed it. A template with the `generation` tag says itself what the
        assistant wrote: its conversations are one text.

        Args:
            messages: of the conversation.
            learnt: indices of messages to learn; None: all that the assistant wrote and no flag excludes.
            variables: that the template is given, `tools` among them.

        Raises:
            DataError: the template refuses the messages, or what it writes of a turn can't be told.
            BundleError: it takes more than the bounds of time, memory or text.
        """
        chosen = learnt_turns(messages) if learnt is None else sorted(learnt)
        answer = self._ask(
            messages=list(messages), learnt=chosen, variables=dict(variables), date=self._today()
        )
        return [
            Rendering(
                each["text"],
                tuple(each["turns"]),
                tuple((start, end) for start, end in each["spans"]),
                each["is_tagged"],
                each["is_exact"],
            )
            for each in answer["renderings"]
        ]

    def left_out(self, messages: Sequence[Message], variables: Variables = NO_VARIABLES) -> list[str]:
        """What the template renders nothing of: keys of the assistant's messages, and roles.

        Raises:
            DataError: the template refuses the messages.
            BundleError: it takes more than the bounds of time, memory or text.
        """
        roles = {message["role"] for message in messages} - {ASSISTANT, "user"}
        if not roles and not any(message.get(name) for message in messages for name in _OF_ANSWERS):
            return []
        answer = self._ask(
            messages=list(messages), roles=sorted(roles), variables=dict(variables), date=self._today()
        )
        return [str(name) for name in answer["left_out"]]

    def _today(self) -> str:
        return self._date or date.today().isoformat()

    def _ask(self, **request: Any) -> dict[str, Any]:
        request = checked_json(request, "what the chat template is given")
        try:
            answer: dict[str, Any] = json.loads(self._child.ask(json.dumps(request).encode()))
        except LimitError as error:
            raise _refused(str(error), "chat-template-unbounded") from None
        if "refused" in answer:
            raise _refused(answer["refused"], answer["code"])
        if "problems" in answer:
            raise DataError(answer["what"], answer["problems"], remedy=answer["remedy"], code=answer["code"])
        try:
            for each in (answer, *answer.get("renderings", ())):
                each.get("text", "").encode()
        except UnicodeEncodeError:
            raise _refused("writes half of a character", "half-character") from None
        return answer


def _refused(why: str, code: str) -> BundleError:
    what, remedy = f"the bundle's chat template {why}", "copy or export the bundle again"
    return BundleError(what, remedy=remedy, code=code)


class _Renderer:
    """The child's side: compiles the source of its first request, and renders the messages of the others."""

    def __init__(self) -> None:
        self._template: Any = None
        self._tag: Any = None
        self._source = ""
        self._special_tokens: dict[str, str] = {}
        self._variables: dict[str, Any] = {}
        self._today = datetime.min
        self._room = 0
        self._contents: str | None = None

    def __call__(self, content: bytes) -> bytes:
        """The answer to a request, both JSON."""
        request: dict[str, Any] = json.loads(content)
        self._room = TEXT_PER_BYTE * len(content) + MOST_SOURCE
        try:
            answer = self._answer(request)
        except DataError as error:
            answer = {
                "what": error.what.split("\n")[0],
                "problems": error.problems,
                "remedy": error.remedy,
                "code": error.code,
            }
        except BundleError as error:
            answer = {"refused": error.what, "code": error.code}
        return json.dumps(answer).encode()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "source" in request:
            self._special_tokens = request["special_tokens"]
            return {"variables": self._compile(request["source"])}
        self._variables = request["variables"]
        self._today = datetime.fromisoformat(request["date"])
        messages = request["messages"]
        if "roles" in request:
            return {"left_out": self._left_out(messages, request["roles"])}
        if "learnt" in request:
            return {"renderings": self._renderings(messages, request["learnt"])}
        return {"text": self._render(messages, request["add_generation_prompt"])}

    def _compile(self, source: str) -> list[str]:
        """The template's variables beyond what all templates are given."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: self._today.strftime(layout)
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except MemoryError:
            raise
        except Exception as error:  # also RecursionError and what Python's own compiler says
            raise BundleError(f"can't be read: {error}", code="chat-template-damaged") from None
        self._source = source
        self._tag = environment.extensions[Generation.identifier]
        return sorted(names - environment.globals.keys() - self._special_tokens.keys() - RESERVED)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text alone."""
        return self._marked(messages, add_generation_prompt)[0]

    def _marked(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters of it that the `generation` tag encloses."""
        if self._contents is None:
            self._contents = self._contents_read()
        text = self._rendered([self._as_read(each) for each in messages], add_generation_prompt)
        spans: list[tuple[int, int]] = []
        if self._tag.is_used:
            first, *parts = text.split(self._tag.marks[0])
            text = first
            for part in parts:
                inside, _, after = part.partition(self._tag.marks[1])
                spans += [(len(text), len(text) + len(inside))] if inside else []
                text += inside + after
        if len(text) > self._room:
            raise BundleError(
                f"makes {len(text)} characters of a row, at most {self._room} are taken",
                code="chat-template-unbounded",
            )
        return text, spans

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """What the template writes, marks included."""
        if self._tag.is_used:
            known = json.dumps([messages, self._variables], ensure_ascii=False) + self._source
            free = [mark for mark in _MARKS if mark not in known]
            if len(free) < 2:
                raise BundleError(
                    "is given messages that have every noncharacter of Unicode", code="chat-template-marks"
                )
            self._tag.marks = free[0], free[1]
        # A template may draw: `random`, `lipsum`.
        random.seed(0)
        try:
            text: str = self._template.render(
                **{"tools": None, "documents": None, **self._special_tokens, **self._variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        # A template is a program of its own: any error in it is about these messages.
        except Exception as error:
            raise DataError(
                "the chat template refuses the messages",
                [str(error) or type(error).__name__],
                code="messages-refused",
            ) from None
        return text

    def _contents_read(self) -> str:
        """How the template reads contents: `text`, `parts` of type text, or `both`."""
        found = []
        for content in (_WORD, _parts_of(_WORD)):
            try:
                found.append(self._rendered([{"role": "user", "content": content}], False))
            except DataError:
                found.append("")
        text, parts = found
        if text == parts and text:
            return "both"
        return "parts" if _WORD in parts and _WORD not in text else "text"

    def _as_read(self, message: Message) -> dict[str, Any]:
        """A message as templates expect it: without nulls, reasoning under its usual names."""
        made = {name: value for name, value in message.items() if value is not None and name not in _FLAGS}
        reasoning = next((made[name] for name in _REASONING if name in made), None)
        if reasoning is not None:
            made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
        content = made.get("content")
        if isinstance(content, list) and self._contents == "text":
            made["content"] = content_text(content)
        if isinstance(content, str) and self._contents == "parts":
            made["content"] = _parts_of(content)
        return made

    def _renderings(self, messages: Sequence[Message], learnt: Sequence[int]) -> list[dict[str, Any]]:
        if self._tag.is_used:
            return [self._tagged(messages, learnt)]
        through: dict[int, str] = {}
        starts: dict[int, int] = {}
        is_exact: dict[int, bool] = {}
        problem: DataError | None = None
        for index in learnt:
            try:
                text = self._render(messages[: index + 1])
            except DataError as error:  # a template may refuse a chat that ends there
                problem = problem or error
                continue
            through[index], starts[index], is_exact[index] = self._turn(messages, index, text)
        if problem is not None and (not through or max(learnt) not in through):
            raise problem
        made = []
        rest = list(through)
        while rest:
            text = through[rest[-1]]
            turns = [index for index in rest if text.startswith(through[index])]
            rest = [index for index in rest if index not in turns]
            made.append(
                {
                    "text": text,
                    "turns": turns,
                    "spans": [(starts[index], len(through[index])) for index in turns],
                    "is_tagged": False,
                    "is_exact": all(is_exact[index] for index in turns),
                }
            )
        return made[::-1]

    def _turn(self, messages: Sequence[Message], index: int, through: str) -> tuple[str, int, bool]:
        """The text up to a turn, where the turn begins in it, and whether all of the prompt precedes it.

        Args:
            messages: of the conversation.
            index: of the message.
            through: what the template makes of the messages up to it.
        """
        before = None  # templates read the first message without asking whether there is one
        if index:
            with contextlib.suppress(DataError):  # a template may want a question first
                before = self._render(messages[:index], True)
        if before is not None and through.startswith(before):
            return through, len(before), True
        header = self._header()
        content = content_text(messages[index].get("content")).strip()
        end = through.rfind(content) if content else -1
        if before is not None:
            common = _common(before, through)
            if len(before) - common < len(header):
                return through, min(common, end) if end >= 0 else common, False
        # A turn may have only a part of the generation prompt; that is no chance if it is most of it.
        sizes = range(len(header), len(header) // 2, -1)
        limit = end if end >= 0 else len(through)
        size = next((size for size in sizes if through.rfind(header[:size], 0, limit) >= 0), 0)
        start = through.rfind(header[:size], 0, limit) + size if size else -1
        if start < 0 and end >= 0:
            start = len(through[:end].rstrip())
        if start >= 0 and before is not None:
            # The template renders a question otherwise once it is answered: the prompt's way is learnt.
            return before + through[start:], len(before), True
        if start >= 0:
            return through, start, size == len(header)
        raise DataError(
            "the chat template can't be used for this conversation",
            [f"where message {index + 1} begins can't be told from its text"],
            remedy="begin the conversation with a question, or give that message the weight 0",
            code="turns-not-separable",
        )

    def _header(self) -> str:
        """What the generation prompt adds to a question; empty where that can't be told."""
        asked = [{"role": "user", "content": _WORD}]
        try:
            without, with_prompt = self._render(asked), self._render(asked, True)
        except DataError:
            return ""
        return with_prompt[_common(without, with_prompt) :]

    def _left_out(self, messages: Sequence[Message], roles: Sequence[str]) -> list[str]:
        """Keys of answers and roles without which the text is the same."""
        text = self._render(messages)
        found = []
        for role in roles:
            others = [message for message in messages if message["role"] != role]
            if others and self._is_same(text, others):
                found.append(f"messages of the role {role}")
        for index, message in enumerate(messages):
            for name in _OF_ANSWERS if message["role"] == ASSISTANT else ():
                if message.get(name) and name not in found:
                    shorter = {key: value for key, value in message.items() if key != name}
                    whole = self._tried(messages[: index + 1])
                    if whole is not None and self._is_same(whole, [*messages[:index], shorter]):
                        found.append(name)
        return found

    def _is_same(self, text: str, messages: Sequence[Message]) -> bool:
        return self._tried(messages) == text

    def _tried(self, messages: Sequence[Message]) -> str | None:
        """The text of messages; None where the template refuses them."""
        try:
            return self._render(messages)
        except DataError:
            return None

    def _tagged(self, messages: Sequence[Message], learnt: Sequence[int]) -> dict[str, Any]:
        """The whole conversation, of which the template's `generation` tags enclose what is learnt."""
        text, spans = self._marked(messages)
        written = [index for index, each in enumerate(messages) if each.get("role") == ASSISTANT]
        if list(learnt) != written:
            ends = [0, *(len(self._marked(messages[: index + 1])[1]) for index in written)]
            if ends[-1] != len(spans) or ends != sorted({*ends}):
                raise DataError(
                    "the chat template can't be used for this conversation",
                    ["its generation tags don't tell which message they enclose, and not all are learnt"],
                    remedy="make one row of the messages up to each assistant turn that is to be learnt",
                    code="turns-not-separable",
                )
            chosen = [number for number, index in enumerate(written) if index in set(learnt)]
            spans = [span for number in chosen for span in spans[ends[number] : ends[number + 1]]]
        return {"text": text, "turns": list(learnt), "spans": spans, "is_tagged": True, "is_exact": True}


def content_text(content: object) -> str:
    """The text of a message's content: a text, parts of type text, or none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _common(first: str, second: str) -> int:
    """With how many characters alike two texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _parts_of(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def learnt_turns(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant's messages but those of `weight` 0, as in OpenAI's rows, or `train` false."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == ASSISTANT
        and message.get("weight") != 0
        and message.get("train") not in (False, 0)
    ]


def check_messages(messages: object, *, answered: bool = True) -> list[Message]:
    """The messages of a row, without keys that are null; raises ValueError saying what they lack.

    Args:
        messages: what the row has.
        answered: whether there must be an answer to learn, or be one to make.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    made = [_checked(index, message) for index, message in enumerate(messages, 1)]
    if not answered and made[-1]["role"] == ASSISTANT:
        raise ValueError("the last message is the assistant's: there is nothing to answer")
    if answered and not any(message["role"] == ASSISTANT for message in made):
        raise ValueError(f"no message has the role {ASSISTANT!r}: there is nothing to learn from")
    if answered and not learnt_turns(made):
        raise ValueError("every answer has the weight 0, or train false: there is nothing to learn from")
    return made


def _checked(index: int, message: object) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} has no role")
    made = {name: value for name, value in message.items() if value is not None}
    where, content = f"message {index} ({made['role']})", made.get("content")
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"{where} has a part of the type {shown(kind)}: only texts are read")
    elif not isinstance(content, str) and (content is not None or made.keys() <= {"role", *_FLAGS}):
        raise ValueError(f"{where} has no content that is text")
    for name in _FLAGS:
        if not isinstance(made.get(name, 1), bool | int | float):
            kinds = "0 or 1" if name == "weight" else "true or false"
            raise ValueError(f"{where} has the {name} {shown(made[name])}, must be {kinds}")
    return made
