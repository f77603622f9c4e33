"""Rewards without code: rules with weights, declared in a YAML file.

    rewards:
      - rule: json              # the completion is JSON, and fits the schema if there is one
        schema: {type: object, required: [name]}
      - rule: length            # in words, characters or sentences
        unit: words
        at_most: 20
        weight: 0.5
      - rule: match             # the completion is the text of the row's column
        column: answer

The reward is the mean of the rules' rewards, each 0 or 1, by their weights. It is 1 if all rules hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from prge.cli.field_types import CONVERSION_ERRORS, convert_value, describe_type
from prge.errors import ConfigError, RewardError, format_value
from prge.formats.documents import DocumentError, parse_json, read_yaml
from prge.rewards.reward import MAX_SECONDS
from prge.system.packages import install_extra_command
from prge.system.time_limit import time_limit

# Longest completion that a regular expression searches, in characters.
_MAX_SEARCHED = 10_000
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_SENTENCE_END = re.compile(r"[.!?]+")
UNITS: Mapping[str, Callable[[str], int]] = {
    "words": lambda text: len(text.split()),
    "characters": lambda text: len(text.strip()),
    "sentences": lambda text: sum(1 for part in _SENTENCE_END.split(text)[:-1] if part.strip()),
}


class Rule(Protocol):
    """A condition of completions."""

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """Return whether a completion of a row's prompt meets the condition; raises RewardError."""
        ...


@dataclass(frozen=True)
class Match:
    """The completion is the text of a column, without white space around either."""

    column: str = "answer"
    ignore_case: bool = False

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        texts = [completion.strip(), str(_cell(row, self.column)).strip()]
        return len({text.casefold() if self.ignore_case else text for text in texts}) == 1


@dataclass(frozen=True)
class Regex:
    """A regular expression matches the completion, all of it unless `search` is set."""

    pattern: str
    search: bool = False
    expression: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "expression", re.compile(self.pattern, re.DOTALL))
        except re.error as error:
            raise ValueError(f"pattern {format_value(self.pattern)}: {error}") from None

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        text = completion.strip()[:_MAX_SEARCHED]
        return (self.expression.search if self.search else self.expression.fullmatch)(text) is not None


@dataclass(frozen=True)
class Json:
    """The completion is JSON, which fits a JSON schema if there is one."""

    schema: dict[str, Any] = field(default_factory=dict)
    validator: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.schema:
            object.__setattr__(self, "validator", _validator(self.schema))

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        try:
            value = parse_json(completion.strip())
        except DocumentError:
            return False
        return self.validator is None or _is_valid(value, self.validator)


@dataclass(frozen=True)
class Length:
    """The completion has a number of words, characters or sentences within bounds."""

    unit: str = "words"
    at_least: int = 0
    at_most: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit is {format_value(self.unit)}, must be one of {', '.join(UNITS)}")

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        at_most = math.inf if self.at_most is None else self.at_most
        return self.at_least <= UNITS[self.unit](completion) <= at_most


@dataclass(frozen=True)
class Contains:
    """The completion contains all words, in any case; they are texts or the text of a column."""

    words: list[str] = field(default_factory=list)
    column: str | None = None

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        words = [*self.words, *([str(_cell(row, self.column))] if self.column else [])]
        return all(word.casefold() in completion.casefold() for word in words)


@dataclass(frozen=True)
class Avoids:
    """The completion contains none of the words, in any case."""

    words: list[str]

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        return not any(word.casefold() in completion.casefold() for word in self.words)


@dataclass(frozen=True)
class Number:
    """The last number of the completion is that of a column, within a tolerance."""

    column: str = "answer"
    tolerance: float = 0.0

    def holds(self, completion: str, row: Mapping[str, Any]) -> bool:
        """See Rule."""
        expected = _numbers(str(_cell(row, self.column)))
        if not expected:
            raise RewardError(
                f"Its column {self.column} has no number: {format_value(_cell(row, self.column))}.",
                remedy="Correct the row, or name another column.",
                code="column-without-number",
            )
        numbers = _numbers(completion)
        return bool(numbers) and abs(numbers[-1] - expected[-1]) <= self.tolerance


RULES: Mapping[str, type[Any]] = {
    each.__name__.lower(): each for each in (Match, Regex, Json, Length, Contains, Avoids, Number)
}


@dataclass(frozen=True)
class WeightedRules:
    """Implements Reward with the weighted mean of rules; `seconds` is the CPU time that they may take."""

    rules: Sequence[Rule]
    weights: Sequence[float]
    seconds: float = MAX_SECONDS

    def __call__(self, prompt: Any, completion: str, row: Mapping[str, Any]) -> float:
        """See Reward."""
        pairs = zip(self.rules, self.weights, strict=True)
        try:
            with time_limit(self.seconds):
                held = [weight for rule, weight in pairs if rule.holds(completion, row)]
        except TimeoutError:
            raise RewardError(
                f"The rules did not return within {self.seconds:g} seconds of CPU time.",
                remedy="Simplify their regular expressions: (a+)+ takes time that doubles with every letter.",
                code="reward-too-slow",
            ) from None
        return 1.0 if len(held) == len(self.rules) else math.fsum(held) / math.fsum(self.weights)

    def close(self) -> None:
        """See Reward."""


def read_rules(path: Path) -> WeightedRules:
    """Read the rules of a YAML file; raises ConfigError if they can't be used."""
    try:
        content = read_yaml(path)
    except (OSError, DocumentError) as error:
        raise _error(path, [str(error)]) from None
    entries = content.get("rewards") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise _error(path, ["it must have the key rewards, with a list of rules, and no other key"])
    rules, weights, problems = list[Rule](), list[float](), []
    for number, entry in enumerate(entries, 1):
        try:
            rule, weight = _rule(entry)
        except ValueError as error:
            problems.append(f"rule {number}: {error}")
            continue
        rules.append(rule)
        weights.append(weight)
    if problems:
        raise _error(path, problems)
    return WeightedRules(rules, weights)


def _rule(entry: object) -> tuple[Rule, float]:
    """Return the rule of an entry, and its weight; raises ValueError."""
    named = entry.get("rule") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or not isinstance(named, str) or named not in RULES:
        raise ValueError(f"rule is {format_value(named)}, must be one of {', '.join(RULES)}")
    values = dict(entry)
    rule_type, weight = RULES[values.pop("rule")], _weight(values.pop("weight", 1.0))
    settings = {item.name: item for item in fields(rule_type) if item.init}
    if unknown := sorted(map(str, values.keys() - settings.keys())):
        raise ValueError(f"{', '.join(unknown)} is not one of its keys {', '.join(settings)}")
    hints = _hints(rule_type)
    for name, value in values.items():
        try:
            values[name] = value if name == "schema" else convert_value(value, hints[name])
        except CONVERSION_ERRORS:
            needed = describe_type(hints[name])
            raise ValueError(f"{name} is {format_value(value)}, must be {needed}") from None
    for name, item in settings.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"it has no {name}")
    rule: Rule = rule_type(**values)
    return rule, weight


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"weight is {format_value(value)}, must be a number above 0")
    return float(value)


def _hints(rule_type: type[Any]) -> dict[str, Any]:
    from typing import get_type_hints

    return get_type_hints(rule_type)


def _validator(schema: object) -> Any:
    """Return a validator of a JSON schema; raises ValueError if it is none."""
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
    except ImportError:
        raise ValueError(f"schema needs the package jsonschema: {install_extra_command('reward')}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"schema is {format_value(schema)}, must be a JSON schema")
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError(f"$schema of the schema is {format_value(schema['$schema'])}, must be a text")
    validator_type = validator_for(schema)
    try:
        validator_type.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema is not a JSON schema: {error.message}") from None
    # With a registry, nothing is fetched from the network.
    return validator_type(schema, registry=REGISTRY)


def _is_valid(value: object, validator: Any) -> bool:
    """Return whether a value fits a JSON schema; raises RewardError if a $ref can't be resolved."""
    from referencing.exceptions import Unresolvable

    try:
        return bool(validator.is_valid(value))
    except (Unresolvable, RecursionError) as error:
        raise RewardError(
            f"The schema of a rule refers to what it does not contain, or to itself: {error}.",
            remedy="Correct the $ref in the schema.",
            code="schema-reference",
        ) from None


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise RewardError(
            f"It has no column {column}; its columns are {', '.join(map(str, row))}.",
            remedy="Name another column in the rules, or add it to the rows.",
            code="column-missing",
        )
    value = row[column]
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _numbers(text: str) -> list[float]:
    """Return the numbers of a text in order; commas between digits are left out."""
    return [float(match.replace(",", "")) for match in _NUMBER.findall(text)]


def _error(path: Path, problems: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{path} can't be used as a reward:",
        problems,
        remedy="Write a list of rules, such as: rewards: [{rule: length, unit: words, at_most: 20}]",
        code="reward-unusable",
    )
