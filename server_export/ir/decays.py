"""What the memory of a recurrence keeps from token to token, in products over all tokens of a call.

    kept[t, s] = exp(decay[s + 1] + ... + decay[t])       of what token s added, what token t finds of it

Sums are of decays between, and no differences of sums, which lose digits. Where all numbers of a key decay
alike, kept is a square by which products of queries and keys are multiplied. Where each decays for itself, it
is a part of these products: of 2, 4, 8, ... tokens in a row, those of the second half meet those of the first
one, each decayed up to the place where the halves meet. So no exponent is above 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


class Decays:
    """Decays f32 [rows x heads, tokens] of all numbers of a key alike.

    Args:
        writer: of the graph.
        decay: the logarithm of a factor of at most 1.
        key: f32 [rows x heads, tokens, width].
        until, before: tables `behind` of all tokens up to each, with and without itself.
    """

    def __init__(self, writer: GraphWriter, decay: Node, key: Node, until: Node, before: Node) -> None:
        self._writer, self._decay, self._before = writer, decay, before
        self._count, self._tokens, _ = key.meta["val"].shape
        self._turned = writer.call(aten.transpose.int, key, 1, 2)
        self._line = writer.reshape(decay, [self._count, 1, self._tokens])
        shape = [1, self._count * self._tokens, self._tokens]
        sums = writer.reshape(writer.times(self._line, until), shape)
        between = writer.call(aten.bmm.default, sums, before)
        between = writer.reshape(between, [self._count, self._tokens, self._tokens])
        # Above the diagonal sums are 0, and go once exp is taken.
        self._kept = writer.times(writer.call(aten.exp.default, between), until)
        self._until = until

    def products(self, source: Node, itself: bool = True) -> Node:
        """Of each token the products of `source` f32 [rows x heads, tokens, width] and what is kept of keys.

        Args:
            source: such as queries.
            itself: whether a token's own key is among them.
        """
        found = self._writer.times(self._writer.call(aten.bmm.default, source, self._turned), self._kept)
        return found if itself else self._writer.times(found, self._before)

    def read(self, source: Node, memory: Node) -> Node:
        """What each token finds of the memory before the call: f32 [rows x heads, tokens, value]."""
        since = self._of_tokens(self._writer.call(aten.transpose.int, self._until, 1, 2))
        return self._writer.times(self._writer.call(aten.bmm.default, source, memory), since)

    def behind(self, memory: Node, value: Node) -> Node:
        """The memory behind the call, whose tokens add these values."""
        total = self._writer.call(aten.sum.dim_IntList, self._line, [-1], True)
        whole = self._writer.call(aten.exp.default, total)
        left = self._writer.times(value, self._of_tokens(self._before))
        new = self._writer.call(aten.bmm.default, self._turned, left)
        return self._writer.plus(self._writer.times(memory, whole), new)

    def _of_tokens(self, table: Node) -> Node:
        """A factor of each token, of a sum of decays."""
        flat = self._writer.reshape(self._decay, [1, self._count, self._tokens])
        sums = self._writer.call(aten.bmm.default, flat, table)
        shape = [self._count, self._tokens, 1]
        return self._writer.reshape(self._writer.call(aten.exp.default, sums), shape)


class OwnDecays:
    """Decays f32 [rows x heads, tokens, width] of each number of a key.

    Args:
        writer, decay, key, until, before: as of `Decays`.
        halves, meeting: tables of these names, of 1, 2, 4, ... tokens.
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
        self._key = self._turn(key)
        self._decay = self._turn(decay)

    def products(self, source: Node, itself: bool = True) -> Node:
        """As of `Decays`."""
        writer = self._writer
        turned, found = self._turn(source), None
        if itself:
            own = writer.minus(self._until, self._before)
            found = writer.times(writer.call(aten.bmm.default, source, self._key), own)
        for halves, meeting in zip(self._halves, self._meeting, strict=True):
            factor = self._factor(meeting)
            left = self._turn(writer.times(turned, factor))
            part = writer.call(aten.bmm.default, left, writer.times(self._key, factor))
            part = writer.times(part, halves)
            found = part if found is None else writer.plus(found, part)
        assert found is not None
        return found

    def read(self, source: Node, memory: Node) -> Node:
        """As of `Decays`."""
        writer = self._writer
        since = writer.times(self._turn(source), self._factor(self._until))
        return writer.call(aten.bmm.default, self._turn(since), memory)

    def behind(self, memory: Node, value: Node) -> Node:
        """As of `Decays`."""
        writer = self._writer
        whole = writer.call(aten.exp.default, writer.call(aten.sum.dim_IntList, self._decay, [-1], True))
        left = writer.times(self._key, self._factor(writer.call(aten.transpose.int, self._before, 1, 2)))
        return writer.plus(writer.times(memory, whole), writer.call(aten.bmm.default, left, value))

    def _factor(self, table: Node) -> Node:
        """exp of sums of decays, f32 [rows x heads, width, tokens]; rows of a table say of which."""
        writer = self._writer
        count, width, tokens = self._decay.meta["val"].shape
        flat = writer.reshape(self._decay, [1, count * width, tokens])
        sums = writer.call(aten.bmm.default, flat, writer.call(aten.transpose.int, table, 1, 2))
        return writer.call(aten.exp.default, writer.reshape(sums, [count, width, tokens]))

    def _turn(self, source: Node) -> Node:
        return self._writer.call(aten.transpose.int, source, 1, 2)
