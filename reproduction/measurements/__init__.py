"""Measurements: functions of a cell that return named values."""

from collections.abc import Callable

from reproduction.measurements.arrival import arrival
from reproduction.measurements.benchmark import conditional
from reproduction.measurements.growth import cost, rate
from reproduction.measurements.labelled import labelled
from reproduction.measurements.mixed import mixed
from reproduction.measurements.neighbours import bare_neighbours
from reproduction.measurements.portraits import convergence, portrait
from reproduction.measurements.posteriors import posterior
from reproduction.measurements.protocol import released_protocol
from reproduction.measurements.reach import reach
from reproduction.measurements.real import joint, regression
from reproduction.measurements.stationarity import stationarity
from reproduction.measurements.synthetic import algorithm, density, dual, moons, space
from reproduction.measurements.using import anomaly, drift, novelty, planted, update
from reproduction.records import Values
from reproduction.specs import Cell

__all__ = ["MEASUREMENTS"]

MEASUREMENTS: dict[str, Callable[[Cell], Values]] = {
    "density": density,
    "algorithm": algorithm,
    "dual": dual,
    "moons": moons,
    "conditional": conditional,
    "released_protocol": released_protocol,
    "bare_neighbours": bare_neighbours,
    "portrait": portrait,
    "convergence": convergence,
    "cost": cost,
    "rate": rate,
    "regression": regression,
    "labelled": labelled,
    "joint": joint,
    "posterior": posterior,
    "mixed": mixed,
    "space": space,
    "stationarity": stationarity,
    "reach": reach,
    "arrival": arrival,
    "novelty": novelty,
    "anomaly": anomaly,
    "planted": planted,
    "update": update,
    "drift": drift,
}
