"""The training loop's checks of the critic."""

from types import SimpleNamespace

from fakes import weights

from tandem._proto.trainer.v1 import trainer_pb2
from tandem.training.loop import Loop


def versions_asked_for(*reports):
    """Critic versions that a loop requires after each report, if it begins with version 3."""
    asked = []

    def require_critic(version):
        asked.append(version)
        return weights(version)

    session = SimpleNamespace(require_critic=require_critic)
    loop = Loop(session, SimpleNamespace(first_step=1), print)
    loop._critic = weights(3)
    for report in reports:
        loop.require_critic(report)
    return asked


def test_the_critic_is_expected_to_count_the_steps_that_it_made():
    metrics = {"critic/loss": 0.5}
    made = trainer_pb2.StepReport(metrics=metrics)
    skipped_by_the_trainer = trainer_pb2.StepReport(skipped=True, metrics=metrics)
    skipped_by_both = trainer_pb2.StepReport(skipped=True)
    assert versions_asked_for(made, skipped_by_both, skipped_by_the_trainer, made) == [4, 5, 6]
