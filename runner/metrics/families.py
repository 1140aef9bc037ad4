"""Metric families for prometheus_client, all with vLLM's labels.

Promises   one sample for each set of labels, in the given order.
Does not   know the meaning of the numbers, or make text of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

OF_ALL = ("model_name", "engine")
"""The labels of each sample, as vLLM's. There is one engine, "0"."""

Labels = tuple[str, ...]
"""Values of the labels, in the order of their names."""


class Distribution:
    """How many values were at most each of ``bounds``, which grow."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        """``counts``: for each bound, values above the bound before; then values above all bounds."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1) if counts is None else list(counts)
        self.total = total

    def add(self, value: float, times: int = 1) -> None:
        """``value`` has come, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Distribution:
        """The distribution so far."""
        return Distribution(self.bounds, self.counts, self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, values up to it), the last one without a bound."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Families:
    """Metrics of the model ``model``. Each call adds one: ``values`` by the values of ``labels``, () without any."""

    def __init__(self, model: str) -> None:
        self._of_all = model, "0"
        self.made: list[Metric] = []

    def gauge(self, name: str, text: str, values: Mapping[Labels, float], *labels: str) -> None:
        """Goes up and down."""
        family = GaugeMetricFamily(name, text, labels=(*OF_ALL, *labels))
        for key, value in values.items():
            family.add_metric((*self._of_all, *key), value)
        self.made.append(family)

    def counter(self, name: str, text: str, values: Mapping[Labels, float], *labels: str) -> None:
        """Only rises; read as ``name`` with "_total" behind it."""
        family = CounterMetricFamily(name, text, labels=(*OF_ALL, *labels))
        for key, value in values.items():
            family.add_metric((*self._of_all, *key), value)
        self.made.append(family)

    def histogram(self, name: str, text: str, values: Mapping[Labels, Distribution], *labels: str) -> None:
        """Read as ``name`` with "_bucket", "_sum" and "_count" behind it."""
        family = HistogramMetricFamily(name, text, labels=(*OF_ALL, *labels))
        for key, of in values.items():
            family.add_metric((*self._of_all, *key), of.buckets(), of.total)
        self.made.append(family)
