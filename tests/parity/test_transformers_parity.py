"""The model library against `transformers` in fp32: logits, values, hidden states, gradients.

The models are tiny, random and of odd shapes, and SmolLM2-135M where it has been imported. The C++
side is `tandem-model-probe` of the build directory TANDEM_BUILD_DIR (default build/release), which
runs in each of numerics.configurations().
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess

import pytest
import torch
import transformers
from numerics import Numerics, configurations
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("TANDEM_BUILD_DIR", "build/release")
PROBE = BUILD / "bin" / "tandem-model-probe"
SMOLLM2 = ROOT / os.environ.get("TANDEM_SMOLLM2", "models/SmolLM2-135M-Instruct")

# Largest absolute error of logits, values and hidden states; largest error of a gradient relative
# to its largest entry.
TINY_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4
SMOLLM2_TOLERANCE = 3e-4
# In bf16, of 8 bits, every operation rounds: largest error relative to the largest entry of the
# reference, and norm of a gradient's error relative to the gradient's.
BFLOAT16_TOLERANCE = 0.05
BFLOAT16_GRADIENT_TOLERANCE = 0.1
SMOLLM2_BFLOAT16_TOLERANCE = 0.1

LENGTHS = [1, 23, 7, 70]


CONFIGURATIONS = configurations()
# For tests that do not depend on the type of the computation.
FLOAT32 = dataclasses.replace(CONFIGURATIONS[0], dtype="float32")
EVERY_CONFIGURATION = pytest.mark.parametrize("numerics", CONFIGURATIONS, ids=lambda one: one.name)


@dataclasses.dataclass(frozen=True)
class Case:
    """One tiny model: a family and how its config differs from the base shape."""

    name: str
    family: str
    changes: dict


def rope(**parameters: object) -> dict:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def window(**layers: object) -> dict:
    return {"use_sliding_window": True, "sliding_window": 11, **layers}


def gemma3(**changes: object) -> dict:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {"sliding_window": 11, "query_pre_attn_scalar": 14, "layer_types": layers}
    return {**shape, "tie_word_embeddings": True, **changes}


def gemma2(**changes: object) -> dict:
    """Soft caps that bend scores and logits of the tiny models."""
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
    shape = {"sliding_window": 11, "query_pre_attn_scalar": 14, "tie_word_embeddings": True}
    return {**caps, **shape, **changes}


def phi3(**changes: object) -> dict:
    return {**rope(partial_rotary_factor=0.6), **changes}


def experts(**changes: object) -> dict:
    sizes = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 19}
    return {**sizes, **changes}


LONG_FACTOR = [1.0, 1.5, 2.5, 4.0, 8.0]


def longrope(**parameters: object) -> dict:
    lists = {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.7], "long_factor": LONG_FACTOR}
    return rope(rope_type="longrope", **{**lists, **parameters})


def latent(**changes: object) -> dict:
    """DeepSeek-V3, of which every layer is dense unless `changes` say otherwise."""
    return {
        "num_key_value_heads": 6,
        "q_lora_rank": 17,
        "kv_lora_rank": 19,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 10,
        "v_head_dim": 7,
        "first_k_dense_replace": 3,
        "n_routed_experts": 8,
        **changes,
    }


DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 29,
    "routed_scaling_factor": 1.7,
}


CASES = [
    Case("llama", "Llama", {}),
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case("llama-biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-mha", "Llama", {"num_key_value_heads": 6, "head_dim": 8}),
    Case("llama-mqa", "Llama", {"num_key_value_heads": 1, "head_dim": 34}),
    Case("llama-linear", "Llama", rope(rope_type="linear", factor=3.0)),
    Case(
        "llama-llama3",
        "Llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    Case(
        "llama-yarn",
        "Llama",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    Case(
        "qwen2-yarn-mscale",
        "Qwen2",
        rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    Case("llama-yarn-factor", "Llama", rope(rope_type="yarn", factor=4.0, attention_factor=0.8)),
    Case("llama-dynamic", "Llama", rope(rope_type="dynamic", factor=4.0)),
    # The longest sequence has 70 tokens: no more than a model of two rotations takes.
    Case("llama-longrope", "Llama", longrope(original_max_position_embeddings=70)),
    Case(
        "qwen2-longrope-attention",
        "Qwen2",
        longrope(original_max_position_embeddings=70, factor=3.0, attention_factor=0.9),
    ),
    Case(
        "llama-longrope-single",
        "Llama",
        longrope(original_max_position_embeddings=32, short_factor=LONG_FACTOR, factor=2.0),
    ),
    Case("mistral", "Mistral", {"sliding_window": 11}),
    Case("mistral-no-window", "Mistral", {"sliding_window": None}),
    Case("mistral-narrow", "Mistral", {"sliding_window": 2}),
    # A block of the KV cache, and what is none; as long as the longest sequence, and longer.
    Case("mistral-block", "Mistral", {"sliding_window": 64}),
    Case("mistral-odd-block", "Mistral", {"sliding_window": 67}),
    Case("mistral-whole", "Mistral", {"sliding_window": 70}),
    Case("mistral-longer", "Mistral", {"sliding_window": 71, "tie_word_embeddings": True}),
    Case("qwen2-window", "Qwen2", window(max_window_layers=1)),
    Case(
        "qwen3-layer-types",
        "Qwen3",
        window(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    Case("qwen2", "Qwen2", {}),
    Case("qwen2-tied", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "Qwen3", {}),
    Case("qwen3-tied-bias", "Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    Case("olmo2", "Olmo2", {}),
    Case("olmo2-tied-bias", "Olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    Case("olmo2-mha", "Olmo2", {"num_key_value_heads": 6, "head_dim": 8}),
    Case("deepseek_v3", "DeepseekV3", latent()),
    Case(
        "deepseek_v3-tied-bias", "DeepseekV3", latent(tie_word_embeddings=True, attention_bias=True)
    ),
    Case("deepseek_v3-plain-queries", "DeepseekV3", latent(q_lora_rank=None, attention_bias=True)),
    Case("deepseek_v3-experts", "DeepseekV3", latent(**DEEPSEEK_EXPERTS)),
    Case(
        "deepseek_v3-experts-plain",
        "DeepseekV3",
        latent(
            **{**DEEPSEEK_EXPERTS, "n_group": 1, "topk_group": 1},
            n_shared_experts=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
    ),
    Case(
        "deepseek_v3-experts-everywhere",
        "DeepseekV3",
        latent(
            **{**DEEPSEEK_EXPERTS, "first_k_dense_replace": 0},
            q_lora_rank=None,
            **rope(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=0.8,
            ),
        ),
    ),
    Case("deepseek_v3-halves", "DeepseekV3", latent(rope_interleave=False)),
    # Values wider than keys without rotation, as wide as the latent, and a single head.
    Case("deepseek_v3-wide", "DeepseekV3", latent(v_head_dim=19, qk_nope_head_dim=4)),
    Case(
        "deepseek_v3-single-head",
        "DeepseekV3",
        latent(num_attention_heads=1, num_key_value_heads=1, kv_lora_rank=64),
    ),
    Case(
        "deepseek_v3-many-heads",
        "DeepseekV3",
        latent(num_attention_heads=21, num_key_value_heads=21, kv_lora_rank=70),
    ),
    Case(
        "deepseek_v3-yarn",
        "DeepseekV3",
        latent(
            **rope(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.707,
                mscale_all_dim=1.3,
            )
        ),
    ),
    Case("gemma2", "Gemma2", gemma2()),
    Case("gemma2-untied-bias", "Gemma2", gemma2(tie_word_embeddings=False, attention_bias=True)),
    Case("gemma2-scores-alone", "Gemma2", gemma2(final_logit_softcapping=None)),
    Case("gemma2-logits-alone", "Gemma2", gemma2(attn_logit_softcapping=None)),
    Case("gemma2-whole", "Gemma2", gemma2(layer_types=["full_attention"] * 3)),
    Case("gemma3-caps", "Gemma3", gemma3(attn_logit_softcapping=1.5, final_logit_softcapping=3.0)),
    Case("gemma3", "Gemma3", gemma3()),
    Case("gemma3-untied-bias", "Gemma3", gemma3(tie_word_embeddings=False, attention_bias=True)),
    Case("gemma3-pattern", "Gemma3", gemma3(layer_types=None, sliding_window_pattern=3)),
    Case(
        "gemma3-linear",
        "Gemma3",
        gemma3(
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            }
        ),
    ),
]


CASES += [
    Case("mixtral", "Mixtral", {"num_local_experts": 5}),
    Case("mixtral-tied-window", "Mixtral", {"tie_word_embeddings": True, "sliding_window": 11}),
    Case("qwen2-moe", "Qwen2Moe", experts(shared_expert_intermediate_size=13)),
    Case(
        "qwen2-moe-dense-layer",
        "Qwen2Moe",
        experts(shared_expert_intermediate_size=29, mlp_only_layers=[1], norm_topk_prob=True),
    ),
    Case("qwen3-moe", "Qwen3Moe", experts(norm_topk_prob=True)),
    Case(
        "qwen3-moe-tied-sparse-step",
        "Qwen3Moe",
        experts(tie_word_embeddings=True, decoder_sparse_step=2, num_experts_per_tok=3),
    ),
    Case("phi3", "Phi3", phi3()),
    Case("phi3-tied-window", "Phi3", phi3(tie_word_embeddings=True, sliding_window=11)),
    Case("phi3-whole-heads", "Phi3", {"num_key_value_heads": 6, "head_dim": 8}),
    # `transformers` counts the factors by hidden_size over heads.
    Case(
        "phi3-longrope",
        "Phi3",
        {
            "hidden_size": 60,
            "original_max_position_embeddings": 70,
            **longrope(
                short_factor=[1.0, 1.1, 1.3],
                long_factor=[1.0, 2.0, 4.0],
                partial_rotary_factor=0.6,
            ),
        },
    ),
    Case("qwen3-moe-all-experts", "Qwen3Moe", experts(num_experts=4, num_experts_per_tok=4)),
]


def cases(*names: str) -> list[Case]:
    return [next(case for case in CASES if case.name == name) for name in names]


LLAMA = cases("llama")[0]
# The class with one output per token, where it is not <family>ForTokenClassification. It has the
# same `score`, and gives the last token's.
VALUE_CLASSES = {
    "Olmo2": "Olmo2ForSequenceClassification",
    "Gemma3": "Gemma3TextForSequenceClassification",
}
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}


def class_name(case: Case, head: str) -> str:
    if head == "value":
        return VALUE_CLASSES.get(case.family, f"{case.family}ForTokenClassification")
    return f"{case.family}ForCausalLM"


def build(case: Case, head: str) -> torch.nn.Module:
    shape = {
        "vocab_size": 97,
        "hidden_size": 42,
        "intermediate_size": 75,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config_class = CONFIG_CLASSES.get(case.family, f"{case.family}Config")
    config = getattr(transformers, config_class)(**{**shape, **case.changes})
    torch.manual_seed(len(case.name))
    if head == "value":
        config.num_labels = 1
        config.classifier_dropout = 0.0
    # The grouped product takes no odd widths.
    config._experts_implementation = "eager"
    model = getattr(transformers, class_name(case, head))(config)
    with torch.no_grad():  # norms and biases that matter
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model.float().eval()


def chooses_experts(model: torch.nn.Module) -> bool:
    experts = getattr(model.config, "num_local_experts", getattr(model.config, "num_experts", 0))
    return experts > getattr(model.config, "num_experts_per_tok", 0)


def sequences(vocab_size: int, lengths: list[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def probe(tmp_path: pathlib.Path, model_dir: pathlib.Path, **request: object) -> dict:
    return probe_all(tmp_path, model_dir, {"": request})[""]


def probe_all(
    tmp_path: pathlib.Path,
    model_dir: pathlib.Path,
    requests: dict[str, dict],
    numerics: Numerics = FLOAT32,
) -> dict:
    """Runs the probe once; returns the outputs of each request under its name."""
    if not PROBE.exists():
        pytest.fail(f"{PROBE} is missing: build first, or set TANDEM_BUILD_DIR")
    named = [{"name": name, **request} for name, request in requests.items()]
    (tmp_path / "request.json").write_text(json.dumps(named))
    output = tmp_path / "output.safetensors"
    subprocess.run(
        [
            str(PROBE),
            f"--model={model_dir}",
            f"--request={tmp_path / 'request.json'}",
            f"--output={output}",
            *(f"--{flag}={value}" for flag, value in dataclasses.asdict(numerics).items()),
        ],
        check=True,
        timeout=300,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # does not spin beside other tests
    )
    outputs: dict[str, dict] = {name: {} for name in requests}
    for full_name, tensor in load_file(output).items():
        request, _, name = full_name.partition(".")
        outputs[request][name] = tensor
    return outputs


def probe_three_ways(
    tmp_path: pathlib.Path, request: dict, numerics: Numerics = FLOAT32
) -> dict[str, dict]:
    """Outputs of the model in tmp_path/model with gradients, without them, and with a KV cache."""
    requests = {
        "trained": {**request, "gradients": True},
        "inferred": request,
        "cached": {**request, "cached_chunks": [9, 1, 1, 30]},
    }
    return probe_all(tmp_path, tmp_path / "model", requests, numerics)


def reference(model: torch.nn.Module, tokens: list[list[int]], head: str) -> dict:
    """Outputs of `transformers` for one sequence at a time: no padding, no packing."""
    hidden, outputs = [], []
    for sequence in tokens:
        result = model(torch.tensor([sequence]), output_hidden_states=True, use_cache=False)
        hidden.append(result.hidden_states[-1][0])
        outputs.append(model.score(hidden[-1])[:, 0] if head == "value" else result.logits[0])
    return {
        "hidden": torch.cat(hidden),
        "values" if head == "value" else "logits": torch.cat(outputs),
    }


def reference_loss(result: dict, tokens: list[list[int]], head: str) -> torch.Tensor:
    if head == "value":
        return result["values"].pow(2).mean()
    labels = [label for sequence in tokens for label in [*sequence[1:], -100]]
    return torch.nn.functional.cross_entropy(result["logits"], torch.tensor(labels))


def max_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def assert_close(actual: dict, expected: dict, tolerance: float) -> None:
    for name, tensor in expected.items():
        error = max_error(actual[name], tensor.detach())
        assert error <= tolerance, f"{name}: max abs error {error:.2e} > {tolerance:.0e}"


def assert_close_in_bfloat16(actual: dict, expected: dict, tolerance: float) -> None:
    for name, tensor in expected.items():
        error = max_error(actual[name], tensor.detach()) / tensor.detach().abs().max().item()
        assert error <= tolerance, f"{name}: largest error is {error:.3f} of the largest entry"


def gradients_by_file_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the names of parameters: experts one by one, fused projections apart."""
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if model.config.model_type == "mixtral":
        gate, up, down = "w1", "w3", "w2"
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if model.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if model.config.model_type == "phi3" and "qkv_proj" in name:
            heads = [model.config.num_attention_heads, *2 * [model.config.num_key_value_heads]]
            rows = [count * model.config.head_dim for count in heads]
            for one, gradient in zip("qkv", parameter.grad.split(rows), strict=True):
                gradients[name.replace("qkv_proj", f"{one}_proj")] = gradient
            continue
        if model.config.model_type == "phi3" and "gate_up_proj" in name:
            for one, gradient in zip(("gate", "up"), parameter.grad.chunk(2), strict=True):
                gradients[name.replace("gate_up_proj", f"{one}_proj")] = gradient
            continue
        prefix, _, stack = name.rpartition(".")
        if stack not in ("gate_up_proj", "down_proj") or not prefix.endswith("experts"):
            gradients[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            if stack == "down_proj":
                gradients[f"{prefix}.{expert}.{down}.weight"] = gradient
            else:
                halves = gradient.chunk(2)
                gradients[f"{prefix}.{expert}.{gate}.weight"] = halves[0]
                gradients[f"{prefix}.{expert}.{up}.weight"] = halves[1]
    return gradients


def assert_gradients_close(
    actual: dict, model: torch.nn.Module, numerics: Numerics, values: torch.Tensor | None = None
) -> None:
    """Fails unless the gradients are those of `model`, whose value head gave `values`."""
    gradients = gradients_by_file_name(model)
    assert {name for name in actual if name.startswith("grad.")} == {
        f"grad.{name}" for name in gradients
    }
    for name, gradient in gradients.items():
        if numerics.bfloat16:
            if name.endswith("k_proj.bias"):
                continue  # zero in exact arithmetic: softmax cancels it
            scale = gradient.norm()
            if name == "score.bias":
                # The sum of the values' gradients may cancel: what is rounded is each of them.
                scale = max(scale, (2 * values / len(values)).norm())
            error = (actual[f"grad.{name}"] - gradient).norm() / scale
            assert error <= BFLOAT16_GRADIENT_TOLERANCE, f"gradient of {name}: {error:.3f}"
            continue
        error = max_error(actual[f"grad.{name}"], gradient)
        # The absolute term is for gradients that are zero in exact arithmetic (a key's bias).
        limit = GRADIENT_TOLERANCE * gradient.abs().max().item() + 1e-7
        assert error <= limit, f"gradient of {name}: {error:.2e} > {limit:.2e}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_transformers(
    case: Case, tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    for head in ("lm", "value"):
        one = Reference(case, head, tmp_path / head)
        for numerics in CONFIGURATIONS:
            if numerics.bfloat16 and chooses_experts(one.model):
                continue  # rounding decides which experts a token takes
            with subtests.test(head=head, numerics=numerics):
                one.assert_close(one.probe(numerics), numerics)


class Reference:
    """A tiny model of `transformers` with its outputs and gradients of some sequences."""

    def __init__(self, case: Case, head: str, folder: pathlib.Path) -> None:
        """Saves the model in `folder`."""
        self.model = build(case, head)
        self._head = head
        self._folder = folder
        self.model.save_pretrained(folder / "model")
        self._tokens = sequences(self.model.config.vocab_size)
        self._expected = reference(self.model, self._tokens, head)
        loss = reference_loss(self._expected, self._tokens, head)
        loss.backward()
        self._loss = loss.item()

    def probe(self, numerics: Numerics) -> dict[str, dict]:
        """Returns the outputs of our model in three ways."""
        request = {"sequences": self._tokens, "head": self._head}
        return probe_three_ways(self._folder, request, numerics)

    def assert_close(self, outputs: dict[str, dict], numerics: Numerics) -> None:
        """Fails unless outputs and gradients are those of `transformers`."""
        assert_outputs_close(outputs, self._expected, self._loss, numerics)
        values = self._expected["values"].detach() if self._head == "value" else None
        assert_gradients_close(outputs["trained"], self.model, numerics, values)


def assert_outputs_close(
    outputs: dict[str, dict], expected: dict, loss: float, numerics: Numerics
) -> None:
    """Fails unless loss, logits, values and hidden states of the three ways are `expected`."""
    trained, inferred, cached = outputs["trained"], outputs["inferred"], outputs["cached"]
    if numerics.bfloat16:
        assert abs(trained["loss"].item() - loss) <= BFLOAT16_TOLERANCE * loss
        for actual in (trained, inferred, cached):
            assert_close_in_bfloat16(actual, expected, BFLOAT16_TOLERANCE)
        return
    assert abs(trained["loss"].item() - loss) <= 1e-5
    for actual in (trained, inferred, cached):
        assert_close(actual, expected, TINY_TOLERANCE)
    if numerics.exact:
        # Inference gives the same bits with and without the KV cache.
        for name, tensor in inferred.items():
            assert torch.equal(cached[name], tensor), name


@pytest.mark.parametrize(
    "case",
    cases("llama-biases", "qwen2-tied", "olmo2", "gemma2", "phi3", "deepseek_v3"),
    ids=lambda case: case.name,
)
def test_linear_maps_of_rounded_inputs_stay_close_to_transformers(
    case: Case, tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    """Beside float32, as other computations in bfloat16; training has the bits of inference."""
    rounding = dataclasses.replace(FLOAT32, device="cpu", kernels="auto", dtype="bfloat16-inputs")
    in_bfloat16 = dataclasses.replace(FLOAT32, dtype="bfloat16")
    for head in ("lm", "value"):
        one = Reference(case, head, tmp_path / head)
        with subtests.test(head=head):
            outputs = one.probe(rounding)
            for name, tensor in outputs["inferred"].items():
                assert torch.equal(outputs["trained"][name], tensor), name
                assert torch.equal(outputs["cached"][name], tensor), name
            one.assert_close(outputs, in_bfloat16)


@pytest.mark.parametrize("case", cases("llama", "qwen3-tied-bias"), ids=lambda case: case.name)
def test_padding_rows_have_no_probability(case: Case, tmp_path: pathlib.Path) -> None:
    """With 97 rows for 90 token ids, logits, loss and gradients are those of the 90 alone."""
    ids = 90
    model = build(case, "lm")
    with torch.no_grad():  # rows that would take most of the probability
        model.lm_head.weight[ids:] = 2.0
    model.save_pretrained(tmp_path / "model")
    model = model.double()
    tokens = sequences(ids)
    expected = reference(model, tokens, "lm")
    expected["logits"] = expected["logits"][:, :ids]
    loss = reference_loss(expected, tokens, "lm")
    loss.backward()

    outputs = probe_three_ways(tmp_path, {"sequences": tokens, "num_token_ids": ids})
    assert abs(outputs["trained"]["loss"].item() - loss.item()) <= 1e-5
    assert_gradients_close(outputs["trained"], model, FLOAT32)
    assert not outputs["trained"]["grad." + head_name(case)][ids:].any()
    for actual in outputs.values():
        assert_close(actual, expected, TINY_TOLERANCE)
        logprobs = torch.log_softmax(actual["logits"].double(), -1)
        oracle = torch.log_softmax(expected["logits"], -1)
        assert max_error(logprobs, oracle) <= TINY_TOLERANCE


ROUTER_CASES = cases("mixtral", "qwen2-moe", "qwen3-moe")
AUX, Z = 0.7, 0.05


def router_logits(model: torch.nn.Module, tokens: list[int]) -> list[torch.Tensor]:
    """The router logits [T, experts] of each layer with experts."""
    return list(model(torch.tensor([tokens]), output_router_logits=True).router_logits)


def build_with_routers(case: Case, **changes: object) -> torch.nn.Module:
    model = build(dataclasses.replace(case, changes={**case.changes, **changes}), "lm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 0.5)
    return model


@pytest.mark.parametrize("case", ROUTER_CASES, ids=lambda case: case.name)
def test_router_losses_are_those_of_transformers(case: Case, tmp_path: pathlib.Path) -> None:
    """The functions of `transformers`, for each sequence and layer, weighted by tokens."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        router_z_loss_func,
    )

    model = build_with_routers(case)
    model.save_pretrained(tmp_path / "model")
    tokens = sequences(model.config.vocab_size)
    coefficients = {"router_aux_loss_coef": AUX, "router_z_loss_coef": Z}
    actual = probe(tmp_path, tmp_path / "model", sequences=tokens, gradients=True, **coefficients)
    experts = getattr(model.config, "num_local_experts", None) or model.config.num_experts
    per_token = model.config.num_experts_per_tok
    aux = z = 0
    count = sum(map(len, tokens))
    for sequence in tokens:
        layers = router_logits(model, sequence)
        weight = len(sequence) / count / len(layers)
        for logits in layers:
            aux = aux + weight * load_balancing_loss_func((logits,), experts, per_token)
            z = z + weight * router_z_loss_func(logits.unsqueeze(0))
    result = reference(model, tokens, "lm")
    (reference_loss(result, tokens, "lm") + AUX * aux + Z * z).backward()
    assert actual["router_aux_loss"].item() == pytest.approx(aux.item(), rel=1e-5)
    assert actual["router_z_loss"].item() == pytest.approx(z.item(), rel=1e-5)
    assert_gradients_close(actual, model, FLOAT32)


@pytest.mark.parametrize("case", ROUTER_CASES, ids=lambda case: case.name)
def test_the_aux_loss_of_one_layer_is_that_of_the_model(case: Case, tmp_path: pathlib.Path) -> None:
    """`aux_loss` of a sequence, and the gradients of `loss`, which contains it."""
    model = build_with_routers(
        case, num_hidden_layers=1, mlp_only_layers=[], router_aux_loss_coef=AUX
    )
    model.save_pretrained(tmp_path / "model")
    tokens = sequences(model.config.vocab_size, [41])
    coefficients = {"router_aux_loss_coef": AUX, "router_z_loss_coef": 0.0}
    actual = probe(tmp_path, tmp_path / "model", sequences=tokens, gradients=True, **coefficients)
    ids = torch.tensor(tokens)
    result = model(ids, labels=ids, output_router_logits=True)
    result.loss.backward()
    assert actual["router_aux_loss"].item() == pytest.approx(result.aux_loss.item(), rel=1e-5)
    assert_gradients_close(actual, model, FLOAT32)


def head_name(case: Case) -> str:
    return (
        "model.embed_tokens.weight" if case.changes.get("tie_word_embeddings") else "lm_head.weight"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases("llama", "deepseek_v3-experts"), ids=lambda case: case.name)
def test_half_precision_files_are_read(case: Case, dtype: str, tmp_path: pathlib.Path) -> None:
    build(case, "lm").save_pretrained(tmp_path / "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float32", dtype=getattr(torch, dtype)
    )
    model.save_pretrained(tmp_path / "model")
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else getattr(torch, dtype)), name
    tokens = sequences(model.config.vocab_size)
    # Loaded again, for .to() rounded the rotary frequencies, which a checkpoint does not hold.
    wide = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, experts_implementation="eager"
    )
    expected = reference(wide.eval(), tokens, "lm")
    actual = probe(tmp_path, tmp_path / "model", sequences=tokens)
    assert_close(actual, expected, TINY_TOLERANCE)


def test_a_model_in_several_files_is_read(tmp_path: pathlib.Path) -> None:
    model = build(LLAMA, "lm")
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    tokens = sequences(model.config.vocab_size)
    actual = probe(tmp_path, tmp_path / "model", sequences=tokens)
    assert_close(actual, reference(model, tokens, "lm"), TINY_TOLERANCE)


@pytest.mark.parametrize(
    "case",
    cases("mixtral", "qwen2-moe-dense-layer", "qwen3-moe", "deepseek_v3-experts"),
    ids=lambda case: case.name,
)
def test_stacked_experts_are_read(case: Case, tmp_path: pathlib.Path) -> None:
    """A file with a layer's experts in one tensor is the model of a file with them one by one."""
    model = build(case, "lm")
    tokens = sequences(model.config.vocab_size)
    exported = []
    for folder, original in (("single", True), ("stacked", False)):
        model.save_pretrained(tmp_path / folder, save_original_format=original)
        actual = probe(
            tmp_path, tmp_path / folder, sequences=tokens, save=str(tmp_path / f"{folder}-again")
        )
        assert_close(actual, reference(model, tokens, "lm"), TINY_TOLERANCE)
        exported.append((tmp_path / f"{folder}-again" / "model.safetensors").read_bytes())
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in stacked)
    assert exported[0] == exported[1]


@pytest.mark.parametrize(
    "case",
    cases(
        "llama-tied",
        "mistral",
        "qwen2",
        "qwen3-tied-bias",
        "olmo2",
        "deepseek_v3",
        "deepseek_v3-experts",
        "deepseek_v3-experts-everywhere",
        "gemma2",
        "gemma3",
        "mixtral",
        "qwen2-moe-dense-layer",
        "qwen3-moe-tied-sparse-step",
        "phi3",
    ),
    ids=lambda case: case.name,
)
def test_exports_load_in_transformers(
    case: Case, tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    build(case, "lm").save_pretrained(tmp_path / "model")
    for head in ("lm", "value"):
        with subtests.test(head=head):
            require_export(case, head, tmp_path / "model", tmp_path / head)


def require_export(case: Case, head: str, source: pathlib.Path, folder: pathlib.Path) -> None:
    """Fails unless an export of `source` loads, and is exported again with the same bytes."""
    folder.mkdir()
    tokens = sequences(97, [13])
    actual = probe(
        folder,
        source,
        sequences=tokens,
        head=head,
        seed=11,
        untie_embeddings=head == "value",
        save=str(folder / "exported"),
    )
    exported = getattr(transformers, class_name(case, head))
    assert json.loads((folder / "exported" / "config.json").read_text())["architectures"] == [
        exported.__name__
    ]
    model, info = exported.from_pretrained(
        folder / "exported",
        dtype=torch.float32,
        output_loading_info=True,
        experts_implementation="eager",
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_close(actual, reference(model.eval(), tokens, head), TINY_TOLERANCE)
    # A directory that `transformers` saves is read and exported with the same bytes.
    model.save_pretrained(folder / "again")
    again = {"sequences": tokens, "head": head, "save": str(folder / "second")}
    probe(folder, folder / "again", **again)
    weights = [folder / name / "model.safetensors" for name in ("exported", "second")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.skipif(
    not (SMOLLM2 / "config.json").exists(),
    reason=f"{SMOLLM2} is not there: `tandem model import` makes it, or set TANDEM_SMOLLM2",
)
@EVERY_CONFIGURATION
def test_smollm2(numerics: Numerics, tmp_path: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    tokens = sequences(model.config.vocab_size, [40, 9])
    expected = reference(model, tokens, "lm")
    reference_loss(expected, tokens, "lm").backward()
    outputs = probe_all(
        tmp_path,
        SMOLLM2,
        {
            "trained": {"sequences": tokens, "gradients": True},
            "cached": {"sequences": tokens, "cached_chunks": [16, 1, 2]},
        },
        numerics,
    )
    trained, cached = outputs["trained"], outputs["cached"]
    if numerics.bfloat16:
        assert_close_in_bfloat16(trained, expected, SMOLLM2_BFLOAT16_TOLERANCE)
        assert_close_in_bfloat16(cached, expected, SMOLLM2_BFLOAT16_TOLERANCE)
        return
    assert_close(trained, expected, SMOLLM2_TOLERANCE)
    worst = 0.0
    for name, parameter in model.named_parameters():
        error = max_error(trained[f"grad.{name}"], parameter.grad)
        worst = max(worst, error / parameter.grad.abs().max().item())
    assert worst <= 1e-3, f"gradients: largest relative error {worst:.2e}"
    assert_close(cached, expected, SMOLLM2_TOLERANCE)
