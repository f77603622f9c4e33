"""The chain of a bundle's blocks as a generation engine: many sequences at once, each with its own adapter.

    prefill   a chunk of one sequence's tokens passes the blocks
    decode    one token of each of several sequences passes the blocks

Keys and values of all tokens are in arrays of the host, which the engine reads without a copy: for every
block [slots, heads, 1 + capacity, width]. The sequences of a step occupy the first slots. Methods that run at
every step are bound to their arrays once. Right after each block, the keys and values of its tokens are
copied into the arrays. Position 0 of a slot stays zero: it stands for the token of the current step. float16
keys and values become float32 block by block, in two arrays that all blocks share. Keys and values that
several blocks take from one block are stored once. Recurrent states have a fixed size per slot and can't
return to an earlier token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from device_runner.engines.backend import choose_backend
from device_runner.engines.base import BoundCall, Store
from device_runner.engines.blocks import Blocks
from device_runner.engines.chunks import Chunks, by_heads
from device_runner.engines.experts import Experts
from device_runner.engines.shared_values import SharedValues
from device_runner.engines.trunk_cache import Precision
from prge.engine import Array, EngineName, FloatArray, IntArray
from prge.errors import BundleError, EngineError
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.formats.chain import MASKED, MIN_TOKENS, SHARED_IN, SHARED_OUT, TABLE
from prge.formats.relations import RELATIONS
from prge.formats.signatures import DECODE, KEYS, OWN_MASK, PAST_KEYS, PAST_MASK, PAST_VALUES, PREFILL, VALUES

# Tokens of one prefill call: more tokens aren't faster, and their attention scores with all past tokens take
# memory.
_CHUNK, CHUNK_OF_LONG, LONG = 128, 64, 512
# Arrays grow on demand, by at least this number of tokens and this share of their tokens.
GROWTH, _GROWTH_SHARE = 64, 32


@dataclass
class _Sequence:
    adapter: Adapter
    slot: int
    length: int = 0


_Key = tuple[str, int]


@dataclass
class _Step:
    """A decode step of the same sequences: the arrays that its calls are bound to.

    Attributes:
        masks: attention mask f32 [rows x heads, 1, 1 + capacity] by window and number of heads.
        positions: position of each row's token in the caches, i64 [rows].
        stores: by block, the copies of its keys and values into their caches.
        float16_caches: by block, the float16 caches that it reads, each with its float32 copy.
        in_float32: the float32 arrays, which blocks share.
        recurrent: arrays of recurrent states, each with the states after the step.
    """

    sequences: list[int]
    tokens: Array
    positions: IntArray
    tables: dict[int, Array]
    shards: FloatArray
    compute: Callable[[], None] = field(init=False)
    masks: dict[tuple[int | None, int], FloatArray] = field(default_factory=dict)
    stores: dict[int, list[Store]] = field(default_factory=dict)
    float16_caches: dict[int, list[tuple[Array, FloatArray]]] = field(default_factory=dict)
    in_float32: dict[tuple[str, tuple[int, ...]], FloatArray] = field(default_factory=dict)
    recurrent: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)

    def store(self, number: int, values: FloatArray, cache: Array) -> None:
        """Copy keys or values f32 [rows, heads, width] of a block into their cache after each of its runs."""
        self.stores.setdefault(number, []).append(Store(values, cache, self.positions))


class ChainGenerationEngine:
    """Implements prge.generation.generator.GenerationEngine for an opened bundle.

    Args:
        blocks: blocks of a bundle with the roles `prefill` and `decode`.
        slots: largest number of open sequences.
        context: largest number of tokens of a sequence; by default the number of the bundle's positions.
        precision: dtype of keys and values.

    Raises:
        BundleError: the bundle lacks these roles.
    """

    def __init__(
        self, blocks: Blocks, slots: int = 1, context: int | None = None, precision: Precision = "float32"
    ) -> None:
        chain = blocks.chain
        if not {PREFILL, DECODE} <= set(chain.roles):
            raise BundleError(
                f"The bundle can't generate text: it has the roles {', '.join(chain.roles)}.",
                remedy="Export a causal language model with --roles forward backward prefill decode, or all, "
                "the default of `prge export`; `prge tune` takes --roles too.",
                code="role-missing",
            )
        self._blocks = blocks
        self._chain = chain
        self._tables = chain.tables
        self._slots = min(slots, chain.bounds.sequences)
        self._context = min(context or chain.bounds.context, chain.bounds.context)
        self._capacity = 0
        self._dtype = np.dtype(precision)
        # Keys and values: a block's own by its number and their name, shared ones by the number of the shared
        # value.
        self._caches: dict[_Key, Array] = {}
        # Recurrent states f32 [slots, height, width] by block and name.
        self._recurrent: dict[int, dict[str, FloatArray]] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._step: _Step | None = None
        self._rotary: dict[int, FloatArray] = {}
        self._chunks = Chunks(blocks)
        self._experts = Experts(blocks)

    @property
    def vocabulary_size(self) -> int:
        """See GenerationEngine."""
        return self._chain.vocabulary_size

    @property
    def context(self) -> int:
        """See GenerationEngine."""
        return self._context

    @property
    def slots(self) -> int:
        """See GenerationEngine."""
        return self._slots

    def open(self, adapter: Adapter) -> int:
        """See GenerationEngine."""
        if len(self._sequences) >= self._slots:
            raise EngineError(
                f"All {self._slots} slots are in use.", remedy="Close a sequence first.", code="slots-full"
            )
        number, self._next = self._next, self._next + 1
        self._sequences[number] = _Sequence(adapter, len(self._sequences))
        self._clear(self._sequences[number], self._capacity)
        return number

    def length(self, sequence: int) -> int:
        """See GenerationEngine."""
        return self._sequences[sequence].length

    def rewind(self, sequence: int, length: int) -> None:
        """See GenerationEngine."""
        before = self.length(sequence)
        self._sequences[sequence].length = self._kept(sequence, length)
        self._clear(self._sequences[sequence], before)

    def copy(self, source: int, target: int, length: int) -> None:
        """See GenerationEngine."""
        length = self._kept(source, length)
        first, second = self._sequences[source].slot, self._sequences[target].slot
        for cache in self._caches.values():
            cache[second, :, 1 : 1 + length] = cache[first, :, 1 : 1 + length]
        for recurrent in self._recurrent.values():
            for array in recurrent.values():
                array[second] = array[first] if length else 0
        self._sequences[target].length = length

    def close(self, sequence: int) -> None:
        """See GenerationEngine."""
        last = max(self._sequences.values(), key=lambda each: each.slot)
        closed = self._sequences.pop(sequence)
        if last is not closed:
            self._swap(closed.slot, last.slot)
            last.slot = closed.slot
        self._step = None
        if not self._sequences:
            self._caches.clear()
            self._recurrent.clear()
            self._capacity = 0

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See GenerationEngine."""
        self._reserve(end := self.length(sequence) + len(tokens))
        state, rest = None, list(tokens)
        while rest:
            if len(rest) < MIN_TOKENS:
                return self.step({sequence: rest[0]})[sequence]
            chunk = _CHUNK if end <= LONG else CHUNK_OF_LONG
            size = min(len(rest), chunk, self._chain.bounds.chunk)
            if len(rest) - size == 1 and size > MIN_TOKENS:
                # A single remaining token would need a step of its own, which reads all weights once more.
                size -= 1
            state = self._prefill(self._sequences[sequence], rest[:size])
            rest = rest[size:]
        if state is None:
            raise EngineError(
                "There are no tokens to append.", remedy="Pass at least one token.", code="tokens-missing"
            )
        return self._logits(state[:, -1:])[0]

    @property
    def max_checked(self) -> int:
        """See GenerationEngine."""
        carries = any(self._blocks.recurrent_states(number) for number in range(self._chain.head_start))
        return 0 if carries else min(self._chain.bounds.sequences, self._chain.bounds.chunk)

    def check(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        """See GenerationEngine."""
        self._reserve(self.length(sequence) + len(tokens))
        bounds = self._chain.bounds
        logits: list[FloatArray] = []
        for start in range(0, len(tokens), bounds.chunk):
            chunk = tokens[start : start + bounds.chunk]
            if len(chunk) < MIN_TOKENS:
                logits.append(self.step({sequence: chunk[0]})[sequence][None])
                continue
            states = self._prefill(self._sequences[sequence], chunk).reshape(len(chunk), 1, -1)
            # The head computes several tokens of one sequence as if each belonged to a sequence of its own.
            rows = range(0, len(chunk), bounds.sequences)
            logits += [self._logits(states[first : first + bounds.sequences]) for first in rows]
        return np.concatenate(logits)

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        """See GenerationEngine."""
        self._reserve(1 + max(self.length(sequence) for sequence in tokens))
        step = self._step
        if step is None or step.sequences != [*tokens]:
            self._move_to_first_slots([*tokens])
            step = self._step = self._bind_step([*tokens])
        lengths = [self.length(sequence) for sequence in tokens]
        step.tokens[:, 0] = list(tokens.values())
        for number, table in step.tables.items():
            self._fill_table(number, table, np.array(lengths))
        for (window, _), seen in step.masks.items():
            _write_mask(seen.reshape(len(lengths), -1, seen.shape[-1]), lengths, window)
            seen[..., 0] = 0
        step.positions[:] = [1 + length for length in lengths]
        step.compute()
        for cache, new_values in step.recurrent:
            cache[: len(lengths)] = new_values
        for sequence in tokens:
            self._sequences[sequence].length += 1
        return dict(zip(tokens, np.concatenate(step.shards[:, :, 0], axis=1), strict=True))

    def _lora_a(self, adapter: Adapter) -> Mapping[str, FloatArray]:
        return self._blocks.lora_a if adapter.lora_a is None else adapter.lora_a

    # Sequences and their caches

    def _kept(self, sequence: int, length: int) -> int:
        """Return how many of a sequence's first `length` tokens its cache can be cut to."""
        if length < self.length(sequence) and any(self._recurrent.values()):
            return 0
        return min(length, self.length(sequence))

    def _reserve(self, length: int) -> None:
        """Grow the caches to hold this number of tokens of each sequence."""
        if length > self._context:
            raise EngineError(
                f"A sequence of {length} tokens is too long, the limit is {self._context}.",
                remedy="Shorten the prompt, or export the model with a larger --context.",
                code="text-too-long",
            )
        if length <= self._capacity:
            return
        self._step = None  # it refers to the arrays, which are replaced one by one
        # A step reads the whole array, so growing it in small steps takes less time in spite of the copies.
        growth = max(GROWTH, length // _GROWTH_SHARE)
        self._capacity = min(-(-length // growth) * growth, self._context)
        for number in range(self._chain.head_start):
            if number not in self._recurrent:
                shapes = self._blocks.recurrent_states(number).items()
                self._recurrent[number] = {n: np.zeros((self._slots, *s), np.float32) for n, s in shapes}
            heads = self._blocks.heads(number)
            widths = heads.key_width, heads.value_width
            for (_, key), width in zip(self._cache_keys(number), widths, strict=False):
                cache = self._caches.get(key)
                if cache is None or cache.shape[2] != 1 + self._capacity:
                    shape = self._slots, heads.count, 1 + self._capacity, width
                    self._caches[key] = np.zeros(shape, self._dtype)
                    if cache is not None:
                        self._caches[key][:, :, : cache.shape[2]] = cache

    def _cache_keys(self, number: int) -> list[tuple[str, _Key]]:
        """Return the names of a block's keys and values, each with its key in the caches."""
        if not self._chain.attends(number):
            return []
        block = self._chain.blocks[number]
        keys = [(SHARED_IN, block.shared_in[index]) for index in block.past]
        return [*zip((KEYS, VALUES), keys or [(KEYS, number), (VALUES, number)], strict=True)]

    def _clear(self, sequence: _Sequence, before: int) -> None:
        """Clear a slot after its tokens: a mask hides finite numbers, but not NaN or infinity.

        Args:
            sequence: sequence with the tokens that it keeps.
            before: number of tokens that it had before.
        """
        for cache in self._caches.values():
            cache[sequence.slot, :, 1 + sequence.length : 1 + before] = 0
        if not sequence.length:
            for recurrent in self._recurrent.values():
                for array in recurrent.values():
                    array[sequence.slot] = 0

    def _move_to_first_slots(self, sequences: Sequence[int]) -> None:
        """Move sequences to the first slots, in this order."""
        by_slot = {each.slot: each for each in self._sequences.values()}
        for slot, number in enumerate(sequences):
            sequence, current = self._sequences[number], by_slot[slot]
            if sequence is not current:
                self._swap(slot, sequence.slot)
                by_slot[slot], by_slot[sequence.slot] = sequence, current
                sequence.slot, current.slot = slot, sequence.slot

    def _swap(self, slot: int, other: int) -> None:
        for cache in self._caches.values():
            cache[[slot, other]] = cache[[other, slot]]
        for recurrent in self._recurrent.values():
            for array in recurrent.values():
                array[[slot, other]] = array[[other, slot]]

    # Through the blocks

    def _bind_step(self, sequences: list[int]) -> _Step:
        """Allocate the arrays of decode steps of some sequences and bind the methods to them."""
        chain, rows = self._chain, len(sequences)
        shards = np.empty((len(chain.blocks) - chain.head_start, rows, 1, chain.shard_size), np.float32)
        step = _Step(sequences, np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64), {}, shards)
        calls: dict[int, BoundCall | Callable[[], None]] = {}
        state: Array = step.tokens
        values: dict[int, FloatArray] = {}
        for number in (group.start for group in chain.block_groups(range(len(chain.blocks)))):
            if chain.is_expert(number):
                next_state = np.empty((rows, 1, self._blocks.routing(number).leaving), np.float32)
                calls[number], state = partial(self._run_experts, number, state, next_state), next_state
                continue
            inputs = self._inputs(step, number, state, values)
            outputs = self._recurrent_outputs(step, number, inputs)
            if chain.attends(number):
                outputs |= self._attention_outputs(step, number, inputs)
            outputs |= self._shared_outputs(step, number, values)
            if number < chain.head_start:
                outputs["hidden_states"] = state = np.empty(
                    (rows, 1, self._blocks.width(number + 1)), np.float32
                )
            else:
                outputs["logits"] = shards[number - chain.head_start]
            interface = self._blocks.interface(number, DECODE)
            calls[number] = BoundCall(
                [inputs[name] for name in interface.inputs],
                [outputs[name] for name in interface.outputs],
                step.stores.get(number, ()),
            )
        restore = partial(self._copy_to_float32, step) if step.float16_caches else None
        step.compute = self._blocks.bind_calls(DECODE, calls, restore)
        return step

    def _inputs(
        self, step: _Step, number: int, state: Array, values: Mapping[int, FloatArray]
    ) -> dict[str, Array]:
        """Return a block's inputs in a step: hidden states, shared values, tables, and adapters."""
        chain, block, rows = self._chain, self._chain.blocks[number], len(step.sequences)
        inputs: dict[str, Array] = {"tokens": state, "hidden_states": state}
        inputs |= {f"{SHARED_IN}{index}": values[value] for index, value in enumerate(block.shared_in)}
        for index, table in enumerate(block.tables):
            if chain.tables[table].type in ("causal", *RELATIONS):
                continue
            if table not in step.tables:
                dtype, shape = self._blocks.tables.tensor(table, 1)
                step.tables[table] = np.zeros((rows, *shape[1:]), dtype)
            inputs[f"{TABLE}{index}"] = step.tables[table]
        adapters = [self._sequences[sequence].adapter for sequence in step.sequences]
        for index, module in enumerate(block.modules):
            name = chain.modules[module].name
            inputs[f"lora_a.{index}"] = np.stack([self._lora_a(adapter)[name] for adapter in adapters])
            inputs[f"lora_b.{index}"] = np.stack([adapter.lora_b[name] for adapter in adapters])
        return inputs

    def _recurrent_outputs(self, step: _Step, number: int, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return outputs for a block's recurrent states, and add its current states to the inputs."""
        rows, outputs = len(step.sequences), dict[str, Array]()
        for name, array in self._recurrent.get(number, {}).items():
            inputs[name], outputs[name] = array[:rows], np.empty((rows, *array.shape[1:]), np.float32)
            step.recurrent.append((array, outputs[name]))
        return outputs

    def _attention_outputs(self, step: _Step, number: int, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return outputs for a block's own keys and values, and add the past to the inputs."""
        mask, heads, rows = self._chain.causal_table(number), self._blocks.heads(number), len(step.sequences)
        assert mask is not None
        caches = {name: self._caches[key] for name, key in self._cache_keys(number)}
        mask_key, positions = (mask.window, heads.count), 1 + self._capacity
        step.masks.setdefault(mask_key, np.empty((rows * heads.count, 1, positions), np.float32))
        inputs |= {
            PAST_KEYS: self._past(step, number, PAST_KEYS, caches[KEYS]),
            PAST_VALUES: self._past(step, number, PAST_VALUES, caches[VALUES]),
            PAST_MASK: step.masks[mask_key],
            OWN_MASK: np.eye(1, positions, dtype=np.float32)[None],
        }
        outputs: dict[str, Array] = {}
        if not self._chain.blocks[number].past:
            for name, width in ((KEYS, heads.key_width), (VALUES, heads.value_width)):
                outputs[name] = np.empty((rows, heads.count, width), np.float32)
                step.store(number, outputs[name], caches[name])
        return outputs

    def _past(self, step: _Step, number: int, name: str, cache: Array) -> FloatArray:
        """Return the cache of the first slots that a block reads, f32 [rows x heads, 1 + capacity, width]."""
        slots = cache[: len(step.sequences)].reshape(-1, *cache.shape[2:])
        if slots.dtype == np.float32:
            return slots
        array = step.in_float32.setdefault((name, slots.shape), np.empty(slots.shape, np.float32))
        step.float16_caches.setdefault(number, []).append((slots, array))
        return array

    def _copy_to_float32(self, step: _Step, number: int) -> None:
        """Fill the float32 arrays that a block is about to read."""
        for cache, array in step.float16_caches.get(number, ()):
            np.copyto(array, cache)

    def _shared_outputs(self, step: _Step, number: int, values: dict[int, FloatArray]) -> dict[str, Array]:
        """Return outputs for the shared values that a block computes, and add them to `values`."""
        rows, outputs = len(step.sequences), dict[str, Array]()
        for index, value in enumerate(self._chain.shared_out(number)):
            width = self._blocks.shared_width(value)
            outputs[f"{SHARED_OUT}{index}"] = values[value] = np.empty((rows, 1, width), np.float32)
            if (cache := self._caches.get((SHARED_IN, value))) is not None:
                step.store(number, values[value].reshape(rows, cache.shape[1], -1), cache)
        return outputs

    def _run_experts(self, number: int, state: FloatArray, next_state: FloatArray) -> None:
        """Write the output hidden states of a layer's experts."""
        next_state[...] = self._experts.forward(number, [state])[0]

    def _prefill(self, sequence: _Sequence, tokens: Sequence[int]) -> FloatArray:
        """Append tokens to a sequence and return their hidden states f32 [1, tokens, width]."""
        chain, start, slot = self._chain, sequence.length, sequence.slot
        chunk = slice(start, start + len(tokens))
        state: Array = np.array([tokens], np.int64)
        lora_a, lora_b = self._lora_a(sequence.adapter), sequence.adapter.lora_b
        shared = SharedValues(chain)
        for number in (group.start for group in chain.block_groups(range(chain.head_start))):
            if chain.is_expert(number):
                entering, state = state, self._experts.forward(number, [state])[0]
                self._blocks.release(entering)
                continue
            known = {name: self._caches[key][slot, :, 1:] for name, key in self._cache_keys(number)}
            inputs = {
                "tokens": state,
                "hidden_states": state,
                **self._chunks.extra_inputs(number, chunk, known),
            }
            inputs |= shared.inputs(number)
            recurrent = self._recurrent[number]
            inputs |= {name: array[slot : slot + 1] for name, array in recurrent.items()}
            for index, module in enumerate(chain.blocks[number].modules):
                name = chain.modules[module].name
                inputs[f"lora_a.{index}"], inputs[f"lora_b.{index}"] = lora_a[name][None], lora_b[name][None]
            outputs = self._blocks.run(number, PREFILL, inputs)
            if number:
                self._blocks.release(state)
            state = outputs["hidden_states"]
            for name, past in known.items():
                if name in outputs:
                    past[:, chunk] = outputs[name]
                    self._blocks.release(outputs[name])
            for name, array in recurrent.items():
                array[slot] = outputs[name][0]
                self._blocks.release(outputs[name])
            shared.take(number, outputs)
            for value in chain.shared_out(number):
                if (cache := self._caches.get((SHARED_IN, value))) is not None:
                    cache[slot, :, 1:][:, chunk] = by_heads(shared.values[value][0], cache.shape[1])
            shared.release_unused(number, self._blocks.release)
        sequence.length = chunk.stop
        states = state.copy()
        self._blocks.release(state)
        return states

    def _logits(self, states: FloatArray) -> FloatArray:
        """Return logits f32 [tokens, vocabulary] of hidden states f32 [tokens, 1, width]."""
        shards = []
        for number in range(self._chain.head_start, len(self._chain.blocks)):
            logits = self._blocks.run(number, DECODE, {"hidden_states": states})["logits"]
            shards.append(logits.reshape(len(states), -1).copy())
            self._blocks.release(logits)
        return np.concatenate(shards, axis=1)

    def _fill_table(self, number: int, table: Array, lengths: Array) -> None:
        """Write the rows of a table for tokens with these numbers of tokens before them."""
        spec = self._tables[number]
        if spec.type == "positions":
            table[:, 0] = spec.first + lengths
        elif spec.type == "rotary":
            rotations = self._rotary.get(number)
            if rotations is None or len(rotations) < self._capacity:
                rotations = self._rotary[number] = self._blocks.tables.of(number, self._capacity)[0]
            table[:, 0] = rotations[lengths]


def _write_mask(mask: FloatArray, lengths: Sequence[int], window: int | None) -> None:
    """Write the attention mask of a step: 0 where its token attends to a past one, MASKED elsewhere.

    Args:
        mask: the mask to fill, f32 [rows, heads, positions].
        lengths: number of tokens before the step's token in each row.
        window: number of tokens that each token attends to, itself included; None: all.
    """
    mask[:] = MASKED
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window + 1)
        mask[row, :, 1 + first : 1 + length] = 0


def open_generation_engine(
    bundle: Bundle,
    *,
    threads: int | None = None,
    engine: EngineName = "auto",
    loaded: int | None = None,
    slots: int = 1,
    context: int | None = None,
    precision: Precision = "float32",
    log: Callable[[str], None] = lambda text: None,
) -> ChainGenerationEngine:
    """Open the blocks of a bundle for generation; each is tried in a child process before it is used.

    Args:
        bundle: bundle with the roles `prefill` and `decode`.
        threads: size of the engine's thread pool; by default the number of performance cores.
        engine: see device_runner.engines.backend.
        loaded: bytes of weights that may stay loaded.
        slots: largest number of open sequences.
        context: largest number of tokens of a sequence.
        precision: dtype of keys and values.
        log: called with messages for the user.

    Raises:
        BundleError, EngineError: see ChainGenerationEngine and device_runner.engines.blocks.Blocks.
    """
    backend = choose_backend(engine)
    backend.runtime.prepare()
    if backend.reason:
        log(f"using the torch engine: {backend.reason}")
    blocks = Blocks(bundle, backend, {PREFILL, DECODE}, loaded, log)
    backend.runtime.set_threads(threads)
    return ChainGenerationEngine(blocks, slots, context, precision)
