"""The environment: a frozen lake to cross, from any field to the goal, around the holes."""

# The lake, row by row: F is ice, H a hole, G the goal. Columns are a to d, rows 1 to 4.
LAKE = ("FFFF", "FHFF", "FFHF", "FFFG")
DIRECTIONS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
SIZE = len(LAKE)


def field(row: int, column: int) -> str:
    """Returns the name of a field."""
    return f"{'abcd'[column]}{row + 1}"


def fields(kind: str) -> list[str]:
    """Returns the fields of one kind."""
    places = ((row, column) for row in range(SIZE) for column in range(SIZE))
    return [field(row, column) for row, column in places if LAKE[row][column] == kind]


class Grid:
    """One walk."""

    def reset(self, start: str, **row: object) -> None:
        """Begins a walk at the row's field."""
        self._column, self._row = "abcd".index(start[0]), int(start[1]) - 1
        self._moves = 0
        self.done = False

    def move(self, direction: str) -> str:
        """Goes to the next field; at the edge of the lake one stays where one is.

        Args:
            direction: north, south, west or east.
        """
        down, right = DIRECTIONS[direction]
        self._row = min(max(self._row + down, 0), SIZE - 1)
        self._column = min(max(self._column + right, 0), SIZE - 1)
        self._moves += 1
        self.done = LAKE[self._row][self._column] != "F"
        return field(self._row, self._column)

    def get_reward(self) -> float:
        """Returns 1 for a goal that was reached, less 0.05 for each move; 0 for any other end."""
        reached = LAKE[self._row][self._column] == "G"
        return 1.0 - 0.05 * self._moves if reached else 0.0
