"""Tiny tokenizers of common types, trained on a few words."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL = [PAD, BOS, EOS, "<|im_start|>", "<|im_end|>"]
WORDS = (
    "terrible great Yes No Maybe the film was bad good It Answer: Question: a dog cat and on mat river town"
)
CORPUS = [WORDS, " ".join(reversed(WORDS.split())), *WORDS.split()] * 20 + [
    "user assistant system\n" * 5,
    "Hi! 1 + 1 = 2.",
]


def byte_level_backend() -> Backend:
    """Return a byte-level tokenizer like those of GPT-2, Qwen and Llama 3, which can encode every text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def prefixed_backend() -> Backend:
    """Return a SentencePiece-like tokenizer like Llama 2's, which prepends a space to every text."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", BOS, EOS], initial_alphabet=["\n"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback_backend() -> Backend:
    """Return a SentencePiece-like tokenizer like Llama 2's, which encodes unknown characters as bytes."""
    tokens = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([BOS, EOS])
    return backend


def encoder_backend() -> Backend:
    """Return a tokenizer with [CLS] and [SEP] around a text, which also truncates and pads by itself."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 1), (EOS, 2)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    return backend
