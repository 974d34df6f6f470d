# SPDX-License-Identifier: Apache-2.0
"""The part of `moevement check` about W: what each would cost, and which one would be chosen."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from megatron_moevement.cli.bandwidth_flags import GB, add_bandwidth_flags
from megatron_moevement.errors import UserError
from megatron_moevement.policy.preflight.forecast import JobForecast, WindowOptions
from megatron_moevement.policy.preflight.window_forecast import (
    Rates,
    WindowForecast,
    forecast_windows,
    settled_choice,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that W is predicted by."""
    window = parser.add_argument_group(
        "window", "what W is predicted by; what is given here wins over what is measured"
    )
    add_bandwidth_flags(window, "as measured, or no limit")


UNKNOWN = (
    "predicted W: bandwidths are measured where the job's launcher starts this command as each of "
    "its processes; or give --bandwidth and --network-bandwidth"
)
"""What people read where no bandwidth is known."""


@dataclasses.dataclass(frozen=True)
class WindowPrediction:
    """What each W would cost in a job.

    Attributes:
        iteration_s: what an iteration takes; None where it is not given.
        options: what W would be chosen from.
        replicas: r.
        window: the W that the job begins with.
    """

    rates: Rates
    iteration_s: float | None
    options: WindowOptions
    replicas: int
    window: int

    @classmethod
    def of(
        cls, args: argparse.Namespace, forecast: JobForecast, measured: Rates | None
    ) -> WindowPrediction | None:
        """Returns the prediction for a job; None where no bandwidth is known.

        Args:
            args: the values of the flags.
            measured: None where nothing is.

        Raises:
            UserError: a bandwidth of the network is given, and none of the copy is known.
        """
        replicas = forecast.replicas[1]
        to_host = None if measured is None else measured.to_host_bytes_per_s
        to_holder = None if measured is None else measured.to_holder_bytes_per_s
        if args.bandwidth is not None:
            to_host = args.bandwidth * GB
        if args.network_bandwidth is not None and replicas:
            to_holder = args.network_bandwidth * GB / replicas  # copies share it
        if to_host is None:
            if args.network_bandwidth is not None:
                raise UserError("--network-bandwidth: give --bandwidth, too")
            return None
        rates = Rates(to_host, to_holder)
        window = forecast.schedule.window
        return cls(rates, args.iteration_time, forecast.windows(), replicas, window)

    @property
    def windows(self) -> tuple[WindowForecast, ...]:
        """What each W would cost, the smallest first."""
        return forecast_windows(self.options, self.rates, self.replicas)

    @property
    def chosen(self) -> int | None:
        """The W that a job comes to that chooses; None where an iteration's time is not given."""
        if self.iteration_s is None:
            return None
        return settled_choice(self.options, self.rates, self.replicas, self.iteration_s).window

    def _title(self) -> str:
        host = decimal(int(self.rates.to_host_bytes_per_s))
        to_holder, sent = self.rates.to_holder_bytes_per_s, ""
        if to_holder is not None and self.replicas:
            sent = f", and sends to each of {self.replicas} holders at {decimal(int(to_holder))}/s"
        return f"predicted W: the slowest rank copies and makes checksums at {host}/s{sent}"

    def _table(self) -> Table:
        """Returns a row for each W."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        stalls = [] if self.iteration_s is None else ["stall (s)"]
        for title in ("W", "largest slot", "hidden from (s)", *stalls, "replayed steps"):
            table.add_column(title, justify="right", no_wrap=True)
        for one in self.windows:
            times_s = [one.hiding_s]
            if self.iteration_s is not None:
                times_s.append(one.stall_s(self.iteration_s))
            table.add_row(
                str(one.window),
                decimal(one.slot_bytes),
                *(f"{time_s:.3g}" for time_s in times_s),
                str(one.replayed_steps),
            )
        return table

    def _verdict(self, iteration_s: float) -> str:
        waits = {one.window: _waits(one.stall_s(iteration_s)) for one in self.windows}
        chosen = settled_choice(self.options, self.rates, self.replicas, iteration_s).window
        verdict = (
            f"iterations of {iteration_s:g} s: --moevement-window auto would come to W = {chosen}"
            f"{waits[chosen]}"
        )
        if self.options.is_chosen or self.window == chosen:
            return verdict
        return f"{verdict}; this job keeps W = {self.window}{waits.get(self.window, '')}"

    def shown(self) -> list[RenderableType]:
        """Returns what people read."""
        if self.iteration_s is None:
            end = "give --iteration-time for the W that --moevement-window auto would come to"
        else:
            end = self._verdict(self.iteration_s)
        return [self._title(), self._table(), end]

    def document(self) -> dict[str, Any]:
        """Returns the prediction as JSON: bytes, seconds, bytes per second."""
        iteration_s = self.iteration_s
        return {
            "rates": dataclasses.asdict(self.rates),
            "iteration_s": iteration_s,
            "chosen": self.chosen,
            "windows": [
                {
                    **dataclasses.asdict(one),
                    "stall_s": None if iteration_s is None else one.stall_s(iteration_s),
                }
                for one in self.windows
            ],
        }


def _waits(stall_s: float) -> str:
    return f", which waits {stall_s:.3g} s in each" if stall_s else ", which hides its slots"
