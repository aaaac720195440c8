"""The division of many items among replicas: neighbours stay together, and it takes no time."""

import time

from tandem.pool.shares import Shares

ITEMS = 8000


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


def test_a_share_of_many_items_is_dealt_out_at_once():
    divided = Shares([1] * ITEMS, range(ITEMS), [256] * 3, [512] * 3)
    begin = time.perf_counter()
    divided.leave(0)
    divided.join(0)
    # It is quadratic no more: 8,000 items once took 1.5 s.
    assert time.perf_counter() - begin < 0.3
    assert divided.take(0)
    assert divided.moved > 0
