"""Collects the values of one scrape, each family as it is declared."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from kvtierd.metrics.declared import BY_NAME, MetricKind


class Sheet:
    """Takes values by name, and returns families in the order in which they first came."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily | SummaryMetricFamily] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge or a counter; `labels` are the values of its declared labels, in order."""
        family = self._family(name)
        assert not isinstance(family, SummaryMetricFamily), name
        family.add_metric(labels, value)

    def summary(self, name: str, count: float, total: float, *labels: str) -> None:
        """Sets a summary: how often something was measured, and the sum of the measurements."""
        family = self._family(name)
        assert isinstance(family, SummaryMetricFamily), name
        family.add_metric(list(labels), int(count), total)

    def _family(self, name: str) -> GaugeMetricFamily | CounterMetricFamily | SummaryMetricFamily:
        family = self._families.get(name)
        if family is None:
            declared = BY_NAME[name]
            text, names = declared.text, list(declared.labels)
            match declared.kind:
                case MetricKind.GAUGE:
                    family = GaugeMetricFamily(name, text, labels=names)
                case MetricKind.COUNTER:
                    family = CounterMetricFamily(name, text, labels=names)
                case MetricKind.SUMMARY:
                    family = SummaryMetricFamily(name, text, labels=names)
                case MetricKind.HISTOGRAM:
                    raise AssertionError(f"{name} is observed, not set")
            self._families[name] = family
        return family

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())
