"""The environment: a number from 1 to 7 to guess, with few guesses and few hints."""

HIGHEST = 7


def third(number: int) -> str:
    """Returns the third of the numbers in which a number lies."""
    return ("low", "middle", "high")[(number - 1) * 3 // HIGHEST]


class Guess:
    """One game."""

    def reset(self, answer: int, **row: object) -> None:
        """Begins a game whose number is the row's answer."""
        self._answer = answer
        self._guesses = self._hints = 0
        self.done = False

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: the guess.
        """
        self._guesses += 1
        self.done = number == self._answer
        if self.done:
            return "right"
        return "higher" if number < self._answer else "lower"

    def hint(self) -> str:
        """Tells the third of the numbers in which the number lies; costs half a guess."""
        self._hints += 1
        return third(self._answer)

    def get_reward(self) -> float:
        """Returns 1 for a number that was found, less 0.1 for each further guess, 0.05 a hint."""
        if not self.done:
            return 0.0
        return max(0.1, 1.0 - 0.1 * (self._guesses - 1) - 0.05 * self._hints)
