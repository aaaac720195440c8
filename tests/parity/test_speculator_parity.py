"""Speculators against modules of PyTorch that have the published names of parameters.

The C++ side is `tandem-speculator-probe` of the build directory TANDEM_BUILD_DIR (default
build/release). It reads what the modules save, and the modules read what it saves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("TANDEM_BUILD_DIR", "build/release")
PROBE = BUILD / "bin" / "tandem-speculator-probe"

HIDDEN, STATE, VOCABULARY, STEPS = 24, 17, 61, 3
LENGTHS = [19, 4, 30, 7, 2]
IGNORED = -100
# Largest error of logits and of a gradient, relative to their largest entry; largest error of a
# head's loss.
TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 2e-5


class RmsNormWithBias(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6), times a weight, plus a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x) * self.weight + self.bias


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def heads(tied: bool) -> nn.ModuleList:
    modules = nn.ModuleList(nn.Linear(STATE, VOCABULARY, bias=False) for _ in range(STEPS))
    if tied:
        for head in modules[1:]:
            head.weight = modules[0].weight
    return modules


def embedding_factor() -> float:
    s = 0.5 ** (0.5 / STEPS)
    return math.sqrt((1 - s**2) * STATE / 2) / s


class Reference(nn.Module):
    """A speculator: `begin` gives the carry of a pass, `step` the next carry and state."""

    def __init__(self, scale_input: bool) -> None:
        super().__init__()
        self.scale_input = scale_input
        self.gelu = nn.GELU()

    def begin(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rms_norm(hidden) / math.sqrt(2) if self.scale_input else hidden,)

    def step(
        self, i: int, carry: tuple[torch.Tensor, ...], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        carry, logits = self.begin(hidden), []
        for i, of_step in enumerate(tokens):
            carry = self.step(i, carry, of_step)
            logits.append(self.head[i](carry[0]))
        return logits

    def drafts(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        carry, drafts = self.begin(hidden), []
        for i in range(STEPS):
            carry = self.step(i, carry, tokens)
            tokens = self.head[i](carry[0]).argmax(-1)
            drafts.append(tokens)
        return torch.stack(drafts, 1)


class Mlp(Reference):
    """All modules of all steps; tied ones share their parameters."""

    def __init__(self, tied: bool, scale_input: bool) -> None:
        super().__init__(scale_input)
        self.emb = nn.ModuleList(nn.Embedding(VOCABULARY, STATE) for _ in range(STEPS))
        self.proj = nn.ModuleList(
            nn.Linear(STATE if i else HIDDEN, STATE, bias=False) for i in range(STEPS)
        )
        self.ln = nn.ModuleList(RmsNormWithBias(STATE) for _ in range(STEPS))
        self.head = heads(tied)
        if tied:
            for i in range(1, STEPS):
                self.emb[i].weight = self.emb[0].weight
                self.ln[i].weight, self.ln[i].bias = self.ln[0].weight, self.ln[0].bias
            for i in range(2, STEPS):
                self.proj[i].weight = self.proj[1].weight

    def step(
        self, i: int, carry: tuple[torch.Tensor, ...], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        total = self.proj[i](carry[0]) + embedding_factor() * self.emb[i](tokens)
        return (self.gelu(self.ln[i](total)),)


class ArcticRnn(Reference):
    """Modules of the steps that own parameters, each in a Sequential."""

    def __init__(self, tied: bool, scale_input: bool) -> None:
        super().__init__(scale_input)
        owners = 1 if tied else STEPS
        self.emb = nn.ModuleList(
            nn.Sequential(nn.Embedding(VOCABULARY, STATE)) for _ in range(owners)
        )
        self.proj = nn.ModuleList(
            nn.Sequential(nn.Linear(STATE if i else HIDDEN, STATE, bias=False))
            for i in range(2 if tied else STEPS)
        )
        self.ln = nn.ModuleList(nn.Sequential(RmsNormWithBias(STATE)) for _ in range(owners))
        self.head = heads(tied)
        self.tied = tied

    def step(
        self, i: int, carry: tuple[torch.Tensor, ...], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        owner, projection = (0, min(i, 1)) if self.tied else (i, i)
        total = self.proj[projection](carry[0]) + embedding_factor() * self.emb[owner](tokens)
        return (self.gelu(self.ln[owner](total)),)


class ArcticLstm(Reference):
    """Maps of the four gates, for step 0 and for the others."""

    def __init__(self, tied: bool, scale_input: bool) -> None:
        super().__init__(scale_input)
        self.forget_emb = nn.ModuleList([nn.Embedding(VOCABULARY, STATE)])
        for gate in ("input", "output", "cell"):
            own = nn.ModuleList([nn.Embedding(VOCABULARY, STATE)])
            setattr(self, f"{gate}_emb", self.forget_emb if tied else own)
        for gate in ("forget", "input", "output", "cell"):
            maps = [nn.Linear(width, STATE, bias=False) for width in (HIDDEN, STATE)]
            setattr(self, f"{gate}_proj", nn.ModuleList(maps))
        self.cell_ln = nn.ModuleList([RmsNormWithBias(STATE)])
        self.state_ln = nn.ModuleList([RmsNormWithBias(STATE)])
        self.head = heads(tied=True)

    def begin(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *super().begin(hidden), hidden.new_zeros(len(hidden), STATE)

    def step(
        self, i: int, carry: tuple[torch.Tensor, ...], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        state, cell = carry

        def gate(name: str) -> torch.Tensor:
            projected = getattr(self, f"{name}_proj")[min(i, 1)](state)
            return projected + embedding_factor() * getattr(self, f"{name}_emb")[0](tokens)

        candidate = self.gelu(self.cell_ln[0](gate("cell"))) * gate("input").sigmoid()
        cell = cell * gate("forget").sigmoid() + candidate
        return self.gelu(self.state_ln[0](cell)) * gate("output").sigmoid(), cell


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind with one of its choices of ties, as config.json says it."""

    name: str
    module: type[Reference]
    tied: bool
    scale_input: bool
    config: dict

    def build(self) -> Reference:
        """A module with random parameters, norms too."""
        torch.manual_seed(3)
        module = self.module(self.tied, self.scale_input)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                noise = 0.3 * torch.randn_like(parameter)
                parameter.copy_(noise + 1 if "ln" in name and "weight" in name else noise)
        return module

    @property
    def prefix(self) -> str:
        """Before the names of parameters in the published files."""
        return "speculator." if self.module is Mlp else ""


def cases() -> list[Case]:
    arctic = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "input_hidden_dim": HIDDEN,
        **{f"{name}_dim": str(STATE) for name in ("inner", "proj", "emb")},
    }
    mlp = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": HIDDEN,
        "inner_dim": STATE,
    }
    lstm = {**arctic, "method": "sum_lstm", "tie_weights": True}
    found = []
    for tied in (False, True):
        for scaled in (False, True):
            suffix = f"{'-tied' if tied else ''}{'-scaled' if scaled else ''}"
            for name, module, config in (
                ("mlp", Mlp, {**mlp, "tie_weights": tied}),
                ("arctic-rnn", ArcticRnn, {**arctic, "tie_weights": tied}),
                ("arctic-lstm", ArcticLstm, {**lstm, "tie_lstm_embs": tied}),
            ):
                sizes = {"vocab_size": VOCABULARY, "n_predict": STEPS, "scale_input": scaled}
                found.append(Case(name + suffix, module, tied, scaled, {**config, **sizes}))
    return found


def batch() -> dict[str, torch.Tensor]:
    """A packed batch of sequences of mixed lengths; some labels are ignored."""
    torch.manual_seed(9)
    total = sum(LENGTHS)
    tokens = torch.randint(VOCABULARY, (total,))
    return {
        "hidden": torch.randn(total, HIDDEN),
        "tokens": tokens,
        "labels": torch.where(torch.rand(total) < 0.3, IGNORED, tokens),
        "offsets": torch.tensor([0, *LENGTHS]).cumsum(0),
    }


def padded_losses(
    module: Reference, packed: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Logits of the aligned rows, mean losses and correct drafts of each head.

    The sequences are padded to the longest one; a row and its targets lie within its own length.
    """

    def pad(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(packed[name].split(LENGTHS), True, value)

    hidden, tokens, labels = pad("hidden", 0), pad("tokens", 0), pad("labels", IGNORED)
    rows = max(LENGTHS) - (STEPS + 1)
    inside = torch.arange(rows) < torch.tensor(LENGTHS)[:, None] - (STEPS + 1)
    steps = [tokens[:, 1 + i : 1 + i + rows][inside] for i in range(STEPS)]
    logits = module.logits(hidden[:, :rows][inside], steps)
    losses, correct = [], []
    for i, of_head in enumerate(logits):
        targets = labels[:, i + 2 : i + 2 + rows][inside]
        losses.append(nn.functional.cross_entropy(of_head, targets, ignore_index=IGNORED))
        correct.append((of_head.argmax(-1) == targets).sum().item())
    return logits, losses, correct


def run_probe(tmp_path: pathlib.Path, packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs the probe on tmp_path/model; it saves the speculator to tmp_path/saved."""
    if not PROBE.exists():
        pytest.fail(f"{PROBE} is missing: build first, or set TANDEM_BUILD_DIR")
    save_file(packed, tmp_path / "input.safetensors")
    subprocess.run(
        [
            str(PROBE),
            f"--speculator={tmp_path / 'model'}",
            f"--input={tmp_path / 'input.safetensors'}",
            f"--output={tmp_path / 'output.safetensors'}",
            f"--save={tmp_path / 'saved'}",
        ],
        check=True,
        timeout=120,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # does not spin beside other tests
    )
    return load_file(tmp_path / "output.safetensors")


def write(case: Case, module: Reference, directory: pathlib.Path, once: bool) -> None:
    """Saves a module as published: tied tensors under each of their names, or `once`."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(case.config))
    if once:
        save_model(module, str(directory / "model.safetensors"))
        return
    state = {case.prefix + name: t.clone() for name, t in module.state_dict().items()}
    save_file(state, directory / "model.safetensors")


@pytest.mark.parametrize("once", [False, True], ids=["every-name", "stored-once"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_speculator_is_the_module_that_saved_it(
    case: Case, once: bool, tmp_path: pathlib.Path
) -> None:
    module, packed = case.build(), batch()
    write(case, module, tmp_path / "model", once)
    actual = run_probe(tmp_path, packed)

    logits, losses, correct = padded_losses(module, packed)
    for i, expected in enumerate(logits):
        assert (actual[f"logits.{i}"] - expected).abs().max() <= TOLERANCE * expected.abs().max()
    expected_losses = torch.stack(losses).detach()
    assert (actual["head_losses"] - expected_losses).abs().max() <= LOSS_TOLERANCE
    assert actual["correct"].tolist() == correct
    assert torch.equal(actual["drafts"], module.drafts(packed["hidden"], packed["tokens"]))

    sum(losses).backward()
    compared = 0
    for name, parameter in module.named_parameters():
        gradient = actual[f"grad.{name}"]
        largest = parameter.grad.abs().max()
        assert (gradient - parameter.grad).abs().max() <= GRADIENT_TOLERANCE * largest, name
        compared += 1
    assert compared == sum(name.startswith("grad.") for name in actual)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_saved_speculator_loads_into_the_module(case: Case, tmp_path: pathlib.Path) -> None:
    module = case.build()
    write(case, module, tmp_path / "model", once=False)
    run_probe(tmp_path, batch())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == {case.prefix + name for name in module.state_dict()}
    fresh = case.module(case.tied, case.scale_input)
    fresh.load_state_dict({name.removeprefix(case.prefix): t for name, t in saved.items()})
    for name, tensor in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {key: config[key] for key in case.config} == case.config
