"""The model of a report as an adversary runs it: gradients of many guesses at once, in PyTorch.

guesses -> embeddings -> model with a copy of the adapter for every row -> losses -> a gradient for every row

The adversary has the model, `lora_a` and the adapter, so this is what a device computes.
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

# Tokens of a pass; more of them take memory and save no time.
_TOKENS = 2048
# Far longer than what is attacked.
LENGTH = 4096


class Victim:
    """A decoder with its adapter.

    Args:
        engine: computes the model; it trains `lora_b` alone.
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
        """A model with an adapter that no bundle has.

        Args:
            loaded: the model; it has no Conv1D layers.
            lora_a: f32 [rank, in] by adapted layer, the scale folded in.
            lora_b: f32 [out, rank] by adapted layer.
        """
        network: Any = loaded.model
        vocabulary = int(network.get_input_embeddings().weight.shape[0])
        modules = tuple(
            AdaptedModule(name, matrix.shape[0], matrix.shape[1], len(lora_b[name]))
            for name, matrix in lora_a.items()
        )
        model = ModelSpec("logprobs", 0, vocabulary, LENGTH, modules)
        return cls(TorchEngine(network, model, lora_a), lora_b)

    def gradients(self, form: KnownForm, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient of every row's loss by lora_b, f32 [rows, size], and its log-likelihood, f32 [rows]."""
        gradients, likelihoods = [], []
        for part in torch.arange(len(rows)).split(max(_TOKENS // form.read, 1)):
            few = rows[part]
            embedded, targets = self.embeddings[few.tokens], F.one_hot(few.tokens, self.vocabulary).float()
            gradient, logprobs = self._gradient(form, embedded, targets, _one_hot_labels(form, few))
            gradients.append(gradient)
            learnt = few.tokens[:, form.targets].unsqueeze(-1)
            likelihoods.append(_of_targets(form, logprobs.detach()).gather(-1, learnt).sum((1, 2)))
        return torch.cat(gradients), torch.cat(likelihoods)

    def soft_gradient(
        self, form: KnownForm, embedded: torch.Tensor, targets: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Gradient of rows that are no tokens, f32 [rows, size], which can be differentiated.

        Args:
            form: of the rows.
            embedded: f32 [rows, length, width], in place of the unknown tokens.
            targets: f32 [rows, length, vocabulary], how much of each token a learnt one is.
            rows: give the labels.
        """
        return self._gradient(form, embedded, targets, _one_hot_labels(form, rows), create_graph=True)[0]

    def reduced_inputs(self, form: KnownForm, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each adapted layer sees of prefixes i64 [prefixes, n], times lora_a^T.

        Returns:
            f32 [prefixes, rank] at the last token, by layer.
        """
        reduced: dict[str, list[torch.Tensor]] = {module.name: [] for module in self.modules}
        hooks = [self._keep(name, parts) for name, parts in reduced.items()]
        try:
            for _ in self._read(form, tokens):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        return {name: torch.cat(parts) for name, parts in reduced.items()}

    def next_logprobs(self, form: KnownForm, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the token after prefixes i64 [prefixes, n]: f32 [prefixes, vocabulary]."""
        return torch.cat([part[:, -1] for part in self._read(form, tokens)])

    def predictions(self, form: KnownForm, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of what comes at each place of a row i64 [length]: f32 [length, vocabulary].

        A first token that nothing comes before has zeros.
        """
        if form.before:
            return next(self._read(form, tokens[None, :-1]))[0, len(form.before) - 1 :]
        read = [part[0] for part in self._read(form, tokens[None, :-1])] if len(tokens) > 1 else []
        return torch.cat([torch.zeros(1, self.vocabulary), *read])

    @torch.no_grad()
    def _read(self, form: KnownForm, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Log-probabilities after each token of prefixes i64 [prefixes, n] and before them, in parts."""
        for part in tokens.split(max(_TOKENS // (len(form.before) + tokens.shape[1]), 1)):
            before = torch.tensor(form.before, dtype=torch.long).expand(len(part), -1)
            yield self._logprobs(self.embeddings[torch.cat([before, part], 1)])[0]

    def _keep(self, name: str, reduced: list[torch.Tensor]) -> Any:
        def keep(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            states = inputs[0].reshape(*self._shape, -1)
            reduced.append(F.linear(states[:, -1], self._engine.lora_a[name]))

        return self._engine.network.get_submodule(name).register_forward_pre_hook(keep)

    def _gradient(
        self,
        form: KnownForm,
        embedded: torch.Tensor,
        targets: torch.Tensor,
        labels: torch.Tensor,
        create_graph: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients [rows, size] of every row's own loss, and log-probabilities [rows, read, vocabulary]."""
        sides = [
            self.embeddings[torch.tensor(side, dtype=torch.long)].expand(len(embedded), -1, -1)
            for side in (form.before, form.after)
        ]
        logprobs, values = self._logprobs(torch.cat([sides[0], embedded, sides[1]], 1)[:, : form.read])
        loss = _losses(form, logprobs, targets, labels).sum()
        (gradients,) = torch.autograd.grad(loss, values, create_graph=create_graph)
        return gradients, logprobs

    def _logprobs(self, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [rows, read, vocabulary], and each row's own values of the adapter."""
        self._shape = embedded.shape[:2]
        values = self._values.expand(len(embedded), -1).clone().requires_grad_(torch.is_grad_enabled())
        output = self._engine.call(values, inputs_embeds=embedded)
        return torch.log_softmax(output.logits, -1), values


def _losses(
    form: KnownForm, logprobs: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Loss of every row, f32 [rows], as prge/objectives/objective.py has it."""
    if form.classes:
        scores = torch.log_softmax(logprobs[:, -1, list(form.classes)], -1)
        return -(labels * scores).sum(-1)
    return -(targets[:, form.targets] * _of_targets(form, logprobs)).sum(-1).mean(1)


def _of_targets(form: KnownForm, logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [rows, targets, vocabulary] of the unknown tokens that are learnt."""
    first = len(form.before) + form.targets.start - 1
    return logprobs[:, first : first + form.length - form.targets.start]


def _one_hot_labels(form: KnownForm, rows: Rows) -> torch.Tensor:
    return F.one_hot(rows.labels, form.label_count).float()
