"""The environment: tic-tac-toe against the junior."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
FREE, MINE, THEIRS = "_", "x", "o"


def won(cells: Sequence[str], player: str) -> bool:
    """Whether a player has a line."""
    return any(all(cells[one] == player for one in line) for line in LINES)


def free(cells: Sequence[str]) -> list[int]:
    """Returns the cells that are free."""
    return [one for one, owner in enumerate(cells) if owner == FREE]


def turned(cells: Sequence[str]) -> str:
    """Returns the board as the other player sees it: its own cells are x."""
    other = {MINE: THEIRS, THEIRS: MINE, FREE: FREE}
    return " ".join(other[one] for one in cells)


def cell_in(text: str) -> int | None:
    """Returns the cell of a call of `place` in a text; None without one."""
    try:
        called = json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])
        return int(called["arguments"]["cell"])
    except (LookupError, ValueError, TypeError):
        return None


class TicTacToe:
    """One game. A coin decides who begins."""

    def reset(self, junior: Callable[..., str], seed: int, begun: int = 0, **row: object) -> str:
        """Begins a game, behind `begun` moves at random of each player, at most 3."""
        self._junior = junior
        self._random = random.Random(seed)
        self._reward = 0.0
        self.done = False
        self._cells = self._position(begun)
        if self._random.random() < 0.5:
            self._cells[self._answer()] = THEIRS
        return " " + " ".join(self._cells)

    def place(self, cell: int) -> str:
        """Takes a cell; the opponent takes another.

        Args:
            cell: the cell, 0 to 8, row by row.
        """
        if cell not in free(self._cells):
            self.done = True
            return "taken"
        if not self._takes(cell, MINE):
            self._takes(self._answer(), THEIRS)
        return " ".join(self._cells)

    def get_reward(self) -> float:
        """Returns 1 for a game that was won, 0.5 for a draw, 0 for any other."""
        return self._reward

    def _position(self, begun: int) -> list[str]:
        """Returns a position that nobody has won."""
        while True:
            cells = [FREE] * 9
            for player in (MINE, THEIRS) * begun:
                cells[self._random.choice(free(cells))] = player
            if not won(cells, MINE) and not won(cells, THEIRS):
                return cells

    def _answer(self) -> int:
        """Returns the junior's move; one at random where it names no free cell."""
        said = self._junior([{"role": "user", "content": f"play {turned(self._cells)}"}])
        cell, left = cell_in(said), free(self._cells)
        return cell if cell in left else self._random.choice(left)

    def _takes(self, cell: int, player: str) -> bool:
        """Gives a cell to a player; returns whether the game has ended."""
        self._cells[cell] = player
        if won(self._cells, player):
            self._reward = float(player == MINE)
        elif not free(self._cells):
            self._reward = 0.5
        else:
            return False
        self.done = True
        return True
