"""Decays of a recurrent state, written as matrix products over all tokens of a call.

    kept[t, s] = exp(decay[s + 1] + ... + decay[t])       the share of what token s added that token t reads

The exponents are sums of the decays in between, because differences of cumulative sums lose digits. If all
elements of a key decay alike, the decays are a square matrix that multiplies the products of queries and
keys. If each element has its own decay, the decays are part of these products: in every group of 2, 4, 8, ...
tokens, the tokens of the second half meet those of the first half, each decayed up to the boundary between
the halves. So no exponent is positive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


class Decays:
    """Decays f32 [rows x heads, tokens] that all elements of a key share.

    Args:
        writer: writes into the graph.
        decay: the logarithm of a factor of at most 1.
        key: f32 [rows x heads, tokens, width].
        until, before: tables `behind` of all tokens up to each token, including and excluding the token
            itself.
    """

    def __init__(self, writer: GraphWriter, decay: Node, key: Node, until: Node, before: Node) -> None:
        self._writer, self._decay, self._before = writer, decay, before
        self._count, self._tokens, _ = key.meta["val"].shape
        self._key_transposed = writer.call(aten.transpose.int, key, 1, 2)
        self._decay_rows = writer.reshape(decay, [self._count, 1, self._tokens])
        shape = [1, self._count * self._tokens, self._tokens]
        sums = writer.reshape(writer.times(self._decay_rows, until), shape)
        between = writer.call(aten.bmm.default, sums, before)
        between = writer.reshape(between, [self._count, self._tokens, self._tokens])
        # The sums above the diagonal are 0, so the mask is applied again after exp.
        self._kept = writer.times(writer.call(aten.exp.default, between), until)
        self._until = until

    def products(self, source: Node, itself: bool = True) -> Node:
        """Return the products of `source` f32 [rows x heads, tokens, width] with the decayed keys.

        Args:
            source: for example queries.
            itself: whether a token's own key is included.
        """
        products = self._writer.times(
            self._writer.call(aten.bmm.default, source, self._key_transposed), self._kept
        )
        return products if itself else self._writer.times(products, self._before)

    def read(self, source: Node, state: Node) -> Node:
        """Return what each token reads of the state before the call: f32 [rows x heads, tokens, value]."""
        decay = self._of_tokens(self._writer.call(aten.transpose.int, self._until, 1, 2))
        return self._writer.times(self._writer.call(aten.bmm.default, source, state), decay)

    def state_after(self, state: Node, value: Node) -> Node:
        """Return the recurrent state after the call, to which the tokens add these values."""
        exponent = self._writer.call(aten.sum.dim_IntList, self._decay_rows, [-1], True)
        factor = self._writer.call(aten.exp.default, exponent)
        decayed = self._writer.times(value, self._of_tokens(self._before))
        added = self._writer.call(aten.bmm.default, self._key_transposed, decayed)
        return self._writer.plus(self._writer.times(state, factor), added)

    def _of_tokens(self, table: Node) -> Node:
        """Return one factor per token: exp of the sum of the decays that the table selects."""
        flat = self._writer.reshape(self._decay, [1, self._count, self._tokens])
        sums = self._writer.call(aten.bmm.default, flat, table)
        shape = [self._count, self._tokens, 1]
        return self._writer.reshape(self._writer.call(aten.exp.default, sums), shape)


class ElementwiseDecays:
    """Decays f32 [rows x heads, tokens, width], one for each element of a key.

    Args:
        writer, decay, key, until, before: see `Decays`.
        halves, meeting: tables of these names, for 1, 2, 4, ... tokens.
    """

    def __init__(
        self,
        writer: GraphWriter,
        decay: Node,
        key: Node,
        until: Node,
        before: Node,
        halves: Sequence[Node],
        meeting: Sequence[Node],
    ) -> None:
        self._writer, self._before = writer, before
        self._until, self._halves, self._meeting = until, halves, meeting
        self._key = self._transpose(key)
        self._decay = self._transpose(decay)

    def products(self, source: Node, itself: bool = True) -> Node:
        """See `Decays.products`."""
        writer = self._writer
        source_transposed, products = self._transpose(source), None
        if itself:
            diagonal = writer.minus(self._until, self._before)
            products = writer.times(writer.call(aten.bmm.default, source, self._key), diagonal)
        for halves, meeting in zip(self._halves, self._meeting, strict=True):
            factor = self._factor(meeting)
            decayed = self._transpose(writer.times(source_transposed, factor))
            term = writer.call(aten.bmm.default, decayed, writer.times(self._key, factor))
            term = writer.times(term, halves)
            products = term if products is None else writer.plus(products, term)
        assert products is not None
        return products

    def read(self, source: Node, state: Node) -> Node:
        """See `Decays.read`."""
        writer = self._writer
        decayed = writer.times(self._transpose(source), self._factor(self._until))
        return writer.call(aten.bmm.default, self._transpose(decayed), state)

    def state_after(self, state: Node, value: Node) -> Node:
        """See `Decays.state_after`."""
        writer = self._writer
        factor = writer.call(aten.exp.default, writer.call(aten.sum.dim_IntList, self._decay, [-1], True))
        decayed = writer.times(self._key, self._factor(writer.call(aten.transpose.int, self._before, 1, 2)))
        return writer.plus(writer.times(state, factor), writer.call(aten.bmm.default, decayed, value))

    def _factor(self, table: Node) -> Node:
        """Return exp of sums of decays, f32 [rows x heads, width, tokens]; table rows select summands."""
        writer = self._writer
        count, width, tokens = self._decay.meta["val"].shape
        flat = writer.reshape(self._decay, [1, count * width, tokens])
        sums = writer.call(aten.bmm.default, flat, writer.call(aten.transpose.int, table, 1, 2))
        return writer.call(aten.exp.default, writer.reshape(sums, [count, width, tokens]))

    def _transpose(self, source: Node) -> Node:
        return self._writer.call(aten.transpose.int, source, 1, 2)
