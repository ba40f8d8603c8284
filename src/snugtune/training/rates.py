"""How fast a run is, and how long the rest of it takes."""

from __future__ import annotations

from collections import deque


class Rates:
    """Speed over the last updates, without the pauses between them. The clock is passed in.

    Args:
        now: The moment when the first update begins.
        window: How many updates count.
    """

    def __init__(self, *, now: float, window: int = 50) -> None:
        self._updates: deque[tuple[float, int, int]] = deque(maxlen=window)
        self._began = now
        self._paused_at: float | None = None
        self._pauses: list[float] = []

    def add(self, *, now: float, samples: int, tokens: int) -> float:
        """An update has ended, and the next one begins; the seconds it took."""
        seconds = now - self._began
        self._updates.append((seconds, samples, tokens))
        self._began = now
        return seconds

    def pause(self, *, now: float) -> None:
        """Something other than training begins: an evaluation, a checkpoint."""
        self._paused_at = now

    def resume(self, *, now: float) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._pauses.append(now - self._paused_at)
            self._began += now - self._paused_at
            self._paused_at = None

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of training; None before the first update."""
        return self._per_second(sum(samples for _, samples, _ in self._updates))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of training; None before the first update."""
        return self._per_second(sum(tokens for _, _, tokens in self._updates))

    def seconds_left(self, *, updates_left: int, pauses_left: int = 0) -> float | None:
        """How long the rest will take; None before the first update.

        Args:
            updates_left: Updates that are still to be done.
            pauses_left: Pauses that are still to come, each as long as the mean of those so far.
        """
        if not self._updates:
            return None
        pause = sum(self._pauses) / len(self._pauses) if self._pauses else 0.0
        return self._seconds() / len(self._updates) * updates_left + pause * pauses_left

    def _seconds(self) -> float:
        return sum(seconds for seconds, _, _ in self._updates)

    def _per_second(self, amount: int) -> float | None:
        seconds = self._seconds()
        return amount / seconds if seconds > 0 else None
