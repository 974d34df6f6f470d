# SPDX-License-Identifier: Apache-2.0
"""Metrics of a job for Prometheus, over HTTP, from its events; no rank takes part in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from megatron_moevement.errors import UserError
from megatron_moevement.policy.outcome.metrics import Kind, Metric
from megatron_moevement.policy.outcome.standing import Standing
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.observation.event_tail import EventTail

PREFIX = "moevement_"


class JobCollector(Collector):
    """Gives the figures of a job; it reads on in its events when it is asked. Any thread asks."""

    def __init__(self, event_dir: Path) -> None:
        """Has read nothing."""
        self._tail = EventTail(event_dir)
        self._standing = Standing()
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Family]:
        """Returns all metrics that are known at this moment."""
        with self._lock:
            for _, record in self._tail.news():
                try:
                    self._standing.take(record)
                except (KeyError, TypeError, ValueError, AttributeError):
                    continue  # a damaged event is for those to refuse who account for it
            figures = list(self._standing.figures(time.time()))
        found: dict[Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric, value, label in figures:
            about = metric.value
            family = found.get(metric)
            if family is None:
                kind = GaugeMetricFamily if about.kind is Kind.GAUGE else CounterMetricFamily
                labels = [] if about.label is None else [about.label]
                family = found[metric] = kind(PREFIX + about.name, about.meaning, labels=labels)
            family.add_metric([] if about.label is None else [label], value)
        return found.values()


class _Silent(WSGIRequestHandler):
    """Writes no line for each request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base's name)
        """Writes nothing."""


class MetricsServer(Closing):
    """Serves the metrics of a job at one address.

    Raises:
        UserError: nothing can listen there.
    """

    def __init__(self, address: tuple[str, int], event_dir: Path) -> None:
        """Listens, and answers nothing before `serve`: no thread is started here."""
        registry = CollectorRegistry()
        registry.register(JobCollector(event_dir))
        try:
            self._server: WSGIServer = make_server(
                *address, make_wsgi_app(registry), ThreadingWSGIServer, _Silent
            )
        except (OSError, OverflowError) as error:
            place = f"{address[0]}:{address[1]}"
            raise UserError(f"--metrics-address {place}: can't listen there: {error}") from error
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def serve(self) -> None:
        """Begins to answer."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; closing twice is fine."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()
