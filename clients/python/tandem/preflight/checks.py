"""The checks before a run begins: they find all mistakes at once and change nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem.cluster.plan import (
    answers_held_out,
    drafts_in,
    draws_responses,
    environment_asks_junior,
    learner_of,
    learns_rows,
    modes_in,
)
from tandem.data.dataset import Dataset
from tandem.data.supervised import require_lengths
from tandem.errors import ConfigError, RpcError, TandemError
from tandem.models.tokenizer import TextCodec
from tandem.preflight.problems import Problems
from tandem.preflight.server_facts import RolloutFacts, ServerFacts
from tandem.settings.run import EvalMode, Purpose, RunSettings

_log = logging.getLogger(__name__)


# Fields of TandemConfig that some strategies alone read.
_STRATEGIES_WITH = {
    "prob_senior": ("bernoulli", "word"),
    "chunk_size": ("chunk",),
    "max_gap_tokens": ("word",),
    "boundary_token_ids": ("sentence", "word"),
}
_REFERENCE_HINT = "the reference is a rollout server of its own, or `junior`"


def check_servers(
    settings: RunSettings,
    purpose: Purpose,
    servers: ServerFacts,
    data: Mapping[str, Dataset],
    problems: Problems,
) -> None:
    """Collects the settings that the servers refuse, and notes those that have no effect.

    `data` has the data sets that could be read, by the field that names them.
    """
    with problems.collect():
        check_sizes(settings, purpose, servers)
    for rollout in servers.rollouts:
        with problems.collect():
            check_junior(modes_in(settings, purpose), rollout.has_junior, rollout.whose)
        for field, drafts in drafts_in(settings, purpose).items():
            with problems.collect():
                require_drafter(
                    f"{field}.method",
                    drafts.method,
                    has_junior=rollout.has_junior,
                    has_speculator=rollout.has_speculator,
                    whose=rollout.whose,
                )
        if environment_asks_junior(settings, purpose):
            with problems.collect():
                require_junior("environment.junior", rollout.has_junior, rollout.whose)
        for name, source in settings.teachers_in(purpose).items():
            if source == "junior":
                with problems.collect():
                    require_junior(f"teachers.{name}: junior", rollout.has_junior, rollout.whose)
        if purpose != "train":
            continue
        if settings.tandem.enabled:
            with problems.collect():
                require_junior(
                    "tandem.enabled",
                    rollout.has_junior,
                    rollout.whose,
                    "; tandem.enabled: false trains only the senior",
                )
        if settings.reference == "junior":
            with problems.collect():
                require_junior("reference: junior", rollout.has_junior, rollout.whose)
    for field, dataset in data.items():
        with problems.collect():
            dataset.require_prompts_below(servers.max_model_len, field)
            for setting, max_tokens in _lengths_asked(settings, purpose, field, data):
                _check_max_tokens(
                    setting, max_tokens, field, dataset, servers.max_model_len, problems
                )
    if learns_rows(settings, purpose) and "data" in data:
        with problems.collect():
            require_lengths(data["data"], servers.max_model_len)
    if purpose == "train" and servers.rollouts:
        _warn_of_unused_tandem(settings, servers.rollouts[0], problems)


def in_force(
    settings: RunSettings,
    purpose: Purpose,
    servers: ServerFacts | None,
    objective: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the sections `tandem` and `objective` with the servers' defaults, if known."""
    sections: dict[str, Any] = {"objective": dict(objective)} if objective else {}
    if purpose == "train" and servers is not None and servers.rollouts:
        sections["tandem"] = _tandem_in_force(settings, servers.rollouts[0])
    return sections


def _tandem_in_force(settings: RunSettings, rollout: RolloutFacts) -> dict[str, Any]:
    """Returns the fields of TandemConfig that a run's samples are drawn with."""
    return {**rollout.tandem, **settings.tandem.given()}


def _warn_of_unused_tandem(
    settings: RunSettings, rollout: RolloutFacts, problems: Problems
) -> None:
    """Warns of settings of `tandem` that its strategy does not read."""
    if not settings.tandem.enabled:
        return
    strategy = _tandem_in_force(settings, rollout)["selection_strategy"]
    for field in settings.tandem.given():
        if strategy and strategy not in _STRATEGIES_WITH.get(field, (strategy,)):
            problems.warn(f"tandem.{field} has no effect with selection_strategy: {strategy}")


def _lengths_asked(
    settings: RunSettings, purpose: Purpose, field: str, data: Mapping[str, Dataset]
) -> Iterator[tuple[str, int]]:
    """Yields the settings, with their values, that bound the responses to a data set's prompts."""
    if draws_responses(settings, purpose) and field == "data":
        yield "sampling.max_tokens", settings.sampling.max_tokens
    held_out = "eval.data" if "eval.data" in data else "data"
    if answers_held_out(settings, purpose) and field == held_out:
        if settings.eval.max_tokens is None:
            yield "sampling.max_tokens", settings.sampling.max_tokens
        else:
            yield "eval.max_tokens", settings.eval.max_tokens


def _check_max_tokens(
    setting: str,
    max_tokens: int,
    field: str,
    dataset: Dataset,
    max_model_len: int,
    problems: Problems,
) -> None:
    """Raises ConfigError if no response can reach `max_tokens`; warns if some cannot."""
    lengths = [len(example.token_ids) for example in dataset.examples]
    short = sum(length + max_tokens > max_model_len for length in lengths)
    room = max_model_len - min(lengths)
    if room < max_tokens:
        raise ConfigError(
            f"{setting}: {max_tokens:,}, but the servers' max_model_len of {max_model_len:,} "
            f"leaves a response to the shortest prompt of {field} {room:,} tokens",
            hint=f"raise the servers' max_model_len, or lower {setting}",
        )
    if short:
        problems.warn(
            f"{short:,} of {len(lengths):,} prompts of {field} leave a response less than "
            f"{setting} ({max_tokens:,}) within the servers' max_model_len ({max_model_len:,})"
        )


def check_sizes(settings: RunSettings, purpose: Purpose, servers: ServerFacts) -> None:
    """Raises ConfigError if a step exceeds the trainer's limit, or samples a rollout server's."""
    batch, max_samples = settings.batch, servers.max_samples
    step = {
        "train": ("batch", batch.samples_per_step),
        "sft": ("sft.batch_size", settings.sft.batch_size),
        "dpo": ("dpo.batch_size", 2 * settings.dpo.batch_size),
        "reward-model": ("reward_model.batch_size", 2 * settings.reward_model.batch_size),
    }
    field, samples = step.get(purpose, ("", 0))
    if samples > max_samples:
        raise ConfigError(
            f"{field}: a step has {samples:,} samples, but the {learner_of(purpose)}'s max_samples "
            f"is {max_samples:,}"
        )
    mini_batches = settings.objective.num_mini_batches or 1
    if purpose == "train" and mini_batches > samples:
        raise ConfigError(
            f"objective.num_mini_batches: {mini_batches:,}, but a step has {samples:,} samples"
        )
    asked = {} if purpose == "drafts" else {"eval.samples": settings.eval.samples}
    if purpose == "train":
        asked["batch.samples_per_prompt"] = batch.samples_per_prompt
    max_queue = min((rollout.max_queue for rollout in servers.rollouts), default=None)
    for field, samples in asked.items():
        if max_queue is not None and samples > max_queue:
            raise ConfigError(
                f"{field}: the {samples:,} samples of a prompt are drawn together, but a rollout "
                f"server's max_queue is {max_queue:,}"
            )


def check_overlong_buffer(settings: RunSettings) -> None:
    """Raises ConfigError for a buffer that is longer than any response."""
    buffer, longest = settings.reward.overlong_buffer, settings.sampling.max_tokens
    if buffer is not None and buffer.len > longest:
        raise ConfigError(
            f"reward.overlong_buffer.len: {buffer.len:,} tokens, but sampling.max_tokens allows a "
            f"response only {longest:,}"
        )


def check_kl(settings: RunSettings, rollouts: Sequence[str]) -> None:
    """Raises ConfigError for settings of a KL that the objective does not have.

    Also for a horizon below a step, and for a reference among `rollouts`, the addresses of the
    run's own rollout servers if they run already.
    """
    control, batch = settings.kl_control, settings.batch
    asking = {"kl_control": control is not None, "reference": settings.reference != "trainer"}
    for field, asks in asking.items():
        if asks and not settings.objective.kl_coefficient:
            raise ConfigError(
                f"{field}: only applies to a KL, but objective.kl_coefficient is not set or 0"
            )
    if control is not None and control.horizon < batch.samples_per_step:
        raise ConfigError(
            f"kl_control.horizon: {control.horizon:,} responses, but a single step has "
            f"{batch.samples_per_step:,}"
        )
    require_own_server("reference", settings.reference, rollouts, _REFERENCE_HINT)


def check_pair_reference(settings: RunSettings, rollouts: Sequence[str]) -> None:
    """Raises ConfigError for a `reference` that `tandem dpo` does not have.

    `rollouts` are the addresses of the run's own rollout servers if they run already.
    """
    if settings.reference == "trainer":
        return
    if settings.dpo.reference_source != "model":
        raise ConfigError(
            "reference: only applies to dpo.reference_logprobs: model, not to "
            f"{settings.dpo.reference_source}"
        )
    if settings.reference == "junior":
        raise ConfigError(
            "reference: junior does not apply to `tandem dpo`, which has no junior",
            hint="reference: trainer, or the HOST:PORT of a rollout server that has the model",
        )
    require_own_server("reference", settings.reference, rollouts, _REFERENCE_HINT)


def require_own_server(field: str, address: str, rollouts: Sequence[str], hint: str) -> None:
    """Raises ConfigError, beginning with `field`, for a frozen model that a run publishes to."""
    if address in rollouts:
        raise ConfigError(
            f"{field}: {address} is one of servers.rollout, which get the trainer's weights",
            hint=hint,
        )


def check_async(settings: RunSettings, purpose: Purpose) -> None:
    """Raises ConfigError for an asynchronous run of another kind than `tandem train`."""
    if settings.async_.max_staleness and learns_rows(settings, purpose):
        raise ConfigError(
            "async.max_staleness: only applies to `tandem train`; training on rows learns each "
            "step's texts with the weights of the step before",
            hint="async.max_staleness=0 for this command",
        )


def note_async(settings: RunSettings) -> None:
    """Notes settings that are bad for an asynchronous run, or cost it time."""
    staleness, objective = settings.async_.max_staleness, settings.objective
    if not staleness:
        return
    bounds = objective.rejection_upper or objective.off_policy_mask_threshold
    if objective.old_logprobs == "recomputed" and not bounds and settings.updates_per_step == 1:
        _log.warning(
            "objective.old_logprobs: recomputed: in a step of one update the ratio is 1, so that "
            "the clip does not bound how far the update follows tokens of older weights "
            f"(async.max_staleness: {staleness}); senior, the default, does"
        )
    elif objective.old_logprobs == "recomputed" and not (
        bounds or objective.importance_sampling_cap
    ):
        _log.warning(
            "objective.old_logprobs: recomputed: nothing corrects the update for tokens of older "
            f"weights (async.max_staleness: {staleness}); objective.importance_sampling_cap "
            "weighs them"
        )
    if any(
        one.executor == "thread" and one.workers == 1 and not one.is_builtin
        for one in settings.reward_functions
    ):
        _log.warning(
            "reward.workers: 1 calls the function in the thread that draws ahead, not in the main "
            "thread (async.max_staleness): time limits by `signal` fail there"
        )
    for field, every in (
        ("checkpoint.every", settings.checkpoint.every),
        ("eval.every", settings.eval.every),
    ):
        if every % staleness:
            _log.info(
                f"{field}: {every} is not a multiple of async.max_staleness ({staleness}): rollout "
                "servers and trainer wait for each other there"
            )


def note_start_and_reference(settings: RunSettings) -> None:
    """Notes a KL that pulls towards another model than the one that the run starts from."""
    trainer = (settings.cluster.trainer or {}) if settings.cluster is not None else {}
    starts_elsewhere = settings.start_from not in (None, "base")
    to_base = settings.reference == "trainer" and not trainer.get("reference_model")
    if settings.objective.kl_coefficient and starts_elsewhere and to_base:
        _log.warning(
            "the KL pulls towards the trainer's base model, but the run starts from "
            f"{settings.start_from}: cluster.trainer.reference_model names another reference, for "
            "example an export of the start (`tandem export`)"
        )


def note_greedy_samples(settings: RunSettings, purpose: Purpose) -> None:
    """Notes evaluations whose answers to a prompt are all the same."""
    samples = settings.eval.samples
    if samples > 1 and settings.eval.temperature == 0 and modes_in(settings, purpose):
        _log.warning(
            f"eval.samples: the {samples:,} answers to a prompt are the same at "
            "eval.temperature: 0, the default, and pass@k is pass@1; eval.temperature: 1.0 draws "
            "different ones"
        )


def check_importance_weights(settings: RunSettings, objective: Mapping[str, Any]) -> None:
    """Raises ConfigError if the importance weight of every token of a run is 1.

    `objective` is the one in force. The trainer refuses such a step, but only once it has samples.
    """
    compared, cap = objective.get("old_logprobs"), objective.get("importance_sampling_cap") or 0
    floor = objective.get("importance_sampling_floor") or 0
    if cap < 1 or floor > 1 or compared not in ("senior", "author"):
        return
    sampling = settings.sampling
    cut = sampling.temperature > 0 and (
        sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    )
    juniors = settings.tandem.enabled and objective.get("junior_token_loss_weight")
    if not (cut or (juniors and compared == "senior")):
        raise ConfigError(
            f"objective.importance_sampling_cap: has no effect with old_logprobs: {compared}: "
            "every weight compares a recorded log-probability with itself",
            hint="objective.old_logprobs: recomputed compares it with the trainer's",
        )


def check_same_senior(
    trainer: trainer_pb2.GetServerInfoResponse,
    rollouts: Mapping[str, rollout_pb2.GetServerInfoResponse],
) -> None:
    """Raises ConfigError if a rollout server was started with another model than the trainer.

    Only weights of version 0 show the model that a server was started with.
    """
    ours = trainer.server
    for whose, info in rollouts.items():
        served = info.server
        both_new = ours.weights.version == served.weights.version == 0
        if both_new and served.weights.digest not in ("", ours.weights.digest):
            raise ConfigError(
                f"servers: {whose} ({served.model.path}, digest {served.weights.digest}) and the "
                f"trainer ({ours.model.path}, digest {ours.weights.digest}) hold different models",
                hint="senior.model of the rollout server and model of the trainer must name the "
                "same model",
            )


def check_same_junior(rollouts: Mapping[str, rollout_pb2.GetServerInfoResponse]) -> None:
    """Raises ConfigError unless all rollout servers, by their names, have the same junior."""
    versions = {whose: info.junior_version for whose, info in rollouts.items()}
    if len(set(versions.values())) > 1:
        held = ", ".join(f"{whose} has {version}" for whose, version in versions.items())
        raise ConfigError(f"reference: junior: the rollout servers have different juniors: {held}")


def handoff_boundary_ids(settings: RunSettings, codec: TextCodec) -> list[int]:
    """Returns the ids of the tokens that end a turn of the handoff.

    Raises ConfigError if there is none.
    """
    text = settings.eval.handoff_boundary
    ids = codec.ids_ending_with(text)
    if not ids:
        raise ConfigError(
            f"eval.handoff_boundary: no token of {codec.directory} ends with {text!r}, where the "
            "author would change",
            hint='choose a text that single tokens end with, such as "." or "\\n"',
        )
    return ids


def check_modes(modes: Sequence[EvalMode], settings: RunSettings, purpose: Purpose) -> None:
    """Raises ConfigError for evaluations that a run of these settings cannot make."""
    if modes and purpose == "reward-model":
        raise ConfigError("eval: does not apply to `tandem reward-model`, which answers no prompts")
    if settings.eval.handoff_turns and settings.environment is None:
        raise ConfigError("eval.handoff_turns: there are turns with `environment` alone")
    if "tandem" in modes and not settings.tandem.enabled:
        raise ConfigError("eval.modes: tandem: tandem.enabled is false, so it is the mode solo")


def check_junior(modes: Sequence[EvalMode], has_junior: bool, whose: str) -> None:
    """Raises ConfigError if evaluations need a junior and the server `whose` has none."""
    needing = [mode for mode in modes if mode != "solo"]
    if needing:
        require_junior(f"eval.modes: {', '.join(needing)}", has_junior, whose)


def require_junior(field: str, has_junior: bool, whose: str, or_else: str = "") -> None:
    """Raises ConfigError for a setting that needs a junior if the server `whose` has none."""
    if not has_junior:
        raise ConfigError(
            f"{field}: {whose} has no junior",
            hint=f"set junior.model in the rollout server's settings{or_else}",
        )


def require_drafter(
    field: str, method: str, *, has_junior: bool, has_speculator: bool, whose: str
) -> None:
    """Raises ConfigError for drafts from a model that the server `whose` does not have."""
    if method == "junior":
        require_junior(f"{field}: {method}", has_junior, whose)
    if method == "heads" and not has_speculator:
        raise ConfigError(
            f"{field}: {method}: {whose} has no speculator",
            hint="set senior.speculator in the rollout server's settings",
        )


def named_objective(error: RpcError) -> TandemError:
    """Returns the trainer's error about an objective, with the field of the run's settings."""
    if error.field is None:
        return error
    field = f"objective.{error.field.removeprefix('policy.')}"
    return ConfigError(
        f"{field}: {error.message.removeprefix(f'{error.field}: ')}", hint=error.hint
    )
