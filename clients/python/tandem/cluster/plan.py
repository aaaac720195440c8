"""The servers of a cluster that a run starts, and the models that they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.errors import ConfigError
from tandem.rpc.certificate_directory import CertificateDirectory
from tandem.settings.cluster import ClusterSettings, LoraSettings
from tandem.settings.lanes import FLAT_NAMES, lane_setting
from tandem.settings.run import EvalMode, Purpose, RunSettings, SpeculativeSettings
from tandem.utils.atomic_files import KINDS


@dataclass(frozen=True)
class Uses:
    """Whether each server is used, and each model beside senior and critic.

    The defaults are those of `tandem up`.

    Attributes:
        trainer: whether the trainer is used.
        rollout: whether the rollout servers are.
        critic: whether the critic is.
        junior: whether the rollout servers' junior is.
        reference: whether the trainer's reference model is.
        trainer_junior: whether the trainer's junior is, for a KL towards it.
    """

    trainer: bool = True
    rollout: bool = True
    critic: bool = True
    junior: bool = True
    reference: bool = False
    trainer_junior: bool = False


def trains(purpose: Purpose) -> bool:
    """Returns whether runs of this kind train."""
    return purpose in KINDS


def learns_pairs(purpose: Purpose) -> bool:
    """Returns whether runs of this kind train on pairs of responses."""
    return purpose in ("dpo", "reward-model")


def learner_of(purpose: Purpose) -> Literal["trainer", "critic"]:
    """Returns the role of the server that a run of this kind trains."""
    return "critic" if purpose == "reward-model" else "trainer"


def uses_of(settings: RunSettings, purpose: Purpose) -> Uses:
    """Returns the servers and models that a run uses."""
    objective, draws_groups = settings.objective, purpose == "train"
    draws = draws_responses(settings, purpose)
    modes = modes_in(settings, purpose)
    compares = purpose == "dpo" and settings.dpo.reference_source == "model"
    kl_to = settings.reference if compares or (draws_groups and objective.kl_coefficient) else None
    junior_kl = draws_groups and bool(objective.junior_kl_coefficient)
    learner = learner_of(purpose)
    return Uses(
        trainer=learner == "trainer",
        rollout=draws
        or answers_held_out(settings, purpose)
        or "junior" in settings.teachers_in(purpose).values(),
        critic=learner == "critic" or (draws_groups and objective.advantage_estimator == "gae"),
        junior=(draws_groups and settings.tandem.enabled)
        or kl_to == "junior"
        or any(mode != "solo" for mode in modes)
        or environment_asks_junior(settings, purpose)
        or "junior" in settings.teachers_in(purpose).values()
        or any(drafts.method == "junior" for drafts in drafts_in(settings, purpose).values()),
        reference=kl_to == "trainer",
        trainer_junior=junior_kl and objective.junior_kl_kind != "forward_sampled",
    )


def draws_responses(settings: RunSettings, purpose: Purpose) -> bool:
    """Returns whether a run trains on responses to the prompts of its data that it draws itself."""
    own = settings.sft.responses == "senior"
    return purpose == "train" or (purpose == "sft" and own)


def learns_rows(settings: RunSettings, purpose: Purpose) -> bool:
    """Returns whether a run trains on responses that the rows of its data hold."""
    return trains(purpose) and not draws_responses(settings, purpose)


def environment_asks_junior(settings: RunSettings, purpose: Purpose) -> bool:
    """Returns whether an environment is called that may ask the junior."""
    asks = settings.environment is not None and settings.environment.junior
    return asks and (purpose == "train" or bool(modes_in(settings, purpose)))


def modes_in(settings: RunSettings, purpose: Purpose) -> list[EvalMode]:
    """Returns the evaluations that are made on the way; none in a run that does not evaluate."""
    if purpose == "drafts":
        return []
    evaluation = settings.eval
    on_the_way = evaluation.every or evaluation.at_start or evaluation.at_end
    return evaluation.modes if purpose == "eval" or on_the_way else []


def answers_held_out(settings: RunSettings, purpose: Purpose) -> bool:
    """Returns whether the held-out prompts are answered."""
    return purpose == "drafts" or bool(modes_in(settings, purpose))


def drafts_in(settings: RunSettings, purpose: Purpose) -> dict[str, SpeculativeSettings]:
    """Returns the drafts that a run asks for, by the field of the section."""
    drafts = {"speculative": settings.speculative} if draws_responses(settings, purpose) else {}
    if answers_held_out(settings, purpose):
        field = "speculative" if settings.eval.speculative is None else "eval.speculative"
        drafts[field] = settings.eval_speculative
    return drafts


def planned(cluster: ClusterSettings, uses: Uses = Uses()) -> ClusterSettings:
    """Returns the cluster to start: without unused servers, and with every used model named.

    `lora` stands for the adapters of trainer and senior, and `model` for the models, that a section
    does not name, but the trainer's frozen copies
    follow what they are copies of: its reference model the trainer's own model, and its junior that
    of the rollout servers. Rollout servers without a junior lose the settings of one. `certs`
    stands for the certificates and tokens in the same way.

    Raises ConfigError for `certs` without certificates.
    """
    model = cluster.model
    adapts = cluster.lora is not None or bool((cluster.trainer or {}).get("lora"))
    senior = (cluster.trainer or {}).get("model") or model
    trainer = {
        "model": model,
        # Without its adapters the trainer's model is the reference.
        "reference_model": senior if uses.reference and not adapts else None,
        "junior_model": _junior_of_rollouts(cluster) if uses.trainer_junior else None,
    }
    certs = cluster.certs
    if certs is not None and not (certs / "ca.crt").is_file():
        raise ConfigError(
            f"cluster.certs: {certs} is not a directory made by `tandem certs`",
            hint=f"`tandem certs {certs}` creates it",
        )
    return cluster.model_copy(
        update={
            "model": None,
            "lora": None,
            "rollout": [
                _secured(_without_junior_settings(_with_lanes(one, cluster, uses), uses), certs)
                for one in (cluster.rollout if uses.rollout else [])
            ],
            "trainer": _secured(
                _adapted(
                    _named(cluster.trainer if uses.trainer else None, model, trainer), cluster.lora
                ),
                certs,
            ),
            "critic": _secured(
                _named(cluster.critic if uses.critic else None, model, {"model": model}), certs
            ),
        }
    )


def _without_junior_settings(section: dict[str, Any], uses: Uses) -> dict[str, Any]:
    """Returns the section of a rollout server, without settings of a junior that it lacks.

    The server would refuse them.
    """
    if uses.junior or lane_setting(section, "junior", "model") is not None:
        return section
    unused = {"junior"} | {flat for name, flat in FLAT_NAMES.items() if name.startswith("junior.")}
    return {key: value for key, value in section.items() if key not in unused}


def _secured(section: dict[str, Any] | None, certs: Path | None) -> dict[str, Any] | None:
    """Returns a section with the certificates and tokens of `certs` where it names none."""
    if section is None or certs is None:
        return section
    named = section.get("server")
    if not isinstance(named, dict | None):
        return section  # The start, and the preflight, refuse it.
    return section | {"server": CertificateDirectory(certs).server() | (named or {})}


def _junior_of_rollouts(cluster: ClusterSettings) -> Path | str | None:
    """The junior of the rollout servers; None if they have different ones."""
    juniors = {
        str(lane_setting(one, "junior", "model") or cluster.model) for one in cluster.rollout
    }
    return juniors.pop() if len(juniors) == 1 else None


def _adapted(section: dict[str, Any] | None, lora: LoraSettings | None) -> dict[str, Any] | None:
    """Returns a section, or a lane, with these adapters where it names none."""
    if section is None or lora is None:
        return section
    named = {key: str(value) if key == "path" else value for key, value in lora.given().items()}
    return {"lora": named} | section


def _with_lanes(section: dict[str, Any], cluster: ClusterSettings, uses: Uses) -> dict[str, Any]:
    """Returns the section of a rollout server with the cluster's model and adapters.

    They are those of lanes that name none.
    """
    model = cluster.model
    senior = section.get("senior") or {}
    if cluster.lora is not None and isinstance(senior, dict):
        section = section | {"senior": _adapted(senior, cluster.lora)}
    for lane in ("senior", "junior") if uses.junior else ("senior",):
        named = section.get(lane) or {}
        # The server refuses what is not a map.
        absent = lane_setting(section, lane, "model") is None
        if model is not None and absent and isinstance(named, dict):
            section = section | {lane: named | {"model": str(model)}}
    return section


def _named(
    section: dict[str, Any] | None, model: Path | None, fields: Mapping[str, Path | str | None]
) -> dict[str, Any] | None:
    """Returns a section with the models of `fields` that it lacks; as it is without a `model`."""
    if section is None or model is None:
        return section
    return {name: str(path) for name, path in fields.items() if path is not None} | section
