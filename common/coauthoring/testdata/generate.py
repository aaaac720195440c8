"""Regenerates the tiny tokenizers of this folder, with the texts that `tokenizers` decodes and the
digests that clients compute of their vocabularies.

.venv/bin/python common/coauthoring/testdata/generate.py
"""

import json
from pathlib import Path

import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent
TEXT = ["the cat sat on the mat.\n\nthe dog\n\nsat é ü\n", "a b  c\n\n\nthe end.\n\n"] * 8


def byte_level() -> Tokenizer:
    """BPE over bytes, in the way of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tag>\n\n", normalized=False), AddedToken("  ", normalized=False)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>\n\n", special=True)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Unigram with byte fallback, in the way of Llama 2."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in (0x0A, 0x20, 0xC3, 0xA9)]
    vocab += [
        ("▁the", -2.0),
        ("▁", -3.0),
        ("the", -3.0),
        ("\n\n", -4.0),
        (".\n\n", -4.0),
        ("▁a▁b", -5.0),
        ("é", -6.0),
    ]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def digest(tokenizer: Tokenizer) -> str:
    """ModelInfo.vocabulary_digest of a model with this tokenizer."""
    entries = sorted((i, piece) for piece, i in tokenizer.get_vocab(with_added_tokens=True).items())
    text = "".join(f"{i} {piece}\n" for i, piece in entries)
    return xxhash.xxh3_128_hexdigest(text.encode())


def main() -> None:
    """Writes both."""
    digests = {}
    for name, tokenizer in (("byte_level", byte_level()), ("sentencepiece", sentencepiece())):
        tokenizer.save(str(FOLDER / f"{name}.json"))
        texts = [
            tokenizer.decode([i], skip_special_tokens=False)
            for i in range(tokenizer.get_vocab_size())
        ]
        (FOLDER / f"{name}.texts.json").write_text(json.dumps(texts, ensure_ascii=True) + "\n")
        digests[name] = digest(tokenizer)
    (FOLDER / "digests.json").write_text(json.dumps(digests, indent=2) + "\n")


if __name__ == "__main__":
    main()
