"""Task files: the prompt of each task on a hand-made row, templates, filters, labels, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prge.data.columns import RowError
from prge.data.forms.task import Generate, Task, Template, load_task, parse_task, task_names
from prge.errors import ConfigError
from tests.refusals import raises

TEXTS = {"passage": "Ann lives in Rome. ", "question": "Where does Ann live?", "title": "Ann_of_Rome"}

# task: a row, its prompt, the continuation for each candidate (or the first answer), the correct index
GOLDEN: dict[str, tuple[dict[str, Any], str, list[str], int]] = {
    "sst2": (
        {"sentence": "a gem of a film ", "label": "1"},
        "a gem of a film It was",
        [" terrible", " great"],
        1,
    ),
    "rte": (
        {"premise": "Ann sings.", "hypothesis": "Ann is silent.", "label": 1},
        'Ann sings.\nQuestion: does this mean that "Ann is silent" is true? Yes or No?\nAnswer:',
        [" Yes", " No"],
        1,
    ),
    "cb": (
        {"premise": "I think Ann sings.", "hypothesis": "Ann sings", "label": 2},
        'Suppose the following: I think Ann sings.\nQuestion: can it be inferred that "Ann sings"? '
        "Yes, No or Maybe?\nAnswer:",
        [" Yes", " No", " Maybe"],
        2,
    ),
    "boolq": (
        {"passage": "Ann sings.", "question": "does ann sing", "label": True},
        "Ann sings.\nDoes ann sing? Yes or No?\nAnswer:",
        [" No", " Yes"],
        1,
    ),
    "wsc": (
        {"text": "Ann said that She sings.", "span1_text": "Ann", "span2_text": "She", "label": 1},
        'Ann said that She sings.\nQuestion: in this text, does the pronoun "she" refer to Ann? '
        "Yes or No?\nAnswer:",
        [" No", " Yes"],
        1,
    ),
    "wic": (
        {"word": "bank", "sentence1": "The bank closed.", "sentence2": "A river bank.", "label": 0},
        "Sentence 1: The bank closed.\nSentence 2: A river bank.\n"
        'Question: does the word "bank" have the same meaning in both sentences? Yes or No?\nAnswer:',
        [" No", " Yes"],
        0,
    ),
    "multirc": (
        {"paragraph": "Ann sings.", "question": "Who sings?", "answer": "Ann", "label": 1},
        'Ann sings.\nQuestion: Who sings?\nSuggested answer: "Ann". Is this answer correct? '
        "Yes or No?\nAnswer:",
        [" No", " Yes"],
        1,
    ),
    "copa": (
        {
            "premise": "Ann fell.",
            "question": "cause",
            "choice1": "She slipped.",
            "choice2": "It rained.",
            "label": 0,
        },
        "Ann fell because",
        [" she slipped.", " it rained."],
        0,
    ),
    "record": (
        {
            "passage": "Ann met Bob.\n@highlight\nThey sang",
            "query": "Later @placeholder left the town.",
            "entities": ["Ann", "Bob", "Ann"],
            "answers": ["Bob"],
        },
        "Ann met Bob.\nThey sang\nLater",
        [" Ann left the town.", " Bob left the town."],
        1,
    ),
    "squad": (
        {"title": TEXTS["title"], "context": TEXTS["passage"], "question": TEXTS["question"]}
        | {"answers": {"text": ["Rome", "in Rome", "Rome"], "answer_start": [13, 10, 13]}},
        "Title: Ann of Rome\nContext: Ann lives in Rome.\nQuestion: Where does Ann live?\nAnswer:",
        [" Rome"],
        0,
    ),
    "drop": (
        {"passage": TEXTS["passage"], "question": TEXTS["question"]}
        | {"answers_spans": {"spans": ["Rome"], "types": ["span"]}},
        "Passage: Ann lives in Rome.\nQuestion: Where does Ann live?\nAnswer:",
        [" Rome"],
        0,
    ),
    "trec": (
        {"text": "Who sings ?", "coarse_label": 3},
        "Question: Who sings ?\nThe answer is of the type",
        [" Abbreviation", " Entity", " Description", " Human", " Location", " Number"],
        3,
    ),
}

ENCODER_TEXTS = {
    "sst2": "a gem of a film",
    "boolq": "Does ann sing? Ann sings.",
    "wsc": "Ann said that She sings. she: Ann",
    "trec": "Who sings ?",
}


def test_every_task_has_a_golden_row() -> None:
    assert set(GOLDEN) == set(task_names())


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_prompt(name: str) -> None:
    row, prompt, following, label = GOLDEN[name]
    task = load_task(name)
    assert task.name == name
    assert task.prompt(row) == prompt
    if task.is_completion:
        assert task.join(prompt, task.answers(row)[0]) == following[0]
    else:
        result = [task.candidate_text(prompt, each, row) for each in task.candidates(row)]
        assert result == following
        assert task.label(row) == label
    assert set(task.needed_columns()) <= set(row)


@pytest.mark.parametrize("name", sorted(ENCODER_TEXTS))
def test_encoders_read_the_text_alone(name: str) -> None:
    assert load_task(name).encoder_text(GOLDEN[name][0]) == ENCODER_TEXTS[name]


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_task_files_document_their_columns(name: str) -> None:
    import prge.data.forms.task

    head = (prge.data.forms.task.TASKS / f"{name}.yaml").read_text().split("name:")[0]
    assert "# Columns: " in head and "# Source: " in head
    assert all(column in head for column in load_task(name).needed_columns())


def test_answers_of_squad() -> None:
    row = GOLDEN["squad"][0]
    assert load_task("squad").answers(row) == ("Rome", "in Rome")


def test_label_words_may_bring_their_own_space() -> None:
    task = parse_task({"name": "a", "template": "{text} It was", "label_words": {0: " bad", 1: " good"}}, "a")
    assert [task.join("It was", word) for word in task.label_words.values()] == [" bad", " good"]
    assert task.join("It was\n", "bad") == "bad"


@pytest.mark.parametrize(
    ("keys", "value", "index"),
    [
        ((0, 1), "1", 1),
        ((0, 1), 1, 1),
        ((0, 1), True, 1),
        ((False, True), "True", 1),
        (("neg", "pos"), "neg", 0),
        (("neg", "pos"), "Pos ", 1),
    ],
)
def test_labels_as_files_write_them(keys: tuple[Any, Any], value: Any, index: int) -> None:
    label_words = dict(zip(keys, ("bad", "good"), strict=True))
    assert (
        parse_task({"name": "a", "template": "{t}", "label_words": label_words}, "a").label({"label": value})
        == index
    )


def test_label_of_choices_by_index_or_column() -> None:
    task = load_task("copa")
    row = GOLDEN["copa"][0]
    assert task.label({**row, "label": "1"}) == 1
    assert task.label({**row, "label": "choice2"}) == 1


@pytest.mark.parametrize(
    ("name", "change", "code", "value"),
    [
        ("sst2", {"label": "2"}, "label-unknown", "'2'"),
        ("sst2", {"label": None}, "column-empty", "'label'"),
        ("sst2", {"sentence": ["a"]}, "column-not-text", "'sentence'"),
        ("copa", {"question": "why"}, "value-unknown", "'why'"),
        ("copa", {"label": 2}, "label-unknown", "2"),
        ("record", {"entities": ["Ann"]}, "candidates-too-few", "1"),
        ("record", {"entities": "Ann"}, "column-not-texts", "'entities'"),
        ("record", {"answers": ["Carl"]}, "answer-not-a-candidate", "Carl"),
        (
            "squad",
            {"answers": {"text": []}},
            "answer-empty",
            "'answers'",
        ),
        ("squad", {"answers": 3}, "column-not-texts", "'answers'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    name: str, change: Mapping[str, Any], code: str, value: str
) -> None:
    row = {**GOLDEN[name][0], **change}
    task = load_task(name)
    with raises(RowError, code, containing=value):
        task.prompt(row)
        if task.is_completion:
            task.answers(row)
        else:
            task.label(row)


def test_a_missing_column_is_named() -> None:
    with raises(RowError, "column-missing", containing="sentence"):
        load_task("sst2").prompt({"text": "a"})


@pytest.mark.parametrize(
    ("source", "row", "text"),
    [
        ("{a|strip|capitalize}?", {"a": " is it "}, "Is it?"),
        ("{a|unpunctuated}", {"a": "So it is ?! "}, "So it is"),
        ("{a|lower_first}, {a|lower}", {"a": "The NATO"}, "the NATO, the nato"),
        ("{a|one_line} {{a}}", {"a": "x\n\n y"}, "x y {a}"),
        ("{coarse-label} {n} {b}", {"coarse-label": "x", "n": 1.5, "b": True}, "x 1.5 true"),
        ("no columns", {}, "no columns"),
        ("{a}", {"a": "{b} {a.__class__}"}, "{b} {a.__class__}"),
        ("{q|before_placeholder}|{q|after_placeholder}", {"q": "@placeholder sang"}, "| sang"),
    ],
)
def test_templates(source: str, row: dict[str, Any], text: str) -> None:
    assert Template.parse(source).render(row) == text


@pytest.mark.parametrize(
    "source",
    [
        "{a.b}",
        "{a[0]}",
        "{a.__class__}",
        "{a!r}",
        "{a:>8}",
        "{}",
        "{0}",
        "{a|upper}",
        "{a|}",
        "{a",
        "a}",
        "{a|strip()}",
    ],
)
def test_templates_read_nothing_but_columns(source: str) -> None:
    with pytest.raises(ValueError):
        Template.parse(source)


def test_all_problems_of_a_task_file_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ntemplate: '{text.upper}'\nlabel_word: {0: a}\nlabel_words: {0: No, 1: Yes, 2: [x]}\n"
        "columns: {labels: y}\nmetric: bleu\nseparator: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_task(path)
    message = "\n".join(caught.value.problems)
    for expected in (
        "unknown key 'label_word', did you mean label_words?",
        "label_words 0 is False: put it in quotes (YAML takes bare Yes and No for true and false)",
        "label_words 1 is True: put it in quotes",
        "label_words 2 is ['x'], must be a text",
        "separator is 3, must be a text",
        "template: {text.upper} must be a column name, optionally with filters after |",
        "columns has unknown keys: labels; known are label, answers",
        "metric is 'bleu', must be one of accuracy, f1, f1_answer",
    ):
        assert expected in message
    assert str(path) in caught.value.what
    assert "Known keys: name, template" in caught.value.remedy


QUESTION = {"name": "q", "template": "{q}", "columns": {"answers": "a"}, "metric": "f1_answer"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"template": "{a}", "label_words": {0: "a", 1: "b"}}, "name is missing"),
        ({"name": "a", "label_words": {0: "a", 1: "b"}}, "template is missing"),
        ({"name": "a", "template": "{a}"}, "one of label_words, choices, choices_column or columns.answers"),
        ({"name": "a", "template": "{a}", "label_words": {0: "a"}}, "at least two candidates are needed"),
        ({"name": "a", "template": "{a}", "label_words": {0: "a", 1: "a "}}, "label_words has a word twice"),
        ({"name": "a", "template": "{a}", "label_words": {0: "", 1: "b"}}, "label_words has an empty word"),
        (
            {"name": "a", "template": "{a}", "choices": ["x", "y"], "metric": "f1"},
            "metric f1 needs label_words",
        ),
        (
            {"name": "a", "template": "{a}", "choices": ["x", "y"], "choices_column": "z"},
            "choices and choices_column exclude each other",
        ),
        (
            {"name": "a", "template": "{a}", "choices": ["x", "y"], "candidate": "x"},
            "candidate: must contain",
        ),
        ({"name": "a", "template": "{a}", "choices": "x"}, "choices is 'x', must be a list of columns"),
        ({"name": "a", "template": "{a}", "values": [1]}, "values is [1], must be column"),
        (
            {"name": "a", "template": "{a}", "label_words": {0: "a", 1: "b"}, "metric": "f1_answer"},
            "metric f1_answer needs columns.answers",
        ),
        (
            {"name": "a", "template": "{a}", "label_words": {0: "a", 1: "b"}, "generate": {}},
            "generate is only for tasks with columns.answers and without candidates",
        ),
        ({**QUESTION, "metric": "accuracy", "generate": {}}, "generate needs one of the metrics f1_answer"),
        ({**QUESTION, "generate": {"tokens": 5}}, "generate is {'tokens': 5}, must have max_tokens, stop"),
        ({**QUESTION, "generate": 50}, "generate is 50, must have max_tokens, stop or both"),
        ({**QUESTION, "generate": {"max_tokens": 0}}, "generate.max_tokens is 0, must be at least 1"),
        ({**QUESTION, "generate": {"max_tokens": True}}, "generate.max_tokens is True, must be a whole"),
        ({**QUESTION, "generate": {"stop": "x"}}, "generate.stop is 'x', must be a list of texts"),
        ({**QUESTION, "generate": {"stop": [""]}}, "generate.stop is [''], must be a list of texts"),
        (["a"], "it must hold keys and values"),
    ],
)
def test_unusable_tasks_are_refused(content: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_task(content, "mine.yaml")
    assert any(each.startswith(problem) for each in caught.value.problems), caught.value.problems


def test_generation_settings() -> None:
    assert load_task("squad").generate == load_task("drop").generate == Generate(50, ("\n",))
    assert load_task("sst2").generate is None
    assert parse_task({**QUESTION, "generate": {}}, "a").generate == Generate(50, ("\n",))
    settings = {"max_tokens": 5, "stop": ["#", "\n\n"]}
    assert parse_task({**QUESTION, "generate": settings}, "a").generate == Generate(5, ("#", "\n\n"))


def test_unknown_names_and_damaged_yaml_are_reported(tmp_path: Path) -> None:
    with raises(ConfigError, "task-unknown", containing="sst2"):
        load_task("sst-2")
    path = tmp_path / "a.yaml"
    path.write_text("name: [\n")
    with raises(ConfigError, "task-unreadable"):
        load_task(path)
    path.write_text("name: !!python/object/apply:os.system ['true']\n")
    with raises(ConfigError, "task-unreadable"):
        load_task(path)


def test_a_task_is_loaded_by_path(write: Callable[[str, str], Path]) -> None:
    path = write("mine.yaml", 'name: mine\ntemplate: "{text} It was"\nlabel_words: {0: bad, 1: good}\n')
    assert load_task(str(path)) == Task("mine", "{text} It was", label_words={"0": "bad", "1": "good"})


HOSTILE = {
    "depth": ("label_words: " + "[" * 50_000, "task-unreadable", "32"),
    "size": ("name: " + "a" * 100_000 + "\n", "task-unreadable", "65536"),
    "long value": ("name: [" + "a, " * 20_000 + "]\n", "task-unusable", "['a', 'a'"),
    "long key": ("a" * 1_000 + ": 1\n", "task-unusable", "'aaaa"),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(6_000)), "task-unusable", "k0"),
    "cursor": ('"\\e[2J": 1\n', "task-unusable", r"'\x1b[2J'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_task_file_is_refused_in_a_short_message(tmp_path: Path, name: str) -> None:
    content, code, value = HOSTILE[name]
    path = tmp_path / "task.yaml"
    path.write_text(content)
    with raises(ConfigError, code, containing=value) as caught:
        load_task(path)
    assert len(str(caught.value)) < 3000


def test_a_date_as_a_label_is_the_text_that_it_looks_like(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text('name: d\ntemplate: "{text}"\nlabel_words: {2020-01-01: a, 2020-99-99: b}\n')
    assert load_task(path).classes == ("2020-01-01", "2020-99-99")
