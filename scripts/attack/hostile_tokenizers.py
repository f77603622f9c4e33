"""Mutations of a valid tokenizer.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

_Json = dict[str, Any]
_BACKTRACKING = ["(a+)+$", "(a|a)*b", "(?=(a+))a*b\\1", "((((a*)*)*)*)*b", "[", "(?<", "\\p{Nothing}", ""]
_IDS = [-1, 2**31, 2**32, 2**32 - 1, 2**63, 10**30, 1.5, True, None, "5"]
_COUNTS = [0, 1, -1, 2**20, 2**32, 2**40, 2**63 - 1]


def _deep(component_type: str, part: str, within: str) -> Callable[[_Json, Random], None]:
    """Return a mutation that nests a component far too deep."""

    def change(tokenizer: _Json, random: Random) -> None:
        inner: Any = tokenizer[part]
        for _ in range(random.choice([10, 100, 300])):
            inner = {"type": component_type, within: [inner] if inner else []}
        tokenizer[part] = inner

    return change


def _of(part: str, *values: Any) -> Callable[[_Json, Random], None]:
    """Return a mutation that replaces a component."""

    def change(tokenizer: _Json, random: Random) -> None:
        tokenizer[part] = copy.deepcopy(random.choice(values))

    return change


def _id(tokenizer: _Json, random: Random) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[random.choice([*vocabulary])] = random.choice(_IDS)


def _added(tokenizer: _Json, random: Random) -> None:
    token = copy.deepcopy(random.choice(tokenizer["added_tokens"]))
    token["id"] = random.choice(_IDS)
    token["content"] = random.choice([token["content"], "", "x", "a" * 100_000, "\0", "\ufffd", None])
    tokenizer["added_tokens"].insert(random.randint(0, 4), token)


def _many_added(tokenizer: _Json, random: Random) -> None:
    token = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**token, "id": 1000 + number, "content": f"t{number}"} for number in range(20_000)
    ]


def _merges(tokenizer: _Json, random: Random) -> None:
    odd = [["a", "nothing"], ["a"], ["", ""], "a a a", "a", None, ["a", "a", "a"], ["\0", "b"]]
    tokenizer["model"]["merges"].insert(0, random.choice(odd))


def _long_token(tokenizer: _Json, random: Random) -> None:
    tokenizer["model"]["vocab"]["a" * random.choice([10**5, 10**7])] = len(tokenizer["model"]["vocab"])


def _model(tokenizer: _Json, random: Random) -> None:
    words = tokenizer["model"]["vocab"]
    pairs = [[word, -1.0] for word in words]
    tokenizer["model"] = random.choice(
        [
            {"type": "Unigram", "unk_id": random.choice([*_IDS, 0, len(words)]), "vocab": pairs},
            {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", 1e308], ["a", -1e308]]},
            {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": True},
            {"type": "WordLevel", "vocab": words, "unk_token": "nothing"},
            {"type": "WordPiece", "vocab": words, "unk_token": "nothing", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": random.choice(_COUNTS)},
            {**tokenizer["model"], "dropout": random.choice([-1, 0.5, 1.0, 2, 1e308])},
            {**tokenizer["model"], "unk_token": "nothing", "fuse_unk": True},
            {**tokenizer["model"], "vocab": {}, "merges": []},
            {"type": "Nothing"},
        ]
    )  # fmt: skip


def _padding(tokenizer: _Json, random: Random) -> None:
    tokenizer["padding"] = {
        "strategy": random.choice(["BatchLongest", {"Fixed": random.choice(_COUNTS)}]),
        "direction": random.choice(["Right", "Left"]),
        "pad_to_multiple_of": random.choice([None, *_COUNTS]),
        "pad_id": random.choice([0, *_IDS]),
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }


def _truncation(tokenizer: _Json, random: Random) -> None:
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": random.choice(_COUNTS),
        "strategy": random.choice(["LongestFirst", "OnlySecond"]),
        "stride": random.choice(_COUNTS),
    }


def _template_parts(tokenizer: _Json, random: Random) -> None:
    special = {"id": "x", "ids": [random.choice(_IDS)], "tokens": ["x"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}]
    known = random.choice(
        [{"x": special}, {}, {"x": {**special, "ids": [5] * 10**5, "tokens": ["x"] * 10**5}}]
    )
    processor = {
        "type": "TemplateProcessing",
        "single": single * random.choice([1, 1000]),
        "special_tokens": known,
    }
    tokenizer["post_processor"] = {**processor, "pair": tokenizer["post_processor"]["pair"]}


def _regex(tokenizer: _Json, random: Random) -> None:
    pattern = {"Regex": random.choice(_BACKTRACKING)}
    tokenizer["pre_tokenizer"] = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }
    if random.random() < 0.5:
        tokenizer["normalizer"] = {
            "type": "Replace",
            "pattern": pattern,
            "content": "a" * random.choice([0, 1, 10**6]),
        }


def _none(tokenizer: _Json, random: Random) -> None:
    tokenizer[random.choice([*tokenizer])] = random.choice([None, 5, "", [], {}])


_NORMALIZERS = (
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////w" + "A" * 1000},
    {"type": "Prepend", "prepend": "a" * 10**7},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 10**5}] * 300},
    *({"type": "Replace", "pattern": {"String": string}, "content": "a" * 10**4} for string in ("", "a")),
    {"type": "Nothing"},
)
_DECODERS = (
    None,
    {"type": "Fuse"},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a" * 10**6},
    {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**63},
)
MUTATIONS: dict[str, Callable[[_Json, Random], None]] = {
    "ids": _id,
    "added tokens": _added,
    "many added tokens": _many_added,
    "merges": _merges,
    "a long token": _long_token,
    "another model": _model,
    "padding": _padding,
    "truncation": _truncation,
    "pieces of a template": _template_parts,
    "regular expressions": _regex,
    "normalizers": _of("normalizer", *_NORMALIZERS),
    "normalizers within normalizers": _deep("Sequence", "normalizer", "normalizers"),
    "splits within splits": _deep("Sequence", "pre_tokenizer", "pretokenizers"),
    "decoders within decoders": _deep("Sequence", "decoder", "decoders"),
    "decoders": _of("decoder", *_DECODERS),
    "parts that are none": _none,
}


def change_tokenizer(path: Path, random: Random) -> str:
    """Change a tokenizer.json and return the name of the mutation."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    name = random.choice([*MUTATIONS])
    MUTATIONS[name](tokenizer, random)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return name
