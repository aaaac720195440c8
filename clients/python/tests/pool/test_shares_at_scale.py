"""The division of many items among replicas: neighbours stay together, each is looked at once."""

import sys

from tandem.pool.shares import Shares


def test_the_share_of_a_lost_replica_is_dealt_out_in_contiguous_runs():
    divided = Shares([1] * 90, range(90), [8, 4, 4], [8, 90, 90])
    sent = [divided.take(replica) for replica in range(3)]
    assert [len(items) for items in sent] == [8, 22, 23]
    for item in sent[2][:10]:
        divided.answer(2, item)
    divided.leave(0)
    # Each has a load of 40 then.
    assert divided.take(1) == [*range(18)]
    assert divided.take(2) == [*range(18, 45)]


def steps_of_a_loss(items):
    """The number of lines of Python that the loss of a replica runs."""
    divided = Shares([1] * items, range(items), [256] * 3, [512] * 3)
    steps = 0

    def count(frame, event, _):
        nonlocal steps
        steps += 1
        return count

    sys.settrace(count)
    try:
        divided.leave(0)
        divided.join(0)
    finally:
        sys.settrace(None)
    assert divided.take(0)
    assert divided.moved > 0
    return steps


def test_the_loss_of_a_replica_takes_steps_in_proportion_to_the_items():
    assert steps_of_a_loss(8000) < 10 * steps_of_a_loss(1000)
