"""Models with a vision tower against `transformers` in fp32: text, images and videos.

The models are tiny, random and of odd shapes. The C++ side is `tandem-model-probe`, as in
test_transformers_parity.py.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_transformers_parity import (
    BFLOAT16_TOLERANCE,
    EVERY_CONFIGURATION,
    FLOAT32,
    GRADIENT_TOLERANCE,
    TINY_TOLERANCE,
    Case,
    assert_close,
    assert_close_in_bfloat16,
    max_error,
    probe_all,
    reference_loss,
    sequences,
)

IMAGE, VIDEO, START, END = 90, 91, 92, 93
TEXT_IDS = 90  # ids below stand for text alone
PATCH_VALUES = 3 * 2 * 3 * 3

WINDOWED = {"window_size": 12, "fullatt_block_indexes": [1]}
CASES = [
    Case("qwen2-vl", "Qwen2VL", {}),
    Case("qwen2-vl-tied", "Qwen2VL", {"tie_word_embeddings": True}),
    Case("qwen2-5-vl", "Qwen2_5_VL", {}),
    Case("qwen2-5-vl-tied", "Qwen2_5_VL", {"tie_word_embeddings": True}),
    # Windows that no image fills, and layers that all have them.
    Case("qwen2-5-vl-wide", "Qwen2_5_VL", {"window_size": 60, "fullatt_block_indexes": []}),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def build(case: Case) -> torch.nn.Module:
    text = {
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 75,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 2, 2],
        },
    }
    vision = {"depth": 3, "num_heads": 2, "patch_size": 3, "initializer_range": 0.15}
    if case.family == "Qwen2VL":
        vision |= {"embed_dim": 24, "hidden_size": 40, "mlp_ratio": 2}
    else:
        changes = {name: case.changes[name] for name in WINDOWED if name in case.changes}
        vision |= {"hidden_size": 24, "out_hidden_size": 40, "intermediate_size": 35}
        vision |= WINDOWED | changes
    config = getattr(transformers, f"{case.family}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=case.changes.get("tie_word_embeddings", False),
    )
    torch.manual_seed(len(case.name))
    model = getattr(transformers, f"{case.family}ForConditionalGeneration")(config)
    with torch.no_grad():  # norms and biases that matter
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.float().eval()


@dataclasses.dataclass(frozen=True)
class Image:
    """An image, or a video of several frames; `name` says which tensor of pixels it has."""

    name: str
    grid: tuple[int, int, int]
    video: bool = False
    seconds: float = 1.0

    @property
    def rows(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2] // 4

    def request(self) -> dict:
        return dataclasses.asdict(self)


SMALL = Image("small", (1, 4, 4))
WIDE = Image("wide", (1, 2, 14))
TALL = Image("tall", (1, 10, 6))
CLIP = Image("clip", (3, 4, 6), video=True, seconds=0.75)
SLOW = Image("slow", (4, 2, 2), video=True, seconds=2.0)
EVERY_IMAGE = [SMALL, WIDE, TALL, CLIP, SLOW]

# Sequences as numbers of text tokens and images between them.
PROMPTS = [
    [5, SMALL, 9],
    [17],  # text alone
    [1, WIDE, 3, TALL, 2, SMALL, 6],
    [4, CLIP, 8],
    [2, SLOW, 1, SMALL, 30, WIDE, 1],
]


def prompt_of(parts: list, generator: torch.Generator) -> tuple[list[int], list[Image]]:
    tokens, images = [], []
    for part in parts:
        if isinstance(part, Image):
            images.append(part)
            tokens += [START, *[VIDEO if part.video else IMAGE] * part.rows, END]
        else:
            tokens += torch.randint(0, TEXT_IDS, (part,), generator=generator).tolist()
    return tokens, images


def prompts(of: list) -> tuple[list[list[int]], list[list[Image]]]:
    generator = torch.Generator().manual_seed(3)
    made = [prompt_of(parts, generator) for parts in of]
    return [tokens for tokens, _ in made], [images for _, images in made]


def pixels() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        image.name: torch.randn(4 * image.rows, PATCH_VALUES, generator=generator)
        for image in EVERY_IMAGE
    }


def hidden_states(
    model: torch.nn.Module, tokens: list[int], images: list[Image], values: dict
) -> torch.Tensor:
    arguments: dict = {}
    for is_video, (key, grid) in enumerate(
        [("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")]
    ):
        chosen = [image for image in images if image.video == bool(is_video)]
        if not chosen:
            continue
        arguments[key] = torch.cat([values[image.name] for image in chosen])
        arguments[grid] = torch.tensor([image.grid for image in chosen])
        if is_video and "Qwen2_5" in type(model).__name__:
            arguments["second_per_grid_ts"] = torch.tensor([image.seconds for image in chosen])
    ids = torch.tensor([tokens])
    if images:
        arguments["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    result = model(ids, output_hidden_states=True, use_cache=False, **arguments)
    return result.hidden_states[-1][0]


def reference(
    model: torch.nn.Module, tokens: list, images: list, score: torch.nn.Linear | None
) -> dict:
    """Outputs of `transformers` for one sequence at a time: no padding, no packing."""
    values = pixels()
    hidden = torch.cat(
        [hidden_states(model, *prompt, values) for prompt in zip(tokens, images, strict=True)]
    )
    if score is not None:
        return {"hidden": hidden, "values": score(hidden)[:, 0]}
    return {"hidden": hidden, "logits": model.lm_head(hidden)}


def saved_name(name: str) -> str:
    """The name under which save_pretrained writes a parameter."""
    name = name.replace("model.language_model.", "model.")
    return name.replace("model.visual.", "visual.")


def save(
    model: torch.nn.Module, directory: pathlib.Path, score: torch.nn.Linear | None = None
) -> None:
    model.save_pretrained(directory)
    if score is None:
        return
    weights = load_file(directory / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = score.weight.detach()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def request_of(tokens: list, images: list, tmp_path: pathlib.Path) -> dict:
    save_file(pixels(), tmp_path / "pixels.safetensors")
    return {
        "sequences": tokens,
        "images": [[image.request() for image in of] for of in images],
        "pixel_values": str(tmp_path / "pixels.safetensors"),
    }


def assert_gradients_close(actual: dict, gradients: dict) -> None:
    names = {name.removeprefix("grad.") for name in actual if name.startswith("grad.")}
    assert names >= gradients.keys()
    # `transformers` has none where the probe has zeros: in a tower without images.
    for name in names - gradients.keys():
        assert name.startswith("visual.") and not actual[f"grad.{name}"].any(), name
    for name, gradient in gradients.items():
        error = max_error(actual[f"grad.{name}"], gradient)
        limit = GRADIENT_TOLERANCE * gradient.abs().max().item() + 1e-7
        assert error <= limit, f"gradient of {name}: {error:.2e} > {limit:.2e}"


def gradients_of(model: torch.nn.Module, score: torch.nn.Linear | None) -> dict:
    gradients = {
        saved_name(name): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients if score is None else gradients | {"score.weight": score.weight.grad}


@EVERY_CONFIGURATION
@pytest.mark.parametrize("head", ["lm", "value"])
@EVERY_CASE
def test_images_and_videos_are_those_of_transformers(
    case: Case, head: str, numerics, tmp_path: pathlib.Path
) -> None:
    model = build(case)
    score = torch.nn.Linear(40, 1, bias=False) if head == "value" else None
    save(model, tmp_path / "model", score)
    tokens, images = prompts(PROMPTS)
    expected = reference(model, tokens, images, score)
    loss = reference_loss(expected, tokens, head)
    loss.backward()

    request = {**request_of(tokens, images, tmp_path), "head": head}
    if score is not None:
        request["untie_embeddings"] = True
    requests = {
        "trained": {**request, "gradients": True},
        "inferred": request,
        "cached": {**request, "cached_chunks": [9, 1, 1, 30]},
    }
    outputs = probe_all(tmp_path, tmp_path / "model", requests, numerics)
    if numerics.bfloat16:
        for actual in outputs.values():
            assert_close_in_bfloat16(actual, expected, BFLOAT16_TOLERANCE)
        return
    assert_gradients_close(outputs["trained"], gradients_of(model, score))
    assert abs(outputs["trained"]["loss"].item() - loss.item()) <= 1e-5
    for actual in outputs.values():
        assert_close(actual, expected, TINY_TOLERANCE)
    if numerics.exact:
        for name, tensor in outputs["inferred"].items():
            assert torch.equal(outputs["cached"][name], tensor), name


@EVERY_CASE
def test_packed_images_have_the_bits_of_each_prompt_alone(
    case: Case, tmp_path: pathlib.Path
) -> None:
    save(build(case), tmp_path / "model")
    tokens, images = prompts(PROMPTS)
    requests = {"packed": request_of(tokens, images, tmp_path)}
    for i in range(len(tokens)):
        requests[f"alone{i}"] = request_of([tokens[i]], [images[i]], tmp_path)
    outputs = probe_all(tmp_path, tmp_path / "model", requests)
    alone = torch.cat([outputs[f"alone{i}"]["logits"] for i in range(len(tokens))])
    if FLOAT32.exact:
        assert torch.equal(outputs["packed"]["logits"], alone)
    assert_close(outputs["packed"], {"logits": alone}, TINY_TOLERANCE)


@EVERY_CASE
def test_text_alone_is_that_of_transformers(case: Case, tmp_path: pathlib.Path) -> None:
    model = build(case)
    save(model, tmp_path / "model")
    tokens = sequences(TEXT_IDS)
    expected = reference(model, tokens, [[]] * len(tokens), None)
    loss = reference_loss(expected, tokens, "lm")
    loss.backward()
    outputs = probe_all(
        tmp_path,
        tmp_path / "model",
        {
            "trained": {"sequences": tokens, "gradients": True},
            "cached": {"sequences": tokens, "cached_chunks": [9, 1, 1, 30]},
        },
    )
    assert_gradients_close(outputs["trained"], gradients_of(model, None))
    assert not any(tensor.any() for name, tensor in outputs["trained"].items() if "visual" in name)
    for actual in outputs.values():
        assert_close(actual, expected, TINY_TOLERANCE)
    # With images in other sequences of the batch, text has the bits of a pass without any.
    _, images = prompts(PROMPTS[:1])
    mixed_tokens = [prompts(PROMPTS[:1])[0][0], *tokens]
    mixed = probe_all(
        tmp_path,
        tmp_path / "model",
        {"": request_of(mixed_tokens, [images[0], *[[]] * len(tokens)], tmp_path)},
    )[""]
    plain = probe_all(tmp_path, tmp_path / "model", {"": {"sequences": tokens}})[""]
    assert torch.equal(mixed["logits"][len(mixed_tokens[0]) :], plain["logits"])


def older_files(model_dir: pathlib.Path) -> None:
    """Rewrites config.json flat, as checkpoints on the hub have it."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    del text["model_type"], text["layer_types"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps({**text, **config}))


def newer_names(model_dir: pathlib.Path) -> None:
    """Rewrites the weights with the names of the modules of `transformers` 5."""
    path = model_dir / "model.safetensors"
    weights = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name.replace("visual.", "model.visual.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    assert "model.language_model.norm.weight" in weights
    assert "model.visual.patch_embed.proj.weight" in weights
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("rewrite", [older_files, newer_names], ids=["flat config", "new names"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_both_styles_of_files_are_read(case: Case, rewrite, tmp_path: pathlib.Path) -> None:
    save(build(case), tmp_path / "model")
    save(build(case), tmp_path / "other")
    rewrite(tmp_path / "other")
    tokens, images = prompts(PROMPTS)
    request = request_of(tokens, images, tmp_path)
    one, other = (
        probe_all(tmp_path, tmp_path / name, {"": request})[""] for name in ("model", "other")
    )
    assert torch.equal(one["logits"], other["logits"])


@pytest.mark.parametrize("rewrite", [None, older_files], ids=["nested config", "flat config"])
@EVERY_CASE
def test_exports_load_in_transformers(case: Case, rewrite, tmp_path: pathlib.Path) -> None:
    save(build(case), tmp_path / "model")
    if rewrite is not None:
        rewrite(tmp_path / "model")
    tokens, images = prompts(PROMPTS)
    request = request_of(tokens, images, tmp_path)
    actual = probe_all(
        tmp_path, tmp_path / "model", {"": {**request, "save": str(tmp_path / "exported")}}
    )[""]
    exported = getattr(transformers, f"{case.family}ForConditionalGeneration")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architectures"] == [exported.__name__]
    model, info = exported.from_pretrained(
        tmp_path / "exported", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_close(actual, reference(model.eval(), tokens, images, None), TINY_TOLERANCE)
    # A directory that `transformers` saves is read and exported with the same bytes.
    model.save_pretrained(tmp_path / "again")
    assert sorted(load_file(tmp_path / "again" / "model.safetensors")) == sorted(
        load_file(tmp_path / "exported" / "model.safetensors")
    )
    probe_all(tmp_path, tmp_path / "again", {"": {**request, "save": str(tmp_path / "second")}})
    weights = [tmp_path / folder / "model.safetensors" for folder in ("exported", "second")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@EVERY_CASE
def test_exports_of_critics_load_in_transformers(case: Case, tmp_path: pathlib.Path) -> None:
    """But for the head: `transformers` has no class with this backbone and one output per token."""
    save(build(case), tmp_path / "model")
    tokens, images = prompts(PROMPTS)
    request = {**request_of(tokens, images, tmp_path), "head": "value", "seed": 11}
    request["untie_embeddings"] = True
    exported, again, second = (tmp_path / name for name in ("exported", "again", "second"))
    actual = probe_all(tmp_path, tmp_path / "model", {"": {**request, "save": str(exported)}})[""]
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == [f"{case.family}ForSequenceClassification"]
    model, info = getattr(transformers, f"{case.family}ForConditionalGeneration").from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    assert set(info["unexpected_keys"]) == {"score.weight"}
    score = torch.nn.Linear(40, 1, bias=False)
    weights = load_file(exported / "model.safetensors")
    score.weight.data.copy_(weights["score.weight"])
    assert_close(actual, reference(model.eval(), tokens, images, score), TINY_TOLERANCE)
    save(model, again, score)
    probe_all(tmp_path, again, {"": {**request, "save": str(second)}})
    written = [folder / "model.safetensors" for folder in (exported, second)]
    assert written[0].read_bytes() == written[1].read_bytes()
