"""The environment: a calculator that adds, for a problem whose answer is its sum."""

# Largest number of a problem.
MOST = 19


class Calculator:
    """A calculator."""

    def reset(self, answer: int, **row: object) -> None:
        """Begins with nothing: the row's answer is for the reward."""

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        return a + b
