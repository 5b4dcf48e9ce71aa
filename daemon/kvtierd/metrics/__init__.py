"""Prometheus metrics: declared, filled from a snapshot of the cache, served."""

from kvtierd.metrics.declared import DECLARED, Declared, MetricKind
from kvtierd.metrics.families import families
from kvtierd.metrics.registry import Metrics
from kvtierd.metrics.server import MetricsServer

__all__ = ["DECLARED", "Declared", "MetricKind", "Metrics", "MetricsServer", "families"]
