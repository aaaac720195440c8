"""Makes the model, the images and the rows of this example, from nothing but random numbers.

    python examples/coloured_squares/make.py [FOLDER]

FOLDER is runs/coloured_squares by default. It gets `model`, a Qwen2-VL of 0.2 million parameters
with random weights; `images`; and `train.jsonl` and `test.jsonl`, whose images are different.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

COLOURS = {"red": (230, 30, 30), "green": (30, 200, 60), "blue": (40, 70, 230)}
GREY = (128, 128, 128)
SIDE = 4  # cells in a row
CELL = 8  # pixels: a patch
MOST = 4  # squares of the colour in question
ROWS = {"train": 1500, "test": 200}
PROMPT = "<|vision_start|><|image_pad|><|vision_end|> How many {colour} squares ?"
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def make_images(folder: Path, seed: int = 0) -> None:
    """Writes images of coloured squares, and the rows that ask for their number."""
    from PIL import Image

    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        lines = []
        for index in range(count):
            colour = rng.choice(list(COLOURS))
            others = [one for one in COLOURS if one != colour]
            number = rng.randint(0, MOST)
            squares = [colour] * number + [rng.choice(others) for _ in range(rng.randint(0, 5))]
            cells = rng.sample(range(SIDE * SIDE), len(squares))
            image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), GREY)
            for cell, its in zip(cells, squares, strict=True):
                left, top = cell % SIDE * CELL, cell // SIDE * CELL
                image.paste(COLOURS[its], (left, top, left + CELL, top + CELL))
            name = f"images/{split}_{index:04}.png"
            image.save(folder / name)
            row = {"prompt": PROMPT.format(colour=colour), "image": name, "answer": str(number)}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))


def make_model(folder: Path, seed: int = 0) -> None:
    """Writes a small Qwen2-VL with random weights, its tokenizer and its image processor."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = ["<eos>", *IMAGE_TOKENS, "How", "many", "squares", "?", *COLOURS]
    words += [str(number) for number in range(10)]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>", *IMAGE_TOKENS])
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
            "eos_token_id": 0,
            "bos_token_id": None,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": CELL,
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    directory = folder / "model"
    Qwen2VLForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    pixels = (SIDE * CELL) ** 2
    processor = Qwen2VLImageProcessorPil(patch_size=CELL, min_pixels=pixels, max_pixels=pixels)
    processor.save_pretrained(directory)


def main(folder: Path) -> None:
    """Makes everything, in place of what an earlier call made."""
    make_model(folder)
    make_images(folder)
    print(f"{folder}: a model, {sum(ROWS.values())} images and their rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/coloured_squares"))
    main(parser.parse_args().folder)
