"""The circuit breakers in front of the catalog's replicas: a slow or dead one costs nobody any time."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from store.breaker import Breaker


@define
class LookupBreakers:
    """A breaker for each replica, a new one for each incarnation: of that nothing bad is known."""

    _breakers: dict[tuple[str, int], Breaker] = field(factory=dict)

    def of(self, name: str, epoch: int) -> Breaker:
        """Return the breaker of an incarnation."""
        found = self._breakers.get((name, epoch))
        if found is None:
            self._breakers = {key: b for key, b in self._breakers.items() if key[0] != name}
            found = self._breakers[name, epoch] = Breaker()
        return found

    def choose(
        self, replicas: Sequence[tuple[str, int]], now: float
    ) -> tuple[tuple[str, int] | None, list[tuple[str, int]]]:
        """Return the first replica that may be asked, and those before it that are to be probed meanwhile."""
        probes: list[tuple[str, int]] = []
        for replica in replicas:
            leave = self.of(*replica).leave(now)
            if leave == "ask":
                return replica, probes
            if leave == "probe":
                probes.append(replica)
        return None, probes
