"""The gradients of a server's step, and those of a model of `transformers` to compare them with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

# With beta1 0, AdamW's first moment is the gradient of the step, and a checkpoint holds it.
BARE_GRADIENT = {"learning_rate": 1e-6, "beta1": 0.0, "max_grad_norm": 0.0}


def gradients_in(checkpoint: str) -> dict[str, torch.Tensor]:
    """The gradients of the last step of a server with BARE_GRADIENT, by parameter."""
    state = load_file(Path(checkpoint) / "optimizer.safetensors")
    moment = ".exp_avg"
    return {
        name.removesuffix(moment): tensor for name, tensor in state.items() if name.endswith(moment)
    }


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that trains; a tied head counts as its embedding."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def adapter_gradients(model: torch.nn.Module, checkpoint: str) -> dict[str, torch.Tensor]:
    """The gradients of the adapters of a checkpoint, by those of the model that they adapt.

    The gradient of a map's W + s B A is G: that of A is s B^T G, and that of B is s G A^T. They are
    those of new adapters, whose matrices B are 0. Parameters of the checkpoint that adapt nothing,
    as a head, have the model's own gradients.
    """
    folder = Path(checkpoint)
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = {
        name.removeprefix("base_model.model."): tensor.double()
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    found = {}
    for name in tensors:
        map_name, _, matrix = name.rpartition(".lora_")
        if not map_name:
            found[name] = gradients[name]
            continue
        gradient = scale * gradients[f"{map_name}.weight"]
        a, b = (tensors[f"{map_name}.lora_{one}.weight"] for one in "AB")
        assert not b.any()
        found[name] = b.T @ gradient if matrix == "A.weight" else gradient @ a.T
    return found


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Norm of all tensors together."""
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


def assert_gradients(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    """Fails unless the gradients differ by at most `tolerance` of the whole norm."""
    assert found.keys() == expected.keys()
    whole = norm_of(expected.values())
    distance = norm_of(found[name] - gradient for name, gradient in expected.items())
    print(f"the gradient, of norm {whole:.4f}, differs by {distance / whole:.1e} of it")
    assert whole > 1e-3, "there is nothing to compare"
    assert distance <= tolerance * whole
