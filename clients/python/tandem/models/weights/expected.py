"""The tensors that a model's config asks for, and how those of a file account for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.errors import ConfigError
from tandem.models.weights.layout import OLD_BUFFER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names that an error lists.
_SHOWN = 8
# Parts of names that wrappers of a module add: torch.compile, FSDP, activation checkpoints.
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Heads of a model whose class config.json names.
_HEADS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Assignment:
    """How the tensors of a source become those of a model.

    Attributes:
        names: the name in the model of every tensor that is kept, by its name in the source, in the
            source's order.
        left_out: names of the source's tensors that are constants and no weights.
        removed: what was removed from the names, in words; empty if nothing was.
        head, embedding: names, in the source, of two tensors that the config ties to each other;
            "" where the source does not have both.
    """

    names: dict[str, str]
    left_out: list[str]
    removed: str
    head: str = ""
    embedding: str = ""

    def notes(self) -> list[str]:
        """Returns what a person should know of it."""
        notes = []
        if self.removed:
            notes.append(f"removed from the tensor names: {self.removed}")
        if self.left_out:
            notes.append(
                f"left out, because servers and transformers compute them: {_listed(self.left_out)}"
            )
        return notes


class ExpectedTensors:
    """The tensors of a model by its config, in every layout that transformers reads.

    Experts may be one by one, or stacked.
    """

    def __init__(self, config: Any) -> None:
        """Builds the model on the meta device, which takes no memory.

        Raises whatever transformers raises for a config that its model refuses.
        """
        from transformers.core_model_loading import revert_weight_conversion

        model = _on_meta(config)
        self._own: dict[str, Shape] = {}
        # The names in files that a tensor of the model stands for: experts one by one.
        self._in_files: dict[str, dict[str, Shape]] = {}
        for name, value in model.state_dict().items():
            self._own[name] = tuple(value.shape)
            reverted = revert_weight_conversion(model, {name: value})
            self._in_files[name] = {key: tuple(one.shape) for key, one in reverted.items()}
        self._shapes = {
            name: shape for group in self._in_files.values() for name, shape in group.items()
        } | self._own
        self._owners = {name: own for own, group in self._in_files.items() for name in group} | {
            name: name for name in self._own
        }
        self._tied = dict(model.all_tied_weights_keys)
        self._prefix = f"{model.base_model_prefix}."
        self._prediction_layers = _prediction_layers(config)

    def assign(self, shapes: Mapping[str, Shape], where: str) -> Assignment:
        """Returns how the source's tensors, given by their shapes, become those of the model.

        Raises ConfigError, which begins with `where` and names tensors, unless every tensor of the
        source is one of the model and every tensor of the model is there.
        """
        names, removed = self._named(shapes)
        left_out = [one for one, name in names.items() if name.endswith(OLD_BUFFER)]
        kept = {one: name for one, name in names.items() if one not in left_out}
        self._require_known(kept, where)
        self._require_shapes(kept, shapes, where)
        given = self._given(kept, where)
        head = embedding = ""
        for target, source in self._tied.items():
            if target not in given and source in given:
                given[target] = []
            elif target in given and source not in given:
                # transformers takes the one that is there.
                [name] = given[target]
                kept[name] = next(iter(self._in_files[source]))
                given[target], given[source] = [], [name]
            elif target in given:
                [head], [embedding] = given[target], given[source]
        self._require_complete(given, set(kept.values()), where)
        return Assignment(kept, left_out, removed, head, embedding)

    def _named(self, shapes: Iterable[str]) -> tuple[dict[str, str], str]:
        """Returns the model's names of the source's tensors, and what was removed from them."""
        plain = {name: _WRAPPERS.sub("", name) for name in shapes}
        removed = sorted({match for name in shapes for match in _WRAPPERS.findall(name)})
        common = _common_prefix(list(plain.values()))
        without = {one: name.removeprefix(common) for one, name in plain.items()}
        # A prefix of all names that the model does not have, "module." for example.
        for candidate, prefix in ((plain, ""), (without, common)):
            named = {one: self._known(name) for one, name in candidate.items()}
            if all(self._is_known(name) for name in named.values()):
                parts = [*(f"{one}." for one in removed), *([prefix] if prefix else [])]
                return named, ", ".join(parts)
        return {one: self._known(name) for one, name in plain.items()}, ""

    def _known(self, name: str) -> str:
        """Returns a name as the model has it: with or without the prefix of the base model."""
        return next((one for one in (name, self._prefix + name) if self._is_known(one)), name)

    def _is_known(self, name: str) -> bool:
        return (
            name in self._shapes
            or name.endswith(OLD_BUFFER)
            or name.startswith(self._prediction_layers)
        )

    def _require_known(self, names: Mapping[str, str], where: str) -> None:
        unknown = [one for one, name in names.items() if not self._is_known(name)]
        if not unknown:
            return
        missing = self._shapes.keys() - names.values() - self._tied.keys()
        raise ConfigError(
            f"{where}: {_listed(unknown)}: unexpected: the model that config.json describes has "
            "no such parameter",
            hint="config.json must belong to the weights"
            + (f"; the model's names are like {min(missing)!r}" if missing else ""),
        )

    def _require_shapes(
        self, names: Mapping[str, str], shapes: Mapping[str, Shape], where: str
    ) -> None:
        for one, name in names.items():
            wanted = self._shapes.get(name)
            if wanted is not None and wanted != tuple(shapes[one]):
                raise ConfigError(
                    f"{where}: tensor {one!r} has the shape {list(shapes[one])}, but config.json "
                    f"asks for {list(wanted)}"
                )

    def _given(self, names: Mapping[str, str], where: str) -> dict[str, list[str]]:
        """Returns the source's tensors of each tensor of the model.

        Raises ConfigError where two are the same parameter.
        """
        given: dict[str, list[str]] = {}
        by_name: dict[str, str] = {}
        for one, name in names.items():
            owner = self._owners.get(name, name)  # A prediction layer's are its own.
            # A stacked tensor is all of its parameters.
            also = given.get(owner, []) if name == owner else []
            twice = by_name.get(name) or by_name.get(owner) or next(iter(also), None)
            if twice is not None:
                raise ConfigError(
                    f"{where}: tensors {twice!r} and {one!r} are the same parameter, {name!r}"
                )
            by_name[name] = one
            given.setdefault(owner, []).append(one)
        return given

    def _require_complete(
        self, given: Mapping[str, list[str]], present: set[str], where: str
    ) -> None:
        missing: list[str] = []
        for own, group in self._in_files.items():
            if own not in given:
                missing.append(own if len(group) > 1 else next(iter(group)))
            elif given[own] and own not in present:
                missing += [name for name in group if name not in present]
        if missing:
            raise ConfigError(
                f"{where}: {_listed(missing)}: missing, but config.json asks for "
                f"{'it' if len(missing) == 1 else 'them'}",
                hint="transformers would fill them with random numbers; config.json must belong "
                "to the weights",
            )


def _on_meta(config: Any) -> PreTrainedModel:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    named = (getattr(config, "architectures", None) or [""])[0]
    cls = getattr(transformers, named, None) if named.endswith(_HEADS) else None
    with torch.device("meta"):
        if cls is not None and cls.config_class is type(config):
            return cls(config)
        auto = next(
            one
            for one in (AutoModelForCausalLM, AutoModelForImageTextToText)
            if type(config) in one._model_mapping
        )
        return auto.from_config(config)


def _prediction_layers(config: Any) -> tuple[str, ...]:
    """Returns how the names of the layers for multi-token prediction begin, which no model builds.

    Servers keep them for exports, and transformers leaves them out.
    """
    text = config.get_text_config()
    count = getattr(text, "num_nextn_predict_layers", None) or 0
    return tuple(f"model.layers.{text.num_hidden_layers + index}." for index in range(count))


def _common_prefix(names: list[str]) -> str:
    """Returns the dotted beginning that all names share, with its last dot; "" without one."""
    first, last = min(names, default=""), max(names, default="")
    shared = ""
    for one, other in zip(first.split(".")[:-1], last.split(".")[:-1], strict=False):
        if one != other:
            break
        shared += f"{one}."
    return shared


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{'tensor' if len(names) == 1 else f'{len(names):,} tensors'} {shown}{more}"
