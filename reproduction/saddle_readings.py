"""How the records about the saddle point itself are read."""

from reproduction.evidence import Finding, Reading, Records, because, measured, unless
from reproduction.records import good
from reproduction.tables import label, power_law, slope_text

__all__ = ["STATIONARITY", "falls_with_steps"]

# The exponent of the convergence theorem where noise decides.
STATIONARITY = -0.5


def falls_with_steps(*schemes: str) -> Reading:
    """Read the decay of the mean squared gradient of the dual objective; faster than expected is fine."""

    @measured(
        "95 % interval of the exponent of the number of steps reaches "
        f"{STATIONARITY:.1f} or below, and not 0".replace("-", "−")
    )
    def read(records: Records) -> Finding | None:
        found = {
            name: power_law(good(records.get("stationarity", []), method=name), "steps", "squared_gradient")
            for name in schemes
        }
        if not all(found.values()):
            return None
        slopes = {name: pair for name, pair in found.items() if pair is not None}
        text = ", ".join(f"{label(name)} {slope_text(pair)}" for name, pair in slopes.items())
        holds = lambda slope, error: slope - error <= STATIONARITY and slope + error < 0.0
        flat = [f"{label(name)} has {slope_text(pair)}" for name, pair in slopes.items() if not holds(*pair)]
        return Finding(text, unless(not flat, because(", ".join(flat))))

    return read
