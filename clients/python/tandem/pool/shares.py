"""The division of a request's items among replicas. Pure logic: no calls, no threads, no clock.

Every replica has a share of the items. It is sent a window of them at a time, so that the rest can
still go to another replica: to one that is done sooner, or to any if the replica is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate


class Shares:
    """The items that every replica is to be sent, and those that it was sent.

    Items and replicas are named by index. An item has units (samples of a prompt, tokens of a
    sequence) which are answered one by one. The load of a replica is the number of its units that
    are not answered. Every replica is present at first.

    Attributes:
        unfinished: number of items that are not answered.
        moved: number of items that a present replica left to another one.
    """

    def __init__(
        self,
        units: Sequence[int],
        order: Iterable[int],
        capacities: Sequence[int],
        windows: Sequence[int],
        on_recall: Callable[[int, list[int]], None] = lambda replica, items: None,
    ) -> None:
        """Divides `order`, all items, into contiguous shares in proportion to the capacities.

        Args:
            units: number of units of every item, at least 1.
            order: items that should stay together lie beside each other.
            capacities: number of units that every replica works on at the same time, at least 1.
            windows: most units that a replica is sent, if more than one item.
            on_recall: called with a replica and the items that it must not begin any more.
        """
        self._units = list(units)
        self._left = list(units)
        self._capacities = list(capacities)
        self._windows = list(windows)
        self._on_recall = on_recall
        self._present = set(range(len(capacities)))
        self._unsent: list[deque[int]] = [deque() for _ in capacities]
        # In the order in which they were sent, which is the one in which a replica begins them.
        self._sent: list[list[int]] = [[] for _ in capacities]
        # Units of both that are not answered.
        self._unsent_load = [0] * len(capacities)
        self._sent_load = [0] * len(capacities)
        self.unfinished = len(units)
        self.moved = 0
        self._divide(order, dict(enumerate(capacities)))

    def sent(self, replica: int) -> list[int]:
        """Returns the items that the replica was sent and has not answered."""
        return list(self._sent[replica])

    def has_work(self, replica: int) -> bool:
        """Whether take() gives the replica anything, if it has answered all that it was sent."""
        if replica not in self._present:
            return False
        others = self._present - {replica}
        return bool(self._unsent[replica]) or any(
            self._unsent[other] or self._waiting(other) for other in others
        )

    def take(self, replica: int) -> list[int]:
        """Returns items to send to the replica now; they count as sent.

        They are the next ones of its share or, once all of that is sent, of the share of the
        replica with the highest load, as long as that one keeps the higher load of the two. A
        replica without any load also gets items that another one was sent but has not begun.
        """
        if replica not in self._present:
            return []
        if not self._unsent[replica]:
            self._take_over(replica)
        taken = []
        window, queue = self._windows[replica], self._unsent[replica]
        while queue and (
            self._sent_load[replica] + self._units[queue[0]] <= window or not self._sent[replica]
        ):
            item = queue.popleft()
            self._unsent_load[replica] -= self._units[item]
            self._sent[replica].append(item)
            self._sent_load[replica] += self._units[item]
            taken.append(item)
        return taken

    def answer(self, replica: int, item: int, units: int = 1) -> bool:
        """Counts answered units of an item that the replica was sent; whether the item is done."""
        self._left[item] -= units
        self._sent_load[replica] -= units
        if self._left[item] > 0:
            return False
        self._sent[replica].remove(item)
        self.unfinished -= 1
        return True

    def take_back(self, replica: int) -> list[int]:
        """Counts what the replica was sent and has not answered as unsent; returns these items."""
        back = self.sent(replica)
        self._unsend(replica, back)
        self._deal_out()
        return back

    def leave(self, replica: int, *, finish_begun: bool = False) -> list[int]:
        """Deals the replica's items out to the present ones, and sends it nothing until join().

        With `finish_begun` it keeps the items that it has begun. Returns the items that it was sent
        and has lost. Without another present replica it keeps its items, unsent.
        """
        lost = self._waiting(replica) if finish_begun else self.sent(replica)
        self._present.discard(replica)
        self._unsend(replica, lost)
        if finish_begun and lost:
            self._on_recall(replica, lost)
        self._deal_out()
        return lost

    def join(self, replica: int) -> None:
        """Makes a replica that left present again."""
        self._present.add(replica)
        self._deal_out()

    def _divide(self, items: Iterable[int], parts: Mapping[int, float]) -> None:
        """Appends contiguous runs of the items to replicas' shares, in proportion to `parts`."""
        items = list(items)
        total, whole = sum(self._units[item] for item in items), sum(parts.values())
        replicas = list(parts)
        ends = [total * end / whole for end in accumulate(parts.values())]
        place, before = 0, 0
        for item in items:
            # An item belongs to the run that its middle lies in.
            while place < len(ends) - 1 and before + self._units[item] / 2 >= ends[place]:
                place += 1
            self._unsent[replicas[place]].append(item)
            self._unsent_load[replicas[place]] += self._units[item]
            before += self._units[item]

    def _load(self, replica: int) -> int:
        return self._sent_load[replica] + self._unsent_load[replica]

    def _waiting(self, replica: int) -> list[int]:
        """Returns the items that the replica was sent and cannot have begun."""
        before = accumulate((self._left[item] for item in self._sent[replica]), initial=0)
        return [
            item
            for item, units in zip(self._sent[replica], before, strict=False)
            if units >= self._capacities[replica]
        ]

    def _unsend(self, replica: int, items: list[int]) -> None:
        """Puts items that were sent back to the front of the share."""
        taken_back = set(items)
        self._sent_load[replica] -= sum(self._left[item] for item in items)
        self._unsent_load[replica] += sum(self._units[item] for item in items)
        self._sent[replica] = [item for item in self._sent[replica] if item not in taken_back]
        self._unsent[replica].extendleft(reversed(items))
        for item in items:
            self._left[item] = self._units[item]

    def _take_over(self, replica: int) -> None:
        others = self._present - {replica}
        idle = not self._sent[replica]
        if idle and not any(self._unsent[other] for other in others):
            waiting = {other: self._waiting(other) for other in others}
            units = {other: sum(self._left[item] for item in waiting[other]) for other in others}
            slowest = max(others, key=lambda one: units[one], default=None)
            if slowest is None or not waiting[slowest]:
                return
            self._unsend(slowest, waiting[slowest])
            self._on_recall(slowest, waiting[slowest])
        holding = [other for other in others if self._unsent[other]]
        if not holding:
            return
        busiest = max(holding, key=lambda one: self._load(one) / self._capacities[one])
        queue = self._unsent[busiest]
        while queue and (self._is_fair(queue[-1], busiest, replica) or not self._any(replica)):
            item = queue.pop()
            self._unsent_load[busiest] -= self._units[item]
            self._unsent[replica].appendleft(item)
            self._unsent_load[replica] += self._units[item]
            self.moved += 1

    def _any(self, replica: int) -> bool:
        return bool(self._sent[replica] or self._unsent[replica])

    def _is_fair(self, item: int, giver: int, taker: int) -> bool:
        """Whether the giver still has the higher load once the taker has the item."""
        units = self._units[item]
        left = (self._load(giver) - units) / self._capacities[giver]
        return left >= (self._load(taker) + units) / self._capacities[taker]

    def _deal_out(self) -> None:
        """Gives the unsent items of absent replicas to the present ones, the least loaded most."""
        if not self._present:
            return
        for replica, queue in enumerate(self._unsent):
            if replica not in self._present and queue:
                items, units = list(queue), self._unsent_load[replica]
                queue.clear()
                self._unsent_load[replica] = 0
                self._divide(items, self._rooms(units))

    def _rooms(self, units: int) -> dict[int, float]:
        """Returns how many of the units go to which present replica, so that loads are even."""
        takers = sorted(self._present)
        while True:
            load = sum(map(self._load, takers))
            level = (units + load) / sum(self._capacities[one] for one in takers)
            rooms = {one: level * self._capacities[one] - self._load(one) for one in takers}
            below = [one for one in takers if rooms[one] > 0]
            if len(below) == len(takers):
                return rooms
            takers = below
