"""The chain of a bundle's blocks as a speaker: goes on with sequences, many at once, each with its adapter.

    prefill   a piece of one sequence's tokens passes the blocks
    decode    one token of each of several sequences passes them

Keys and values of all tokens lie in arrays of the host, which the engine reads in place: of every block
[slots, heads, 1 + capacity, width]. The sequences of a step lie in the first slots. What is called again and
again is bound to its arrays once. The first place of a slot stays zero: it stands for the token of a step.
Those in float16 become float32 block by block, in two arrays that all blocks share. What several blocks take
from another is kept once. What recurrences carry is of a fixed size for each slot, and can't go back to an
earlier token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from device_runner.engines.blocks import Blocks
from device_runner.engines.choice import choose
from device_runner.engines.experts import Experts
from device_runner.engines.pieces import Pieces, by_heads
from device_runner.engines.shared_values import SharedValues
from device_runner.engines.trunk_cache import Precision
from prge.engine import Array, EngineName, FloatArray
from prge.errors import BundleError, EngineError
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.chain import FEWEST_TOKENS, GIVEN, MASKED, TABLE, TAKEN
from prge.files.relations import RELATIONS
from prge.files.signatures import DECODE, KEYS, OWN, PAST_KEYS, PAST_VALUES, PREFILL, SEEN, VALUES

# Tokens that pass the blocks together: more aren't faster, and take memory for their scores, of which each
# has one with every token of the past.
_PIECE, PIECE_OF_LONG, LONG = 128, 64, 512
# Arrays for more tokens are made when they are needed, of as many as are a multiple of this.
GROWTH = 128


@dataclass
class _Sequence:
    adapter: Adapter
    slot: int
    length: int = 0


_Key = tuple[str, int]


@dataclass
class _Step:
    """A step of the same sequences: arrays that its calls are bound to, and where answers go.

    `seen` f32 [rows x heads, 1, 1 + capacity] is there for every window and number of heads. `kept` has where
    keys and values lie, each with those of the step's tokens, f32 [rows, heads, width]; `read` by block which
    of them are read through an array in float32, one of `in_float32` that blocks share; `carried` where what
    is carried lies, and the step's own.
    """

    sequences: list[int]
    tokens: Array
    tables: dict[int, Array]
    pieces: FloatArray
    logits: FloatArray
    compute: Callable[[], None] = field(init=False)
    seen: dict[tuple[int | None, int], FloatArray] = field(default_factory=dict)
    kept: list[tuple[Array, FloatArray]] = field(default_factory=list)
    read: dict[int, list[tuple[Array, FloatArray]]] = field(default_factory=dict)
    in_float32: dict[tuple[str, tuple[int, ...]], FloatArray] = field(default_factory=dict)
    carried: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)


class ChainSpeaker:
    """Implements prge.text.speaker.Speaker for an opened bundle.

    Args:
        blocks: of a bundle with the roles `prefill` and `decode`.
        slots: most sequences at once.
        context: most tokens of a sequence; by default what the bundle has positions for.
        precision: of keys and values.

    Raises:
        BundleError: the bundle lacks the roles.
    """

    def __init__(
        self, blocks: Blocks, slots: int = 1, context: int | None = None, precision: Precision = "float32"
    ) -> None:
        chain = blocks.chain
        if not {PREFILL, DECODE} <= set(chain.roles):
            raise BundleError(
                f"the bundle can't write text: it has the roles {', '.join(chain.roles)}",
                remedy="export a causal language model with --roles stack back prefill decode, or with all, "
                "as is the default of `prge export`; `prge tune` takes --roles too",
                code="role-missing",
            )
        self._blocks = blocks
        self._chain = chain
        self._tables = chain.tables
        self._slots = min(slots, chain.bounds.sequences)
        self._context = min(context or chain.bounds.context, chain.bounds.context)
        self._capacity = 0
        self._dtype = np.dtype(precision)
        # Of a block's own by its number and their name, of a shared value by its number.
        self._caches: dict[_Key, Array] = {}
        # By block and name f32 [slots, height, width].
        self._carried: dict[int, dict[str, FloatArray]] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._step: _Step | None = None
        self._rotary: dict[int, FloatArray] = {}
        self._pieces = Pieces(blocks)
        self._experts = Experts(blocks)

    @property
    def vocabulary_size(self) -> int:
        """See Speaker."""
        return self._chain.vocabulary_size

    @property
    def context(self) -> int:
        """See Speaker."""
        return self._context

    @property
    def slots(self) -> int:
        """See Speaker."""
        return self._slots

    def open(self, adapter: Adapter) -> int:
        """See Speaker."""
        if len(self._sequences) >= self._slots:
            raise EngineError(f"all {self._slots} sequences are open", remedy="close one", code="slots-full")
        number, self._next = self._next, self._next + 1
        self._sequences[number] = _Sequence(adapter, len(self._sequences))
        self._forget(self._sequences[number], self._capacity)
        return number

    def length(self, sequence: int) -> int:
        """See Speaker."""
        return self._sequences[sequence].length

    def rewind(self, sequence: int, length: int) -> None:
        """See Speaker."""
        before = self.length(sequence)
        length = min(length, before)
        if length < before and any(self._carried.values()):
            length = 0
        self._sequences[sequence].length = length
        self._forget(self._sequences[sequence], before)

    def close(self, sequence: int) -> None:
        """See Speaker."""
        last = max(self._sequences.values(), key=lambda each: each.slot)
        closed = self._sequences.pop(sequence)
        if last is not closed:
            self._swap(closed.slot, last.slot)
            last.slot = closed.slot
        self._step = None
        if not self._sequences:
            self._caches.clear()
            self._carried.clear()
            self._capacity = 0

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See Speaker."""
        self._reserve(end := self.length(sequence) + len(tokens))
        state, rest = None, list(tokens)
        while rest:
            if len(rest) < FEWEST_TOKENS:
                return self.step({sequence: rest[0]})[sequence]
            piece = _PIECE if end <= LONG else PIECE_OF_LONG
            size = min(len(rest), piece, self._chain.bounds.piece)
            if len(rest) - size == 1 and size > FEWEST_TOKENS:
                # A token that is left alone is a step of its own, which reads all weights once more.
                size -= 1
            state = self._prefill(self._sequences[sequence], rest[:size])
            rest = rest[size:]
        if state is None:
            raise EngineError("no token is given", remedy="give at least one", code="tokens-missing")
        return self._logits(state[:, -1:])[0]

    @property
    def most_checked(self) -> int:
        """See Speaker."""
        carries = any(self._blocks.carried(number) for number in range(self._chain.end))
        # The head takes the tokens of a text as it takes those of as many texts.
        return 0 if carries else min(self._chain.bounds.sequences, self._chain.bounds.piece)

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See Speaker."""
        self._reserve(self.length(sequence) + len(tokens))
        state = self._prefill(self._sequences[sequence], tokens)
        return self._logits(state.reshape(len(tokens), 1, -1))

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """See Speaker."""
        self._reserve(1 + max(self.length(sequence) for sequence in tokens))
        step = self._step
        if step is None or step.sequences != [*tokens]:
            self._arrange([*tokens])
            step = self._step = self._bound([*tokens])
        lengths = [self.length(sequence) for sequence in tokens]
        step.tokens[:, 0] = list(tokens.values())
        for number, table in step.tables.items():
            self._fill(number, table, np.array(lengths))
        for (window, _), seen in step.seen.items():
            _see(seen.reshape(len(lengths), -1, seen.shape[-1]), lengths, window)
            seen[..., 0] = 0
        step.compute()
        for place, found in step.kept:
            for row, length in enumerate(lengths):
                place[row, :, 1 + length] = found[row]
        for place, found in step.carried:
            place[: len(lengths)] = found
        if len(step.pieces) > 1:
            np.concatenate(step.pieces[:, :, 0], axis=1, out=step.logits)
        for sequence in tokens:
            self._sequences[sequence].length += 1
        return {sequence: step.logits[row].copy() for row, sequence in enumerate(tokens)}

    def _lora_a(self, adapter: Adapter) -> Mapping[str, FloatArray]:
        return self._blocks.lora_a if adapter.lora_a is None else adapter.lora_a

    # Sequences and their memory

    def _reserve(self, length: int) -> None:
        """Have room for so many tokens of each sequence."""
        if length > self._context:
            raise EngineError(
                f"a text of {length} tokens is too long, the limit is {self._context}",
                remedy="shorten the prompt, or export the model with a larger --context",
                code="text-too-long",
            )
        if length <= self._capacity:
            return
        # A step reads all of it: little more than what is needed, copied now and then, takes less time.
        self._capacity = min(-(-length // GROWTH) * GROWTH, self._context)
        for number in range(self._chain.end):
            if number not in self._carried:
                shapes = self._blocks.carried(number).items()
                self._carried[number] = {n: np.zeros((self._slots, *s), np.float32) for n, s in shapes}
            heads = self._blocks.heads(number)
            widths = heads.key_width, heads.value_width
            for (_, key), width in zip(self._kept(number), widths, strict=False):
                kept = self._caches.get(key)
                if kept is None or kept.shape[2] != 1 + self._capacity:
                    shape = self._slots, heads.count, 1 + self._capacity, width
                    self._caches[key] = np.zeros(shape, self._dtype)
                    if kept is not None:
                        self._caches[key][:, :, : kept.shape[2]] = kept
        self._step = None

    def _kept(self, number: int) -> list[tuple[str, _Key]]:
        """Names of what is kept of a block's attention, keys and values, each with where it is."""
        if not self._chain.attends(number):
            return []
        block = self._chain.blocks[number]
        keys = [(TAKEN, block.takes[place]) for place in block.past]
        return [*zip((KEYS, VALUES), keys or [(KEYS, number), (VALUES, number)], strict=True)]

    def _forget(self, sequence: _Sequence, before: int) -> None:
        """Clear a slot behind its tokens: a mask hides numbers, but not those that aren't finite.

        Args:
            sequence: with the tokens that it keeps.
            before: tokens that it held.
        """
        for cache in self._caches.values():
            cache[sequence.slot, :, 1 + sequence.length : 1 + before] = 0
        if not sequence.length:
            for carried in self._carried.values():
                for array in carried.values():
                    array[sequence.slot] = 0

    def _arrange(self, sequences: Sequence[int]) -> None:
        """Move some sequences to the first slots, in this order."""
        by_slot = {each.slot: each for each in self._sequences.values()}
        for slot, number in enumerate(sequences):
            wanted, there = self._sequences[number], by_slot[slot]
            if wanted is not there:
                self._swap(slot, wanted.slot)
                by_slot[slot], by_slot[wanted.slot] = wanted, there
                wanted.slot, there.slot = slot, wanted.slot

    def _swap(self, slot: int, other: int) -> None:
        for cache in self._caches.values():
            cache[[slot, other]] = cache[[other, slot]]
        for carried in self._carried.values():
            for kept in carried.values():
                kept[[slot, other]] = kept[[other, slot]]

    # Through the blocks

    def _bound(self, sequences: list[int]) -> _Step:
        """Arrays for steps of some sequences."""
        chain, rows = self._chain, len(sequences)
        pieces = np.empty((len(chain.blocks) - chain.end, rows, 1, chain.piece_words), np.float32)
        logits = np.empty((rows, chain.vocabulary_size), np.float32) if len(pieces) > 1 else pieces[0, :, 0]
        step = _Step(sequences, np.zeros((rows, 1), np.int64), {}, pieces, logits)
        calls: dict[int, tuple[list[Array], list[Array]] | Callable[[], None]] = {}
        state: Array = step.tokens
        values: dict[int, FloatArray] = {}
        for number in (turn.start for turn in chain.turns(range(len(chain.blocks)))):
            if chain.is_expert(number):
                behind = np.empty((rows, 1, self._blocks.routing(number).leaving), np.float32)
                calls[number], state = partial(self._through_experts, number, state, behind), behind
                continue
            given = self._given(step, number, state, values)
            answers = self._carried_on(step, number, given)
            if chain.attends(number):
                answers |= self._attending(step, number, given)
            answers |= self._giving(step, number, values)
            if number < chain.end:
                answers["state"] = state = np.empty((rows, 1, self._blocks.width(number + 1)), np.float32)
            else:
                answers["logits"] = pieces[number - chain.end]
            interface = self._blocks.interface(number, DECODE)
            calls[number] = (
                [given[name] for name in interface.inputs],
                [answers[name] for name in interface.outputs],
            )
        restore = partial(self._restore, step) if step.read else None
        step.compute = self._blocks.in_a_row(DECODE, calls, restore)
        return step

    def _given(
        self, step: _Step, number: int, state: Array, values: Mapping[int, FloatArray]
    ) -> dict[str, Array]:
        """What a block takes of a step: the state, shared values, tables, and the sequences' adapters."""
        chain, block, rows = self._chain, self._chain.blocks[number], len(step.sequences)
        given: dict[str, Array] = {"tokens": state, "state": state}
        given |= {f"{TAKEN}{index}": values[value] for index, value in enumerate(block.takes)}
        for index, table in enumerate(block.tables):
            if chain.tables[table].kind in ("causal", *RELATIONS):
                continue
            if table not in step.tables:
                dtype, shape = self._blocks.tables.tensor(table, 1)
                step.tables[table] = np.zeros((rows, *shape[1:]), dtype)
            given[f"{TABLE}{index}"] = step.tables[table]
        adapters = [self._sequences[sequence].adapter for sequence in step.sequences]
        for index, module in enumerate(block.modules):
            name = chain.modules[module].name
            given[f"lora_a.{index}"] = np.stack([self._lora_a(adapter)[name] for adapter in adapters])
            given[f"lora_b.{index}"] = np.stack([adapter.lora_b[name] for adapter in adapters])
        return given

    def _carried_on(self, step: _Step, number: int, given: dict[str, Array]) -> dict[str, Array]:
        """Answers for what a block carries from token to token, which is added to what is given."""
        rows, answers = len(step.sequences), dict[str, Array]()
        for name, array in self._carried.get(number, {}).items():
            given[name], answers[name] = array[:rows], np.empty((rows, *array.shape[1:]), np.float32)
            step.carried.append((array, answers[name]))
        return answers

    def _attending(self, step: _Step, number: int, given: dict[str, Array]) -> dict[str, Array]:
        """Answers for the keys and values of a block of its own; the past is added to what is given."""
        mask, heads, rows = self._chain.causal_table(number), self._blocks.heads(number), len(step.sequences)
        assert mask is not None
        caches = {name: self._caches[place] for name, place in self._kept(number)}
        key, places = (mask.window, heads.count), 1 + self._capacity
        step.seen.setdefault(key, np.empty((rows * heads.count, 1, places), np.float32))
        given |= {
            PAST_KEYS: self._past(step, number, PAST_KEYS, caches[KEYS]),
            PAST_VALUES: self._past(step, number, PAST_VALUES, caches[VALUES]),
            SEEN: step.seen[key],
            OWN: np.eye(1, places, dtype=np.float32)[None],
        }
        answers: dict[str, Array] = {}
        if not self._chain.blocks[number].past:
            for name, width in ((KEYS, heads.key_width), (VALUES, heads.value_width)):
                answers[name] = np.empty((rows, heads.count, width), np.float32)
                step.kept.append((caches[name], answers[name]))
        return answers

    def _past(self, step: _Step, number: int, name: str, kept: Array) -> FloatArray:
        """What a block reads of the first slots, [rows x heads, 1 + capacity, width]."""
        slots = kept[: len(step.sequences)].reshape(-1, *kept.shape[2:])
        if slots.dtype == np.float32:
            return slots
        array = step.in_float32.setdefault((name, slots.shape), np.empty(slots.shape, np.float32))
        step.read.setdefault(number, []).append((slots, array))
        return array

    def _restore(self, step: _Step, number: int) -> None:
        """Fill the arrays in float32 that a block is about to read."""
        for kept, array in step.read.get(number, ()):
            np.copyto(array, kept)

    def _giving(self, step: _Step, number: int, values: dict[int, FloatArray]) -> dict[str, Array]:
        """Answers for the shared values that a block makes, which are added to those of before."""
        rows, answers = len(step.sequences), dict[str, Array]()
        for index, value in enumerate(self._chain.gives(number)):
            width = self._blocks.shared_width(value)
            answers[f"{GIVEN}{index}"] = values[value] = np.empty((rows, 1, width), np.float32)
            if (cache := self._caches.get((TAKEN, value))) is not None:
                step.kept.append((cache, values[value].reshape(rows, cache.shape[1], -1)))
        return answers

    def _through_experts(self, number: int, state: FloatArray, behind: FloatArray) -> None:
        """Write the state behind a layer's experts."""
        behind[...] = self._experts.forward(number, [state])[0]

    def _prefill(self, sequence: _Sequence, tokens: Sequence[int]) -> FloatArray:
        """The states f32 [1, tokens, width] of some tokens, which are appended to a sequence."""
        chain, start, slot = self._chain, sequence.length, sequence.slot
        piece = slice(start, start + len(tokens))
        state: Array = np.array([tokens], np.int64)
        lora_a, lora_b = self._lora_a(sequence.adapter), sequence.adapter.lora_b
        shared = SharedValues(chain)
        for number in (turn.start for turn in chain.turns(range(chain.end))):
            if chain.is_expert(number):
                entering, state = state, self._experts.forward(number, [state])[0]
                self._blocks.release(entering)
                continue
            known = {name: self._caches[place][slot, :, 1:] for name, place in self._kept(number)}
            given = {"tokens": state, "state": state, **self._pieces.beside(number, piece, known)}
            given |= shared.inputs(number)
            carried = self._carried[number]
            given |= {name: array[slot : slot + 1] for name, array in carried.items()}
            for index, module in enumerate(chain.blocks[number].modules):
                name = chain.modules[module].name
                given[f"lora_a.{index}"], given[f"lora_b.{index}"] = lora_a[name][None], lora_b[name][None]
            found = self._blocks.run(number, PREFILL, given)
            if number:
                self._blocks.release(state)
            state = found["state"]
            for name, whole in known.items():
                if name in found:
                    whole[:, piece] = found[name]
                    self._blocks.release(found[name])
            for name, array in carried.items():
                array[slot] = found[name][0]
                self._blocks.release(found[name])
            shared.keep(number, found)
            for value in chain.gives(number):
                if (cache := self._caches.get((TAKEN, value))) is not None:
                    cache[slot, :, 1:][:, piece] = by_heads(shared.values[value][0], cache.shape[1])
            shared.leave(number, self._blocks.release)
        sequence.length = piece.stop
        kept = state.copy()
        self._blocks.release(state)
        return kept

    def _logits(self, states: FloatArray) -> FloatArray:
        """Logits f32 [tokens, vocabulary] of states f32 [tokens, 1, width]."""
        pieces = []
        for number in range(self._chain.end, len(self._chain.blocks)):
            found = self._blocks.run(number, DECODE, {"state": states})["logits"]
            pieces.append(found.reshape(len(states), -1).copy())
            self._blocks.release(found)
        return np.concatenate(pieces, axis=1)

    def _fill(self, number: int, table: Array, lengths: Array) -> None:
        """Write the rows of a table for tokens that so many others come before."""
        kind = self._tables[number]
        if kind.kind == "positions":
            table[:, 0] = kind.first + lengths
        elif kind.kind == "rotary":
            known = self._rotary.get(number)
            if known is None or len(known) < self._capacity:
                known = self._rotary[number] = self._blocks.tables.of(number, self._capacity)[0]
            table[:, 0] = known[lengths]


def _see(seen: FloatArray, lengths: Sequence[int], window: int | None) -> None:
    """Write what is added to scores of the past, 0 where a step's token sees another and MASKED elsewhere.

    Args:
        seen: f32 [rows, heads, places].
        lengths: tokens before the step's, of each row.
        window: tokens that each sees, with itself; all if None.
    """
    seen[:] = MASKED
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window + 1)
        seen[row, :, 1 + first : 1 + length] = 0


def open_speaker(
    bundle: Bundle,
    *,
    threads: int | None = None,
    engine: EngineName = "auto",
    loaded: int | None = None,
    slots: int = 1,
    context: int | None = None,
    precision: Precision = "float32",
    tell: Callable[[str], None] = lambda text: None,
) -> ChainSpeaker:
    """Open the blocks of a bundle to write text, each tried before it is used.

    Args:
        bundle: with the roles `prefill` and `decode`.
        threads: size of the engine's thread pool; by default what the runtime picks, performance cores.
        engine: see device_runner.engines.choice.
        loaded: bytes of weights that may stay loaded.
        slots: most sequences at once.
        context: most tokens of a sequence.
        precision: of keys and values.
        tell: called with what a user should know.

    Raises:
        BundleError, EngineError: see ChainSpeaker and device_runner.engines.blocks.Blocks.
    """
    backend = choose(engine)
    backend.runtime.prepare()
    if backend.reason:
        tell(f"the engine is torch's: {backend.reason}")
    blocks = Blocks(bundle, backend, {PREFILL, DECODE}, loaded, tell)
    backend.runtime.set_threads(threads)
    return ChainSpeaker(blocks, slots, context, precision)
