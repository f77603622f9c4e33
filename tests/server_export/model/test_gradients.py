"""Answers and gradients of a chain in PyTorch, against autograd on the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.adapter import Adapter
from prge.contract import Contract
from prge.exact import loss_inputs
from prge.examples import Example, Slot, TokenSequence, make_batch
from prge.head import Head
from server_export.model import readout
from server_export.model.chain import Chain, build_chain
from server_export.model.files import find_files
from server_export.model.gradients import EagerEngine
from server_export.model.loading import load_model, outline_model
from server_export.model.lora_fa import CallInputs, convert_conv1d, insert_lora
from tests.server_export.model.test_inputs import LONGEST, linear_layers
from tests.tiny_models import DECODERS, VOCABULARY, WIDTH, save_model

RANK = 2


def adapted_chain(folder: Path, names: list[str]) -> Chain:
    """A chain in float32 with adapters on some layers."""
    model = load_model(str(folder)).model
    convert_conv1d(model)
    draw = torch.Generator().manual_seed(0)
    lora_a = {
        name: torch.randn(RANK, model.get_submodule(name).in_features, generator=draw) for name in names
    }
    return build_chain(outline_model(str(folder)), find_files(str(folder)), lora_a, longest=LONGEST)


def examples(is_decoder: bool) -> list[Example]:
    """Rows of several lengths: a text, and candidates of one token."""
    draw = np.random.default_rng(0)
    found = []
    for number, length in enumerate((9, 5, 7), start=1):
        tokens = tuple(draw.integers(3, 100, length).tolist())
        slots = [Slot(place, tokens[place + 1], 1 / (length - 1), 0) for place in range(length - 1)]
        if number == 3:
            slots = [Slot(length - 1, token, 1.0, index) for index, token in enumerate((7, 11))]
        label = number % 2 if number == 3 or not is_decoder else None
        own = tuple(slots) if is_decoder else ()
        found.append(Example(number, (TokenSequence(tokens, own),), 1 if label is None else 2, label))
    return found


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt", "bert", "roberta"])
@pytest.mark.parametrize("every", [True, False])
def test_gradients_are_those_of_autograd(architecture: str, every: bool, tmp_path: Path) -> None:
    folder, is_decoder = save_model(tmp_path, architecture), architecture in DECODERS
    names = linear_layers(folder)
    # Or only the last one, so that the blocks below have no way back.
    chain = adapted_chain(folder, names if every else names[-1:])
    rows = examples(is_decoder)
    kind = "logprobs" if is_decoder else "pooled"
    sizes = {"copies": 1, "batch_size": 3, "sequence_length": 9, "positions": 8 * is_decoder}
    model = {"width": WIDTH, "vocabulary_size": VOCABULARY, "label_tokens": (), "modules": chain.modules}
    contract = Contract("exact", kind, **sizes, **model, classes=0 if is_decoder else 2)
    check(folder, chain, contract, rows)


def check(folder: Path, chain: Chain, contract: Contract, rows: list[Example]) -> None:
    """An exact call answers what the model does, and the gradient of the loss that it is told."""
    draw = np.random.default_rng(1)
    adapter = Adapter.zeros(chain.modules)
    adapter.values[:] = 0.1 * draw.normal(size=adapter.size)
    head = Head(2, WIDTH)
    head.values[:] = draw.normal(size=head.size)
    batch = make_batch(rows, contract)
    inputs = batch.inputs(1, contract.is_encoder) | adapter.inputs()
    inputs |= loss_inputs(contract, batch, len(rows), head if contract.is_encoder else None)
    found = EagerEngine(chain, contract, "mean").forward(inputs)

    given, model = CallInputs(), load_model(str(folder), pooled=contract.is_encoder).model
    convert_conv1d(model)
    insert_lora(model, chain.lora_a, 1.0, given)
    given.lora_b = {
        name: torch.tensor(value)[None].requires_grad_() for name, value in adapter.named().items()
    }
    mask = torch.from_numpy(batch.attention_mask)
    output: Any = model(input_ids=torch.from_numpy(batch.tokens), attention_mask=mask)
    labels = torch.from_numpy(batch.labels)
    if contract.is_encoder:
        answers = readout.pool_mean(output.last_hidden_state, mask.float())
        scores = answers @ torch.from_numpy(head.weight).T + torch.from_numpy(head.bias)
        loss = torch.nn.functional.cross_entropy(scores, labels)
    else:
        asked = readout.at_positions(output.logits, torch.from_numpy(batch.positions))
        answers = readout.log_probabilities(asked, torch.from_numpy(batch.targets))
        weights = torch.from_numpy(batch.weights).float()
        texts = (answers * weights).sum(1)
        choice = torch.nn.functional.cross_entropy(answers[2, :2][None], labels[2:])
        loss = (choice - texts[0] - texts[1]) / 3
    expected = torch.autograd.grad(loss, list(given.lora_b.values()))
    name = "pooled" if contract.is_encoder else "logprobs"
    np.testing.assert_allclose(found[name], answers.detach().numpy(), rtol=1e-4, atol=1e-4)
    for module, gradient in zip(chain.modules, expected, strict=True):
        np.testing.assert_allclose(
            found[f"gradient.{module.name}"], gradient[0].numpy(), rtol=1e-3, atol=1e-5, err_msg=module.name
        )
