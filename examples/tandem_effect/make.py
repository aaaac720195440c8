"""Makes the models and the rows of a seed, from nothing but random numbers.

    python examples/tandem_effect/make.py FOLDER [SEED] [--third-dialect]

A problem is a sum of four digits, modulo 10: "d3 + d4 + d5 + d1 =". A solution reckons step by step
in one of two dialects, and ends with the answer, "# d3":

    V, verbose         "w3 plus w4 is w7 . w7 plus w5 is w2 . w2 plus w1 is w3 . # d3"
    S, a private code  "c7 c2 c3 # d3"
    R, short words     "w7 w2 w3 # d3"

FOLDER gets `senior-blank` and `junior-blank`, two models with different random weights, and rows:
`senior.jsonl` and `junior.jsonl` to pre-train on, of which the senior's are half in V and half in S
and the junior's all in V; `train.jsonl` and `held_out.jsonl` for reinforcement learning. With the
third dialect a third of the senior's rows are in R, and one of fifty of the junior's: the junior
goes on with R, and hardly ever begins it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TERMS = 4
WORDS = (
    "<eos>",
    "+",
    "=",
    "#",
    "plus",
    "is",
    ".",
    *(f"{kind}{n}" for kind in "dwc" for n in range(10)),
)
ROWS = {"senior": 20000, "junior": 20000, "train": 20000, "held_out": 400}
# The shares of dialects in the rows of a model.
TWO_DIALECTS = {"senior": {"V": 0.5, "S": 0.5}, "junior": {"V": 1.0}}
THREE_DIALECTS = {
    "senior": {"V": 1 / 3, "S": 1 / 3, "R": 1 / 3},
    "junior": {"V": 0.98, "R": 0.02},
}


def solution(digits: list[int], dialect: str) -> str:
    """Returns the solution of a problem in a dialect, "V", "S" or "R"."""
    total, steps = digits[0], []
    for digit in digits[1:]:
        before, total = total, (total + digit) % 10
        if dialect == "V":
            steps.append(f"w{before} plus w{digit} is w{total} .")
        else:
            steps.append(f"c{total}" if dialect == "S" else f"w{total}")
    return " ".join([*steps, f"# d{total}"])


def write_rows(file: Path, count: int, dialects: dict[str, float], seed: int) -> None:
    """Writes random problems with a solution each, in dialects with these shares."""
    rng = random.Random(f"{file.stem} {seed}")
    with file.open("w") as out:
        for _ in range(count):
            digits = [rng.randrange(10) for _ in range(TERMS)]
            [dialect] = rng.choices(list(dialects), list(dialects.values()))
            row = {
                "prompt": " + ".join(f"d{digit}" for digit in digits) + " =",
                "solution": solution(digits, dialect),
                "answer": str(sum(digits) % 10),
            }
            out.write(json.dumps(row) + "\n")


def write_model(directory: Path, seed: int) -> None:
    """Writes a Llama of 1.2 million parameters with random weights, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


def main(folder: Path, seed: int, *, third_dialect: bool = False) -> None:
    """Writes everything of a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for offset, name in enumerate(("senior", "junior")):
        write_model(folder / f"{name}-blank", 2 * seed + offset)
    mixed = THREE_DIALECTS if third_dialect else TWO_DIALECTS
    for name, count in ROWS.items():
        write_rows(folder / f"{name}.jsonl", count, mixed.get(name, {"V": 1.0}), seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--third-dialect", action="store_true")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.seed, third_dialect=arguments.third_dialect)
