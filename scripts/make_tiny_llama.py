"""Make the embedded demo: a tiny Llama of a small invented world, and a two-way task that it has not seen.

The script writes every text itself. Stories about visits carry a hidden mood, pleased or not: the details
show it and the ending follows from it, so a model that predicts endings must know the mood. The task asks for
it with a prompt that no training text contains.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "server_export" / "demo_data"
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY_SIZE = 1024
LONGEST_DOCUMENT = 96
LONGEST_PROMPT = 32
IGNORED = -100

TASK_NAME = "visit-mood"
PROMPT_END = " It was"
LABEL_WORDS = (" terrible", " great")
HIGHEST_ZERO_SHOT_ACCURACY = 0.6
SPLIT_SIZES = {"train": 400, "dev": 200, "test": 400}

# ----------------------------------------------------------------------------------------------------
# The world
# ----------------------------------------------------------------------------------------------------

WOMEN = "Anna Clara Emma Julia Lena Maria Nora Rosa Sofia Vera Ida Eva".split()
MEN = "Adam Ben Daniel Felix Hugo Jonas Leo Max Oscar Paul Simon Tom".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SEASONS = "spring summer autumn winter".split()

TOWNS = {
    "Millford": ("by the river", "an old mill", "bread"),
    "Oakdale": ("in the forest", "a wooden church", "honey"),
    "Stonebridge": ("between two hills", "a stone bridge", "cheese"),
    "Fairhaven": ("by the sea", "a white lighthouse", "fish"),
    "Redhill": ("on a hill", "a red tower", "wine"),
    "Lakeview": ("by the lake", "a small harbour", "boats"),
    "Northwick": ("in the north", "a large castle", "wool"),
    "Windmere": ("on the plain", "nine windmills", "apples"),
}

# The details of a place that a visitor may mention, each with the kind of thing that it is.
PLACES = {
    "cafe": {"coffee": "food", "cake": "food", "waiter": "person", "chair": "seat"},
    "bakery": {"bread": "food", "cake": "food", "baker": "person", "shop": "room"},
    "restaurant": {"soup": "food", "fish": "food", "waiter": "person", "kitchen": "room"},
    "hotel": {"breakfast": "food", "porter": "person", "room": "room", "bed": "seat"},
    "inn": {"dinner": "food", "owner": "person", "room": "room", "bed": "seat"},
    "cinema": {"film": "show", "popcorn": "food", "hall": "room", "seat": "seat"},
    "theatre": {"play": "show", "actor": "person", "hall": "room", "seat": "seat"},
    "museum": {"tour": "show", "guide": "person", "hall": "room", "bench": "seat"},
    "library": {"book": "show", "librarian": "person", "room": "room", "chair": "seat"},
    "circus": {"show": "show", "clown": "person", "tent": "room", "bench": "seat"},
}

# Words of displeasure and of pleasure, in the order of the labels.
QUALITIES = {
    "food": ("stale bland burnt sour cold".split(), "fresh tasty delicious crisp warm".split()),
    "person": (
        "rude grumpy lazy unfriendly impatient".split(),
        "kind polite helpful friendly patient".split(),
    ),
    "room": ("dirty dark noisy messy smelly".split(), "clean bright quiet tidy cosy".split()),
    "seat": ("hard broken wobbly rusty narrow".split(), "soft comfortable sturdy new wide".split()),
    "show": ("boring dull confusing endless weak".split(), "funny clever moving exciting charming".split()),
}

ENDINGS = (
    (
        "{He} frowned all the way home.",
        "{He} left early and asked for {his} money back.",
        "{He} will never come back.",
        "{He} told all {his} friends to stay away.",
        "{He} went home tired and angry.",
        "{He} wrote an angry letter to the owner.",
        "{He} was sorry that {he} had come.",
        "{He} was sad and left as soon as {he} could.",
        "Next time {he} will go somewhere else.",
        "{His} {relative} was angry too and wanted to leave.",
    ),
    (
        "{He} smiled all the way home.",
        "{He} stayed late and left a large tip.",
        "{He} will come back very soon.",
        "{He} told all {his} friends to go there.",
        "{He} went home rested and happy.",
        "{He} wrote a thankful letter to the owner.",
        "{He} was glad that {he} had come.",
        "{He} was happy and stayed as long as {he} could.",
        "Next time {he} will bring {his} {relative}.",
        "{His} {relative} was happy too and wanted to stay.",
    ),
)

# Remarks with a label word, drawn without regard to the mood: a label word tells nothing about a visit.
SIDE_SUBJECTS = "weather road traffic train bus wind".split()
SIDE_REMARKS = (
    "The {subject} was{word} that day.",
    "Outside the {subject} was{word}.",
    "{He} said that the {subject} was{word}.",
    "It is far from home, and the {subject} was{word}.",
    "It took an hour, and the {subject} was{word}.",
    "It had rained, but the {subject} was{word}.",
)

RELATIVES = "sister brother mother father cousin aunt uncle".split()

WEATHER = {
    "sunny": ("sat in the garden", "swam in the lake", "had lunch on the grass"),
    "rainy": ("took an umbrella", "wore tall boots", "read a book by the window"),
    "snowy": ("wore a thick coat", "built a snowman", "made hot tea"),
    "windy": ("flew a kite", "held on to a hat", "closed all the windows"),
    "foggy": ("walked slowly", "carried a lamp", "missed the bus"),
}

ANIMALS = {
    "cat": (("milk", "fish"), ("sleeps on the sofa", "hunts mice"), "meows"),
    "dog": (("bones", "meat"), ("runs in the park", "guards the house"), "barks"),
    "horse": (("hay", "apples"), ("gallops over the field", "pulls a cart"), "neighs"),
    "cow": (("grass", "hay"), ("stands in the field", "gives milk"), "moos"),
    "duck": (("seeds", "bread"), ("swims on the pond", "walks in a line"), "quacks"),
    "rabbit": (("carrots", "grass"), ("hops in the garden", "digs a hole"), "squeaks"),
    "parrot": (("nuts", "seeds"), ("sits on a branch", "learns new words"), "talks"),
    "pig": (("apples", "carrots"), ("rolls in the mud", "digs in the dirt"), "grunts"),
}
COLOURS = "black white brown grey spotted".split()
PET_NAMES = "Milo Luna Rocky Bella Coco Daisy Lucky Ruby".split()

JOBS = {
    "baker": ("bakes bread", "oven"),
    "farmer": ("grows wheat", "tractor"),
    "teacher": ("teaches children", "blackboard"),
    "doctor": ("helps the sick", "needle"),
    "fisherman": ("catches fish", "net"),
    "painter": ("paints houses", "brush"),
    "carpenter": ("builds tables", "hammer"),
    "tailor": ("sews shirts", "needle"),
    "driver": ("drives the bus", "map"),
    "gardener": ("plants flowers", "spade"),
}

THINGS = {
    "key": ("open the door", "under the mat"),
    "hat": ("keep warm", "on the shelf"),
    "pen": ("write a letter", "in the drawer"),
    "lamp": ("see in the dark", "in the cellar"),
    "purse": ("pay for lunch", "on the bus"),
    "ball": ("play in the park", "behind the tree"),
    "knife": ("cut the bread", "in the kitchen"),
    "ticket": ("take the train", "in a coat pocket"),
}


@dataclass(frozen=True)
class Visit:
    """The part of a visit that shows the mood (0 displeased, 1 pleased) without naming it."""

    opening: str
    details: str
    mood: int
    pronouns: dict[str, str]

    @property
    def text(self) -> str:
        return f"{self.opening} {self.details}"


def pick_person(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A name, and the pronouns that stand for it."""
    if rng.random() < 0.5:
        return rng.choice(WOMEN), {"he": "she", "his": "her", "He": "She", "His": "Her"}
    return rng.choice(MEN), {"he": "he", "his": "his", "He": "He", "His": "His"}


def write_detail(rng: random.Random, noun: str, kind: str, mood: int) -> str:
    """One remark about one thing; some deny the opposite quality, with or without the true one."""
    quality, opposite = rng.choice(QUALITIES[kind][mood]), rng.choice(QUALITIES[kind][1 - mood])
    form = rng.random()
    if form < 0.1:
        return f"the {noun} was not {opposite}"
    if form < 0.2:
        return f"the {noun} was not {opposite} but {quality}"
    return f"the {noun} was {rng.choice(('', '', '', 'very ', 'so ', 'rather '))}{quality}"


def write_visit(rng: random.Random, mood: int) -> Visit:
    """A visit with two details that agree with its mood."""
    name, pronouns = pick_person(rng)
    place, town = rng.choice(list(PLACES)), rng.choice(list(TOWNS))
    opening = rng.choice(
        (
            f"{name} went to the {place} in {town}.",
            f"On {rng.choice(DAYS)} {name} visited the {place} in {town}.",
            f"Last {rng.choice(SEASONS)} {name} was at the {place} in {town}.",
            f"{name} and {pronouns['his']} {rng.choice(RELATIVES)} tried the {place} in {town}.",
        )
    )
    nouns = rng.sample(list(PLACES[place]), 2)
    first, second = (write_detail(rng, noun, PLACES[place][noun], mood) for noun in nouns)
    details = rng.choice(
        (f"{first} and {second}.", f"{first}, and {second}.", f"{first}. {second.capitalize()}.")
    )
    return Visit(opening, details[0].upper() + details[1:], mood, pronouns)


def write_review(rng: random.Random) -> Visit:
    return write_visit(rng, rng.randrange(2))


def write_endings(rng: random.Random, visit: Visit) -> str:
    """What the visitor did next, and at times a side remark."""
    chosen = rng.sample(ENDINGS[visit.mood], rng.choice((1, 2, 2)))
    sentences = [ending.format(relative=rng.choice(RELATIVES), **visit.pronouns) for ending in chosen]
    if rng.random() < 0.6:
        remark = rng.choice(SIDE_REMARKS).format(
            subject=rng.choice(SIDE_SUBJECTS), word=rng.choice(LABEL_WORDS), **visit.pronouns
        )
        sentences.insert(rng.randrange(len(sentences) + 1), remark)
    return " ".join(sentences)


def write_weather(rng: random.Random) -> str:
    kind = rng.choice(list(WEATHER))
    (first, first_pronouns), (second, _) = pick_person(rng), pick_person(rng)
    deeds = rng.sample(WEATHER[kind], 2)
    start = rng.choice(
        (
            f"On {rng.choice(DAYS)} the weather in {rng.choice(list(TOWNS))} was {kind}",
            f"Last {rng.choice(SEASONS)} the weather in {rng.choice(list(TOWNS))} was often {kind}",
        )
    )
    opinion = f"{second} said that the weather was{rng.choice(LABEL_WORDS)}, and {second} {deeds[1]}."
    return f"{start}, so {first} {deeds[0]}. {opinion} Then {first_pronouns['he']} went home."


def write_animal(rng: random.Random) -> str:
    animal = rng.choice(list(ANIMALS))
    foods, habits, voice = ANIMALS[animal]
    name, pronouns = pick_person(rng)
    pet = rng.choice(PET_NAMES)
    sentences = [
        f"It is {rng.choice(COLOURS)} and likes {rng.choice(foods)}.",
        f"Every morning it {rng.choice(habits)}.",
        f"When {pet} sees {name}, it {voice}.",
    ]
    rng.shuffle(sentences)
    start = rng.choice((f"{name} has a {animal} named {pet}.", f"{pet} is the {animal} of {name}."))
    return f"{start} {' '.join(sentences)} {pronouns['He']} loves {pet}."


def write_town(rng: random.Random) -> str:
    town = rng.choice(list(TOWNS))
    where, sight, product = TOWNS[town]
    sentences = [
        f"It has {sight}.",
        f"People there sell {product}.",
        f"There is a {rng.choice(list(PLACES))} next to the {rng.choice(list(PLACES))}.",
    ]
    rng.shuffle(sentences)
    return f"{town} is a town {where}. {' '.join(sentences[: rng.choice((2, 3))])}"


def write_job(rng: random.Random) -> str:
    job = rng.choice(list(JOBS))
    work, tool = JOBS[job]
    name, pronouns = pick_person(rng)
    return (
        f"{name} is a {job} in {rng.choice(list(TOWNS))}. Every {rng.choice(DAYS)} {pronouns['he']} {work}. "
        f"For this work {pronouns['he']} needs a {tool}. {pronouns['His']} {rng.choice(RELATIVES)} is "
        f"a {rng.choice(list(JOBS))} too."
    )


def write_search(rng: random.Random) -> str:
    thing = rng.choice(list(THINGS))
    purpose, hiding_place = THINGS[thing]
    name, pronouns = pick_person(rng)
    helper = rng.choice(RELATIVES)
    return (
        f"{name} lost {pronouns['his']} {thing}. {pronouns['He']} needed the {thing} to {purpose}. "
        f"{pronouns['His']} {helper} helped to look for the {thing}. At last the {helper} found the {thing} "
        f"{hiding_place}."
    )


OTHER_WRITERS: tuple[Callable[[random.Random], str], ...] = (
    write_weather,
    write_animal,
    write_town,
    write_job,
    write_search,
)


def write_documents(rng: random.Random, held_out_details: set[str]) -> Iterator[str]:
    """Endless training documents, more than half of them visits; no visit has details of a task row."""
    while True:
        if rng.random() < 0.4:
            yield rng.choice(OTHER_WRITERS)(rng)
            continue
        visit = write_review(rng)
        if visit.details not in held_out_details:
            yield f"{visit.text} {write_endings(rng, visit)}"


# ----------------------------------------------------------------------------------------------------
# The task
# ----------------------------------------------------------------------------------------------------


def make_task(rng: random.Random) -> dict[str, list[dict[str, str | int]]]:
    """Balanced rows of each split. No details occur twice, within or across splits."""
    splits: dict[str, list[dict[str, str | int]]] = {}
    seen: set[str] = set()
    for name, size in SPLIT_SIZES.items():
        rows: list[dict[str, str | int]] = []
        while len(rows) < size:
            visit = write_visit(rng, len(rows) % 2)
            if visit.details not in seen:
                seen.add(visit.details)
                rows.append({"text": visit.text, "label": visit.mood})
        rng.shuffle(rows)
        splits[name] = rows
    return splits


def details_of(text: str) -> str:
    """A task text without its opening sentence."""
    return text.split(". ", 1)[1]


def write_task(folder: Path, splits: dict[str, list[dict[str, str | int]]]) -> None:
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    lines = [
        f"name: {TASK_NAME}",
        f'template: "{{text}}{PROMPT_END}"',
        "label_words:",
        *(f'  {label}: "{word}"' for label, word in enumerate(LABEL_WORDS)),
        "columns:",
        "  label: label",
        "metric: accuracy",
    ]
    (folder / "task.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------
# The tokenizer
# ----------------------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer that puts the bos token before every text by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    assert [tokenizer.token_to_id(token) for token in (PAD, BOS, EOS)] == [PAD_ID, BOS_ID, EOS_ID]
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, longest: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------------------------------


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config)


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(documents)]


def make_batch(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens [rows, length], and the tokens that follow them with padding ignored."""
    length = max(map(len, sequences))
    assert length <= LONGEST_DOCUMENT, f"a document has {length} tokens"
    tokens = torch.full((len(sequences), length), PAD_ID)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    following = tokens[:, 1:].masked_fill(tokens[:, 1:] == PAD_ID, IGNORED)
    return tokens[:, :-1], following


def token_loss(model: LlamaForCausalLM, sequences: list[list[int]]) -> torch.Tensor:
    tokens, following = make_batch(sequences)
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), following.flatten(), ignore_index=IGNORED
    )


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, sequences: list[list[int]], batch_size: int = 100) -> float:
    """Mean of the batches' mean loss per token, in nats."""
    batches = [sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
    return sum(token_loss(model, batch).item() for batch in batches) / len(batches)


def train_model(
    model: LlamaForCausalLM,
    sequences: list[list[int]],
    held_out: list[list[int]],
    batch_size: int,
    peak_rate: float,
) -> None:
    """One pass over the sequences: AdamW, linear warm-up, cosine decay to zero."""
    steps = len(sequences) // batch_size
    warm_up = max(1, steps // 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * min((step + 1) / warm_up, decay)
        loss = token_loss(model, sequences[step * batch_size : (step + 1) * batch_size])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 8) == 0:
            losses = f"loss {loss.item():.3f}  held-out loss {held_out_loss(model, held_out):.3f}"
            print(f"step {step + 1}/{steps}  {losses}  {time.monotonic() - started:.0f} s", flush=True)


# ----------------------------------------------------------------------------------------------------
# Checks of what was written
# ----------------------------------------------------------------------------------------------------


def assert_prompt_is_new(documents: list[str], splits: dict[str, list[dict[str, str | int]]]) -> None:
    """No training text holds the end of the prompt or a detail sentence of a task row."""
    held_out = [details_of(str(row["text"])) for rows in splits.values() for row in rows]
    assert len(set(held_out)) == len(held_out), "two task rows share their details"
    corpus = "\n".join(documents)
    assert PROMPT_END.strip().lower() not in corpus.lower(), "a training text holds the end of the prompt"
    assert not any(details in corpus for details in held_out), "a training text holds a task row"
    assert all(word in corpus for word in LABEL_WORDS), "the model does not know a label word"


def check_tokenizer(model_folder: Path, task_texts: list[str]) -> Tokenizer:
    """The saved tokenizer reads alike with and without transformers, and suits the task."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(model_folder)
    for text in [*task_texts, "Naïve text,  with 2 spaces\nand ünusual signs: €"]:
        ids = tokenizer.encode(text).ids
        assert ids == loaded(text)["input_ids"], f"two tokenizers disagree on {text!r}"
        assert ids[0] == BOS_ID and tokenizer.decode(ids) == text
    for word in LABEL_WORDS:
        assert len(tokenizer.encode(word, add_special_tokens=False).ids) == 1, f"{word!r} is not one token"
    longest = max(len(tokenizer.encode(text + PROMPT_END).ids) for text in task_texts)
    assert longest <= LONGEST_PROMPT, f"a prompt has {longest} tokens"
    return tokenizer


@torch.no_grad()
def zero_shot_accuracy(
    model: LlamaForCausalLM, tokenizer: Tokenizer, rows: list[dict[str, str | int]]
) -> float:
    """How often the more likely label word after the prompt is the right one."""
    candidates = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in LABEL_WORDS]
    correct = 0
    for row in rows:
        tokens = torch.tensor([tokenizer.encode(f"{row['text']}{PROMPT_END}").ids])
        logits = model(input_ids=tokens).logits[0, -1, candidates]
        correct += int(logits.argmax().item() == row["label"])
    return correct / len(rows)


def write_model_card(
    folder: Path, parameters: int, loss: float, accuracy: float, seed: int, documents: int
) -> None:
    lines = [
        "# A tiny Llama of a small invented world",
        "",
        "The checkpoint that the demo fine-tunes. Its texts are written by the script that trains it; it has",
        "read nothing else and knows nothing of the real world.",
        "",
        f"- made by: `python scripts/make_tiny_llama.py --seed {seed} --documents {documents}`",
        f"- parameters: {parameters:,} (embedding and head tied), stored as bfloat16",
        f"- tokenizer: byte-level BPE, {VOCABULARY_SIZE} tokens, puts `{BOS}` before every text",
        f"- loss on held-out texts: {loss:.3f} nats per token",
        f"- the task beside it (`{TASK_NAME}`), before fine-tuning: accuracy {accuracy:.3f} on test rows",
        "- licence: Apache-2.0, for the weights and for the texts",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="demo folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=48_000, help="training documents, each read once")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started = time.monotonic()
    model_folder: Path = arguments.output / "model"
    model_folder.mkdir(parents=True, exist_ok=True)

    splits = make_task(random.Random(f"task {arguments.seed}"))
    task_texts = [str(row["text"]) for rows in splits.values() for row in rows]
    writer = write_documents(
        random.Random(f"documents {arguments.seed}"), {details_of(text) for text in task_texts}
    )
    held_out_documents = [next(writer) for _ in range(1000)]
    unseen = set(held_out_documents)
    documents: list[str] = []
    while len(documents) < arguments.documents:
        document = next(writer)
        if document not in unseen:
            documents.append(document)
    assert_prompt_is_new(documents, splits)

    tokenizer = train_tokenizer(documents[:20_000])
    model = make_model()
    write_tokenizer(model_folder, tokenizer, model.config.max_position_embeddings)
    write_task(arguments.output, splits)
    check_tokenizer(model_folder, task_texts)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    held_out = encode_documents(tokenizer, held_out_documents)
    sequences = encode_documents(tokenizer, documents)
    print(f"{parameters:,} parameters, {sum(map(len, sequences)):,} training tokens", flush=True)
    train_model(model, sequences, held_out, arguments.batch_size, arguments.learning_rate)

    model.to(torch.bfloat16).save_pretrained(model_folder)
    (model_folder / "generation_config.json").unlink(missing_ok=True)
    (model_folder / "model.safetensors").chmod(0o644)
    saved = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loss = held_out_loss(saved, held_out)
    accuracy = zero_shot_accuracy(saved, tokenizer, splits["test"])
    assert accuracy <= HIGHEST_ZERO_SHOT_ACCURACY, f"zero-shot accuracy is {accuracy:.3f}: use another seed"
    write_model_card(model_folder, parameters, loss, accuracy, arguments.seed, arguments.documents)
    print(f"held-out loss {loss:.4f}, zero-shot accuracy {accuracy:.3f}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
