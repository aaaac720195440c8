"""The check of a run's settings against servers that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.cluster.plan import draws_responses, uses_of
from tandem.errors import RpcError
from tandem.preflight import checks
from tandem.preflight.inputs import Inputs
from tandem.preflight.problems import Problems
from tandem.preflight.server_facts import RolloutFacts, ServerFacts
from tandem.preflight.vocabulary import check_prompt_ids, check_vocabulary, warn_of_end_token
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.rpc.wire import message_record
from tandem.settings.bounds import INT32_MAX
from tandem.settings.run import RunSettings

# The answer of the server that a run trains.
LearnerInfo = trainer_pb2.GetServerInfoResponse | critic_pb2.GetServerInfoResponse


@dataclass(frozen=True)
class RunningServers:
    """The servers of a run and their answers to GetServerInfo, by the name of an error message.

    Attributes:
        trainer: the client of the server that the run trains, which answered `trainer_info`: the
            trainer, or the critic that becomes a reward model.
        critics: the model of the critic, if the run has one that answers.
        frozen: the models of the reference and of teachers that are servers of their own.
    """

    trainer: TrainerClient | CriticClient
    trainer_info: LearnerInfo
    rollouts: Mapping[str, rollout_pb2.GetServerInfoResponse]
    critics: Mapping[str, server_pb2.ModelInfo] = field(default_factory=dict)
    frozen: Sequence[server_pb2.ModelInfo] = ()


def check_running(
    servers: RunningServers, inputs: Inputs, problems: Problems
) -> tuple[ServerFacts, dict[str, Any]]:
    """Checks the settings against the trainer, the rollout servers, the critic and the reference.

    The trainer also checks the objective. Returns the facts of the servers, and the sections of the
    settings with the servers' defaults.
    """
    settings, purpose = inputs.settings, inputs.purpose
    trainer = servers.trainer_info
    trainer_name = f"the {servers.trainer.role} at {servers.trainer.address}"
    models = {trainer_name: trainer.server.model}
    models |= {whose: info.server.model for whose, info in servers.rollouts.items()}
    models |= servers.critics
    to_junior = settings.reference == "junior" and purpose == "train"
    if to_junior or "junior" in settings.teachers_in(purpose).values():
        with problems.collect():
            checks.check_same_junior(servers.rollouts)
    if draws_responses(settings, purpose) and settings.start_from in (None, "base"):
        with problems.collect():
            checks.check_same_senior(trainer, servers.rollouts)
    alone = [trainer.server.model, *servers.critics.values(), *servers.frozen]
    facts = ServerFacts(
        # A critic does not tell; it refuses a step that is too large.
        getattr(trainer, "max_samples", INT32_MAX),
        [RolloutFacts.of(whose, info) for whose, info in servers.rollouts.items()],
        uses_of(settings, purpose).junior,
        [model.max_model_len for model in alone],
    )
    checks.check_servers(settings, purpose, facts, inputs.data_sets, problems)
    if inputs.codec is not None:
        for whose, model in models.items():
            with problems.collect():
                check_vocabulary(inputs.codec, model, whose)
                check_prompt_ids(inputs.codec, inputs.data_sets, model, whose)
    with problems.collect():
        warn_of_end_token(inputs, trainer.server.model.eos_token_ids, trainer_name, problems)
        for whose, info in servers.rollouts.items():
            both = {*info.server.model.eos_token_ids, *info.junior.eos_token_ids}
            warn_of_end_token(inputs, both, whose, problems)
    objective: dict[str, Any] = {}
    if purpose == "train":
        with problems.collect():
            objective = _objective_in_force(servers.trainer, settings)
            checks.check_importance_weights(settings, objective)
    return facts, checks.in_force(settings, purpose, facts, objective)


def _objective_in_force(trainer: TrainerClient, settings: RunSettings) -> dict[str, Any]:
    try:
        return message_record(trainer.check_objective(settings.policy_objective()))
    except RpcError as error:
        raise checks.named_objective(error) from error
