"""Ranges of numbers: what a setting or a description of a device may be."""

from math import inf

from atlas_fl.frozen import Frozen

LARGEST = 10**15
"""Largest number of any setting: a larger float does not hold every whole number."""


class Range(Frozen):
    """Range of a setting that is a number, or of the numbers of a list."""

    least: float = -LARGEST
    above: float = -inf
    most: float = LARGEST
    below: float = inf
    at_site: float = inf
    """The largest value of a server's setting that a site takes: what a job may cost it in memory and time."""

    @property
    def allowed(self) -> str:
        """Words for the range."""
        return self.describe()

    def fits(self, number: float) -> bool:
        """Return true for a number in the range, and false for NaN."""
        return self.least <= number <= self.most and self.above < number < self.below

    def describe(self, number: float = 0) -> str:
        """Words for the range; the bound of all numbers is among them only if this number is beyond it.

        >>> Range(least=0, below=1).describe()
        'at least 0, below 1'
        """
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        said = {word: bound for word, bound in bounds.items() if abs(bound) < LARGEST}
        if number > LARGEST and self.most == LARGEST:
            said["at most"] = float(LARGEST)
        words = [f"{word} {bound if isinstance(bound, int) else f'{bound:g}'}" for word, bound in said.items()]
        return ", ".join(words) or "a number"
