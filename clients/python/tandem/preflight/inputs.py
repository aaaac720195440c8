"""The tokenizer and the data of a run, read before it has a server."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.cluster.plan import learns_pairs, learns_rows, modes_in, trains
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.preferences import with_pairs, with_prompt
from tandem.data.supervised import LearntRows, with_responses
from tandem.models.tokenizer import TextCodec
from tandem.preflight import checks
from tandem.preflight.problems import Problems
from tandem.settings.run import Purpose, RunSettings, SamplingSettings
from tandem.utils.text_files import read_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The tokenizer and the data of a run. What cannot be read is None, and among the problems.

    Attributes:
        settings: those of the run, with the number of steps of `epochs`.
        sampling: the fields of SamplingParams for the run's responses.
        data: the prompts of the run: in an evaluation, those of `eval.data` if there are any.
        eval_data: those of `eval.data`; also None if the run has none.
    """

    settings: RunSettings
    purpose: Purpose
    codec: TextCodec | None
    sampling: Mapping[str, Any] | None
    data: Dataset | None
    eval_data: Dataset | None

    @property
    def learns_rows(self) -> bool:
        """Whether the run learns the rows' own responses."""
        return learns_rows(self.settings, self.purpose)

    @property
    def data_sets(self) -> dict[str, Dataset]:
        """The data sets that could be read, by the field that names them."""
        read = {"data": self.data, "eval.data": self.eval_data}
        return {field: dataset for field, dataset in read.items() if dataset is not None}


def read_inputs(
    settings: RunSettings,
    purpose: Purpose,
    problems: Problems,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Inputs:
    """Reads tokenizer and data, and collects what is wrong with them.

    Conversations show the `tools`, schemas of an environment.
    """
    codec = sampling = data = eval_data = None
    with problems.collect():
        codec = TextCodec(settings.tokenizer)
        sampling = _sampling(settings.sampling, codec)
    if codec is None:
        # Prompts cannot be written, but missing files can be named.
        for field, named in (("data", settings.data), ("eval.data", settings.eval.data)):
            if named is not None and named.jsonl is not None:
                with problems.collect():
                    read_bytes(named.jsonl, f"{field}.jsonl: {named.jsonl}")
    else:
        if settings.eval.data is not None:
            with problems.collect():
                eval_data = load_dataset(settings.eval.data, codec, field="eval.data", tools=tools)
        settings, data = _read_data(settings, purpose, codec, eval_data, problems, tools)
    checks.note_greedy_samples(settings, purpose)
    by_boundary = not settings.eval.handoff_turns
    if codec is not None and by_boundary and "handoff" in modes_in(settings, purpose):
        with problems.collect():
            checks.handoff_boundary_ids(settings, codec)
    if codec is not None and data is not None and learns_rows(settings, purpose):
        with problems.collect():
            if purpose == "dpo":
                reference = settings.dpo.reference_source == "rows"
                data = with_pairs(
                    data, codec, "dpo", append_eos=settings.dpo.append_eos, reference=reference
                )
            elif purpose == "reward-model":
                data = with_pairs(
                    data, codec, "reward_model", append_eos=settings.reward_model.append_eos
                )
            else:
                data = with_responses(data, settings.sft, codec)
    return Inputs(settings, purpose, codec, sampling, data, eval_data)


def _read_data(
    settings: RunSettings,
    purpose: Purpose,
    codec: TextCodec,
    eval_data: Dataset | None,
    problems: Problems,
    tools: Sequence[Mapping[str, Any]],
) -> tuple[RunSettings, Dataset | None]:
    """Returns the settings with the steps of `epochs`, and the data."""
    if not trains(purpose) and eval_data is not None:
        return settings, eval_data
    data = None
    with problems.collect():
        learnt = LearntRows(settings.sft) if _learns_texts(settings, purpose) else None
        data = load_dataset(
            settings.data,
            codec,
            settings.seed,
            learnt=learnt,
            tools=tools,
            prepare=with_prompt if learns_pairs(purpose) else None,
        )
        if trains(purpose) and eval_data is not None:
            data = _without_held_out(data, eval_data)
        if trains(purpose):
            settings = settings.with_steps_of(len(data), purpose)
    return settings, data


def _learns_texts(settings: RunSettings, purpose: Purpose) -> bool:
    return purpose == "sft" and learns_rows(settings, purpose)


def _without_held_out(data: Dataset, held_out: Dataset) -> Dataset:
    """Returns the data without the held-out prompts, which two seeds of a task may share."""
    left = data.without({key for held in held_out.examples for key in held.keys})
    if removed := len(data) - len(left):
        _log.info(
            f"data: {removed:,} of {len(data):,} rows are left out: eval.data has their prompts"
        )
    return left


def _sampling(settings: SamplingSettings, codec: TextCodec) -> dict[str, Any]:
    """Returns the fields of SamplingParams: the names of special tokens as their ids."""
    params = settings.given()
    if texts := params.pop("stop", None):
        params |= codec.stops(texts, "sampling.stop")
        ids = {*settings.stop_token_ids, *params["stop_token_ids"]}
        params["stop_token_ids"] = sorted(ids)
    return params
