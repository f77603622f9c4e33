"""The attacked model as an adversary runs it: gradients of many guesses at once, in PyTorch.

guesses -> embeddings -> model with a copy of the adapter for every row -> losses -> a gradient for every row

The adversary has the model, `lora_a` and the adapter, so it can compute the same gradients as a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prge.model_spec import AdaptedModule, ModelSpec
from server_export.checkpoint.loading import LoadedModel
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.oracle import TorchEngine

# Tokens of a pass; more would need memory and save no time.
_PASS_TOKENS = 2048
# Far longer than any attacked row.
MAX_LENGTH = 4096


class Victim:
    """A decoder with its adapter, whose gradients an adversary computes.

    Args:
        engine: engine of the model; it trains only `lora_b`.
        lora_b: f32 [out, rank] by adapted layer.
    """

    def __init__(self, engine: TorchEngine, lora_b: Mapping[str, torch.Tensor]) -> None:
        self._engine = engine
        self.modules = engine.model.modules
        self._values = torch.cat([lora_b[module.name].T.flatten() for module in self.modules])
        embedding = engine.network.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        with torch.no_grad():
            self.embeddings: torch.Tensor = embedding(torch.arange(self.vocabulary))
        self.size = len(self._values)

    @classmethod
    def of(
        cls, loaded: LoadedModel, lora_a: Mapping[str, torch.Tensor], lora_b: Mapping[str, torch.Tensor]
    ) -> Victim:
        """Return a victim with an adapter that comes from no bundle.

        Args:
            loaded: the model without Conv1D layers.
            lora_a: f32 [rank, in] by adapted layer, the scale folded in.
            lora_b: f32 [out, rank] by adapted layer.
        """
        network: Any = loaded.model
        vocabulary = int(network.get_input_embeddings().weight.shape[0])
        modules = tuple(
            AdaptedModule(name, matrix.shape[0], matrix.shape[1], len(lora_b[name]))
            for name, matrix in lora_a.items()
        )
        model = ModelSpec("logprobs", 0, vocabulary, MAX_LENGTH, modules)
        return cls(TorchEngine(network, model, lora_a), lora_b)

    def gradients(self, form: KnownForm, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every row's gradient of lora_b, f32 [rows, size], and log-likelihood, f32 [rows]."""
        gradients, likelihoods = [], []
        for part in torch.arange(len(rows)).split(max(_PASS_TOKENS // form.input_length, 1)):
            batch = rows[part]
            embedded = self.embeddings[batch.tokens]
            targets = F.one_hot(batch.tokens, self.vocabulary).float()
            gradient, logprobs = self._gradient(form, embedded, targets, _one_hot_labels(form, batch))
            gradients.append(gradient)
            target_tokens = batch.tokens[:, form.targets].unsqueeze(-1)
            likelihoods.append(_select_targets(form, logprobs.detach()).gather(-1, target_tokens).sum((1, 2)))
        return torch.cat(gradients), torch.cat(likelihoods)

    def soft_gradient(
        self, form: KnownForm, embedded: torch.Tensor, targets: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Return differentiable gradients f32 [rows, size] of rows given as embeddings.

        Args:
            form: form of the rows.
            embedded: f32 [rows, length, width], embeddings instead of the unknown tokens.
            targets: f32 [rows, length, vocabulary], target distribution of each token.
            rows: rows that give the labels.
        """
        return self._gradient(form, embedded, targets, _one_hot_labels(form, rows), create_graph=True)[0]

    def reduced_inputs(self, form: KnownForm, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inputs of each adapted layer for prefixes i64 [prefixes, n], times lora_a^T.

        Returns:
            f32 [prefixes, rank] at the last token, by layer.
        """
        reduced: dict[str, list[torch.Tensor]] = {module.name: [] for module in self.modules}
        hooks = [self._record_inputs(name, parts) for name, parts in reduced.items()]
        try:
            for _ in self._iter_logprobs(form, tokens):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        return {name: torch.cat(parts) for name, parts in reduced.items()}

    def next_logprobs(self, form: KnownForm, tokens: torch.Tensor) -> torch.Tensor:
        """Return next-token log-probabilities, f32 [prefixes, vocabulary], for prefixes i64 [prefixes, n]."""
        return torch.cat([part[:, -1] for part in self._iter_logprobs(form, tokens)])

    def predictions(self, form: KnownForm, tokens: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities at each position of a row i64 [length]: f32 [length, vocabulary].

        They are zeros for a first token without prefix.
        """
        if form.prefix:
            return next(self._iter_logprobs(form, tokens[None, :-1]))[0, len(form.prefix) - 1 :]
        read = [part[0] for part in self._iter_logprobs(form, tokens[None, :-1])] if len(tokens) > 1 else []
        return torch.cat([torch.zeros(1, self.vocabulary), *read])

    @torch.no_grad()
    def _iter_logprobs(self, form: KnownForm, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield log-probabilities after each token of the known prefix and of prefixes i64 [prefixes, n]."""
        for part in tokens.split(max(_PASS_TOKENS // (len(form.prefix) + tokens.shape[1]), 1)):
            prefix = torch.tensor(form.prefix, dtype=torch.long).expand(len(part), -1)
            yield self._logprobs(self.embeddings[torch.cat([prefix, part], 1)])[0]

    def _record_inputs(self, name: str, reduced: list[torch.Tensor]) -> Any:
        def record(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            states = inputs[0].reshape(*self._shape, -1)
            reduced.append(F.linear(states[:, -1], self._engine.lora_a[name]))

        return self._engine.network.get_submodule(name).register_forward_pre_hook(record)

    def _gradient(
        self,
        form: KnownForm,
        embedded: torch.Tensor,
        targets: torch.Tensor,
        labels: torch.Tensor,
        create_graph: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's gradient [rows, size] and log-probabilities [rows, input length, vocabulary]."""
        sides = [
            self.embeddings[torch.tensor(side, dtype=torch.long)].expand(len(embedded), -1, -1)
            for side in (form.prefix, form.suffix)
        ]
        logprobs, values = self._logprobs(
            torch.cat([sides[0], embedded, sides[1]], 1)[:, : form.input_length]
        )
        loss = _losses(form, logprobs, targets, labels).sum()
        (gradients,) = torch.autograd.grad(loss, values, create_graph=create_graph)
        return gradients, logprobs

    def _logprobs(self, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities [rows, input length, vocabulary] and each row's copy of the adapter."""
        self._shape = embedded.shape[:2]
        values = self._values.expand(len(embedded), -1).clone().requires_grad_(torch.is_grad_enabled())
        output = self._engine.call(values, inputs_embeds=embedded)
        return torch.log_softmax(output.logits, -1), values


def _losses(
    form: KnownForm, logprobs: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss of every row, f32 [rows], as prge/objectives/objective.py defines it."""
    if form.classes:
        scores = torch.log_softmax(logprobs[:, -1, list(form.classes)], -1)
        return -(labels * scores).sum(-1)
    return -(targets[:, form.targets] * _select_targets(form, logprobs)).sum(-1).mean(1)


def _select_targets(form: KnownForm, logprobs: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [rows, targets, vocabulary] of the unknown tokens that are targets."""
    first = len(form.prefix) + form.targets.start - 1
    return logprobs[:, first : first + form.length - form.targets.start]


def _one_hot_labels(form: KnownForm, rows: Rows) -> torch.Tensor:
    return F.one_hot(rows.labels, form.label_count).float()
