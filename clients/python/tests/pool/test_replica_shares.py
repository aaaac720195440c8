"""The division of items among replicas."""

import random

from tandem.pool.shares import Shares


def shares(units, capacities, windows=None, order=None, on_recall=lambda replica, items: None):
    return Shares(
        units,
        range(len(units)) if order is None else order,
        capacities,
        windows or capacities,
        on_recall,
    )


def test_items_are_divided_by_capacity_in_contiguous_shares():
    by_prefix = [3, 0, 4, 1, 5, 2]
    divided = shares([2] * 6, capacities=[8, 16], order=by_prefix)
    assert [divided.take(replica) for replica in (0, 1)] == [[3, 0], [4, 1, 5, 2]]
    assert divided.moved == 0


def test_a_replica_is_sent_a_window_and_then_what_it_has_room_for():
    divided = shares([2] * 6, capacities=[3], windows=[5])
    assert divided.take(0) == [0, 1]
    assert divided.take(0) == []
    assert not divided.answer(0, 0)
    assert divided.take(0) == [2]
    assert divided.answer(0, 0)
    assert divided.take(0) == []
    assert divided.sent(0) == [1, 2]


def test_an_item_larger_than_the_window_is_sent_alone():
    divided = shares([9, 1], capacities=[2])
    assert divided.take(0) == [0]
    assert divided.take(0) == []
    divided.answer(0, 0, 9)
    assert divided.take(0) == [1]


def test_a_replica_that_is_done_takes_over_until_loads_are_equal():
    divided = shares([1] * 20, capacities=[2, 2], windows=[10, 2])
    assert divided.take(0) == [*range(10)]
    assert divided.take(1) == [10, 11]
    for item in range(10):
        divided.answer(0, item)
    # Replica 1 has 2 items begun and 8 unsent: 5 are left to each.
    assert divided.take(0) == [15, 16, 17, 18, 19]
    assert divided.moved == 5
    assert divided.take(0) == []


def test_nothing_is_taken_over_from_a_replica_with_the_lower_load():
    divided = shares([1] * 4, capacities=[4, 4])
    assert divided.take(0) == [0, 1]
    # Replica 1 was not sent anything yet, but it has no more to do than replica 0.
    assert divided.take(0) == []
    assert divided.take(1) == [2, 3]


def test_what_a_slow_replica_has_not_begun_is_recalled_for_an_idle_one():
    recalled = []
    divided = shares(
        [2] * 8,
        capacities=[4, 4],
        windows=[8, 8],
        on_recall=lambda replica, items: recalled.append((replica, items)),
    )
    assert divided.take(0) == [0, 1, 2, 3]
    assert divided.take(1) == [4, 5, 6, 7]
    for item in (0, 1, 2, 3):
        divided.answer(0, item, 2)
    assert divided.has_work(0)
    # 4 and 5 are begun; 6 may wait for replica 1.
    assert divided.take(0) == [6, 7]
    assert recalled == [(1, [6, 7])]
    assert divided.sent(1) == [4, 5]
    assert not divided.take(1)
    for item in (6, 7):
        divided.answer(0, item, 2)
    # Work that has begun stays where it is.
    assert not divided.has_work(0)
    assert divided.take(0) == []


def test_the_items_of_a_lost_replica_go_to_the_least_loaded_ones():
    divided = shares([1] * 12, capacities=[2, 2, 2])
    for replica in range(3):
        divided.take(replica)
    divided.answer(2, 8)
    assert divided.leave(2) == [9]
    assert divided.take(2) == []
    assert not divided.has_work(2)
    answered = []
    for replica in (0, 1, 0, 1, 0, 1, 0, 1):
        divided.take(replica)
        for item in divided.sent(replica):
            divided.answer(replica, item)
            answered.append(item)
    assert sorted([*answered, 8]) == list(range(12))
    assert divided.unfinished == 0


def test_answers_of_a_lost_replica_to_a_part_of_an_item_do_not_count():
    divided = shares([3, 1], capacities=[3, 1])
    divided.take(0)
    divided.answer(0, 0, 2)
    assert divided.leave(0) == [0]
    divided.take(1)
    divided.answer(1, 1)
    assert divided.take(1) == [0]
    assert not divided.answer(1, 0, 2)
    assert divided.answer(1, 0)


def test_without_a_present_replica_items_wait_for_the_first_one_that_joins():
    divided = shares([1] * 4, capacities=[2, 2])
    divided.take(0)
    divided.leave(0)
    divided.leave(1)
    assert divided.take(0) == divided.take(1) == []
    divided.join(1)
    assert set(divided.take(1)) < {0, 1, 2, 3}
    assert divided.has_work(1)
    assert not divided.has_work(0)


def test_a_replica_that_is_updated_finishes_what_it_has_begun():
    recalled = []
    divided = shares(
        [1] * 8,
        capacities=[2, 2],
        windows=[4, 4],
        on_recall=lambda replica, items: recalled.append((replica, items)),
    )
    divided.take(0)
    assert divided.leave(0, finish_begun=True) == [2, 3]
    assert recalled == [(0, [2, 3])]
    assert divided.sent(0) == [0, 1]
    assert divided.take(0) == []
    assert divided.answer(0, 0)
    divided.join(0)
    assert divided.take(0)


def test_every_item_is_answered_once_whatever_happens(subtests):
    for seed in range(200):
        with subtests.test(seed=seed):
            answer_every_item(seed)


def answer_every_item(seed):
    """Replicas leave, join, take and answer at random until nothing is left."""
    generator = random.Random(seed)
    units = [generator.randint(1, 4) for _ in range(generator.randint(0, 30))]
    capacities = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
    windows = [generator.randint(one, 2 * one) for one in capacities]
    order = generator.sample(range(len(units)), len(units))
    held = [[] for _ in capacities]  # what every replica would say that it was sent

    def recall(replica, items):
        held[replica] = [item for item in held[replica] if item not in items]

    divided = shares(units, capacities, windows, order, recall)
    present = set(range(len(capacities)))
    left, answered = {}, []
    while divided.unfinished:
        replica = generator.randrange(len(capacities))
        event = generator.random()
        if event < 0.05 and len(present) > 1:
            divided.leave(replica)
            held[replica] = []
            present.discard(replica)
        elif event < 0.1 and len(present) > 1:
            divided.leave(replica, finish_begun=True)
            present.discard(replica)
        elif event < 0.3:
            divided.join(replica)
            present.add(replica)
        elif event < 0.6:
            idle, could = not held[replica], divided.has_work(replica)
            taken = divided.take(replica)
            if idle:
                assert bool(taken) == could
            held[replica] += taken
            for item in taken:
                left[item] = units[item]
            load = sum(left[item] for item in held[replica])
            assert load <= windows[replica] or len(held[replica]) == 1
        elif held[replica]:
            item = generator.choice(held[replica])
            left[item] -= 1
            if divided.answer(replica, item):
                assert left[item] == 0
                held[replica].remove(item)
                answered.append(item)
        assert divided.sent(replica) == held[replica]
        everywhere = [item for items in held for item in items]
        assert len(set(everywhere)) == len(everywhere)
    assert sorted(answered) == list(range(len(units)))
