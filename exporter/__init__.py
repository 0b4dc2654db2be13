"""Prometheus exporter for GPUs that knows both of a card's numbers: the workload's and the host's."""

__version__ = "0.1.0"
