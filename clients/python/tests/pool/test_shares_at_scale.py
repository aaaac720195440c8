"""The division of many items among replicas: neighbours stay together, each is looked at once."""

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


class Unit(int):
    """The number 1, which counts how often it is reckoned with."""

    reckoned = 0

    def __add__(self, other):
        Unit.reckoned += 1
        return int(self) + other

    def __rsub__(self, other):
        Unit.reckoned += 1
        return other - int(self)

    def __truediv__(self, other):
        Unit.reckoned += 1
        return int(self) / other

    __radd__ = __add__


def reckonings_of_a_loss(items):
    """The number of sums with the units of an item when a replica is lost and comes back."""
    divided = Shares([Unit(1)] * items, range(items), [256] * 3, [512] * 3)
    Unit.reckoned = 0
    divided.leave(0)
    divided.join(0)
    reckoned = Unit.reckoned
    assert divided.take(0)
    assert divided.moved > 0
    return reckoned


def test_the_loss_of_a_replica_takes_work_in_proportion_to_the_items():
    assert 1000 < reckonings_of_a_loss(8000) < 10 * reckonings_of_a_loss(1000)
