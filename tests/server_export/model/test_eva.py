"""`--init eva`: `lora_a` from the principal directions of the layers' inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.errors import DataError
from server_export.adapter.initial_adapter import StartAdapter, start_adapter
from server_export.checkpoint.loading import load_meta_model
from server_export.checkpoint.tokenization import device_tokenizer
from server_export.model.eva import eva_adapter
from server_export.model.row_tokens import row_tokens
from server_export.settings import ExportConfig
from tests.bundles import make_spec
from tests.refusals import raises
from tests.server_export.model.test_blockwise import ROWS, expected_inputs, rank1_chain
from tests.tiny_models import VOCABULARY, WIDTH, make_tokenizer, save_model

RANK = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


def config(folder: object = "model", **changes: Any) -> ExportConfig:
    settings = {"init": "eva", "init_rows": Path("rows.jsonl"), "rank": RANK, **changes}
    return ExportConfig(model=str(folder), out=Path("unused"), **settings)


def init_from_rows(
    folder: Path, *, rows: Any = ROWS, spread: bool = False, **changes: Any
) -> tuple[StartAdapter, Any]:
    start = start_adapter(config(folder, **changes), load_meta_model(str(folder)), False)
    return eva_adapter(start, rank1_chain(folder, list(start.lora_a)), rows, spread)


def test_lora_a_spans_the_first_singular_vectors_of_the_layers_inputs(folder: Path) -> None:
    start, explained = init_from_rows(folder, target_modules=["q_proj", "v_proj", "down_proj"])
    for name, inputs in expected_inputs(folder, list(start.lora_a)).items():
        stacked = torch.cat(inputs).double().numpy()
        _, values, vectors = np.linalg.svd(stacked, full_matrices=False)
        lora_a = start.lora_a[name].double().numpy()
        lengths = np.linalg.norm(lora_a, axis=1)
        cosines = np.abs((lora_a * vectors[:RANK]).sum(1)) / lengths
        np.testing.assert_allclose(cosines, 1, atol=1e-4)
        share = (values[:RANK] ** 2).sum() / (values**2).sum()
        assert explained[name] == pytest.approx(share, rel=1e-4)
        # On average as for a random row: 1 / (3 in) of the inputs' mean square.
        output_share = ((stacked @ lora_a.T) ** 2).sum(0) / (stacked**2).sum()
        np.testing.assert_allclose(output_share, 1 / (3 * stacked.shape[1]), rtol=1e-3)
    assert not any(lora_b.any() for lora_b in start.lora_b.values())
    assert (start.rank, start.alpha) == (RANK, 16.0)


def test_spread_ranks_keep_the_number_of_parameters_and_the_scale(folder: Path) -> None:
    start, explained = init_from_rows(folder, spread=True, target_modules="all-linear")
    even, evenly_explained = init_from_rows(folder, target_modules="all-linear")
    ranks = {name: len(a) for name, a in start.lora_a.items()}
    assert set(ranks.values()) - {RANK} and all(1 <= rank <= 2 * RANK for rank in ranks.values())
    trainable, budget = (sum(b.numel() for b in each.lora_b.values()) for each in (start, even))
    assert budget - WIDTH < trainable <= budget
    assert {start.alphas[name] / rank for name, rank in ranks.items()} == {16.0 / RANK}
    assert sum(explained.values()) != sum(evenly_explained.values())


def test_rows_with_fewer_directions_than_the_rank_are_refused(folder: Path) -> None:
    with raises(DataError, "directions-too-few", containing="--init-rows") as caught:
        init_from_rows(folder, rows=[[5, 9]])
    assert all(number in caught.value.problems[0] for number in ("2 directions", "the rank is 3"))


def rows_of(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> list[tuple[int, ...]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_spec(sequence_length=8, vocabulary_size=VOCABULARY)
    tokenizer = device_tokenizer(make_tokenizer(), "auto", VOCABULARY)
    settings = config(init_rows=file, **changes)
    assert settings.init_rows is not None
    return row_tokens(
        settings.init_rows,
        settings.init_task,
        settings.init_tokens,
        seed=settings.seed,
        tokenizer=tokenizer,
        model=model,
    )


TEXTS = [{"text": f"row {number} of many more"} for number in range(100)]


def test_rows_are_selected_by_seed_up_to_a_number_of_tokens(tmp_path: Path) -> None:
    chosen = rows_of(tmp_path, TEXTS, init_tokens=100)
    assert sum(map(len, chosen)) == 100
    assert chosen == rows_of(tmp_path, TEXTS, init_tokens=100)
    assert chosen != rows_of(tmp_path, TEXTS, init_tokens=100, seed=1)
    assert chosen != rows_of(tmp_path, TEXTS)[: len(chosen)][::-1]


def test_long_texts_are_split_and_not_truncated(tmp_path: Path) -> None:
    (row,) = TEXTS[:1]
    chosen = rows_of(tmp_path, [row])
    assert len(chosen) > 1 and max(map(len, chosen)) <= 8
    assert sum(map(len, chosen)) >= len(make_tokenizer().encode(row["text"]))


def test_rows_of_a_task_are_its_prompts(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        'name: t\ntemplate: "{text}"\nlabel_words: {0: " no", 1: " yes"}\ncolumns: {label: label}\n'
    )
    chosen = rows_of(tmp_path, [{"text": "abc", "label": 1}], init_task=str(task))
    assert chosen == [tuple(make_tokenizer().encode("abc"))]


def test_unusable_rows_are_refused(tmp_path: Path) -> None:
    with raises(DataError, "form-unknown", containing="other"):
        rows_of(tmp_path, [{"other": "abc"}])
