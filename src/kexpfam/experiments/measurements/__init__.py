"""What is measured in a cell: each measurement gets the cell and returns named values."""

from collections.abc import Callable

from kexpfam.experiments.measurements.benchmark import conditional
from kexpfam.experiments.measurements.growth import cost, rate
from kexpfam.experiments.measurements.neighbours import bare_neighbours
from kexpfam.experiments.measurements.portraits import convergence, portrait
from kexpfam.experiments.measurements.protocol import released_protocol
from kexpfam.experiments.measurements.synthetic import algorithm, density, dual
from kexpfam.experiments.records import Values
from kexpfam.experiments.specs import Cell

MEASUREMENTS: dict[str, Callable[[Cell], Values]] = {
    "density": density,
    "algorithm": algorithm,
    "dual": dual,
    "conditional": conditional,
    "released_protocol": released_protocol,
    "bare_neighbours": bare_neighbours,
    "portrait": portrait,
    "convergence": convergence,
    "cost": cost,
    "rate": rate,
}
